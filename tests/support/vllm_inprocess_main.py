"""A vLLM in this process, on one host: what the engine's own gauges say while requests come and go.

    python vllm_inprocess_main.py HOST MODEL

prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import trio
from prometheus_client import REGISTRY

from support.vllm_server import VLLM_ARGUMENTS, request
from trio_sidecar import wire
from trio_sidecar.bridge import Host, aio_sleep, run, run_aio
from trio_sidecar.config import VllmSettings
from trio_sidecar.engines.vllm import VllmEngine, open_vllm
from trio_sidecar.wire import methods

SHORT = wire.StoppingCriteria(max_new_tokens=30)
LONG = wire.StoppingCriteria(ignore_eos=True)


def running() -> float:
    """VLLM's own gauge of requests that run."""
    return sum(
        float(sample.value)
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name in ("vllm:num_requests_running", "vllm:num_requests_waiting")
    )


async def aio_text(engine: VllmEngine, **fields: Any) -> str:
    """The text of one answer."""
    text = ""
    async with engine.aio_generate(request(**fields), {}) as stream:
        while answers := await stream.aio_receive():
            text += "".join(answer.outputs.text for answer in answers if answer.outputs is not None)
    return text


async def until(limit: float, condition: Any) -> float:
    """How long a condition takes to hold, in seconds; infinite if it takes too long."""
    started = trio.current_time()
    while not condition():
        if trio.current_time() - started > limit:
            return float("inf")
        await trio.sleep(0.01)
    return trio.current_time() - started


async def cancelled(engine: VllmEngine) -> dict[str, Any]:
    """Cancel the scopes of six requests, of which four run and two wait."""
    received = 0

    async def aio_read() -> None:
        nonlocal received
        async with engine.aio_generate(request(stopping=LONG), {}) as stream:
            received += 1
            while await stream.aio_receive():
                await aio_sleep(0)

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(run_aio, aio_read)
        all_in = await until(5, lambda: received == 6 and running() > 0)
        seen = running()
        nursery.cancel_scope.cancel()
    left = engine.statistics().in_engine
    return {"all_in": all_in, "seen": seen, "left": left, "seconds": await until(5, lambda: running() == 0)}


async def main(model: str) -> dict[str, Any]:
    """Everything in one life of the engine."""
    settings = VllmSettings(model=model, arguments=VLLM_ARGUMENTS)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await trio.sleep(0.02)
            ticks += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        began = trio.current_time()
        async with open_vllm(settings) as engine:
            lively = ticks / (trio.current_time() - began)
            first, second = [await run_aio(lambda: aio_text(engine)) for _ in range(2)]
            after_cancel = await cancelled(engine)
            schema = wire.DecodingParameters(json='{"enum": ["gull"]}')
            constrained = await run_aio(lambda: aio_text(engine, decoding=schema, stopping=SHORT))
            long_text = await run_aio(lambda: aio_text(engine, text="a" * 6000, truncate_prompt_tokens=20))
            await run_aio(engine.aio_call, methods.PAUSE_GENERATION, wire.PauseGenerationRequest())
            await run_aio(engine.aio_call, methods.RESUME_GENERATION, wire.ResumeGenerationRequest())
            third = await run_aio(lambda: aio_text(engine))
        nursery.cancel_scope.cancel()
    return {
        "ticks_per_second": lively,
        "texts": [first, second, third],
        "cancelled": after_cancel,
        "constrained": constrained,
        "long": bool(long_text),
    }


if __name__ == "__main__":
    print(json.dumps(run(main, sys.argv[2], host=Host(sys.argv[1]))), flush=True)  # noqa: T201 - what it is for
