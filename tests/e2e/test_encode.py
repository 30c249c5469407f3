"""An encode worker behind Dynamo's real front end, which takes media there before it asks anybody else."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import attrs
import httpx2
import pytest

from support import peers
from support.processes import Child
from support.stack import WorkerKind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

MODEL = "mocker-model"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = f"data:image/png;base64,{PIXEL}"


@attrs.frozen
class Engine:
    """A running mock engine."""

    process: Child
    log: Path
    endpoint: str

    @property
    def requests(self) -> list[dict[str, Any]]:
        """What it said when requests came."""
        lines = [line for line in self.log.read_text().splitlines() if "mock_request_started" in line]
        return [json.loads(line) for line in lines]


@contextlib.contextmanager
def open_engine(name: str, directory: Path, *flags: str) -> Iterator[Engine]:
    """A mock engine that tells of its requests."""
    argv = [sys.executable, "-m", "trio_sidecar", "engine", "mock", "--listen=127.0.0.1:0", "--log-level=debug", *flags]
    process = Child(name, argv, env=peers.environment(), log_dir=directory)
    try:
        port = process.wait_for_line(r"listening on 127\.0\.0\.1:(\d+)")[1]
        yield Engine(process, directory / f"{name}.log", f"127.0.0.1:{port}")
    finally:
        process.close(seconds=2)


@pytest.mark.rule("8.9", "R2.13", "R7.50", "R8.34", "R14.1")
@pytest.mark.parametrize("encoder", list(WorkerKind), ids=lambda kind: kind.value)
def test_an_image_is_encoded_first_and_the_answer_comes_from_the_other_worker(
    tmp_path: Path, encoder: WorkerKind
) -> None:
    """The front end asks the encode worker, ours or the Rust sidecar, and the other engine gets its result whole."""
    discovery, logs = tmp_path / "discovery", tmp_path / "logs"
    with contextlib.ExitStack() as stack:
        encodes = stack.enter_context(open_engine("encodes", logs, "--disaggregation-mode=encode"))
        answers = stack.enter_context(open_engine("answers", logs, "--multimodal=true"))
        start = peers.start_rust_sidecar if encoder is WorkerKind.RUST else peers.start_worker
        where: dict[str, Any] = {"discovery": discovery, "log_dir": logs}
        flags = ["--disaggregation-mode=encode"]
        workers = [
            start(encodes.endpoint, **where, arguments=flags, name="encode-worker"),
            peers.start_worker(answers.endpoint, **where, arguments=["--route-to-encoder"], name="worker"),
        ]
        frontend = peers.start_frontend(discovery=discovery, log_dir=logs)
        for process in (*workers, frontend.process):
            stack.callback(process.close, seconds=0)
        peers.wait_for_model(frontend, MODEL, workers)
        client = stack.enter_context(httpx2.Client(base_url=frontend.url, timeout=20))
        picture = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]

        def ask(content: Any) -> int:
            body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 5}
            answer = client.post("/v1/chat/completions", json=body)
            assert httpx2.codes.OK == answer.status_code, answer.text
            tokens: int = answer.json()["usage"]["completion_tokens"]
            return tokens

        assert 5 == ask("Only text.")
        assert [] == encodes.requests
        assert 5 == ask(picture)
        assert [1] == [request["media"] for request in encodes.requests]
        assert [(0, False), (1, True)] == [(request["media"], request["encoded"]) for request in answers.requests]
