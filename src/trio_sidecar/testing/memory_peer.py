"""A gRPC server's end of a connection in memory: HTTP/2 without a task, for simulations of many calls.

It is an asyncio protocol for :class:`trio_sidecar.testing.network.Network`: whatever arrives is handled at once, by the
:class:`Service` that it is given, and answers are sent by calling methods of the :class:`MemoryCall`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

if TYPE_CHECKING:
    from trio_sidecar.testing.network import Wire

__all__ = ["MemoryCall", "MemoryConnection", "Service"]

_GOAWAY = 7
_REFUSED_STREAM = 7
MAX_STREAM_ID = 2**31 - 1


class Service(Protocol):
    """What a server does."""

    def connected(self, connection: MemoryConnection) -> None:
        """A client has connected."""
        ...

    def called(self, call: MemoryCall) -> None:
        """A request has arrived, whole."""
        ...

    def gone(self, call: MemoryCall) -> None:
        """A call is over that was not answered to its end: the client has reset it, or the connection is lost."""
        ...


@attrs.define(eq=False)
class MemoryCall:
    """One call, seen from the server.

    Attributes:
        connection: The connection it is on.
        id: HTTP/2 stream id.
        path: The method's path.
        request: The request message.
        over: Nothing more can be sent.
    """

    connection: MemoryConnection
    id: int
    path: str
    request: bytes = b""
    over: bool = False
    _body: bytearray = attrs.field(factory=bytearray)
    _unsent: bytearray = attrs.field(factory=bytearray)
    _trailers: list[tuple[str, str]] | None = None

    def send_headers(self) -> None:
        """Accept the call."""
        if not self.over:
            self.connection.send_headers(self.id, [(":status", "200"), ("content-type", "application/grpc")])

    def send_message(self, message: bytes) -> None:
        """Send one message, now or when the client's window allows."""
        if not self.over:
            self._unsent += b"\0" + len(message).to_bytes(4, "big") + message
            self.flush()

    def end(self, status: int = 0, message: str = "") -> None:
        """End the call after the messages that wait."""
        if not self.over:
            self._trailers = [("grpc-status", str(status)), ("grpc-message", message)]
            self.flush()

    def refuse(self, status: int, message: str = "") -> None:
        """Answer with a status alone."""
        if not self.over:
            self.over = True
            headers = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", str(status))]
            self.connection.send_headers(self.id, [*headers, ("grpc-message", message)], end_stream=True)

    def reset(self, code: int) -> None:
        """Send RST_STREAM."""
        if not self.over:
            self.over = True
            self.connection.send_reset(self.id, code)

    def flush(self) -> None:
        """Send what waits, as far as windows allow."""
        connection = self.connection
        while self._unsent and (room := connection.room(self.id)) > 0:
            connection.send_data(self.id, bytes(self._unsent[:room]))
            del self._unsent[:room]
        if not self._unsent and self._trailers is not None:
            self.over = True
            connection.send_headers(self.id, self._trailers, end_stream=True)

    def receive(self, data: bytes) -> None:
        """Take a piece of the request."""
        self._body += data

    def complete(self) -> None:
        """The request is whole."""
        self.request = bytes(self._body[5:])


class MemoryConnection:
    """One connection, seen from the server.

    Attributes:
        wire: Its end of the network.
        calls: Calls whose headers have arrived and that are not over, by stream id.
        pings: How many pings have arrived since headers or data were last sent; gRPC servers forgive three that come
            faster than every five minutes.
        most_pings: The most that this ever was.
        lost: The connection is gone.
    """

    def __init__(self, service: Service, *, max_concurrent_streams: int | None = None) -> None:
        self.service = service
        self.wire: Wire | None = None
        self.calls: dict[int, MemoryCall] = {}
        self.pings = self.most_pings = 0
        self.lost = False
        self._last_received = 0
        self._ending = False
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=False,
                header_encoding="utf-8",
                validate_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        if max_concurrent_streams is not None:
            codes = h2.settings.SettingCodes
            self._h2.local_settings = h2.settings.Settings(
                client=False, initial_values={codes.MAX_CONCURRENT_STREAMS: max_concurrent_streams}
            )

    # -- As a protocol

    def connection_made(self, wire: Wire) -> None:
        """Greet."""
        self.wire = wire
        self._h2.initiate_connection()
        self._flush()
        self.service.connected(self)

    def data_received(self, data: bytes) -> None:
        """Handle what has arrived."""
        if self.lost:
            return
        try:
            events = self._h2.receive_data(data)
        except h2.exceptions.ProtocolError:
            self._flush()
            self.close()
            return
        if any(isinstance(event, h2.events.ConnectionTerminated) for event in events):
            self.connection_lost(None)  # the client's GOAWAY: h2 sends nothing any more
            self.close()
            return
        # Resets first: h2 knows of them already and lets nothing be sent there. What was also begun was never there.
        dropped = {event.stream_id for event in events if isinstance(event, h2.events.StreamReset)}
        for stream_id in dropped:
            self._drop(stream_id)
        for event in events:
            if getattr(event, "stream_id", None) not in dropped:
                self._handle(event)
        self._flush()

    def eof_received(self) -> None:
        """The client has closed."""

    def connection_lost(self, error: BaseException | None) -> None:
        """The connection is gone, and all its calls with it."""
        del error
        self.lost = True
        calls = list(self.calls.values())
        self.calls.clear()
        for call in calls:
            call.over = True
            self.service.gone(call)

    def pause_writing(self) -> None:
        """Nobody reads; what waits may wait here."""

    def resume_writing(self) -> None:
        """The client reads again."""

    # -- What a server may do

    def announce_end(self) -> None:
        """Send the GOAWAY that only warns: calls that are under way to us are still taken, until :meth:`go_away`."""
        if not self.lost:
            self._send_goaway(MAX_STREAM_ID, 0)

    def go_away(self, *, code: int = 0, last_stream_id: int | None = None) -> None:
        """Send GOAWAY; the connection closes when the calls are over that are to be answered.

        Args:
            code: HTTP/2 error code.
            last_stream_id: Calls above it are dropped, even if they were begun; by default the last that has come.
        """
        if self.lost:
            return
        last = self._last_received if last_stream_id is None else last_stream_id
        self._send_goaway(last, code)
        self._ending = True
        for stream_id in [each for each in self.calls if each > last]:
            self._drop(stream_id)
        self._flush()

    def _send_goaway(self, last: int, code: int) -> None:
        if self.wire is not None:
            self._flush()
            payload = last.to_bytes(4, "big") + code.to_bytes(4, "big")
            self.wire.write(len(payload).to_bytes(3, "big") + bytes([_GOAWAY, 0]) + bytes(4) + payload)

    def limit_streams(self, count: int) -> None:
        """Announce another limit of streams."""
        if not self.lost:
            self._h2.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: count})
            self._flush()

    def close(self) -> None:
        """Close the connection."""
        if self.wire is not None:
            self.wire.close()

    def room(self, stream_id: int) -> int:
        """How many bytes of data may be sent now on a stream."""
        return min(self._h2.local_flow_control_window(stream_id), self._h2.max_outbound_frame_size)

    def send_headers(self, stream_id: int, headers: list[tuple[str, str]], *, end_stream: bool = False) -> None:
        """Send headers or trailers."""
        self.pings = 0
        self._h2.send_headers(stream_id, headers, end_stream=end_stream)
        if end_stream:
            self.calls.pop(stream_id, None)
        self._flush()

    def send_data(self, stream_id: int, data: bytes) -> None:
        """Send one DATA frame."""
        self.pings = 0
        self._h2.send_data(stream_id, data)
        self._flush()

    def send_reset(self, stream_id: int, code: int) -> None:
        """Send RST_STREAM."""
        self._h2.reset_stream(stream_id, code)
        self.calls.pop(stream_id, None)
        self._flush()

    # -- Inside

    def _flush(self) -> None:
        if self.wire is not None and (data := self._h2.data_to_send()):
            self.wire.write(data)
        if self._ending and not self.calls:
            self.close()

    def _handle(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                self._begin(event)
            case h2.events.DataReceived():
                if event.flow_controlled_length:
                    self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if (call := self.calls.get(event.stream_id)) is not None:
                    call.receive(event.data)
            case h2.events.StreamEnded():
                if (call := self.calls.get(event.stream_id)) is not None:
                    call.complete()
                    self.service.called(call)
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                for call in list(self.calls.values()):
                    call.flush()
            case h2.events.PingReceived():
                self.pings += 1
                self.most_pings = max(self.most_pings, self.pings)

    def _drop(self, stream_id: int) -> None:
        if (call := self.calls.pop(stream_id, None)) is not None:
            call.over = True
            self.service.gone(call)

    def _begin(self, event: Any) -> None:
        if self._ending:  # the GOAWAY has told, or will tell, that nothing was begun
            self._h2.reset_stream(event.stream_id, _REFUSED_STREAM)
            return
        self._last_received = event.stream_id
        headers = dict(event.headers)
        self.calls[event.stream_id] = MemoryCall(self, event.stream_id, headers[":path"])
