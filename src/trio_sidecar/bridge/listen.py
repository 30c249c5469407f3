"""What a server on asyncio's transports needs: listening sockets, tasks that start from callbacks, timers."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, TypeVarTuple

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Sequence

__all__ = ["AioListeners", "AioTask", "AioTimer", "AioTransport", "aio_call_later", "aio_listen", "aio_spawn"]

Ts = TypeVarTuple("Ts")

AioTask = asyncio.Task
"""A task that :func:`aio_spawn` started."""

AioTimer = asyncio.TimerHandle
"""What :func:`aio_call_later` returns; ``cancel()`` it."""

AioTransport = asyncio.Transport
"""One connection's byte stream."""

BACKLOG = 1024

TLS_HANDSHAKE_SECS = 60.0
"""How long a client may take for its handshake, as in vLLM's own server."""


class AioListeners:
    """Listening sockets."""

    def __init__(self, servers: Sequence[asyncio.Server]) -> None:
        self._servers = servers

    def close(self) -> None:
        """Accept no more; connections stay open. Safe to repeat."""
        for server in self._servers:
            server.close()


async def aio_listen(
    protocol_factory: Callable[[], asyncio.Protocol], sockets: Sequence[socket.socket], tls: ssl.SSLContext | None
) -> AioListeners:
    """Accept connections on bound sockets, which are the listeners' from now on (asyncio-flavoured).

    Args:
        protocol_factory: Makes the protocol of a connection; it hears of the connection after the TLS handshake.
        sockets: On TCP or Unix sockets.
        tls: The context for encrypted connections; None is plaintext.

    Raises:
        OSError: A socket cannot listen; none does then.
    """
    more: dict[str, Any] = {"backlog": BACKLOG}
    if tls is not None:
        more |= {"ssl": tls, "ssl_handshake_timeout": TLS_HANDSHAKE_SECS}
    loop = asyncio.get_running_loop()
    servers: list[asyncio.Server] = []
    try:
        for sock in sockets:
            create = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
            servers.append(await create(protocol_factory, sock=sock, **more))
    except OSError:
        AioListeners(servers).close()
        raise
    return AioListeners(servers)


def aio_spawn(
    aio_fn: Callable[[*Ts], Coroutine[object, object, None]], *args: *Ts, name: str | None = None
) -> AioTask[None]:
    """Start a task from an asyncio callback or task.

    Nobody waits for it here: the caller keeps it and owns its end, and the function must not raise.
    """
    return asyncio.get_running_loop().create_task(aio_fn(*args), name=name)


def aio_call_later(seconds: float, callback: Callable[[*Ts], object], *args: *Ts) -> AioTimer:
    """Call a function after a time on the loop's clock."""
    return asyncio.get_running_loop().call_later(seconds, callback, *args)
