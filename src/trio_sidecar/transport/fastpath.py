"""The receive path that matches a C core's cost, on private parts of grpclib and h2; nothing else touches those.

grpclib makes the connection; h2 keeps its state, HPACK and windows. What is ours:

- Bytes are cut into frames as they arrive. Plain DATA frames, nearly all of a token stream, go past h2 to
  their stream, with both windows counted as h2 would. Everything else is handed to h2 in the order in which it came.
- A stream (:mod:`~trio_sidecar.transport.faststream`) splits messages synchronously. Its reader is woken once and takes
  all complete messages.
- GOAWAY never reaches h2, which would refuse every later frame: no new streams, the open ones finish (E1).
- DATA for a stream that we have reset is dropped here. h2 would answer each such frame with another RST_STREAM, which
  servers count as an attack.
- A stream that is left early is reset with CANCEL at once (E5), even if writing is paused.
- Header bytes are decoded by us, leniently: one odd header must not take a connection with all its streams down.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from grpclib.client import Channel, Handler
from grpclib.protocol import Connection as GrpclibConnection
from grpclib.protocol import EventsProcessor, H2Protocol
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import FrameTooLargeError, ProtocolError
from h2.settings import SettingCodes, Settings

from trio_sidecar.transport.connection import ConnectionState, log
from trio_sidecar.transport.handshake import channel_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpclib.config import Configuration
    from h2.windows import WindowManager

    from trio_sidecar.transport.fastconnection import FastConnection

__all__ = ["MAX_STREAM_ID", "FastChannel", "FastProtocol", "unsupported"]

_GRPCLIB_VERSIONS = ("0.4.9",)
_H2_VERSIONS = ("4.1", "4.2", "4.3", "4.4")

_FRAME_HEADER_BYTES = 9
_MAX_FRAME_BYTES = 16384
_DATA = 0
_HEADERS = 1
_GOAWAY = 7
MAX_STREAM_ID = 0x7FFFFFFF


def unsupported() -> str | None:
    """Why the fast path cannot be used with what is installed; None if it can."""
    for package, versions in (("grpclib", _GRPCLIB_VERSIONS), ("h2", _H2_VERSIONS)):
        installed = importlib.metadata.version(package)
        if installed not in versions and ".".join(installed.split(".")[:2]) not in versions:
            return f"{package} {installed} is installed, tested are {', '.join(versions)}"
    return None


class FastChannel(Channel):
    """grpclib's way to a connected socket, with our protocol on it."""

    def __init__(self, owner: FastConnection) -> None:
        super().__init__(**channel_arguments(owner.settings))
        self._owner = owner

    def _protocol_factory(self) -> H2Protocol:
        return FastProtocol(self._owner, self._config)


class FastProtocol(H2Protocol):
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
        """The socket is connected: greet."""
        self.transport = transport
        self.owner.connected(self)
        h2 = self.h2 = H2Connection(config=self.h2_config)
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

    @property
    def writable(self) -> bool:
        """Whether the socket takes more."""
        return self.connection.write_ready.is_set()

    async def aio_writable(self) -> None:
        """Wait until the socket takes more (asyncio-flavoured)."""
        await self.connection.write_ready.wait()

    def stream_window(self, stream_id: int) -> WindowManager:
        """h2's book on what the peer may still send on a stream."""
        return self.h2.streams[stream_id]._inbound_window_manager  # noqa: SLF001

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
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
        """The socket takes more again; also called when the connection ends, so that nobody waits for that."""
        self.connection.resume_writing()
        self.owner.wake_senders()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The socket is gone."""
        self.owner.lost(exc, self._tail)

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
            if kind <= _HEADERS:
                self.owner.heard += 1
            if kind == _DATA:
                stream_id = int.from_bytes(data[at + 5 : at + 9], "big") & MAX_STREAM_ID
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
        """Deliver a DATA frame without flags, or one that comes too late, without h2; False if h2 has to see it."""
        length = end - at - _FRAME_HEADER_BYTES
        stream = self.owner.streams.get(stream_id)
        if stream is None:
            if not stream_id & 1 or stream_id > self.last_opened:
                return False
            self._connection_window.window_consumed(length)
            self.owner.acknowledge(stream_id, length)
            return True
        if not stream.direct:
            return False
        self._connection_window.window_consumed(length)
        stream.window.window_consumed(length)
        stream.add(data[at + _FRAME_HEADER_BYTES : end], length)
        return True

    def _feed(self, data: bytes) -> None:
        for event in self.connection.feed(data):
            self.processor.process(event)

    def _goaway(self, payload: bytes) -> None:
        last = int.from_bytes(payload[:4], "big") & MAX_STREAM_ID
        code = int.from_bytes(payload[4:8], "big")
        debug = payload[8:208].decode("ascii", "replace")
        reason = f"the peer sent GOAWAY (code {code}{f', {debug}' if debug else ''})"
        (log.warning if code else log.info)(
            "connection_draining", endpoint=self.owner.settings.endpoint.label, code=code, debug=debug
        )
        self.owner.too_many_pings = code == ErrorCodes.ENHANCE_YOUR_CALM
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

    def process_request_received(self, event: Any) -> None:
        # h2 lets a server open a stream of its own, and grpclib's handler knows no answer to that.
        reason = f"the server opened stream {event.stream_id}"
        raise ProtocolError(reason)

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
        if event.remote_reset:
            self.owner.settings.meter.note_reset(int(event.error_code))
        if (stream := self.owner.streams.get(event.stream_id)) is not None:
            stream.on_reset(int(event.error_code), by_peer=event.remote_reset)

    def process_ping_ack_received(self, event: Any) -> None:
        self.owner.ping_answered(event.ping_data)
