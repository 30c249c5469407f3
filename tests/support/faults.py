"""A service whose parts may die: each is replaced on its own address, and answers are told apart from failures."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import httpx2
import trio

from support import peers
from support.openai import DATA, open_client
from support.stack import eventually
from trio_sidecar.testing.proxy import open_proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from support.backends import Backend
    from support.openai import OpenAi
    from support.processes import Child
    from trio_sidecar.testing.proxy import Proxy

T = TypeVar("T")

LONG_TOKENS = 900
CONTROL_SECONDS = 10
BACK_SECONDS = 30


@attrs.frozen(slots=True)
class Ending:
    """What one client got.

    Attributes:
        tokens: How many chunks with a text.
        errors: How many errors.
        terminals: How many finish reasons.
        after: How many events followed the first end.
    """

    tokens: int
    errors: int
    terminals: int
    after: int

    @classmethod
    def of(cls, status: int, body: str) -> Ending:
        """Read a streamed answer, or a refusal."""
        if status != httpx2.codes.OK:
            return cls(0, 1, 0, 0)
        tokens = errors = terminals = after = 0
        for line in body.splitlines():
            if not line.startswith(DATA) or line == f"{DATA}[DONE]":
                continue
            event = json.loads(line.removeprefix(DATA))
            after += bool(errors or terminals)
            errors += "error" in event
            for choice in event.get("choices", ()):
                tokens += bool(choice["text"])
                terminals += choice.get("finish_reason") is not None
        return cls(tokens, errors, terminals, after)

    @property
    def single(self) -> bool:
        """Whether it is exactly one end and nothing after it."""
        return self.errors + self.terminals == 1 and self.after == 0


@attrs.define(eq=False, kw_only=True)
class Service:
    """An engine, a worker before it, a front end before that; the first two can be replaced.

    Attributes:
        backend: The engine, as it is now.
        frontend: The front end.
        proxy: What is between worker and engine, if anything is.
    """

    backend: Backend
    frontend: peers.Frontend
    directory: Path
    arguments: Sequence[str]
    proxy: ProxyThread | None = None
    workers: list[Child] = attrs.field(factory=list)

    @property
    def worker(self) -> Child:
        """The latest worker."""
        return self.workers[-1]

    def start_worker(self) -> None:
        """Start a worker, ready or not."""
        self.workers.append(
            peers.start_worker(
                self.backend.engine.endpoint if self.proxy is None else f"127.0.0.1:{self.proxy.port}",
                discovery=self.directory / "discovery",
                log_dir=self.directory / "logs",
                arguments=self.arguments,
                name=f"worker-{len(self.workers) + 1}",
            )
        )

    def restart_engine(self) -> None:
        """Start the engine anew, on its address."""
        self.backend = self.backend.restarted()

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close(seconds=2)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[OpenAi]:
        """A client of the front end."""
        async with open_client(self.frontend.url, self.backend.model, self.backend.prompt) as client:
            yield client

    async def serves(self, client: OpenAi, *, seconds: float = BACK_SECONDS) -> None:
        """Wait until requests are answered, and rightly, and the engine has nothing left of others."""
        with trio.fail_after(seconds):
            while (answer := await client.complete(max_tokens=3)).status != httpx2.codes.OK:  # noqa: ASYNC110
                await trio.sleep(0.2)
        assert self.backend.reply.text(3) == answer.text
        await eventually(lambda: self.backend.open_requests() == 0, "the engine is free", seconds=seconds)

    async def ask(self, client: OpenAi, count: int, endings: list[Ending], *, tokens: int = LONG_TOKENS) -> None:
        """Ask for answers side by side, and keep what each client got."""

        async def one() -> None:
            body: dict[str, Any] = {"model": client.model, "prompt": client.prompt, "stream": True}
            body |= {"max_tokens": tokens, "ignore_eos": True}
            answer = await client.http.post(f"{client.url}/v1/completions", json=body)
            endings.append(Ending.of(answer.status_code, answer.text))

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(one)

    async def interrupted(self, client: OpenAi, count: int, fault: Callable[[], object]) -> tuple[list[Ending], float]:
        """Let a fault happen while that many clients get their answers.

        Returns:
            What each got, and in how many seconds after the fault all of them had it.
        """
        endings: list[Ending] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.ask, client, count, endings)
            await eventually(lambda: self.backend.open_requests() == count, "the requests are running")
            await trio.sleep(0.3)  # some tokens
            fault()
            start = trio.current_time()
        return endings, trio.current_time() - start


@contextlib.contextmanager
def open_service(
    backend: Backend, directory: Path, *, arguments: Sequence[str] = (), proxy: ProxyThread | None = None
) -> Iterator[Service]:
    """Put a worker and a front end before an engine; ready when the front end lists the model."""
    with contextlib.ExitStack() as cleanup:
        frontend = peers.start_frontend(discovery=directory / "discovery", log_dir=directory / "logs")
        cleanup.callback(frontend.process.close, seconds=1)
        service = Service(backend=backend, frontend=frontend, directory=directory, arguments=arguments, proxy=proxy)
        cleanup.callback(service.close)
        service.start_worker()
        peers.wait_for_model(frontend, backend.model, service.workers)
        yield service


def processes_of_session(session: int) -> list[int]:
    """The processes that run in a session, which each of our children has of its own; zombies do not count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


class ProxyThread:
    """A proxy on a Trio of its own, for services that outlive a test, and are started by blocking calls."""

    def __init__(self, proxy: Proxy, token: trio.lowlevel.TrioToken) -> None:
        self._proxy = proxy
        self._token = token
        self.port = proxy.port

    def do(self, function: Callable[[Proxy], T]) -> T:
        """Call that in the proxy's thread, with the proxy."""
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def call() -> None:
            try:
                result.set_result(function(self._proxy))
            except Exception as error:  # noqa: BLE001 - the caller's
                result.set_exception(error)

        self._token.run_sync_soon(call)
        return result.result(CONTROL_SECONDS)

    def heal(self) -> None:
        """No fault any more."""

        def heal(proxy: Proxy) -> None:
            proxy.go_on()
            for way in (proxy.up, proxy.down):
                way.delay_secs = way.jitter_secs = 0.0
                way.cut_after_bytes = None

        self.do(heal)


@contextlib.contextmanager
def proxy_thread(port: int) -> Iterator[ProxyThread]:
    """Run a proxy to a port of this machine while the block runs."""
    started: concurrent.futures.Future[ProxyThread] = concurrent.futures.Future()
    scope = trio.CancelScope()

    async def main() -> None:
        with scope:
            async with open_proxy("127.0.0.1", port) as proxy:
                started.set_result(ProxyThread(proxy, trio.lowlevel.current_trio_token()))
                await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(main,), name="proxy", daemon=True)
    thread.start()
    running = started.result(CONTROL_SECONDS)
    try:
        yield running
    finally:
        running.do(lambda _: scope.cancel())
        thread.join(CONTROL_SECONDS)
        assert not thread.is_alive()
