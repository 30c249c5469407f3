"""A TCP proxy with the faults of a bad network, for tests between real processes (Trio-flavoured).

For example::

    async with open_proxy("127.0.0.1", engine_port) as proxy:
        ...  # let the client connect to 127.0.0.1, proxy.port
        proxy.down.delay_secs = 0.2         # what comes from the server arrives later
        proxy.down.cut_after_bytes = 1000   # each connection breaks within a message
        proxy.up.stall()                    # nothing more gets to the server, and nobody is told
        proxy.half_open()                   # the server's ends are gone, the client's are not told
        proxy.refuse()                      # nobody listens any more

Bytes keep their order, as they do in TCP; with a jitter, what travels on different connections does not. A connection
that is cut is reset at both ends. :class:`trio_sidecar.testing.network.Network` is the same idea in memory, below
asyncio, for simulations in virtual time; this one is for sockets, and for anything else that is a Trio stream.
"""

from __future__ import annotations

import math
import random
import socket
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["Proxy", "ProxyLink", "Way", "open_proxy"]

_PIECE_BYTES = 65536
_PIECES_UNDER_WAY = 64
_LISTEN_AGAIN_SECS = 0.05

_BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


@attrs.define(eq=False, kw_only=True)
class Way:
    """One direction of every connection; attributes may be changed at any time.

    Attributes:
        delay_secs: How much later everything arrives.
        jitter_secs: How much later than that at most; each piece draws a time of its own, and none overtakes another
            on the same connection.
        piece_bytes: How many bytes go on together at most.
        cut_after_bytes: A connection is reset when so many bytes have got through in this direction, over its life; the
            ones up to there arrive. None is no limit.
        passed_bytes: How many bytes have got through, on all connections.
    """

    delay_secs: float = 0.0
    jitter_secs: float = 0.0
    piece_bytes: int = _PIECE_BYTES
    cut_after_bytes: int | None = None
    passed_bytes: int = 0
    _random: random.Random
    _open: trio.Event | None = None

    def stall(self) -> None:
        """Let nothing through, without a word to either end."""
        if self._open is None:
            self._open = trio.Event()

    def go_on(self) -> None:
        """Let through what waits."""
        if self._open is not None:
            self._open.set()
            self._open = None

    async def passable(self) -> None:
        """Wait while it is stalled."""
        while self._open is not None:
            await self._open.wait()

    def delay(self) -> float:
        """How much later the next piece arrives, in seconds."""
        return self.delay_secs + self._random.uniform(0.0, self.jitter_secs)


@attrs.define(eq=False)
class ProxyLink:
    """One connection through the proxy.

    Attributes:
        client: The end towards whoever dialled.
        server: The end towards the target.
        up_bytes: How many bytes have got to the server.
        down_bytes: How many bytes have got to the client.
    """

    client: trio.abc.HalfCloseableStream
    server: trio.abc.HalfCloseableStream
    up_bytes: int = 0
    down_bytes: int = 0
    _pumps: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _whole: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    def cut(self) -> None:
        """Reset both ends."""
        self._whole.cancel()

    def half_open(self) -> None:
        """Reset the server's end; the client is not told, and what it sends is lost."""
        self._pumps.cancel()


Dial: TypeAlias = "Callable[[], Awaitable[trio.abc.HalfCloseableStream]]"


class Proxy:
    """The proxy; :func:`open_proxy` runs one, and :meth:`carry` takes any stream.

    Attributes:
        dial: Connects to the target; may be replaced at any time.
        port: Where it listens, on 127.0.0.1.
        up: The way from client to server.
        down: The way from server to client.
        links: Connections that are open.
        carried: How many connections there have been.
    """

    def __init__(self, dial: Dial, *, seed: int = 0) -> None:
        self.dial = dial
        self.port = 0
        generator = random.Random(seed)  # noqa: S311 - decides about delays
        self.up = Way(random=generator)
        self.down = Way(random=generator)
        self.links: list[ProxyLink] = []
        self.carried = 0
        self._ignoring = False
        self._refusing = False
        self._changed = trio.Event()

    # -- Faults

    def cut(self) -> None:
        """Reset every connection, at both ends."""
        for link in tuple(self.links):
            link.cut()

    def half_open(self) -> None:
        """Reset the servers' ends of every connection, and let the clients wait."""
        for link in tuple(self.links):
            link.half_open()

    def stall(self) -> None:
        """Let nothing through, either way."""
        self.up.stall()
        self.down.stall()

    def refuse(self) -> None:
        """Do not listen: attempts to connect fail at once. Open connections go on."""
        self._set_refusing(True)

    def ignore(self) -> None:
        """Let attempts to connect succeed, and let nothing through on those connections, now or later."""
        self._ignoring = True

    def go_on(self) -> None:
        """Do all that again: pass what was stalled, listen, and carry new connections."""
        self.up.go_on()
        self.down.go_on()
        self._ignoring = False
        self._set_refusing(False)

    def _set_refusing(self, value: bool) -> None:
        self._refusing = value
        self._changed.set()
        self._changed = trio.Event()

    async def _while_refusing(self, value: bool) -> None:
        while self._refusing is value:
            await self._changed.wait()

    # -- Work

    async def carry(self, client: trio.abc.HalfCloseableStream) -> None:
        """Carry one connection to its end; what happens to it is no error here."""
        self.carried += 1
        try:
            if self._ignoring:
                await _swallow(client)
                return
            server = await self.dial()
        except _BROKEN:
            await _reset(client)
            return
        except BaseException:
            await _reset(client)  # noqa: ASYNC102 - waits for nothing
            raise
        link = ProxyLink(client, server)
        self.links.append(link)
        try:
            await self._carry_link(link)
        finally:
            self.links.remove(link)
            await _reset(client)  # noqa: ASYNC102 - waits for nothing
            await _reset(server)  # noqa: ASYNC102

    async def _carry_link(self, link: ProxyLink) -> None:
        with link._whole:  # noqa: SLF001
            with link._pumps:  # noqa: SLF001
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pump, link, link.client, link.server, self.up)
                    nursery.start_soon(self._pump, link, link.server, link.client, self.down)
                # Both have ended in an orderly way.
                await link.client.aclose()
                await link.server.aclose()
                return
            await _reset(link.server)
            await _swallow(link.client)

    async def _pump(
        self,
        link: ProxyLink,
        source: trio.abc.HalfCloseableStream,
        sink: trio.abc.HalfCloseableStream,
        way: Way,
    ) -> None:
        """Carry one direction; an end that breaks breaks the other."""
        entrance, exit_ = trio.open_memory_channel[tuple[float, bytes]](_PIECES_UNDER_WAY)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take, source, way, entrance)
                await self._give(link, sink, way, exit_)
        except* _BROKEN:
            link.cut()

    async def _take(
        self, source: trio.abc.HalfCloseableStream, way: Way, entrance: trio.MemorySendChannel[tuple[float, bytes]]
    ) -> None:
        arrives_at = -math.inf
        async with entrance:
            while True:
                await way.passable()
                data = await source.receive_some(way.piece_bytes)
                arrives_at = max(arrives_at, trio.current_time() + way.delay())
                await entrance.send((arrives_at, bytes(data)))
                if not data:
                    return

    async def _give(
        self,
        link: ProxyLink,
        sink: trio.abc.HalfCloseableStream,
        way: Way,
        exit_: trio.MemoryReceiveChannel[tuple[float, bytes]],
    ) -> None:
        passed = 0
        async with exit_:
            async for arrives_at, piece in exit_:
                await trio.sleep_until(arrives_at)
                await way.passable()
                limit = way.cut_after_bytes
                data = piece if limit is None else piece[: max(0, limit - passed)]
                if data:
                    await sink.send_all(data)
                passed += len(data)
                way.passed_bytes += len(data)
                if way is self.up:
                    link.up_bytes = passed
                else:
                    link.down_bytes = passed
                if limit is not None and passed >= limit:
                    link.cut()
                elif not piece:
                    await sink.send_eof()

    async def listen(self, listener: trio.SocketListener) -> None:
        """Accept connections until cancelled; while it refuses, nothing listens."""
        self.port = listener.socket.getsockname()[1]
        async with trio.open_nursery() as links:
            while True:
                async with trio.open_nursery() as nursery:
                    serve = partial(trio.serve_listeners, self.carry, [listener], handler_nursery=links)
                    nursery.start_soon(serve)
                    await self._while_refusing(False)
                    nursery.cancel_scope.cancel()
                await listener.aclose()
                await self._while_refusing(True)
                listener = await self._listen_again()

    async def _listen_again(self) -> trio.SocketListener:
        """Listen where it did before; somebody may have the port for a moment, as one end of a connection."""
        while True:
            try:
                (listener,) = await trio.open_tcp_listeners(self.port, host="127.0.0.1")
            except OSError:
                await trio.sleep(_LISTEN_AGAIN_SECS)
            else:
                return listener


async def _swallow(stream: trio.abc.Stream) -> None:
    """Read until the other end goes."""
    try:
        while await stream.receive_some(_PIECE_BYTES):
            pass
    except _BROKEN:
        pass


async def _reset(stream: trio.abc.Stream) -> None:
    """Close it so that the other end sees a reset, unless it is closed already; what waits to be sent is dropped."""
    if isinstance(stream, trio.SocketStream) and stream.socket.fileno() >= 0:
        linger = b"\x01\0\0\0" + bytes(4)  # on, zero seconds
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    with trio.CancelScope() as scope:
        scope.cancel()
        await stream.aclose()


@asynccontextmanager
async def open_proxy(host: str, port: int, *, listen_port: int = 0, seed: int = 0) -> AsyncIterator[Proxy]:
    """Run a proxy on 127.0.0.1 while the block runs; it listens before the block begins.

    Args:
        host: Where the target listens; it need not listen yet.
        port: The target's port.
        listen_port: The proxy's port; 0 lets the system choose.
        seed: Decides about delays, where there is a jitter.

    Raises:
        OSError: The proxy's port is in use.
    """
    (listener,) = await trio.open_tcp_listeners(listen_port, host="127.0.0.1")
    proxy = Proxy(partial(trio.open_tcp_stream, host, port), seed=seed)
    proxy.port = listener.socket.getsockname()[1]
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(proxy.listen, listener)  # noqa: ASYNC113 - it listens already
        try:
            yield proxy
        except Exception as error:  # noqa: BLE001 - raised again below, outside the nursery, so not in a group
            failure = error
        finally:
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
