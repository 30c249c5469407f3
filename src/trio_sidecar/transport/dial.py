"""The choice between the two kinds of connection: the fast one where the installed versions allow it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_sidecar.tls import client_context
from trio_sidecar.transport import fastconnection, fastpath, publicpath
from trio_sidecar.transport.connection import ConnectionSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_sidecar.config import TransportSettings
    from trio_sidecar.transport.connection import Connection

__all__ = ["aio_connect", "connection_settings"]


def connection_settings(settings: TransportSettings) -> ConnectionSettings:
    """What every connection of a pool with these settings is made with; reads the TLS files.

    Raises:
        InvalidConfig: A TLS file cannot be used.
    """
    return ConnectionSettings(
        endpoint=settings.grpc_endpoint,
        tls=client_context(settings.tls) if settings.tls.enabled else None,
        server_name=settings.tls.server_name,
        shows_certificate=settings.tls.cert is not None,
        max_message_bytes=settings.max_message_bytes,
    )


async def aio_connect(
    settings: ConnectionSettings, on_change: Callable[[Connection], None], *, fast: bool | None = None
) -> Connection:
    """Connect and wait for the peer's SETTINGS (asyncio-flavoured); the caller limits the time.

    Args:
        settings: Where to, and limits.
        on_change: Called whenever state, stream limit or the number of open streams has changed, from asyncio.
        fast: Force or forbid the fast path; by default it is used where the installed versions allow it.

    Raises:
        ConnectError: The peer closed the connection, or is no HTTP/2 server.
        OSError: No connection, or the name cannot be resolved.
    """
    if fast is None:
        fast = fastpath.unsupported() is None
    if fast:
        return await fastconnection.aio_connect(settings, on_change)
    return await publicpath.aio_connect(settings, on_change)
