"""The worker's path from socket to chunk without Dynamo, in this process, beside the naive one.

For the gate and for profilers: ``python -m trio_sidecar_bench.hot_path [ours|ours-off|naive]... [--seconds S]``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio
import uvloop
from grpclib.client import Channel
from grpclib.const import Cardinality
from h2.exceptions import StreamClosedError

from trio_sidecar import wire
from trio_sidecar.bridge import run, run_aio
from trio_sidecar.config import LogLevel, LogSettings, TransportSettings
from trio_sidecar.convert.request import ModelFacts, convert_request
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.engines.remote import open_remote
from trio_sidecar.observe.logging import configure_logging
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar_bench.loads import LOADS
from trio_sidecar_bench.processes import Child, dynamo_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trio_sidecar_bench.loads import Load

__all__ = ["PATHS", "Cost", "measure", "open_server"]

CONNECTIONS = 8
WARMUP_SECONDS = 0.3
FACTS = ModelFacts(served_model_name="bench-model", base_names=frozenset({"bench-model"}))


@attrs.frozen(slots=True)
class Cost:
    """What a window cost.

    Attributes:
        tokens: Tokens received.
        chunks: Chunks they came in.
        cpu_seconds: CPU time of this process.
    """

    tokens: int
    chunks: int
    cpu_seconds: float

    @property
    def us_per_token(self) -> float:
        """CPU time per token in microseconds."""
        return self.cpu_seconds / max(1, self.tokens) * 1e6


@contextlib.contextmanager
def open_server() -> Iterator[str]:
    """The fast server in a process of its own; gives its address."""
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        argv = ["-m", "trio_sidecar_bench.server"]
        server = Child("server", argv, env=dynamo_environment(here), log_dir=here, piped=True)
        try:
            yield f"127.0.0.1:{int(server.read())}"
        finally:
            server.close()


class _Meter:
    """Counts while it is on."""

    def __init__(self) -> None:
        self.tokens = self.chunks = 0
        self._over = False

    def is_over(self) -> bool:
        return self._over

    async def aio_window(self, seconds: float) -> Cost:
        await asyncio.sleep(WARMUP_SECONDS)
        self.tokens = self.chunks = 0
        before = time.process_time()
        await asyncio.sleep(seconds)
        cost = Cost(self.tokens, self.chunks, time.process_time() - before)
        self._over = True
        return cost


async def _aio_ours(sessions: Sessions, load: Load, seconds: float) -> Cost:
    meter = _Meter()

    async def lane() -> None:
        for number in itertools.count():
            if meter.is_over():
                return
            session = sessions.open(load.request(load.tokens), f"{id(lane)}-{number}")
            while (chunk := await session.aio_next()) is not None:
                meter.tokens += len(chunk["token_ids"])
                meter.chunks += 1
                await asyncio.sleep(0)  # Dynamo's runtime comes back for the next chunk, it does not wait here
                if meter.is_over():
                    session.close()

    async with asyncio.TaskGroup() as lanes:
        for _ in range(load.streams):
            lanes.create_task(lane())
        cost = await meter.aio_window(seconds)
    return cost  # noqa: RET504 - not inside the group, which may still fail


def _measure_ours(endpoint: str, load: Load, seconds: float, *, coalesce: bool) -> Cost:
    settings = TransportSettings(grpc_endpoint=GrpcEndpoint.parse(endpoint), grpc_connections=CONNECTIONS)

    def convert(request: Mapping[str, object], request_id: str) -> Any:
        return convert_request(request, request_id=request_id, model=FACTS)

    async def main() -> Cost:
        sessions = Sessions(responder=ResponseConverter, merge=merge_chunks, coalesce=coalesce)
        async with open_remote(settings) as engine, sessions.serving(engine, convert):
            with trio.fail_after(seconds + 60):
                return await run_aio(_aio_ours, sessions, load, seconds)

    return run(main)


async def _aio_naive(endpoint: str, load: Load, seconds: float) -> Cost:
    host, _, port = endpoint.rpartition(":")
    channels = [Channel(host, int(port)) for _ in range(CONNECTIONS)]
    turn = itertools.cycle(channels)
    meter = _Meter()
    request = load.request(load.tokens)
    message = wire.GenerateRequest(
        token_ids=wire.TokenIds(ids=request["token_ids"]),
        sampling=wire.RandomSampling(seed=request["sampling_options"]["seed"]),
        stopping=wire.StoppingCriteria(max_new_tokens=load.tokens),
        response=wire.ResponseOptions(output_token_ids=True, output_text=True),
    )
    path, kind = "/vllm.Inference/GenerateStream", Cardinality.UNARY_STREAM

    async def lane() -> None:
        while not meter.is_over():
            async with next(turn).request(path, kind, wire.GenerateRequest, wire.GenerateResponse) as stream:
                await stream.send_message(message, end=True)
                async for response in stream:
                    if (outputs := response.outputs) is not None:
                        chunk = {"token_ids": outputs.token_ids, "text": outputs.text, "index": 0}
                        meter.tokens += len(chunk["token_ids"])  # type: ignore[arg-type]
                        meter.chunks += 1
                    if meter.is_over():
                        with contextlib.suppress(StreamClosedError):  # the peer may have ended it already
                            await stream.cancel()
                        break

    try:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(load.streams):
                lanes.create_task(lane())
            cost = await meter.aio_window(seconds)
    finally:
        for channel in channels:
            channel.close()
    return cost


PATHS: dict[str, Callable[[str, Load, float], Cost]] = {
    "ours": lambda endpoint, load, seconds: _measure_ours(endpoint, load, seconds, coalesce=True),
    "ours-off": lambda endpoint, load, seconds: _measure_ours(endpoint, load, seconds, coalesce=False),
    "naive": lambda endpoint, load, seconds: uvloop.run(_aio_naive(endpoint, load, seconds)),
}


def measure(path: str, endpoint: str, load: Load, seconds: float) -> Cost:
    """One window of one load on one path."""
    return PATHS[path](endpoint, load, seconds)


def main() -> None:
    """Print the costs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", default=list(PATHS))
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--loads", default="flood,64x50")
    arguments = parser.parse_args()
    configure_logging(LogSettings(level=LogLevel.WARNING))
    with open_server() as endpoint:
        for _ in range(arguments.rounds):
            for load in arguments.loads.split(","):
                for path in arguments.paths:
                    cost = measure(path, endpoint, LOADS[load], arguments.seconds)
                    per_chunk = cost.tokens / max(1, cost.chunks)
                    print(f"{load:10} {path:9} {cost.us_per_token:8.2f} µs/token, {per_chunk:5.1f} tokens/chunk")  # noqa: T201


if __name__ == "__main__":
    main()
