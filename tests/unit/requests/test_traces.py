"""What sessions tell the traces of their requests; all the ways in which these end are tried in the scenarios."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from support.conversion import convert
from support.samples import minimal_request
from support.traces import PARENT, REQUEST_PHASES, SPAN_ID, TRACE_ID, RecordedTraces
from trio_sidecar import wire
from trio_sidecar.bridge import run_aio
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.errors import Overloaded, RpcError, StatusCode
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Script, Send, Wait, finish, tokens

if TYPE_CHECKING:
    import asyncio

    from trio.testing import MockClock

    from trio_sidecar.requests.session import Session

    Loop = asyncio.AbstractEventLoop

HEADERS = {"traceparent": PARENT}


def made(traces: RecordedTraces, **more: Any) -> Sessions:
    return Sessions(responder=ResponseConverter, merge=merge_chunks, tracer=traces.tracer, role="decode", **more)


async def take(session: Session) -> None:
    while await run_aio(session.aio_next) is not None:
        pass


async def test_a_whole_request(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """A part of the trace that came; each phase once, the stream from the first answer with something for Dynamo."""
    traces = RecordedTraces()
    steps: list[Any] = [
        Wait(1),
        Send(wire.GenerateResponse()),
        Wait(1),
        Send(tokens(1)),
        Wait(1),
        Send(tokens(2)),
        Send(finish(3, total=3)),
    ]
    engine, sessions = FakeEngine(Script(stream=steps)), made(traces)
    async with sessions.serving(engine, lambda request, _: convert(dict(request))):
        session = sessions.open(minimal_request(), "r", headers=HEADERS)
        await trio.sleep(1.5)
        assert REQUEST_PHASES[:2] == traces.names()
        await trio.sleep(1)
        assert REQUEST_PHASES[:3] == traces.names()
        await take(session)
    assert [*REQUEST_PHASES, "request"] == traces.names()
    request = traces.only("request")
    assert (TRACE_ID, SPAN_ID, None) == (request.trace_id, request.parent, request.failure)
    assert {
        "trio_sidecar.role": "decode",
        "trio_sidecar.end_reason": "finished",
        "gen_ai.usage.input_tokens": len(minimal_request()["token_ids"]),
        "gen_ai.usage.output_tokens": 3,
    } == request.attributes
    assert {"traceparent": request.headers} == engine.requests[0].metadata


@pytest.mark.parametrize("goes", [False, True])
async def test_only_failures_are_failures(autojump_clock: MockClock, aio_loop: Loop, goes: bool) -> None:
    """A client that goes is none, though the engine has failed before that."""
    traces = RecordedTraces()
    fault = Fail(RpcError(StatusCode.INTERNAL, "a secret"))
    sessions = made(traces)
    async with sessions.serving(
        FakeEngine(Script(stream=[Wait(1), fault], closing=[fault])), lambda request, _: convert(dict(request))
    ):
        session = sessions.open(minimal_request(), "r", headers=HEADERS)
        if goes:
            await trio.sleep(2)
            session.close()
        else:
            with pytest.raises(RpcError):
                await take(session)
        await trio.sleep(2)
    request = traces.only("request")
    ends = (request.attributes["trio_sidecar.end_reason"], request.failure)
    assert (("consumer_gone", None) if goes else ("error", "INTERNAL")) == ends


async def test_a_request_that_is_refused(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """It says so, and with which status."""
    traces = RecordedTraces()
    sessions = made(traces, max_open=1)
    engine = FakeEngine(Script(stream=[Wait(1000)]))
    async with sessions.serving(engine, lambda request, _: convert(dict(request))):
        sessions.open(minimal_request(), "r")
        with pytest.raises(Overloaded):
            sessions.open(minimal_request(), "r", headers=HEADERS)
        request = traces.only("request")
    assert ("refused", "RESOURCE_EXHAUSTED") == (request.attributes["trio_sidecar.end_reason"], request.failure)
