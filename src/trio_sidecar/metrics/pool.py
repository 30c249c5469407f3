"""What is counted of a pool's connections, in plain numbers."""

from __future__ import annotations

from h2.errors import ErrorCodes

from trio_sidecar.metrics.families import LATENCY_BOUNDS, OTHER, RESET_CODES
from trio_sidecar.metrics.histogram import Histogram

__all__ = ["PoolMeter"]


class PoolMeter:
    """The counts of one pool; written by its loop only.

    Attributes:
        wait: How long calls waited for a connection, in seconds.
        resets: Streams that the peer reset, by the name of the HTTP/2 code.
    """

    __slots__ = ("resets", "wait")

    def __init__(self) -> None:
        self.wait = Histogram(LATENCY_BOUNDS)
        self.resets = dict.fromkeys(RESET_CODES, 0)  # the keys never change; see RequestMeter

    def note_reset(self, code: int) -> None:
        """The peer has reset a stream."""
        name = ErrorCodes(code).name if code in _CODES else OTHER
        self.resets[name if name in self.resets else OTHER] += 1


_CODES = frozenset(map(int, ErrorCodes))
