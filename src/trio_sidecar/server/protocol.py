"""The server's end of one HTTP/2 connection, on grpclib's protocol classes (asyncio-flavoured callbacks).

grpclib brings HTTP/2 events to streams; calls are ours (:mod:`trio_sidecar.server.call`), because grpclib's own handler
has no message limit, cancels running calls in silence at the end, and answers a compressed message with UNKNOWN.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import structlog
from grpclib.config import Configuration
from grpclib.protocol import AbstractHandler, Connection, EventsProcessor, H2Protocol
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from trio_sidecar.server.flood import MAX_UNREAD_BYTES

if TYPE_CHECKING:
    from trio_sidecar.bridge.listen import AioTransport

__all__ = ["ServerProtocol"]

STREAM_WINDOW_BYTES = 1 << 20
"""How much a client may send on one stream before the call takes it."""

CONNECTION_WINDOW_BYTES = 64 << 20
"""The same for all streams of a connection; far above one stream's, or one stalled call would block the others."""

INITIAL_WINDOW_BYTES = 65_535
"""What HTTP/2 gives a connection at its start."""

MAX_STREAMS = 1024
"""Calls that one connection may have open; the engine's own limit is what usually counts."""

MAX_HEADER_BYTES = 64 << 10

log = structlog.get_logger("trio_sidecar.server.protocol")


class ServerProtocol(H2Protocol):
    """One connection.

    Attributes:
        h2: The HTTP/2 state machine, once connected.
        transport: The byte stream, once connected.
        closed: Whether the connection is gone.
    """

    def __init__(self, handler: ConnectionHandler) -> None:
        # Header bytes are decoded by us, leniently: a strict decoder would end the connection for one odd byte.
        h2_config = H2Configuration(
            client_side=False,
            header_encoding=None,
            validate_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_inbound_headers=False,
            normalize_outbound_headers=False,
        )
        super().__init__(handler, Configuration().__for_server__(), h2_config)
        self.h2 = H2Connection(config=h2_config)
        self.transport: AioTransport | None = None
        self.closed = False
        self._connection_handler = handler

    def connection_made(self, transport: object) -> None:
        """Send our settings and begin."""
        self.transport = cast("AioTransport", transport)
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Not every loop does this by itself, and small writes would wait for the peer's delayed acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.h2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
            },
        )
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(CONNECTION_WINDOW_BYTES - INITIAL_WINDOW_BYTES)
        self.connection = Connection(self.h2, self.transport, config=self.config)
        self.connection.flush()
        self.connection.initialize()
        self.processor = EventsProcessor(self.handler, self.connection)
        self._connection_handler.connected(self)

    def data_received(self, data: bytes) -> None:
        """Handle what arrived; unlike grpclib, ignore frames of unknown kinds, as HTTP/2 demands."""
        try:
            events = self.connection.feed(data)
        except ProtocolError as error:
            log.debug("http2_protocol_error", reason=str(error))
            self.close()
            return
        for event in events:
            known = getattr(self.processor, "processors", None)
            if known is None:
                return  # a GOAWAY before it closed the connection
            if event.__class__ in known:
                self.processor.process(event)
        if not self.connection.is_closing():
            self.connection.flush()
            if self.transport is not None and self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                log.warning("client_does_not_read", unread_bytes=self.transport.get_write_buffer_size())
                self.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell every call."""
        self.closed = True
        super().connection_lost(exc)
        self._connection_handler.disconnected(self)

    def close(self, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Say GOAWAY and close when everything written is sent; calls still open are cancelled. Safe to repeat."""
        if self.closed or self.connection.is_closing():
            return
        # If HTTP/2 says it is closed already, what it has to say about that is in the buffer.
        with suppress(ProtocolError):
            self.h2.close_connection(error_code=code)
        self.connection.flush()
        self.processor.close("server closes the connection")

    def abort(self) -> None:
        """Close without waiting for a peer that does not read."""
        if self.transport is not None and not self.closed:
            self.transport.abort()


class ConnectionHandler(AbstractHandler):
    """What a connection reports to."""

    def connected(self, protocol: ServerProtocol) -> None:
        """The connection is up."""
        raise NotImplementedError

    def disconnected(self, protocol: ServerProtocol) -> None:
        """The connection is gone."""
        raise NotImplementedError
