"""One run: all processes side by side on this machine, each contender under each load in turn, several rounds."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs

from trio_sidecar_bench.contenders import CONTENDERS
from trio_sidecar_bench.loads import LOADS, Load
from trio_sidecar_bench.processes import Child, dynamo_environment, rss_kib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trio_sidecar_bench.contenders import Contender

__all__ = ["CONNECTIONS", "Stage", "machine", "measure_loads", "measure_memory", "measure_start_up"]

CONNECTIONS = 8
START_SECONDS = 60.0
LEAK_REQUESTS = 20_000
HELD_STREAMS = 1_000
HELD = Load(name="held", streams=HELD_STREAMS, tokens=1_000_000, rate=1, prompt_tokens=8)


class Stage:
    """The server, the load generator and the workers that run at the moment; leaving the ``with`` block ends all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.discovery = directory / "discovery"
        self.environment = dynamo_environment(self.discovery)
        self._cleanup = contextlib.ExitStack()
        self._workers = 0

    def __enter__(self) -> Self:
        """Start the server and the load generator."""
        with contextlib.ExitStack() as cleanup:
            self._cleanup = cleanup
            self.server = self._start("server", ["-m", "trio_sidecar_bench.server"], piped=True)
            self.endpoint = f"127.0.0.1:{int(self.server.read())}"
            self.loadgen = self._start("loadgen", ["-m", "trio_sidecar_bench.loadgen"], piped=True)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End everything."""
        self._cleanup.close()

    def _start(self, name: str, argv: Sequence[str], *, piped: bool = False) -> Child:
        child = Child(name, argv, env=self.environment, log_dir=self.directory, piped=piped)
        self._cleanup.callback(child.close)
        return child

    @contextlib.contextmanager
    def worker(self, contender: Contender, connections: int = CONNECTIONS) -> Iterator[Worker]:
        """A worker that is registered with Dynamo."""
        self._workers += 1
        namespace = f"bench{self._workers}"
        argv = contender.argv(namespace, self.endpoint, connections)
        child = Child(f"{contender.name}-{namespace}", argv, env=self.environment, log_dir=self.directory)
        try:
            start_up = child.wait_until(lambda: self._registered(namespace), "registered", seconds=START_SECONDS)
            yield Worker(self, contender, child, f"{namespace}.backend.generate", start_up)
        finally:
            child.close()

    def _registered(self, namespace: str) -> bool:
        instances = self.discovery / "v1" / "instances"
        return any(path.name.startswith(f"{namespace}%2F") for path in instances.rglob("*"))

    def server_statistics(self) -> dict[str, Any]:
        """What the server says about itself."""
        statistics_: dict[str, Any] = json.loads(self.server.ask(""))
        return statistics_


@attrs.frozen(slots=True)
class Worker:
    """A running contender."""

    stage: Stage
    contender: Contender
    child: Child
    endpoint: str
    start_up_seconds: float

    def window(self, load: Load, *, warmup: float, seconds: float) -> dict[str, Any]:
        """Put one load on it for some seconds; returns the figures."""
        stage = self.stage
        stage.server_statistics()
        pids = {"worker": self.child.pid, "server": stage.server.pid, "loadgen": stage.loadgen.pid}
        order = {
            "endpoint": self.endpoint,
            "load": attrs.asdict(load),
            "warmup": warmup,
            "seconds": seconds,
            "pids": pids,
        }
        figures: dict[str, Any] = json.loads(stage.loadgen.ask(json.dumps(order)))
        figures["rss_kib"] = rss_kib(self.child.pid)
        figures["server"] = stage.server_statistics()
        return figures


def measure_loads(
    contenders: Sequence[str],
    loads: Sequence[str],
    *,
    rounds: int,
    seconds: float,
    warmup: float,
    tell: Callable[[str], None],
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Each load on each contender, once per round; the order of the contenders turns from round to round.

    Returns:
        By load and contender, the figures of every round.
    """
    results: dict[str, dict[str, list[dict[str, Any]]]] = {load: {name: [] for name in contenders} for load in loads}
    with tempfile.TemporaryDirectory() as directory, Stage(Path(directory)) as stage, contextlib.ExitStack() as workers:
        running = {name: workers.enter_context(stage.worker(CONTENDERS[name])) for name in contenders}
        for number in range(rounds):
            for load_name in loads:
                load = LOADS[load_name]
                for turn in range(len(contenders)):
                    worker = running[contenders[(turn + number) % len(contenders)]]
                    if load.rate and not worker.contender.paced:
                        continue
                    tell(f"round {number + 1}/{rounds}: {load_name} on {worker.contender.name}")
                    figures = worker.window(load, warmup=warmup, seconds=seconds)
                    results[load_name][worker.contender.name].append(figures)
    return results


def measure_start_up(
    contenders: Sequence[str], connections: Sequence[int], *, rounds: int, tell: Callable[[str], None]
) -> dict[str, dict[int, list[float]]]:
    """Seconds from a worker's start until it is registered, by contender and number of connections."""
    results: dict[str, dict[int, list[float]]] = {name: {count: [] for count in connections} for name in contenders}
    with tempfile.TemporaryDirectory() as directory, Stage(Path(directory)) as stage:
        for number in range(rounds):
            for count in connections:
                for name in contenders:
                    tell(f"round {number + 1}/{rounds}: start-up of {name} with {count} connections")
                    with stage.worker(CONTENDERS[name], count) as worker:
                        results[name][count].append(worker.start_up_seconds)
    return results


def measure_memory(contenders: Sequence[str], *, tell: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Resident memory of each contender: when idle, per open stream, and before and after 20,000 requests, in KiB."""
    results = {}
    with tempfile.TemporaryDirectory() as directory, Stage(Path(directory)) as stage:
        for name in contenders:
            with stage.worker(CONTENDERS[name]) as worker:
                tell(f"memory of {name}")
                results[name] = _memory(worker)
    return results


def _memory(worker: Worker) -> dict[str, float]:
    pid = worker.child.pid
    idle = rss_kib(pid)
    short = LOADS["short"]
    worker.window(short, warmup=2, seconds=3)
    before, done, samples = rss_kib(pid), 0, []
    while done < LEAK_REQUESTS:
        figures = worker.window(short, warmup=0, seconds=5)
        done += max(1, figures["ended"])
        samples.append(figures["rss_kib"])
    after = samples[-1]
    # What the first time costs (arenas, caches) is not what a stream costs.
    held = []
    for _ in range(2):
        base = rss_kib(pid)
        worker_peak = _held_rss(worker)
        held.append((worker_peak - base) / HELD_STREAMS)
    return {
        "idle": idle,
        "before": before,
        "after": after,
        "median": statistics.median(samples),
        "requests": done,
        "per_stream": held[0],
        "per_stream_again": held[1],
    }


def _held_rss(worker: Worker) -> int:
    """The most that the process had while the streams were open."""
    stage = worker.stage
    order = {
        "endpoint": worker.endpoint,
        "load": attrs.asdict(HELD),
        "warmup": 4.0,
        "seconds": 0.5,
        "pids": {"worker": worker.child.pid},
        "rss": worker.child.pid,
    }
    return int(json.loads(stage.loadgen.ask(json.dumps(order)))["rss_kib"])


def machine() -> dict[str, Any]:
    """What a reader has to know about the machine."""
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": model, "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
