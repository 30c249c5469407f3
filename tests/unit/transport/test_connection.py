"""One connection against a scripted peer; every test runs over both implementations unless it says why not."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.lowlevel
from h2.connection import H2Connection
from h2.errors import ErrorCodes

from trio_sidecar.bridge import AioEvent, aio_sleep, aio_timeout, run_aio
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import ConnectError, RpcError, StatusCode
from trio_sidecar.testing.peer import PeerStream, open_peer
from trio_sidecar.transport.connection import STREAM_WINDOW_BYTES, ConnectionSettings, ConnectionState, NotProcessed
from trio_sidecar.transport.dial import aio_connect
from trio_sidecar.transport.framing import frame_message

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio_sidecar.transport.connection import Connection

Collect = Any
Connect = Any

CANCEL = 8
# What grpclib's public interface does not allow.
fast_only = pytest.mark.parametrize("fast", [True], ids=["fast"], indirect=True)


async def script_echo(stream: PeerStream) -> None:
    request = await stream.receive_request()
    await stream.send_headers()
    await stream.send_message(request)
    await stream.send_trailers()


async def script_silent(stream: PeerStream) -> None:
    await trio.sleep_forever()


async def script_headers_only(stream: PeerStream) -> None:
    await stream.send_headers()
    await trio.sleep_forever()


async def failing(collect: Collect, connection: Connection) -> RpcError:
    with pytest.raises(RpcError) as caught:
        await collect(connection)
    return caught.value


async def wait_until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - what the peer has seen comes over a real socket
            await trio.sleep(0.005)


async def test_messages_arrive_whole_and_in_order(connect: Connect, collect: Collect) -> None:
    """What the peer sends on a stream is what comes out of it."""
    sent = [bytes([number]) * number for number in range(200)]

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_message(*sent)
        await stream.send_trailers()

    async with open_peer(script) as peer, connect(peer) as connection:
        assert sent == await collect(connection)
        assert 0 == connection.open_streams
        assert [] == peer.reset_codes


@fast_only
async def test_all_that_has_arrived_is_handed_over_at_once(connect: Connect, fast: bool) -> None:
    """Messages that arrived while the reader was busy come in one batch."""
    sent = trio.Event()

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_message(*[b"x"] * 50)
        sent.set()
        await trio.sleep_forever()

    async def aio_main(connection: Connection) -> int:
        async with connection.aio_open("/t.T/Stream", b"", metadata={}) as stream:
            await aio_sleep(0.2)
            return len(await stream.aio_receive())

    async with open_peer(script) as peer, connect(peer) as connection:
        assert 50 == await run_aio(aio_main, connection)


async def test_entering_returns_at_the_headers(connect: Connect) -> None:
    """A stream is open as soon as the response's headers are there, before any message."""

    async def aio_main(connection: Connection) -> str:
        async with connection.aio_open("/t.T/Stream", b"", metadata={}) as stream:
            return stream.headers["x-node"]

    async def script(stream: PeerStream) -> None:
        await stream.send_headers(("x-node", "seven"))
        await trio.sleep_forever()

    async with open_peer(script) as peer, connect(peer) as connection:
        assert "seven" == await run_aio(aio_main, connection)


async def test_metadata_timeout_and_path_reach_the_peer(connect: Connect) -> None:
    """The peer sees path, metadata, timeout and that this is gRPC."""

    async def aio_main(connection: Connection) -> list[bytes]:
        call = connection.aio_open(
            "/vllm.Inference/GenerateStream", b"body", metadata={"x-data-parallel-rank": "3"}, timeout_secs=5
        )
        async with call as stream:
            return await stream.aio_receive()

    async with open_peer(script_echo) as peer, connect(peer) as connection:
        assert [b"body"] == await run_aio(aio_main, connection)
        headers = peer.streams[0].headers
        assert "/vllm.Inference/GenerateStream" == headers[":path"]
        assert f"127.0.0.1:{peer.port}" == headers[":authority"]
        assert "3" == headers["x-data-parallel-rank"]
        assert headers["content-type"].startswith("application/grpc")
        assert "grpc-timeout" in headers


@pytest.mark.rule("FR-104")
@pytest.mark.parametrize(
    ("fast", "size"),
    # The fallback takes the same path for any size, and is slow.
    [(True, 5 << 20), (True, 64 << 20), (False, 5 << 20)],
    indirect=["fast"],
    ids=["fast-5MiB", "fast-64MiB", "public-5MiB"],
)
async def test_large_messages_pass_both_ways(connect: Connect, collect: Collect, size: int, fast: bool) -> None:
    """A message far larger than the windows passes in both directions, up to the limit."""
    message = bytes(range(256)) * (size // 256)
    async with open_peer(script_echo) as peer, connect(peer) as connection:
        assert [message] == await collect(connection, request=message)


@pytest.mark.rule("FR-105", "R3.12")
async def test_a_message_over_the_limit_is_refused(connect: Connect, collect: Collect, fast: bool) -> None:
    """A peer that announces more than the limit gets a reset, the caller RESOURCE_EXHAUSTED, other streams nothing."""

    async def script(stream: PeerStream) -> None:
        if stream.path != "/t.T/Stream":
            await script_echo(stream)
            return
        await stream.send_headers()
        if fast:
            await stream.send_data(b"\0\x7f\xff\xff\xff" + bytes(1000))  # a lie of 2 GiB
        else:
            await stream.send_message(bytes(2000))
        await trio.sleep_forever()

    async with open_peer(script) as peer, connect(peer, max_message_bytes=1000) as connection:
        error = await failing(collect, connection)
        assert StatusCode.RESOURCE_EXHAUSTED is error.status
        assert "limit of 1000" in error.detail
        assert [b"after"] == await collect(connection, "/t.T/Echo", request=b"after")
        await wait_until(lambda: peer.open_streams == 0)
        if fast:
            assert [CANCEL] == peer.reset_codes


async def test_a_compressed_message_is_refused(connect: Connect, collect: Collect) -> None:
    """A compressed message fails its own stream only."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_message(b"squeezed", flag=1)
        await stream.send_trailers()

    async with open_peer(script) as peer, connect(peer) as connection:
        with pytest.raises(RpcError):
            await collect(connection)
        peer.script = script_echo
        if connection.state is ConnectionState.READY:
            assert [b"x"] == await collect(connection, request=b"x")


@pytest.mark.rule("R4.1")
async def test_trailers_carry_status_and_message(connect: Connect) -> None:
    """Messages before the status are handed out first; then comes the error, with its text percent-decoded."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_message(b"one", b"two")
        await stream.send_trailers(14, "engine %E6%AD%BB died%0A")

    async def aio_main(connection: Connection) -> tuple[list[bytes], RpcError]:
        got: list[bytes] = []
        async with connection.aio_open("/t.T/Stream", b"", metadata={}) as stream:
            try:
                while True:
                    got += await stream.aio_receive()
            except RpcError as error:
                return got, error

    async with open_peer(script) as peer, connect(peer) as connection:
        got, error = await run_aio(aio_main, connection)
        assert [b"one", b"two"] == got
        assert (StatusCode.UNAVAILABLE, "engine 死 died\n") == (error.status, error.detail)
        assert ConnectionState.READY is connection.state


async def test_trailers_only_refusal(connect: Connect, collect: Collect) -> None:
    """A refusal in a single HEADERS frame is raised on entering."""

    async def script(stream: PeerStream) -> None:
        await stream.send_trailers_only(5, "no such model")

    async with open_peer(script) as peer, connect(peer) as connection:
        error = await failing(collect, connection)
        assert (StatusCode.NOT_FOUND, "no such model") == (error.status, error.detail)


@pytest.mark.parametrize(("http", "status"), [("404", StatusCode.UNIMPLEMENTED), ("503", StatusCode.UNAVAILABLE)])
async def test_http_errors_have_a_status(connect: Connect, collect: Collect, http: str, status: StatusCode) -> None:
    """An answer from something that is no gRPC server still has a status and names HTTP's."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers((":status", http), ("content-type", "text/html"))
        await stream.send_data(b"<html>", end_stream=True)

    async with open_peer(script) as peer, connect(peer) as connection:
        error = await failing(collect, connection)
        assert status is error.status
        assert http in error.detail


async def test_a_response_without_status(connect: Connect, collect: Collect) -> None:
    """Trailers without grpc-status are an UNKNOWN error, not a normal end."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_trailers(None)

    async with open_peer(script) as peer, connect(peer) as connection:
        assert StatusCode.UNKNOWN is (await failing(collect, connection)).status


async def test_an_end_within_a_message(connect: Connect, collect: Collect) -> None:
    """A stream that ends within a message is an error even if its status is OK."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_data(b"\0\0\0\0\x09half")
        await stream.send_trailers()

    async with open_peer(script) as peer, connect(peer) as connection:
        assert StatusCode.INTERNAL is (await failing(collect, connection)).status


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (2, StatusCode.INTERNAL),
        (8, StatusCode.CANCELLED),
        (11, StatusCode.RESOURCE_EXHAUSTED),
        (7, StatusCode.UNAVAILABLE),
    ],
)
async def test_a_reset_by_the_peer(connect: Connect, collect: Collect, code: int, status: StatusCode) -> None:
    """A reset ends its own stream with the status of its code, counts, and leaves the connection usable."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.reset(code)

    async with open_peer(script) as peer, connect(peer) as connection:
        error = await failing(collect, connection)
        assert status is error.status
        counted = {name: count for name, count in connection.settings.meter.resets.items() if count}
        assert {ErrorCodes(code).name: 1} == counted
        peer.script = script_echo
        assert [b"x"] == await collect(connection, request=b"x")


@fast_only
async def test_a_refused_stream_was_not_processed(connect: Connect, collect: Collect, fast: bool) -> None:
    """REFUSED_STREAM before any answer says that the call may be sent again."""

    async def script(stream: PeerStream) -> None:
        await stream.reset(7)

    async with open_peer(script) as peer, connect(peer) as connection:
        assert isinstance(await failing(collect, connection), NotProcessed)


@pytest.mark.rule("E5", "FR-001")
@pytest.mark.parametrize("script", [script_silent, script_headers_only], ids=["before headers", "in the stream"])
async def test_a_cancelled_call_is_reset_at_once(
    connect: Connect, collect: Collect, fast: bool, script: Callable[[PeerStream], Awaitable[None]]
) -> None:
    """Cancelling a call resets its stream with CANCEL without waiting for the peer, and the connection stays usable."""
    async with open_peer(script) as peer, connect(peer) as connection:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, connection)
            await wait_until(lambda: len(peer.streams) == 1)
            await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
        with trio.fail_after(0.5):
            await peer.streams[0].gone.wait()
        assert [CANCEL if fast else 0] == peer.reset_codes
        assert 0 == connection.open_streams
        peer.script = script_echo
        assert [b"x"] == await collect(connection, request=b"x")
        assert 1 == len(peer.connections)


@pytest.mark.rule("E4", "FR-012")
async def test_a_stream_left_early_is_reset(connect: Connect, fast: bool) -> None:
    """A reader that leaves after the first message resets the stream."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_message(b"one")
        await trio.sleep_forever()

    async def aio_main(connection: Connection) -> None:
        async with connection.aio_open("/t.T/Stream", b"", metadata={}) as stream:
            await stream.aio_receive()

    async with open_peer(script) as peer, connect(peer) as connection:
        await run_aio(aio_main, connection)
        with trio.fail_after(0.5):
            await peer.streams[0].gone.wait()
        assert [CANCEL if fast else 0] == peer.reset_codes
        assert 0 == peer.open_streams


async def test_a_call_cancelled_while_sending_leaves_the_connection_usable(connect: Connect, collect: Collect) -> None:
    """A request that waits for window can be cancelled; the next call goes through."""
    async with open_peer(script_silent) as peer, connect(peer) as connection:
        with trio.move_on_after(0.3) as scope:
            await collect(connection, request=bytes(30 << 20))
        assert scope.cancelled_caught
        await wait_until(lambda: peer.open_streams == 0)
        peer.script = script_echo
        assert [b"x"] == await collect(connection, request=b"x")


@fast_only
async def test_late_data_of_a_cancelled_stream_is_ignored(connect: Connect, collect: Collect, fast: bool) -> None:
    """Frames that cross our reset on the wire are dropped, without one RST each, and their window is given back."""

    async def script_flood(stream: PeerStream) -> None:
        with trio.CancelScope(shield=True):
            await stream.send_headers()
            frame = (13).to_bytes(3, "big") + b"\0\0" + stream.id.to_bytes(4, "big") + b"\0\0\0\0\x08" + bytes(8)
            for _ in range(200):
                await stream.connection.send_bytes(frame)
                await trio.lowlevel.checkpoint()

    async def aio_main(connection: Connection) -> None:
        async with connection.aio_open("/t.T/Stream", b"", metadata={}) as stream:
            await stream.aio_receive()

    async with open_peer(script_flood) as peer, connect(peer) as connection:
        await run_aio(aio_main, connection)
        peer.script = script_echo
        assert [b"x"] == await collect(connection, request=b"x")
        assert [CANCEL] == peer.reset_codes


@pytest.mark.rule("FR-010")
async def test_a_thousand_cancels_leave_nothing(connect: Connect, collect: Collect, fast: bool) -> None:
    """A thousand cancelled streams leave no open stream on either side, and one connection."""
    count = 1000 if fast else 100

    async def aio_main(connection: Connection) -> None:
        for _ in range(count):
            async with connection.aio_open("/t.T/Stream", b"request", metadata={}):
                pass

    async with open_peer(script_headers_only) as peer, connect(peer) as connection:
        await run_aio(aio_main, connection)
        await wait_until(lambda: len(peer.reset_codes) == count)
        assert 0 == peer.open_streams
        assert 0 == connection.open_streams
        assert {CANCEL if fast else 0} == set(peer.reset_codes)
        assert 1 == len(peer.connections)


async def test_a_stalled_reader_does_not_block_the_others(connect: Connect) -> None:
    """While one reader takes nothing and its window is full, twenty of twenty other streams finish."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        if stream.path == "/t.T/Stalled":
            while True:
                await stream.send_message(bytes(16000))
        await stream.send_message(*[bytes(1000)] * 100)
        await stream.send_trailers()

    async def aio_stalled(connection: Connection, release: AioEvent) -> int:
        async with connection.aio_open("/t.T/Stalled", b"", metadata={}) as stream:
            await release.aio_wait()
            return len(await stream.aio_receive())

    async def aio_other(connection: Connection) -> int:
        total = 0
        async with connection.aio_open("/t.T/Other", b"", metadata={}) as stream:
            while batch := await stream.aio_receive():
                total += len(batch)
        return total

    totals: list[int] = []

    async def other(connection: Connection) -> None:
        totals.append(await run_aio(aio_other, connection))

    async with open_peer(script) as peer, connect(peer) as connection:
        release = AioEvent()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_aio, aio_stalled, connection, release)
            await wait_until(lambda: len(peer.streams) == 1)
            await trio.sleep(0.2)
            async with trio.open_nursery() as others:
                for _ in range(20):
                    others.start_soon(other, connection)
            release.set()
        assert [100] * 20 == totals


async def test_a_reader_that_takes_nothing_stops_the_peer(connect: Connect) -> None:
    """Window is given back only for what was taken: a peer can send one stream's window and no more."""
    sent = 0

    async def script(stream: PeerStream) -> None:
        nonlocal sent
        await stream.send_headers()
        while True:
            await stream.send_message(bytes(16379))
            sent += 16384

    async def aio_main(connection: Connection) -> tuple[int, int]:
        async with connection.aio_open("/t.T/Stream", b"", metadata={}) as stream:
            await aio_sleep(0.4)
            before = sent
            taken = 0
            while taken < 2 << 20:
                taken += sum(len(message) for message in await stream.aio_receive())
            await aio_sleep(0.2)
            return before, sent

    async with open_peer(script) as peer, connect(peer) as connection:
        before, after = await run_aio(aio_main, connection)
        assert STREAM_WINDOW_BYTES - 16384 <= before <= STREAM_WINDOW_BYTES
        assert after >= before + STREAM_WINDOW_BYTES


@fast_only
async def test_small_messages_that_wait_for_a_slow_reader_keep_their_window(connect: Connect, fast: bool) -> None:
    """Of many small messages the reader gets a few at once, and the peer gets window back only for those."""
    sent = 0
    frame = frame_message(bytes(27)) * 512

    async def script(stream: PeerStream) -> None:
        nonlocal sent
        await stream.send_headers()
        while True:
            await stream.send_data(frame)
            sent += len(frame)

    async def aio_sent(at_least: int) -> None:
        async with aio_timeout(20):
            while sent < at_least:
                await aio_sleep(0.01)
        await aio_sleep(0.05)  # in which it could send too much

    async def aio_main(connection: Connection) -> list[int]:
        async with connection.aio_open("/t.T/Stream", b"", metadata={}) as stream:
            await aio_sent(STREAM_WINDOW_BYTES)
            before = sent
            batches = [len(await stream.aio_receive()) for _ in range(64)]
            await aio_sent(before + 16384)
            between = sent
            taken = 0
            while taken < 4 * before:  # and with all taken, it goes on
                taken += sum(len(message) for message in await stream.aio_receive())
            return [before, between, *batches]

    async with open_peer(script) as peer, connect(peer) as connection:
        before, between, *batches = await run_aio(aio_main, connection)
        assert STREAM_WINDOW_BYTES == before
        assert before < between <= before + 64 * len(batches) * 32
        assert [64] * 64 == batches


@pytest.mark.rule("E1")
@fast_only
async def test_graceful_goaway_lets_streams_finish(connect: Connect, collect: Collect, fast: bool) -> None:
    """After a graceful GOAWAY twenty open streams get all their messages; no new one is opened; then it closes."""
    go = trio.Event()

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_message(b"before")
        await go.wait()
        await stream.send_message(*[b"after"] * 99)
        await stream.send_trailers()

    counts: list[int] = []

    async def read(connection: Connection) -> None:
        counts.append(len(await collect(connection)))

    async with open_peer(script) as peer, connect(peer) as connection:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(read, connection)
            await wait_until(lambda: len(peer.streams) == 20)
            await peer.connections[0].send_goaway()
            await wait_until(lambda: connection.state is ConnectionState.DRAINING)
            with pytest.raises(NotProcessed, match="GOAWAY"):
                await collect(connection)
            go.set()
        assert [100] * 20 == counts
        with trio.fail_after(1):
            await connection.closed.wait()


@pytest.mark.rule("E1")
@fast_only
async def test_streams_above_the_goaway_were_not_processed(connect: Connect, collect: Collect, fast: bool) -> None:
    """GOAWAY names the last stream that the peer will answer; later ones may be sent again, earlier ones finish."""
    go = trio.Event()

    async def script(stream: PeerStream) -> None:
        await go.wait()
        await script_echo(stream)

    outcomes: dict[bytes, object] = {}

    async def call(connection: Connection, name: bytes) -> None:
        try:
            outcomes[name] = await collect(connection, request=name)
        except NotProcessed as error:
            outcomes[name] = type(error)

    async with open_peer(script) as peer, connect(peer) as connection, trio.open_nursery() as nursery:
        nursery.start_soon(call, connection, b"first")
        await wait_until(lambda: len(peer.streams) == 1)
        nursery.start_soon(call, connection, b"second")
        await wait_until(lambda: len(peer.streams) == 2)
        await peer.connections[0].send_goaway(last_stream_id=peer.streams[0].id, debug=b"max_age")
        await wait_until(lambda: b"second" in outcomes)
        go.set()
        await wait_until(lambda: b"first" in outcomes)
        assert {b"first": [b"first"], b"second": NotProcessed} == outcomes
        assert "max_age" in connection.reason


async def test_goaway_on_an_idle_connection_closes_it(connect: Connect) -> None:
    """An idle connection that the peer retires is closed, not kept half open."""
    async with open_peer(script_echo) as peer, connect(peer) as connection:
        await peer.connections[0].send_goaway()
        if hasattr(connection, "protocol"):
            await connection.closed.wait()
            assert ConnectionState.CLOSED is connection.state


@pytest.mark.parametrize("kind", [0xA, 0xB, 0xC, 0xFF])
@fast_only
async def test_unknown_frames_are_ignored(connect: Connect, collect: Collect, kind: int, fast: bool) -> None:
    """ALTSVC, ORIGIN and frames that nobody knows change nothing (RFC 9113, 5.5)."""

    async def script(stream: PeerStream) -> None:
        await stream.connection.send_frame(kind, 0, 0, b"\0\x01a")
        await script_echo(stream)

    async with open_peer(script) as peer, connect(peer) as connection:
        assert [b"x"] == await collect(connection, request=b"x")
        assert ConnectionState.READY is connection.state


@pytest.mark.parametrize("how", ["cut", "close", "cut mid-frame"])
async def test_a_lost_connection_fails_all_its_streams(connect: Connect, collect: Collect, how: str) -> None:
    """When the socket goes, every stream on it fails with UNAVAILABLE and a reason; nothing hangs."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_message(b"one")
        await trio.sleep_forever()

    errors: list[RpcError] = []

    async def read(connection: Connection) -> None:
        errors.append(await failing(collect, connection))

    async with open_peer(script) as peer, connect(peer) as connection:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(read, connection)
            await wait_until(lambda: len(peer.streams) == 5)
            await trio.sleep(0.05)
            if how == "cut mid-frame":
                await peer.connections[0].send_bytes(b"\0\0\x20\0\0\0\0\0\x01half a frame")
            if how == "close":
                await peer.connections[0].close()
            else:
                peer.connections[0].cut()
        assert [StatusCode.UNAVAILABLE] * 5 == [error.status for error in errors]
        assert all(str(peer.port) in error.detail for error in errors)
        assert ConnectionState.CLOSED is connection.state
        with pytest.raises(NotProcessed):
            await collect(connection)


@fast_only
async def test_a_protocol_fault_closes_the_connection(connect: Connect, collect: Collect, fast: bool) -> None:
    """A peer that breaks HTTP/2 is cut off, with the reason in every stream's error."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.connection.send_frame(0, 0, 1001, b"data on a stream that was never opened")

    async with open_peer(script) as peer, connect(peer) as connection:
        error = await failing(collect, connection)
        assert StatusCode.UNAVAILABLE is error.status
        assert "protocol error" in error.detail


@fast_only
async def test_a_server_that_opens_a_stream_is_cut_off(connect: Connect, collect: Collect, fast: bool) -> None:
    """Request headers from a server are a protocol fault, not a crash."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        head = H2Connection().encoder.encode([(":method", "POST"), (":path", "/"), (":scheme", "http")])
        await stream.connection.send_frame(1, 4, 2, head)

    async with open_peer(script) as peer, connect(peer) as connection:
        assert "the server opened stream 2" in (await failing(collect, connection)).detail


@fast_only
async def test_a_frame_over_the_size_limit_is_refused_by_its_header(
    connect: Connect, collect: Collect, fast: bool
) -> None:
    """A frame that announces more than we allow is refused before its payload arrives."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.connection.send_bytes(b"\xff\xff\xff\0\0" + stream.id.to_bytes(4, "big"))

    async with open_peer(script) as peer, connect(peer) as connection:
        assert "protocol error" in (await failing(collect, connection)).detail


@fast_only
async def test_a_peer_that_overruns_the_window_is_cut_off(connect: Connect, collect: Collect, fast: bool) -> None:
    """DATA beyond the stream's window is an error, not memory."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        head = (16384).to_bytes(3, "big") + b"\0\0" + stream.id.to_bytes(4, "big")
        for _ in range(80):
            await stream.connection.send_bytes(head + b"\0\0\0\x3f\xfb" + bytes(16379))

    async def aio_main(connection: Connection) -> None:
        async with connection.aio_open("/t.T/Stream", b"", metadata={}) as stream:
            await aio_sleep(0.5)
            while await stream.aio_receive():
                pass

    async with open_peer(script) as peer, connect(peer) as connection:
        with pytest.raises(RpcError, match="protocol error"):
            await run_aio(aio_main, connection)


async def test_a_response_with_content_length(connect: Connect, collect: Collect) -> None:
    """A content length, which gRPC servers do not send but proxies may, does the connection no harm."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers(("content-length", "18"))
        await stream.send_message(b"four", b"four", end_stream=True)

    async with open_peer(script) as peer, connect(peer) as connection:
        assert "no grpc-status" in (await failing(collect, connection)).detail
        peer.script = script_echo
        assert [b"x"] == await collect(connection, request=b"x")


@fast_only
async def test_the_greeting(connect: Connect, collect: Collect, fast: bool) -> None:
    """A peer is told the windows of stream and connection, and that pushes are not wanted."""
    async with open_peer(script_echo) as peer, connect(peer) as connection:
        assert [b"x"] == await collect(connection, request=b"x")
        h2 = peer.connections[0].h2
        assert (STREAM_WINDOW_BYTES, 0) == (h2.remote_settings.initial_window_size, h2.remote_settings.enable_push)
        assert 64 << 20 == h2.outbound_flow_control_window + len(b"\0\0\0\0\x01x")


@pytest.mark.parametrize(
    ("fast", "late"),
    # What the fallback does with frames that come late is grpclib's own business.
    [(True, False), (True, True), (False, False)],
    indirect=["fast"],
    ids=["fast-unread", "fast-late", "public-unread"],
)
async def test_window_of_streams_left_early_comes_back(
    connect: Connect, collect: Collect, fast: bool, late: bool
) -> None:
    """What nobody read of streams that were left does not use up the connection's window."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        if not late:
            await stream.send_message(*[bytes(16379)] * 32)
        frame = (16384).to_bytes(3, "big") + b"\0\0" + stream.id.to_bytes(4, "big") + b"\0\0\0\x3f\xfb" + bytes(16379)
        with trio.CancelScope(shield=late):
            await stream.gone.wait()
            for _ in range(32):
                await stream.connection.send_bytes(frame)

    async def aio_main(connection: Connection) -> None:
        async with connection.aio_open("/t.T/Stream", b"", metadata={}):
            await aio_sleep(0.05)

    async with open_peer(script) as peer, connect(peer, connection_window_bytes=2 << 20) as connection:
        for _ in range(10):
            await run_aio(aio_main, connection)
        peer.script = script_echo
        assert [bytes(1 << 20)] == await collect(connection, request=bytes(1 << 20))


@fast_only
async def test_odd_header_bytes_do_no_harm(connect: Connect, collect: Collect, fast: bool) -> None:
    """A header that is not ASCII costs nothing but itself."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers(("x-odd", "naïve 你"))
        await stream.send_trailers(3, "plain ü")

    async with open_peer(script) as peer, connect(peer) as connection:
        assert StatusCode.INVALID_ARGUMENT is (await failing(collect, connection)).status
        assert ConnectionState.READY is connection.state


@fast_only
async def test_the_peers_stream_limit_is_known_and_followed(connect: Connect, collect: Collect, fast: bool) -> None:
    """The announced limit is there when the connection is, and so is a later change."""
    async with open_peer(script_headers_only, max_concurrent_streams=2) as peer, connect(peer) as connection:
        await wait_until(lambda: connection.stream_limit == 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, connection)
            nursery.start_soon(collect, connection)
            await wait_until(lambda: len(peer.streams) == 2)
            with pytest.raises(NotProcessed, match="allows 2 streams"):
                await collect(connection)
            await peer.connections[0].send_settings(max_concurrent_streams=9)
            await wait_until(lambda: connection.stream_limit == 9)
            nursery.cancel_scope.cancel()


@fast_only
@pytest.mark.rule("FR-099")
async def test_only_headers_and_data_are_heard(connect: Connect, fast: bool) -> None:
    """Settings do not begin the count of pings anew: the server has not forgotten them either."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_message(b"one")
        await peer.connections[0].send_settings(max_concurrent_streams=9)
        await trio.sleep_forever()

    async def aio_main(connection: Connection) -> tuple[int, int]:
        before = connection.heard
        async with connection.aio_open("/t.T/Stream", b"", metadata={}) as stream:
            await stream.aio_receive()
            while connection.stream_limit != 9:  # noqa: ASYNC110 - over a real socket
                await aio_sleep(0.005)
            await connection.aio_ping()
        return before, connection.heard

    async with open_peer(script) as peer, connect(peer) as connection:
        with trio.fail_after(10):
            assert (0, 2) == await run_aio(aio_main, connection)


@pytest.mark.rule("FR-028")
@fast_only
async def test_ready_means_that_settings_have_arrived(connect: Connect, fast: bool) -> None:
    """A peer that accepts the connection and then says nothing is not ready; giving up closes the socket."""
    async with open_peer(script_echo, greets=0) as peer:
        with trio.move_on_after(0.2) as scope:
            async with connect(peer):
                pytest.fail("not ready")
        assert scope.cancelled_caught
        with trio.fail_after(1):
            await peer.connections[0].lost.wait()


async def test_a_server_that_speaks_no_http2_is_named_as_such(aio_loop: object) -> None:
    """A peer that answers in HTTP/1.1 is reported as no HTTP/2 server."""

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        port = listener.socket.getsockname()[1]
        with pytest.raises(ConnectError, match="HTTP/2"):
            await open_once(f"127.0.0.1:{port}")
        nursery.cancel_scope.cancel()


async def open_once(endpoint: str) -> str:
    """Connect over the fast path, report the peer's address, close."""

    async def aio_main() -> Connection:
        settings = ConnectionSettings(endpoint=GrpcEndpoint.parse(endpoint))
        return await aio_connect(settings, lambda connection: None, fast=True)

    connection: Any = await run_aio(aio_main)
    sock = connection.protocol.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    address = str(sock.getpeername()[0])
    connection.close("done")
    await connection.closed.wait()
    return address


def two_addresses(host: str, port: int, *rest: object, **more: object) -> list[tuple[Any, ...]]:
    """What getaddrinfo says of a name with an IPv6 and an IPv4 address."""
    return [
        (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("::1", port, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port)),
    ]


@pytest.mark.rule("FR-106", "E12")
@pytest.mark.parametrize(("listen", "name"), [("127.0.0.1", "localhost"), ("::1", "localhost"), ("::1", "[::1]")])
async def test_addresses(aio_loop: object, monkeypatch: pytest.MonkeyPatch, listen: str, name: str) -> None:
    """IPv6 works, localhost finds the address that listens, proxy variables mean nothing, Nagle is off."""
    for variable in ("http_proxy", "HTTP_PROXY", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    async with trio.open_nursery() as nursery:
        try:
            (listener,) = await trio.open_tcp_listeners(0, host=listen)
        except OSError:
            pytest.skip("no IPv6 here")
        if name == "localhost":  # with two addresses, whatever this machine's own has
            monkeypatch.setattr(socket, "getaddrinfo", two_addresses)

        async def serve(stream: trio.SocketStream) -> None:
            await stream.send_all(b"\0\0\0\x04\0\0\0\0\0")
            while await stream.receive_some():
                pass

        nursery.start_soon(trio.serve_listeners, serve, [listener])
        assert listen == await open_once(f"{name}:{listener.socket.getsockname()[1]}")
        nursery.cancel_scope.cancel()


@fast_only
async def test_ping_hook(connect: Connect, fast: bool) -> None:
    """A ping returns when it was answered, and fails if the connection is lost meanwhile."""
    async with open_peer(script_echo) as peer, connect(peer) as connection:
        await run_aio(connection.aio_ping)
        peer.connections[0].cut()
        await connection.closed.wait()
        with pytest.raises(RpcError):
            await run_aio(connection.aio_ping)


async def test_closing_fails_open_streams(connect: Connect, collect: Collect) -> None:
    """Closing a connection of ours ends its streams with the reason that was given."""
    errors: list[RpcError] = []

    async def read(connection: Connection) -> None:
        errors.append(await failing(collect, connection))

    async with open_peer(script_headers_only) as peer, connect(peer) as connection:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, connection)
            await wait_until(lambda: len(peer.streams) == 1)
            await trio.sleep(0.05)
            connection.close("the pool is closing")
        assert "the pool is closing" in errors[0].detail
        await connection.closed.wait()
        await peer.connections[0].lost.wait()
