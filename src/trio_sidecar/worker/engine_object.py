"""The object that Dynamo's runtime drives: its methods are called from Rust, as asyncio tasks on the host's loop.

The runtime fixes which methods exist and which of them are coroutines. It calls ``start`` once, then ``generate`` for
each request, ``abort`` when a client goes away, and ``cleanup`` when the worker has been withdrawn. It does not close
the generator of a request that was cancelled, but leaves it where it waits: so a request is released by ``abort``, not
by the generator's end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import structlog

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.errors import InvalidRequest, SidecarError
from trio_sidecar.requests.cancel import cancel_policy
from trio_sidecar.rl import unsupported
from trio_sidecar.worker.errors import to_dynamo

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from trio_sidecar.requests.session import Session
    from trio_sidecar.requests.sessions import Sessions
    from trio_sidecar.worker.binding import Binding, RequestContext
    from trio_sidecar.worker.management import Management
    from trio_sidecar.worker.metrics import WorkerMetrics

__all__ = ["EngineLife", "EngineObject"]

T = TypeVar("T")

HANDED_OVER = ("model", "token_ids", "prefill_result", "routing")
"""What of a decode request its engine needs to fetch what was handed over."""

log = structlog.get_logger("trio_sidecar.worker")


class EngineLife(Protocol):
    """The engine ring as Dynamo steers it; see :class:`trio_sidecar.worker.life.WorkerLife`."""

    async def aio_start(self) -> Any:
        """Open the engine; returns Dynamo's ``EngineConfig``."""
        ...

    async def aio_stop(self) -> None:
        """Drain the requests and close the engine."""
        ...


class PrometheusHook(Protocol):
    """Dynamo's way to show metrics of others."""

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Append what the callback returns to the answer of ``/metrics``."""
        ...


class EngineObject:
    """A worker's engine in Dynamo's terms.

    Args:
        binding: Dynamo's classes.
        life: Opens and closes the engine.
        sessions: The requests.
        mode: This worker's role.
        management: What is offered beside requests; nothing unless given.
        metrics: What Dynamo's system server shows beside its own metrics; nothing unless given.
    """

    def __init__(
        self,
        binding: Binding,
        life: EngineLife,
        sessions: Sessions,
        *,
        mode: DisaggregationMode = DisaggregationMode.AGGREGATED,
        management: Management | None = None,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self._binding = binding
        self._life = life
        self._sessions = sessions
        self._mode = mode
        self._management = management
        self._metrics = metrics
        # Clients may choose request ids, so two requests at once can share one.
        self._running: dict[str, list[tuple[RequestContext, Session]]] = {}

    # -- Life -------------------------------------------------------------------------------------------------------

    async def start(self, worker_id: int) -> Any:
        """Open the engine.

        Returns:
            Dynamo's ``EngineConfig``: what this worker registers as.
        """
        log.debug("engine_start_called", worker_id=worker_id)
        try:
            return await self._life.aio_start()
        except Exception as error:
            raise to_dynamo(self._binding, error) from error

    async def cleanup(self) -> None:
        """Let the accepted requests end within their budget, then close the engine; idempotent (R11.1)."""
        if self._management is not None:
            await self._management.aio_withdraw()
        await self._life.aio_stop()

    async def is_quiescent(self) -> bool:
        """Whether the engine is known to have nothing left to do for anybody; asked of a prefill worker as it ends.

        A prefill engine's blocks are read by its decode peers after its own requests have ended, and nobody here knows
        when that is over: so Dynamo waits its whole ``DYN_PREFILL_DRAIN_TIMEOUT_S`` before the cleanup (R11.14).
        """
        return self._mode is not DisaggregationMode.PREFILL and self._sessions.statistics().open == 0

    # -- Requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self, request: Mapping[str, object], context: RequestContext
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Answer one request: chunks up to exactly one terminal chunk, or one exception that Dynamo understands."""
        request_id = context.id()
        try:
            policy = cancel_policy(self._mode, context.notify_first_token)
            headers = context.trace_headers()
            session = self._sessions.open(request, request_id, policy=policy, headers=headers)
        except Exception as error:
            if isinstance(error, InvalidRequest):
                self._let_go(request, request_id)
            raise to_dynamo(self._binding, error, request_id=request_id) from error
        entry = (context, session)
        self._running.setdefault(request_id, []).append(entry)
        cancelled = self._follow(context, session)
        try:
            if context.is_stopped():
                session.cancel()
            while (chunk := await session.aio_next()) is not None:
                yield chunk
        except Exception as error:
            raise to_dynamo(self._binding, error, request_id=request_id) from error
        finally:
            if cancelled is not None:
                cancelled.cancel()
            session.close()
            self._forget(request_id, entry)

    def _let_go(self, request: Mapping[str, object], request_id: str) -> None:
        """A decode request was refused here: the engine fetches what was handed over all the same.

        Otherwise the prefill engine would hold the blocks until its own time is up (FR-008). So the engine is asked for
        one token of the bare prompt, which nobody gets.
        """
        if self._mode is not DisaggregationMode.DECODE or not request.get("prefill_result"):
            return
        bare = {name: request[name] for name in HANDED_OVER if name in request} | {"stop_conditions": {"max_tokens": 1}}
        try:
            self._sessions.let_go(bare, request_id, policy=cancel_policy(self._mode, _nothing))
        except SidecarError as error:
            log.warning("handoff_not_fetched", request_id=request_id, reason=str(error))
        else:
            log.info("handoff_fetched", request_id=request_id, why="the request that it was for was refused")

    def _follow(self, context: RequestContext, session: Session) -> Any:
        """Tell a decode session of a cancel as it happens, because Dynamo holds ``abort`` back until the first token.

        The session then holds the cancel back itself, but keeps what comes in the meantime from the client (R10.6), and
        takes a failure for a cancel (R10.10).

        Returns:
            The future that was made, for the caller to cancel; None in the other roles.
        """
        if self._mode is not DisaggregationMode.DECODE:
            return None
        cancelled = context.async_killed_or_stopped()
        cancelled.add_done_callback(lambda future: None if future.cancelled() else session.cancel())
        return cancelled

    async def abort(self, context: RequestContext) -> None:
        """The client of a request went away, or cancelled it."""
        request_id = context.id()
        entries = self._running.get(request_id, [])
        for entry in entries[:]:
            own_context, session = entry
            if len(entries) == 1 or own_context.is_stopped():
                session.cancel()
                self._forget(request_id, entry)

    def _forget(self, request_id: str, entry: tuple[RequestContext, Session]) -> None:
        entries = self._running.get(request_id, [])
        if entry in entries:
            entries.remove(entry)
        if not entries:
            self._running.pop(request_id, None)

    # -- Beside requests --------------------------------------------------------------------------------------------

    async def kv_event_sources(self) -> list[object]:
        """Sources of KV events for Dynamo to follow: none, because the worker follows them itself.

        Raises:
            Exception: They are not what they should be; the start fails.
        """
        if self._management is not None:
            await self._aio_managed(self._management.aio_check_kv_sources())
        return []

    async def on_endpoint_ready(self, endpoint: object) -> None:
        """The endpoint exists, but is not registered yet."""
        if self._management is not None:
            await self._aio_managed(self._management.aio_endpoint_ready(endpoint))

    def supported_controls(self) -> list[str]:
        """Names of controls (called from another thread)."""
        return [] if self._management is None else self._management.controls()

    def supported_updates(self) -> list[str]:
        """Names of updates (called from another thread)."""
        return [] if self._management is None else self._management.updates()

    async def engine_control(self, name: str, body: object) -> dict[str, object]:
        """Run a control."""
        if self._management is None:
            return unsupported("control", name)
        return await self._aio_managed(self._management.aio_control(name, body))

    async def engine_update(self, name: str, body: object) -> dict[str, object]:
        """Run an update."""
        if self._management is None:
            return unsupported("update", name)
        return await self._aio_managed(self._management.aio_update(name, body))

    async def health_check_payload(self) -> Mapping[str, object] | None:
        """Request that Dynamo sends to see whether we answer: none, so it sends none.

        It is also the last thing that Dynamo asks for before it registers the instance, after it has written the base
        model's record.
        """
        if self._management is not None:
            await self._aio_managed(self._management.aio_before_serving())
        return None

    async def _aio_managed(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except InvalidRequest as error:
            # Whoever reads this gets Dynamo's name of the kind before it.
            raise self._binding.errors[error.kind](error.reason) from error
        except Exception as error:
            raise to_dynamo(self._binding, error) from error

    async def register_prometheus(self, metrics: PrometheusHook) -> None:
        """Dynamo's system server shows what the callback returns, which it calls on a thread of its own."""
        if self._metrics is not None:
            metrics.register_prometheus_expfmt_callback(self._metrics.text)

    # -- What this worker does not offer ----------------------------------------------------------------------------

    def component_metrics_dp_ranks(self) -> list[int]:
        """Ranks that publish load snapshots: none."""
        return []

    def attach_snapshot_publisher(self, publisher: object) -> None:
        """Where load snapshots go: nowhere."""

    def logits_processor_spec(self) -> object:
        """Logits processors: none; they would need the engine in this process."""
        return None


def _nothing() -> None:
    """Dynamo waits for no first token of a request that it does not know."""
