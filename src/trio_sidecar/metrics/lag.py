"""How late the loop is for its timers: the measure of what blocks it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from trio_sidecar.metrics.histogram import Histogram

__all__ = ["INTERVAL_SECS", "watch_lag"]

INTERVAL_SECS = 0.25


async def watch_lag(histogram: Histogram) -> None:
    """Set a timer four times a second and note how late it rings, until cancelled (Trio-flavoured).

    Trio and asyncio share one thread, so a step of either that takes long makes this one late.
    """
    while True:
        due = trio.current_time() + INTERVAL_SECS
        await trio.sleep_until(due)
        histogram.observe(max(0.0, trio.current_time() - due))
