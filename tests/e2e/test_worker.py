"""The worker's face beside a real Dynamo, with the engine in the worker's own process, on both hosts."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import trio

from support import moody_worker_main as moody
from support import peers
from support.openai import CHATTY, OpenAi, open_client
from support.processes import Child, free_port
from support.stack import eventually
from trio_sidecar.errors import StatusCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

MODEL = "mocker-model"
PROMPT = [11, 22, 33]
EXIT_SECONDS = 20
ATTEMPTS = 100


@contextlib.contextmanager
def running_frontend(directory: Path) -> Iterator[tuple[peers.Frontend, Path]]:
    """A front end and the directory in which it looks for workers."""
    running = peers.start_frontend(discovery=directory / "discovery", log_dir=directory)
    try:
        yield running, directory
    finally:
        running.process.close(seconds=1)


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[peers.Frontend, Path]]:
    """A front end for the workers of the fixture below."""
    with running_frontend(tmp_path_factory.mktemp("dynamo")) as running:
        yield running


@pytest.fixture(scope="module", params=["uvloop", "trio"])
def worker(request: pytest.FixtureRequest, frontend: tuple[peers.Frontend, Path]) -> Iterator[Child]:
    """A worker on one host."""
    with running_worker(frontend, request.param) as child:
        yield child


@contextlib.contextmanager
def running_worker(frontend: tuple[peers.Frontend, Path], host: str) -> Iterator[Child]:
    """A worker that the front end knows."""
    front, directory = frontend
    argv = [sys.executable, moody.__file__, host]
    env = peers.dynamo_environment(directory / "discovery")
    child = Child(f"worker-{host}", argv, env=env, log_dir=directory)
    try:
        peers.wait_for_model(front, MODEL, [child])
        yield child
    finally:
        child.close(seconds=3)


@contextlib.asynccontextmanager
async def client_of(frontend: tuple[peers.Frontend, Path]) -> AsyncIterator[OpenAi]:
    """A client whose front end can reach the worker."""
    async with open_client(frontend[0].url, MODEL, PROMPT) as client:
        for _ in range(ATTEMPTS):
            if (await client.complete(max_tokens=1)).status == 200:
                break
            await trio.sleep(0.1)
        yield client


def prompt_for(mood: int, status: StatusCode) -> list[int]:
    """A prompt that makes the engine fail like that."""
    return [mood + status, *PROMPT]


async def test_chat(worker: Child, frontend: tuple[peers.Frontend, Path]) -> None:
    """A chat is answered, and its stream is the same text."""
    async with client_of(frontend) as client:
        answer = await client.chat(max_tokens=8)
        streamed = await client.stream_chat(max_tokens=8, stream_options={"include_usage": True})
    assert "length" == answer.finish_reason
    assert 8 == answer.usage[1]
    assert answer.text == streamed.text
    assert answer.text
    assert ["length"] == streamed.finish_reasons
    assert [answer.usage] == streamed.usages
    assert CHATTY not in worker.log


@pytest.mark.rule("R4.1", "R10.16")
@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (StatusCode.INVALID_ARGUMENT, 400, "GenerateStream: a mood (InvalidArgument)"),
        (StatusCode.NOT_FOUND, 400, "GenerateStream: a mood (NotFound)"),
        (StatusCode.UNAVAILABLE, 503, "temporarily unavailable"),
        (StatusCode.DEADLINE_EXCEEDED, 504, "deadline exceeded"),
        (StatusCode.CANCELLED, 499, "cancelled"),
        (StatusCode.INTERNAL, 500, "Internal server error"),
        (StatusCode.RESOURCE_EXHAUSTED, 500, "Internal server error"),
    ],
)
async def test_error_of_the_engine(
    worker: Child, frontend: tuple[peers.Frontend, Path], status: StatusCode, code: int, says: str
) -> None:
    """Each gRPC status gives the client the right HTTP status, and the next request is answered."""
    async with client_of(frontend) as client:
        refused = await client.complete(prompt=prompt_for(moody.MOODY, status), max_tokens=4)
        cut = await client.complete(prompt=prompt_for(moody.LATE, status), max_tokens=400)
        assert 200 == (await client.complete(max_tokens=1)).status
    assert (code, code) == (refused.status, cut.status)
    assert says in refused.error
    assert says in cut.error


async def test_error_in_mid_stream(worker: Child, frontend: tuple[peers.Frontend, Path]) -> None:
    """What was delivered before an error stays, and the error is the stream's last event."""
    body: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": 400}
    body["prompt"] = prompt_for(moody.LATE, StatusCode.UNAVAILABLE)
    async with client_of(frontend) as client:
        text = (await client.http.post(f"{client.url}/v1/completions", json=body)).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert 2 <= len(events)
    assert events[0]["choices"][0]["text"]
    assert 503 == events[-1]["error"]["code"]


@pytest.mark.rule("FR-001")
async def test_client_goes_away(worker: Child, frontend: tuple[peers.Frontend, Path]) -> None:
    """The worker ends a request whose client has gone, and counts it as cancelled."""
    async with client_of(frontend) as client:
        first = await client.leave_after("/v1/completions", {"max_tokens": 900, "ignore_eos": True}, events=3)
        request = str(first["id"]).removeprefix("cmpl-")

        def ended() -> bool:
            lines = [line for line in worker.log.splitlines() if "request_ended" in line and request in line]
            return any("cancelled" in line for line in lines)

        await eventually(ended, "the worker has ended the request", seconds=2)


@pytest.mark.rule("FR-050", "R11.7")
@pytest.mark.parametrize("host", ["uvloop", "trio"])
async def test_many_signals_under_load(tmp_path: Path, host: str) -> None:
    """Signals that come again and again change nothing: the request ends whole, the exit code is 0."""
    with running_frontend(tmp_path) as frontend, running_worker(frontend, host) as child:
        answers = []
        async with client_of(frontend) as client, trio.open_nursery() as nursery:

            async def ask() -> None:
                answers.append(await client.complete(max_tokens=200, ignore_eos=True))

            nursery.start_soon(ask)
            await trio.sleep(0.5)
            for signum in (signal.SIGTERM, signal.SIGINT) * 10:
                if child.running:
                    child.send(signum)
                await trio.sleep(0.15)
        code = await trio.to_thread.run_sync(lambda: child.wait(seconds=EXIT_SECONDS), abandon_on_cancel=True)
    assert 0 == code
    assert 200 == answers[0].usage[1]
    assert "Traceback" not in child.log


@pytest.mark.rule("FR-051", "R11.7")
@pytest.mark.parametrize("delay", [0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4])
def test_sigterm_while_it_starts(tmp_path: Path, delay: float) -> None:
    """SIGTERM at any point after the worker has begun to start is remembered: it ends soon, with 0."""
    env = peers.dynamo_environment(tmp_path / "discovery")
    child = Child("starting", [sys.executable, moody.__file__, "uvloop"], env=env, log_dir=tmp_path)
    try:
        child.wait_for_line("mock_engine_opened")
        with contextlib.suppress(AssertionError):
            child.wait(seconds=delay)
        child.send(signal.SIGTERM)
        assert 0 == child.wait(seconds=5)
    finally:
        child.close(seconds=0)
    assert "Traceback" not in child.log


@pytest.mark.rule("R11.10", "R15.17")
def test_probes_do_not_wait_for_the_engine(tmp_path: Path) -> None:
    """An orchestrator's probes are answered while the worker waits for its engine, and while it serves."""
    port = free_port()
    env = peers.dynamo_environment(tmp_path / "discovery") | {
        "DYN_SYSTEM_PORT": str(port),
        "DYN_SYSTEM_HOST": "127.0.0.1",
    }
    waiting = [sys.executable, "-m", "trio_sidecar", "worker", f"--grpc-endpoint=127.0.0.1:{free_port()}"]
    serving = [sys.executable, moody.__file__, "uvloop"]
    for argv in (waiting, serving):
        child = Child("probed", argv, env=env, log_dir=tmp_path)
        try:
            if argv is serving:
                child.wait_until(lambda: any((tmp_path / "discovery").rglob("*generate*")), "registered", seconds=20)
            child.wait_for_port(port)
            for path in ("/live", "/health", "/metrics"):
                assert 200 == httpx2.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code
            child.send(signal.SIGTERM)
            assert 0 == child.wait(seconds=EXIT_SECONDS)
        finally:
            child.close(seconds=0)
