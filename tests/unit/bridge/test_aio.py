"""The asyncio primitives, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
import trio

from trio_sidecar.bridge import (
    AioEvent,
    AioSignal,
    aio_checkpoint,
    aio_now,
    aio_shielded,
    aio_sleep,
    aio_timeout,
    run_aio,
)


async def test_event_wakes_all(aio_loop: object, autojump_clock: object) -> None:
    """Every task that waits for an event is woken, from Trio too; later ones do not wait."""
    event = AioEvent()
    woken: list[int] = []

    async def aio_wait(number: int) -> None:
        await event.aio_wait()
        woken.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, aio_wait, 1)
        nursery.start_soon(run_aio, aio_wait, 2)
        await trio.sleep(1)
        assert [] == woken
        event.set()
    await run_aio(aio_wait, 3)
    assert [1, 2, 3] == sorted(woken)
    assert event.is_set()
    event.clear()
    assert not event.is_set()


async def test_signal_keeps_an_early_call(aio_loop: object, autojump_clock: object) -> None:
    """Calls made while nobody waits count as one, for the next wait only."""
    signal = AioSignal()
    signal.call()
    signal.call()

    async def aio_wait_twice() -> str:
        await signal.aio_wait()
        try:
            async with aio_timeout(5):
                await signal.aio_wait()
        except TimeoutError:
            return "the second wait timed out"
        return "woken twice"

    assert "the second wait timed out" == await run_aio(aio_wait_twice)


async def test_signal_wakes_its_waiter(aio_loop: object, autojump_clock: object) -> None:
    """A call wakes the task that waits, and two calls in one go wake it once with nothing kept."""
    signal = AioSignal()
    wakes = 0

    async def aio_listen() -> None:
        nonlocal wakes
        while True:
            await signal.aio_wait()
            wakes += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, aio_listen)
        await trio.sleep(1)
        signal.call()
        await trio.sleep(1)
        assert 1 == wakes
        signal.call()
        signal.call()
        await trio.sleep(1)
        assert wakes in (2, 3)
        nursery.cancel_scope.cancel()


async def test_signal_has_one_waiter(aio_loop: object, autojump_clock: object) -> None:
    """A second waiter is an error, and the first one still gets its call."""
    signal = AioSignal()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, signal.aio_wait)
        await trio.sleep(1)
        with pytest.raises(RuntimeError, match="another task"):
            await run_aio(signal.aio_wait)
        signal.call()


async def test_signal_call_that_meets_a_cancel(aio_loop: object, autojump_clock: object) -> None:
    """A call that arrives together with the waiter's cancel is kept for the next wait."""
    signal = AioSignal()

    async def aio_both() -> str:
        task = asyncio.get_running_loop().create_task(signal.aio_wait())
        await asyncio.sleep(1)
        signal.call()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with aio_timeout(1):
            await signal.aio_wait()
        return "kept"

    assert "kept" == await run_aio(aio_both)


async def test_time_is_virtual(aio_loop: object, autojump_clock: object) -> None:
    """Sleeping and timeouts follow Trio's clock."""

    async def aio_times() -> list[float]:
        start = aio_now()
        await aio_sleep(100)
        slept = aio_now() - start
        try:
            async with aio_timeout(50):
                await aio_sleep(1000)
        except TimeoutError:
            pass
        await aio_checkpoint()
        async with aio_timeout(None):
            await aio_sleep(10)
        return [slept, aio_now() - start]

    assert pytest.approx([100.0, 160.0]) == await run_aio(aio_times)


async def aio_clean(seconds: float, done: list[str]) -> str:
    await asyncio.sleep(seconds)
    done.append("clean")
    return "result"


async def test_shielded_result(aio_loop: object, autojump_clock: object) -> None:
    """Cleanup that is not disturbed returns its result."""
    done: list[str] = []
    assert "result" == await run_aio(aio_shielded, 5.0, aio_clean, 1.0, done)


async def test_shielded_survives_a_cancel(aio_loop: object, autojump_clock: object) -> None:
    """Cleanup runs to its end though the task is cancelled meanwhile; the cancel is raised after it."""
    done: list[str] = []
    start = trio.current_time()
    with trio.move_on_after(1) as scope:
        await run_aio(aio_shielded, 5.0, aio_clean, 3.0, done)
    assert scope.cancelled_caught
    assert ["clean"] == done
    assert pytest.approx(3.0) == trio.current_time() - start


@pytest.mark.parametrize("cancel_after", [1.0, float("inf")])
async def test_shielded_is_bounded(aio_loop: object, autojump_clock: object, cancel_after: float) -> None:
    """Cleanup that outlives its limit is cancelled, with TimeoutError unless the task was cancelled too."""
    done: list[str] = []
    start = trio.current_time()
    caught: list[type[BaseException]] = []
    with trio.move_on_after(cancel_after) as scope:
        try:
            await run_aio(aio_shielded, 5.0, aio_clean, 100.0, done)
        except TimeoutError as error:
            caught.append(type(error))
    assert [] == done
    assert pytest.approx(5.0) == trio.current_time() - start
    assert scope.cancelled_caught == (cancel_after == 1.0)
    assert caught == ([] if scope.cancelled_caught else [TimeoutError])


async def test_shielded_error(aio_loop: object, autojump_clock: object) -> None:
    """An error of the cleanup is raised."""

    async def aio_fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await run_aio(aio_shielded, 5.0, aio_fail)
