"""Waiting for one of two things, and for threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from trio_sidecar.bridge import (
    AioCancelled,
    AioEvent,
    AioInterrupted,
    Host,
    aio_in_thread,
    aio_sleep,
    aio_unless,
    run,
    run_aio,
)
from trio_sidecar.bridge.loop import current_loop

if TYPE_CHECKING:
    import asyncio


async def test_a_function_that_ends_first_returns(
    aio_loop: asyncio.AbstractEventLoop, autojump_clock: trio.testing.MockClock
) -> None:
    """Its result, or its error, comes out; the event is watched no longer."""

    async def aio_main() -> None:
        event = AioEvent()

        async def aio_answer(value: int) -> float:
            await aio_sleep(1.0)
            return 1 / value

        assert 0.5 == await aio_unless(event, aio_answer, 2)
        with pytest.raises(ZeroDivisionError):
            await aio_unless(event, aio_answer, 0)

    await run_aio(aio_main)


async def test_an_event_that_comes_first_cancels_the_function(
    aio_loop: asyncio.AbstractEventLoop, autojump_clock: trio.testing.MockClock
) -> None:
    """Also one that has come already; then the function is not begun."""
    seen: list[str] = []
    event: AioEvent | None = None

    async def aio_wait() -> None:
        seen.append("begun")
        try:
            await aio_sleep(3600.0)
        except AioCancelled:
            seen.append("cancelled")
            raise

    async def aio_main() -> None:
        nonlocal event
        event = AioEvent()
        for _ in range(2):
            with pytest.raises(AioInterrupted):
                await aio_unless(event, aio_wait)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, aio_main)
        await trio.sleep(1.0)
        assert event is not None
        event.set()
    assert ["begun", "cancelled"] == seen


def test_threads_on_both_hosts(host: Host) -> None:
    """The loop's own threads, and those of a pool that a library brings."""

    async def aio_main(loop: asyncio.AbstractEventLoop) -> list[str]:
        with ThreadPoolExecutor(1, thread_name_prefix="theirs") as pool:
            theirs = await loop.run_in_executor(pool, lambda: threading.current_thread().name)
            with pytest.raises(ZeroDivisionError):
                await loop.run_in_executor(pool, lambda: 1 // 0)
        return [theirs, await aio_in_thread(lambda word: word + threading.current_thread().name, "ours ")]

    async def main() -> list[str]:
        return await run_aio(aio_main, current_loop())

    theirs, ours = run(main, host=host)
    assert theirs.startswith("theirs")
    assert ours.startswith("ours ")
    assert threading.current_thread().name not in ours
