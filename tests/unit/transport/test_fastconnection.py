"""The fast path without a socket: frames are handed over by the test, and so nothing takes time."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, cast

import attrs
import h2.settings
import pytest
import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import FlowControlError
from trio.testing import wait_all_tasks_blocked

from trio_sidecar.bridge import aio_checkpoint, run_aio
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import ConnectError, RpcError, StatusCode
from trio_sidecar.metrics import PoolMeter
from trio_sidecar.transport import fastpath
from trio_sidecar.transport.connection import ConnectionSettings, ConnectionState, NotProcessed
from trio_sidecar.transport.fastconnection import FastConnection
from trio_sidecar.transport.framing import frame_message

if TYPE_CHECKING:
    import asyncio

    from trio_sidecar.transport.faststream import FastStream

    Loop = asyncio.AbstractEventLoop
    Lines = list[dict[str, Any]]

SETTINGS = ConnectionSettings(endpoint=GrpcEndpoint.parse("engine:50051"), max_message_bytes=100_000)
OK_HEADERS = [(":status", "200"), ("content-type", "application/grpc")]


@attrs.define(eq=False)
class FakeTransport:
    """A socket that keeps what is written to it."""

    sent: bytearray = attrs.field(factory=bytearray)
    ends: list[str] = attrs.field(factory=list)
    unsent: int = 0

    def write(self, data: bytes) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def close(self) -> None:
        self.ends.append("close")

    def abort(self) -> None:
        self.ends.append("abort")


@attrs.define(eq=False)
class Wire:
    """A connection, and the server at the other end of it.

    Attributes:
        server: Its HTTP/2 state.
        events: What it has seen.
        changes: The connection's states as they were told.
    """

    connection: FastConnection
    transport: FakeTransport
    server: H2Connection
    events: list[Any]
    changes: list[ConnectionState]

    def pump(self) -> None:
        """Let both sides read all that there is."""
        while self.transport.sent or (out := self.server.data_to_send()):
            if self.transport.sent:
                self.events += self.server.receive_data(bytes(self.transport.sent))
                self.transport.sent.clear()
            else:
                self.connection.protocol.data_received(out)

    def frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Send a frame that the server's state knows nothing of."""
        head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big")
        self.connection.protocol.data_received(head + payload)

    def goaway(self, last: int = 0x7FFFFFFF, code: int = 0, debug: bytes = b"") -> None:
        """Send GOAWAY."""
        self.frame(7, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big") + debug)

    def seen(self, name: str) -> list[Any]:
        """The events of one kind that the server has seen."""
        return [event for event in self.events if type(event).__name__ == name]


def wired(settings: ConnectionSettings = SETTINGS) -> Wire:
    changes: list[ConnectionState] = []
    connection = FastConnection(settings, lambda made: changes.append(made.state))
    transport = FakeTransport()
    protocol = connection._channel._protocol_factory()
    protocol.connection_made(cast("Any", transport))
    server = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
    server.initiate_connection()
    wire = Wire(connection, transport, server, [], changes)
    wire.pump()
    return wire


@pytest.fixture
async def wire(aio_loop: Loop) -> Wire:
    """A connection whose settings have been exchanged."""

    async def aio_make() -> Wire:
        await aio_checkpoint()
        return wired()

    made = await run_aio(aio_make)
    made.changes.clear()
    return made


class Call:
    """A call in the background, which the test follows."""

    def __init__(self, connection: FastConnection, request: bytes = b"request", reads: bool = True) -> None:
        self.connection = connection
        self.request = request
        self.reads = reads
        self.stream: FastStream | None = None
        self.messages: list[bytes] = []
        self.error: RpcError | None = None
        self.scope = trio.CancelScope()

    async def run(self) -> None:
        with self.scope:
            await run_aio(self._aio_run)

    async def _aio_run(self) -> None:
        try:
            async with self.connection.aio_open("/t.T/Stream", self.request, metadata={}) as self.stream:
                while self.reads and (batch := await self.stream.aio_receive()):
                    self.messages += batch
                if not self.reads:
                    await aio_forever()
        except RpcError as error:
            self.error = error


async def aio_forever() -> None:
    from trio_sidecar.bridge import AioEvent  # noqa: PLC0415

    await AioEvent().aio_wait()


async def called(wire: Wire, nursery: trio.Nursery, **more: Any) -> Call:
    call = Call(wire.connection, **more)
    nursery.start_soon(call.run)
    await settle(wire)
    return call


async def settle(wire: Wire) -> None:
    for _ in range(5):
        await wait_all_tasks_blocked()
        wire.pump()


async def test_a_connection_before_it_is_one(aio_loop: Loop) -> None:
    """Has nothing to say, and nothing to close."""
    changes: list[object] = []

    async def aio_make() -> FastConnection:
        await aio_checkpoint()
        return FastConnection(SETTINGS, changes.append)

    connection = await run_aio(aio_make)
    assert ("", 0, False, 0) == (
        connection.reason, connection.heard, connection.too_many_pings, connection.open_streams
    )  # fmt: skip
    connection.close("too early")
    connection.abort()
    assert (ConnectionState.READY, "", []) == (connection.state, connection.reason, changes)


# -- What is sent


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_what_a_server_reads_of_a_call(aio_loop: Loop, scheme: str) -> None:
    """Scheme, path, authority, timeout and metadata; and before that windows, and that pushes are not wanted."""

    async def aio_make() -> Wire:
        await aio_checkpoint()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if scheme == "https" else None
        return wired(attrs.evolve(SETTINGS, stream_window_bytes=70_000, connection_window_bytes=80_000, tls=tls))

    wire = await run_aio(aio_make)
    announced = wire.server.remote_settings
    assert (70_000, 0, 65_536) == (
        announced.initial_window_size, announced.enable_push, announced.max_header_list_size
    )  # fmt: skip
    assert 80_000 == wire.server.outbound_flow_control_window

    async def aio_call() -> None:
        async with wire.connection.aio_open("/t.T/Stream", b"", metadata={"x-rank": "3"}, timeout_secs=5):
            pytest.fail("nobody has answered")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, aio_call)
        await settle(wire)
        nursery.cancel_scope.cancel()
    headers = dict(wire.seen("RequestReceived")[0].headers)
    assert (scheme, "/t.T/Stream", "engine:50051", "5000000u", "3") == tuple(
        headers[name] for name in (":scheme", ":path", ":authority", "grpc-timeout", "x-rank")
    )


async def test_a_sender_that_is_cancelled_waits_for_nothing_more(wire: Wire) -> None:
    """Nobody has to wake it again."""
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery, request=bytes(100_000))
        assert 1 == len(wire.connection.senders)
        call.scope.cancel()
    assert set() == wire.connection.senders


# -- How it arrives


@pytest.mark.parametrize("step", [1, 2, 7, 8, 9, 10, 11, 13, 100, 1 << 20])
@pytest.mark.parametrize("first_id", [1, 0x01000003])
async def test_frames_may_arrive_in_any_pieces(wire: Wire, step: int, first_id: int) -> None:
    """Two streams, with other frames between theirs: each gets its own, and headers and data are counted as heard."""
    wire.connection.h2.highest_outbound_stream_id = first_id - 2
    async with trio.open_nursery() as nursery:
        one, two = [await called(wire, nursery) for _ in range(2)]
        server = wire.server
        for stream_id in (first_id, first_id + 2):
            server.send_headers(stream_id, OK_HEADERS)
        for number in range(3):
            server.send_data(first_id, frame_message(b"one" * number))
            server.ping(bytes(8))
            server.increment_flow_control_window(1, first_id)
            server.send_data(first_id + 2, frame_message(b"two" * number), pad_length=5 if number == 1 else None)
        server.send_headers(first_id, [("grpc-status", "0")], end_stream=True)
        server.send_headers(first_id + 2, [("grpc-status", "5"), ("grpc-message", "none")], end_stream=True)
        data = server.data_to_send()
        before = wire.connection.heard
        for at in range(0, len(data), step):
            wire.connection.protocol.data_received(data[at : at + step])
        assert 10 == wire.connection.heard - before
        await settle(wire)
    assert ([b"", b"one", b"oneone"], None) == (one.messages, one.error)
    assert [b"", b"two", b"twotwo"] == two.messages
    assert two.error is not None
    assert (StatusCode.NOT_FOUND, "none") == (two.error.status, two.error.detail)
    assert ConnectionState.READY is wire.connection.state


async def test_a_stream_that_ends_with_its_data(wire: Wire) -> None:
    """Has no status; the connection does not mind."""
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery)
        wire.server.send_headers(1, OK_HEADERS)
        await settle(wire)
        wire.server.send_data(1, frame_message(b"one"), end_stream=True)
        await settle(wire)
    assert [b"one"] == call.messages
    assert call.error is not None
    assert (StatusCode.UNKNOWN, "the response has no grpc-status") == (call.error.status, call.error.detail)
    assert ConnectionState.READY is wire.connection.state


async def test_the_reserved_bit_means_nothing(wire: Wire) -> None:
    """A stream's id has thirty-one bits."""
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery)
        wire.server.send_headers(1, OK_HEADERS)
        await settle(wire)
        wire.frame(0, 0, 0x80000001, frame_message(b"one"))
        await settle(wire)
        assert [b"one"] == call.messages
        call.scope.cancel()


async def test_odd_headers_do_no_harm(wire: Wire) -> None:
    """Neither upper case, nor bytes that are no text, nor headers that HTTP/2 has abolished."""
    wire.server.config.validate_outbound_headers = False
    wire.server.config.normalize_outbound_headers = False
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery)
        odd = [(b"X-Odd", b"caf\xe9"), (b"connection", b"close"), (b"x-empty", b"")]
        wire.server.send_headers(1, cast("Any", [*OK_HEADERS, *odd]))
        await settle(wire)
        assert call.stream is not None
        assert ("caf\xe9", "close", "") == tuple(
            call.stream.headers[name] for name in ("X-Odd", "connection", "x-empty")
        )
        wire.server.send_headers(1, [("grpc-status", "3"), ("grpc-message", "odd")], end_stream=True)
        await settle(wire)
    assert call.error is not None
    assert (StatusCode.INVALID_ARGUMENT, "odd") == (call.error.status, call.error.detail)
    assert ConnectionState.READY is wire.connection.state


@pytest.mark.parametrize(
    ("code", "headers", "status", "sentence"),
    [
        (7, False, StatusCode.UNAVAILABLE, "the peer refused the stream"),
        (8, True, StatusCode.CANCELLED, "the peer reset the stream (HTTP/2 error code 8)"),
    ],
)
async def test_a_reset_ends_its_own_stream(
    wire: Wire, code: int, headers: bool, status: StatusCode, sentence: str
) -> None:
    """With the status of its code, under which it is counted; the other stream goes on."""
    wire.connection.settings = attrs.evolve(SETTINGS, meter=PoolMeter())
    async with trio.open_nursery() as nursery:
        one, two = [await called(wire, nursery) for _ in range(2)]
        if headers:
            wire.server.send_headers(1, OK_HEADERS)
            await settle(wire)
        wire.server.reset_stream(1, code)
        await settle(wire)
        assert one.error is not None
        assert (status, sentence) == (one.error.status, one.error.detail)
        assert two.error is None
        two.scope.cancel()
    resets = wire.connection.settings.meter.resets
    assert {ErrorCodes(code).name: 1} == {name: count for name, count in resets.items() if count}


async def test_a_stream_that_breaks_the_rules_fails_alone(wire: Wire) -> None:
    """Data after its end is a fault of that stream, not of the connection."""
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery)
        wire.server.send_headers(1, [*OK_HEADERS, ("content-length", "8")])
        wire.server.send_data(1, frame_message(b"one"), end_stream=True)
        data = wire.server.data_to_send()
        wire.connection.protocol.data_received(data + data[-17:])
        await settle(wire)
    assert [b"one"] == call.messages
    assert call.error is not None


async def test_a_server_that_opens_a_stream(wire: Wire) -> None:
    """Is cut off, with a reason."""
    head = H2Connection().encoder.encode([(":method", "POST"), (":path", "/"), (":scheme", "http")])
    await trio.lowlevel.checkpoint()
    wire.frame(1, 4, 2, head)
    assert "HTTP/2 protocol error: the server opened stream 2" == wire.connection.reason


# -- Versions


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({"grpclib": "0.4.9", "h2": "4.1.0"}, None),
        ({"grpclib": "0.4.9", "h2": "4.4"}, None),
        ({"grpclib": "0.4.8", "h2": "4.4.0"}, "grpclib 0.4.8 is installed, tested are 0.4.9"),
        ({"grpclib": "0.4.9", "h2": "4.5.0"}, "h2 4.5.0 is installed, tested are 4.1, 4.2, 4.3, 4.4"),
        ({"grpclib": "0.4.9", "h2": "5"}, "h2 5 is installed, tested are 4.1, 4.2, 4.3, 4.4"),
    ],
)
def test_versions_that_were_tested(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], told: str | None
) -> None:
    """Others are named, with those that would do."""
    monkeypatch.setattr("importlib.metadata.version", installed.__getitem__)
    assert told == fastpath.unsupported()


# -- GOAWAY


@pytest.mark.rule("E1", "FR-099")
@pytest.mark.parametrize(
    ("code", "debug", "shown"),
    [
        (0, b"", ""),
        (0, b"max_age", "max_age"),
        (11, b"too_many_pings", "too_many_pings"),
        (0x01020304, b"d" * 201, "d" * 200),
        (2, b"caf\xe9", "caf\ufffd"),
    ],
)
async def test_a_goaway_is_told(wire: Wire, logs: Lines, code: int, debug: bytes, shown: str) -> None:
    """With code and text, as far as it can be shown; one that says that all is well is no warning."""
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery)
        wire.goaway(code=code, debug=debug)
        assert ConnectionState.DRAINING is wire.connection.state
        reason = f"the peer sent GOAWAY (code {code}{f', {shown}' if shown else ''})"
        assert (reason, code == 11) == (wire.connection.reason, wire.connection.too_many_pings)
        line = {"event": "connection_draining", "endpoint": "engine:50051", "code": code, "debug": shown}
        assert [{**line, "log_level": "warning" if code else "info"}] == logs
        with pytest.raises(NotProcessed) as caught:
            wire.connection.check_usable()
        assert f"the connection to engine:50051 is draining: {reason}" == caught.value.detail
        call.scope.cancel()
    await settle(wire)
    assert (ConnectionState.CLOSED, reason, ["close"]) == (
        wire.connection.state, wire.connection.reason, wire.transport.ends
    )  # fmt: skip


@pytest.mark.rule("E1")
async def test_streams_that_a_goaway_leaves_out_may_be_sent_again(wire: Wire) -> None:
    """Their error says so; the last one that the peer will answer goes on."""
    async with trio.open_nursery() as nursery:
        first, second = [await called(wire, nursery) for _ in range(2)]
        wire.goaway(last=0x80000001, debug=b"why")  # the highest bit is reserved
        await settle(wire)
        assert isinstance(second.error, NotProcessed)
        assert "engine:50051 has not begun the call: the peer sent GOAWAY (code 0, why)" == second.error.detail
        assert first.error is None
        wire.server.send_headers(1, [*OK_HEADERS, ("grpc-status", "0")], end_stream=True)
        await settle(wire)
    assert (None, []) == (first.error, first.messages)


async def test_a_goaway_in_the_midst_of_other_frames(wire: Wire) -> None:
    """What came before it is read before it, what comes after it is not lost."""
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery)
        wire.server.send_headers(1, OK_HEADERS)
        goaway = b"\0\0\x08\7\0\0\0\0\0" + (1).to_bytes(4, "big") + bytes(4)
        before = wire.server.data_to_send()
        wire.server.send_data(1, frame_message(b"one"))
        wire.server.send_headers(1, [("grpc-status", "0")], end_stream=True)
        wire.connection.protocol.data_received(before + goaway + wire.server.data_to_send())
        await settle(wire)
    assert ([b"one"], None) == (call.messages, call.error)
    assert ConnectionState.CLOSED is wire.connection.state


# -- Pings


async def test_each_ping_has_its_own_answer(wire: Wire) -> None:
    """However many are under way, and in whatever order they are answered."""
    answered: list[int] = []

    async def ping(number: int) -> None:
        await run_aio(wire.connection.aio_ping)
        answered.append(number)

    async with trio.open_nursery() as nursery:
        for number in (1, 2):
            nursery.start_soon(ping, number)
            await wait_all_tasks_blocked()
        wire.events += wire.server.receive_data(bytes(wire.transport.sent))
        wire.transport.sent.clear()
        wire.server.clear_outbound_data_buffer()
        payloads = [event.ping_data for event in wire.seen("PingReceived")]
        assert [b"\0\0\0\0\0\0\0\1", b"\0\0\0\0\0\0\0\2"] == payloads
        wire.frame(6, 1, 0, payloads[0])
        await wait_all_tasks_blocked()
        assert [1] == answered
        nursery.start_soon(ping, 3)
        await wait_all_tasks_blocked()
        wire.events += wire.server.receive_data(bytes(wire.transport.sent))
        wire.transport.sent.clear()
        wire.server.clear_outbound_data_buffer()
        wire.frame(6, 1, 0, b"somebody")  # an answer that nobody waits for
        wire.frame(6, 1, 0, wire.seen("PingReceived")[2].ping_data)
        await wait_all_tasks_blocked()
        assert [1, 3] == answered
        wire.frame(6, 1, 0, payloads[1])
    assert [1, 3, 2] == answered
    assert {} == wire.connection._pings


async def test_a_ping_on_a_connection_that_is_lost(wire: Wire) -> None:
    """Fails with the reason, at once or as soon as it is lost."""
    errors: list[RpcError] = []

    async def ping() -> None:
        with pytest.raises(RpcError) as caught:
            await run_aio(wire.connection.aio_ping)
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ping)
        await wait_all_tasks_blocked()
        wire.connection.lost(OSError("cut"), b"")
    await ping()
    assert [(StatusCode.UNAVAILABLE, "cut")] * 2 == [(error.status, error.detail) for error in errors]
    assert wire.connection.closed.is_set()


# -- The end of a connection


async def test_closing_says_goodbye(wire: Wire) -> None:
    """The peer gets a GOAWAY, streams their error; a second close changes nothing."""
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery)
        wire.connection.close("the pool is closing")
        wire.connection.close("again")
        await settle(wire)
    assert call.error is not None
    assert "lost the connection to engine:50051: the pool is closing" == call.error.detail
    assert [0] == [event.error_code for event in wire.seen("ConnectionTerminated")]
    assert (["close"], [ConnectionState.CLOSED]) == (wire.transport.ends, wire.changes)
    assert "<FastConnection engine:50051: closed, 0 streams>" == repr(wire.connection)


async def test_closing_does_not_wait_for_a_peer_that_reads_nothing(wire: Wire) -> None:
    """What is still unsent is thrown away with the socket."""
    await trio.lowlevel.checkpoint()
    wire.transport.unsent = 1
    wire.connection.close("the pool is closing")
    assert ["abort"] == wire.transport.ends


async def test_an_attempt_that_is_given_up(wire: Wire) -> None:
    """Goes without a word to the peer."""
    await trio.lowlevel.checkpoint()
    wire.connection.abort()
    assert (["abort"], b"") == (wire.transport.ends, bytes(wire.transport.sent))
    assert "the connection attempt was given up" == wire.connection.reason


@pytest.mark.parametrize("size", [16_385, 0x010203, 0xFFFFFF])
async def test_a_fault_of_the_peer_ends_the_connection(wire: Wire, size: int) -> None:
    """The reason names it, and the peer is told its code, by h2 or by us."""
    await trio.lowlevel.checkpoint()
    head = size.to_bytes(3, "big")
    wire.connection.protocol.data_received(head + b"\0\0\0\0\0\1")
    assert f"HTTP/2 protocol error: a frame of {size} bytes, more than the limit of 16384" == wire.connection.reason
    wire.events += wire.server.receive_data(bytes(wire.transport.sent))
    assert [6] == [int(event.error_code) for event in wire.seen("ConnectionTerminated")]
    wire.connection.protocol.data_received(b"\x00\x40\x01\0\0\0\0\0\1")  # nobody reads this any more
    assert ["close"] == wire.transport.ends


async def test_a_fault_without_a_text_has_its_kind(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is better than nothing."""
    await trio.lowlevel.checkpoint()

    def receive_data(data: bytes) -> Any:
        raise FlowControlError

    monkeypatch.setattr(wire.connection.h2, "receive_data", receive_data)
    wire.frame(6, 0, 0, bytes(8))
    assert "HTTP/2 protocol error: FlowControlError" == wire.connection.reason


async def test_stream_ids_run_out(wire: Wire) -> None:
    """Then the connection drains like one that the peer retires."""
    await trio.lowlevel.checkpoint()
    wire.connection.h2.highest_outbound_stream_id = 0x7FFFFFFF
    with pytest.raises(NotProcessed) as caught:
        wire.connection.begin(cast("Any", None), [])
    assert "all stream ids are used up" == caught.value.detail == wire.connection.reason
    assert ConnectionState.CLOSED is wire.connection.state


async def test_a_peer_allows_so_many_streams(wire: Wire) -> None:
    """The error says how many, and the call was not begun."""
    wire.server.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 1})
    wire.pump()
    assert 1 == wire.connection.stream_limit
    async with trio.open_nursery() as nursery:
        first = await called(wire, nursery)
        second = await called(wire, nursery)
        assert isinstance(second.error, NotProcessed)
        assert "engine:50051 allows 1 streams at once" == second.error.detail
        assert 1 == wire.connection.open_streams
        first.scope.cancel()
    assert 0 == wire.connection.open_streams


@pytest.mark.parametrize(
    ("unread", "why"),
    [(b"", "the peer closed the connection"), (b"\x15\x03\x01", "the server speaks TLS; --grpc-tls connects so")],
)
async def test_a_server_that_does_not_greet(
    aio_loop: Loop, monkeypatch: pytest.MonkeyPatch, unread: bytes, why: str
) -> None:
    """The error says what it did instead, and nothing is left of the attempt."""
    transport = FakeTransport()
    connection: FastConnection

    async def aio_connect() -> Any:
        await aio_checkpoint()
        protocol = connection._channel._protocol_factory()
        protocol.connection_made(cast("Any", transport))
        protocol.data_received(unread)
        protocol.connection_lost(None)
        return protocol

    async def aio_main() -> None:
        nonlocal connection
        connection = FastConnection(SETTINGS, lambda made: None)
        monkeypatch.setattr(connection._channel, "__connect__", aio_connect)
        await connection.aio_establish()

    with pytest.raises(ConnectError) as caught:
        await run_aio(aio_main)
    assert f"engine:50051 did not greet as an HTTP/2 server: {why}" == str(caught.value)
    assert (["abort"], True) == (transport.ends, connection.closed.is_set())


async def test_what_the_socket_says_is_the_reason(wire: Wire) -> None:
    """After the greeting, bytes that nobody understood are no hint at TLS."""
    await trio.lowlevel.checkpoint()
    wire.connection.protocol.data_received(b"\x15\x03")
    wire.connection.protocol.connection_lost(None)
    assert "the peer closed the connection" == wire.connection.reason
    other = wired()
    other.connection.protocol.connection_lost(OSError("cut"))
    assert "cut" == other.connection.reason


async def test_a_connection_that_cannot_be_made(aio_loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails as the socket did."""
    fault = ConnectionResetError(104, "reset")

    async def aio_connect() -> Any:
        await aio_checkpoint()
        raise fault

    async def aio_main() -> None:
        connection = FastConnection(SETTINGS, lambda made: None)
        monkeypatch.setattr(connection._channel, "__connect__", aio_connect)
        await connection.aio_establish()

    with pytest.raises(ConnectionResetError) as caught:
        await run_aio(aio_main)
    assert fault is caught.value


# -- Past h2 or not


@pytest.mark.parametrize("direct", [True, False])
async def test_plain_data_goes_past_h2(wire: Wire, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """Nearly all frames of a token stream do; with a content length h2 has something to check."""
    seen: list[bytes] = []
    feed = wire.connection.h2.receive_data

    def receive_data(data: bytes) -> Any:
        seen.append(data)
        return feed(data)

    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery)
        wire.server.send_headers(1, OK_HEADERS if direct else [*OK_HEADERS, ("content-length", "16")])
        await settle(wire)
        monkeypatch.setattr(wire.connection.h2, "receive_data", receive_data)
        wire.server.send_data(1, frame_message(b"one"))
        wire.server.send_data(1, frame_message(b"two"))
        await settle(wire)
        assert [b"one", b"two"] == call.messages
        assert (0 if direct else 2) == len(seen)
        wire.server.send_headers(1, [("grpc-status", "0")], end_stream=True)
        await settle(wire)
    assert call.error is None


# -- Windows


def given_back(wire: Wire) -> tuple[int, list[int]]:
    """By how much the server's window of the connection has grown, and that of streams, by the events it has seen."""
    updates = wire.seen("WindowUpdated")
    wire.events.clear()
    return sum(event.delta for event in updates if not event.stream_id), [
        event.delta for event in updates if event.stream_id
    ]


@pytest.mark.parametrize("direct", [True, False])
async def test_window_of_an_unread_stream_comes_back_when_it_is_left(aio_loop: Loop, direct: bool) -> None:
    """To the connection, since the stream is no more; whether its frames went past h2 or not."""

    async def aio_make() -> Wire:
        await aio_checkpoint()
        return wired(attrs.evolve(SETTINGS, connection_window_bytes=65_536))

    wire = await run_aio(aio_make)
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery, reads=False)
        wire.server.send_headers(1, OK_HEADERS if direct else [*OK_HEADERS, ("content-length", "60000")])
        await settle(wire)
        given_back(wire)
        for _ in range(3):
            wire.server.send_data(1, frame_message(bytes(15_995)))
        await settle(wire)
        assert (0, []) == given_back(wire)
        assert call.stream is not None
        assert 48_000 == call.stream.unacknowledged
        call.scope.cancel()
    wire.pump()
    assert [8] == [int(event.error_code) for event in wire.seen("StreamReset")]
    assert 48_000 == given_back(wire)[0]


async def test_messages_before_one_that_is_refused_cost_no_window_twice(aio_loop: Loop) -> None:
    """It went back when the stream left, and is not given again when they are read."""

    async def aio_make() -> Wire:
        await aio_checkpoint()
        return wired(attrs.evolve(SETTINGS, connection_window_bytes=100_000, max_message_bytes=16_379))

    wire = await run_aio(aio_make)
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery)
        wire.server.send_headers(1, OK_HEADERS)
        await settle(wire)
        given_back(wire)
        for _ in range(3):
            wire.server.send_data(1, frame_message(bytes(16_379)))
        wire.server.send_data(1, frame_message(bytes(16_380))[:5])
        wire.pump()
        await settle(wire)
    assert ([16_379] * 3, StatusCode.RESOURCE_EXHAUSTED) == (
        [len(message) for message in call.messages], call.error and call.error.status
    )  # fmt: skip
    assert 3 * 16_384 + 5 >= given_back(wire)[0]
    window = wire.connection.h2.inbound_flow_control_window
    assert 100_000 >= window


@pytest.mark.parametrize("between", [0, 1])
async def test_what_follows_a_message_that_is_refused_costs_no_window(aio_loop: Loop, between: int) -> None:
    """Its frames are dropped, and the connection gets their window back, though h2 had passed them on already."""

    async def aio_make() -> Wire:
        await aio_checkpoint()
        return wired(attrs.evolve(SETTINGS, connection_window_bytes=65_536, max_message_bytes=10))

    wire = await run_aio(aio_make)
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery)
        wire.server.send_headers(1, [*OK_HEADERS, ("content-length", "32768")])
        await settle(wire)
        given_back(wire)
        wire.server.send_data(1, frame_message(bytes(16_379)))
        for _ in range(between):
            wire.server.send_data(1, bytes(8_000))
        wire.server.send_data(1, bytes(16_384 - between * 8_000), end_stream=True)
        wire.pump()
        await settle(wire)
    assert call.error is not None
    assert StatusCode.RESOURCE_EXHAUSTED is call.error.status
    assert 32_768 == given_back(wire)[0]


async def test_frames_of_a_stream_that_was_left_cost_no_window(wire: Wire) -> None:
    """They crossed our reset: no answer to any of them, and their window goes back."""
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery)
        call.scope.cancel()
    wire.pump()
    assert 1 == len(wire.seen("StreamReset"))
    for _ in range(2100):
        wire.frame(0, 0, 1, bytes(16_384))
    sent = bytes(wire.transport.sent)
    kinds = {sent[at + 3] for at in range(0, len(sent), 13)}  # window updates are of that length
    assert {8} == kinds
    wire.pump()
    assert given_back(wire)[0] >= 32 << 20
    assert ConnectionState.READY is wire.connection.state


async def test_whatever_ends_a_connection_in_grpclib_ends_ours(wire: Wire) -> None:
    """With its reason."""
    await trio.lowlevel.checkpoint()
    wire.connection.protocol.processor.close()
    assert (ConnectionState.CLOSED, "closed") == (wire.connection.state, wire.connection.reason)


async def test_before_the_first_call_there_is_no_stream(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the one that it will have."""
    await trio.lowlevel.checkpoint()
    monkeypatch.setattr(wire.connection, "acknowledge", lambda *_: pytest.fail("taken for one that was left"))
    wire.frame(0, 0, 1, b"data")
    assert wire.connection.reason.startswith("HTTP/2 protocol error: ")


@pytest.mark.parametrize("stream_id", [2, 5, 1001])
async def test_frames_of_streams_that_never_were_are_a_fault(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, stream_id: int
) -> None:
    """Neither the server's nor ones that we have yet to open; it is h2 that finds it."""
    monkeypatch.setattr(wire.connection, "acknowledge", lambda *_: pytest.fail("taken for one that was left"))
    async with trio.open_nursery() as nursery:
        call, _ = [await called(wire, nursery) for _ in range(2)]
        wire.frame(0, 0, stream_id, b"data")
        await settle(wire)
    assert call.error is not None
    assert call.error.detail.startswith("lost the connection to engine:50051: HTTP/2 protocol error: ")


@pytest.mark.parametrize("first", [0, 1])
async def test_a_request_waits_for_window(wire: Wire, first: int) -> None:
    """It goes on when the stream's and the connection's have grown, and ends the stream with its last byte."""
    size = 100_000
    async with trio.open_nursery() as nursery:
        call = await called(wire, nursery, request=bytes(size - 5))
        assert 65_535 == sum(len(event.data) for event in wire.seen("DataReceived"))
        wire.server.increment_flow_control_window(1 << 20, first or None)
        await settle(wire)
        assert 65_535 == sum(len(event.data) for event in wire.seen("DataReceived"))
        wire.server.increment_flow_control_window(1 << 20, None if first else 1)
        await settle(wire)
        assert size == sum(len(event.data) for event in wire.seen("DataReceived"))
        assert 1 == len(wire.seen("StreamEnded"))
        assert set() == wire.connection.senders
        call.scope.cancel()
