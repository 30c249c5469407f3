"""The naive baseline: asyncio, grpclib and betterproto2 as their documentation shows them.

``python -m trio_sidecar_bench.naive_worker NAMESPACE MODEL HOST:PORT``. One asyncio task per request, grpclib's
channels, betterproto2's own codec, one chunk per message, asyncio's own loop. The conversion is as short as it can be.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import TYPE_CHECKING, Any

from grpclib.client import Channel
from grpclib.const import Cardinality

from trio_sidecar import wire
from trio_sidecar_bench.dynamo_object import EngineObject, aio_run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

CONNECTIONS = 8
PATH = "/vllm.Inference/GenerateStream"
FINISH_REASONS = {1: "length", 2: "stop", 3: "cancelled"}


class NaiveEngine(EngineObject):
    """Asks the engine with grpclib's client."""

    def __init__(self, host: str, port: int) -> None:
        self._channels = itertools.cycle([Channel(host, port) for _ in range(CONNECTIONS)])

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """One chunk per message."""
        logprobs = request["output_options"].get("logprobs")
        message = wire.GenerateRequest(
            request_id=context.id(),
            token_ids=wire.TokenIds(ids=request["token_ids"]),
            sampling=wire.RandomSampling(seed=request["sampling_options"].get("seed")),
            stopping=wire.StoppingCriteria(max_new_tokens=request["stop_conditions"]["max_tokens"]),
            response=wire.ResponseOptions(
                output_token_ids=True,
                output_text=True,
                output_logprobs=logprobs is not None,
                output_candidates=None if logprobs is None else wire.CandidateTokens(top_n=logprobs),
            ),
        )
        prompt_tokens = len(request["token_ids"])
        done = 0
        channel = next(self._channels)
        async with channel.request(
            PATH, Cardinality.UNARY_STREAM, wire.GenerateRequest, wire.GenerateResponse
        ) as stream:
            await stream.send_message(message, end=True)
            async for response in stream:
                if context.is_stopped():
                    await stream.cancel()
                    return
                outputs = response.outputs
                if outputs is None:
                    continue
                done += len(outputs.token_ids)
                chunk: dict[str, Any] = {"token_ids": outputs.token_ids, "text": outputs.text, "index": 0}
                if logprobs is not None:
                    add_logprobs(chunk, outputs)
                if outputs.finish_info is not None:
                    chunk["finish_reason"] = FINISH_REASONS[int(outputs.finish_info.finish_reason)]
                    chunk["completion_usage"] = {
                        "prompt_tokens": prompt_tokens,
                        "completion_tokens": done,
                        "total_tokens": prompt_tokens + done,
                    }
                yield chunk  # noqa: ASYNC119 - this is the naive worker


def add_logprobs(chunk: dict[str, Any], outputs: wire.SequenceOutput) -> None:
    """The logprobs of a message, for a front end that makes the text itself."""
    del chunk["text"]
    chunk["log_probs"] = outputs.logprobs
    chunk["top_logprobs"] = [
        [
            {"rank": rank, "token_id": token_id, "logprob": logprob},
            *({"rank": other.rank, "token_id": other.id, "logprob": other.logprob} for other in candidates.tokens),
        ]
        for token_id, logprob, rank, candidates in zip(
            outputs.token_ids, outputs.logprobs, outputs.ranks, outputs.candidate_tokens, strict=True
        )
    ]


async def main(namespace: str, model_directory: str, endpoint: str) -> None:
    """Serve."""
    host, _, port = endpoint.rpartition(":")
    await aio_run(NaiveEngine(host, int(port)), namespace, model_directory)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
