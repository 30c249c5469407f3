"""The engine ring of a worker: opened when Dynamo starts the engine, closed when it cleans up.

Dynamo's calls only steer; what is long-lived is a Trio task in a nursery that the worker's main function owns. From the
inside out, a shutdown is: Dynamo withdraws the worker, waits its grace period and calls ``cleanup``; the accepted
requests have the drain budget; the sessions close; the engine closes; ``cleanup`` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import structlog
import trio

from trio_sidecar.bridge import AioEvent, aio_run_trio
from trio_sidecar.deadline import Deadline
from trio_sidecar.errors import EngineShutdown, SidecarError, cause_chain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.lifecycle import StopRequest
    from trio_sidecar.requests.contract import Converted
    from trio_sidecar.requests.sessions import Sessions

__all__ = ["Started", "WorkerLife"]

log = structlog.get_logger("trio_sidecar.worker")


@attrs.frozen(slots=True, kw_only=True)
class Started:
    """What starting the engine has brought to light.

    Attributes:
        config: Dynamo's ``EngineConfig``.
        convert: Converts a request dict, given the request id too.
        engine: The engine for requests, if it is another than the one that was opened.
        watch: Runs while the worker serves; an error of its ends the worker.
    """

    config: Any
    convert: Callable[[Mapping[str, object], str], Converted]
    engine: Engine | None = None
    watch: Callable[[], Awaitable[None]] | None = None


@attrs.define(eq=False, kw_only=True)
class WorkerLife:
    """The engine ring as Dynamo steers it.

    Attributes:
        nursery: Where the ring runs.
        stop: Ends the start-up of the engine, but not the engine once it serves: that is Dynamo's to end.
        sessions: The requests.
        open_engine: Opens the engine.
        start_up: Waits for it and finds out what it is.
        drain_secs: What accepted requests have to end, from ``cleanup`` on.
        failure: Why the ring failed; None if it did not.
    """

    nursery: trio.Nursery
    stop: StopRequest
    sessions: Sessions
    open_engine: Callable[[], AbstractAsyncContextManager[Engine]]
    start_up: Callable[[Engine], Awaitable[Started]]
    drain_secs: float
    failure: Exception | None = attrs.field(default=None, init=False)
    _start_called: bool = attrs.field(default=False, init=False)
    _serving: bool = attrs.field(default=False, init=False)
    _close_wanted: trio.Event = attrs.field(factory=trio.Event, init=False)
    _closed: AioEvent = attrs.field(factory=AioEvent, init=False)

    async def aio_start(self) -> Any:
        """Open the engine and its ring.

        Returns:
            Dynamo's ``EngineConfig``.

        Raises:
            EngineShutdown: It was started before (R5.11), or a stop was requested meanwhile.
            SidecarError: The engine could not be started.
        """
        if self._start_called:
            reason = "the worker was already started"
            raise EngineShutdown(reason)
        self._start_called = True
        try:
            return await aio_run_trio(self.nursery, self.nursery.start, self._hold)
        except RuntimeError:
            self._closed.set()  # where the nursery has gone, no task began that would say so at its end
            raise

    async def aio_stop(self) -> None:
        """Drain the requests and close the engine; returns when that is done, at once if nothing was started."""
        self._close_wanted.set()
        if self._start_called:
            await self._closed.aio_wait()

    async def _hold(  # noqa: ASYNC114 - started in one place
        self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED
    ) -> None:
        failure: SidecarError | None = None
        try:
            with self.stop.cancelling() as start_up:
                async with self.open_engine() as engine:
                    started = await self.start_up(engine)
                    async with self.sessions.serving(started.engine or engine, started.convert):
                        self.stop.spare(start_up)
                        await trio.lowlevel.checkpoint_if_cancelled()  # by a stop that came just before
                        self._serving = True
                        task_status.started(started.config)
                        failure = await self._serve(started.watch)
                        await self._drain(0.0 if failure else self.drain_secs)
            if start_up.cancelled_caught:
                reason = f"asked to stop ({self.stop.reason}) before the engine had started"
                raise EngineShutdown(reason)
            if failure is not None:
                raise failure  # here, outside the nurseries, so not in a group
        except Exception as error:
            self.failure = error
            if not self._serving:
                raise  # nursery.start hands it to whoever called start
            expected = isinstance(error, SidecarError)
            log.error("engine_ring_failed", reason=cause_chain(error), exc_info=None if expected else error)
            self.nursery.cancel_scope.cancel()
        finally:
            self._closed.set()

    async def _serve(self, watch: Callable[[], Awaitable[None]] | None) -> SidecarError | None:
        """Until Dynamo cleans up, or the watch over the engine fails.

        Returns:
            Why it has failed; the requests that are open then end with an error, not with a success.
        """
        failure: SidecarError | None = None

        async def guarded(watch: Callable[[], Awaitable[None]]) -> None:
            nonlocal failure
            try:
                await watch()
            except SidecarError as error:
                failure = error
                self._close_wanted.set()

        async with trio.open_nursery() as upkeep:
            if watch is not None:
                upkeep.start_soon(guarded, watch)
            await self._close_wanted.wait()
            upkeep.cancel_scope.cancel()
        return failure

    async def _drain(self, seconds: float) -> None:
        requests = self.sessions.statistics().open
        log.info("worker_draining", requests=requests, budget_secs=seconds)
        cut = await self.sessions.drain(Deadline.after(seconds))
        log.info("worker_drained", requests=requests, cut=cut)
