"""Generations on the server's side as spans: seen by an independent client over a real connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trio

from support.serving import Client, generate_request, serving, wait_until
from support.traces import PARENT, REQUEST_PHASES, SPAN_ID, TRACE_ID, RecordedTraces
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Gate, Script, Send, finish, tokens
from trio_sidecar.wire import GenerateResponse, PromptInfo

if TYPE_CHECKING:
    import asyncio

METADATA = [("traceparent", PARENT), ("tracestate", "a=b"), ("x-data-parallel-rank", "1")]
PROMPT = GenerateResponse(prompt_info=PromptInfo(num_prompt_tokens=5))
ANSWER = Script(stream=[Send(PROMPT), Send(tokens(7)), Send(tokens(8), finish(9, total=3))])


def ends(traces: RecordedTraces) -> list[tuple[object, str | None]]:
    """The end reason and the failure of each request."""
    return [
        (span.attributes["trio_sidecar.end_reason"], span.failure) for span in traces.seen if span.name == "request"
    ]


@pytest.mark.parametrize("path", ["vllm.Inference/Generate", "vllm.Inference/GenerateStream"])
async def test_the_clients_context_is_continued(aio_loop: asyncio.AbstractEventLoop, path: str) -> None:
    """Our spans are a part of the client's, the engine's will be a part of ours, and other metadata goes on."""

    def ask(client: Client) -> Any:
        answer = client.call(path, generate_request(), metadata=METADATA)
        return list(answer) if path.endswith("Stream") else answer

    engine, traces = FakeEngine(ANSWER), RecordedTraces()
    async with serving(engine, tracer=traces.tracer) as server:
        await server.ask(ask)
    assert [*REQUEST_PHASES, "request", "drain"] == traces.names()
    request = traces.only("request")
    assert (TRACE_ID, SPAN_ID, "SERVER", None) == (request.trace_id, request.parent, request.kind, request.failure)
    assert [request.span_id] * 4 == [span.parent for span in traces.seen[:4]]
    assert {
        "trio_sidecar.role": "server",
        "trio_sidecar.end_reason": "finished",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
    } == request.attributes
    (received,) = engine.requests
    ours = {"traceparent": request.headers, "tracestate": "a=b", "x-data-parallel-rank": "1"}
    assert ours == {name: received.metadata[name] for name in ours}
    assert 0 == traces.open


async def test_without_a_tracer_the_context_goes_on(aio_loop: asyncio.AbstractEventLoop) -> None:
    """It goes on as it came, unless it is malformed."""

    def ask(client: Client) -> None:
        for metadata in (METADATA, [("traceparent", "garbage"), ("tracestate", "a=b")]):
            list(client.generate(generate_request(), metadata=metadata))

    engine = FakeEngine(ANSWER)
    async with serving(engine) as server:
        await server.ask(ask)
    trace = [
        {name: request.metadata.get(name) for name in ("traceparent", "tracestate")} for request in engine.requests
    ]
    assert [{"traceparent": PARENT, "tracestate": "a=b"}, {"traceparent": None, "tracestate": None}] == trace


@pytest.mark.parametrize("early", [True, False])
async def test_a_refusal_and_a_failure(aio_loop: asyncio.AbstractEventLoop, early: bool) -> None:
    """The status is the failure, and the phase that it came in has it too."""

    def ask(client: Client) -> None:
        client.failure("vllm.Inference/GenerateStream", generate_request())

    failure = Fail(RpcError(StatusCode.RESOURCE_EXHAUSTED, "something secret"))
    script = Script(opening=[failure]) if early else Script(stream=[Send(tokens(7)), failure])
    traces = RecordedTraces()
    async with serving(FakeEngine(script), tracer=traces.tracer) as server:
        await server.ask(ask)
    assert [("error", "RESOURCE_EXHAUSTED")] == ends(traces)
    assert "RESOURCE_EXHAUSTED" == traces.only("wait_for_stream" if early else "stream").failure


async def test_a_crash_is_internal(aio_loop: asyncio.AbstractEventLoop) -> None:
    """What nobody meant to raise shows as the status that the client gets."""

    def ask(client: Client) -> None:
        client.failure("vllm.Inference/GenerateStream", generate_request())

    traces = RecordedTraces()
    async with serving(FakeEngine(Script(opening=[Fail(ValueError("secret"))])), tracer=traces.tracer) as server:
        await server.ask(ask)
    assert [("error", "INTERNAL")] == ends(traces)


async def test_a_client_that_cancels(aio_loop: asyncio.AbstractEventLoop) -> None:
    """It is no failure."""

    def ask(client: Client) -> None:
        stream = client.generate(generate_request())
        next(stream)
        stream.cancel()

    traces = RecordedTraces()
    async with serving(FakeEngine(Script(stream=[Send(tokens(7)), Gate()])), tracer=traces.tracer) as server:
        await server.ask(ask)
        await wait_until(lambda: "request" in traces.names())
    assert [("cancelled", None)] == ends(traces)


async def test_a_deadline(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A client's deadline that passes is a time-out."""

    def ask(client: Client) -> None:
        with pytest.raises(grpc.RpcError):
            list(client.generate(generate_request(), timeout=0.2))

    traces = RecordedTraces()
    async with serving(FakeEngine(Script(stream=[Gate()])), tracer=traces.tracer) as server:
        await server.ask(ask)
        await wait_until(lambda: "request" in traces.names())
    assert ends(traces) in ([("timeout", "DEADLINE_EXCEEDED")], [("cancelled", None)])  # the client's own may be first


async def test_a_drain(aio_loop: asyncio.AbstractEventLoop) -> None:
    """It is a trace of its own that counts the calls that it cut; each of those says that it was shut down."""

    def ask(client: Client) -> None:
        stream = client.generate(generate_request())
        next(stream)
        trio.from_thread.run_sync(server.scope.cancel)
        with pytest.raises(grpc.RpcError):
            next(stream)

    traces = RecordedTraces()
    engine = FakeEngine(Script(stream=[Send(tokens(7)), Gate()]))
    async with serving(engine, tracer=traces.tracer, drain_secs=0.1, withdraw_grace_secs=0.0) as server:
        await server.ask(ask)
        await server.ended.wait()
    drain = traces.only("drain")
    assert ({"trio_sidecar.requests": 1, "trio_sidecar.cut": 1}, None) == (drain.attributes, drain.failure)
    assert [("shutdown", "UNAVAILABLE")] == ends(traces)
    assert 0 == traces.open
