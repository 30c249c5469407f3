"""What a server on asyncio's transports needs: listening sockets, tasks that start from callbacks, timers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVarTuple

if TYPE_CHECKING:
    import socket
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


class AioListeners:
    """Listening sockets."""

    def __init__(self, servers: Sequence[asyncio.Server]) -> None:
        self._servers = servers

    def close(self) -> None:
        """Accept no more; connections stay open. Safe to repeat."""
        for server in self._servers:
            server.close()


async def aio_listen(
    protocol_factory: Callable[[], asyncio.Protocol], sockets: Sequence[socket.socket]
) -> AioListeners:
    """Accept connections on bound sockets, which are the listeners' from now on (asyncio-flavoured).

    Raises:
        OSError: A socket cannot listen; none does then.
    """
    loop = asyncio.get_running_loop()
    servers: list[asyncio.Server] = []
    try:
        for sock in sockets:
            server = await loop.create_server(protocol_factory, sock=sock, backlog=BACKLOG)
            servers.append(server)
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
