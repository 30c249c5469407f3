"""One HTTP/2 connection: what the pool asks of it, whichever of the two implementations it is.

:mod:`~trio_sidecar.transport.fastconnection` splits messages where bytes arrive and hands all of them over per wake-up.
It relies on private parts of grpclib and h2, so it is used only with versions it was tested with.
:mod:`~trio_sidecar.transport.publicpath` needs nothing private, costs several times the CPU, and inherits grpclib's
limits. Both offer the interface below and pass the same tests.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol, Self

import attrs
import structlog

from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.metrics import PoolMeter

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

    import trio

    from trio_sidecar.endpoint import GrpcEndpoint, UnixAddress

__all__ = ["Connection", "ConnectionSettings", "ConnectionState", "NotProcessed", "RawStream"]

STREAM_WINDOW_BYTES = 256 << 10
"""How much a peer may send on one stream before we take it: what each client that does not read can cost us."""

CONNECTION_WINDOW_BYTES = 64 << 20
"""The same for all streams of a connection; far above one stream's, or a stalled reader would block the others."""

log = structlog.get_logger("trio_sidecar.transport.connection")


class ConnectionState(enum.Enum):
    """Where a connection is in its life."""

    READY = "ready"
    """Streams may be opened."""

    DRAINING = "draining"
    """The peer accepts no new streams (GOAWAY); the open ones go on."""

    CLOSED = "closed"
    """Nothing can be sent or received."""


class NotProcessed(RpcError):
    """UNAVAILABLE, and the peer has certainly not begun the call: it may be sent again on another connection."""

    def __init__(self, detail: str, *, rpc: str = "") -> None:
        super().__init__(StatusCode.UNAVAILABLE, detail, rpc=rpc)

    def named(self, rpc: str) -> Self:
        """The same error, labelled with the call that met it."""
        return self if self.rpc == rpc else type(self)(self.detail, rpc=rpc)


@attrs.frozen(slots=True, kw_only=True)
class ConnectionSettings:
    """What a connection needs to know.

    Attributes:
        endpoint: The peer.
        tls: The context of an encrypted connection; None is plaintext.
        server_name: The name that the peer's certificate must have; None is the endpoint's host.
        shows_certificate: Whether we have a certificate to show; only for messages.
        max_message_bytes: The largest message, in both directions (R3.12).
        stream_window_bytes: Flow-control window of a stream.
        connection_window_bytes: Flow-control window of the connection.
        meter: What is counted of it, together with the others of its pool.
    """

    endpoint: GrpcEndpoint | UnixAddress
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    shows_certificate: bool = False
    max_message_bytes: int = 64 << 20
    stream_window_bytes: int = STREAM_WINDOW_BYTES
    connection_window_bytes: int = CONNECTION_WINDOW_BYTES
    meter: PoolMeter = attrs.field(factory=PoolMeter, eq=False, repr=False)


class RawStream(Protocol):
    """A server's answers to one request, as bytes."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The response's headers."""
        ...

    async def aio_receive(self) -> list[bytes]:
        """Wait for messages and take some or all that have arrived; an empty list once the stream has ended with OK.

        Window is given back to the peer only for what was taken.

        Raises:
            RpcError: The stream ended with another status, after the messages before it were taken.
        """
        ...


class Connection(Protocol):
    """An HTTP/2 connection whose SETTINGS have arrived."""

    @property
    def state(self) -> ConnectionState:
        """Whether it takes new streams."""
        ...

    @property
    def stream_limit(self) -> int:
        """How many streams the peer allows at once, as last announced."""
        ...

    @property
    def open_streams(self) -> int:
        """Streams opened by us and not left yet."""
        ...

    @property
    def heard(self) -> int:
        """Grows with each HEADERS or DATA frame that arrives; for keepalive."""
        ...

    @property
    def too_many_pings(self) -> bool:
        """Whether the peer ended the connection with ENHANCE_YOUR_CALM."""
        ...

    @property
    def closed(self) -> trio.Event:
        """Set when the socket is gone."""
        ...

    @property
    def reason(self) -> str:
        """Why it drains or is closed; empty while it is ready."""
        ...

    def aio_open(
        self, path: str, request: bytes, *, metadata: Mapping[str, str], timeout_secs: float | None = None
    ) -> AbstractAsyncContextManager[RawStream, None]:
        """Send one request (asyncio-flavoured).

        Entering returns when the response headers have arrived. Leaving before the end resets the stream with CANCEL.

        Args:
            path: For example ``/vllm.Inference/GenerateStream``.
            request: The encoded request message.
            metadata: Sent as headers.
            timeout_secs: Sent to the peer as ``grpc-timeout``; limiting the call on our side is the caller's task.

        Raises:
            InvalidRequest: Metadata that cannot be sent.
            NotProcessed: On entering: nothing was begun, another connection may be tried.
            RpcError: On entering: the peer refused.
        """
        ...

    async def aio_ping(self) -> None:
        """Return when the peer has answered a ping; the caller limits the time (for keepalive).

        Raises:
            RpcError: UNAVAILABLE if the connection is lost meanwhile.
        """
        ...

    def close(self, reason: str) -> None:
        """Fail all streams with UNAVAILABLE and close at once; :attr:`closed` tells when that is done."""
        ...
