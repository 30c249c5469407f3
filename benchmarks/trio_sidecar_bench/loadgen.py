"""The load generator: Dynamo's own client, asking workers as a router does; ``python -m trio_sidecar_bench.loadgen``.

It talks to the worker's ingress and not through the front end, whose detokeniser, templates and JSON would cost more
than the worker and hide it. A line of JSON on standard input is one window of one load on one worker; it is answered by
a line of figures.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

import attrs
import uvloop
from dynamo.runtime import Context, DistributedRuntime

from trio_sidecar_bench.loads import Load
from trio_sidecar_bench.processes import cpu_seconds, rss_kib
from trio_sidecar_bench.stamps import age, between, now_us

END_SECONDS = 10.0
MAX_SAMPLES = 50_000


@attrs.define(slots=True)
class Figures:
    """What came in one window; times in microseconds."""

    tokens: int = 0
    chunks: int = 0
    begun: int = 0
    ended: int = 0
    errors: int = 0
    first_error: str = ""
    ttft: list[int] = attrs.field(factory=list)
    delay: list[int] = attrs.field(factory=list)
    gap_added: list[int] = attrs.field(factory=list)


class Window:
    """One load on one worker."""

    def __init__(self, client: Any, instance: int, load: Load) -> None:
        self.figures = Figures()
        self.rss_pid: int | None = None
        self._client = client
        self._instance = instance
        self._load = load
        self._open: set[Any] = set()
        self._stopping = False
        self._request = load.request(load.tokens)

    async def run(self, warmup: float, seconds: float, pids: dict[str, int]) -> dict[str, Any]:
        """Warm up, measure, stop."""
        async with asyncio.TaskGroup() as lanes:
            for _ in range(self._load.streams):
                lanes.create_task(self._lane())
            await asyncio.sleep(warmup)
            self.figures = figures = Figures()
            began, before = now_us(), {name: cpu_seconds(pid) for name, pid in pids.items()}
            await asyncio.sleep(seconds)
            cpu = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
            elapsed = (now_us() - began) / 1e6
            rss = rss_kib(self.rss_pid) if self.rss_pid else 0
            self.figures = Figures()
            self._stopping = True
            for context in tuple(self._open):
                context.stop_generating()
        return _summary(figures, elapsed, cpu) | {"rss_kib": rss}

    def _is_over(self) -> bool:
        return self._stopping

    async def _lane(self) -> None:
        load = self._load
        tokens = random.randint(1, load.tokens) if load.rate and not load.cancels else load.tokens  # noqa: S311
        while not self._is_over():
            request = self._request | {"stop_conditions": {"max_tokens": tokens, "ignore_eos": True}}
            tokens = load.tokens
            context = Context()
            self._open.add(context)
            self.figures.begun += 1
            try:
                async with asyncio.timeout(None) as limit:
                    await self._read(request, context, limit)
                self.figures.ended += 1
            except Exception as error:  # noqa: BLE001 - the binding raises bare exceptions
                if self._is_over():
                    break
                self.figures.errors += 1
                self.figures.first_error = self.figures.first_error or f"{type(error).__name__}: {error}"
                await asyncio.sleep(0.05)
            finally:
                self._open.discard(context)

    async def _read(self, request: dict[str, Any], context: Any, limit: asyncio.Timeout) -> None:
        asked = now_us()
        last_at = last_token = 0
        async for chunk in await self._client.direct(request, self._instance, context=context):
            data = chunk.data()
            if not data or not (ids := data["token_ids"]):
                continue
            at = now_us()
            figures = self.figures
            figures.tokens += len(ids)
            figures.chunks += 1
            if not last_at:
                figures.ttft.append(at - asked)
                if self._load.cancels:
                    context.stop_generating()
            else:
                figures.gap_added.append(at - last_at - between(last_token, ids[0]))
            figures.delay.append(age(ids[0], at))
            last_at, last_token = at, ids[-1]
            if self._stopping and limit.when() is None:
                limit.reschedule(asyncio.get_running_loop().time() + END_SECONDS)


def _percentiles(samples: list[int]) -> dict[str, float]:
    ordered = sorted(samples if len(samples) <= MAX_SAMPLES else random.sample(samples, MAX_SAMPLES))
    if not ordered:
        return {}
    return {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)}


def _summary(figures: Figures, elapsed: float, cpu: dict[str, float]) -> dict[str, Any]:
    counts = attrs.asdict(figures, filter=lambda attribute, _: attribute.name not in ("ttft", "delay", "gap_added"))
    return {
        **counts,
        "seconds": elapsed,
        "cpu": cpu,
        "ttft_us": _percentiles(figures.ttft),
        "delay_us": _percentiles(figures.delay),
        "gap_added_us": _percentiles(figures.gap_added),
    }


async def main() -> None:
    """Answer lines until standard input ends."""
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp")
    clients: dict[str, tuple[Any, int]] = {}
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order = json.loads(line)
        endpoint = order["endpoint"]
        if endpoint not in clients:
            client = await runtime.endpoint(endpoint).client()
            instances = await client.wait_for_instances()
            clients[endpoint] = client, instances[0]
        if "load" not in order:
            print("{}", flush=True)  # noqa: T201
            continue
        window = Window(*clients[endpoint], Load(**order["load"]))
        window.rss_pid = order.get("rss")
        figures = await window.run(order["warmup"], order["seconds"], order["pids"])
        print(json.dumps(figures), flush=True)  # noqa: T201
    runtime.shutdown()


if __name__ == "__main__":
    uvloop.run(main())
