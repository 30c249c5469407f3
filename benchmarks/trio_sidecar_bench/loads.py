"""The loads that every contender gets."""

from __future__ import annotations

from typing import Any

import attrs

from trio_sidecar_bench.messages import LOCKSTEP

__all__ = ["LOADS", "QUICK", "Load"]

SECOND_US = 1_000_000


@attrs.frozen(slots=True, kw_only=True)
class Load:
    """A number of streams that are kept open; each ended request is followed by the next.

    Attributes:
        name: For tables and ``--loads``.
        streams: Requests at once.
        tokens: Length of an answer. The first one of each paced stream is cut at a random place, so that ends are
            spread over time.
        rate: Tokens per second and stream; 0 takes them as fast as they come.
        lockstep: All streams get their tokens at the same moments, as from one engine's steps.
        prompt_tokens: Length of a prompt.
        candidates: Logprobs with that many alternatives; None for none.
        cancels: Each request is cancelled after its first chunk.
    """

    name: str
    streams: int
    tokens: int
    rate: int = 0
    lockstep: bool = False
    prompt_tokens: int = 32
    candidates: int | None = None
    cancels: bool = False

    @property
    def offered(self) -> int:
        """Tokens per second that the server sends; 0 for as many as are taken."""
        return self.streams * self.rate

    def request(self, tokens: int) -> dict[str, Any]:
        """What a front end would send to a worker."""
        seed = (SECOND_US // self.rate if self.rate else 0) | (LOCKSTEP if self.lockstep else 0)
        return {
            "model": "bench-model",
            "token_ids": [1 + n % 50_000 for n in range(self.prompt_tokens)],
            "stop_conditions": {"max_tokens": tokens, "ignore_eos": True},
            "sampling_options": {"seed": seed},
            "output_options": {"logprobs": self.candidates},
            "eos_token_ids": [2],
            "annotations": [],
        }


def _paced(streams: int, rate: int, *, lockstep: bool = False) -> Load:
    name = f"{streams}x{rate}{'-steps' if lockstep else ''}"
    return Load(name=name, streams=streams, tokens=200, rate=rate, lockstep=lockstep)


LOADS = {
    load.name: load
    for load in (
        Load(name="flood", streams=64, tokens=200),
        _paced(16, 20),
        _paced(64, 20),
        _paced(256, 20),
        _paced(16, 50),
        _paced(64, 50),
        _paced(256, 50),
        _paced(64, 50, lockstep=True),
        Load(name="short", streams=16, tokens=4),
        Load(name="one", streams=1, tokens=4),
        Load(name="prompt-8k", streams=4, tokens=4, prompt_tokens=8_000),
        Load(name="prompt-100k", streams=2, tokens=4, prompt_tokens=100_000),
        Load(name="logprobs-5", streams=16, tokens=200, rate=20, candidates=5),
        Load(name="cancel", streams=64, tokens=200, rate=50, cancels=True),
    )
}

QUICK = ("flood", "16x20", "64x50", "short")
