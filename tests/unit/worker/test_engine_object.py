"""The object that Dynamo drives: exactly one terminal or one typed error for each request, whoever goes away."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from support.fake_dynamo import ERRORS, Context, FakeDynamo, FakeDynamoError
from support.traces import PARENT
from trio_sidecar.bridge import run_aio
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert.request import ModelFacts, convert_request
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.errors import ErrorKind, ProtocolError, RpcError, StatusCode
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Gate, Script, Send, finish, tokens
from trio_sidecar.worker.engine_object import EngineObject

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from trio_sidecar.convert.request import ConvertedRequest

REQUEST: dict[str, object] = {"model": "served-model", "token_ids": [11, 22, 33]}
FACTS = ModelFacts(served_model_name="served-model")
CANCELLED_BEFORE_START = {
    "token_ids": [],
    "index": 0,
    "finish_reason": "cancelled",
    "completion_usage": {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3},
}


class NoLife:
    """An engine that is opened and closed elsewhere."""

    async def aio_start(self) -> Any:
        """Fails."""
        raise AssertionError

    async def aio_stop(self) -> None:
        """Fails."""
        raise AssertionError


def convert(request: Mapping[str, object], request_id: str) -> ConvertedRequest:
    """As the worker does."""
    return convert_request(request, request_id=request_id, model=FACTS)


def convert_decode(request: Mapping[str, object], request_id: str) -> ConvertedRequest:
    """As a decode worker does."""
    handed_over = {"prefill_result": {"disaggregated_params": {"do_remote_prefill": True}}}
    facts = ModelFacts(served_model_name="served-model", mode=DisaggregationMode.DECODE)
    return convert_request(request | handed_over, request_id=request_id, model=facts)  # type: ignore[operator]


def make(sessions: Sessions, mode: DisaggregationMode = DisaggregationMode.AGGREGATED) -> EngineObject:
    """An engine object over sessions."""
    return EngineObject(FakeDynamo().binding, NoLife(), sessions, mode=mode)


def new_sessions() -> Sessions:
    """Sessions that hand out every answer as its own chunk."""
    return Sessions(responder=ResponseConverter, merge=merge_chunks, coalesce=False)


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[EngineObject]:
    """An engine object that serves a fake engine."""
    sessions = new_sessions()
    async with sessions.serving(engine, convert):
        yield make(sessions)


@asynccontextmanager
async def serving_decode(engine: FakeEngine) -> AsyncIterator[EngineObject]:
    """The same in a decode worker."""
    sessions = new_sessions()
    async with sessions.serving(engine, convert_decode):
        yield make(sessions, DisaggregationMode.DECODE)


async def collect(
    engine: EngineObject,
    request: Mapping[str, object],
    context: Context,
    on_chunk: Callable[[int], None] = lambda count: None,
) -> tuple[list[Mapping[str, Any]], FakeDynamoError | None]:
    """Run one request as Dynamo does: its chunks, and the error that ended it."""
    chunks: list[Mapping[str, Any]] = []

    async def aio_main() -> FakeDynamoError | None:
        try:
            async for chunk in engine.generate(request, context):
                chunks.append(chunk)
                on_chunk(len(chunks))
        except FakeDynamoError as error:
            return error
        return None

    error = await run_aio(aio_main)
    return chunks, error


async def test_the_trace_context_goes_on(aio_loop: object) -> None:
    """Dynamo's goes on to the engine, without OpenTelemetry; its other headers do not, nor does a malformed one."""
    engine = FakeEngine(Script(stream=[Send(finish(8, total=1))]))
    async with serving(engine) as worker:
        for parent in (PARENT, "garbage"):
            context = Context(headers={"traceparent": parent, "tracestate": "a=b", "request-id": "1"})
            _, error = await collect(worker, REQUEST, context)
            assert error is None
    assert [{"traceparent": PARENT, "tracestate": "a=b"}, {}] == [request.metadata for request in engine.requests]


async def test_chunks_then_end(aio_loop: object) -> None:
    """A request yields the engine's answers and ends after its terminal."""
    engine = FakeEngine(Script(stream=[Send(tokens(7, text="a")), Send(finish(8, total=2, text="b"))]))
    async with serving(engine) as worker:
        chunks, error = await collect(worker, REQUEST, Context())
    assert error is None
    assert [[7], [8]] == [chunk["token_ids"] for chunk in chunks]
    assert [None, "length"] == [chunk.get("finish_reason") for chunk in chunks]
    assert "request-1" == engine.requests[0].request.request_id
    assert "served-model" == engine.requests[0].request.model
    assert engine.requests[0].released


@pytest.mark.rule("R11.2")
async def test_before_start(aio_loop: object) -> None:
    """Before the engine has started a request gets EngineShutdown, which sends the caller to another worker."""
    chunks, error = await collect(make(new_sessions()), REQUEST, Context())
    assert [] == chunks
    assert type(error) is ERRORS[ErrorKind.ENGINE_SHUTDOWN]
    assert "not started" in str(error)


@pytest.mark.rule("R11.4")
async def test_after_cleanup(aio_loop: object) -> None:
    """After the worker has closed a request gets one cancelled terminal, and the engine hears nothing of it."""
    engine = FakeEngine()
    async with serving(engine) as worker:
        pass
    assert ([CANCELLED_BEFORE_START], None) == await collect(worker, REQUEST, Context())
    assert [] == engine.requests


@pytest.mark.rule("R10.1")
async def test_invalid_request(aio_loop: object) -> None:
    """A request that cannot be expressed is the caller's fault, even if it was cancelled, and the message names why."""
    engine = FakeEngine()
    async with serving(engine) as worker:
        chunks, error = await collect(worker, REQUEST | {"sampling_options": {"n": 2}}, Context(stopped=True))
    assert [] == chunks
    assert type(error) is ERRORS[ErrorKind.INVALID_ARGUMENT]
    assert str(error).startswith("InvalidRequest: ")
    assert "n" in str(error)
    assert [] == engine.requests


@pytest.mark.rule("R10.16")
@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (RpcError(StatusCode.UNAVAILABLE, "gone"), ErrorKind.CANNOT_CONNECT, "GenerateStream: gone (Unavailable)"),
        (RpcError(StatusCode.NOT_FOUND, "no model"), ErrorKind.INVALID_ARGUMENT, "GenerateStream: no model (NotFound)"),
        (RpcError(StatusCode.DEADLINE_EXCEEDED, "late"), ErrorKind.CONNECTION_TIMEOUT, "GenerateStream: late"),
        (RpcError(StatusCode.CANCELLED, "cut"), ErrorKind.CANCELLED, "GenerateStream: cut (Cancelled)"),
        (ProtocolError("nonsense"), ErrorKind.UNKNOWN, "invalid gRPC response: nonsense"),
    ],
)
async def test_error_of_the_engine(aio_loop: object, failure: Exception, kind: ErrorKind, text: str) -> None:
    """An error becomes Dynamo's exception of the same kind, after the chunks that came before it."""
    engine = FakeEngine(Script(stream=[Send(tokens(7)), Fail(failure)]))
    async with serving(engine) as worker:
        chunks, error = await collect(worker, REQUEST, Context())
    assert [[7]] == [chunk["token_ids"] for chunk in chunks]
    assert type(error) is ERRORS[kind]
    assert text in str(error)


@pytest.mark.rule("R10.15")
async def test_stream_without_terminal(aio_loop: object) -> None:
    """A stream that ends with OK but without a terminal is an error, which Dynamo would not notice by itself."""
    async with serving(FakeEngine(Script(stream=[Send(tokens(7))]))) as worker:
        _, error = await collect(worker, REQUEST, Context())
    assert type(error) is ERRORS[ErrorKind.UNKNOWN]
    assert "terminal" in str(error)


async def test_bug_is_not_the_callers_fault(aio_loop: object) -> None:
    """An unexpected exception becomes Unknown without its text: Dynamo would take a ValueError for a bad request."""

    def broken(request: Mapping[str, object], request_id: str) -> ConvertedRequest:
        reason = "secret"
        raise ValueError(reason)

    sessions = new_sessions()
    async with sessions.serving(FakeEngine(), broken):
        _, error = await collect(make(sessions), REQUEST, Context())
    assert type(error) is ERRORS[ErrorKind.UNKNOWN]
    assert "secret" not in str(error)


async def test_cancelled_before_it_began(aio_loop: object) -> None:
    """A request that was cancelled on its way here gets one cancelled terminal, and the engine hears nothing of it."""
    engine = FakeEngine()
    async with serving(engine) as worker:
        assert ([CANCELLED_BEFORE_START], None) == await collect(worker, REQUEST, Context(stopped=True))
    assert [] == engine.requests


@pytest.mark.rule("R10.3")
async def test_abort_between_chunks(aio_loop: object) -> None:
    """An abort keeps the delivered tokens, adds one cancelled terminal that counts them, and releases the stream."""
    gate = Gate()
    engine = FakeEngine(Script(stream=[Send(tokens(7)), Send(tokens(8)), gate, Send(finish(9, total=3))]))
    context = Context()
    async with serving(engine) as worker, trio.open_nursery() as nursery:

        def on_chunk(count: int) -> None:
            if count == 2:
                nursery.start_soon(run_aio, worker.abort, context)

        chunks, error = await collect(worker, REQUEST, context, on_chunk)
        assert error is None
    assert [[7], [8], []] == [chunk["token_ids"] for chunk in chunks]
    assert "cancelled" == chunks[-1]["finish_reason"]
    assert {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5} == chunks[-1]["completion_usage"]
    assert engine.requests[0].released


async def test_abort_without_consumer(aio_loop: object) -> None:
    """Dynamo leaves the generator of an aborted request where it waits: the abort alone must release the engine."""
    engine = FakeEngine(Script(stream=[Send(tokens(7)), Gate()]))
    context = Context()
    async with serving(engine) as worker:
        chunks = worker.generate(REQUEST, context)
        assert [7] == (await run_aio(anext, chunks))["token_ids"]
        await run_aio(worker.abort, context)
        await trio.testing.wait_all_tasks_blocked()
        assert engine.requests[0].released
        assert await run_aio(worker.is_quiescent)
        await run_aio(chunks.aclose)


async def test_abort_picks_the_stopped_one_of_two_with_one_id(aio_loop: object) -> None:
    """Clients choose ids: of two requests that share one, only the one that was stopped is cancelled."""
    engine = FakeEngine(Script(stream=[Send(tokens(7)), Gate()]))
    first, second = Context(), Context()
    async with serving(engine) as worker:
        streams = [worker.generate(REQUEST, context) for context in (first, second)]
        for stream in streams:
            await run_aio(anext, stream)
        second.stopped = True
        await run_aio(worker.abort, Context(stopped=True))
        await trio.testing.wait_all_tasks_blocked()
        assert engine.requests[1].released
        assert not engine.requests[0].released
        for stream in streams:
            await run_aio(stream.aclose)


async def test_abort_of_an_unknown_request(aio_loop: object) -> None:
    """An abort that comes late, or for nobody, changes nothing."""
    async with serving(FakeEngine(Script(stream=[Send(finish(7))]))) as worker:
        await run_aio(worker.abort, Context())
        await collect(worker, REQUEST, Context())
        await run_aio(worker.abort, Context())
        assert {} == worker._running


@pytest.mark.rule("R10.7")
async def test_first_token_of_a_decode(aio_loop: object) -> None:
    """A decode request announces its first token to Dynamo, once; no other role does."""
    script = Script(stream=[Send(tokens(7)), Send(tokens(8)), Send(finish(9, total=3))])
    decode, aggregated = Context(), Context()
    async with serving_decode(FakeEngine(script)) as worker:
        await collect(worker, REQUEST, decode)
    async with serving(FakeEngine(script)) as worker:
        await collect(worker, REQUEST, aggregated)
    assert (1, 0) == (decode.first_tokens, aggregated.first_tokens)


@pytest.mark.rule("R10.5", "R10.6", "R10.8", "FR-002")
async def test_cancel_of_a_decode_waits_for_the_first_token(aio_loop: object) -> None:
    """Though Dynamo does not call abort before the first token, that token does not reach a client that cancelled."""
    gate = Gate()
    engine = FakeEngine(Script(stream=[gate, Send(tokens(7)), Gate()]))
    context = Context()
    async with serving_decode(engine) as worker, trio.open_nursery() as nursery:

        async def cancel() -> None:
            await trio.testing.wait_all_tasks_blocked()
            context.stop()
            await trio.testing.wait_all_tasks_blocked()
            assert (True, False) == (engine.requests[0].opened, engine.requests[0].released)
            gate.open()

        nursery.start_soon(cancel)
        chunks, error = await collect(worker, REQUEST, context)
        await run_aio(worker.abort, context)
    assert error is None
    assert [([], "cancelled")] == [(chunk["token_ids"], chunk["finish_reason"]) for chunk in chunks]
    assert {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4} == chunks[0]["completion_usage"]
    assert engine.requests[0].released
    assert 1 == context.first_tokens


@pytest.mark.rule("R10.5", "FR-003")
async def test_decode_that_was_cancelled_before_it_came(aio_loop: object) -> None:
    """A decode that was cancelled on its way here is still submitted, exactly once, and read up to its first token."""
    engine = FakeEngine(Script(stream=[Send(tokens(7)), Gate()]))
    async with serving_decode(engine) as worker:
        chunks, error = await collect(worker, REQUEST, Context(stopped=True))
    assert (["cancelled"], None) == ([chunk["finish_reason"] for chunk in chunks], error)
    assert (1, True) == (len(engine.requests), engine.requests[0].opened)


@pytest.mark.rule("FR-008")
async def test_a_decode_that_is_refused_fetches_what_was_handed_over(aio_loop: object) -> None:
    """Its client is refused at once; the engine gets the handoff with the bare prompt, and goes on to one token."""
    engine = FakeEngine(Script(stream=[Send(tokens(7)), Gate()]))
    context = Context()
    handed_over = {"prefill_result": {"disaggregated_params": {"do_remote_prefill": True}}}
    async with serving_decode(engine) as worker:
        chunks, error = await collect(worker, REQUEST | handed_over | {"sampling_options": {"n": 2}}, context)
        assert ([], "InvalidArgument") == (chunks, type(error).__name__)
        await trio.testing.wait_all_tasks_blocked()
        assert engine.requests[0].released
    (received,) = engine.requests
    assert received.request.stopping is not None
    assert received.request.kv is not None
    assert (1, 1, 0) == (received.request.stopping.max_new_tokens, received.sent, context.first_tokens)
    assert received.request.kv.kv_transfer_params is not None


@pytest.mark.rule("FR-008")
@pytest.mark.parametrize("refused", [{"prefill_result": 5}, {}])
async def test_a_refused_decode_without_a_good_handoff_reaches_nobody(
    aio_loop: object, refused: dict[str, object]
) -> None:
    """There is nothing to fetch."""
    engine = FakeEngine()
    async with serving_decode(engine) as worker:
        _, error = await collect(worker, REQUEST | refused | {"token_ids": "x"}, Context())
        await trio.testing.wait_all_tasks_blocked()
    assert ("InvalidArgument", []) == (type(error).__name__, engine.requests)


@pytest.mark.rule("R10.10", "FR-003")
async def test_failure_after_a_decode_was_cancelled(aio_loop: object) -> None:
    """An engine that fails after the cancel of a decode ends it as cancelled; nobody waits for an error."""
    engine = FakeEngine(Script(stream=[Fail(RpcError(StatusCode.UNAVAILABLE, "gone"))]))
    async with serving_decode(engine) as worker:
        chunks, error = await collect(worker, REQUEST, Context(stopped=True))
    assert (["cancelled"], None) == ([chunk["finish_reason"] for chunk in chunks], error)


async def test_a_decode_that_ends_leaves_no_future(aio_loop: object) -> None:
    """What waits for a cancel is let go of with the request; the other roles make nothing that waits."""
    decode, aggregated = Context(), Context()
    async with serving_decode(FakeEngine(Script(stream=[Send(finish(7))]))) as worker:
        await collect(worker, REQUEST, decode)
    async with serving(FakeEngine(Script(stream=[Send(finish(7))]))) as worker:
        await collect(worker, REQUEST, aggregated)
    assert [True] == [future.cancelled() for future in decode.futures]
    assert [] == aggregated.futures


@pytest.mark.rule("R11.14")
@pytest.mark.parametrize("mode", list(DisaggregationMode), ids=lambda mode: mode.value)
async def test_quiescence(aio_loop: object, mode: DisaggregationMode) -> None:
    """A worker with requests is not quiescent; a prefill worker, whose engine decode peers read from, never knows."""
    sessions = new_sessions()
    worker = make(sessions, mode)
    idle = mode is not DisaggregationMode.PREFILL
    async with sessions.serving(FakeEngine(Script(stream=[Send(tokens(7)), Gate()])), convert):
        assert idle is await run_aio(worker.is_quiescent)
        chunks = worker.generate(REQUEST, Context())
        await run_aio(anext, chunks)
        assert not await run_aio(worker.is_quiescent)
        await run_aio(chunks.aclose)
        await trio.testing.wait_all_tasks_blocked()
        assert idle is await run_aio(worker.is_quiescent)
