"""Absolute deadlines in Trio time, made once and handed down."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from typing import Self


@attrs.frozen(slots=True)
class Deadline:
    """A point on Trio's clock, in seconds; infinity means never.

    A duration handed down restarts at every hop; this does not.
    """

    at: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> Self:
        """The deadline that many seconds from now."""
        return cls(trio.current_time() + seconds)

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - trio.current_time())

    def expired(self) -> bool:
        """Whether no time is left."""
        return self.remaining() <= 0.0

    def sooner_of(self, seconds: float) -> float:
        """The smaller of a duration and the time left, in seconds (R3.3, R3.4)."""
        return min(seconds, self.remaining())

    def scope(self) -> trio.CancelScope:
        """A new cancel scope that ends at this deadline."""
        return trio.CancelScope(deadline=self.at)


def format_seconds(seconds: float) -> str:
    """A duration for people: ``100ms``, ``1.5s``, ``1800s``."""
    if seconds < 1:
        return f"{round(seconds * 1000, 1):g}ms"
    return f"{round(seconds, 3):.10g}s"
