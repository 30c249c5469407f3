"""A gRPC server that misbehaves on request: HTTP/2 over a loopback socket, scripted stream by stream, in Trio.

A script is a Trio function that gets each stream as its request headers arrive::

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_message(b"one")
        await stream.connection.send_goaway()
        await stream.send_trailers()

    async with open_peer(script) as peer:
        ...  # connect to 127.0.0.1, peer.port
        assert peer.open_streams == 0

What the client did is on record: requests, RST codes, streams that are open. A script that ends leaves its stream as it
is, so a stream can be left hanging; a script whose stream the client resets is cancelled.
"""

from __future__ import annotations

import math
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

import attrs
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["Peer", "PeerConnection", "PeerStream", "open_peer"]

_RECEIVE_BYTES = 65536
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER_BYTES = 9
_RST_STREAM = 3
_GRPC_HEADERS = ((":status", "200"), ("content-type", "application/grpc"))


@attrs.define(eq=False)
class PeerStream:
    """One call, seen from the server.

    Attributes:
        connection: The connection it is on.
        id: HTTP/2 stream id.
        headers: The request's headers.
        body: The request's bytes so far, framing included.
        body_ended: Set when the request is complete.
        reset_codes: Error codes of the RST_STREAM frames that the client sent, also of those that came too late.
        gone: Set when the stream is over for the client: reset, or its connection lost.
        scope: The script's cancel scope.
    """

    connection: PeerConnection
    id: int
    headers: dict[str, str]
    body: bytearray = attrs.field(factory=bytearray)
    body_ended: trio.Event = attrs.field(factory=trio.Event)
    reset_codes: list[int] = attrs.field(factory=list)
    gone: trio.Event = attrs.field(factory=trio.Event)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def path(self) -> str:
        """The call's path."""
        return self.headers[":path"]

    async def receive_request(self) -> bytes:
        """Wait for the whole request; the message without its prefix."""
        await self.body_ended.wait()
        return bytes(self.body[5:])

    async def send_headers(self, *extra: tuple[str, str]) -> None:
        """Send response headers; an extra one replaces the usual one of that name."""
        names = {name for name, _ in extra}
        usual = [header for header in _GRPC_HEADERS if header[0] not in names]
        pseudo = [header for header in extra if header[0].startswith(":")]
        rest = [header for header in extra if not header[0].startswith(":")]
        first = [header for header in usual if header[0].startswith(":")]
        await self.connection.send_headers(
            self.id, [*pseudo, *first, *(header for header in usual if header not in first), *rest]
        )

    async def send_message(self, *messages: bytes, flag: int = 0, end_stream: bool = False) -> None:
        """Send messages, each in a DATA frame of its own unless it is longer than one may be."""
        for message in messages:
            await self.send_data(bytes([flag]) + len(message).to_bytes(4, "big") + message)
        if end_stream:
            await self.send_data(b"", end_stream=True)

    async def send_data(self, data: bytes, *, end_stream: bool = False) -> None:
        """Send bytes as they are, as window allows."""
        await self.connection.send_data(self.id, data, end_stream=end_stream)

    async def send_trailers(self, status: int | str | None = 0, message: str | None = None) -> None:
        """End the response; None leaves the status out."""
        trailers = [("x-trailer", "1")] if status is None else [("grpc-status", str(status))]
        if message is not None:
            trailers.append(("grpc-message", message))
        await self.connection.send_headers(self.id, trailers, end_stream=True)

    async def send_trailers_only(self, status: int, message: str = "", *, http_status: str = "200") -> None:
        """Answer with a single HEADERS frame."""
        headers = [(":status", http_status), ("content-type", "application/grpc"), ("grpc-status", str(status))]
        await self.connection.send_headers(self.id, [*headers, ("grpc-message", message)], end_stream=True)

    async def reset(self, code: int = 2) -> None:
        """Send RST_STREAM."""
        self.connection.h2.reset_stream(self.id, code)
        await self.connection.flush()


class PeerConnection:
    """One connection, seen from the server.

    Attributes:
        number: Connections are numbered from 0.
        client_port: The client's end.
        streams: Every stream that was opened, by id.
        lost: Set when the connection is over.
        h2: Its HTTP/2 state.
    """

    def __init__(self, peer: Peer, number: int, stream: trio.SocketStream) -> None:
        self.peer = peer
        self.number = number
        self.client_port: int = stream.socket.getpeername()[1]
        self.streams: dict[int, PeerStream] = {}
        self.lost = trio.Event()
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=False,
                header_encoding="utf-8",
                validate_outbound_headers=False,
                validate_inbound_headers=False,
            )
        )
        self._stream = stream
        self._unread = b""
        self._sending = trio.Lock()
        self._window = trio.Event()

    # -- What a script may do to the whole connection

    async def send_settings(self, **changes: int) -> None:
        """Announce settings anew, for example ``max_concurrent_streams=2``."""
        self.h2.update_settings({h2.settings.SettingCodes[name.upper()]: value for name, value in changes.items()})
        await self.flush()

    async def send_goaway(self, *, last_stream_id: int = 2**31 - 1, code: int = 0, debug: bytes = b"") -> None:
        """Send GOAWAY and go on serving."""
        await self.send_frame(7, 0, 0, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + debug)

    async def send_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Send any frame, also one that HTTP/2 does not know."""
        head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big")
        await self.send_bytes(head + payload)

    async def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are."""
        async with self._sending:
            await self._stream.send_all(data)

    async def close(self) -> None:
        """Close the socket in an orderly way."""
        await self._stream.aclose()

    def cut(self) -> None:
        """Drop the connection as a crash would: the client sees a reset."""
        linger = b"\x01\0\0\0" + bytes(4)  # on, zero seconds
        self._stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._stream.socket.close()

    # -- For streams

    async def flush(self) -> None:
        """Send what h2 has queued."""
        async with self._sending:
            if data := self.h2.data_to_send():
                await self._stream.send_all(data)

    async def send_headers(self, stream_id: int, headers: list[tuple[str, str]], *, end_stream: bool = False) -> None:
        """Send a HEADERS frame."""
        self.h2.send_headers(stream_id, headers, end_stream=end_stream)
        await self.flush()

    async def send_data(self, stream_id: int, data: bytes, *, end_stream: bool) -> None:
        """Send DATA frames as window allows."""
        at = 0
        while at < len(data) or end_stream:
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            if room <= 0:
                self._window = trio.Event()
                await self._window.wait()
                continue
            end = min(len(data), at + room)
            self.h2.send_data(stream_id, data[at:end], end_stream=end_stream and end == len(data))
            await self.flush()
            at = end
            if at == len(data):
                return

    async def serve(self, nursery: trio.Nursery) -> None:
        """Serve until the client goes; scripts run in the nursery."""
        greets = self.number < self.peer.greets
        try:
            if greets:
                self.h2.initiate_connection()
                if self.peer.max_concurrent_streams is not None:
                    codes = h2.settings.SettingCodes
                    self.h2.update_settings({codes.MAX_CONCURRENT_STREAMS: self.peer.max_concurrent_streams})
                self.h2.increment_flow_control_window(2**30)
                await self.flush()
            while data := await self._stream.receive_some(_RECEIVE_BYTES):
                if greets:
                    for event in self.h2.receive_data(data):
                        self._handle(event, nursery)
                    self._record_resets(data)
                    await self.flush()
        except (trio.BrokenResourceError, trio.ClosedResourceError, h2.exceptions.ProtocolError) as error:
            self.peer.faults.append(error)
        finally:
            self.lost.set()
            for stream in self.streams.values():
                stream.gone.set()
                stream.scope.cancel()
            self._stream.socket.close()

    def _handle(self, event: h2.events.Event, nursery: trio.Nursery) -> None:
        match event:
            case h2.events.RequestReceived():
                stream = PeerStream(self, event.stream_id, {str(name): str(value) for name, value in event.headers})
                self.streams[stream.id] = stream
                self.peer.streams.append(stream)
                nursery.start_soon(self._play, stream)
            case h2.events.DataReceived():
                self.streams[event.stream_id].body += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self.streams[event.stream_id].body_ended.set()
            case h2.events.StreamReset():
                stream = self.streams[event.stream_id]
                stream.gone.set()
                stream.scope.cancel()
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                self._window.set()

    def _record_resets(self, data: bytes) -> None:
        """Look for RST_STREAM in the bytes, since h2 does not report one for a stream that is over."""
        unread = (self._unread + data).removeprefix(_PREFACE)
        at = 0
        while len(unread) - at >= _FRAME_HEADER_BYTES:
            end = at + _FRAME_HEADER_BYTES + int.from_bytes(unread[at : at + 3], "big")
            if end > len(unread):
                break
            if unread[at + 3] == _RST_STREAM:
                stream_id = int.from_bytes(unread[at + 5 : at + 9], "big")
                self.streams[stream_id].reset_codes.append(int.from_bytes(unread[at + 9 : end], "big"))
            at = end
        self._unread = unread[at:]

    async def _play(self, stream: PeerStream) -> None:
        with stream.scope:
            try:
                await self.peer.script(stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError, h2.exceptions.ProtocolError) as error:
                self.peer.faults.append(error)


Script: TypeAlias = "Callable[[PeerStream], Awaitable[None]]"


@attrs.define(eq=False)
class Peer:
    """The server.

    Attributes:
        script: Plays every stream; may be replaced at any time.
        port: Where it listens, on 127.0.0.1.
        greets: How many connections are served; later ones are accepted and left alone, without SETTINGS.
        max_concurrent_streams: What it announces.
        connections: Every connection that was accepted, oldest first.
        streams: Every stream, oldest first.
        faults: What went wrong on the wire; a client that vanishes is no fault of the test.
    """

    script: Script
    port: int = 0
    greets: float = math.inf
    max_concurrent_streams: int | None = None
    connections: list[PeerConnection] = attrs.field(factory=list)
    streams: list[PeerStream] = attrs.field(factory=list)
    faults: list[Exception] = attrs.field(factory=list)
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def open_streams(self) -> int:
        """Streams that neither side has finished or reset."""
        return sum(
            stream.id in connection.h2.streams and not connection.h2.streams[stream.id].closed
            for connection in self.connections
            if not connection.lost.is_set()
            for stream in connection.streams.values()
        )

    @property
    def reset_codes(self) -> list[int]:
        """Error codes of all RST_STREAM frames that clients sent, by stream."""
        return [code for stream in self.streams for code in stream.reset_codes]

    def stop(self) -> None:
        """Go away: stop listening, and drop every connection."""
        self._scope.cancel()

    async def serve(self, listener: trio.SocketListener) -> None:
        """Accept connections until stopped."""

        async def accept(stream: trio.SocketStream) -> None:
            connection = PeerConnection(self, len(self.connections), stream)
            self.connections.append(connection)
            await connection.serve(handlers)

        with self._scope:
            async with trio.open_nursery() as handlers:
                await trio.serve_listeners(accept, [listener], handler_nursery=handlers)


@asynccontextmanager
async def open_peer(
    script: Script,
    *,
    port: int = 0,
    greets: float = math.inf,
    max_concurrent_streams: int | None = None,
) -> AsyncIterator[Peer]:
    """Run a scripted server while the block runs.

    Args:
        script: Plays every stream.
        port: Where to listen on 127.0.0.1; 0 lets the system choose.
        greets: See :class:`Peer`.
        max_concurrent_streams: See :class:`Peer`.
    """
    (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
    peer = Peer(
        script,
        port=listener.socket.getsockname()[1],
        greets=greets,
        max_concurrent_streams=max_concurrent_streams,
    )
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.serve, listener)  # noqa: ASYNC113 - it listens already
        try:
            yield peer
        except Exception as error:  # noqa: BLE001 - raised again below, outside the nursery, so not in a group
            failure = error
        finally:
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
