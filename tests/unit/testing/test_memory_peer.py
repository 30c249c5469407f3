"""The peer in memory, before our own connections."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.bridge.virtual import run_virtual
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.testing.memory_peer import MemoryCall, MemoryConnection
from trio_sidecar.testing.network import Network
from trio_sidecar.transport.connection import Connection, ConnectionSettings, ConnectionState, NotProcessed
from trio_sidecar.transport.dial import aio_connect

if TYPE_CHECKING:
    from collections.abc import Callable


@attrs.define(eq=False)
class Server:
    """A service that does what a test says."""

    on_call: Callable[[MemoryCall], None]
    connections: list[MemoryConnection] = attrs.field(factory=list)
    lost: list[int] = attrs.field(factory=list)

    def connected(self, connection: MemoryConnection) -> None:
        self.connections.append(connection)

    def called(self, call: MemoryCall) -> None:
        self.on_call(call)

    def gone(self, call: MemoryCall) -> None:
        self.lost.append(call.id)


def echo(call: MemoryCall) -> None:
    """Send the request back, twice."""
    call.send_headers()
    call.send_message(call.request)
    call.send_message(call.request)
    call.end()


async def aio_collect(connection: Connection, request: bytes = b"hello") -> list[bytes]:
    """All messages of one call."""
    messages: list[bytes] = []
    async with connection.aio_open("/t.T/Echo", request, metadata={}) as stream:
        while batch := await stream.aio_receive():
            messages += batch
    return messages


def play(server: Server, scenario: Any, **options: Any) -> None:
    """Run a scenario with a connection to a peer."""

    async def main() -> None:
        network = Network(random.Random(3))
        network.listen("peer", 1, lambda: MemoryConnection(server, **options))
        with network.installed(), trio.fail_after(60):
            settings = ConnectionSettings(endpoint=GrpcEndpoint.parse("peer:1"))
            connection = await run_aio(aio_connect, settings, lambda _: None)
            await scenario(connection)
            connection.close("the test is over")
            await connection.closed.wait()

    run_virtual(main, random=random.Random(1))


@pytest.mark.parametrize("size", [5, 1_000_000], ids=["small", "larger than the windows"])
def test_a_call_is_answered(size: int) -> None:
    """Requests and answers pass whole, whatever the windows."""

    async def scenario(connection: Connection) -> None:
        assert [bytes(size)] * 2 == await run_aio(aio_collect, connection, bytes(size))

    play(Server(echo), scenario)


@pytest.mark.parametrize(
    ("on_call", "status"),
    [
        (lambda call: call.refuse(8, "full"), StatusCode.RESOURCE_EXHAUSTED),
        (lambda call: (call.send_headers(), call.end(13, "broken")), StatusCode.INTERNAL),
        (lambda call: call.reset(8), StatusCode.CANCELLED),
        (lambda call: call.reset(7), StatusCode.UNAVAILABLE),
    ],
    ids=["refused", "failed", "reset", "not begun"],
)
def test_a_call_is_refused(on_call: Any, status: StatusCode) -> None:
    """Each way of saying no arrives as its status."""

    async def scenario(connection: Connection) -> None:
        with pytest.raises(RpcError) as failure:
            await run_aio(aio_collect, connection)
        assert status is failure.value.status

    play(Server(on_call), scenario)


def test_a_client_that_leaves_is_noticed() -> None:
    """A reset is reported once, and so is every call of a connection that is lost."""
    server = Server(lambda call: call.send_headers())

    async def scenario(connection: Connection) -> None:
        with trio.move_on_after(1):
            await run_aio(aio_collect, connection)
        await trio.sleep(1)
        assert [1] == server.lost
        with trio.move_on_after(1):
            await run_aio(aio_collect, connection)
        await trio.sleep(1)

    play(server, scenario)
    assert [1, 3] == server.lost


def test_goaway() -> None:
    """A warning leaves calls alone; the last word drops those above its id and closes when the rest is over."""
    calls: list[MemoryCall] = []
    server = Server(calls.append)

    async def scenario(connection: Connection) -> None:
        outcomes: list[object] = []

        async def call() -> None:
            try:
                outcomes.append(await run_aio(aio_collect, connection))
            except NotProcessed as error:
                outcomes.append(type(error))

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(call)
                await trio.sleep(1)
            server.connections[0].announce_end()
            await trio.sleep(1)
            assert ConnectionState.DRAINING is connection.state
            server.connections[0].go_away(last_stream_id=1)
            await trio.sleep(1)
            assert ([NotProcessed], [3]) == (outcomes, server.lost)
            echo(calls[0])
        assert [NotProcessed, [b"hello"] * 2] == outcomes

    play(server, scenario)


def test_limits_of_streams() -> None:
    """The limit that it announces is what the client learns, now and later."""

    async def scenario(connection: Connection) -> None:
        assert 5 == connection.stream_limit
        server.connections[0].limit_streams(2)
        await trio.sleep(1)
        assert 2 == connection.stream_limit

    server = Server(echo)
    play(server, scenario, max_concurrent_streams=5)
