"""Absolute deadlines in Trio time, made once and handed down."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import trio

from trio_sidecar.errors import InvalidConfig

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


MAX_CLOCK_SECONDS = (2**63 - 1) / 1e9
"""The largest reading of a clock that counts nanoseconds in 64 bits, in seconds; about 292 years."""


def check_on_clock(seconds: float, setting: str) -> float:
    """Return a duration in seconds that can be added to the clock's present reading.

    Raises:
        InvalidConfig: It cannot; names the setting (R2.9, R3.9).
    """
    # Written so that NaN is refused too.
    if not 0 <= seconds <= MAX_CLOCK_SECONDS:
        reason = f"{seconds:g} seconds is outside the range of the monotonic clock, 0 to {MAX_CLOCK_SECONDS:.0f}"
        raise InvalidConfig(setting, reason)
    return seconds


def format_seconds(seconds: float) -> str:
    """A duration for people: ``100ms``, ``1.5s``, ``1800s``."""
    if seconds < 1:
        return f"{round(seconds * 1000, 1):g}ms"
    return f"{round(seconds, 3):.10g}s"
