"""The pool: its decision as a table, and its life against a scripted peer."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from typing import TYPE_CHECKING

import attrs
import pytest
import structlog
import trio

from trio_sidecar.bridge import AioEvent, AioTaskGroup, run_aio
from trio_sidecar.config import TransportSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import ConnectError, RpcError, StatusCode
from trio_sidecar.testing.peer import Peer, PeerStream, open_peer
from trio_sidecar.transport.client import Client
from trio_sidecar.transport.connect import StartupError
from trio_sidecar.transport.pool import Pool, open_pool
from trio_sidecar.wire import HealthCheckRequest, HealthCheckResponse, HealthCheckResponseServingStatus
from trio_sidecar.wire.codec import encode
from trio_sidecar.wire.methods import HEALTH_CHECK, HEALTH_WATCH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ANSWER = encode(HealthCheckResponse(status=HealthCheckResponseServingStatus.SERVING))


def settings(port: int, connections: int = 2, deadline: float = 5.0, retry: float = 0.05) -> TransportSettings:
    return TransportSettings(
        grpc_endpoint=GrpcEndpoint.parse(f"127.0.0.1:{port}"),
        grpc_connections=connections,
        grpc_connect_attempt_timeout_secs=2.0,
        grpc_retry_interval_secs=retry,
        grpc_startup_deadline_secs=deadline,
    )


async def script_answer(stream: PeerStream) -> None:
    await stream.send_headers()
    await stream.send_message(ANSWER)
    await stream.send_trailers()


async def script_hold(stream: PeerStream) -> None:
    await stream.send_headers()
    await trio.sleep_forever()


async def wait_until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - what the peer has seen comes over a real socket
            await trio.sleep(0.005)


async def check(pool: Pool) -> HealthCheckResponse:
    """A call that waits its turn, as those of requests do."""

    async def aio_main() -> HealthCheckResponse:
        async with Client(pool).aio_stream(HEALTH_CHECK, HealthCheckRequest()) as stream:
            (answer,) = await stream.aio_receive()
            assert not await stream.aio_receive()
            return answer

    return await run_aio(aio_main)


async def hold(pool: Pool, release: AioEvent) -> None:
    """Keep one stream open until released."""

    async def aio_main() -> None:
        async with Client(pool).aio_stream(HEALTH_WATCH, HealthCheckRequest()):
            await release.aio_wait()

    await run_aio(aio_main)


# -- Start-up


@pytest.mark.rule("R3.1", "R3.14")
async def test_every_slot_is_connected_when_the_pool_opens(aio_loop: object) -> None:
    """The pool has all its connections when the block begins, and none when it has ended."""
    async with open_peer(script_answer) as peer:
        async with open_pool(settings(peer.port, connections=3)) as pool:
            assert 3 == len(pool) == len(peer.connections)
            assert f"<Pool vLLM at 127.0.0.1:{peer.port}: 0 active, 3 idle, 0 queued>" == repr(pool)
        await wait_until(lambda: all(connection.lost.is_set() for connection in peer.connections))


@pytest.mark.rule("R3.6", "R3.16")
async def test_a_closed_port_is_reported_in_time(aio_loop: object) -> None:
    """Nobody listens: the error comes inside 300 ms, as one line with deadline, slot, attempts and cause."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    of = attrs.evolve(
        settings(port),
        grpc_connect_attempt_timeout_secs=0.05,
        grpc_retry_interval_secs=0.01,
        grpc_startup_deadline_secs=0.1,
    )
    start = trio.current_time()
    with pytest.raises(StartupError) as caught:
        async with open_pool(of):
            pytest.fail("nobody listens")
    assert trio.current_time() - start < 0.3
    for part in ("within 100ms", "pool slot 1", f"127.0.0.1:{port}", "attempts", "elapsed"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.rule("R3.8")
async def test_a_failed_start_up_closes_what_was_connected(aio_loop: object) -> None:
    """If a later slot fails, the connections of the others do not stay behind."""
    async with open_peer(script_answer, greets=2) as peer:
        with pytest.raises(StartupError, match="pool slot"):
            async with open_pool(settings(peer.port, connections=4, deadline=0.4)) as pool:
                pytest.fail(f"{pool!r} is open")
        assert 4 == len(peer.connections)
        await wait_until(lambda: all(connection.lost.is_set() for connection in peer.connections))


async def test_an_error_in_the_block_is_not_wrapped(aio_loop: object) -> None:
    """What the block raises leaves the pool as it is, not in a group."""
    async with open_peer(script_answer) as peer:
        with pytest.raises(LookupError, match="mine"):  # noqa: PT012
            async with open_pool(settings(peer.port)):
                reason = "mine"
                raise LookupError(reason)


async def test_unknown_versions_fall_back_with_one_warning(aio_loop: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """With versions that the fast path was not tested with, the pool says so once and works all the same."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.9" if name == "grpclib" else "4.4.1")
    async with open_peer(script_answer) as peer:
        with structlog.testing.capture_logs() as logs:
            async with open_pool(settings(peer.port)) as pool:
                assert 1 == (await check(pool)).status
        warnings = [line for line in logs if line["event"] == "slow_transport"]
        assert 1 == len(warnings)
        assert "grpclib 0.9.9" in warnings[0]["reason"]


async def test_versions_are_looked_up_once(aio_loop: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every connection: it reads files."""
    asked: list[str] = []
    look_up = importlib.metadata.version

    def version(name: str) -> str:
        asked.append(name)
        return look_up(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    async with open_peer(script_answer) as peer, open_pool(settings(peer.port, connections=4)):
        assert sorted(set(asked)) == sorted(asked)


# -- Choice and queue


@pytest.mark.rule("R3.13", "R5.15")
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "public"])
async def test_streams_spread_over_the_connections(aio_loop: object, fast: bool) -> None:
    """A pool of two and four streams, one after another and side by side: exactly two distinct client ports."""
    async with open_peer(script_answer) as peer, open_pool(settings(peer.port), fast=fast) as pool:
        for _ in range(4):
            await check(pool)
        assert [2, 2] == sorted(ports(peer).values())
        async with trio.open_nursery() as nursery:
            peer.script = script_hold
            release = AioEvent()
            for _ in range(4):
                nursery.start_soon(hold, pool, release)
            await wait_until(lambda: len(peer.streams) == 8)
            assert [4, 4] == sorted(ports(peer).values())
            assert "2 active, 0 idle, 0 queued" in repr(pool)
            release.set()
        assert "0 active, 2 idle, 0 queued" in repr(pool)


def ports(peer: Peer) -> dict[int, int]:
    """How many streams came from each client port."""
    counts: dict[int, int] = {}
    for stream in peer.streams:
        port = stream.connection.client_port
        counts[port] = counts.get(port, 0) + 1
    return counts


@pytest.mark.rule("FR-100", "E3")
async def test_calls_over_the_cap_wait_their_turn(aio_loop: object) -> None:
    """With a peer limit of 3, two connections carry two streams each; 20 calls all finish, and queue and waits show."""
    most = 0

    async def script(stream: PeerStream) -> None:
        nonlocal most
        most = max(most, peer.open_streams)
        await trio.sleep(0.01)
        await script_answer(stream)

    async with open_peer(script, max_concurrent_streams=3) as peer, open_pool(settings(peer.port)) as pool:
        await wait_until(lambda: pool.statistics().stream_caps == (2, 2))
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(check, pool)
            await wait_until(lambda: pool.statistics().queued > 0)
            assert f"{pool.statistics().queued} queued" in repr(pool)
        assert 4 == most
        assert 20 == len(peer.streams)
        assert 0 == pool.statistics().queued
        wait = pool.meter.wait
        assert (20, True) == (sum(wait.counts), wait.sum > 0.01)
        assert wait.counts[0] >= 4  # those that had a place at once


@pytest.mark.rule("FR-020")
async def test_a_short_call_does_not_wait_behind_requests(aio_loop: object) -> None:
    """An engine that is full still answers for its health: on the stream that requests leave free."""

    async def aio_look() -> None:
        await Client(pool).aio_unary(HEALTH_CHECK, HealthCheckRequest())

    async with open_peer(script_hold, max_concurrent_streams=2) as peer, open_pool(settings(peer.port, 1)) as pool:
        await wait_until(lambda: pool.statistics().stream_caps == (1,))
        release = AioEvent()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(hold, pool, release)
            await wait_until(lambda: len(peer.streams) == 1 and pool.statistics().queued == 2)
            peer.script = script_answer
            await run_aio(aio_look)
            assert (2, 2) == (len(peer.streams), pool.statistics().queued)
            peer.script = script_hold
            release.set()


async def test_a_cancelled_waiter_leaves_the_queue(aio_loop: object) -> None:
    """A call that gives up while it waits is forgotten, and the next one in line is served."""
    async with open_peer(script_hold, max_concurrent_streams=1) as peer, open_pool(settings(peer.port, 1)) as pool:
        await wait_until(lambda: pool.statistics().stream_caps == (1,))
        release = AioEvent()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold, pool, release)
            await wait_until(lambda: len(peer.streams) == 1)
            with trio.move_on_after(0.05):
                await check(pool)
            assert 0 == pool.statistics().queued
            assert 0.05 <= pool.meter.wait.sum
            peer.script = script_answer
            nursery.start_soon(check, pool)
            await wait_until(lambda: pool.statistics().queued == 1)
            release.set()
        assert 2 == len(peer.streams)


@pytest.mark.rule("E3", "FR-015")
async def test_waiters_fail_when_the_last_connection_dies(aio_loop: object) -> None:
    """A call that waits for a place on a connection fails with a typed error when that dies and none comes back."""
    errors: list[RpcError] = []

    async def call(pool: Pool) -> None:
        with pytest.raises(RpcError) as caught:
            await check(pool)
        errors.append(caught.value)

    async with open_peer(script_hold, max_concurrent_streams=1) as peer, open_pool(settings(peer.port, 1)) as pool:
        await wait_until(lambda: pool.statistics().stream_caps == (1,))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, pool)
            await wait_until(lambda: len(peer.streams) == 1)
            for _ in range(3):
                nursery.start_soon(call, pool)
            await wait_until(lambda: pool.statistics().queued == 3)
            with trio.fail_after(3):
                peer.stop()
                await wait_until(lambda: len(errors) == 4)
        assert {StatusCode.UNAVAILABLE} == {error.status for error in errors}
        assert {"Health.Check"} == {error.rpc for error in errors}
        with pytest.raises(RpcError, match="no connection to vLLM"):
            await check(pool)


# -- Connections that go and come back


@pytest.mark.rule("FR-027", "FR-028", "FR-030")
async def test_the_pool_survives_a_restart_of_the_engine(aio_loop: object) -> None:
    """While the engine is away calls fail at once; when it is back, every slot is, without a new pool."""
    async with open_peer(script_answer) as peer:
        port = peer.port
        async with open_pool(settings(port, 3)) as pool:
            await check(pool)
            peer.stop()
            await wait_until(lambda: pool.statistics().stream_caps == (0, 0, 0))
            await wait_until(lambda: pool.statistics().failed_reconnects >= 3)
            start = trio.current_time()
            with pytest.raises(RpcError, match="no connection") as caught:
                await check(pool)
            assert StatusCode.UNAVAILABLE is caught.value.status
            assert trio.current_time() - start < 0.5
            async with open_peer(script_answer, port=port) as again:
                await wait_until(lambda: pool.statistics().idle == 3)
                assert 3 == len(again.connections)
                assert 1 == (await check(pool)).status
                assert 3 == pool.statistics().reconnects


@pytest.mark.rule("FR-028")
async def test_a_dropped_connection_is_replaced_once(aio_loop: object) -> None:
    """One lost connection leads to one new one; the other slot serves meanwhile."""
    async with open_peer(script_answer) as peer, open_pool(settings(peer.port)) as pool:
        peer.connections[0].cut()
        await wait_until(lambda: pool.statistics().reconnects == 1)
        assert 3 == len(peer.connections)
        assert 2 == pool.statistics().idle
        for _ in range(4):
            await check(pool)


@pytest.mark.rule("E1")
async def test_a_draining_connection_is_replaced_while_its_streams_finish(aio_loop: object) -> None:
    """After a graceful GOAWAY new calls go to a new connection at once, and the old streams are not cut."""
    release = AioEvent()
    async with (
        open_peer(script_hold) as peer,
        open_pool(settings(peer.port, 1)) as pool,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(hold, pool, release)
        await wait_until(lambda: len(peer.streams) == 1)
        peer.script = script_answer
        await peer.connections[0].send_goaway()
        await wait_until(lambda: pool.statistics().draining == 1)
        assert 1 == (await check(pool)).status
        assert 2 == len(peer.connections)
        assert (1, 1) == (pool.statistics().open_streams, pool.statistics().draining)
        assert not peer.connections[0].lost.is_set()
        release.set()
        await wait_until(peer.connections[0].lost.is_set)
        assert 0 == pool.statistics().draining


async def test_a_call_that_was_not_begun_goes_to_another_connection(aio_loop: object) -> None:
    """A stream that the peer refused, or that came too late for a GOAWAY, is sent again by itself."""
    refused = 0

    async def script(stream: PeerStream) -> None:
        nonlocal refused
        if refused == 0:
            refused += 1
            await stream.reset(7)
        elif refused == 1:
            refused += 1
            await stream.connection.send_goaway(last_stream_id=0)
        else:
            await script_answer(stream)

    async with open_peer(script) as peer, open_pool(settings(peer.port)) as pool:
        assert 1 == (await check(pool)).status
        assert 3 == len(peer.streams)


async def test_a_call_is_not_sent_for_ever(aio_loop: object) -> None:
    """A peer that refuses every stream gets three tries, then the caller an UNAVAILABLE named after its call."""

    async def script(stream: PeerStream) -> None:
        await stream.reset(7)

    async with open_peer(script) as peer, open_pool(settings(peer.port)) as pool:
        with pytest.raises(RpcError, match=r"Health\.Check: the peer refused the stream \(Unavailable\)"):
            await check(pool)
        assert 3 == len(peer.streams)


async def test_leaving_the_pool_ends_its_calls(aio_loop: object) -> None:
    """A call that is still open when the pool closes fails; it does not hang."""
    release = AioEvent()
    async with open_peer(script_hold) as peer:
        errors: list[RpcError] = []

        async def read(pool: Pool) -> None:
            async def aio_main() -> None:
                async with Client(pool).aio_stream(HEALTH_WATCH, HealthCheckRequest()) as stream:
                    await stream.aio_receive()

            with pytest.raises(RpcError) as caught:
                await run_aio(aio_main)
            errors.append(caught.value)

        async with trio.open_nursery() as nursery:
            async with open_pool(settings(peer.port)) as pool:
                nursery.start_soon(read, pool)  # noqa: ASYNC111 - that the pool closes first is what is tested
                await wait_until(lambda: len(peer.streams) == 1)
                await trio.sleep(0.05)
            release.set()
        assert "closing" in errors[0].detail
        with pytest.raises(RpcError, match="is closed"):
            await check(pool)


@pytest.mark.rule("FR-010")
async def test_a_thousand_cancels_leave_no_trace(aio_loop: object) -> None:
    """After a thousand cancelled calls no stream, no queue entry, no connection and no file descriptor is left over."""

    async def aio_main(pool: Pool) -> None:
        client = Client(pool)

        async def aio_one(number: int) -> None:
            async with client.aio_stream(HEALTH_WATCH, HealthCheckRequest()):
                if number % 2:
                    reason = "changed my mind"
                    raise LookupError(reason)

        for _ in range(20):
            async with AioTaskGroup() as group:
                tasks = [group.create_task(aio_survive(aio_one, number)) for number in range(50)]
            assert all(task.done() for task in tasks)

    async with open_peer(script_hold) as peer, open_pool(settings(peer.port)) as pool:
        await run_aio(aio_main, pool)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        await run_aio(aio_main, pool)
        await wait_until(lambda: len(peer.reset_codes) == 2000)
        assert {8} == set(peer.reset_codes)
        assert 0 == peer.open_streams
        assert 2 == len(peer.connections)
        now = pool.statistics()
        assert (0, 0, 0, 2) == (now.open_streams, now.active, now.queued, now.idle)
        # Fewer is fine: earlier tests in this process may still have been closing theirs.
        assert before >= len(os.listdir("/proc/self/fd"))  # noqa: PTH208


async def aio_survive(aio_fn: Callable[[int], Awaitable[None]], number: int) -> None:
    with contextlib.suppress(LookupError):
        await aio_fn(number)


def test_no_lease_when_the_pool_was_never_connected() -> None:
    """A pool without connections refuses calls with a ConnectError that names peer and endpoint."""
    pool = Pool(settings(1), peer="vLLM", bootstrap=False, fast=True)
    with pytest.raises(ConnectError, match=r"no connection to vLLM at 127\.0\.0\.1:1"):
        pool.aio_lease().send(None)
