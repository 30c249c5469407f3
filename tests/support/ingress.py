"""Asking a worker as Dynamo's router does, many times through one client process."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from support.peers import HERE, dynamo_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.processes import Child

NO_END = "no end within"
"""Begins the error of a request that was given up, as ``ingress_main`` says it."""
ANSWER_SECONDS = 20
START_SECONDS = 30


@attrs.frozen(slots=True)
class Answer:
    """What a worker gave for one request.

    Attributes:
        chunks: As they came; None is an empty one.
        error: Text of the error that ended the request; None if it ended well.
    """

    chunks: list[dict[str, Any] | None]
    error: str | None


class Ingress:
    """An open client of one worker."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self, worker: Child) -> None:
        """Wait until the worker is there."""
        worker.wait_until(lambda: not self._lines.empty(), "its instance is there", seconds=START_SECONDS)
        assert self._lines.get() == "ready\n"

    def send(self, request_id: str, request: dict[str, Any]) -> None:
        """Ask, without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": request_id, "request": request}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> tuple[str, Answer]:
        """Wait for the next answer: request id and what came."""
        line = self._lines.get(timeout=ANSWER_SECONDS)
        assert line, "the client has ended"
        entry = json.loads(line)
        return entry["id"], Answer(entry["chunks"], entry["error"])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


@contextmanager
def ingress(endpoint: str, *, discovery: Path, worker: Child, log: Path) -> Iterator[Ingress]:
    """A client of ``namespace.component.endpoint``, as soon as the worker is there."""
    with (
        log.open("ab") as sink,
        subprocess.Popen(
            [sys.executable, str(HERE / "ingress_main.py"), endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            env=dynamo_environment(discovery, DYN_LOG="error"),
        ) as process,
    ):
        try:
            client = Ingress(process)
            client.wait_ready(worker)
            yield client
        finally:
            process.kill()
