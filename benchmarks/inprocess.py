"""What the engine contract costs: tokens per second of AsyncLLM driven directly, against through our engine.

    python benchmarks/inprocess.py MODEL [--rounds 7] [--tokens 200] [vLLM arguments]

Both sides run in one process over one vLLM, in turns, so that whatever else the machine does hits both. The direct side
is vLLM's own public way: ``async for`` over ``AsyncLLM.generate`` in DELTA mode. The last lines give, for 1 and for 8
requests at once, the median tokens per second of each side and the median ratio of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from trio_sidecar import wire
from trio_sidecar.bridge import AioTaskGroup, Host, run, run_aio
from trio_sidecar.config import VllmSettings
from trio_sidecar.engines.vllm import VllmEngine, open_vllm

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

PROMPT = list(range(20, 36))
CONCURRENCY = (1, 8)
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}


async def aio_direct(engine: VllmEngine, tokens: int) -> int:
    """One request to vLLM itself; returns the tokens that came."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.inputs.engine import tokens_input  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    count = 0
    outputs = engine.llm.generate(tokens_input(PROMPT), params, f"direct-{time.monotonic_ns()}")
    async for output in outputs:
        count += len(output.outputs[0].token_ids)
    return count


async def aio_contract(engine: VllmEngine, tokens: int) -> int:
    """One request through the contract; returns the tokens that came."""
    request = wire.GenerateRequest(
        token_ids=wire.TokenIds(ids=PROMPT),
        stopping=wire.StoppingCriteria(max_new_tokens=tokens, ignore_eos=True),
        response=wire.ResponseOptions(output_token_ids=True),
    )
    count = 0
    async with engine.aio_generate(request, {}) as stream:
        while answers := await stream.aio_receive():
            count += sum(len(answer.outputs.token_ids) for answer in answers if answer.outputs is not None)
    return count


async def aio_rate(
    aio_one: Callable[[VllmEngine, int], Awaitable[int]], engine: VllmEngine, requests: int, tokens: int
) -> float:
    """Tokens per second of some requests at once."""

    async def aio_ask() -> int:
        return await aio_one(engine, tokens)

    started = time.perf_counter()
    async with AioTaskGroup() as group:
        tasks = [group.create_task(aio_ask()) for _ in range(requests)]
    seconds = time.perf_counter() - started
    total = sum(task.result() for task in tasks)
    if total != requests * tokens:
        msg = f"{total} tokens instead of {requests * tokens}"
        raise RuntimeError(msg)
    return total / seconds


async def main(settings: VllmSettings, rounds: int, tokens: int) -> None:
    """Measure and print."""
    results: dict[int, list[tuple[float, float]]] = {}
    async with open_vllm(settings) as engine:
        for requests in CONCURRENCY:
            await run_aio(aio_rate, aio_direct, engine, requests, tokens)  # warm up
            await run_aio(aio_rate, aio_contract, engine, requests, tokens)
            pairs = []
            for number in range(rounds):
                order: list[Any] = [aio_direct, aio_contract]
                if number % 2:
                    order.reverse()
                rates = {fn: await run_aio(aio_rate, fn, engine, requests, tokens) for fn in order}
                pairs.append((rates[aio_direct], rates[aio_contract]))
            results[requests] = pairs
    for requests, pairs in results.items():
        direct, contract = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        print(  # noqa: T201 - the result
            f"{requests} request(s): direct {direct:.0f} tokens/s, contract {contract:.0f} tokens/s, ratio {ratio:.3f}"
        )


def parse(argv: Sequence[str] | None = None) -> tuple[VllmSettings, int, int]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=200)
    known, rest = parser.parse_known_args(argv)
    return VllmSettings(model=known.model, arguments=tuple(rest)), known.rounds, known.tokens


if __name__ == "__main__":
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    run(main, *parse(), host=Host.UVLOOP)
