"""The receive path that matches a C core's cost, on private parts of grpclib and h2; nothing else touches those.

grpclib makes the connection; h2 keeps its state, HPACK and windows. What is ours:

- Bytes are cut into frames as they arrive. Plain DATA frames, nearly all of a token stream, go past h2 to
  their stream, with both windows counted as h2 would. Everything else is handed to h2 in the order in which it came.
- A stream splits messages synchronously. Its reader is woken once and takes all complete messages.
- GOAWAY never reaches h2, which would refuse every later frame: no new streams, the open ones finish (E1).
- DATA for a stream that we have reset is dropped here. h2 would answer each such frame with another RST_STREAM, which
  servers count as an attack.
- A stream that is left early is reset with CANCEL at once (E5), even if writing is paused.
- Header bytes are decoded by us, leniently: one odd header must not take a connection with all its streams down.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

import trio
from grpclib.client import Channel, Handler
from grpclib.config import Configuration
from grpclib.protocol import Connection as GrpclibConnection
from grpclib.protocol import EventsProcessor, H2Protocol
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import FrameTooLargeError, NoAvailableStreamIDError, ProtocolError, TooManyStreamsError
from h2.settings import SettingCodes, Settings

from trio_sidecar.bridge import AioEvent
from trio_sidecar.errors import ConnectError, RpcError, StatusCode
from trio_sidecar.transport.connection import ConnectionState, NotProcessed, log
from trio_sidecar.transport.faststream import FastCall
from trio_sidecar.transport.framing import request_headers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trio_sidecar.transport.connection import Connection, ConnectionSettings
    from trio_sidecar.transport.faststream import FastStream

__all__ = ["FastConnection", "aio_connect", "unsupported"]

_GRPCLIB_VERSIONS = ("0.4.9",)
_H2_VERSIONS = ("4.4",)

_FRAME_HEADER_BYTES = 9
_MAX_FRAME_BYTES = 16384
_DATA = 0
_GOAWAY = 7
_STREAM_ID_MASK = 0x7FFFFFFF


def unsupported() -> str | None:
    """Why the fast path cannot be used with what is installed; None if it can."""
    for package, versions in (("grpclib", _GRPCLIB_VERSIONS), ("h2", _H2_VERSIONS)):
        installed = importlib.metadata.version(package)
        if installed not in versions and ".".join(installed.split(".")[:2]) not in versions:
            return f"{package} {installed} is installed, tested are {', '.join(versions)}"
    return None


class FastConnection:
    """See :class:`~trio_sidecar.transport.connection.Connection`."""

    def __init__(self, settings: ConnectionSettings, on_change: Callable[[Connection], None]) -> None:
        self.settings = settings
        self.state = ConnectionState.READY
        self.reason = ""
        self.closed = trio.Event()
        self.streams: dict[int, FastStream] = {}
        self.senders: set[FastStream] = set()
        self._on_change = on_change
        self._changed = AioEvent()
        self._settled = False
        self._pings: dict[bytes, AioEvent] = {}
        self._channel = _FastChannel(self)
        self._protocol: _FastProtocol | None = None

    def __repr__(self) -> str:
        """Endpoint, state and load."""
        return f"<FastConnection {self.settings.endpoint.authority}: {self.state.value}, {self.open_streams} streams>"

    # -- Interface of a connection

    @property
    def stream_limit(self) -> int:
        """The peer's SETTINGS_MAX_CONCURRENT_STREAMS."""
        return self.h2.remote_settings.max_concurrent_streams

    @property
    def open_streams(self) -> int:
        """Streams that are on the wire."""
        return len(self.streams)

    def aio_open(
        self, path: str, request: bytes, *, metadata: Mapping[str, str], timeout_secs: float | None = None
    ) -> FastCall:
        """Send one request."""
        endpoint = self.settings.endpoint
        headers = request_headers(
            path=path, authority=endpoint.authority, scheme="http", metadata=metadata, timeout_secs=timeout_secs
        )
        return FastCall(self, headers, request)

    async def aio_ping(self) -> None:
        """Return when the peer has answered a ping."""
        self.check_usable()
        payload = (len(self._pings) + 1).to_bytes(8, "big")
        answered = self._pings[payload] = AioEvent()
        try:
            self.h2.ping(payload)
            self.flush()
            await answered.aio_wait()
        finally:
            self._pings.pop(payload, None)
        if self.state is ConnectionState.CLOSED:
            raise RpcError(StatusCode.UNAVAILABLE, self.reason)

    def close(self, reason: str, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Fail all streams and close; the code tells the peer why."""
        if self.state is ConnectionState.CLOSED or self._protocol is None:
            return
        self._end(reason)
        transport = self._protocol.transport
        try:
            self.h2.close_connection(code)
            transport.write(self.h2.data_to_send())
        except ProtocolError:  # h2 has closed the connection already
            pass
        if transport.get_write_buffer_size():
            transport.abort()  # a peer that does not read must not keep the socket alive
        else:
            transport.close()

    # -- For streams

    @property
    def h2(self) -> H2Connection:
        """h2's connection."""
        return self.protocol.connection._connection  # noqa: SLF001

    @property
    def protocol(self) -> _FastProtocol:
        """The asyncio protocol; there is one from the moment the socket is connected."""
        assert self._protocol is not None  # noqa: S101 - nobody holds a connection earlier
        return self._protocol

    def check_usable(self) -> None:
        """Raise NotProcessed unless a stream may be opened."""
        if self.state is not ConnectionState.READY:
            reason = f"the connection to {self.settings.endpoint.authority} is {self.state.value}: {self.reason}"
            raise NotProcessed(reason)

    async def aio_writable(self) -> None:
        """Wait while the socket takes nothing; returns at once when the connection is lost."""
        await self.protocol.connection.write_ready.wait()

    def begin(self, stream: FastStream, headers: list[tuple[str, str]]) -> int:
        """Put the request's headers on the wire's queue; return the stream's id."""
        self.check_usable()
        h2 = self.h2
        try:
            stream_id = h2.get_next_available_stream_id()
            h2.send_headers(stream_id, headers)
        except TooManyStreamsError:
            reason = f"{self.settings.endpoint.authority} allows {self.stream_limit} streams at once"
            raise NotProcessed(reason) from None
        except NoAvailableStreamIDError:
            reason = "all stream ids are used up"
            self.drain(reason)
            raise NotProcessed(reason) from None
        stream.window = h2.streams[stream_id]._inbound_window_manager  # noqa: SLF001
        self.streams[stream_id] = stream
        self.protocol.last_opened = stream_id
        return stream_id

    def flush(self) -> None:
        """Write what h2 has queued."""
        if self.state is not ConnectionState.CLOSED and (data := self.h2.data_to_send()):
            self.protocol.transport.write(data)

    def acknowledge(self, stream_id: int, size: int) -> None:
        """Give window back to the peer for bytes that were taken."""
        if self.state is not ConnectionState.CLOSED:
            self.h2.acknowledge_received_data(size, stream_id)
            self.flush()

    def leave(self, stream: FastStream) -> None:
        """Forget a stream: reset it with CANCEL unless it is over, and return its window to the connection."""
        if self.streams.pop(stream.id, None) is None:
            return
        self.senders.discard(stream)
        if self.state is ConnectionState.CLOSED:
            return
        h2_stream = self.h2.streams.get(stream.id)
        if h2_stream is not None and not h2_stream.closed:
            self.h2.reset_stream(stream.id, ErrorCodes.CANCEL)
        if stream.unacknowledged:
            self.h2.acknowledge_received_data(stream.unacknowledged, stream.id)
            stream.unacknowledged = 0
        self.flush()
        if self.state is ConnectionState.DRAINING and not self.streams:
            self.close(self.reason)
        else:
            self._on_change(self)

    # -- For the protocol

    def connected(self, protocol: _FastProtocol) -> None:
        """The socket is connected."""
        self._protocol = protocol

    def settings_changed(self) -> None:
        """The peer's SETTINGS have arrived, perhaps anew."""
        self._settled = True
        self._changed.set()
        self.wake_senders()
        self._on_change(self)

    def ping_answered(self, payload: bytes) -> None:
        """The peer has answered a ping."""
        if (answered := self._pings.get(payload)) is not None:
            answered.set()

    def wake_senders(self) -> None:
        """Let streams that wait for window or for the socket look again."""
        for stream in self.senders:
            stream.wake()

    def drain(self, reason: str, last_stream_id: int = _STREAM_ID_MASK) -> None:
        """Take no new streams; those above the given id will not be answered."""
        if self.state is ConnectionState.CLOSED:
            return
        self.state = ConnectionState.DRAINING
        self.reason = reason
        for stream_id, stream in list(self.streams.items()):
            if stream_id > last_stream_id:
                stream.fail(NotProcessed(f"{self.settings.endpoint.authority} has not begun the call: {reason}"))
        self._changed.set()
        if self.streams:
            self._on_change(self)
        else:
            self.close(reason)

    def lost(self, reason: str) -> None:
        """The socket is gone."""
        self._end(reason)
        self._channel.close()
        self.closed.set()

    def abort(self) -> None:
        """Drop the connection without a word, for one that was never handed out."""
        if self._protocol is not None:
            self._end("the connection attempt was given up")
            self._protocol.transport.abort()

    def _end(self, reason: str) -> None:
        """Fail everything that waits for this connection, once."""
        if self.state is ConnectionState.CLOSED:
            return
        self.state = ConnectionState.CLOSED
        self.reason = reason
        streams = list(self.streams.values())
        self.streams.clear()
        self.senders.clear()
        for stream in streams:
            stream.fail(
                RpcError(StatusCode.UNAVAILABLE, f"lost the connection to {self.settings.endpoint.authority}: {reason}")
            )
        for answered in self._pings.values():
            answered.set()
        self.protocol.connection.write_ready.set()
        self._changed.set()
        self._on_change(self)

    async def aio_establish(self) -> None:
        """Connect and wait for the peer's SETTINGS."""
        try:
            await self._channel.__connect__()
            while not self._settled and self.state is ConnectionState.READY:
                self._changed.clear()
                await self._changed.aio_wait()
        except BaseException:
            self.abort()
            raise
        if self.state is not ConnectionState.READY:
            self.abort()
            reason = f"{self.settings.endpoint.authority} did not greet as an HTTP/2 server: {self.reason}"
            raise ConnectError(reason)


class _FastChannel(Channel):
    """grpclib's way to a connected socket, with our protocol on it."""

    def __init__(self, owner: FastConnection) -> None:
        endpoint = owner.settings.endpoint
        config = Configuration(
            http2_connection_window_size=owner.settings.connection_window_bytes,
            http2_stream_window_size=owner.settings.stream_window_bytes,
        )
        super().__init__(endpoint.host, endpoint.port, config=config)
        self._owner = owner

    def _protocol_factory(self) -> H2Protocol:
        return _FastProtocol(self._owner, self._config)


class _FastProtocol(H2Protocol):
    """Cuts bytes into frames and hands each where it belongs."""

    def __init__(self, owner: FastConnection, config: Configuration) -> None:
        # Header bytes stay bytes: h2's own decoding raises on any that are not in the expected encoding.
        super().__init__(
            Handler(),
            config,
            H2Configuration(
                client_side=True,
                header_encoding=None,
                validate_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_inbound_headers=False,
                normalize_outbound_headers=False,
            ),
        )
        self.owner = owner
        self.last_opened = 0
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.owner.connected(self)
        h2 = H2Connection(config=self.h2_config)
        h2.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: self.config.http2_stream_window_size,
                SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE,
            },
        )
        h2.initiate_connection()
        h2.increment_flow_control_window(self.config.http2_connection_window_size - h2.inbound_flow_control_window)
        self._connection_window = h2._inbound_flow_control_window_manager  # noqa: SLF001
        self.connection = GrpclibConnection(h2, transport, config=self.config)
        self.processor = _FastProcessor(self.owner, self.connection)
        self.connection.flush()

    def data_received(self, data: bytes) -> None:
        if self.owner.state is ConnectionState.CLOSED:
            return
        try:
            self._split(self._tail + data if self._tail else data)
        except ProtocolError as error:
            self.owner.flush()  # where h2 found the fault, it has queued a GOAWAY
            self.owner.close(f"HTTP/2 protocol error: {str(error) or type(error).__name__}", error.error_code)
        else:
            self.owner.flush()

    def resume_writing(self) -> None:
        self.connection.resume_writing()
        self.owner.wake_senders()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.owner.lost("the peer closed the connection" if exc is None else str(exc) or type(exc).__name__)

    def _split(self, data: bytes) -> None:
        """Walk over the frames; ``start`` is the first byte that h2 still has to see."""
        size = len(data)
        at = start = 0
        streams = self.owner.streams
        while size - at >= _FRAME_HEADER_BYTES:
            length = (data[at] << 16) | (data[at + 1] << 8) | data[at + 2]
            kind = data[at + 3]
            end = at + _FRAME_HEADER_BYTES + length
            if length > _MAX_FRAME_BYTES:  # refused by its header: h2 would first wait for the rest
                reason = f"a frame of {length} bytes, more than the limit of {_MAX_FRAME_BYTES}"
                raise FrameTooLargeError(reason)
            if end > size:
                break
            if kind == _DATA:
                stream_id = int.from_bytes(data[at + 5 : at + 9], "big") & _STREAM_ID_MASK
                stream = streams.get(stream_id)
                if stream is None or not data[at + 4]:
                    if at > start:
                        self._feed(data[start:at])
                        start = at
                    if self._bypass(stream_id, data, at, end):
                        start = end
            elif kind == _GOAWAY:
                if at > start:
                    self._feed(data[start:at])
                start = end
                self._goaway(data[at + _FRAME_HEADER_BYTES : end])
            at = end
        self._tail = data[at:] if at < size else b""
        if at > start:
            self._feed(data[start:at])

    def _bypass(self, stream_id: int, data: bytes, at: int, end: int) -> bool:
        """Deliver a DATA frame without h2; False if h2 has to see it."""
        length = end - at - _FRAME_HEADER_BYTES
        stream = self.owner.streams.get(stream_id)
        if stream is None:
            if not stream_id & 1 or stream_id > self.last_opened:
                return False
            self._connection_window.window_consumed(length)
            self.owner.acknowledge(stream_id, length)
            return True
        if not stream.direct or data[at + 4]:
            return False
        self._connection_window.window_consumed(length)
        stream.window.window_consumed(length)
        stream.add(data[at + _FRAME_HEADER_BYTES : end], length)
        return True

    def _feed(self, data: bytes) -> None:
        for event in self.connection.feed(data):
            self.processor.process(event)

    def _goaway(self, payload: bytes) -> None:
        last = int.from_bytes(payload[:4], "big") & _STREAM_ID_MASK
        code = int.from_bytes(payload[4:8], "big")
        debug = payload[8:208].decode("ascii", "replace")
        reason = f"the peer sent GOAWAY (code {code}{f', {debug}' if debug else ''})"
        (log.warning if code else log.info)(
            "connection_draining", endpoint=self.owner.settings.endpoint.authority, code=code, debug=debug
        )
        self.owner.drain(reason, last)


class _FastProcessor(EventsProcessor):
    """Carries h2's events to our streams; events that mean nothing to us are dropped, not fatal."""

    def __init__(self, owner: FastConnection, connection: GrpclibConnection) -> None:
        super().__init__(Handler(), connection)
        self.owner = owner

    def process(self, event: Any) -> None:
        process: Callable[[Any], None] | None = self.processors.get(type(event))  # type: ignore[assignment]
        if process is not None:
            process(event)

    def close(self, reason: str = "closed") -> None:
        self.owner.close(reason)

    def process_remote_settings_changed(self, event: Any) -> None:  # noqa: ARG002
        self.owner.settings_changed()

    def process_window_updated(self, event: Any) -> None:
        if event.stream_id == 0:
            self.owner.wake_senders()
        elif (stream := self.owner.streams.get(event.stream_id)) in self.owner.senders:
            stream.wake()

    def process_response_received(self, event: Any) -> None:
        if (stream := self.owner.streams.get(event.stream_id)) is not None:
            stream.on_headers(event.headers)

    def process_data_received(self, event: Any) -> None:
        if (stream := self.owner.streams.get(event.stream_id)) is not None:
            stream.add(event.data, event.flow_controlled_length)
        else:
            self.owner.acknowledge(event.stream_id, event.flow_controlled_length)

    def process_trailers_received(self, event: Any) -> None:
        if (stream := self.owner.streams.get(event.stream_id)) is not None:
            stream.on_trailers(event.headers)

    def process_stream_ended(self, event: Any) -> None:
        if (stream := self.owner.streams.get(event.stream_id)) is not None:
            stream.on_end()

    def process_stream_reset(self, event: Any) -> None:
        if (stream := self.owner.streams.get(event.stream_id)) is not None:
            stream.on_reset(int(event.error_code), by_peer=event.remote_reset)

    def process_ping_ack_received(self, event: Any) -> None:
        self.owner.ping_answered(event.ping_data)


async def aio_connect(settings: ConnectionSettings, on_change: Callable[[Connection], None]) -> FastConnection:
    """Connect; see :func:`trio_sidecar.transport.dial.aio_connect`."""
    connection = FastConnection(settings, on_change)
    await connection.aio_establish()
    return connection
