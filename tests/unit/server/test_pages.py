"""A server's pages: alive from the start, healthy while it serves, and what was counted."""

from __future__ import annotations

import signal
import threading
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trio

import trio_sidecar
from support.exposition import values
from support.grpc_stubs import stubs
from support.serving import LOOPBACK, generate_request, serving
from trio_sidecar.bridge import run
from trio_sidecar.config import ServerSettings
from trio_sidecar.errors import InvalidConfig, RpcError, StatusCode
from trio_sidecar.server import run_server
from trio_sidecar.server.pages import ServerPages, open_pages
from trio_sidecar.testing.fake_engine import FakeEngine, Gate, Script, Send, finish, tokens
from trio_sidecar.wire import HealthCheckResponseServingStatus as Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ANSWER = Script(stream=[Send(tokens(7)), Send(finish(8, 9, total=3))])
GENERATE = "vllm.Inference/GenerateStream"


def new_engine(script: Script = ANSWER, status: Status = Status.SERVING) -> FakeEngine:
    """An engine that answers."""
    return FakeEngine(script, health={"": status})


async def status_of(pages: ServerPages, path: str) -> int:
    """The status of a page."""
    return (await pages.page(path)).status


async def test_health_tells_the_truth(aio_loop: object) -> None:
    """Alive before there is an engine; healthy only while the engine serves, and not once the server ends."""
    pages, engine = ServerPages(), new_engine()
    assert (200, 503, 200, 404) == tuple(
        [await status_of(pages, path) for path in ("/live", "/health", "/metrics", "/other")]
    )
    async with serving(engine, pages=pages, withdraw_grace_secs=0.0) as server:
        assert 200 == await status_of(pages, "/health")
        engine.health[""] = Status.NOT_SERVING
        assert 503 == await status_of(pages, "/health")
        engine.health.clear()
        assert 503 == await status_of(pages, "/health")
        engine.health[""] = Status.SERVING
        assert 200 == await status_of(pages, "/health")
        server.scope.cancel()
        await server.ended.wait()
        assert (200, 503) == (await status_of(pages, "/live"), await status_of(pages, "/health"))
        assert 1 == values((await pages.page("/metrics")).body)["server_draining"]


async def test_calls_are_counted(aio_loop: object) -> None:
    """By method and status, with tokens and times; open ones and connections are gauges."""
    pages = ServerPages()
    held = Script(stream=[Gate()])
    engine = FakeEngine(lambda request: held if request.priority else ANSWER, health={"": Status.SERVING})
    async with serving(engine, pages=pages) as server:

        def ask(client: Any) -> dict[str, float]:
            assert 2 == len(list(client.generate(generate_request())))
            client.call("vllm.Inference/Generate", generate_request())
            assert (
                grpc.StatusCode.UNIMPLEMENTED
                is client.failure("vllm.Control/GetModelInfo", stubs().message("GetModelInfoRequest")())[0]
            )
            stream = client.generate(generate_request(priority=1))
            stream.initial_metadata()
            found = trio.from_thread.run(pages.page, "/metrics")
            stream.cancel()
            return values(found.body)

        found = await server.ask(ask)
        await trio.testing.wait_all_tasks_blocked(0.1)
        after = values((await pages.page("/metrics")).body)
    expected = {
        f"build_info{{version={trio_sidecar.__version__}}}": 1,
        "server_calls_total{method=GenerateStream,status=OK}": 1,
        "server_calls_total{method=Generate,status=OK}": 1,
        "server_calls_total{method=GetModelInfo,status=UNIMPLEMENTED}": 1,
        "server_call_duration_seconds_count{method=GenerateStream}": 1,
        "server_output_tokens_total": 6,
        "server_calls_in_flight": 1,
        "server_connections": 1,
        "server_draining": 0,
    }
    assert expected == {name: found[name] for name in expected}
    assert 0 == after["server_calls_in_flight"]
    assert 1 == after["server_calls_total{method=GenerateStream,status=CANCELLED}"]


async def test_no_port_no_pages() -> None:
    """Without the flag nobody listens."""
    before = trio.lowlevel.current_statistics().tasks_living
    async with open_pages(ServerSettings(listen=LOOPBACK)) as pages:
        assert before == trio.lowlevel.current_statistics().tasks_living
        assert None is pages.server


async def test_a_port_that_is_taken() -> None:
    """The error names the flag."""
    (other,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = other.socket.getsockname()[1]
    async with other:
        with pytest.raises(InvalidConfig, match=rf"--metrics-port: cannot listen on 127\.0\.0\.1:{port}: "):
            async with open_pages(ServerSettings(listen=LOOPBACK, metrics_port=port)):
                pass


def fetch(port: int, path: str) -> tuple[int, str]:
    """Ask over HTTP."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def free_port() -> int:
    """A port that nobody has."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        port: int = listener.socket.getsockname()[1]
    return port


def test_pages_are_there_before_the_engine() -> None:
    """A process whose engine takes long is alive and not healthy; when the engine is there it is both."""
    port = trio.run(free_port)
    seen: list[tuple[int, str]] = []

    @asynccontextmanager
    async def slow_engine() -> AsyncIterator[FakeEngine]:
        seen.append(await trio.to_thread.run_sync(fetch, port, "/live"))
        seen.append(await trio.to_thread.run_sync(fetch, port, "/health"))
        yield new_engine()

    def on_listening(_: str) -> None:
        def ask() -> None:
            seen.append(fetch(port, "/health"))
            signal.raise_signal(signal.SIGTERM)

        threading.Thread(target=ask).start()

    run(run_server, slow_engine(), ServerSettings(listen=LOOPBACK, metrics_port=port), on_listening)
    assert [(200, "alive\n"), (503, "starting\n"), (200, "serving\n")] == seen


async def test_an_engine_that_refuses_to_say(aio_loop: object) -> None:
    """What cannot be asked cannot serve."""

    class Mute(FakeEngine):
        async def aio_check_health(self, service: str) -> Status:
            raise RpcError(StatusCode.UNAVAILABLE, "lost")

    pages = ServerPages()
    async with serving(Mute(), pages=pages):
        assert 503 == await status_of(pages, "/health")
