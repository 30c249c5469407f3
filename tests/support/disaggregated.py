"""Prefill and decode engines with a worker each, and one Dynamo front end, whose prefill router ties them together."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import attrs
import httpx2
import trio

from support import peers, role_engine_main, stopping_client_main
from support.openai import TIMEOUT_SECONDS, OpenAi, open_client
from support.processes import Child
from support.stack import WorkerKind, eventually

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

MODEL = role_engine_main.MODEL
PROMPT = [100, 101, 102, 103, 104]
READY_ATTEMPTS = 100


@attrs.frozen(slots=True)
class RoleEngine:
    """A running ``role_engine_main.py``."""

    role: str
    directory: Path
    process: Child
    endpoint: str

    def events(self, event: str) -> list[dict[str, Any]]:
        """What it wrote down under that name, oldest first."""
        path = self.directory / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [found for line in lines if (found := json.loads(line))["event"] == event]

    @property
    def received(self) -> list[dict[str, Any]]:
        """All requests so far."""
        return self.events("received")

    @property
    def idle(self) -> bool:
        """Whether it has been let go of every request."""
        return len(self.received) == len(self.events("released"))

    @contextlib.contextmanager
    def told(self, name: str, content: str = "") -> Iterator[None]:
        """Have it do something for a while: hold-opening, hold-answers or refuse."""
        path = self.directory / name
        path.write_text(content)
        try:
            yield
        finally:
            path.unlink()


OUR_ARGUMENTS = ("--log-level=debug", "--withdraw-grace-secs=0.5", "--drain-secs=10", "--caller-handoff=off")
"""What only a worker of ours is told; the handoffs here are Dynamo's, and no caller's."""


@attrs.define(eq=False)
class Pair:
    """The whole service.

    Attributes:
        workers: By role.
    """

    directory: Path
    frontend: peers.Frontend
    prefill: RoleEngine
    decode: RoleEngine
    workers: dict[str, Child] = attrs.field(factory=dict)

    def start_worker(self, role: str, kind: WorkerKind = WorkerKind.OURS) -> Child:
        """Start the worker of a role, without waiting; a prefill worker of ours waits only 1 s for its peers."""
        engine = self.prefill if role == "prefill" else self.decode
        arguments = [f"--disaggregation-mode={role}"]
        discovery, logs, name = self.directory / "discovery", self.directory / "logs", f"{role}-{kind.value}"
        if kind is WorkerKind.RUST:
            worker = peers.start_rust_sidecar(
                engine.endpoint, discovery=discovery, log_dir=logs, arguments=arguments, name=name
            )
        else:
            worker = peers.start_worker(
                engine.endpoint,
                discovery=discovery,
                log_dir=logs,
                arguments=[*arguments, *OUR_ARGUMENTS],
                name=name,
                DYN_PREFILL_DRAIN_TIMEOUT_S="1",
            )
        self.workers[role] = worker
        return worker

    def registered(self, component: str) -> bool:
        """Whether an instance of the component can be found."""
        files = (self.directory / "discovery" / "v1" / "instances").glob(f"*{component}*")
        return any(files)

    @contextlib.asynccontextmanager
    async def asking(self, endpoint: str, **request: Any) -> AsyncIterator[Callable[[], Awaitable[list[Any]]]]:
        """Put a request to one worker as a router does, past the front end.

        Yields:
            A function that stops the request and returns the chunks that came.
        """
        plain = {"model": MODEL, "token_ids": PROMPT, "stop_conditions": {"max_tokens": 500, "ignore_eos": True}}
        plain |= {"sampling_options": {}, "output_options": {}, "eos_token_ids": [], "annotations": [], **request}
        told = self.directory / f"stop-{len(self.prefill.received)}-{len(self.decode.received)}"
        argv = [sys.executable, stopping_client_main.__file__, endpoint, str(told)]
        outcome: list[subprocess.CompletedProcess[bytes]] = []

        async def run() -> None:
            environment = peers.dynamo_environment(self.directory / "discovery")
            body = json.dumps(plain).encode()
            outcome.append(await trio.run_process(argv, stdin=body, capture_stdout=True, env=environment))

        async def stop() -> list[Any]:
            told.touch()
            (done,) = await eventually(lambda: outcome or None, "the request has ended")
            chunks: list[Any] = json.loads(done.stdout)
            return chunks

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            yield stop

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[OpenAi]:
        """A client, once both roles answer."""
        peers.wait_for_model(self.frontend, MODEL, list(self.workers.values()))
        async with open_client(self.frontend.url, MODEL, PROMPT) as client:
            for _ in range(READY_ATTEMPTS):
                if (answer := await client.complete(max_tokens=1)).status == httpx2.codes.OK:
                    break
                await trio.sleep(0.1)
            assert answer.status == httpx2.codes.OK, answer.body
            await self.settle()
            yield client

    async def settle(self, *, seconds: float = 5) -> None:
        """Wait until both engines have been let go of every request."""
        await eventually(lambda: self.prefill.idle and self.decode.idle, "both engines are idle", seconds=seconds)


@contextlib.contextmanager
def open_pair(directory: Path) -> Iterator[Pair]:
    """Start the engines and the front end; all processes are ended in the end."""
    with contextlib.ExitStack() as cleanup:
        prefill, decode = (_start_engine(role, directory, cleanup) for role in ("prefill", "decode"))
        frontend = peers.start_frontend(discovery=directory / "discovery", log_dir=directory / "logs")
        cleanup.callback(frontend.process.close, seconds=1)
        pair = Pair(directory, frontend, prefill, decode)
        try:
            yield pair
        finally:
            for worker in pair.workers.values():
                worker.close(seconds=0)


def _start_engine(role: str, directory: Path, cleanup: contextlib.ExitStack) -> RoleEngine:
    own = directory / f"{role}-engine"
    argv = [sys.executable, role_engine_main.__file__, role, str(own)]
    process = Child(f"{role}-engine", argv, env=peers.environment(), log_dir=directory / "logs")
    cleanup.callback(process.close, seconds=2)
    port = int(process.wait_for_line(r"listening on 127\.0\.0\.1:(\d+)")[1])
    return RoleEngine(role, own, process, f"127.0.0.1:{port}")


@contextlib.asynccontextmanager
async def going_away(client: OpenAi, **body: Any) -> AsyncIterator[None]:
    """Ask, and close the connection at the end of the block without having read the answer."""
    where = httpx2.URL(client.url)
    content = json.dumps({"model": client.model, "prompt": client.prompt, "max_tokens": 500, "ignore_eos": True} | body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc.decode()}\r\nContent-Type: application/json\r\n"
    with trio.fail_after(TIMEOUT_SECONDS):
        async with await trio.open_tcp_stream(where.host, where.port or 80) as connection:
            await connection.send_all(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
            yield
