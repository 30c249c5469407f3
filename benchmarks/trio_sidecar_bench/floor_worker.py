"""The floor: Dynamo's Python boundary and nothing else, ``python -m trio_sidecar_bench.floor_worker NAMESPACE MODEL``.

An engine object on uvloop that yields prepared one-token chunks at the pace that the fast server would have. No Python
worker can cost less per chunk.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import uvloop

from trio_sidecar_bench.dynamo_object import EngineObject, aio_run
from trio_sidecar_bench.messages import LOCKSTEP, TEXT
from trio_sidecar_bench.stamps import now_us, stamp

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class FloorEngine(EngineObject):
    """Yields prepared chunks."""

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """One chunk per token."""
        seed = request["sampling_options"].get("seed") or 0
        interval_us = seed & (LOCKSTEP - 1)
        tokens = request["stop_conditions"]["max_tokens"]
        candidates = request["output_options"].get("logprobs")
        prompt_tokens = len(request["token_ids"])
        due = now_us()
        if seed & LOCKSTEP:
            due += interval_us - due % interval_us
        for number in range(1, tokens + 1):
            if interval_us:
                await asyncio.sleep(max(0, due - now_us()) / 1e6)
                due += interval_us
            elif number % 8 == 0:
                await asyncio.sleep(0)
            if context.is_stopped():
                return
            token = stamp(now_us())
            chunk: dict[str, Any] = {"token_ids": [token], "text": TEXT, "index": 0}
            if candidates is not None:
                del chunk["text"]
                chunk["log_probs"] = [-0.25]
                chunk["top_logprobs"] = [
                    [{"rank": rank + 1, "token_id": token - rank, "logprob": -0.25} for rank in range(candidates + 1)]
                ]
            if number == tokens:
                chunk["finish_reason"] = "length"
                chunk["completion_usage"] = {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": tokens,
                    "total_tokens": prompt_tokens + tokens,
                }
            yield chunk


if __name__ == "__main__":
    uvloop.run(aio_run(FloorEngine(), sys.argv[1], sys.argv[2]))
