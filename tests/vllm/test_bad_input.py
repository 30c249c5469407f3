"""What keeps a real vLLM from starting is told in one line, without a traceback, and nothing is served."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.vllm_server import START_SECONDS, VLLM_ARGUMENTS, vllm_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.timeout(400)

WRONG = 2
FAILED = 1
CASES = [
    (["--no-such-argument=3"], WRONG, "vLLM argument: unrecognized arguments: --no-such-argument=3"),
    (["--dtype=float99"], WRONG, "vLLM argument: argument --dtype: invalid choice: 'float99'"),
    (["--tensor-parallel-size=0"], FAILED, "tensor_parallel_size: Input should be greater than or equal to 1"),
    (["--max-model-len=99999"], FAILED, "max_model_len (99999) is greater"),
    (["--kv-cache-memory-bytes=100"], FAILED, "No available memory for the cache blocks"),
]


GPU_BUILD = """
import importlib.metadata

find = importlib.metadata.version
importlib.metadata.version = lambda name: "0.32.0" if name == "vllm" else find(name)
"""
"""A start-up module of Python's after which vLLM takes itself for a build for GPUs."""


def refusal(
    models: Path, *arguments: str, listen: str = "127.0.0.1:0", environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and last line; there is nothing on stdout and no traceback anywhere."""
    command = [sys.executable, "-m", "trio_sidecar", "engine", "vllm", str(models / "model"), f"--listen={listen}"]
    done = subprocess.run(
        [*command, *VLLM_ARGUMENTS, *arguments],
        env=vllm_environment(models) | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert "" == done.stdout
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(("arguments", "code", "words"), CASES, ids=[case[0][0].strip("-") for case in CASES])
def test_what_vllm_refuses(models: Path, arguments: list[str], code: int, words: str) -> None:
    """An argument is a usage error, exit code 2; what only its start can tell is 1."""
    found, line = refusal(models, *arguments)
    assert (code, True) == (found, words in line), line
    assert line.startswith("trio-sidecar engine vllm: ")


def test_a_gpu_that_is_not_there(models: Path, tmp_path: Path) -> None:
    """A build for GPUs on a machine without one says so, and what can look for it."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU here")
    (tmp_path / "sitecustomize.py").write_text(GPU_BUILD)
    code, line = refusal(models, environment={"PYTHONPATH": str(tmp_path)})
    assert (FAILED, True) == (code, "there is no device that this build of vLLM runs on" in line), line


def test_a_port_in_use(models: Path) -> None:
    """It is named."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, line = refusal(models, listen=address)
    assert (WRONG, True) == (code, f"--listen: {address} is in use" in line), line
