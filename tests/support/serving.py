"""A server of ours on a free port, inside a test, and blocking gRPC clients for it."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import grpc
import trio

from support.grpc_stubs import stubs
from trio_sidecar.config import ServerSettings
from trio_sidecar.endpoint import ListenAddress, UnixAddress
from trio_sidecar.server import serve
from trio_sidecar.tracing import NO_TRACES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.server.pages import ServerPages
    from trio_sidecar.tracing import Tracer

LOOPBACK = ListenAddress(host="127.0.0.1", port=0)
CLIENT_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # Otherwise a client that does not read may offer windows of megabytes, in which a whole answer fits.
    ("grpc.http2.bdp_probe", 0),
]


class Client:
    """A blocking client over one connection; use it in a thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def call(self, path: str, request: Any = None, **options: Any) -> Any:
        """Make a call; ``request`` may be keyword arguments for its message."""
        return stubs().call(self.channel, path)(request, **{"timeout": 15, **options})

    def generate(self, request: Any, **options: Any) -> Any:
        """GenerateStream: the open stream, an iterator."""
        return self.call("vllm.Inference/GenerateStream", request, **options)

    def failure(self, path: str, request: Any, **options: Any) -> tuple[grpc.StatusCode, str, int]:
        """Status and message of a call that must fail, and how many messages came before."""
        count = 0
        try:
            answer = self.call(path, request, **options)
            if hasattr(answer, "__next__"):
                for _ in answer:
                    count += 1
        except grpc.RpcError as error:
            return error.code(), error.details(), count
        reason = f"{path} succeeded"
        raise AssertionError(reason)


@attrs.define(eq=False)
class Serving:
    """A running server."""

    address: ListenAddress | UnixAddress
    scope: trio.CancelScope
    ended: trio.Event

    @property
    def tcp(self) -> ListenAddress:
        """The address, of a server on TCP."""
        assert isinstance(self.address, ListenAddress)
        return self.address

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A client with a connection of its own."""
        with grpc.insecure_channel(str(self.address), CLIENT_OPTIONS) as channel:
            yield Client(channel)

    async def ask(self, fn: Callable[[Client], Any]) -> Any:
        """Run a blocking function with a client of its own in a thread."""

        def run() -> Any:
            with self.client() as client:
                return fn(client)

        return await trio.to_thread.run_sync(run)


@asynccontextmanager
async def serving(
    engine: Engine, *, tracer: Tracer = NO_TRACES, pages: ServerPages | None = None, **settings: Any
) -> AsyncIterator[Serving]:
    """Serve an engine; leaving drains the server."""
    options = ServerSettings(**{"listen": LOOPBACK, "drain_secs": 5.0, **settings})
    async with trio.open_nursery() as nursery:
        scope, ended = trio.CancelScope(), trio.Event()

        async def run(  # noqa: ASYNC114, ASYNC128 - serve calls started()
            *, task_status: trio.TaskStatus[tuple[ListenAddress | UnixAddress, ...]]
        ) -> None:
            with scope:
                await serve(engine, options, tracer=tracer, pages=pages, task_status=task_status)
            ended.set()

        (address, *_) = await nursery.start(run)
        yield Serving(address, scope, ended)
        scope.cancel()


def generate_request(ids: Any = (100, 101, 102), **fields: Any) -> Any:
    """A google GenerateRequest; ``text`` replaces the token prompt, ``stopping`` and ``response`` may be dicts."""
    make = stubs().message
    parts = {"stopping": "StoppingCriteria", "response": "ResponseOptions", "sampling": "RandomSampling"}
    for name, message in parts.items():
        if isinstance(fields.get(name), dict):
            fields[name] = make(message)(**fields[name])
    prompt = {} if "text" in fields else {"token_ids": make("TokenIds")(ids=list(ids))}
    return make("GenerateRequest")(**prompt, **fields)


async def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that another process's or thread's doing brings about, with a ceiling."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - what changes it is no Trio code
            await trio.sleep(0.005)
