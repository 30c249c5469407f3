"""``trio-sidecar up`` as a newcomer meets it: one command, one answer, a service that curl can ask, a clean end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from support import peers
from support.openai import OpenAi, open_client
from support.processes import Child, free_port
from support.stack import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

READY_SECONDS = 40
END_SECONDS = 25
PACE = ("--ttft-ms=5", "--itl-ms=5")


def up(directory: Path, *arguments: str) -> Child:
    """Start it; its temporary files go to the directory."""
    argv = [sys.executable, "-m", "trio_sidecar", "up", *PACE, *arguments]
    directory.mkdir(parents=True, exist_ok=True)
    return Child("up", argv, env=peers.environment() | {"TMPDIR": str(directory)}, log_dir=directory)


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def alive(pids: set[int]) -> set[int]:
    """Those that still run."""
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Child]:
    """A service that is ready."""
    child = up(tmp_path / "up")
    try:
        child.wait_for_line("^curl ", seconds=READY_SECONDS)
        yield child
    finally:
        child.close(seconds=END_SECONDS)


def curl_line(service: Child) -> str:
    """The line that it offers for pasting."""
    return next(line for line in service.log.splitlines() if line.startswith("curl "))


def client_of(service: Child) -> tuple[str, str]:
    """The URL and the model that the line names."""
    line = curl_line(service)
    url, model = re.search(r"http://[^/]+", line), re.search(r'"model": "([^"]+)"', line)
    assert url is not None
    assert model is not None
    return url[0], model[1]


@pytest.mark.parametrize("worker", ["trio", "rust"])
def test_one_question(tmp_path: Path, worker: str) -> None:
    """With ``--ask`` it puts one question, streams the answer, exits with 0 and leaves no process."""
    child = up(tmp_path / "up", f"--worker={worker}", "--ask", "what does the harbour smell of?")
    child.wait_for_line(r"^ +worker +\S", seconds=READY_SECONDS)
    started = descendants(child.pid)
    try:
        assert 0 == child.wait(seconds=READY_SECONDS)
        assert "the harbour smell of" in child.log
        assert "tokens, finish reason stop" in child.log
        assert [] == [path.name for path in (tmp_path / "up").iterdir() if path.name != "up.log"]
    finally:
        child.close()
    assert set() == alive(started)


async def test_everything_that_curl_may_ask(service: Child) -> None:
    """Models, chat, completions, streams, logprobs, limits, stop strings, seeds, usage, refusals, many at once."""
    url, model = client_of(service)
    async with open_client(url, model, [40, 41, 42]) as client:
        models = (await client.http.get(f"{url}/v1/models")).json()["data"]
        assert [model] == [one["id"] for one in models]
        chat = await client.chat(max_tokens=8)
        assert ("length", 8) == (chat.finish_reason, chat.usage[1])
        streamed = await client.stream_chat(max_tokens=8, stream_options={"include_usage": True})
        assert (chat.text, [chat.usage]) == (streamed.text, streamed.usages)
        complete = await client.complete(max_tokens=8)
        assert complete.text == (await client.stream_complete(max_tokens=8)).text
        stop = complete.text.split()[-1]
        assert stop not in (await client.complete(max_tokens=8, stop=[stop])).text
        seeded = [(await client.complete(max_tokens=60, seed=seed, temperature=1)).text for seed in (1, 1, 4)]
        assert (seeded[0] == seeded[1], seeded[0] == seeded[2]) == (True, False)
        rows = (await client.chat(max_tokens=3, logprobs=True, top_logprobs=2)).choice["logprobs"]["content"]
        assert [2, 2, 2] == [min(len(row["top_logprobs"]), 2) for row in rows]
        await refusals(client)
        await many(client, complete.text)


async def refusals(client: OpenAi) -> None:
    """Wrong fields are named."""
    many_choices = await client.chat(n=2)
    assert (400, True) == (many_choices.status, "n must be 1" in many_choices.error)
    hot = await client.chat(temperature=9)
    assert (400, True) == (hot.status, "emperature" in hot.error)
    unknown = await client.chat(model="nobody")
    assert (404, True) == (unknown.status, "odel" in unknown.error)
    long = await client.complete(prompt=[40] * 40_000)
    assert (400, True) == (long.status, "32768" in long.error)


async def many(client: OpenAi, text: str) -> None:
    """Sixty-four at once all finish."""
    texts: list[str] = []

    async def one() -> None:
        texts.append((await client.stream_complete(max_tokens=8)).text)

    async with trio.open_nursery() as nursery:
        for _ in range(64):
            nursery.start_soon(one)
    assert [text] * 64 == texts


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_curl_line_can_be_pasted(service: Child) -> None:
    """The offered line is a command that streams an answer."""
    done = subprocess.run(["bash", "-c", curl_line(service)], capture_output=True, text=True, timeout=30, check=True)
    assert "data: [DONE]" in done.stdout


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_everything(service: Child, signum: signal.Signals) -> None:
    """Ctrl-C or SIGTERM ends all parts soon, in order and cleanly."""
    started = descendants(service.pid)
    assert 3 <= len(started)
    service.send(signum)
    assert 0 == service.wait(seconds=END_SECONDS)
    assert set() == alive(started)
    assert "Traceback" not in service.log


@pytest.mark.rule("FR-023")
async def test_killed_leaves_nothing(service: Child) -> None:
    """Even if it is killed, its parts end."""
    started = descendants(service.pid)
    os.kill(service.pid, signal.SIGKILL)
    await eventually(lambda: alive(started) <= zombies(started), "no part runs", seconds=END_SECONDS)


def zombies(pids: set[int]) -> set[int]:
    """Those that have ended, but that nobody has waited for yet."""
    return {pid for pid in alive(pids) if state_of(pid) in {"Z", "X"}}


def state_of(pid: int) -> str:
    """The state letter of a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def arguments_of(pid: int) -> list[str]:
    """A process's command line."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.mark.parametrize("part", ["engine", "worker", "frontend"])
async def test_part_that_dies(service: Child, part: str) -> None:
    """If a part dies, the rest ends too, and the last lines say which part it was."""
    started = descendants(service.pid)
    victim = next(pid for pid in started if part in arguments_of(pid))
    os.kill(victim, signal.SIGKILL)
    code = await trio.to_thread.run_sync(lambda: service.wait(seconds=END_SECONDS), abandon_on_cancel=True)
    assert 0 < code < 128
    assert ("front end" if part == "frontend" else part) in service.log.splitlines()[-1]
    await eventually(lambda: alive(started) <= zombies(started), "no part runs", seconds=5)


def test_port_in_use(tmp_path: Path) -> None:
    """A port that somebody has is refused before anything starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        child = up(tmp_path / "up", f"--http-port={taken.getsockname()[1]}")
        assert 0 < child.wait(seconds=END_SECONDS) < 128
    assert "--http-port" in child.log.splitlines()[-1]


@pytest.mark.parametrize("worker", ["trio", "rust"])
def test_the_live_view_of_the_worker(tmp_path: Path, worker: str) -> None:
    """With a system port it prints the command that shows the worker, and that does; Rust's has other metrics."""
    port = free_port()
    child = up(tmp_path / "up", f"--system-port={port}", f"--worker={worker}")
    try:
        command = child.wait_for_line("^trio-sidecar (top .*)$", seconds=READY_SECONDS)[1]
        shown = subprocess.run(
            [sys.executable, "-m", "trio_sidecar", *command.split(), "--once", "--interval-secs=0.2"],
            env=peers.environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    finally:
        child.close(seconds=END_SECONDS)
    assert f"top 127.0.0.1:{port}" == command
    assert 0 == shown.returncode, shown.stdout + shown.stderr
    assert (worker == "trio") == ("serving  mocker-model" in shown.stdout)
