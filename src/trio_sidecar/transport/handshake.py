"""From a channel to a connected socket, encrypted or not, and what to say if that fails (asyncio-flavoured)."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

from grpclib.config import Configuration

from trio_sidecar.endpoint import UnixAddress
from trio_sidecar.errors import ConnectError
from trio_sidecar.tls import handshake_fault

if TYPE_CHECKING:
    from grpclib.client import Channel
    from grpclib.protocol import H2Protocol

    from trio_sidecar.transport.connection import ConnectionSettings

__all__ = ["aio_handshake", "channel_arguments", "loss"]

TLS_ALERT = b"\x15\x03"
"""How a TLS server begins its answer to bytes that are no TLS."""


def channel_arguments(settings: ConnectionSettings) -> dict[str, Any]:
    """The arguments of grpclib's ``Channel``."""
    endpoint = settings.endpoint
    name = settings.server_name
    if isinstance(endpoint, UnixAddress):
        where: dict[str, Any] = {"path": endpoint.path}
        name = name or endpoint.authority
    else:
        where = {"host": endpoint.host, "port": endpoint.port}
    config = Configuration(
        http2_connection_window_size=settings.connection_window_bytes,
        http2_stream_window_size=settings.stream_window_bytes,
        ssl_target_name_override=name if settings.tls is not None else None,
    )
    return {**where, "ssl": settings.tls, "config": config}


async def aio_handshake(channel: Channel, settings: ConnectionSettings) -> H2Protocol:
    """Connect.

    Raises:
        ConnectError: The TLS handshake failed.
        OSError: No connection, or the name cannot be resolved.
    """
    try:
        return await channel.__connect__()
    except (ssl.SSLError, ConnectionResetError, ConnectionAbortedError) as error:
        if settings.tls is None:
            raise
        why = handshake_fault(error, shows_certificate=settings.shows_certificate)
        reason = f"TLS handshake with {settings.endpoint.label} failed: {why}"
        raise ConnectError(reason) from None  # it says all that OpenSSL's text does


def loss(error: BaseException | None, settings: ConnectionSettings, *, greeted: bool, unread: bytes) -> str:
    """Why a connection was lost.

    Args:
        error: What the socket said; None if the peer closed it in an orderly way.
        settings: The connection's.
        greeted: Whether the peer had sent its SETTINGS.
        unread: What it had sent and nobody understood.
    """
    if settings.tls is not None and (isinstance(error, ssl.SSLError) or not greeted):
        # With TLS 1.3 a client learns only after its own handshake that its certificate is missing or refused.
        return f"TLS: {handshake_fault(error, shows_certificate=settings.shows_certificate)}"
    if not greeted and unread.startswith(TLS_ALERT):
        return "the server speaks TLS; --grpc-tls connects so"
    return "the peer closed the connection" if error is None else str(error) or type(error).__name__
