"""The mock engine: deterministic, no GPU, no torch; a real engine behind the contract (spec 16).

Tokens are made when they are read, not when they are due, so a request costs no memory for what nobody reads and needs
no task of its own. The pace is an absolute schedule: token *n* is due ``ttft + n * itl`` after the request began to
run, however late the earlier ones were read, so the pace does not drift and a stalled reader catches up in one call.
"""

from __future__ import annotations

import heapq
import itertools
import uuid
from collections import defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self, TypeVar

import attrs
import betterproto2
import structlog

from trio_sidecar.bridge import aio_checkpoint, aio_now
from trio_sidecar.bridge.alarm import AioAlarm
from trio_sidecar.engines.mock_facts import MockFacts
from trio_sidecar.engines.mock_output import MockOutput
from trio_sidecar.engines.mock_request import accept
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import (
    AbortRequest,
    AbortResponse,
    GenerateRequest,
    GenerateResponse,
    GetKvEventSourcesRequest,
    GetKvEventSourcesResponse,
    GetModelInfoRequest,
    GetServerInfoRequest,
    HealthCheckResponseServingStatus,
)
from trio_sidecar.wire.methods import CONTROL, INFERENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from types import TracebackType

    from trio_sidecar.config import MockSettings
    from trio_sidecar.wire.methods import Method

__all__ = ["MockEngine", "MockStatistics", "open_mock"]

Req = TypeVar("Req", bound=betterproto2.Message)
Resp = TypeVar("Resp", bound=betterproto2.Message)

MAX_ANSWERS_PER_RECEIVE = 64
"""How many answers one receive returns at most, so that a flood shares the loop."""

TIMER_SLACK_SECS = 0.001
"""uvloop's clock counts milliseconds, and a timer may fire half of one early; the next token then counts as due."""

SERVING_NAMES = ("", INFERENCE, CONTROL)

log = structlog.get_logger("trio_sidecar.engines.mock")


@attrs.frozen(slots=True, kw_only=True)
class MockStatistics:
    """A snapshot.

    Attributes:
        open: Accepted requests that are not released; the sum of the next two.
        running: Requests that produce tokens.
        waiting: Requests that wait for one of ``max_num_seqs`` places.
        accepted: Requests accepted since the start.
        refused: Requests refused since the start.
        aborted: Streams ended by Abort since the start.
    """

    open: int
    running: int
    waiting: int
    accepted: int
    refused: int
    aborted: int


@asynccontextmanager
async def open_mock(settings: MockSettings) -> AsyncIterator[MockEngine]:
    """Open a mock engine (Trio-flavoured); leaving fails the streams that are still open as UNAVAILABLE.

    Raises:
        OSError: The shipped model directory is incomplete.
    """
    engine = MockEngine(MockFacts.resolve(settings))
    log.info(
        "mock_engine_opened",
        model=engine.facts.model_id,
        served_model_name=engine.facts.served_model_name,
        mode=settings.disaggregation_mode.value,
        reply=settings.reply.value,
    )
    if settings.zmq_kv_events_port is not None:
        log.warning("kv_events_not_published", reason="the mock engine has no publisher yet, so it lists no source")
    try:
        yield engine
    finally:
        engine.close()


class MockEngine:
    """Implements :class:`~trio_sidecar.engines.contract.Engine`.

    Attributes:
        facts: What it claims to be.
    """

    def __init__(self, facts: MockFacts) -> None:
        self.facts = facts
        self._health = HealthCheckResponseServingStatus.SERVING
        self._streams: set[MockStream] = set()
        self._by_request_id: defaultdict[str, set[MockStream]] = defaultdict(set)
        self._running: set[MockStream] = set()
        self._waiting: list[tuple[int, int, MockStream]] = []
        self._arrivals = itertools.count()
        self._accepted = 0
        self._refused = 0
        self._aborted = 0
        self._closed = False

    def statistics(self) -> MockStatistics:
        """A snapshot, for tests and for whoever looks for leaks."""
        return MockStatistics(
            open=len(self._streams),
            running=len(self._running),
            waiting=len(self._streams) - len(self._running),
            accepted=self._accepted,
            refused=self._refused,
            aborted=self._aborted,
        )

    def set_health(self, status: HealthCheckResponseServingStatus) -> None:
        """Pretend to be healthy or not; nothing else changes."""
        self._health = status

    def close(self) -> None:
        """Fail what is open, and refuse what comes."""
        self._closed = True
        self._health = HealthCheckResponseServingStatus.NOT_SERVING
        for stream in tuple(self._streams):
            stream.fail(RpcError(StatusCode.UNAVAILABLE, "the mock engine is closed"))

    def aio_generate(self, request: GenerateRequest, metadata: Mapping[str, str]) -> MockStream:
        """Open one generation; see the contract."""
        return MockStream(self, request, metadata)

    async def aio_call(self, method: Method[Req, Resp], request: Req) -> Resp:
        """Make one call of ``vllm.Control``; see the contract."""
        answer: betterproto2.Message
        match request:
            case GetModelInfoRequest():
                answer = self.facts.model_info()
            case GetServerInfoRequest():
                answer = self.facts.server_info()
            case AbortRequest():
                self._abort(request.request_ids)
                answer = AbortResponse()
            case GetKvEventSourcesRequest():
                answer = GetKvEventSourcesResponse()
            case _:
                reason = f"{method.name} is not supported by the mock engine"
                raise RpcError(StatusCode.UNIMPLEMENTED, reason, rpc=method.name)
        assert isinstance(answer, method.response)  # noqa: S101 - ties the table above to the method's types
        return answer

    async def aio_check_health(self, service: str) -> HealthCheckResponseServingStatus:
        """The health of one service; see the contract."""
        if service not in SERVING_NAMES:
            raise RpcError(StatusCode.NOT_FOUND, f"unknown service {service!r}", rpc="Check")
        return self._health

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            # Not subscripted: a defaultdict would remember every id that was ever asked for.
            for stream in tuple(self._by_request_id.get(request_id, ())):
                self._aborted += stream.abort()

    def admit(self, stream: MockStream) -> MockOutput:
        """Check a request and take it in (for the stream only).

        Raises:
            RpcError: It is refused.
        """
        try:
            job = accept(stream.request, stream.metadata, self.facts)
            if self._closed:
                raise RpcError(StatusCode.UNAVAILABLE, "the mock engine is closed")
            if len(self._streams) >= self.facts.max_concurrent_requests:
                reason = f"all {self.facts.max_concurrent_requests} concurrent requests are taken"
                raise RpcError(StatusCode.RESOURCE_EXHAUSTED, reason)
        except RpcError:
            self._refused += 1
            raise
        if not job.request_id:
            job = attrs.evolve(job, request_id=str(uuid.uuid4()))
        stream.request_id = job.request_id
        self._accepted += 1
        self._streams.add(stream)
        self._by_request_id[job.request_id].add(stream)
        heapq.heappush(self._waiting, (job.priority, next(self._arrivals), stream))
        log.debug("mock_request_started", request_id=job.request_id, open=len(self._streams))
        self._start_waiting()
        return MockOutput(job, self.facts)

    def release(self, stream: MockStream) -> None:
        """Forget a stream and let the next one run (for the stream only)."""
        if stream in self._streams:
            self._streams.remove(stream)
            log.debug(
                "mock_request_ended", request_id=stream.request_id, reason=stream.end_reason, open=len(self._streams)
            )
        self._running.discard(stream)
        same_id = self._by_request_id.get(stream.request_id)
        if same_id is not None:
            same_id.discard(stream)
            if not same_id:
                del self._by_request_id[stream.request_id]
        if len(self._waiting) > 2 * self.facts.max_concurrent_requests:
            # Those who left while they waited are still in the heap.
            self._waiting = [entry for entry in self._waiting if entry[2] in self._streams]
            heapq.heapify(self._waiting)
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Give free places to those who wait, the lowest priority number first."""
        while self._waiting and len(self._running) < self.facts.max_num_seqs:
            stream = heapq.heappop(self._waiting)[2]
            if stream in self._streams:
                self._running.add(stream)
                stream.start(aio_now())


class MockStream:
    """One generation of the mock engine: the async context manager and the stream in one.

    Attributes:
        request_id: The caller's, or the one the engine made, once entered.
    """

    def __init__(self, engine: MockEngine, request: GenerateRequest, metadata: Mapping[str, str]) -> None:
        self.request = request
        self.metadata = metadata
        self.request_id = request.request_id
        self._engine = engine
        self._alarm = AioAlarm()
        self._output: MockOutput | None = None
        self._first_due: float | None = None
        self._prompt_info_sent = False
        self._aborted = False
        self._failure: RpcError | None = None

    async def __aenter__(self) -> Self:
        self._output = self._engine.admit(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.release(self)

    @property
    def end_reason(self) -> str:
        """Why it has ended, or ``dropped`` if it is left before its end."""
        if self._failure is not None:
            return "failed"
        if self._aborted:
            return "aborted"
        return "finished" if self._output is not None and self._output.is_finished() else "dropped"

    async def aio_receive(self) -> Sequence[GenerateResponse]:
        """Wait for answers, then take all that are due; see the contract."""
        output = self._entered()
        if output.is_finished():
            return ()
        if self._due(output) > 0:
            # Without this a reader that is always served at once would keep the loop to itself.
            await aio_checkpoint()
        while True:
            if self._failure is not None:
                raise self._failure
            if self._aborted:
                return self._last_words(output)
            due = self._due(output)
            if due > 0:
                break
            await self._alarm.aio_wait_until(self._next_due(output))
        answers = [] if self._prompt_info_sent else [self._take_prompt_info(output)]
        for _ in range(min(due, MAX_ANSWERS_PER_RECEIVE)):
            answers.append(output.step())
            if output.is_finished():
                self._done()
                break
        return answers

    def start(self, now: float) -> None:
        """Begin to run: the clock of this stream starts (for the engine only)."""
        self._first_due = now + self._engine.facts.ttft_secs
        self._alarm.ring()

    def abort(self) -> bool:
        """End with an ABORTED answer; whether that changed anything (for the engine only)."""
        if self._aborted or (self._output is not None and self._output.is_finished()):
            return False
        self._aborted = True
        self._done()
        self._alarm.ring()
        return True

    def fail(self, error: RpcError) -> None:
        """End with an error (for the engine only)."""
        if self._failure is None:
            self._failure = error
            self._done()
            self._alarm.ring()

    def _due(self, output: MockOutput) -> int:
        """How many tokens are due and not made."""
        if self._first_due is None:
            return 0
        late = aio_now() - self._first_due + TIMER_SLACK_SECS
        interval = self._engine.facts.itl_secs
        if late < 0.0:
            return 0
        if interval <= 0.0:
            return MAX_ANSWERS_PER_RECEIVE
        return int(late / interval) + 1 - output.num_tokens

    def _next_due(self, output: MockOutput) -> float | None:
        """When the next token is due; None while the stream waits for its turn."""
        if self._first_due is None:
            return None
        return self._first_due + output.num_tokens * self._engine.facts.itl_secs

    def _take_prompt_info(self, output: MockOutput) -> GenerateResponse:
        self._prompt_info_sent = True
        return output.prompt_info()

    def _last_words(self, output: MockOutput) -> list[GenerateResponse]:
        answers = [] if self._prompt_info_sent else [self._take_prompt_info(output)]
        answers.append(output.aborted())
        return answers

    def _done(self) -> None:
        """The work has ended; the place is free even before the reader leaves."""
        self._engine.release(self)

    def _entered(self) -> MockOutput:
        if self._output is None:
            reason = "the stream was not entered"
            raise RuntimeError(reason)
        return self._output
