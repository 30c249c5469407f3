"""The face over the mock engine, seen by an independent client over a real connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trio

from support.grpc_stubs import stubs
from support.mock_engine import mock_settings, token_settings
from support.serving import Client, generate_request, serving, wait_until
from trio_sidecar.engines.mock import open_mock
from trio_sidecar.wire.methods import CONTROL_METHODS, GENERATE, GENERATE_STREAM

if TYPE_CHECKING:
    import asyncio

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.rule("R16.10")
async def test_stream_order_and_sums(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Headers, then prompt info alone, then one token per message, the finish in the last one; sums agree."""

    def ask(client: Client) -> Any:
        stream = client.generate(generate_request(text="What is this?", response={"output_token_ids": True}))
        return list(stream), stream.code()

    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        messages, code = await server.ask(ask)
        await wait_until(lambda: engine.statistics().open == 0)
    assert grpc.StatusCode.OK == code
    first, *rest = messages
    assert (True, False) == (first.HasField("prompt_info"), first.HasField("outputs"))
    assert [False] * len(rest) == [message.HasField("prompt_info") for message in rest]
    finishes = [message.outputs.HasField("finish_info") for message in rest]
    assert [*([False] * (len(rest) - 1)), True] == finishes
    finish = rest[-1].outputs.finish_info
    assert finish.num_output_tokens == sum(message.outputs.num_tokens for message in rest)
    assert finish.num_output_tokens == sum(len(message.outputs.token_ids) for message in rest)
    assert "What is this?" in "".join(message.outputs.text for message in rest)


async def test_unary_is_the_stream_in_one(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Generate answers what GenerateStream answers, put together."""
    options = stubs().message("ResponseOptions")(
        output_token_ids=True,
        output_logprobs=True,
        output_candidates=stubs().message("CandidateTokens")(top_n=2),
        prompt_token_ids=True,
        prompt_logprobs=True,
    )

    def ask(client: Client) -> Any:
        request = generate_request(text="Hello", response=options, stopping={"max_new_tokens": 9})
        return list(client.generate(request)), client.call("vllm.Inference/Generate", request)

    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        messages, whole = await server.ask(ask)
    assert messages[0].prompt_info == whole.prompt_info
    deltas = [message.outputs for message in messages[1:]]
    assert "".join(delta.text for delta in deltas) == whole.outputs.text
    assert 9 == whole.outputs.num_tokens == whole.outputs.finish_info.num_output_tokens
    for name in ("token_ids", "logprobs", "ranks", "candidate_tokens"):
        assert [value for delta in deltas for value in getattr(delta, name)] == list(getattr(whole.outputs, name))
        assert 9 == len(getattr(whole.outputs, name))


async def test_headers_come_before_the_first_token(aio_loop: asyncio.AbstractEventLoop) -> None:
    """An accepted request is confirmed at once, so that a client can cancel it while it waits."""

    def ask(client: Client) -> bool:
        stream = client.generate(generate_request())
        stream.initial_metadata()
        confirmed = engine.statistics().open == 1
        stream.cancel()
        return confirmed

    async with open_mock(token_settings(ttft_ms=60_000.0)) as engine, serving(engine) as server:
        assert await server.ask(ask)
        await wait_until(lambda: engine.statistics().open == 0, 0.5)


REFUSALS: list[tuple[Any, grpc.StatusCode, str]] = [
    ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "other"),
    ({"ids": []}, INVALID, "token_ids"),
    ({"temperature": 9.0}, INVALID, "temperature 9"),
    ({"sampling": {"num_sequences": 2}}, INVALID, "num_sequences 2"),
    ({"sampling": {"top_p": 0.0}}, INVALID, "top_p"),
    ({"stopping": {"max_new_tokens": 2, "min_new_tokens": 3}}, INVALID, "min_new_tokens 3"),
    ({"ids": range(40)}, INVALID, "max_model_len 32"),
    ({"lora_name": "é"}, grpc.StatusCode.UNIMPLEMENTED, "lora_name"),
]


@pytest.mark.rule("R16.3")
@pytest.mark.parametrize("path", [GENERATE.path, GENERATE_STREAM.path])
async def test_refusals_come_before_any_message(aio_loop: asyncio.AbstractEventLoop, path: str) -> None:
    """Unary and streaming: the status names the field, and neither headers nor a message came before."""

    def ask(client: Client) -> list[Any]:
        got = []
        for fields, _, _ in REFUSALS:
            got.append(client.failure(path[1:], generate_request(**fields)))
        got.append(client.failure(path[1:], stubs().message("GenerateRequest")()))
        return got

    async with open_mock(mock_settings(max_model_len=32)) as engine, serving(engine) as server:
        got = await server.ask(ask)
        assert (0, len(REFUSALS) + 1) == (engine.statistics().accepted, engine.statistics().refused)
    expected = [*REFUSALS, ({}, INVALID, "no prompt")]
    for (_, status, word), (code, message, count) in zip(expected, got, strict=True):
        assert (status, 0) == (code, count)
        assert word in message


@pytest.mark.rule("R16.3", "R7.38")
async def test_rank_travels_as_metadata(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The rank is read from the request's metadata."""

    def ask(client: Client) -> Any:
        ranks = [(("x-data-parallel-rank", text),) for text in ("x", "7", "0")]
        bad = [client.failure("vllm.Inference/Generate", generate_request(), metadata=rank) for rank in ranks[:2]]
        return bad, client.call("vllm.Inference/Generate", generate_request(), metadata=ranks[2])

    async with open_mock(token_settings()) as engine, serving(engine) as server:
        bad, good = await server.ask(ask)
    assert [INVALID, INVALID] == [code for code, _, _ in bad]
    assert 20 == good.outputs.num_tokens


@pytest.mark.rule("R16.3")
async def test_concurrency_limit(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The request beyond the limit is refused at once."""

    def ask(client: Client) -> Any:
        stream = client.generate(generate_request())
        stream.initial_metadata()
        failure = client.failure("vllm.Inference/Generate", generate_request())
        stream.cancel()
        return failure

    async with open_mock(token_settings(max_concurrent_requests=1, itl_ms=1000.0)) as engine, serving(engine) as server:
        code, message, _ = await server.ask(ask)
    assert grpc.StatusCode.RESOURCE_EXHAUSTED == code
    assert "concurrent requests" in message


@pytest.mark.rule("R16.4")
async def test_every_control_method_is_there(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Each answers, or says UNIMPLEMENTED by its name."""

    def ask(client: Client) -> dict[str, str]:
        got = {}
        for method in CONTROL_METHODS:
            request = stubs().message(method.request.__name__)()
            try:
                client.call(method.path[1:], request)
                got[method.name] = "OK"
            except grpc.RpcError as error:
                got[method.name] = f"{error.code().name} {error.details()}"
        return got

    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        got = await server.ask(ask)
    assert {"GetServerInfo", "GetModelInfo", "Abort", "GetKvEventSources"} == {
        name for name, result in got.items() if result == "OK"
    }
    assert all(name in result for name, result in got.items() if result != "OK")
    assert all(result.startswith("UNIMPLEMENTED") for result in got.values() if result != "OK")


@pytest.mark.rule("R16.5")
@pytest.mark.parametrize("streamed", [True, False])
async def test_abort(aio_loop: asyncio.AbstractEventLoop, streamed: bool) -> None:
    """Streaming and unary victims end with OK and ABORTED; empty, unknown and repeated ids are fine."""

    def ask(client: Client) -> Any:
        request = generate_request(request_id="victim")
        make = stubs().message("AbortRequest")
        if streamed:
            stream = client.generate(request)
            messages = [next(stream), next(stream)]
        else:
            future = stubs().call(client.channel, "vllm.Inference/Generate").future(request, timeout=15)
            while engine.statistics().running == 0:
                pass
        for ids in ([], ["unknown"], ["victim", "victim"], ["victim"]):
            client.call("vllm.Control/Abort", make(request_ids=ids))
        if streamed:
            return [*messages, *stream][-1].outputs, stream.code()
        return future.result().outputs, future.code()

    async with open_mock(token_settings(itl_ms=500.0)) as engine, serving(engine) as server:
        outputs, code = await server.ask(ask)
        assert (0, 1) == (engine.statistics().open, engine.statistics().aborted)
    assert grpc.StatusCode.OK == code
    assert 3 == outputs.finish_info.finish_reason
    if streamed:
        assert (0, outputs.finish_info.num_output_tokens) == (outputs.num_tokens, 1)


@pytest.mark.rule("R16.14", "FR-005", "FR-014")
@pytest.mark.parametrize("path", [GENERATE.path, GENERATE_STREAM.path])
async def test_a_client_that_cancels_or_goes(aio_loop: asyncio.AbstractEventLoop, path: str) -> None:
    """Cancel, deadline and a closed connection each free the engine within half a second, streaming and unary."""

    def start(client: Client, **options: Any) -> Any:
        call = stubs().call(client.channel, path[1:])
        begin = call if path == GENERATE_STREAM.path else call.future
        running = begin(generate_request(), **options)
        while engine.statistics().running == 0:
            pass
        return running

    def cancel(client: Client) -> None:
        start(client).cancel()

    def expire(client: Client) -> Any:
        running = start(client, timeout=0.3)
        return running.code()

    def go(client: Client) -> None:
        start(client)
        client.channel.close()

    async with open_mock(token_settings(itl_ms=60_000.0)) as engine, serving(engine) as server:
        for fn in (cancel, expire, go):
            result = await server.ask(fn)
            await wait_until(lambda: engine.statistics().open == 0, 0.5)
            assert result in (None, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert 3 == engine.statistics().accepted


@pytest.mark.rule("FR-010")
async def test_three_hundred_cancels_leave_nothing(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Tasks, streams and calls are back where they were, also of calls cancelled before they began."""
    import asyncio  # noqa: PLC0415 - to count what is left

    def ask(client: Client) -> None:
        for _ in range(100):
            streams = [client.generate(generate_request()) for _ in range(3)]
            next(streams[0])
            for stream in streams:
                stream.cancel()

    async with open_mock(token_settings(itl_ms=1000.0)) as engine, serving(engine) as server:
        before = len(asyncio.all_tasks(aio_loop))
        await server.ask(ask)
        await wait_until(lambda: engine.statistics().open == 0)
        await wait_until(lambda: len(asyncio.all_tasks(aio_loop)) <= before)
        started = trio.current_time()
    # A call that was forgotten would hold the drain.
    assert trio.current_time() - started < 2.0


@pytest.mark.rule("FR-101")
async def test_a_client_that_never_reads(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Its streams stand still without growing, and other streams of the same connection go on."""

    def ask(client: Client) -> Any:
        endless = generate_request(stopping={"max_new_tokens": 30_000})
        stalled = [client.generate(endless) for _ in range(5)]
        for stream in stalled:
            stream.initial_metadata()
        served = [len(list(client.generate(generate_request()))) for _ in range(20)]
        still_open = engine.statistics().open
        for stream in stalled:
            stream.cancel()
        return served, still_open

    async with open_mock(token_settings()) as engine, serving(engine) as server:
        served, still_open = await server.ask(ask)
        assert ([21] * 20, 5) == (served, still_open)
        await wait_until(lambda: engine.statistics().open == 0, 1.0)


async def test_many_streams_at_once(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Sixty-four streams on one connection all end whole."""

    def ask(client: Client) -> list[int]:
        streams = [client.generate(generate_request(request_id=str(number))) for number in range(64)]
        return [len(list(stream)) for stream in streams]

    async with open_mock(token_settings(itl_ms=1.0)) as engine, serving(engine) as server:
        assert [21] * 64 == await server.ask(ask)
