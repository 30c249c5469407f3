"""``trio-sidecar up --ask`` on a machine whose environment is not kind; how it serves is in test_up_service.py."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.peers import environment

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

UP = (sys.executable, "-m", "trio_sidecar", "up")
# A proxy that nobody runs: whoever used it for a call on this machine would fail.
PROXIES = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
# What a real deployment may have set, and what must not reach the parts.
DEPLOYMENT = {
    "DYN_NAMESPACE": "prod",
    "DYN_DISCOVERY_BACKEND": "etcd",
    "DYN_REQUEST_PLANE": "nats",
    "DYN_SYSTEM_PORT": "9",
    "DYN_DISAGGREGATION_MODE": "decode",
    "DYN_SIDECAR_GRPC_ENDPOINT": "127.0.0.1:9",
}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An unkind environment with a temporary directory that can be looked at."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    return environment() | PROXIES | DEPLOYMENT | {"TMPDIR": str(temporary)}


@pytest.fixture
def nothing_left(env: dict[str, str]) -> Iterator[None]:
    """After the test, neither a process nor a file of the run is there."""
    yield
    limit = time.monotonic() + 5
    while left := processes_with(env["TMPDIR"]):
        assert time.monotonic() < limit, left
        time.sleep(0.05)
    assert [] == list(Path(env["TMPDIR"]).iterdir())


def processes_with(directory: str) -> list[str]:
    """Commands of processes whose environment names the directory: the parts of a run, and what they have started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and directory.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # gone, or not ours
    return found


def ask(env: dict[str, str], question: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [*UP, "--ask", question, *flags]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.rule("FR-106")
def test_ask_in_an_unkind_environment(env: dict[str, str]) -> None:
    """Proxies and a deployment's variables change nothing; stdout has the answer only, stderr each stage's time."""
    done = ask(env, "Is anybody there?", "--itl-ms=1")

    assert 0 == done.returncode, done.stderr
    assert "Is anybody there?" in done.stdout
    assert "mock engine" in done.stdout
    for part in ("engine", "front end", "worker", "answer"):
        assert re.search(rf"^  {part} .*\(\d+\.\d s\)$", done.stderr, re.MULTILINE)
        assert part not in done.stdout.splitlines()[0].split(" ", 1)[0]
    assert re.search(r"\d+ tokens, finish reason stop", done.stderr)


@pytest.mark.usefixtures("nothing_left")
def test_both_workers_give_the_same_answer(env: dict[str, str]) -> None:
    """The Rust sidecar does in our worker's place."""
    ours = ask(env, "Who are you?", "--itl-ms=0")
    rust = ask(env, "Who are you?", "--itl-ms=0", "--worker=rust")

    assert (0, 0) == (ours.returncode, rust.returncode), rust.stderr
    assert "Who are you?" in ours.stdout
    assert ours.stdout == rust.stdout


def test_a_prompt_beyond_the_context_is_an_error(env: dict[str, str]) -> None:
    """The refusal is told in one line that names the limit, the exit code is 1, and no process stays."""
    done = ask(env, "word " * 100, "--max-model-len=32")

    assert (1, "\n") == (done.returncode, done.stdout)
    assert re.search(r"^trio-sidecar up: .*max_model_len 32", done.stderr, re.MULTILINE), done.stderr
    assert [] == processes_with(env["TMPDIR"])


@pytest.mark.usefixtures("nothing_left")
def test_a_wrong_engine_flag_is_refused_before_anything_starts(env: dict[str, str]) -> None:
    """Exit code 2 and one line that names the flag."""
    done = ask(env, "x", "--ttft-ms=soon")

    assert (2, "") == (done.returncode, done.stdout)
    assert "trio-sidecar up: --ttft-ms: 'soon' is not a number\n" == done.stderr


@pytest.mark.usefixtures("nothing_left")
def test_a_taken_port_is_named(env: dict[str, str]) -> None:
    """Whoever listens on the port already is not asked by mistake."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = ask(env, "x", f"--http-port={port}")

    assert 2 == done.returncode
    refusal = f"--http-port: 127.0.0.1:{port} is in use by another socket; choose another port"
    assert f"trio-sidecar up: {refusal}\n" == done.stderr
