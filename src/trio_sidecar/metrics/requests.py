"""What is counted of requests, in plain numbers."""

from __future__ import annotations

from bisect import bisect_left

from trio_sidecar.metrics.families import END_REASONS, LATENCY_BOUNDS, REFUSALS
from trio_sidecar.metrics.histogram import Histogram

__all__ = ["RequestMeter", "TokenClock"]


class RequestMeter:
    """The counts of all requests of one worker; written by its loop only.

    Attributes:
        accepted: Requests.
        refused: Requests that were not accepted, by reason.
        ended: Accepted requests that are over, by reason.
        prompt_tokens: Of accepted requests.
        output_tokens: Handed to Dynamo.
        chunks: Handed to Dynamo.
        first_response: From acceptance to the engine's first message, in seconds.
        first_token: From acceptance to the first output token.
        inter_token: Between output tokens.
        duration: From acceptance to the end.
    """

    __slots__ = (
        "accepted",
        "chunks",
        "duration",
        "ended",
        "first_response",
        "first_token",
        "inter_token",
        "output_tokens",
        "prompt_tokens",
        "refused",
    )

    def __init__(self) -> None:
        self.accepted = self.prompt_tokens = self.output_tokens = self.chunks = 0
        # The keys never change, so that another thread can go through them at any time.
        self.refused = dict.fromkeys(REFUSALS, 0)
        self.ended = dict.fromkeys(END_REASONS, 0)
        self.first_response = Histogram(LATENCY_BOUNDS)
        self.first_token = Histogram(LATENCY_BOUNDS)
        self.inter_token = Histogram(LATENCY_BOUNDS)
        self.duration = Histogram(LATENCY_BOUNDS)


class TokenClock:
    """Times one request's tokens as they arrive.

    Args:
        meter: Gets the times.
        began: When the request was accepted, on the clock of the times given later.
    """

    __slots__ = ("_began", "_counts", "_inter_token", "_last", "_meter", "_tokens")

    def __init__(self, meter: RequestMeter, began: float) -> None:
        self._meter = meter
        self._began = began
        self._inter_token = meter.inter_token
        self._counts = meter.inter_token.counts
        self._last = began
        self._tokens = -1

    def arrived(self, now: float, tokens: int) -> None:
        """Something has come from the engine; it has sent that many tokens by now."""
        known = self._tokens
        if known > 0:
            if new := tokens - known:
                # As the histogram's own method does, without calling it: this is done for every token of a slow stream.
                elapsed = now - self._last
                self._counts[bisect_left(LATENCY_BOUNDS, elapsed / new)] += new
                self._inter_token.sum += elapsed
                self._last = now
                self._tokens = tokens
            return
        if known < 0:
            self._meter.first_response.observe(now - self._began)
        if tokens:
            self._meter.first_token.observe(now - self._began)
        self._last = now
        self._tokens = tokens
