"""All requests of a worker: the handler ring that their lives run in, and its drain."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import structlog
import trio

from trio_sidecar.bridge import aio_now, run_aio
from trio_sidecar.errors import EngineShutdown, InvalidRequest, Overloaded, SidecarError, StatusCode
from trio_sidecar.metrics import RequestMeter
from trio_sidecar.requests.buffer import BufferLimit, OutputBuffer
from trio_sidecar.requests.contract import CancelAtOnce
from trio_sidecar.requests.limits import Hearing, SilenceLimits
from trio_sidecar.requests.session import EndReason, Session
from trio_sidecar.tracing import NO_TRACES, Activity, trace_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from trio_sidecar.convert.response import Chunk
    from trio_sidecar.deadline import Deadline
    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.requests.contract import CancelPolicy, Converted, Responder
    from trio_sidecar.tracing import RequestTrace, Tracer

__all__ = ["Sessions", "SessionsStatistics"]

BROKEN = "the engine is gone, and the worker ends"

log = structlog.get_logger("trio_sidecar.requests")


@attrs.frozen(kw_only=True, slots=True)
class SessionsStatistics:
    """How many requests there are and were.

    Attributes:
        open: Accepted and not yet ended.
        peak_open: The most that ever were open at once.
        refused: How many were refused because too many were open.
        ended: How many ended, by reason (the values of :class:`EndReason`).
    """

    open: int
    peak_open: int
    refused: int
    ended: Mapping[str, int]


@attrs.frozen(slots=True)
class _Ring:
    """What a started worker serves with."""

    nursery: trio.Nursery
    engine: Engine
    convert: Callable[[Mapping[str, object], str], Converted]


def _refusal(error: Exception) -> str:
    """The reason, for metrics."""
    match error:
        case InvalidRequest():
            return "invalid"
        case Overloaded():
            return "overloaded"
        case EngineShutdown():
            return "unavailable"
        case _:
            return "internal"


@attrs.define(eq=False, kw_only=True)
class Sessions:
    """The requests of one worker.

    Make one early, enter :meth:`serving` when the engine is there, and :meth:`open` a session for each request. Before
    ``serving`` a request is refused; after it, one gets a cancelled terminal (R11.2, R11.4).

    Attributes:
        responder: Makes the converter of one request's answers from the converted request's ``response``.
        merge: Joins adjacent chunks, oldest first.
        coalesce: Whether to merge; otherwise there is one chunk per answer of the engine.
        limit: Bound of each request's buffer.
        role: The disaggregation mode, for logs and traces.
        silence: How long the engine may be silent towards a request.
        max_open: Requests beyond this are refused; 0 is no limit.
        tracer: Makes the spans of requests and of the drain.
        meter: What is counted of them.
    """

    responder: Callable[[Any], Responder]
    merge: Callable[..., Chunk]
    coalesce: bool = True
    limit: BufferLimit = attrs.field(factory=BufferLimit)
    role: str = "aggregated"
    silence: SilenceLimits = attrs.field(factory=SilenceLimits)
    max_open: int = 0
    tracer: Tracer = NO_TRACES
    meter: RequestMeter = attrs.field(factory=RequestMeter)
    _ring: _Ring | None = attrs.field(default=None, init=False)
    _closed: bool = attrs.field(default=False, init=False)
    _broken: bool = attrs.field(default=False, init=False)
    _suspended: str = attrs.field(default="", init=False)
    _open: set[Session] = attrs.field(factory=set, init=False)
    _hearing: Hearing = attrs.field(factory=Hearing, init=False)
    _idle: trio.Event | None = attrs.field(default=None, init=False)
    _peak: int = attrs.field(default=0, init=False)
    _refused: int = attrs.field(default=0, init=False)
    _ended: dict[str, int] = attrs.field(factory=dict, init=False)

    @asynccontextmanager
    async def serving(
        self, engine: Engine, convert: Callable[[Mapping[str, object], str], Converted]
    ) -> AsyncIterator[None]:
        """Accept requests while the block lasts; those still open at its end are cancelled (R11.3).

        Where the block fails, or is cancelled, the engine is gone: its requests, and those that still come, end with an
        error, since clients take a cancelled terminal for a normal end (FR-018).

        Drain first, inside the block. Leaving returns when every engine stream has been released.

        Args:
            engine: Answers the requests.
            convert: Converts a request dict, given the request id too.

        Raises:
            EngineShutdown: It was started before; make a new object for another life.
        """
        if self._ring is not None:
            reason = "the worker was started already"
            raise EngineShutdown(reason)
        async with trio.open_nursery() as nursery:
            self._ring = _Ring(nursery, engine, convert)
            try:
                yield
            except BaseException:
                self._broken = True
                for session in tuple(self._open):
                    session.shut_down(BROKEN)
                raise
            finally:
                self._closed = True
                self.cancel_all()

    def open(
        self,
        request: Mapping[str, object],
        request_id: str,
        *,
        policy: CancelPolicy = CancelAtOnce(),  # noqa: B008
        headers: Mapping[str, object] | None = None,
    ) -> Session:
        """Accept a request (synchronous, from either flavour).

        The caller takes chunks until None or an error, or closes the session; otherwise it stays open.

        Args:
            request: What Dynamo handed over.
            request_id: The caller's id.
            policy: When a cancel may act.
            headers: Those that came with it; a trace context in them goes on to the engine.

        Raises:
            EngineShutdown: :meth:`serving` was not entered yet, or the sessions are suspended.
            InvalidRequest: The request cannot be expressed in the contract; raised before any cancel counts (R10.1).
            Overloaded: As many requests as are allowed are open.
        """
        trace = trace_request(self.tracer, headers, self.role)
        try:
            return self._open_traced(request, request_id, policy, trace)
        except Exception as error:
            status = error.status if isinstance(error, SidecarError) else StatusCode.INTERNAL
            self.meter.refused[_refusal(error)] += 1
            trace.end("refused", failure=status.name)
            raise

    def _open_traced(
        self, request: Mapping[str, object], request_id: str, policy: CancelPolicy, trace: RequestTrace
    ) -> Session:
        ring = self._ring
        if ring is None:
            reason = "the worker has not started"
            raise EngineShutdown(reason)
        if self._broken:
            raise EngineShutdown(BROKEN)
        if self._suspended and not self._closed:
            reason = f"recovering: {self._suspended}"
            raise EngineShutdown(reason)
        if self.max_open and len(self._open) >= self.max_open:
            self._refused += 1
            raise Overloaded(self.max_open)
        converted = ring.convert(request, request_id)
        buffer = OutputBuffer(self.limit, merge=self.merge if self.coalesce else None)
        session = Session(
            request_id,
            converted,
            self.responder(converted.response),
            buffer,
            policy,
            silence=self.silence,
            hearing=self._hearing,
            trace=trace,
            meter=self.meter,
        )
        if self._closed:
            session.stop()
            self._note_end(session)
            return session
        self._open.add(session)
        self._peak = max(self._peak, len(self._open))
        ring.nursery.start_soon(self._run, session, ring.engine)
        return session

    def let_go(self, request: Mapping[str, object], request_id: str, *, policy: CancelPolicy) -> None:
        """Send a request for the sake of what the engine then releases; its answer is for nobody (synchronous).

        Raises:
            SidecarError: As :meth:`open`.
        """
        session = self.open(request, request_id, policy=policy)
        session.cancel()
        assert self._ring is not None  # noqa: S101 - or it could not be opened
        self._ring.nursery.start_soon(run_aio, _aio_read_out, session)

    async def _run(self, session: Session, engine: Engine) -> None:
        try:
            await session.life(engine)
        finally:
            self._open.discard(session)
            session.log_end(self.role)
            self._note_end(session)
            if self._idle is not None and not self._open:
                self._idle.set()

    def _note_end(self, session: Session) -> None:
        session.end_trace()
        reason = (session.reason or EndReason.FINISHED).value
        self._ended[reason] = self._ended.get(reason, 0) + 1
        self.meter.ended[reason] += 1
        self.meter.duration.observe(session.age)

    @property
    def closed(self) -> bool:
        """Whether :meth:`serving` is over."""
        return self._closed

    def suspend(self, reason: str) -> None:
        """Refuse new requests, with the reason, until :meth:`resume`; open ones go on (R15.3)."""
        self._suspended = reason

    def resume(self) -> None:
        """Take requests again."""
        self._suspended = ""

    def unheard(self, seconds: float) -> bool:
        """Whether nobody has heard from the engine for so long, though somebody waits or has run into a limit since."""
        if self._hearing.gave_up:
            return True
        waits = [since for session in self._open if (since := session.waits_since) is not None]
        return bool(waits) and aio_now() - max(self._hearing.heard_at, min(waits)) >= seconds

    def note_heard(self) -> None:
        """The engine has answered somebody who is no request."""
        self._hearing.note(aio_now())

    def cancel_all(self) -> None:
        """Stop every open request: each gets a cancelled terminal with the tokens so far (R11.3)."""
        for session in tuple(self._open):
            session.stop()

    async def drain(self, deadline: Deadline) -> int:
        """Wait until no request is open; end those that outlive the deadline with an EngineShutdown error.

        Requests may still arrive meanwhile, routed before the worker was withdrawn, and have the same deadline.

        Returns:
            How many were ended.
        """
        with Activity(self.tracer, "drain", requests=len(self._open)) as activity:
            with deadline.scope():
                while self._open:
                    self._idle = trio.Event()
                    await self._idle.wait()
            late = tuple(self._open)
            activity.results["cut"] = len(late)
        for session in late:
            session.shut_down("the worker is draining and the request outlived its budget")
        if late:
            log.warning("drain_deadline_passed", requests=len(late))
        return len(late)

    def statistics(self) -> SessionsStatistics:
        """How many requests there are and were."""
        return SessionsStatistics(
            open=len(self._open), peak_open=self._peak, refused=self._refused, ended=dict(self._ended)
        )


async def _aio_read_out(session: Session) -> None:
    try:
        while await session.aio_next() is not None:
            pass
    except SidecarError as error:
        log.warning("not_let_go", request_id=session.request_id, reason=str(error))
