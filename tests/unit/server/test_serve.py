"""Listening, and the drain: never silence towards a client that is there."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import structlog
import trio

from support.mock_engine import mock_settings, token_settings
from support.serving import Client, generate_request, serving, wait_until
from trio_sidecar.config import ServerSettings
from trio_sidecar.endpoint import ListenAddress
from trio_sidecar.engines.mock import open_mock
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.server.listen import bind

if TYPE_CHECKING:
    import asyncio

logging.getLogger("grpc").setLevel(logging.CRITICAL)

STREAM = "vllm.Inference/GenerateStream"


def read_all(client: Client) -> tuple[int, str]:
    """Read one stream to its end: how many messages, and the status."""
    stream = client.generate(generate_request())
    count = 0
    try:
        for _ in stream:
            count += 1
    except grpc.RpcError as error:
        return count, f"{error.code().name} {error.details()}"
    return count, stream.code().name


class Asked:
    """A stream read in the background."""

    def __init__(self) -> None:
        self.results: list[tuple[int, str]] = []

    async def run(self, server: Any) -> None:
        """Read one."""
        self.results.append(await server.ask(read_all))


@pytest.mark.rule("FR-047", "FR-049")
async def test_running_calls_end_within_the_budget(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A stop lets what runs end whole."""
    asked = Asked()
    async with open_mock(token_settings(itl_ms=20.0)) as engine, trio.open_nursery() as nursery:
        async with serving(engine) as server:
            for _ in range(3):
                nursery.start_soon(asked.run, server)  # noqa: ASYNC111 - a client outlives the server, on purpose
            await wait_until(lambda: engine.statistics().running == 3)
        assert server.ended.is_set()
    assert [(21, "OK")] * 3 == asked.results


@pytest.mark.rule("FR-047", "E2")
async def test_the_rest_is_told_unavailable(aio_loop: asyncio.AbstractEventLoop) -> None:
    """What outlives the budget gets a status within a moment, and the engine's side is closed."""
    asked = Asked()
    async with open_mock(token_settings(itl_ms=60_000.0)) as engine, trio.open_nursery() as nursery:
        async with serving(engine, drain_secs=0.2) as server:
            for _ in range(3):
                nursery.start_soon(asked.run, server)  # noqa: ASYNC111 - a client outlives the server, on purpose
            await wait_until(lambda: engine.statistics().running == 3)
            started = trio.current_time()
        assert trio.current_time() - started < 3.0
        assert 0 == engine.statistics().open
    assert ["UNAVAILABLE the server is shutting down"] * 3 == [status for _, status in asked.results]


@pytest.mark.rule("FR-049")
async def test_grace_then_refusal(aio_loop: asyncio.AbstractEventLoop) -> None:
    """After the stop, calls are taken during the grace; then refused, while those that run go on."""
    asked = Asked()
    late: list[Any] = []

    def try_until_refused(client: Client) -> None:
        while True:
            try:
                late.append(client.call("vllm.Inference/Generate", generate_request(stopping={"max_new_tokens": 1})))
            except grpc.RpcError as error:
                late.append(f"{error.code().name} {error.details()}")
                return

    async with open_mock(token_settings(itl_ms=100.0)) as engine, trio.open_nursery() as nursery:
        async with serving(engine, withdraw_grace_secs=0.5) as server:
            nursery.start_soon(asked.run, server)  # noqa: ASYNC111 - a client outlives the server, on purpose
            await wait_until(lambda: engine.statistics().running == 1)
            nursery.start_soon(server.ask, try_until_refused)  # noqa: ASYNC111 - as above
            await wait_until(lambda: len(late) > 0)
            count = len(late)
        assert server.ended.is_set()
    assert count < len(late) - 1
    assert "UNAVAILABLE the server is shutting down" == late[-1]
    assert [(21, "OK")] == asked.results


async def test_a_client_that_does_not_read_cannot_hold_the_drain(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A stalled stream is cut at the budget, even if nothing more fits its socket."""

    def stall(client: Client) -> None:
        stream = client.generate(generate_request(stopping={"max_new_tokens": 30_000}))
        stream.initial_metadata()
        ready.append(stream)
        trio.from_thread.run(gone.wait)

    ready: list[Any] = []
    gone = trio.Event()
    async with open_mock(token_settings()) as engine, trio.open_nursery() as nursery:
        async with serving(engine, drain_secs=0.1) as server:
            nursery.start_soon(server.ask, stall)  # noqa: ASYNC111 - a client outlives the server, on purpose
            await wait_until(lambda: bool(ready))
            started = trio.current_time()
        assert trio.current_time() - started < 4.0
        assert 0 == engine.statistics().open
        gone.set()


async def test_idle_connections_close_at_once(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A kept connection without calls does not delay the end."""
    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        with socket.create_connection((server.tcp.host, server.tcp.port)) as sock:
            await trio.sleep(0.05)
            server.scope.cancel()
            with trio.fail_after(2):
                await server.ended.wait()
            sock.settimeout(2)
            while await trio.to_thread.run_sync(sock.recv, 4096):
                pass


@pytest.mark.rule("FR-107")
async def test_ipv6(aio_loop: asyncio.AbstractEventLoop) -> None:
    """An IPv6 address is printed in brackets, and answers."""
    listen = ListenAddress(host="::1", port=0)
    async with open_mock(token_settings()) as engine, serving(engine, listen=listen) as server:
        assert str(server.address).startswith("[::1]:")
        assert (21, "OK") == await server.ask(read_all)


async def test_all_addresses_of_a_name_share_a_port(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Localhost may be two addresses; a free port is free on both."""
    bound = await bind(ServerSettings(listen=ListenAddress(host="localhost", port=0)))
    try:
        assert 1 == len({str(address).rpartition(":")[2] for address in bound.addresses})
    finally:
        bound.close()


async def test_address_in_use(aio_loop: asyncio.AbstractEventLoop) -> None:
    """One clear error that names the address."""
    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        with pytest.raises(InvalidConfig, match=f"--listen: 127.0.0.1:{server.tcp.port} is in use"):
            await bind(ServerSettings(listen=server.address))


@pytest.mark.parametrize(
    ("host", "words"), [("192.0.2.1", "is not an address of this machine"), ("no.such.host.invalid", "is unknown")]
)
async def test_addresses_that_are_not_ours(host: str, words: str) -> None:
    """A foreign address and an unknown name are told apart."""
    with pytest.raises(InvalidConfig, match=words):
        await bind(ServerSettings(listen=ListenAddress(host=host, port=0)))


@pytest.mark.parametrize(("host", "warnings"), [("0.0.0.0", 1), ("127.0.0.1", 0), ("::1", 0)])
async def test_plaintext_for_others_is_warned_about(host: str, warnings: int) -> None:
    """The service has no authentication, so an address that others can reach is worth a warning."""
    with structlog.testing.capture_logs() as logs:
        (await bind(ServerSettings(listen=ListenAddress(host=host, port=0)))).close()
    assert warnings == sum(entry["log_level"] == "warning" for entry in logs)
