"""A whole service of real processes: an engine, a worker before it, a Dynamo front end before that."""

from __future__ import annotations

import contextlib
import enum
import json
import re
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from support import peers, tiny_model
from support.openai import open_client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from support.openai import OpenAi
    from support.processes import Child

RAW_CLIENT_SECONDS = 20
POLL_SECONDS = 0.02
T = TypeVar("T")


class EngineKind(enum.Enum):
    """Which gRPC server runs."""

    MOCK = "mock-server"
    VLLM_RS = "vllm-rs"


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


@attrs.frozen(slots=True)
class Reply:
    """What an engine of the tests says to every prompt: tokens that go round, and start at ``seed``."""

    ids: tuple[int, ...]
    decode: Callable[[list[int]], str]

    def tokens(self, count: int, *, seed: int = 0) -> list[int]:
        """The first ``count`` tokens."""
        return [self.ids[(seed + position) % len(self.ids)] for position in range(count)]

    def text(self, count: int, *, seed: int = 0) -> str:
        """The text of the first ``count`` tokens."""
        return self.decode(self.tokens(count, seed=seed))


@attrs.frozen(slots=True, kw_only=True)
class Backend:
    """A running engine and what it says."""

    kind: EngineKind
    engine: peers.Engine
    model: str
    context_length: int
    reply: Reply
    eos: int

    def dropped_at(self, request: str) -> float | None:
        """When the engine dropped an unfinished request, on the system-wide monotonic clock; None if it has not."""
        if self.engine.core is not None:
            found = re.search(rf"^ABORT at=(\S+) .*{re.escape(request)}", self.engine.core.log, re.MULTILINE)
            return float(found[1]) if found else None
        raise NotImplementedError

    def open_requests(self) -> int:
        """How many requests the engine is working on."""
        if self.engine.core is not None:
            return int(re.findall(r"active=(\d+)", self.engine.core.log)[-1])
        raise NotImplementedError


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
        async with open_client(self.frontend.url, self.backend.model) as client:
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
            "token_ids": [5, 6, 7],
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
def vllm_backend(
    directory: Path, *, tokens_per_second: float, context_length: int = 1024, text: str = tiny_model.REPLY
) -> Iterator[Backend]:
    """The real ``vllm-rs`` server over the mock core, which says the text."""
    tokenizer = tiny_model.make_model_directory(directory / "model", context_length=context_length)
    ids = tokenizer.encode(text).ids
    engine = peers.start_vllm_rs(
        directory / "model", "tiny", ids, log_dir=directory / "logs", tokens_per_second=tokens_per_second
    )
    try:
        yield Backend(
            kind=EngineKind.VLLM_RS,
            engine=engine,
            model="tiny",
            context_length=context_length,
            reply=Reply(tuple(ids), tokenizer.decode),
            eos=tiny_model.EOS,
        )
    finally:
        engine.close()


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


@contextlib.contextmanager
def mock_backend(directory: Path, *, tokens_per_second: float) -> Iterator[Backend]:
    """Our mock server."""
    raise NotImplementedError
