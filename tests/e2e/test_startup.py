"""What our worker does when its engine is absent, not ready or wrong, and when it is told to stop meanwhile."""

from __future__ import annotations

import re
import signal
import socket
import time
from typing import TYPE_CHECKING

import attrs
import pytest

from support.fake_engine import FakeEngine, Health, default_model, default_server, fake_engine
from support.peers import start_worker
from support.processes import Child, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

QUICK = (
    "--grpc-startup-deadline-secs=2",
    "--grpc-retry-interval-secs=1",
    "--grpc-connect-attempt-timeout-secs=1",
    "--grpc-connections=2",
)
PATIENT = ("--grpc-startup-deadline-secs=60", "--grpc-retry-interval-secs=1")
EXIT_SECONDS = 15
STOP_SECONDS = 5


@attrs.frozen(slots=True)
class Workers:
    """Starts workers in a directory of their own."""

    directory: Path
    children: list[Child] = attrs.field(factory=list)

    def start(self, endpoint: str, arguments: tuple[str, ...] = QUICK, **variables: str) -> Child:
        """Start one; it is closed at the end of the test."""
        child = start_worker(
            endpoint,
            discovery=self.directory / "discovery",
            log_dir=self.directory / "logs",
            arguments=arguments,
            name=f"worker-{len(self.children)}",
            **variables,
        )
        self.children.append(child)
        return child

    def registrations(self) -> list[str]:
        """Files that discovery holds."""
        return [str(path) for path in (self.directory / "discovery").rglob("*") if path.is_file()]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """Starts workers and ends them."""
    factory = Workers(tmp_path)
    yield factory
    for child in factory.children:
        child.close(seconds=1)


def last_words(child: Child) -> str:
    """Wait for a process to fail; the one line with which it ends."""
    code = child.wait(seconds=EXIT_SECONDS)
    assert 0 < code < 128, (code, child.log)
    assert "Traceback" not in child.log
    return child.log.rstrip().splitlines()[-1]


@pytest.mark.rule("R3.6", "R3.7", "R11.12")
def test_engine_is_not_there(workers: Workers) -> None:
    """The worker retries until the deadline, then fails with one line that says where, how often, how long and why."""
    endpoint = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    worker = workers.start(endpoint)
    words = last_words(worker)
    assert time.monotonic() - began >= 2
    for part in (endpoint, "slot 1", "within 2s", "after 2 attempts", "elapsed", "refused"):
        assert part in words
    assert [] == workers.registrations()


@pytest.mark.rule("R3.3", "R11.12")
def test_engine_accepts_and_is_silent(workers: Workers) -> None:
    """A peer that accepts connections and says nothing does not hold the worker beyond its deadline."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        worker = workers.start(endpoint)
        assert endpoint in last_words(worker)
    assert [] == workers.registrations()


@pytest.mark.rule("R5.3", "R5.6")
def test_engine_is_not_serving(workers: Workers) -> None:
    """An engine that is there but never SERVING: the last line names the service and what was waited for."""
    with fake_engine(FakeEngine(health=Health.NOT_SERVING)) as engine:
        worker = workers.start(engine.endpoint)
        words = last_words(worker)
    assert "vllm.Control" in words
    assert "SERVING" in words
    assert 2 <= engine.calls.count("Check")
    assert "GetModelInfo" not in engine.calls


@pytest.mark.rule("R5.3")
def test_engine_becomes_ready_later(workers: Workers) -> None:
    """A worker that waits for its engine goes on as soon as it serves."""
    with fake_engine(FakeEngine(health=Health.NOT_SERVING)) as engine:
        worker = workers.start(engine.endpoint, PATIENT)
        worker.wait_until(lambda: "Check" in engine.calls, "health asked", seconds=EXIT_SECONDS)
        engine.health = Health.SERVING
        worker.wait_until(lambda: "GetServerInfo" in engine.calls, "discovery", seconds=EXIT_SECONDS)


def wrong_api(engine: FakeEngine) -> None:
    """Another API."""
    engine.server = default_server()
    engine.server.api_version = "unsupported"


def no_token_ids(engine: FakeEngine) -> None:
    """Text only."""
    engine.model = default_model()
    engine.model.supports_token_ids_input = False


def empty_model(engine: FakeEngine) -> None:
    """No model."""
    engine.model = default_model()
    engine.model.model_id = ""


def empty_served_name(engine: FakeEngine) -> None:
    """No name."""
    engine.model = default_model()
    engine.model.served_model_name = " "


@pytest.mark.rule("R6.1")
@pytest.mark.parametrize(
    ("change", "names"),
    [
        (wrong_api, ["unsupported", "vllm"]),
        (no_token_ids, ["token"]),
        (empty_model, ["model_id"]),
        (empty_served_name, ["served_model_name"]),
    ],
)
def test_engine_is_wrong(workers: Workers, change: Callable[[FakeEngine], None], names: list[str]) -> None:
    """What no retry would cure ends the worker at once; the last line names what is wrong."""
    engine = FakeEngine()
    change(engine)
    with fake_engine(engine):
        worker = workers.start(engine.endpoint, PATIENT)
        words = last_words(worker)
    assert [] == [name for name in names if name not in words]
    assert [] == workers.registrations()


@pytest.mark.rule("R11.7", "R11.12")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_stop_during_startup(workers: Workers, signum: signal.Signals) -> None:
    """Told to stop while it waits for its engine, the worker ends cleanly and soon, and leaves no registration."""
    worker = workers.start(f"127.0.0.1:{free_port()}", PATIENT)
    worker.wait_for_line(r"retr|attempt|connect", seconds=EXIT_SECONDS)
    worker.send(signum)
    assert 0 == worker.wait(seconds=STOP_SECONDS)
    assert [] == workers.registrations()


@pytest.mark.rule("R2.3", "R2.10")
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--grpc-connections=0",), ["--grpc-connections"]),
        ((), ["--grpc-endpoint", "TLS"]),
        (("--vllm-http-endpoint=grpc://worker:1",), ["--vllm-http-endpoint"]),
    ],
)
def test_wrong_flag(workers: Workers, arguments: tuple[str, ...], names: list[str]) -> None:
    """A wrong flag is refused before anything is connected, and the message names it."""
    worker = workers.start("127.0.0.1:1" if arguments else "https://server:1", arguments)
    words = last_words(worker)
    assert [] == [name for name in names if name not in words]
    assert not re.search("retry|attempt", worker.log)


@pytest.mark.rule("FR-098")
def test_no_event_plane(workers: Workers) -> None:
    """A worker whose KV events would go nowhere does not register: Dynamo's runtime waits for NATS, and says so."""
    with fake_engine(FakeEngine()) as engine:
        worker = workers.start(engine.endpoint, (*QUICK, "--event-plane=nats"), NATS_SERVER="nats://127.0.0.1:1")
        worker.wait_for_line("NATS not reachable yet.*")
        assert worker.running
        assert [] == workers.registrations()
