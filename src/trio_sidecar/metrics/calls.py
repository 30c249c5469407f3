"""What is counted of a gRPC server's calls, in plain numbers."""

from __future__ import annotations

from trio_sidecar.metrics.families import LATENCY_BOUNDS
from trio_sidecar.metrics.histogram import Histogram

__all__ = ["CallMeter"]


class CallMeter:
    """The counts of one server.

    Attributes:
        ended: Calls that are over, by method and name of the status.
        duration: How long they took, in seconds, by method.
        output_tokens: Tokens in what the engine answered.
    """

    __slots__ = ("duration", "ended", "output_tokens")

    def __init__(self) -> None:
        self.ended: dict[tuple[str, ...], float] = {}
        self.duration: dict[str, Histogram] = {}
        self.output_tokens = 0

    def note_end(self, method: str, status: str, seconds: float) -> None:
        """A call is over."""
        key = (method, status)
        self.ended[key] = self.ended.get(key, 0) + 1
        if method not in self.duration:
            self.duration[method] = Histogram(LATENCY_BOUNDS)
        self.duration[method].observe(seconds)
