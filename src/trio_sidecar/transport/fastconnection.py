"""One HTTP/2 connection with our receive path: its state, its streams, and who is told what happens to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from h2.errors import ErrorCodes
from h2.exceptions import NoAvailableStreamIDError, ProtocolError, TooManyStreamsError

from trio_sidecar.bridge import AioEvent
from trio_sidecar.errors import ConnectError, RpcError, StatusCode
from trio_sidecar.transport.connection import ConnectionState, NotProcessed
from trio_sidecar.transport.fastpath import MAX_STREAM_ID, FastChannel
from trio_sidecar.transport.faststream import FastCall
from trio_sidecar.transport.framing import request_headers
from trio_sidecar.transport.handshake import aio_handshake, loss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from h2.connection import H2Connection

    from trio_sidecar.transport.connection import Connection, ConnectionSettings
    from trio_sidecar.transport.fastpath import FastProtocol
    from trio_sidecar.transport.faststream import FastStream

__all__ = ["FastConnection", "aio_connect"]


class FastConnection:
    """See :class:`~trio_sidecar.transport.connection.Connection`."""

    def __init__(self, settings: ConnectionSettings, on_change: Callable[[Connection], None]) -> None:
        self.settings = settings
        self.state = ConnectionState.READY
        self.reason = ""
        self.closed = trio.Event()
        self.heard = 0
        self.too_many_pings = False
        self.streams: dict[int, FastStream] = {}
        self.senders: set[FastStream] = set()
        self._on_change = on_change
        self._changed = AioEvent()
        self._settled = False
        self._pings: dict[bytes, AioEvent] = {}
        self._pinged = 0
        self._channel = FastChannel(self)
        self._protocol: FastProtocol | None = None

    def __repr__(self) -> str:
        """Endpoint, state and load."""
        return f"<FastConnection {self.settings.endpoint.label}: {self.state.value}, {self.open_streams} streams>"

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
        settings = self.settings
        headers = request_headers(
            path=path,
            authority=settings.endpoint.authority,
            scheme="http" if settings.tls is None else "https",
            metadata=metadata,
            timeout_secs=timeout_secs,
        )
        return FastCall(self, headers, request)

    async def aio_ping(self) -> None:
        """Return when the peer has answered a ping."""
        self.check_open()
        self._pinged += 1
        payload = self._pinged.to_bytes(8, "big")
        answered = self._pings[payload] = AioEvent()
        try:
            self.h2.ping(payload)
            self.flush()
            await answered.aio_wait()
        finally:
            del self._pings[payload]
        self.check_open()

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
        return self.protocol.h2

    @property
    def protocol(self) -> FastProtocol:
        """The asyncio protocol; there is one from the moment the socket is connected."""
        assert self._protocol is not None  # noqa: S101 - nobody holds a connection earlier
        return self._protocol

    def check_usable(self) -> None:
        """Raise NotProcessed unless a stream may be opened."""
        if self.state is not ConnectionState.READY:
            reason = f"the connection to {self.settings.endpoint.label} is {self.state.value}: {self.reason}"
            raise NotProcessed(reason)

    def check_open(self) -> None:
        """Raise an RpcError if the connection is lost."""
        if self.state is ConnectionState.CLOSED:
            raise RpcError(StatusCode.UNAVAILABLE, self.reason)

    async def aio_writable(self) -> None:
        """Wait while the socket takes nothing; returns at once when the connection is lost."""
        await self.protocol.aio_writable()

    def begin(self, stream: FastStream, headers: list[tuple[str, str]]) -> int:
        """Put the request's headers on the wire's queue; return the stream's id."""
        self.check_usable()
        h2 = self.h2
        try:
            stream_id = h2.get_next_available_stream_id()
            h2.send_headers(stream_id, headers)
        except TooManyStreamsError:
            reason = f"{self.settings.endpoint.label} allows {self.stream_limit} streams at once"
            raise NotProcessed(reason) from None
        except NoAvailableStreamIDError:
            reason = "all stream ids are used up"
            self.drain(reason)
            raise NotProcessed(reason) from None
        stream.window = self.protocol.stream_window(stream_id)
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

    def connected(self, protocol: FastProtocol) -> None:
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

    def drain(self, reason: str, last_stream_id: int = MAX_STREAM_ID) -> None:
        """Take no new streams; those above the given id will not be answered."""
        if self.state is ConnectionState.CLOSED:
            return
        self.state = ConnectionState.DRAINING
        self.reason = reason
        for stream_id, stream in list(self.streams.items()):
            if stream_id > last_stream_id:
                stream.fail(NotProcessed(f"{self.settings.endpoint.label} has not begun the call: {reason}"))
        self._changed.set()
        if self.streams:
            self._on_change(self)
        else:
            self.close(reason)

    def lost(self, error: BaseException | None, unread: bytes) -> None:
        """The socket is gone."""
        self._end(loss(error, self.settings, greeted=self._settled, unread=unread))
        self._channel.close()
        self.closed.set()

    def abort(self) -> None:
        """Drop the connection without a word, for one that was never handed out."""
        if self._protocol is not None:
            self._end("the connection attempt was given up")
            self._protocol.transport.abort()
        self._channel.close()  # here too: a connection may be lost before the channel knows that it has one

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
                RpcError(StatusCode.UNAVAILABLE, f"lost the connection to {self.settings.endpoint.label}: {reason}")
            )
        for answered in self._pings.values():
            answered.set()
        self.protocol.resume_writing()
        self._changed.set()
        self._on_change(self)

    async def aio_establish(self) -> None:
        """Connect and wait for the peer's SETTINGS."""
        try:
            await aio_handshake(self._channel, self.settings)
            while not self._settled and self.state is ConnectionState.READY:
                self._changed.clear()
                await self._changed.aio_wait()
        except BaseException:
            self.abort()
            raise
        if self.state is not ConnectionState.READY:
            self.abort()
            reason = f"{self.settings.endpoint.label} did not greet as an HTTP/2 server: {self.reason}"
            raise ConnectError(reason)


async def aio_connect(settings: ConnectionSettings, on_change: Callable[[Connection], None]) -> FastConnection:
    """Connect; see :func:`trio_sidecar.transport.dial.aio_connect`."""
    connection = FastConnection(settings, on_change)
    await connection.aio_establish()
    return connection
