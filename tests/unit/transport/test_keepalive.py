"""When a silent connection is pinged, and what follows if it does not answer; in virtual time."""

from __future__ import annotations

from typing import cast

import attrs
import pytest
import trio
import trio.testing

from trio_sidecar.bridge import aio_sleep, run_aio
from trio_sidecar.config import TransportSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.transport.client import Client
from trio_sidecar.transport.connection import Connection, ConnectionState
from trio_sidecar.transport.keepalive import Keepalive
from trio_sidecar.transport.pool import open_pool
from trio_sidecar.wire import HealthCheckRequest, HealthCheckResponse
from trio_sidecar.wire.methods import HEALTH_CHECK


@attrs.define(eq=False)
class Silent:
    """A connection whose peer sends nothing but, perhaps, answers to pings."""

    answers: bool = True
    open_streams: int = 1
    heard: int = 0
    state: ConnectionState = ConnectionState.READY
    reason: str = ""
    pinged_at: list[float] = attrs.field(factory=list)

    async def aio_ping(self) -> None:
        self.pinged_at.append(round(trio.current_time()))
        await aio_sleep(0.01 if self.answers else 10_000)

    def close(self, reason: str) -> None:
        self.state, self.reason = ConnectionState.CLOSED, reason


async def watch(connection: Silent, seconds: float, keepalive: Keepalive | None = None) -> list[float]:
    """When it was pinged, in seconds from the start."""
    start = trio.current_time()
    with trio.move_on_after(seconds):
        await (keepalive or Keepalive(30, 20)).run(lambda: [cast("Connection", connection)])
        await trio.sleep_forever()
    return [at - start for at in connection.pinged_at]


@pytest.mark.rule("FR-099")
async def test_few_pings(autojump_clock: trio.testing.MockClock, aio_loop: object) -> None:
    """A silent stream costs two pings at the interval, then one in five minutes, which gRPC servers tolerate."""
    first, second, third, *rest = await watch(Silent(), 900)
    assert 45 >= first >= 30
    assert 45 >= second - first >= 30
    assert third - second >= 300
    assert len(rest) <= 1


async def test_unanswered(autojump_clock: trio.testing.MockClock, aio_loop: object) -> None:
    """A peer that does not answer costs the connection, within two intervals and the timeout."""
    connection = Silent(answers=False)
    await watch(connection, 80)
    assert connection.state is ConnectionState.CLOSED
    assert connection.reason == "the peer did not answer a keepalive ping within 20s"


async def test_idle_or_off(autojump_clock: trio.testing.MockClock, aio_loop: object) -> None:
    """A connection without streams is never pinged, and none is with an interval of 0."""
    assert await watch(Silent(open_streams=0), 900) == []
    assert await watch(Silent(), 900, Keepalive(0, 20)) == []


@pytest.mark.rule("FR-099")
async def test_slow_down(autojump_clock: trio.testing.MockClock, aio_loop: object) -> None:
    """After a complaint the first ping comes after twice the time."""
    keepalive = Keepalive(30, 20)
    keepalive.slow_down()
    assert (await watch(Silent(), 110, keepalive))[0] >= 60


@pytest.mark.rule("FR-028")
async def test_silent_peer(aio_loop: object) -> None:
    """A call to a peer that greets and then says nothing ends with UNAVAILABLE, and the connection is replaced."""
    accepted = 0

    async def greet(stream: trio.SocketStream) -> None:
        nonlocal accepted
        accepted += 1
        await stream.send_all(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        async for _ in stream:
            pass

    async def aio_call() -> HealthCheckResponse:
        return await Client(pool).aio_unary(HEALTH_CHECK, HealthCheckRequest())

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, greet, [listener])
        settings = TransportSettings(
            grpc_endpoint=GrpcEndpoint.parse(f"127.0.0.1:{listener.socket.getsockname()[1]}"),
            grpc_connections=1,
            keepalive_secs=0.05,
            keepalive_timeout_secs=0.05,
        )
        async with open_pool(settings, fast=True) as pool:
            with trio.fail_after(10), pytest.raises(RpcError, match="keepalive ping") as caught:
                await run_aio(aio_call)
            assert caught.value.status is StatusCode.UNAVAILABLE
            with trio.fail_after(10):
                while pool.statistics().reconnects < 1:  # noqa: ASYNC110 - over a real socket
                    await trio.sleep(0.005)
        assert accepted >= 2
        nursery.cancel_scope.cancel()


async def at_seconds(connection: Silent, change: dict[float, dict[str, int]], seconds: float) -> list[float]:
    """When it was pinged, while it changes at some moments."""
    pinged: list[float] = []

    async def watched() -> None:
        pinged.extend(await watch(connection, seconds))

    async with trio.open_nursery() as nursery:
        start = trio.current_time()
        nursery.start_soon(watched)
        for moment, values in change.items():
            await trio.sleep_until(start + moment)
            for name, value in values.items():
                setattr(connection, name, value)
    return pinged


@pytest.mark.rule("FR-099")
async def test_what_is_heard_begins_the_count_anew(autojump_clock: trio.testing.MockClock, aio_loop: object) -> None:
    """Two quick pings, then headers or data, then two quick pings again."""
    pinged = await at_seconds(Silent(), {200: {"heard": 1}}, 480)
    assert [2, 2] == [sum(pinged_at < 200 for pinged_at in pinged), sum(pinged_at >= 200 for pinged_at in pinged)]
    assert [45, 90, 240, 285] == pinged  # half an interval may pass before anything is noticed


async def test_silence_counts_from_when_there_is_a_stream(
    autojump_clock: trio.testing.MockClock, aio_loop: object
) -> None:
    """An idle connection owes nothing."""
    first, *_ = await at_seconds(Silent(open_streams=0), {100: {"open_streams": 1}}, 200)
    assert 120 == first


async def test_one_ping_at_a_time(autojump_clock: trio.testing.MockClock, aio_loop: object) -> None:
    """While the answer may still come there is no other; when its time is over, the connection is given up."""
    connection = Silent(answers=False)
    assert 1 == len(await watch(connection, 125, Keepalive(30, 100)))
    assert "" == connection.reason
    connection = Silent(answers=False)
    assert 1 == len(await watch(connection, 300, Keepalive(30, 1.5)))
    assert "the peer did not answer a keepalive ping within 1.5s" == connection.reason
