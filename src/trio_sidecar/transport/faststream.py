"""One call on a :class:`~trio_sidecar.transport.fastconnection.FastConnection` (asyncio-flavoured)."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from trio_sidecar.bridge import AioSignal
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.transport.connection import NotProcessed
from trio_sidecar.transport.framing import (
    PREFIX_BYTES,
    MessageSplitter,
    check_response_headers,
    decode_headers,
    frame_message,
    response_error,
    status_of_reset,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from h2.windows import WindowManager

    from trio_sidecar.transport.fastconnection import FastConnection

__all__ = ["FastCall", "FastStream"]

_ACKNOWLEDGE_BYTES = 32 << 10
"""Taken bytes are acknowledged in lots of this size; far below the stream's window, so no peer ever waits for it."""

_MAX_TAKEN = 64
"""How many messages a reader gets at once. Decoded, a message takes some forty times its bytes, so those that a slow
reader leaves for later wait as bytes, and their window stays with us."""

_REFUSED_STREAM = 7


class FastCall(AbstractAsyncContextManager["FastStream", None]):
    """The context manager around a stream: entering sends the request and waits for the response's headers."""

    __slots__ = ("_connection", "_headers", "_request", "_stream")

    _stream: FastStream  # from entering on

    def __init__(self, connection: FastConnection, headers: list[tuple[str, str]], request: bytes) -> None:
        self._connection = connection
        self._headers = headers
        self._request = request

    async def __aenter__(self) -> FastStream:
        """Send the request; return at the response's headers."""
        connection = self._connection
        await connection.aio_writable()
        stream = FastStream(connection, connection.settings.max_message_bytes)
        stream.id = connection.begin(stream, self._headers)
        try:
            await stream.aio_send(frame_message(self._request))
            await stream.aio_headers()
        except BaseException:
            connection.leave(stream)
            raise
        self._stream = stream
        return stream

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the stream, whatever state it is in."""
        self._connection.leave(self._stream)


class FastStream:
    """See :class:`~trio_sidecar.transport.connection.RawStream`.

    Attributes:
        id: HTTP/2 stream id.
        headers: The response's headers, once :meth:`aio_headers` has returned.
        trailers: The response's trailers, once the stream has ended.
        direct: Whether plain DATA frames may go past h2: between headers and end, and not if the peer announced a
            content length, which h2 checks.
        window: h2's book on what the peer may still send.
        unacknowledged: Received bytes for which the peer has not been given window yet.
    """

    __slots__ = (
        "_connection",
        "_ended",
        "_error",
        "_has_headers",
        "_signal",
        "_splitter",
        "_taken",
        "_waiting",
        "direct",
        "headers",
        "id",
        "trailers",
        "unacknowledged",
        "window",
    )

    window: WindowManager

    def __init__(self, connection: FastConnection, max_message_bytes: int) -> None:
        self.id = 0
        self.headers: dict[str, str] = {}
        self.trailers: dict[str, str] = {}
        self.direct = False
        self.unacknowledged = 0
        self._connection = connection
        self._splitter = MessageSplitter(max_message_bytes)
        self._signal = AioSignal()
        self._taken = 0  # bytes taken and not acknowledged while others wait
        self._waiting = False
        self._has_headers = False
        self._ended = False
        self._error: RpcError | None = None

    # -- Reader's side

    async def aio_receive(self) -> list[bytes]:
        """Wait for messages and take what has arrived, up to a number."""
        splitter = self._splitter
        while not splitter.messages:
            if self._error is not None:
                raise self._error
            if self._ended:
                return self._finish()
            # The reader has taken all there was, so a message that is larger than the window can go on arriving.
            self._settle()
            await self._aio_wait()
        if len(splitter.messages) > _MAX_TAKEN:
            return self._take_some()
        messages = splitter.take()
        self._taken = 0
        self._settle()
        return messages

    async def aio_headers(self) -> None:
        """Wait for the response's headers.

        Raises:
            RpcError: They refuse the call, or the stream has failed.
        """
        while not self._has_headers:
            if self._error is not None:
                raise self._error
            await self._aio_wait()
        if (refusal := check_response_headers(self.headers)) is not None:
            raise refusal

    async def aio_send(self, data: bytes) -> None:
        """Send the request body as window allows; stops early if the peer has ended the stream."""
        connection, h2 = self._connection, self._connection.h2
        at, size = 0, len(data)
        while not (self._ended or self._error):
            room = min(h2.local_flow_control_window(self.id), h2.max_outbound_frame_size)
            if room <= 0 or (at and not connection.protocol.writable):
                connection.senders.add(self)
                await self._aio_wait()
                connection.senders.discard(self)
                continue
            end = min(size, at + room)
            h2.send_data(self.id, data[at:end], end_stream=end == size)
            connection.flush()
            at = end
            if at == size:
                return

    def _finish(self) -> list[bytes]:
        error = response_error(self.headers, self.trailers)
        if error is None and self._splitter.partial:
            error = RpcError(StatusCode.INTERNAL, "the stream ended within a message")
        if error is not None:
            raise error
        return []

    def _take_some(self) -> list[bytes]:
        """Take the oldest messages, and acknowledge no more than those."""
        messages = self._splitter.take(_MAX_TAKEN)
        self._taken += sum(map(len, messages)) + PREFIX_BYTES * len(messages)
        if self._taken >= _ACKNOWLEDGE_BYTES:
            size, self._taken = self._taken, 0
            self.unacknowledged -= size
            self._connection.acknowledge(self.id, size)
        return messages

    def _settle(self) -> None:
        if self.unacknowledged >= _ACKNOWLEDGE_BYTES:
            size, self.unacknowledged = self.unacknowledged, 0
            self._connection.acknowledge(self.id, size)

    async def _aio_wait(self) -> None:
        self._waiting = True
        try:
            await self._signal.aio_wait()
        finally:
            self._waiting = False

    # -- Wire's side

    def wake(self) -> None:
        """Let whoever waits look again."""
        if self._waiting:
            self._waiting = False
            self._signal.call()

    def on_headers(self, headers: Iterable[tuple[bytes | str, bytes | str]]) -> None:
        """The response's headers have arrived."""
        self.headers = decode_headers(headers)
        self._has_headers = True
        self.direct = "content-length" not in self.headers
        self.wake()

    def add(self, data: bytes, window_bytes: int) -> None:
        """Take the payload of a DATA frame; the windows are charged already."""
        self.unacknowledged += window_bytes
        try:
            self._splitter.feed(data)
        except RpcError as error:
            self.fail(error)
            self._connection.leave(self)
            return
        if self._splitter.messages:
            self.wake()
        elif self._waiting:
            self._settle()

    def on_trailers(self, headers: Iterable[tuple[bytes | str, bytes | str]]) -> None:
        """The response's trailers have arrived; the end follows."""
        self.trailers = decode_headers(headers)

    def on_end(self) -> None:
        """The peer has ended the stream."""
        self.direct = False
        self._ended = True
        self.wake()

    def on_reset(self, code: int, *, by_peer: bool) -> None:
        """The stream was reset; after the trailers that only means that the peer will not read the rest."""
        if "grpc-status" in self.trailers or "grpc-status" in self.headers:
            self.on_end()
        elif not by_peer:
            self.fail(RpcError(StatusCode.INTERNAL, f"the peer broke HTTP/2 on this stream (code {code})"))
        elif code == _REFUSED_STREAM and not self._has_headers:
            self.fail(NotProcessed("the peer refused the stream"))
        else:
            self.fail(RpcError(status_of_reset(code), f"the peer reset the stream (HTTP/2 error code {code})"))

    def fail(self, error: RpcError) -> None:
        """End the stream with an error; messages that came before it can still be taken."""
        if not self._ended and self._error is None:
            self.direct = False
            self._error = error
            self.wake()
