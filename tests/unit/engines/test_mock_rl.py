"""RL controls of the mock engine, in virtual time (wire-and-server 6.5)."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from support.mock_engine import mock_settings, request_of
from trio_sidecar import wire
from trio_sidecar.bridge import run_aio
from trio_sidecar.engines.mock import MockEngine, open_mock
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import FinishInfoFinishReason, PauseMode, methods

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

TOKENS = 10
"""Of each request here; one per second."""


@attrs.define(eq=False)
class Request:
    """One generation: what came, and when it ended."""

    engine: MockEngine
    tokens: int = 0
    reason: FinishInfoFinishReason | None = None
    error: RpcError | None = None
    ended_at: float | None = None

    async def run(self) -> None:
        try:
            await run_aio(self._aio_run)
        except RpcError as error:
            self.error = error
        self.ended_at = trio.current_time()

    async def _aio_run(self) -> None:
        request = request_of(range(100, 120), stopping={"max_new_tokens": TOKENS, "ignore_eos": True})
        async with self.engine.aio_generate(request, {}) as stream:
            while answers := await stream.aio_receive():
                for answer in answers:
                    output = answer.outputs or wire.SequenceOutput()
                    self.tokens += output.num_tokens
                    self.reason = output.finish_info.finish_reason if output.finish_info else None


@attrs.define(eq=False)
class World:
    """An engine with controls, and requests that run."""

    engine: MockEngine
    nursery: trio.Nursery

    def ask(self) -> Request:
        request = Request(self.engine)
        self.nursery.start_soon(request.run)
        return request

    async def call(self, method: methods.Method[Any, Any], **fields: Any) -> Any:
        return await run_aio(self.engine.aio_call, method, method.request(**fields))

    async def pause(self, mode: PauseMode, **fields: Any) -> None:
        await self.call(methods.PAUSE_GENERATION, mode=mode, **fields)

    async def state(self) -> tuple[bool, bool]:
        """Paused, and asleep."""
        return (await self.call(methods.IS_PAUSED)).paused, (await self.call(methods.IS_SLEEPING)).sleeping


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    settings = mock_settings(rl_controls=True, ttft_ms=1000.0, itl_ms=1000.0, block_size=4)
    async with open_mock(settings) as engine, trio.open_nursery() as nursery:
        yield World(engine, nursery)


async def test_an_abort_pause_ends_requests_and_refuses_new_ones(autojump_clock: MockClock, aio_loop: object) -> None:
    """What runs ends with ABORTED, what comes is UNAVAILABLE, until generation is resumed."""
    async with world() as here:
        running = here.ask()
        await trio.sleep(3.5)
        await here.pause(PauseMode.UNSPECIFIED)
        refused = here.ask()
        await trio.sleep(0.1)
        assert (3, FinishInfoFinishReason.ABORTED) == (running.tokens, running.reason)
        assert refused.error is not None
        assert StatusCode.UNAVAILABLE == refused.error.status
        assert (True, True) == await here.state()
        await here.call(methods.RESUME_GENERATION)
        await here.call(methods.RESUME_GENERATION)
        assert (False, False) == await here.state()
        again = here.ask()
    assert FinishInfoFinishReason.LENGTH == again.reason


async def test_a_wait_pause_lets_requests_end(autojump_clock: MockClock, aio_loop: object) -> None:
    """It returns when the last one has ended, and refuses those that come meanwhile."""
    async with world() as here:
        running = here.ask()
        await trio.sleep(3.5)
        here.nursery.start_soon(here.pause, PauseMode.WAIT)
        await trio.sleep(1)
        refused = here.ask()
        await trio.sleep(0.1)
        assert refused.error is not None
        assert (False, False) == await here.state()
        await trio.sleep(10)
        assert (True, True) == await here.state()
        assert (TOKENS, FinishInfoFinishReason.LENGTH) == (running.tokens, running.reason)


async def test_a_keep_pause_freezes_requests_and_queues_new_ones(autojump_clock: MockClock, aio_loop: object) -> None:
    """Nothing moves while it lasts, and afterwards everything goes on as if no time had passed."""
    async with world() as here:
        running = here.ask()
        await trio.sleep(3.5)
        await here.pause(PauseMode.KEEP)
        queued = here.ask()
        await trio.sleep(100)
        assert (3, 0) == (running.tokens, queued.tokens)
        await here.call(methods.RESUME_GENERATION)
    assert (TOKENS, TOKENS) == (running.tokens, queued.tokens)
    assert 110.0 == pytest.approx(running.ended_at, abs=0.01)
    assert 113.5 == pytest.approx(queued.ended_at, abs=0.01)


@pytest.mark.parametrize(("clear_cache", "cached"), [(None, 0), (True, 0), (False, 16)])
async def test_a_pause_clears_the_cache_unless_told_not_to(
    autojump_clock: MockClock,
    aio_loop: object,
    clear_cache: bool | None,
    cached: int,
) -> None:
    """Absent means true."""
    async with world() as here:
        first = here.ask()
        await trio.sleep(20)
        await here.pause(PauseMode.KEEP, clear_cache=clear_cache)
        assert TOKENS == first.tokens
        use = here.engine.cache._ranks[0].use
        assert cached == use(range(100, 120))[0]


async def test_an_engine_that_sleeps_wakes_in_parts(autojump_clock: MockClock, aio_loop: object) -> None:
    """Requests queue while it sleeps; they go on when all memory is back."""
    async with world() as here:
        await here.call(methods.SLEEP)
        assert (True, True) == await here.state()
        queued = here.ask()
        await here.call(methods.WAKE_UP, tags=["weights"])
        await trio.sleep(50)
        assert ((True, True), 0, None) == (await here.state(), queued.tokens, queued.error)
        await here.call(methods.WAKE_UP, tags=["kv_cache"])
        assert (False, False) == await here.state()
    assert TOKENS == queued.tokens


async def test_waking_up_without_tags_wakes_everything(autojump_clock: MockClock, aio_loop: object) -> None:
    """A resume alone does not wake an engine, but waking it up does."""
    async with world() as here:
        await here.call(methods.SLEEP, level=2)
        await here.call(methods.RESUME_GENERATION)
        assert (False, True) == await here.state()
        await here.call(methods.WAKE_UP)
        assert (False, False) == await here.state()


async def test_weights_have_a_version(autojump_clock: MockClock, aio_loop: object) -> None:
    """It begins as ``default`` and is set by the end of an update, if that names one, or alone."""
    async with world() as here:

        async def version() -> str:
            answer: wire.GetWeightVersionResponse = await here.call(methods.GET_WEIGHT_VERSION)
            return answer.weight_version

        assert "default" == await version()
        await here.call(methods.INIT_WEIGHT_TRANSFER_ENGINE, init_info_json=b"{}")
        await here.call(methods.START_WEIGHT_UPDATE)
        await here.call(methods.START_DRAFT_WEIGHT_UPDATE)
        await here.call(methods.UPDATE_WEIGHTS, update_info_json=b'{"names": []}')
        await here.call(methods.FINISH_WEIGHT_UPDATE)
        assert "default" == await version()
        await here.call(methods.FINISH_WEIGHT_UPDATE, weight_version="step-1")
        assert "step-1" == await version()
        await here.call(methods.UPDATE_WEIGHT_VERSION, weight_version="step-2")
        assert "step-2" == await version()


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        (methods.INIT_WEIGHT_TRANSFER_ENGINE, {"init_info_json": b""}),
        (methods.INIT_WEIGHT_TRANSFER_ENGINE, {"init_info_json": b"[]"}),
        (methods.UPDATE_WEIGHTS, {"update_info_json": b"{"}),
        (methods.FINISH_WEIGHT_UPDATE, {"weight_version": " "}),
        (methods.UPDATE_WEIGHT_VERSION, {"weight_version": ""}),
        (methods.PAUSE_GENERATION, {"mode": 9}),
    ],
)
async def test_wrong_arguments_are_refused(
    autojump_clock: MockClock, aio_loop: object, method: methods.Method[Any, Any], fields: dict[str, Any]
) -> None:
    """As vLLM refuses them."""
    async with world() as here:
        with pytest.raises(RpcError) as caught:
            await here.call(method, **fields)
        assert StatusCode.INVALID_ARGUMENT == caught.value.status
        assert (False, False) == await here.state()


async def test_the_engine_says_what_it_can_do(autojump_clock: MockClock, aio_loop: object) -> None:
    """Everything, if it has controls at all."""
    async with world() as here:
        found = (await here.call(methods.GET_SERVER_INFO)).rl_capabilities
        assert (
            wire.RlCapabilities(
                weight_transfer_enabled=True,
                weight_transfer_backend="mock",
                sleep_mode_enabled=True,
                draft_weight_updates_enabled=True,
            )
            == found
        )
