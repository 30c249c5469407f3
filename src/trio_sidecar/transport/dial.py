"""The choice between the two kinds of connection: the fast one where the installed versions allow it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_sidecar.transport import fastconnection, fastpath, publicpath

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_sidecar.transport.connection import Connection, ConnectionSettings

__all__ = ["aio_connect"]


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
