"""Both flavours in virtual time, without a thread."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys

import pytest
import trio

from trio_sidecar.bridge import aio_now, aio_run_trio, aio_sleep, open_signals, run_aio
from trio_sidecar.bridge.loop import current_loop
from trio_sidecar.bridge.virtual import START_SECS, run_virtual


def test_time_passes_by_itself() -> None:
    """Sleeps, deadlines and timers of both flavours take their virtual time, and no real one."""

    async def main() -> list[float]:
        moments = []
        await trio.sleep(3600)
        moments.append(trio.current_time())
        await run_aio(aio_sleep, 3600)
        moments.append(trio.current_time())
        with trio.move_on_after(7):
            await run_aio(aio_sleep, 3600)
        moments.append(trio.current_time())
        moments.append(await run_aio(aio_clock))
        return moments

    async def aio_clock() -> float:  # noqa: ASYNC124 - asyncio-flavoured
        return aio_now()

    expected = [START_SECS + 3600, START_SECS + 7200, START_SECS + 7207, START_SECS + 7207]
    assert expected == run_virtual(main, random=random.Random(1))


@pytest.mark.parametrize("seed", range(20))
def test_a_timer_of_either_wakes_the_other_on_time(seed: int) -> None:
    """Whatever the turns, a callback of asyncio's that wakes a Trio task does so in the same moment, and back."""

    async def main() -> list[float]:
        woken: list[float] = []
        for secs in (0.0, 0.5, 0.25):
            event = trio.Event()
            before = trio.current_time()
            current_loop().call_later(secs, event.set)
            await event.wait()
            woken.append(trio.current_time() - before)
        async with trio.open_nursery() as nursery:
            before = trio.current_time()
            await run_aio(aio_run_trio, nursery, trio.sleep, 2)
            woken.append(trio.current_time() - before)
        return woken

    assert [0.0, 0.5, 0.25, 2.0] == run_virtual(main, random=random.Random(seed))


def test_a_signal_is_heard_at_once() -> None:
    """A signal that the program raises reaches Trio in the same moment, though it comes through a socket."""

    async def main() -> float:
        with open_signals(signal.SIGUSR2) as signals, trio.move_on_after(100):
            current_loop().call_later(5, signal.raise_signal, signal.SIGUSR2)
            await signals.__anext__()
        return trio.current_time() - START_SECS

    assert run_virtual(main, random=random.Random(1)) == 5.0


def test_errors_come_out_as_they_are() -> None:
    """What the function raises is raised."""

    async def main() -> None:
        await trio.lowlevel.checkpoint()
        reason = "as it is"
        raise LookupError(reason)

    with pytest.raises(LookupError, match="as it is"):
        run_virtual(main, random=random.Random(1))


def test_leftover_tasks_are_cancelled() -> None:
    """Asyncio tasks that are left get their cancel, and time for their cleanup."""
    ended: list[float] = []

    async def aio_stays() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(2)  # noqa: ASYNC102 - asyncio-flavoured
            ended.append(aio_now())

    async def main() -> object:
        task = current_loop().create_task(aio_stays())
        await trio.sleep(1)
        return task

    assert run_virtual(main, random=random.Random(1)) is not None
    assert [START_SECS + 3] == ended


ENDLESS = """
import random, trio
from trio_sidecar.bridge import aio_checkpoint, run_aio
from trio_sidecar.bridge.virtual import NeverEnds, run_virtual

async def aio_spin():
    while True:
        await aio_checkpoint()

async def spin():
    await run_aio(aio_spin)

try:
    run_virtual({main}, random=random.Random(1), rounds=1000)
except NeverEnds as error:
    print(error, flush=True)
import os; os._exit(0)
"""


@pytest.mark.parametrize(("main", "message"), [("trio.sleep_forever", "nothing is left"), ("spin", "still busy")])
def test_a_program_without_end_is_noticed(main: str, message: str) -> None:
    """One that waits for nothing, and one that is busy for ever, raise instead of hanging."""
    run = subprocess.run(
        [sys.executable, "-c", ENDLESS.format(main=main)], capture_output=True, text=True, timeout=60, check=True
    )
    assert message in run.stdout, run.stderr
