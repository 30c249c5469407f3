"""The mock engine: deterministic, no GPU, no torch; a real engine behind the contract (spec 16)."""

from __future__ import annotations

import heapq
import itertools
import uuid
from collections import defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import attrs
import betterproto2
import structlog

from trio_sidecar.bridge import aio_now
from trio_sidecar.engines.mock_facts import MockFacts
from trio_sidecar.engines.mock_output import MockOutput
from trio_sidecar.engines.mock_request import accept
from trio_sidecar.engines.mock_stream import MockStream
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import (
    AbortRequest,
    AbortResponse,
    GenerateRequest,
    GetKvEventSourcesRequest,
    GetKvEventSourcesResponse,
    GetModelInfoRequest,
    GetServerInfoRequest,
    HealthCheckResponseServingStatus,
)
from trio_sidecar.wire.methods import CONTROL, INFERENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from trio_sidecar.config import MockSettings
    from trio_sidecar.wire.methods import Method

__all__ = ["MockEngine", "MockStatistics", "open_mock"]

Req = TypeVar("Req", bound=betterproto2.Message)
Resp = TypeVar("Resp", bound=betterproto2.Message)

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
        self._waiting.clear()
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
            if not job.request_id:
                job = attrs.evolve(job, request_id=str(uuid.uuid4()))
            output = MockOutput(job, self.facts)
        except RpcError:
            self._refused += 1
            raise
        stream.request_id = job.request_id
        self._accepted += 1
        self._streams.add(stream)
        self._by_request_id[job.request_id].add(stream)
        heapq.heappush(self._waiting, (job.priority, next(self._arrivals), stream))
        log.debug("mock_request_started", request_id=job.request_id, open=len(self._streams))
        self._start_waiting()
        return output

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
