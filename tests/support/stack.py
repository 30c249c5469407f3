"""A whole service of real processes: an engine, a worker before it, a Dynamo front end before that."""

from __future__ import annotations

import contextlib
import enum
import json
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from support import peers
from support.backends import EngineKind
from support.openai import open_client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from support.backends import Backend
    from support.openai import OpenAi
    from support.processes import Child

RAW_CLIENT_SECONDS = 20
POLL_SECONDS = 0.02
T = TypeVar("T")


class WorkerKind(enum.Enum):
    """Which worker runs."""

    OURS = "ours"
    RUST = "rust-sidecar"


PAIRS = [(worker, engine) for engine in EngineKind for worker in WorkerKind]
OUR_PAIRS = [pair for pair in PAIRS if pair[0] is WorkerKind.OURS]


def pair_name(pair: tuple[WorkerKind, EngineKind]) -> str:
    """How a pair shows in a test's name."""
    return f"{pair[0].value}-{pair[1].value}"


async def eventually(condition: Callable[[], T | None], what: str, *, seconds: float = 20) -> T:
    """Wait until a condition is neither None nor False, and fail the test if it stays so.

    Returns:
        What it is then.
    """
    limit = trio.current_time() + seconds
    while (result := condition()) is None or result is False:
        assert trio.current_time() < limit, f"not within {seconds} s: {what}"
        await trio.sleep(POLL_SECONDS)
    return result


@attrs.frozen(slots=True, kw_only=True)
class Stack:
    """A running service."""

    backend: Backend
    worker_kind: WorkerKind
    workers: tuple[Child, ...]
    frontend: peers.Frontend
    discovery: Path
    namespace: str = "dynamo"

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[OpenAi]:
        """A client of its front end."""
        async with open_client(self.frontend.url, self.backend.model, self.backend.prompt) as client:
            yield client

    async def ask(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask the worker as a router does, past the front end.

        Args:
            requests: What differs from a request for three tokens without options.

        Returns:
            Per request ``chunks``, each a dict as the worker gave it, and ``error``, its text or None.
        """
        plain: dict[str, Any] = {
            "model": self.backend.model,
            "token_ids": self.backend.prompt,
            "stop_conditions": {"max_tokens": 3},
            "sampling_options": {},
            "output_options": {},
            "eos_token_ids": [self.backend.eos],
            "annotations": [],
        }
        argv = [sys.executable, str(peers.HERE / "raw_client_main.py"), f"{self.namespace}.backend.generate"]
        with trio.fail_after(RAW_CLIENT_SECONDS):
            done = await trio.run_process(
                argv,
                stdin=json.dumps([plain | request for request in requests]).encode(),
                capture_stdout=True,
                capture_stderr=True,
                env=peers.dynamo_environment(self.discovery),
            )
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(answers) == len(requests), done.stderr.decode()
        return answers


@contextlib.contextmanager
def stack(
    backend: Backend, kind: WorkerKind, directory: Path, *, workers: int = 1, arguments: Sequence[str] = ()
) -> Iterator[Stack]:
    """Put workers and a front end before a running engine; ready once the front end lists the model."""
    discovery, logs = directory / "discovery", directory / "logs"
    with contextlib.ExitStack() as cleanup:
        frontend = peers.start_frontend(discovery=discovery, log_dir=logs)
        cleanup.callback(frontend.process.close, seconds=1)
        start = peers.start_worker if kind is WorkerKind.OURS else peers.start_rust_sidecar
        children = []
        for number in range(1, workers + 1):
            child = start(
                backend.engine.endpoint,
                discovery=discovery,
                log_dir=logs,
                arguments=arguments,
                name=f"{kind.value}-{number}",
            )
            cleanup.callback(child.close, seconds=2)
            children.append(child)
        peers.wait_for_model(frontend, backend.model, children)
        yield Stack(
            backend=backend,
            worker_kind=kind,
            workers=tuple(children),
            frontend=frontend,
            discovery=discovery,
        )
