"""Calls over a pool: messages in, messages out, every error named after its call (spec 4); asyncio-flavoured."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Generic, TypeVar

import betterproto2

from trio_sidecar.bridge import aio_timeout
from trio_sidecar.deadline import format_seconds
from trio_sidecar.errors import ConnectError, ProtocolError, RpcError, StatusCode
from trio_sidecar.transport.connection import NotProcessed
from trio_sidecar.wire.codec import DecodeError, decode, encode
from trio_sidecar.wire.methods import HEALTH

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from trio_sidecar.transport.connection import RawStream
    from trio_sidecar.transport.pool import Lease, Pool
    from trio_sidecar.wire.methods import Method

__all__ = ["Client", "MessageStream", "rpc_label"]

Req = TypeVar("Req", bound=betterproto2.Message)
Resp = TypeVar("Resp", bound=betterproto2.Message)

_MAX_TRIES = 3
"""How often a call that no peer has begun is sent: a peer that drains closes its connections one after another."""


def rpc_label(method: Method[Req, Resp]) -> str:
    """The name of a call in messages (R4.4): bare, but with its service for health."""
    return f"Health.{method.name}" if method.service == HEALTH else method.name


class MessageStream(Generic[Resp]):
    """A server's answers to one request."""

    def __init__(self, method: Method[Req, Resp], stream: RawStream, peer: str) -> None:
        self._method = method
        self._stream = stream
        self._peer = peer

    async def aio_receive(self) -> list[Resp]:
        """Wait for messages and take some or all that have arrived; an empty list once the stream has ended with OK.

        Raises:
            RpcError: The stream ended with another status.
            ProtocolError: The peer sent bytes that are not such a message.
        """
        response = self._method.response
        try:
            return [decode(response, data) for data in await self._stream.aio_receive()]
        except RpcError as error:
            raise error.named(rpc_label(self._method)) from error.__cause__
        except DecodeError as error:
            reason = f"{rpc_label(self._method)}: {error}"
            raise ProtocolError(reason, peer=self._peer) from error


class _Call(AbstractAsyncContextManager[MessageStream[Resp], None]):
    """The context manager around a stream: a lease on a connection, and the call on it, from entering on."""

    _lease: Lease
    _call: AbstractAsyncContextManager[RawStream, None]

    def __init__(
        self,
        pool: Pool,
        method: Method[Req, Resp],
        request: Req,
        metadata: Mapping[str, str],
        timeout_secs: float | None,
        *,
        urgent: bool,
    ) -> None:
        self._pool = pool
        self._urgent = urgent
        self._method = method
        self._label = rpc_label(method)
        self._metadata = metadata
        self._timeout_secs = timeout_secs
        self._request = encode(request)

    async def __aenter__(self) -> MessageStream[Resp]:
        """Find a connection and send the request; return at the response's headers."""
        limit = self._pool.settings.max_message_bytes
        if len(self._request) > limit:
            detail = f"the request takes {len(self._request)} bytes, more than the limit of {limit}"
            raise RpcError(StatusCode.RESOURCE_EXHAUSTED, detail, rpc=self._label)
        tries = 1
        while True:
            try:
                stream = await self._aio_try()
            except NotProcessed as error:
                if tries == _MAX_TRIES:
                    raise error.named(self._label) from error.__cause__
                tries += 1
            except RpcError as error:
                raise error.named(self._label) from error.__cause__
            except ConnectError as error:
                raise RpcError(StatusCode.UNAVAILABLE, str(error), rpc=self._label) from error
            else:
                return MessageStream(self._method, stream, self._pool.peer)

    async def _aio_try(self) -> RawStream:
        lease = await self._pool.aio_lease(urgent=self._urgent)
        try:
            call = lease.connection.aio_open(
                self._method.path, self._request, metadata=self._metadata, timeout_secs=self._timeout_secs
            )
            stream = await call.__aenter__()
        except BaseException:
            self._pool.release(lease)
            raise
        self._lease, self._call = lease, call
        return stream

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the stream and give the connection's place back."""
        try:
            await self._call.__aexit__(kind, error, traceback)  # noqa: ASYNC102 - asyncio-flavoured
        finally:
            self._pool.release(self._lease)


class Client:
    """Calls any method over a pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def aio_stream(
        self,
        method: Method[Req, Resp],
        request: Req,
        *,
        metadata: Mapping[str, str] | None = None,
        timeout_secs: float | None = None,
        urgent: bool = False,
    ) -> AbstractAsyncContextManager[MessageStream[Resp], None]:
        """Make a call that is answered by a stream.

        Entering returns at the response's headers; leaving early resets the stream with CANCEL.

        Args:
            method: What to call.
            request: The request message.
            metadata: Sent as headers.
            timeout_secs: Told to the peer; limiting the call here is up to the caller.
            urgent: It does not wait behind other streams.

        Raises:
            EncodeError: The request cannot be encoded; raised before entering.
            RpcError: On entering: refused, or UNAVAILABLE if there is no connection.
            Overloaded: On entering: too many calls wait for a connection with room.
        """
        return _Call(self.pool, method, request, metadata or {}, timeout_secs, urgent=urgent)

    async def aio_unary(
        self,
        method: Method[Req, Resp],
        request: Req,
        *,
        metadata: Mapping[str, str] | None = None,
        timeout_secs: float | None = None,
    ) -> Resp:
        """Make a call that is answered by one message; it does not wait behind streams.

        Args:
            method: What to call.
            request: The request message.
            metadata: Sent as headers.
            timeout_secs: Limits the call on both sides.

        Raises:
            EncodeError: The request cannot be encoded.
            RpcError: Refused; UNAVAILABLE if there is no connection; DEADLINE_EXCEEDED if time ran out.
            ProtocolError: Not exactly one message, or not such a message.
        """
        call = _Call(self.pool, method, request, metadata or {}, timeout_secs, urgent=True)
        limit = aio_timeout(timeout_secs)
        try:
            async with limit, call as stream:
                messages = await stream.aio_receive()
                # The status comes last, and may be an error after a message.
                more = await stream.aio_receive() if messages else []
        except TimeoutError as error:
            if timeout_secs is None or not limit.expired():
                raise
            detail = f"no answer within {format_seconds(timeout_secs)}"
            raise RpcError(StatusCode.DEADLINE_EXCEEDED, detail, rpc=rpc_label(method)) from error
        if len(messages) != 1 or more:
            reason = f"{rpc_label(method)}: {len(messages) + len(more)} messages where one is due"
            raise ProtocolError(reason, peer=self.pool.peer)
        return messages[0]
