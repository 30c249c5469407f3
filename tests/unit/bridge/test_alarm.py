"""Waiting until a moment or a ring, in virtual time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trio_sidecar.bridge import aio_now, run_aio
from trio_sidecar.bridge.alarm import AioAlarm


async def aio_elapsed(alarm: AioAlarm, seconds: float | None) -> float:
    """How long a wait took."""
    started = aio_now()
    await alarm.aio_wait_until(None if seconds is None else started + seconds)
    return aio_now() - started


async def test_the_moment_comes(aio_loop: object, autojump_clock: object) -> None:
    """Without a ring the wait ends at its moment; one in the past ends at once."""
    alarm = AioAlarm()
    assert 5.0 == pytest.approx(await run_aio(aio_elapsed, alarm, 5.0))
    assert 0.0 == pytest.approx(await run_aio(aio_elapsed, alarm, -1.0))


@pytest.mark.parametrize("moment", [None, 60.0])
async def test_a_ring_ends_the_wait(aio_loop: object, autojump_clock: object, moment: float | None) -> None:
    """From Trio code as well, and it is used up."""
    alarm = AioAlarm()
    waits: list[float] = []

    async def wait() -> None:
        waits.append(await run_aio(aio_elapsed, alarm, moment))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(2.0)
        alarm.ring()
    assert [2.0] == pytest.approx(waits)
    assert 3.0 == pytest.approx(await run_aio(aio_elapsed, alarm, 3.0))


async def test_a_ring_before_the_wait_is_kept(aio_loop: object, autojump_clock: object) -> None:
    """Two rings before a wait count as one."""
    alarm = AioAlarm()
    alarm.ring()
    alarm.ring()
    assert 0.0 == await run_aio(aio_elapsed, alarm, None)
    assert 1.0 == pytest.approx(await run_aio(aio_elapsed, alarm, 1.0))


async def test_a_cancelled_wait_leaves_no_waiter(aio_loop: object, autojump_clock: object) -> None:
    """The next wait works as if nothing had been."""
    alarm = AioAlarm()
    with trio.move_on_after(1.0) as scope:
        await run_aio(aio_elapsed, alarm, None)
    assert scope.cancelled_caught
    assert 1.0 == pytest.approx(await run_aio(aio_elapsed, alarm, 1.0))
