"""A network in memory, under connections that are dialled through asyncio; with the faults of a real one.

For simulations in virtual time (:func:`trio_sidecar.bridge.virtual.run_virtual`)::

    network = Network(random.Random(7))
    with network.installed():
        network.listen("engine", 50051, make_protocol)
        ...  # open_remote(TransportSettings(grpc_endpoint=GrpcEndpoint.parse("engine:50051")))
        for link in network.links:
            link.reset()

Both ends are asyncio protocols. Bytes take some time, arrive in order and perhaps in pieces, and pieces that meet on
the way arrive together. Every delay and every cut comes from one random generator.
"""

from __future__ import annotations

import contextlib
import enum
from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar.bridge import aio_sleep
from trio_sidecar.bridge.loop import current_loop

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

__all__ = ["Answer", "Link", "Network", "Wire"]

SEND_BUFFER_BYTES = 64 << 10
"""What the kernel takes of a sender while the other end takes nothing."""

HIGH_WATER_BYTES = 64 << 10
"""asyncio's own limit, beyond that, at which a protocol is told to pause."""

FOREVER_SECS = 10_000.0
"""How long a connection attempt that nobody answers takes to fail."""


class Answer(enum.Enum):
    """What becomes of an attempt to connect."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    SILENCE = "silence"
    """No answer at all: packets are dropped."""


@attrs.define(eq=False)
class Wire:
    """One end of a connection; what asyncio calls a transport, as far as HTTP/2 needs one.

    Attributes:
        link: The connection.
        protocol: Gets what arrives.
        peer: The other end.
    """

    link: Link
    protocol: Any = None
    _peer: Wire | None = None
    _out: bytearray = attrs.field(factory=bytearray)
    _scheduled: bool = False
    _closing: bool = False
    _fin: bool = False
    _lost: bool = False
    _paused: bool = False

    # -- As a transport

    def write(self, data: bytes) -> None:
        """Send."""
        if self._closing or self._lost or not data:
            return
        self._out += data
        self._send_soon()
        if not self._paused and self.get_write_buffer_size() > HIGH_WATER_BYTES:
            self._paused = True
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken."""
        return max(0, len(self._out) - SEND_BUFFER_BYTES)

    def is_closing(self) -> bool:
        """Whether no more can be sent."""
        return self._closing

    def close(self) -> None:
        """Send what waits, then the end."""
        if self._closing:
            return
        self._closing = self._fin = True
        self._send_soon()
        if not self.get_write_buffer_size():
            current_loop().call_soon(self._lose, None)

    def abort(self) -> None:
        """Drop everything; the other end sees a reset."""
        if self._lost:
            return
        self._closing = True
        self._out.clear()
        current_loop().call_soon(self._lose, None)
        if self._peer is not None:
            self.link.later(self._peer._lose, ConnectionResetError(104, "Connection reset by peer"))  # noqa: SLF001

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Nothing is known."""
        del name
        return default

    # -- As a wire

    def _send_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.link.later(self._deliver)

    def _deliver(self) -> None:
        """What was sent arrives, perhaps in pieces; nothing moves on a wire that is held."""
        self._scheduled = False
        peer = self._peer
        if peer is None:
            return
        if peer._lost:  # noqa: SLF001
            self._out.clear()
            if self._closing:
                self._lose(None)
            elif not peer._out and not peer._fin:  # noqa: SLF001 - else its last bytes and its end are on their way
                self.link.later(self._lose, ConnectionResetError(104, "Connection reset by peer"))
            return
        if self._out:
            size = self.link.cut(len(self._out))
            data = bytes(self._out[:size])
            del self._out[:size]
            if not peer._closing:  # noqa: SLF001
                peer.protocol.data_received(data)
        self._after_delivery()

    def _after_delivery(self) -> None:
        peer = self._peer
        if self._paused and not self.get_write_buffer_size():
            self._paused = False
            if not self._lost:
                self.protocol.resume_writing()
        if self._out:
            self._send_soon()
        elif self._fin and peer is not None:
            self._fin = False
            if not self._lost:
                current_loop().call_soon(self._lose, None)
            peer.end_of_input()

    def end_of_input(self) -> None:
        """The other end has closed; HTTP/2 then closes too."""
        if not self._lost and not self._closing:
            self.protocol.eof_received()
            self.close()

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            if not self._fin:
                self._out.clear()
            self.protocol.connection_lost(error)


class Link:
    """One connection.

    Attributes:
        client: The end that dialled.
        server: The end that listens.
        held: Nothing moves: the other end is frozen, or the cable is cut and nobody has noticed.
        slow_secs: What each delivery takes longer.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.client = Wire(self)
        self.server = Wire(self)
        self.client._peer, self.server._peer = self.server, self.client  # noqa: SLF001
        self.held = False
        self.slow_secs = 0.0
        self._kept: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    @property
    def open(self) -> bool:
        """Whether an end still has it."""
        return not (self.client._lost and self.server._lost)  # noqa: SLF001

    def later(self, function: Callable[..., object], *args: Any) -> None:
        """Call that when a packet sent now would arrive; a wire that is held keeps it."""
        if self.held:
            self._kept.append((function, args))
        else:
            delay = self.network.delay() + self.slow_secs
            current_loop().call_later(delay, self._arrive, function, args)

    def _arrive(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self.held:
            self._kept.append((function, args))
        else:
            function(*args)

    def cut(self, size: int) -> int:
        """How many of so many bytes arrive in one piece."""
        random = self.network.random
        if size > 1 and random.random() < self.network.cut_probability:
            return random.randrange(1, size)
        return size

    def hold(self) -> None:
        """Let nothing through."""
        self.held = True

    def go_on(self) -> None:
        """Let through what waits."""
        self.held = False
        kept, self._kept = self._kept, []
        for function, args in kept:
            self.later(function, *args)

    def reset(self, *, partly: bool = True) -> None:
        """Break the connection for both ends; of what is on its way, a part may still arrive."""
        if not self.held and partly:
            for end in (self.server, self.client):
                peer = end._peer  # noqa: SLF001
                if end._out and peer is not None and not peer._closing:  # noqa: SLF001
                    size = self.network.random.randrange(len(end._out) + 1)  # noqa: SLF001
                    if size:
                        peer.protocol.data_received(bytes(end._out[:size]))  # noqa: SLF001
        self.held = False
        self._kept.clear()
        error = ConnectionResetError(104, "Connection reset by peer")
        for end in (self.client, self.server):
            end._out.clear()  # noqa: SLF001
            current_loop().call_soon(end._lose, error)  # noqa: SLF001


class Network:
    """All that can be dialled.

    Attributes:
        random: Decides about times and cuts.
        links: Every connection that was made, oldest first.
        answer: What becomes of attempts to connect.
        min_secs: The shortest time that a packet takes.
        max_secs: The longest.
        cut_probability: How often only a part of what was sent arrives at once.
    """

    def __init__(
        self,
        random: random.Random,
        *,
        min_secs: float = 0.0001,
        max_secs: float = 0.001,
        cut_probability: float = 0.1,
    ) -> None:
        self.random = random
        self.links: list[Link] = []
        self.answer = Answer.ACCEPT
        self.min_secs = min_secs
        self.max_secs = max_secs
        self.cut_probability = cut_probability
        self._listeners: dict[tuple[str, int], Callable[[], Any]] = {}

    def listen(self, host: str, port: int, protocol_factory: Callable[[], Any]) -> None:
        """Serve that address with a new protocol for each connection."""
        self._listeners[host, port] = protocol_factory

    def delay(self) -> float:
        """How long one packet takes, in seconds."""
        return self.random.uniform(self.min_secs, self.max_secs)

    async def aio_create_connection(
        self, protocol_factory: Callable[[], Any], host: str, port: int, **more: Any
    ) -> tuple[Wire, Any]:
        """What asyncio's loop offers under the name ``create_connection``; encryption is not offered.

        Raises:
            OSError: Nobody listens there, or nobody answers.
        """
        del more
        await aio_sleep(2 * self.delay())
        make_server = self._listeners.get((host, port))
        if self.answer is Answer.SILENCE:
            await aio_sleep(FOREVER_SECS)
            raise TimeoutError(110, "Connection timed out")
        if make_server is None or self.answer is Answer.REFUSE:
            raise ConnectionRefusedError(111, "Connection refused")
        link = Link(self)
        self.links = [each for each in self.links if each.open]
        self.links.append(link)
        link.server.protocol = make_server()
        link.server.protocol.connection_made(link.server)
        link.client.protocol = protocol_factory()
        link.client.protocol.connection_made(link.client)
        return link.client, link.client.protocol

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let the loop beside the running Trio dial here, and only here, for the length of the block."""
        loop: Any = current_loop()
        loop.create_connection = self.aio_create_connection
        try:
            yield
        finally:
            del loop.create_connection
