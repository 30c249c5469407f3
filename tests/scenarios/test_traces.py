"""The spans of requests, of a drain and of a recovery, however they end; in virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from support.samples import minimal_request, model_facts
from support.traces import PARENT, REQUEST_PHASES, SPAN_ID, TRACE_ID, RecordedTraces
from trio_sidecar.bridge import aio_sleep, run_aio
from trio_sidecar.convert.request import convert_request
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.deadline import Deadline
from trio_sidecar.errors import EngineShutdown, InvalidRequest, Overloaded, RpcError, SidecarError, StatusCode
from trio_sidecar.requests.limits import SilenceLimits
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Gate, Script, Send, Wait, finish, tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from trio_sidecar.convert.request import ConvertedRequest
    from trio_sidecar.requests.session import Session

HEADERS = {"traceparent": PARENT, "tracestate": "a=b", "request-id": "1"}
ANSWER = Script(opening=[Wait(1)], stream=[Wait(2), Send(tokens(7)), Wait(3), Send(finish(8, total=2))])


def convert(request: Mapping[str, object], request_id: str) -> ConvertedRequest:
    """As the worker does."""
    return convert_request(request, request_id=request_id, model=model_facts())


def stuck() -> Script:
    """One token, and then nothing more."""
    return Script(stream=[Send(tokens(7)), Gate()])


@attrs.define(eq=False)
class World:
    """Sessions over a scripted engine, and their traces."""

    engine: FakeEngine
    sessions: Sessions
    traces: RecordedTraces

    def open(self) -> Session:
        return self.sessions.open(minimal_request(), "r", headers=HEADERS)

    def ends(self) -> list[tuple[object, str | None]]:
        """The end reason and the failure of each request."""
        requests = [span for span in self.traces.seen if span.name == "request"]
        return [(span.attributes["trio_sidecar.end_reason"], span.failure) for span in requests]


@asynccontextmanager
async def world(script: Script, *, max_open: int = 0, silence: SilenceLimits | None = None) -> AsyncIterator[World]:
    """Sessions that serve; at the end each span has ended, once, and is a part of the trace that came."""
    traces = RecordedTraces()
    engine = FakeEngine(script)
    sessions = Sessions(
        responder=ResponseConverter,
        merge=merge_chunks,
        max_open=max_open,
        silence=silence or SilenceLimits(),
        tracer=traces.tracer,
    )
    made = World(engine, sessions, traces)
    async with sessions.serving(engine, convert):
        yield made
    assert 0 == traces.open
    assert len({span.span_id for span in traces.seen}) == len(traces.seen)
    for span in traces.seen:
        if span.name == "request":
            assert (TRACE_ID, SPAN_ID) == (span.trace_id, span.parent)
        elif span.name in REQUEST_PHASES:
            assert span.parent in {other.span_id for other in traces.seen if other.name == "request"}


async def take(session: Session) -> SidecarError | None:
    """Take everything; the error at the end."""

    async def aio_take() -> SidecarError | None:
        try:
            while await session.aio_next() is not None:
                pass
        except SidecarError as error:
            return error
        return None

    return await run_aio(aio_take)


async def test_a_request_that_ends_well(aio_loop: object, autojump_clock: object) -> None:
    """It has all four phases, and counts its tokens; the engine gets the request's own context."""
    async with world(ANSWER) as at:
        assert await take(at.open()) is None
    assert [*REQUEST_PHASES, "request"] == at.traces.names()
    request = at.traces.only("request")
    assert {
        "trio_sidecar.role": "aggregated",
        "trio_sidecar.end_reason": "finished",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
    } == request.attributes
    assert [("finished", None)] == at.ends()
    assert {"traceparent": request.headers, "tracestate": "a=b"} == at.engine.requests[0].metadata


async def test_a_slow_client_is_not_the_engines(aio_loop: object, autojump_clock: object) -> None:
    """The stream has ended when the engine has; the request goes on until the client has taken all."""
    async with world(ANSWER) as at:
        session = at.open()
        await trio.sleep(60)
        assert REQUEST_PHASES == at.traces.names()
        assert await take(session) is None
    assert [*REQUEST_PHASES, "request"] == at.traces.names()


async def test_the_rank_goes_beside_the_trace(aio_loop: object, autojump_clock: object) -> None:
    """A rank in the metadata is not lost."""
    async with world(ANSWER) as at:
        request = minimal_request() | {"routing": {"dp_rank": 0}}
        assert await take(at.sessions.open(request, "r", headers=HEADERS)) is None
    assert {"x-data-parallel-rank", "traceparent", "tracestate"} == set(at.engine.requests[0].metadata)


async def test_without_a_tracer_the_context_goes_on(aio_loop: object, autojump_clock: object) -> None:
    """It is the one that came; a malformed one is dropped, and the request is served all the same."""
    engine = FakeEngine(ANSWER)
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks)
    async with sessions.serving(engine, convert):
        for headers in (HEADERS, {"traceparent": "garbage", "tracestate": "a=b"}, {}, None):
            assert await take(sessions.open(minimal_request(), "r", headers=headers)) is None
    passed = {"traceparent": PARENT, "tracestate": "a=b"}
    assert [passed, {}, {}, {}] == [request.metadata for request in engine.requests]


async def test_a_cancelled_request(aio_loop: object, autojump_clock: object) -> None:
    """A cancel is no failure, in whichever phase it comes."""
    async with world(Script(opening=[Wait(1)], stream=[Wait(1), Send(tokens(7)), Gate()])) as at:
        for seconds in (0, 0.5, 1.5, 2.5):
            session = at.open()
            await trio.sleep(seconds)
            session.cancel()
            assert await take(session) is None
    assert [("cancelled", None)] * 4 == at.ends()
    assert [4, 3, 2, 1] == [at.traces.names().count(name) for name in REQUEST_PHASES]


async def test_a_consumer_that_goes(aio_loop: object, autojump_clock: object) -> None:
    """It is no failure either."""
    async with world(stuck()) as at:
        session = at.open()
        await trio.sleep(1)
        session.close()
        await trio.sleep(1)
        assert [("consumer_gone", None)] == at.ends()


@pytest.mark.parametrize("early", [True, False])
async def test_a_request_that_the_engine_fails(early: bool, aio_loop: object, autojump_clock: object) -> None:
    """The failure is the status, never the engine's text."""
    failure = Fail(RpcError(StatusCode.RESOURCE_EXHAUSTED, "something secret"))
    script = Script(opening=[failure]) if early else Script(stream=[Send(tokens(7)), failure])
    async with world(script) as at:
        assert await take(at.open()) is not None
    assert [("error", "RESOURCE_EXHAUSTED")] == at.ends()
    assert [*REQUEST_PHASES[: 2 if early else 4], "request"] == at.traces.names()


async def test_a_silent_engine(aio_loop: object, autojump_clock: object) -> None:
    """Its request has timed out."""
    async with world(stuck(), silence=SilenceLimits(idle_secs=5)) as at:
        assert await take(at.open()) is not None
    assert [("timeout", "DEADLINE_EXCEEDED")] == at.ends()


async def test_a_drain(aio_loop: object, autojump_clock: object) -> None:
    """It is a trace of its own that says how many requests there were and how many it cut."""
    async with world(stuck()) as at:
        session = at.open()
        await trio.sleep(1)
        await at.sessions.drain(Deadline.after(5))
        assert isinstance(await take(session), EngineShutdown)
    drain = at.traces.only("drain")
    assert ("", None) == (drain.parent, drain.failure)
    assert {"trio_sidecar.requests": 1, "trio_sidecar.cut": 1} == drain.attributes
    assert [("shutdown", "UNAVAILABLE")] == at.ends()


async def test_a_request_after_the_end(aio_loop: object, autojump_clock: object) -> None:
    """One that comes when the sessions have closed is cancelled before anything began."""
    async with world(stuck()) as at:
        await at.sessions.drain(Deadline.after(5))
    session = at.open()
    assert await take(session) is None
    assert [("cancelled", None)] == at.ends()
    assert 0 == at.traces.open


async def test_refused_requests(aio_loop: object, autojump_clock: object) -> None:
    """They are failures of admission, with the status that tells why."""
    async with world(stuck(), max_open=1) as at:
        with pytest.raises(InvalidRequest):
            at.sessions.open(minimal_request() | {"sampling_options": {"n": 2}}, "r", headers=HEADERS)
        at.open()
        with pytest.raises(Overloaded):
            at.open()
        at.sessions.suspend("the engine is away")
        with pytest.raises(EngineShutdown):
            at.open()
    refused = [("refused", "INVALID_ARGUMENT"), ("refused", "RESOURCE_EXHAUSTED"), ("refused", "UNAVAILABLE")]
    assert refused == at.ends()[:3]
    assert ["INVALID_ARGUMENT"] == [span.failure for span in at.traces.seen if span.name == "admission"][:1]


async def test_many_requests_at_once(aio_loop: object, autojump_clock: object) -> None:
    """Spans of requests that run in turn, in tasks of both flavours, do not become parts of each other."""
    async with world(
        Script(opening=[Wait(0.5)], stream=[Wait(1), Send(tokens(7)), Wait(1), Send(finish(8, total=2))])
    ) as at:

        async def one(number: int) -> None:
            await run_aio(aio_sleep, number / 100)
            headers = {"traceparent": f"00-{number:032x}-{number:016x}-01"}
            assert await take(at.sessions.open(minimal_request(), str(number), headers=headers)) is None

        async with trio.open_nursery() as nursery:
            for number in range(1, 101):
                nursery.start_soon(one, number)
        await trio.sleep(1)  # a consumer has its end a moment before its request does
        seen, at.traces.seen[:] = at.traces.seen[:], []
    requests = {span.span_id: span for span in seen if span.name == "request"}
    assert (100, 500) == (len(requests), len(seen))
    for span in seen:
        parent = int(span.parent, 16) if span.name == "request" else int(requests[span.parent].parent, 16)
        assert parent == int(span.trace_id, 16)
