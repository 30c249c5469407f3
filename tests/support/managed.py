"""A service whose workers have a system server, and what can be asked of that."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import attrs
import httpx2

from support import peers
from support.processes import Child, free_port
from support.stack import WorkerKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

MODEL = "mocker-model"
PACE = {"--ttft-ms": 5, "--itl-ms": 5}
SECONDS = 20


@attrs.frozen(slots=True, kw_only=True)
class Managed:
    """A running service.

    Attributes:
        engines: One per worker.
        workers: The workers.
        ports: Of their system servers.
        discovery: The directory through which Dynamo's processes find each other.
    """

    engines: tuple[peers.Engine, ...]
    workers: tuple[Child, ...]
    ports: tuple[int, ...]
    frontend: peers.Frontend
    discovery: Path

    def post(self, path: str, body: object, *, worker: int = 0) -> tuple[int, Any]:
        """Ask a worker's system server; status and body of the answer."""
        url = f"http://127.0.0.1:{self.ports[worker]}/engine/{path}"
        answer = httpx2.post(url, json=body, timeout=SECONDS, trust_env=False)
        return answer.status_code, answer.json()

    def control(self, name: str, **body: Any) -> Any:
        """Run a control; the answer."""
        status, answer = self.post(f"control/{name}", body)
        assert status == httpx2.codes.OK, answer
        return answer

    def update(self, name: str, **body: Any) -> Any:
        """Run an update; the answer."""
        status, answer = self.post(f"update/{name}", body)
        assert status == httpx2.codes.OK, answer
        return answer

    def complete(self, prompt: Sequence[int], model: str = MODEL) -> tuple[int, Any]:
        """One completion; status and body of the answer."""
        body = {"model": model, "prompt": list(prompt), "max_tokens": 3}
        answer = httpx2.post(f"{self.frontend.url}/v1/completions", json=body, timeout=SECONDS, trust_env=False)
        return answer.status_code, answer.json()

    def cards(self) -> dict[str, dict[str, Any]]:
        """The model records in discovery, by name."""
        return {card["display_name"]: card for card in self._cards()}

    def records(self, model: str) -> int:
        """How many workers have a record of that model in discovery."""
        return sum(card["display_name"] == model for card in self._cards())

    def _cards(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text())["card_json"] for path in (self.discovery / "v1" / "mdc").glob("*")]

    def instances(self) -> int:
        """How many workers are in discovery."""
        return len(list((self.discovery / "v1" / "instances").glob("*generate*")))

    def wait_for_models(self, *models: str) -> None:
        """Wait until the front end lists exactly these."""
        self.frontend.process.wait_until(
            lambda: set(models) == set(self.frontend.models()), f"models {models}", seconds=SECONDS
        )


def start_worker(
    engine: peers.Engine,
    *,
    discovery: Path,
    log_dir: Path,
    port: int,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    kind: WorkerKind = WorkerKind.OURS,
) -> Child:
    """Start a worker, or the Rust sidecar, with a system server on that port."""
    ours = kind is WorkerKind.OURS
    argv = [sys.executable, *(("-m", "trio_sidecar", "worker") if ours else ("-c", peers.RUST_SIDECAR))]
    argv += ["--grpc-endpoint", engine.endpoint, *arguments]
    variables = peers.dynamo_environment(discovery) | {
        "DYN_SYSTEM_PORT": str(port),
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.2" if ours else "0",
        **(environment or {}),
    }
    return Child(kind.value, argv, env=variables, log_dir=log_dir)


def start_engine(
    flags: Mapping[str, object], *, log_dir: Path, environment: Mapping[str, str] | None = None, port: int = 0
) -> peers.Engine:
    """Start a mock engine, on a port that the system chooses unless one is given."""
    argv = [sys.executable, "-m", "trio_sidecar", "engine", "mock", f"--listen=127.0.0.1:{port}", "--log-level=debug"]
    argv += [f"{flag}={value}" for flag, value in (PACE | dict(flags)).items()]
    server = Child("engine", argv, env=peers.environment() | dict(environment or {}), log_dir=log_dir)
    try:
        port = int(server.wait_for_line(r"127\.0\.0\.1:(\d+)")[1])
    except BaseException:
        server.close(seconds=0)
        raise
    return peers.Engine(process=server, port=port)


@contextlib.contextmanager
def managed(
    directory: Path,
    *,
    flags: Mapping[str, object],
    workers: int = 1,
    frontend: str = "frontend_main.py",
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Managed]:
    """Put one worker before each of some mock engines, and a front end before them; ready once it lists the model."""
    discovery = directory / "discovery"
    with contextlib.ExitStack() as cleanup:
        front = start_frontend(frontend, discovery=discovery, log_dir=directory, environment=environment)
        cleanup.callback(front.process.close, seconds=1)
        engines, children, ports = [], [], []
        for number in range(workers):
            logs = directory / str(number)
            engine = start_engine(flags, log_dir=logs, environment=environment)
            cleanup.callback(engine.close)
            ports.append(free_port())
            child = start_worker(
                engine,
                discovery=discovery,
                log_dir=logs,
                port=ports[-1],
                arguments=arguments,
                environment=environment,
            )
            cleanup.callback(child.close, seconds=3)
            engines.append(engine)
            children.append(child)
        peers.wait_for_model(front, MODEL, children)
        service = Managed(
            engines=tuple(engines),
            workers=tuple(children),
            ports=tuple(ports),
            frontend=front,
            discovery=discovery,
        )
        for child in children:
            child.wait_until(lambda: service.instances() == workers, f"{workers} workers in discovery", seconds=SECONDS)
        front.process.wait_until(lambda: service.complete([1])[0] == httpx2.codes.OK, "a first answer", seconds=SECONDS)
        yield service


def start_frontend(
    script: str, *, discovery: Path, log_dir: Path, environment: Mapping[str, str] | None = None
) -> peers.Frontend:
    """Start a front end; ready once it listens."""
    port = free_port()
    argv = [sys.executable, str(peers.HERE / script), str(port)]
    child = Child("frontend", argv, env=peers.dynamo_environment(discovery) | dict(environment or {}), log_dir=log_dir)
    try:
        child.wait_for_port(port)
    except BaseException:
        child.close(seconds=0)
        raise
    return peers.Frontend(child, f"http://127.0.0.1:{port}")
