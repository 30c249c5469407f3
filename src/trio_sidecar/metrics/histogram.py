"""A histogram that costs a binary search and two additions per observation."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Histogram"]


class Histogram:
    """Counts of observations between fixed bounds.

    Written by one thread, and read by any: each number is read once, so a reader sees a count that was right a moment
    ago.

    Attributes:
        bounds: Upper bounds, ascending; an observation belongs to the first that is not below it.
        counts: One per bound, and one for what is beyond the last.
        sum: Of all observations.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add an observation, or several of the same value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
