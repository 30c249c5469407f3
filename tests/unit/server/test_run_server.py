"""The server as a process runs it, on both hosts."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import structlog.testing
import trio

from support.mock_engine import token_settings
from support.serving import CLIENT_OPTIONS, LOOPBACK, Client, generate_request
from trio_sidecar.bridge import Host, run
from trio_sidecar.config import ServerSettings
from trio_sidecar.endpoint import ListenAddress
from trio_sidecar.engines.mock import open_mock
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.server import run_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


def run_with_client(host: Host, signum: int, ask: Callable[[Client, Callable[[], None]], Any]) -> Any:
    """Run the server until the client, in a thread, has had the signal sent; what the client got."""
    results: list[Any] = []
    threads: list[threading.Thread] = []

    def stop() -> None:
        os.kill(os.getpid(), signum)

    def talk(address: str) -> None:
        try:
            with grpc.insecure_channel(address, CLIENT_OPTIONS) as channel:
                results.append(ask(Client(channel), stop))
        except BaseException as error:  # noqa: BLE001, ASYNC103 - a thread; the test's assertion shows it
            results.append(error)
            stop()

    def on_listening(address: str) -> None:
        threads.append(threading.Thread(target=talk, args=(address,)))
        threads[-1].start()

    settings = ServerSettings(listen=LOOPBACK, drain_secs=5.0)
    run(run_server, open_mock(token_settings(itl_ms=10.0)), settings, on_listening, host=host)
    for thread in threads:
        thread.join(5)
    return results


@pytest.mark.rule("FR-049", "FR-050")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(host: Host, signum: int) -> None:
    """A stream that runs when the signal comes ends whole, a second signal changes nothing, and the run returns."""

    def ask(client: Client, stop: Callable[[], None]) -> tuple[int, grpc.StatusCode]:
        stream = client.generate(generate_request())
        messages = [next(stream)]
        stop()
        messages += [next(stream), next(stream)]
        stop()
        messages += stream
        return len(messages), stream.code()

    assert [(21, grpc.StatusCode.OK)] == run_with_client(host, signum, ask)


def test_streams_at_once_on_both_hosts(host: Host) -> None:
    """Thirty-two paced streams on one connection end whole."""

    def ask(client: Client, stop: Callable[[], None]) -> list[int]:
        streams = [client.generate(generate_request()) for _ in range(32)]
        counts = [len(list(stream)) for stream in streams]
        stop()
        return counts

    assert [[21] * 32] == run_with_client(host, signal.SIGTERM, ask)


def test_a_snapshot(host: Host) -> None:
    """SIGUSR1 logs what the server holds, an open call among it, and harms nothing."""

    def ask(client: Client, stop: Callable[[], None]) -> int:
        stream = client.generate(generate_request())
        messages = [next(stream)]
        os.kill(os.getpid(), signal.SIGUSR1)
        messages += stream
        stop()
        return len(messages)

    with structlog.testing.capture_logs() as logs:
        assert [21] == run_with_client(host, signal.SIGTERM, ask)
    (snapshot,) = (line for line in logs if line["event"] == "server_snapshot")
    assert (1, 1) == (snapshot["connections"], snapshot["calls"])
    assert all(snapshot[name] > 0 for name in ("trio_tasks", "aio_tasks", "open_files", "objects"))


def test_a_signal_ends_an_engine_that_is_still_being_opened(host: Host) -> None:
    """Opening may take minutes; a SIGTERM is not kept until it is over (FR-051)."""
    seen: list[str] = []

    @asynccontextmanager
    async def slow() -> AsyncIterator[Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await trio.sleep(3600)
        finally:
            seen.append("cancelled")
        yield None

    run(run_server, slow(), ServerSettings(listen=LOOPBACK), seen.append, host=host)
    assert ["cancelled"] == seen


def test_a_port_in_use_is_found_before_the_engine_is_opened(host: Host) -> None:
    """Nobody waits for an engine that could not be served."""
    opened: list[str] = []

    @asynccontextmanager
    async def never() -> AsyncIterator[Any]:
        opened.append("opened")
        yield None

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = ListenAddress(host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(InvalidConfig, match="in use"):
            run(run_server, never(), ServerSettings(listen=address), print, host=host)
    assert [] == opened
