"""The loop's lag, in virtual time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio
import trio.testing

from trio_sidecar.metrics import Histogram, watch_lag

if TYPE_CHECKING:
    from trio.testing import MockClock


async def test_an_idle_loop_has_none(autojump_clock: MockClock) -> None:
    """Four looks a second, all on time."""
    lag = Histogram((0.001, 1.0))
    with trio.move_on_after(10.1):
        await watch_lag(lag)
    assert ([40, 0, 0], 0.0) == (lag.counts, lag.sum)


async def test_a_step_that_blocks_is_seen(mock_clock: MockClock) -> None:
    """A step that takes two seconds makes the timer within it late by what is left."""
    lag = Histogram((0.001, 1.0, 5.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(watch_lag, lag))
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(2.0)  # as a blocking step does: nobody else has run meanwhile
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert ([0, 0, 1, 0], 1.75) == (lag.counts, lag.sum)
