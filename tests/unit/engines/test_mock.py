"""The mock engine behind the contract: pace, queue, abort, release; in virtual time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from support.mock_engine import aio_collect, finish_of, ids_of, mock_settings, outputs_of, request_of, token_settings
from trio_sidecar.bridge import aio_now, aio_sleep, run_aio
from trio_sidecar.engines.mock import MockEngine, MockStatistics, open_mock
from trio_sidecar.engines.mock_stream import MAX_ANSWERS_PER_RECEIVE
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import (
    AbortRequest,
    AbortResponse,
    FinishInfoFinishReason,
    GenerateResponse,
    GetKvEventSourcesRequest,
    GetModelInfoRequest,
    GetServerInfoRequest,
    HealthCheckResponseServingStatus,
    ResponseOptions,
)
from trio_sidecar.wire.methods import (
    ABORT,
    CONTROL_METHODS,
    GET_KV_EVENT_SOURCES,
    GET_MODEL_INFO,
    GET_SERVER_INFO,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ABORTED = FinishInfoFinishReason.ABORTED
PACED = token_settings(ttft_ms=500.0, itl_ms=100.0)


async def aio_timed(engine: MockEngine, request: Any) -> list[tuple[float, int]]:
    """When each receive returned, in seconds, and how many tokens it brought."""
    started = aio_now()
    seen = []
    async with engine.aio_generate(request, {}) as stream:
        while batch := await stream.aio_receive():
            seen.append((round(aio_now() - started, 3), len(outputs_of(batch))))
    return seen


async def test_pace(aio_loop: object, autojump_clock: object) -> None:
    """The first token comes after ttft, each further one itl later, one per message."""
    async with open_mock(PACED) as engine:
        seen = await run_aio(aio_timed, engine, request_of(stopping={"max_new_tokens": 4}))
    assert [(0.5, 1), (0.6, 1), (0.7, 1), (0.8, 1)] == seen


@pytest.mark.rule("R16.18")
async def test_speedup_divides_both_times(aio_loop: object, autojump_clock: object) -> None:
    """A speedup of a tenth makes everything ten times slower."""
    async with open_mock(token_settings(ttft_ms=500.0, itl_ms=100.0, speedup_ratio=0.1)) as engine:
        seen = await run_aio(aio_timed, engine, request_of(stopping={"max_new_tokens": 2}))
    assert [(5.0, 1), (6.0, 1)] == seen


async def test_pace_does_not_drift_and_a_stalled_reader_catches_up(aio_loop: object, autojump_clock: object) -> None:
    """Tokens that became due during a stall come together, and the next one comes at its own time."""

    async def aio_stall(engine: MockEngine) -> list[tuple[float, int]]:
        started = aio_now()
        seen = []
        async with engine.aio_generate(request_of(stopping={"max_new_tokens": 8}), {}) as stream:
            while batch := await stream.aio_receive():
                seen.append((round(aio_now() - started, 3), len(outputs_of(batch))))
                if len(seen) == 2:
                    await aio_sleep(0.35)
        return seen

    async with open_mock(PACED) as engine:
        seen = await run_aio(aio_stall, engine)
    assert [(0.5, 1), (0.6, 1), (0.95, 3), (1.0, 1), (1.1, 1), (1.2, 1)] == seen


async def test_a_long_stream_ends_when_they_should(aio_loop: object, autojump_clock: object) -> None:
    """No error adds up over a long stream."""
    async with open_mock(token_settings(ttft_ms=0.0, itl_ms=7.0)) as engine:
        seen = await run_aio(aio_timed, engine, request_of(stopping={"max_new_tokens": 3000}))
    assert 2999 * 0.007 == pytest.approx(seen[-1][0], abs=0.002)
    assert 3000 == sum(count for _, count in seen)


async def test_a_flood_shares_the_loop(aio_loop: object, autojump_clock: object) -> None:
    """Without a pace everything is due, yet a receive stays small and other tasks run in between."""
    async with open_mock(token_settings()) as engine:
        seen = []
        async with trio.open_nursery() as nursery:
            for name in "ab":

                async def aio_read(name: str) -> None:
                    async with engine.aio_generate(request_of(stopping={"max_new_tokens": 1000}), {}) as stream:
                        while batch := await stream.aio_receive():
                            assert len(batch) <= MAX_ANSWERS_PER_RECEIVE + 1
                            seen.append(name)

                nursery.start_soon(run_aio, aio_read, name)
        first_half = seen[: len(seen) // 2]
    assert {"a", "b"} == set(first_half)


async def test_nothing_after_the_end(aio_loop: object, autojump_clock: object) -> None:
    """A finished stream answers with nothing, again and again."""

    async def aio_read_on(engine: MockEngine) -> list[Sequence[GenerateResponse]]:
        async with engine.aio_generate(request_of(stopping={"max_new_tokens": 1}), {}) as stream:
            return [await stream.aio_receive() for _ in range(3)]

    async with open_mock(token_settings()) as engine:
        answers = await run_aio(aio_read_on, engine)
    assert [2, 0, 0] == [len(each) for each in answers]


async def test_entering_returns_before_any_token(aio_loop: object, autojump_clock: object) -> None:
    """A request is accepted at once, whatever the time to the first token."""

    async def aio_enter(engine: MockEngine) -> float:
        started = aio_now()
        async with engine.aio_generate(request_of(), {}):
            return aio_now() - started

    async with open_mock(token_settings(ttft_ms=10_000.0)) as engine:
        assert 0.0 == await run_aio(aio_enter, engine)


@pytest.mark.rule("R16.14")
async def test_leaving_releases_at_once(aio_loop: object, autojump_clock: object) -> None:
    """Cancelled while it waits for a token, a request leaves nothing behind."""
    async with open_mock(token_settings(itl_ms=1000.0)) as engine:
        with trio.move_on_after(2.5):
            await run_aio(aio_collect, engine, request_of())
        assert MockStatistics(open=0, running=0, waiting=0, accepted=1, refused=0, aborted=0) == engine.statistics()


@pytest.mark.rule("FR-010")
async def test_a_thousand_cancels_leave_nothing(aio_loop: object, autojump_clock: object) -> None:
    """Neither streams nor ids nor heap entries pile up, queued requests included."""
    async with open_mock(token_settings(itl_ms=1000.0, max_num_seqs=1, max_concurrent_requests=8)) as engine:
        for _ in range(250):
            with trio.move_on_after(0.5):
                async with trio.open_nursery() as nursery:
                    for number in range(4):
                        nursery.start_soon(run_aio, aio_collect, engine, request_of(request_id=f"r{number}"))
        assert (0, 1000) == (engine.statistics().open, engine.statistics().accepted)
        assert (0, 0) == (len(engine._by_request_id), len(engine._running))
        assert len(engine._waiting) <= 16


@pytest.mark.rule("R16.3")
async def test_concurrency_limit(aio_loop: object, autojump_clock: object) -> None:
    """Beyond the limit a request is refused, not queued; a place that becomes free is given again."""
    async with open_mock(token_settings(max_concurrent_requests=2, itl_ms=100.0)) as engine:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(run_aio, aio_collect, engine, request_of())
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(RpcError, match="all 2 concurrent requests are taken") as caught:
                await run_aio(aio_collect, engine, request_of())
            assert StatusCode.RESOURCE_EXHAUSTED == caught.value.status
        assert 21 == len(await run_aio(aio_collect, engine, request_of()))
        assert (3, 1) == (engine.statistics().accepted, engine.statistics().refused)


async def test_queue_by_priority(aio_loop: object, autojump_clock: object) -> None:
    """Beyond max_num_seqs requests wait; the lowest priority number runs first, then the one that came first."""
    order: list[str] = []

    async def ask(name: str, priority: int) -> None:
        await run_aio(aio_collect, engine, request_of(priority=priority, stopping={"max_new_tokens": 2}))
        order.append(name)

    async with open_mock(token_settings(max_num_seqs=1, itl_ms=100.0)) as engine, trio.open_nursery() as nursery:
        for name, priority in [("first", 9), ("late", 5), ("later", 5), ("urgent", -1)]:
            nursery.start_soon(ask, name, priority)
            await trio.testing.wait_all_tasks_blocked()
        statistics = engine.statistics()
        assert (4, 1, 3) == (statistics.open, statistics.running, statistics.waiting)
    assert ["first", "urgent", "late", "later"] == order


async def test_a_queued_request_that_leaves_gives_no_turn_away(aio_loop: object, autojump_clock: object) -> None:
    """Cancelled in the queue, a request is skipped."""
    async with open_mock(token_settings(max_num_seqs=1, itl_ms=100.0)) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_aio, aio_collect, engine, request_of())
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(0.05):
                await run_aio(aio_collect, engine, request_of())
            assert (1, 0) == (engine.statistics().open, engine.statistics().waiting)
            nursery.start_soon(run_aio, aio_collect, engine, request_of())
        assert 0 == engine.statistics().open


async def abort(engine: MockEngine, *ids: str) -> AbortResponse:
    """The Abort call."""
    return await run_aio(engine.aio_call, ABORT, AbortRequest(request_ids=list(ids)))


@pytest.mark.rule("R16.5", "R10.22")
async def test_abort_in_mid_stream(aio_loop: object, autojump_clock: object) -> None:
    """A tokenless terminal with the count so far ends every stream of that id, and no other."""
    results: dict[str, list[GenerateResponse]] = {}

    async def ask(name: str, request_id: str) -> None:
        results[name] = await run_aio(aio_collect, engine, request_of(request_id=request_id))

    async with open_mock(token_settings(ttft_ms=0.0, itl_ms=100.0)) as engine:
        async with trio.open_nursery() as nursery:
            for name, request_id in [("a", "x"), ("b", "x"), ("c", "y")]:
                nursery.start_soon(ask, name, request_id)
            await trio.sleep(0.25)
            assert AbortResponse() == await abort(engine, "x", "x", "unknown")
            assert 1 == engine.statistics().open
        assert 2 == engine.statistics().aborted
    for name in "ab":
        finish = finish_of(results[name])
        assert (ABORTED, 3) == (finish.finish_reason, finish.num_output_tokens)
        last = outputs_of(results[name])[-1]
        assert (0, "", None) == (last.num_tokens, last.text, finish.kv_transfer_params)
        assert 3 == sum(output.num_tokens for output in outputs_of(results[name]))
    assert 20 == finish_of(results["c"]).num_output_tokens


async def test_abort_before_the_first_token(aio_loop: object, autojump_clock: object) -> None:
    """Prompt info comes first even then; also for one that still waits in the queue."""
    results: list[list[GenerateResponse]] = []

    async def ask() -> None:
        results.append(await run_aio(aio_collect, engine, request_of(request_id="x")))

    async with open_mock(token_settings(ttft_ms=1000.0, max_num_seqs=1)) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        await abort(engine, "x")
    for answers in results:
        assert answers[0].prompt_info is not None
        assert (2, ABORTED, 0) == (len(answers), finish_of(answers).finish_reason, finish_of(answers).num_output_tokens)


async def test_abort_of_nothing(aio_loop: object, autojump_clock: object) -> None:
    """An empty list, an unknown id and a finished request: OK, and nothing happens."""
    async with open_mock(token_settings()) as engine:
        await run_aio(aio_collect, engine, request_of(request_id="x"))
        await abort(engine)
        await abort(engine, "x", "y")
        assert 0 == engine.statistics().aborted
        assert 0 == len(engine._by_request_id)


@pytest.mark.rule("FR-011")
async def test_abort_gives_held_text_and_no_new_token(aio_loop: object, autojump_clock: object) -> None:
    """What was withheld for a stop string is given out; tokens that were due and not read are not."""

    async def aio_abort_late(engine: MockEngine) -> list[GenerateResponse]:
        request = request_of(
            request_id="x",
            stopping={"stop_strings": ["z" * 50]},
            response=ResponseOptions(output_token_ids=True),
        )
        answers: list[GenerateResponse] = []
        async with engine.aio_generate(request, {}) as stream:
            answers += await stream.aio_receive()
            await aio_sleep(5.0)
            await engine.aio_call(ABORT, AbortRequest(request_ids=["x"]))
            while batch := await stream.aio_receive():
                answers += batch
        return answers

    async with open_mock(mock_settings(itl_ms=100.0)) as engine:
        answers = await run_aio(aio_abort_late, engine)
    assert (1, 3) == (len(ids_of(answers)), len(answers))
    assert "" != outputs_of(answers)[-1].text


async def test_closing_the_engine_fails_what_is_open(aio_loop: object, autojump_clock: object) -> None:
    """Streams end as UNAVAILABLE, new requests too, and health says so."""
    caught: list[RpcError] = []

    async def ask() -> None:
        with pytest.raises(RpcError) as error:
            await run_aio(aio_collect, engine, request_of())
        caught.append(error.value)

    async with trio.open_nursery() as nursery:
        async with open_mock(attrs.evolve(PACED, max_num_seqs=1)) as engine:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
        assert 0 == engine.statistics().open
        await ask()
    assert [StatusCode.UNAVAILABLE] * 3 == [error.status for error in caught]
    assert HealthCheckResponseServingStatus.NOT_SERVING == await run_aio(engine.aio_check_health, "")


@pytest.mark.rule("R16.3")
async def test_model_and_server_info(aio_loop: object, autojump_clock: object) -> None:
    """The shipped model directory under Dynamo's mocker's name, and sizes from the engine arguments."""
    settings = mock_settings(
        block_size=8, num_gpu_blocks=99, max_num_seqs=7, max_num_batched_tokens=77, max_model_len=777
    )
    async with open_mock(settings) as engine:
        model = await run_aio(engine.aio_call, GET_MODEL_INFO, GetModelInfoRequest())
        server = await run_aio(engine.aio_call, GET_SERVER_INFO, GetServerInfoRequest())
    assert model.model_id.endswith("mock_model")
    assert ("mocker-model", True, True) == (
        model.served_model_name,
        model.supports_text_input,
        model.supports_token_ids_input,
    )
    assert (False, False, "", "") == (
        model.supports_lora,
        model.supports_multimodal,
        model.reasoning_parser,
        model.tool_call_parser,
    )
    assert "vllm" == server.api_version
    assert re.fullmatch("dynamo-vllm-mocker-aggregated-[0-9a-f]{8}", server.instance_id)
    assert (8, 99, 7, 77, 777, 8) == (
        server.kv_block_size,
        server.total_kv_blocks,
        server.max_running_requests,
        server.max_batched_tokens,
        server.max_model_len,
        server.effective_attention_block_size,
    )
    sizes = server.parallelism
    assert sizes is not None
    assert (1, 1, 1, 1, 1, 0) == (
        sizes.tensor_parallel_size,
        sizes.pipeline_parallel_size,
        sizes.data_parallel_size,
        sizes.data_parallel_size_local,
        sizes.world_size,
        sizes.data_parallel_rank,
    )


async def test_each_engine_is_a_lifetime_of_its_own(aio_loop: object) -> None:
    """A server that is started again with the same settings has another instance id, as vLLM has."""
    lifetimes = set()
    for _ in range(2):
        async with open_mock(token_settings()) as engine:
            first, second = [await run_aio(engine.aio_call, GET_SERVER_INFO, GetServerInfoRequest()) for _ in range(2)]
            assert first.instance_id == second.instance_id
            lifetimes.add(first.instance_id)
    assert 2 == len(lifetimes)


@pytest.mark.rule("R16.3")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (token_settings(), ("mocker-model", False)),
        (mock_settings(model="org/name"), ("org/name", True)),
        (mock_settings(model="org/name", served_model_name="mine"), ("mine", True)),
    ],
)
async def test_names(aio_loop: object, autojump_clock: object, settings: Any, expected: tuple[str, bool]) -> None:
    """A given model is served under its own name unless another is given; token mode takes no text."""
    async with open_mock(settings) as engine:
        model = await run_aio(engine.aio_call, GET_MODEL_INFO, GetModelInfoRequest())
    assert expected == (model.served_model_name, model.supports_text_input)
    assert settings.model in (model.model_id, "mocker-model")


@pytest.mark.rule("R16.4", "R16.6")
async def test_the_rest_of_control(aio_loop: object, autojump_clock: object) -> None:
    """No KV event source is listed; adapters, life cycle and shutdown are UNIMPLEMENTED by name."""
    known = {ABORT, GET_MODEL_INFO, GET_SERVER_INFO, GET_KV_EVENT_SOURCES}
    async with open_mock(mock_settings()) as engine:
        assert [] == (await run_aio(engine.aio_call, GET_KV_EVENT_SOURCES, GetKvEventSourcesRequest())).sources
        for method in set(CONTROL_METHODS) - known:
            with pytest.raises(RpcError, match=method.name) as caught:
                await run_aio(engine.aio_call, method, method.request())
            assert StatusCode.UNIMPLEMENTED == caught.value.status


@pytest.mark.rule("R16.4")
async def test_health(aio_loop: object, autojump_clock: object) -> None:
    """SERVING from the start for the known names; settable for tests; others NOT_FOUND."""
    async with open_mock(mock_settings()) as engine:
        for name in ("", "vllm.Inference", "vllm.Control"):
            assert HealthCheckResponseServingStatus.SERVING == await run_aio(engine.aio_check_health, name)
        engine.set_health(HealthCheckResponseServingStatus.NOT_SERVING)
        assert HealthCheckResponseServingStatus.NOT_SERVING == await run_aio(engine.aio_check_health, "")
        with pytest.raises(RpcError) as caught:
            await run_aio(engine.aio_check_health, "vllm.Lora")
    assert StatusCode.NOT_FOUND == caught.value.status


async def test_receiving_without_entering_is_a_mistake(aio_loop: object, autojump_clock: object) -> None:
    """A programming error says so instead of hanging."""
    async with open_mock(mock_settings()) as engine:
        with pytest.raises(RuntimeError, match="not entered"):
            await run_aio(engine.aio_generate(request_of(), {}).aio_receive)
