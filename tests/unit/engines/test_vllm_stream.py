"""One generation over a stand-in for vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from support.traces import PARENT
from support.vllm_fakes import (
    EngineDeadError,
    FakeLlm,
    FakeRequests,
    RetryableRequestError,
    Scores,
    VLLMClientError,
    facts,
    output,
)
from trio_sidecar.bridge import run_aio
from trio_sidecar.engines.vllm_stream import MANY_OUTPUTS, VllmStream
from trio_sidecar.errors import DeadEngine, RpcError, StatusCode
from trio_sidecar.wire import (
    CandidateTokens,
    FinishInfoFinishReason,
    GenerateRequest,
    GenerateResponse,
    ResponseOptions,
    TokenIds,
)

if TYPE_CHECKING:
    import asyncio

    from trio_sidecar.engines.vllm_facts import VllmFacts


class NoLoras:
    """A registry without adapters."""

    def find(self, name: str) -> None:
        """None is loaded."""


@attrs.define(eq=False)
class Target:
    """The engine around one stream."""

    llm: FakeLlm = attrs.field(factory=FakeLlm)
    facts: VllmFacts = attrs.field(factory=facts)
    requests: FakeRequests = attrs.field(factory=FakeRequests)
    loras: Any = attrs.field(factory=NoLoras)
    streams: list[VllmStream] = attrs.field(factory=list)
    deaths: int = 0

    def admit(self, stream: VllmStream, request_id: str) -> None:
        """Count it in."""
        self.streams.append(stream)

    def release(self, stream: VllmStream) -> None:
        """Count it out."""
        if stream in self.streams:
            self.streams.remove(stream)

    def died(self) -> None:
        """Count."""
        self.deaths += 1

    def stream(self, **fields: Any) -> VllmStream:
        """A stream of a request with the id ``r`` and a prompt of one token."""
        plain = {"request_id": "r", "token_ids": TokenIds(ids=[1])}
        return VllmStream(self, GenerateRequest(**(plain | fields)), {})  # type: ignore[arg-type]


@pytest.fixture
def target() -> Target:
    """An engine with nothing to do."""
    return Target()


def texts(answers: Any) -> list[str]:
    """The texts of answers; ``prompt`` stands for the prompt's."""
    return ["prompt" if answer.outputs is None else answer.outputs.text for answer in answers]


async def test_a_request_from_submission_to_its_end(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """Entering submits; answers come as vLLM puts them; the terminal ends the stream, and nothing is aborted."""

    async def aio_main() -> None:
        async with target.stream() as stream:
            assert 1 == len(target.streams)
            collector = target.llm.only
            collector.put(output("a", [5]))
            assert ["prompt", "a"] == texts(await stream.aio_receive())
            collector.put(output("b", [6], finish_reason="length"))
            assert ["b"] == texts(await stream.aio_receive())
            assert () == await stream.aio_receive()
        assert [] == target.llm.aborted
        assert [] == target.streams

    await run_aio(aio_main)


async def test_the_trace_context_goes_on_where_vllm_traces(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """Otherwise vLLM would say that it does not; and a malformed context never goes on."""
    request = GenerateRequest(request_id="r", token_ids=TokenIds(ids=[1]))
    whole = {"traceparent": PARENT, "tracestate": "a=b", "x-request-id": "1"}

    async def aio_main() -> list[object]:
        for target.llm.traces, metadata in [(False, whole), (True, whole), (True, {"traceparent": "x"}), (True, {})]:
            async with VllmStream(target, request, metadata):
                pass
        return [arguments.get("trace_headers") for arguments in target.llm.arguments]

    assert [None, {"traceparent": PARENT, "tracestate": "a=b"}, None, None] == await run_aio(aio_main)


async def test_leaving_early_frees_the_request(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """A stream that is left before its end tells vLLM to let the request go, by its internal id."""

    async def aio_main() -> None:
        async with target.stream():
            pass
        assert ["r-1"] == target.llm.aborted

    await run_aio(aio_main)


async def test_a_cancel_frees_the_request(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """The cancel of the scope around a stream that waits aborts it before the scope is left."""
    entered = trio.Event()

    async def aio_main() -> None:
        async with target.stream() as stream:
            entered.set()
            await stream.aio_receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, aio_main)
        await entered.wait()
        nursery.cancel_scope.cancel()
    assert ["r-1"] == target.llm.aborted
    assert [] == target.streams


async def test_a_cancel_during_submission_frees_the_request(
    target: Target, aio_loop: asyncio.AbstractEventLoop
) -> None:
    """A submission that has begun is seen through, so that its request can be aborted."""
    submitting = trio.Event()
    submit = target.llm.add_request

    async def slow_add_request(request_id: str, **rest: Any) -> Any:
        from trio_sidecar.bridge import aio_sleep  # noqa: PLC0415

        submitting.set()
        await aio_sleep(0.01)
        return await submit(request_id, **rest)

    target.llm.add_request = slow_add_request  # type: ignore[method-assign]

    async def aio_main() -> None:
        async with target.stream():
            pytest.fail("entered")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, aio_main)
        await submitting.wait()
        nursery.cancel_scope.cancel()
    assert ["r-1"] == target.llm.aborted


async def test_what_came_before_the_handover_comes_first(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """An output that vLLM's own collector got before we took over is not lost."""
    target.llm.early = output("early", [5])

    async def aio_main() -> None:
        async with target.stream() as stream:
            target.llm.only.put(output(" late", [6]))
            assert ["prompt", "early late"] == texts(await stream.aio_receive())

    await run_aio(aio_main)


async def test_a_reader_that_does_not_read_costs_few_objects(
    target: Target, aio_loop: asyncio.AbstractEventLoop
) -> None:
    """Outputs beyond a bound are merged as they come; the reader then gets one message with all of them."""
    count = 10 * MANY_OUTPUTS

    async def aio_main() -> None:
        options = ResponseOptions(
            output_token_ids=True, output_logprobs=True, output_candidates=CandidateTokens(top_n=1)
        )
        async with target.stream(response=options) as stream:
            collector = target.llm.only
            for number in range(count):
                scores = Scores.of([[(number % 50, -1.0, 1), (number % 50, -1.0, 1)]])
                collector.put(output("x", [number % 50], logprobs=scores))
                assert stream._outbox is not None
                assert len(stream._outbox._outputs) < MANY_OUTPUTS
                assert len(stream._outbox._answers) <= 2
            collector.put(output("end", [], finish_reason="abort"))
            prompt, merged = await stream.aio_receive()
            assert prompt.prompt_info is not None
            found = merged.outputs
            assert found is not None
            assert "x" * count + "end" == found.text
            assert [number % 50 for number in range(count)] == found.token_ids
            assert count == found.num_tokens == len(found.logprobs) == len(found.ranks) == len(found.candidate_tokens)
            assert found.finish_info is not None
            assert FinishInfoFinishReason.ABORTED == found.finish_info.finish_reason
            assert count == found.finish_info.num_output_tokens

    await run_aio(aio_main)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (VLLMClientError("schema"), StatusCode.INVALID_ARGUMENT),
        (ValueError("schema"), StatusCode.INVALID_ARGUMENT),
        (RetryableRequestError("paused"), StatusCode.UNAVAILABLE),
        (RuntimeError("oops"), StatusCode.INTERNAL),
    ],
)
async def test_a_refusal_of_vllm_comes_before_the_stream(
    target: Target, aio_loop: asyncio.AbstractEventLoop, error: Exception, status: StatusCode
) -> None:
    """What ``add_request`` raises becomes a status on entering, and nothing stays behind."""
    target.llm.refusal = error

    async def aio_main() -> None:
        async with target.stream():
            pytest.fail("entered")

    with pytest.raises(RpcError, match=str(error)) as caught:
        await run_aio(aio_main)
    assert status == caught.value.status
    assert [] == target.streams
    assert [] == target.llm.aborted


async def test_a_late_refusal_comes_after_the_prompt(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """An engine that refuses a request it was given: the prompt's message, then the status."""

    async def aio_main() -> None:
        async with target.stream() as stream:
            target.llm.only.put(RetryableRequestError("paused"))
            assert ["prompt"] == texts(await stream.aio_receive())
            with pytest.raises(RpcError, match="paused") as caught:
                await stream.aio_receive()
            assert StatusCode.UNAVAILABLE == caught.value.status
            assert 0 == target.deaths

    await run_aio(aio_main)


async def test_a_death_comes_after_what_was_delivered(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """Tokens that arrived are handed out, then INTERNAL; the engine hears of its death (FR-018)."""

    async def aio_main() -> None:
        async with target.stream() as stream:
            target.llm.only.put(output("a", [5]))
            target.llm.only.put(EngineDeadError())
            assert ["prompt", "a"] == texts(await stream.aio_receive())
            with pytest.raises(DeadEngine, match="died") as caught:
                await stream.aio_receive()
            assert StatusCode.INTERNAL == caught.value.status
            assert 1 == target.deaths

    await run_aio(aio_main)


async def test_an_output_that_cannot_be_read_spares_the_output_loop(
    target: Target, aio_loop: asyncio.AbstractEventLoop
) -> None:
    """``put`` never raises into vLLM; the request fails with INTERNAL instead."""

    async def aio_main() -> None:
        async with target.stream() as stream:
            for _ in range(MANY_OUTPUTS):
                target.llm.only.put(object())
            with pytest.raises(RpcError, match="cannot be read"):
                await stream.aio_receive()

    await run_aio(aio_main)


@pytest.mark.parametrize("length", [3, 5000])
async def test_a_text_prompt_is_tokenised(target: Target, aio_loop: asyncio.AbstractEventLoop, length: int) -> None:
    """Short texts at once, long ones in a thread: the ids are the same."""
    target.facts = facts(max_model_len=10_000)

    async def aio_main() -> list[GenerateResponse]:
        async with target.stream(token_ids=None, text="a" * length) as stream:
            target.llm.only.put(output(finish_reason="length"))
            return list(await stream.aio_receive())

    await run_aio(aio_main)
    assert [ord("a") % 90] * length == target.llm.arguments[0]["prompt"]


async def test_an_empty_text_is_refused(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """It gives no token."""

    async def aio_main() -> None:
        async with target.stream(token_ids=None, text=""):
            pytest.fail("entered")

    with pytest.raises(RpcError, match="text is empty"):
        await run_aio(aio_main)
