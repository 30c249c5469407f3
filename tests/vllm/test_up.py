"""``trio-sidecar up --engine vllm``: engine, worker and front end from one command, as the documentation has it."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from support.processes import Child
from support.vllm_server import START_SECONDS, VLLM_ARGUMENTS, vllm_environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)


def test_one_question_through_all_three(models: Path, tmp_path: Path) -> None:
    """A chat gets an answer from the model, the command ends with 0, and vLLM was stopped and not killed."""
    argv: list[str | Path] = [sys.executable, "-m", "trio_sidecar", "up", "--engine=vllm"]
    argv += [f"--model={models / 'model'}", "--ask=Is anybody there?", "--verbose", *VLLM_ARGUMENTS]
    up = Child("up", argv, env=vllm_environment(models), log_dir=tmp_path)
    try:
        assert 0 == up.wait(seconds=START_SECONDS)
    finally:
        up.close(seconds=20)
    tokens = re.search(r"(\d+) tokens, finish reason (?:stop|length)", up.log)
    assert tokens is not None, up.log[-4000:]
    assert int(tokens[1]) > 0
    assert "vllm_stopped" in up.log
    assert "Traceback" not in up.log
