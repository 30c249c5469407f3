"""The rings of a service: engine, handlers, acceptor; and how a process is asked to end.

Outer rings outlive inner ones, so shutdown is nesting plus one deadline::

    async with open_stop_signals() as stop:                     # the host is outside
        async with open_engine() as engine:                     # engine ring
            async with open_handler_ring(drain_secs) as ring:   # handler ring: accepted requests
                async with open_acceptor_ring(stop, …) as acceptor:
                    await acceptor.start(serve, engine, ring.nursery)

A stop leaves the block from the inside: the acceptor withdraws, goes on taking what is already on its way for a grace
period, and ends; the handlers then have the drain budget; the engine goes last.
"""

from __future__ import annotations

import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from trio_sidecar.bridge import open_signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trio_sidecar.bridge import SignalReceiver

__all__ = ["HandlerRing", "StopRequest", "open_acceptor_ring", "open_handler_ring", "open_stop_signals"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = structlog.get_logger("trio_sidecar.lifecycle")


class StopRequest:
    """The wish that this service end: made once and never forgotten, whatever the service is doing (FR-051)."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self.reason = ""

    def __repr__(self) -> str:
        """Says whether it was made, and why."""
        return f"<StopRequest {self.reason or 'not requested'}>"

    @property
    def requested(self) -> bool:
        """Whether it has been made."""
        return self._event.is_set()

    def request(self, reason: str) -> bool:
        """Ask the service to end; a second request changes nothing (FR-050).

        Returns:
            Whether this was the first.
        """
        if self.requested:
            return False
        self.reason = reason
        self._event.set()
        return True

    async def wait(self) -> None:
        """Wait until it is made."""
        await self._event.wait()


@asynccontextmanager
async def open_stop_signals(*, process_ends_after: bool = False) -> AsyncIterator[StopRequest]:
    """Turn the first SIGTERM or SIGINT into a stop request; later ones are logged and change nothing.

    The handlers stay in place for the whole block. In a Dynamo worker that matters: Dynamo's runtime adds its own
    handlers behind ours when it starts, and replacing a handler later would cut it off.

    Args:
        process_ends_after: Ignore both signals after the block, if a stop was requested: what is left of the process's
            life is short, and a signal that comes again must not turn a clean exit into a killed one.
    """
    stop = StopRequest()
    if process_ends_after:
        earlier = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
        for signum in STOP_SIGNALS:  # what open_signals puts back at its end
            signal.signal(signum, signal.SIG_IGN)
    with open_signals(*STOP_SIGNALS) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_signals, signals, stop)
            try:
                yield stop
            finally:
                nursery.cancel_scope.cancel()
    if process_ends_after and not stop.requested:
        for signum, handler in earlier.items():
            signal.signal(signum, handler)


async def _watch_signals(signals: SignalReceiver, stop: StopRequest) -> None:
    async for signum in signals:
        name = signal.Signals(signum).name
        if stop.request(name):
            log.info("stop_requested", reason=name)
        else:
            log.info("stop_already_requested", reason=name, first=stop.reason)


@attrs.define(eq=False)
class HandlerRing:
    """The tasks of accepted requests.

    Attributes:
        nursery: Where they run; a task that raises would cancel its neighbours, so none may.
        cut: Whether the drain budget ended before the last of them; known after the ring has closed.
    """

    nursery: trio.Nursery
    cut: bool = False

    @property
    def open(self) -> int:
        """How many requests are running."""
        return len(self.nursery.child_tasks)


@asynccontextmanager
async def open_handler_ring(drain_secs: float) -> AsyncIterator[HandlerRing]:
    """Open the ring of accepted requests.

    Leaving the block waits for all of them, but cancels those that are still running that many seconds later. Leaving
    it with an error cancels them at once.
    """
    async with trio.open_nursery() as nursery:
        ring = HandlerRing(nursery)
        yield ring
        if ring.open:
            log.info("drain_started", open=ring.open, budget_secs=drain_secs)
            nursery.cancel_scope.deadline = trio.current_time() + drain_secs
    ring.cut = nursery.cancel_scope.cancel_called
    if ring.cut:
        log.warning("drain_budget_used_up", budget_secs=drain_secs)


@asynccontextmanager
async def open_acceptor_ring(
    stop: StopRequest,
    *,
    grace_secs: float = 0.0,
    withdraw: Callable[[], Awaitable[object]] | None = None,
) -> AsyncIterator[trio.Nursery]:
    """Open the ring of whatever takes new requests: a listener, a registration.

    When the stop is requested, ``withdraw`` is awaited, so that peers stop sending; requests that are already on their
    way are taken for the grace period; then the ring is cancelled. The ring also ends when all in it has ended.

    Args:
        stop: Ends the ring.
        grace_secs: Seconds between the withdrawal and the end.
        withdraw: Tells the world not to send more; may be slow, but must have a time limit of its own.
    """

    async def end_on_stop() -> None:
        await stop.wait()
        if withdraw is not None:
            await withdraw()
        await trio.sleep(grace_secs)
        acceptors.cancel_scope.cancel()

    async with trio.open_nursery() as watcher:
        async with trio.open_nursery() as acceptors:
            watcher.start_soon(end_on_stop)
            yield acceptors
        watcher.cancel_scope.cancel()
