"""The fallback: a connection on grpclib's documented interface only, for versions that the fast path does not know.

It keeps the interface, the status mapping, the limits on messages and the windows. What it cannot do, because grpclib
hides it: SETTINGS are not awaited and the peer's stream limit is unknown, so a low limit is assumed; any GOAWAY ends
all streams of the connection; a stream left early is reset with code 0 instead of CANCEL; a loss is noticed at the
next call.
"""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import trio
from grpclib.client import Channel
from grpclib.const import Cardinality
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.exceptions import ProtocolError as GrpclibProtocolError
from h2.exceptions import H2Error

from trio_sidecar.bridge import aio_timeout
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.transport.connection import ConnectionState, NotProcessed, log
from trio_sidecar.transport.framing import check_metadata, status_of_reset
from trio_sidecar.transport.handshake import aio_handshake, channel_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from trio_sidecar.transport.connection import Connection, ConnectionSettings

__all__ = ["PublicConnection", "aio_connect"]

_ASSUMED_STREAM_LIMIT = 100
"""The lowest that HTTP/2 recommends (RFC 9113, 6.5.2)."""

_TRAILERS_SECS = 0.5
"""Trailers come with the end of the stream, so they are there already; this is only for those that never come."""

_RESET_CODE = re.compile(r"reset by remote party, error_code: (?:\w+\.\w+ )?(\d+)")


class _Bytes(CodecBase):
    """Leaves encoding to the caller."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:  # noqa: ARG002
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> Any:  # noqa: ARG002
        return data


class PublicConnection:
    """See :class:`~trio_sidecar.transport.connection.Connection`."""

    stream_limit = _ASSUMED_STREAM_LIMIT
    heard = 0
    too_many_pings = False

    def __init__(self, settings: ConnectionSettings, on_change: Callable[[Connection], None]) -> None:
        self.settings = settings
        self.state = ConnectionState.READY
        self.reason = ""
        self.closed = trio.Event()
        self.open_streams = 0
        self._connected = False
        self._on_change = on_change
        self.channel = Channel(codec=_Bytes(), **channel_arguments(settings))

    def __repr__(self) -> str:
        """Endpoint, state and load."""
        return f"<PublicConnection {self.settings.endpoint.label}: {self.state.value}, {self.open_streams} streams>"

    def aio_open(
        self, path: str, request: bytes, *, metadata: Mapping[str, str], timeout_secs: float | None = None
    ) -> _PublicCall:
        """Send one request."""
        for key, value in metadata.items():
            check_metadata(key, value)
        return _PublicCall(self, path, request, dict(metadata), timeout_secs)

    async def aio_ping(self) -> None:
        """Return at once: grpclib sends no pings on demand."""

    def close(self, reason: str) -> None:
        """Fail all streams and close."""
        if self.state is not ConnectionState.CLOSED:
            self.state = ConnectionState.CLOSED
            self.reason = reason
            self.channel.close()
            if not self._connected:
                self.closed.set()
            self._on_change(self)

    async def aio_establish(self) -> None:
        """Connect; grpclib reports no SETTINGS."""
        try:
            protocol = await aio_handshake(self.channel, self.settings)
        except BaseException:
            self.channel.close()
            raise
        lost = protocol.connection_lost

        def connection_lost(error: BaseException | None) -> None:
            lost(error)
            self.closed.set()

        protocol.connection_lost = connection_lost  # type: ignore[assignment,method-assign]
        self._connected = True

    def entered(self, change: int) -> None:
        """A stream was opened (1) or left (-1)."""
        self.open_streams += change
        if change < 0 and self.state is not ConnectionState.CLOSED:
            self._on_change(self)

    def translated(self, error: Exception) -> RpcError:
        """Our error for one of grpclib's; a lost connection is given up, since grpclib would replace it unseen."""
        if isinstance(error, GRPCError):
            return RpcError(StatusCode(error.status.value), error.message or "")
        if isinstance(error, StreamTerminatedError) and (match := _RESET_CODE.search(str(error))):
            code = int(match[1])
            self.settings.meter.note_reset(code)
            return RpcError(status_of_reset(code), f"the peer reset the stream (HTTP/2 error code {code})")
        if isinstance(error, NotImplementedError):
            return RpcError(StatusCode.INTERNAL, "the peer sent a compressed message, unasked")
        if isinstance(error, AssertionError):  # grpclib's only sign of an end within a message
            return RpcError(StatusCode.INTERNAL, "the stream ended within a message")
        reason = self.reason or str(error) or type(error).__name__
        self.close(reason)
        return RpcError(StatusCode.UNAVAILABLE, f"lost the connection to {self.settings.endpoint.label}: {reason}")


_GRPCLIB_ERRORS = (
    GRPCError,
    StreamTerminatedError,
    GrpclibProtocolError,
    H2Error,
    OSError,
    AssertionError,
    AttributeError,
    NotImplementedError,
)


class _PublicCall(AbstractAsyncContextManager["_PublicStream", None]):
    """The context manager around a stream."""

    def __init__(
        self,
        connection: PublicConnection,
        path: str,
        request: bytes,
        metadata: dict[str, str],
        timeout_secs: float | None,
    ) -> None:
        self._connection = connection
        self._request = request
        self._stream = connection.channel.request(
            path, Cardinality.UNARY_STREAM, bytes, bytes, timeout=timeout_secs, metadata=metadata
        )

    async def __aenter__(self) -> _PublicStream:
        connection = self._connection
        if connection.state is not ConnectionState.READY:
            reason = f"the connection to {connection.settings.endpoint.label} is closed: {connection.reason}"
            raise NotProcessed(reason)
        connection.entered(1)
        try:
            await self._stream.__aenter__()
            await self._stream.send_message(self._request, end=True)
            await self._stream.recv_initial_metadata()
        except _GRPCLIB_ERRORS as error:
            await self._aio_leave()  # noqa: ASYNC120 - asyncio-flavoured, and it does not block
            raise connection.translated(error) from error
        except BaseException:
            await self._aio_leave()  # noqa: ASYNC102, ASYNC120 - asyncio-flavoured, and it does not block
            raise
        return _PublicStream(connection, self._stream)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._aio_leave()  # noqa: ASYNC102 - as above

    async def _aio_leave(self) -> None:
        try:
            if self._connection.state is not ConnectionState.CLOSED:
                await self._stream.cancel()
        except (*_GRPCLIB_ERRORS, RuntimeError) as error:
            log.debug("reset_not_sent", error=str(error))
        finally:
            await self._aio_forget()  # noqa: ASYNC102 - as above
            self._connection.entered(-1)

    async def _aio_forget(self) -> None:
        """Let grpclib drop its books on the stream; the error tells it not to wait for the peer."""
        left = StreamTerminatedError("left early")
        try:
            await self._stream.__aexit__(StreamTerminatedError, left, None)
        except (*_GRPCLIB_ERRORS, KeyError, RuntimeError) as error:
            log.debug("stream_not_forgotten", error=str(error))


class _PublicStream:
    """See :class:`~trio_sidecar.transport.connection.RawStream`."""

    def __init__(self, connection: PublicConnection, stream: Any) -> None:
        self._connection = connection
        self._stream = stream
        self.headers = {key: str(value) for key, value in (stream.initial_metadata or {}).items()}

    async def _aio_end(self) -> None:
        """Read the status; if the stream ended without trailers, grpclib would wait for them for ever."""
        limit = aio_timeout(_TRAILERS_SECS)
        try:
            async with limit:
                await self._stream.recv_trailing_metadata()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RpcError(StatusCode.UNKNOWN, "the response has no grpc-status") from error

    async def aio_receive(self) -> list[bytes]:
        """Wait for one message."""
        try:
            message = await self._stream.recv_message()
            if message is None:
                await self._aio_end()
                return []
        except _GRPCLIB_ERRORS as error:
            raise self._connection.translated(error) from error
        limit = self._connection.settings.max_message_bytes
        if len(message) > limit:
            raise RpcError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"the peer sent a message of {len(message)} bytes, more than the limit of {limit}",
            )
        return [message]


async def aio_connect(settings: ConnectionSettings, on_change: Callable[[Connection], None]) -> PublicConnection:
    """Connect; see :func:`trio_sidecar.transport.dial.aio_connect`."""
    connection = PublicConnection(settings, on_change)
    await connection.aio_establish()
    return connection
