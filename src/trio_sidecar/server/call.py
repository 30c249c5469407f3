"""One call on the server's side: reading its request, writing answers, and ending exactly once (asyncio-flavoured)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import betterproto2
import structlog
from h2.exceptions import ProtocolError

from trio_sidecar.bridge import AioCancelled, aio_now
from trio_sidecar.bridge.listen import aio_call_later
from trio_sidecar.errors import RpcError, SidecarError, StatusCode
from trio_sidecar.server.headers import RESPONSE_HEADERS, trailers
from trio_sidecar.wire.codec import DecodeError, decode, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from grpclib.protocol import Stream

    from trio_sidecar.bridge.listen import AioTask
    from trio_sidecar.server.headers import RequestHeaders
    from trio_sidecar.server.protocol import ServerProtocol

__all__ = ["CallGone", "ServerCall"]

MessageT = TypeVar("MessageT", bound=betterproto2.Message)

PREFIX_BYTES = 5
CLEANUP_LOG_SECONDS = 5.0

log = structlog.get_logger("trio_sidecar.server.call")


class CallGone(Exception):
    """The client has reset the stream, or the connection is gone."""


class ServerCall:
    """One call.

    It ends in one of three ways: the method returns or raises; :meth:`end` decides from outside (deadline, drain); or
    the client goes, :meth:`gone`. The latter two cancel the method's task once, so that the engine's stream is released
    at once; then whoever is still there gets a status. A call never ends in silence towards a client that is there.

    Attributes:
        path: ``/service/method``.
        metadata: The caller's text headers.
        draining: Whether a drain waits for this call; a health watch sets it to False.
        status: How it ended, once it has.
        seconds: How long it took, once it has ended.
    """

    def __init__(
        self, protocol: ServerProtocol, stream: Stream, headers: RequestHeaders, max_message_bytes: int
    ) -> None:
        self.path = headers.path
        self.metadata: Mapping[str, str] = headers.metadata
        self.draining = True
        self.status = StatusCode.CANCELLED
        self.seconds = 0.0
        self._protocol = protocol
        self._stream = stream
        self._stream_id = stream.id or 0
        self._timeout_secs = headers.timeout_secs
        self._encoding = headers.encoding
        self._max_message_bytes = max_message_bytes
        self._task: AioTask[None] | None = None
        self._started = False
        self._headers_sent = False
        self._ended = False
        self._cancelled = False
        self._verdict: tuple[StatusCode, str] | None = None

    @property
    def answered(self) -> bool:
        """Whether the client has been sent anything."""
        return self._headers_sent or self._ended

    @property
    def verdict(self) -> StatusCode | None:
        """The status with which it was ended from outside; None if it was not."""
        return None if self._verdict is None else self._verdict[0]

    def attach(self, task: AioTask[None]) -> None:
        """The task that runs the call, so that it can be cancelled."""
        self._task = task

    def end(self, status: StatusCode, message: str) -> None:
        """End the call with a status, unless it ends already."""
        if not self._ended and self._verdict is None and not self._cancelled:
            self._verdict = (status, message)
            self._cancel()

    def gone(self) -> None:
        """The client has gone."""
        self._cancel()

    async def aio_run(self, method: Callable[[ServerCall], Awaitable[None]]) -> None:
        """Run the method and end the call; never raises."""
        self._started = True
        started = aio_now()
        timer = None
        if self._timeout_secs is not None:
            expired = f"the deadline of {self._timeout_secs:g} s expired"
            timer = aio_call_later(self._timeout_secs, self.end, StatusCode.DEADLINE_EXCEEDED, expired)
        status, message = StatusCode.OK, ""
        try:
            if not self._cancelled:
                await method(self)
            elif self._verdict is not None:
                status, message = self._verdict
        except AioCancelled:  # noqa: ASYNC103 - this is the task's outermost frame, and the verdict says why
            status, message = self._verdict or (StatusCode.CANCELLED, "the call was cancelled")
        except CallGone:
            status, message = StatusCode.CANCELLED, "the client has gone"
        except RpcError as error:
            status, message = error.status, error.detail
        except SidecarError as error:
            status, message = error.status, str(error)
        except Exception:
            log.exception("call_failed", method=self.path)
            status, message = StatusCode.INTERNAL, "internal error; the server's log says more"
        if timer is not None:
            timer.cancel()
        self._finish(status, message)
        self.status, self.seconds = status, aio_now() - started
        log.debug("call_ended", method=self.path, status=status.name, seconds=round(self.seconds, 3))

    async def aio_request(self, message_class: type[MessageT]) -> MessageT:
        """Read the request.

        Raises:
            RpcError: It is missing, too large, compressed, or no encoding of the message.
        """
        prefix = await self._aio_read(PREFIX_BYTES)
        if not prefix:
            raise RpcError(StatusCode.INTERNAL, f"the call ended without a {message_class.__name__}")
        size = int.from_bytes(prefix[1:], "big")
        if prefix[0]:
            reason = f"compressed messages are not supported (grpc-encoding {self._encoding[:32]!r}); send identity"
            raise RpcError(StatusCode.UNIMPLEMENTED, reason)
        if size > self._max_message_bytes:
            reason = f"{message_class.__name__} has {size} bytes; at most {self._max_message_bytes} are allowed"
            raise RpcError(StatusCode.OUT_OF_RANGE, reason)
        data = await self._aio_read(size) if size else b""
        try:
            return decode(message_class, data)
        except DecodeError as error:
            reason = f"{message_class.__name__} could not be decoded: {error}"
            raise RpcError(StatusCode.INVALID_ARGUMENT, reason) from error

    def send_headers(self) -> None:
        """Send the response headers, which say that the call was accepted; once, and before any message."""
        if not self._headers_sent:
            self._headers_sent = True
            self._write_headers(list(RESPONSE_HEADERS), end_stream=False)

    async def aio_send(self, messages: Iterable[betterproto2.Message]) -> None:
        """Send messages, as many per frame as fit; waits while the client's windows or the socket are full.

        Raises:
            CallGone: Nobody is there to receive them.
            EncodeError: A message cannot be encoded; none was sent.
        """
        parts: list[bytes] = []
        for message in messages:
            data = encode(message)
            parts += (b"\0" + len(data).to_bytes(4, "big"), data)
        self.send_headers()
        await self._aio_write(b"".join(parts))

    async def _aio_read(self, size: int) -> bytes:
        try:
            return await self._stream.recv_data(size)
        except AssertionError:
            # grpclib's way of saying that the client ended its side in the middle of a message.
            raise RpcError(StatusCode.INTERNAL, "the request ended in the middle of a message") from None

    async def _aio_write(self, data: bytes) -> None:
        h2, connection, stream = self._protocol.h2, self._stream.connection, self._stream
        at = 0
        while at < len(data):
            if not connection.write_ready.is_set():
                await connection.write_ready.wait()
            try:
                window = h2.local_flow_control_window(self._stream_id)
                if window > 0:
                    end = min(len(data), at + min(window, h2.max_outbound_frame_size))
                    h2.send_data(self._stream_id, data[at:end])
                    at = end
            except ProtocolError as error:
                raise CallGone from error
            if window > 0:
                self._flush()
            else:
                stream.window_updated.clear()
                await stream.window_updated.wait()

    def _write_headers(self, headers: list[tuple[str, str]], *, end_stream: bool) -> None:
        h2 = self._protocol.h2
        if self._protocol.closed or self._stream_id not in h2.streams:
            raise CallGone
        try:
            h2.send_headers(self._stream_id, headers, end_stream=end_stream)
        except ProtocolError as error:
            raise CallGone from error
        self._flush()

    def _flush(self) -> None:
        transport = self._protocol.transport
        if transport is not None and not transport.is_closing():
            transport.write(self._protocol.h2.data_to_send())

    def _finish(self, status: StatusCode, message: str) -> None:
        """Send the status, without waiting for the socket: it is small, and a stalled client must not hold us."""
        self._ended = True
        if self._protocol.connection.is_closing():
            return
        try:
            self._write_headers(trailers(status, message, only=not self._headers_sent), end_stream=True)
            if self._stream.closable:
                # The client has not ended its side: tell it that the rest of its request is of no use.
                self._stream.reset_nowait()
        except (CallGone, ProtocolError):
            log.debug("call_end_unheard", method=self.path, status=status.name)

    def _cancel(self) -> None:
        """Cancel the task, but not twice: the second would interrupt the cleanup that the first began.

        Nor before it has begun: asyncio would then drop it without running it, and nobody would end the call.
        """
        if self._cancelled or self._ended:
            return
        self._cancelled = True
        if self._task is not None and self._started:
            self._task.cancel()
