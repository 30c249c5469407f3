"""The mock engine: deterministic, no GPU, no torch; a real engine behind the contract (spec 16)."""

from __future__ import annotations

import heapq
import itertools
import uuid
from collections import defaultdict
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import attrs
import betterproto2
import structlog
import trio

from trio_sidecar.bridge import AioEvent, aio_now
from trio_sidecar.engines.mock_cache import MockCache, open_publishers
from trio_sidecar.engines.mock_facts import MockFacts
from trio_sidecar.engines.mock_lora import MockLora
from trio_sidecar.engines.mock_output import MockOutput
from trio_sidecar.engines.mock_request import accept
from trio_sidecar.engines.mock_rl import MockRl
from trio_sidecar.engines.mock_stream import MockStream
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
from trio_sidecar.wire.codec import prepare
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
    prepare(GenerateRequest, GenerateResponse)  # for the server's face
    log.info(
        "mock_engine_opened",
        model=engine.facts.model_id,
        served_model_name=engine.facts.served_model_name,
        mode=settings.disaggregation_mode.value,
        reply=settings.reply.value,
    )
    try:
        with ExitStack() as stack:
            engine.cache.publishers.extend(open_publishers(settings, stack))
            if settings.zmq_replay_port is None:
                yield engine
                return
            async with trio.open_nursery() as nursery:
                for publisher in engine.cache.publishers:
                    nursery.start_soon(publisher.answer_replays)
                yield engine
                nursery.cancel_scope.cancel()
    finally:
        engine.close()


class MockEngine:
    """Implements :class:`~trio_sidecar.engines.contract.Engine`.

    Attributes:
        facts: What it claims to be.
        cache: What it holds of prompts.
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
        self._frozen = False
        self._idle = AioEvent()
        self._idle.set()
        self.cache = MockCache(facts)
        base_names = (facts.model_id, facts.served_model_name)
        self._lora = MockLora(facts.max_loras, base_names) if facts.max_loras else None
        self._rl = MockRl(self) if facts.rl_controls else None

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
                answer = GetKvEventSourcesResponse(sources=self.cache.sources())
            case _:
                answer = await self._aio_manage(method.name, request)
        assert isinstance(answer, method.response)  # noqa: S101 - ties the table above to the method's types
        return answer

    async def _aio_manage(self, name: str, request: betterproto2.Message) -> betterproto2.Message:
        """Calls that only some mock engines know (R16.4)."""
        for part in (self._lora, self._rl):
            answer = None if part is None else await part.aio_call(request)
            if answer is not None:
                return answer
        reason = f"{name} is not supported by the mock engine"
        raise RpcError(StatusCode.UNIMPLEMENTED, reason, rpc=name)

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
            if job.adapter and self._lora is not None:
                self._lora.check_loaded(job.adapter)
            if self._rl is not None:
                self._rl.check_admission()
            if self._closed:
                raise RpcError(StatusCode.UNAVAILABLE, "the mock engine is closed")
            if len(self._streams) >= self.facts.max_concurrent_requests:
                reason = f"all {self.facts.max_concurrent_requests} concurrent requests are taken"
                raise RpcError(StatusCode.RESOURCE_EXHAUSTED, reason)
            if not job.request_id:
                job = attrs.evolve(job, request_id=str(uuid.uuid4()))
            job = attrs.evolve(job, cached_tokens=self.cache.use(job))
            output = MockOutput(job, self.facts)
        except RpcError:
            self._refused += 1
            raise
        stream.request_id = job.request_id
        self._accepted += 1
        self._streams.add(stream)
        self._idle.clear()
        self._by_request_id[job.request_id].add(stream)
        heapq.heappush(self._waiting, (job.priority, next(self._arrivals), stream))
        log.debug(
            "mock_request_started",
            request_id=job.request_id,
            dp_rank=job.rank,
            media=len(stream.request.media),
            encoded=stream.request.kv is not None and stream.request.kv.ec_transfer_params is not None,
            open=len(self._streams),
        )
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
        if not self._streams:
            self._idle.set()
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
        while self._waiting and not self._frozen and len(self._running) < self.facts.max_num_seqs:
            stream = heapq.heappop(self._waiting)[2]
            if stream in self._streams:
                self._running.add(stream)
                stream.start(aio_now())

    # -- For the RL controls ----------------------------------------------------------------------------------------

    def abort_all(self) -> None:
        """End all requests with ABORTED."""
        for stream in tuple(self._streams):
            self._aborted += stream.abort()

    async def aio_wait_idle(self) -> None:
        """Return when no request is left."""
        await self._idle.aio_wait()

    def freeze(self) -> None:
        """Make no more tokens, and begin with no request, until thawed."""
        self._frozen = True
        for stream in self._streams:
            stream.freeze(aio_now())

    def thaw(self) -> None:
        """Go on."""
        self._frozen = False
        for stream in self._streams:
            stream.thaw(aio_now())
        self._start_waiting()

    def clear_cache(self) -> None:
        """Forget cached blocks."""
        self.cache.clear()
