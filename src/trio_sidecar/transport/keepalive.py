"""HTTP/2 pings that find a peer which is silent: a stopped process, or a TCP connection of which one end is gone.

A gRPC server by default allows pings without data between them only every five minutes; it forgives one and two
strikes, then ends the connection with GOAWAY ENHANCE_YOUR_CALM (FR-099). So we ping only a connection that carries
streams and has brought nothing for an interval, twice, and after that every five minutes until headers or data have
come: nothing else makes the server forget its count. A peer that complains all the same is asked half as often from
then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.deadline import format_seconds
from trio_sidecar.errors import RpcError
from trio_sidecar.transport.connection import ConnectionState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trio_sidecar.transport.connection import Connection

__all__ = ["Keepalive"]

QUICK_PINGS = 2
"""How many pings may follow each other at the configured interval with nothing received between them."""

LEAST_SECS_AFTER = 300.0
"""The interval of the pings after those; gRPC's own minimum for servers."""

log = structlog.get_logger("trio_sidecar.transport.keepalive")


@attrs.define(eq=False)
class _Watched:
    """What is known about one connection."""

    heard: int
    since: float
    pings: int = 0
    under_way: bool = False


@attrs.define(eq=False)
class Keepalive:
    """Watches the connections of one pool.

    Attributes:
        interval_secs: How long a connection with streams may be silent before it is pinged; 0 is off.
        timeout_secs: How long the answer may take; then the connection is lost.
    """

    interval_secs: float
    timeout_secs: float
    _watched: dict[Connection, _Watched] = attrs.field(factory=dict, init=False)

    def slow_down(self) -> None:
        """The peer has complained of too many pings: double the interval."""
        self.interval_secs *= 2
        log.warning("keepalive_slowed_down", interval_secs=self.interval_secs)

    async def run(self, connections: Callable[[], Iterable[Connection]]) -> None:
        """Watch until cancelled (Trio-flavoured).

        Args:
            connections: Those that there are at the moment.
        """
        if not self.interval_secs:
            return
        async with trio.open_nursery() as pings:
            while True:
                await trio.sleep(self.interval_secs / 2)
                now = trio.current_time()
                current = [at for at in connections() if at.state is not ConnectionState.CLOSED]
                self._watched = {at: self._watched.get(at) or _Watched(at.heard, now) for at in current}
                for connection, watched in self._watched.items():
                    if self._due(connection, watched, now):
                        watched.under_way = True
                        watched.pings += 1
                        pings.start_soon(self._ping, connection, watched)

    def _due(self, connection: Connection, watched: _Watched, now: float) -> bool:
        if watched.under_way:
            return False
        if watched.heard != connection.heard:
            watched.heard, watched.since, watched.pings = connection.heard, now, 0
        if not connection.open_streams:
            watched.since = now
            return False
        quick = watched.pings < QUICK_PINGS
        return now - watched.since >= (self.interval_secs if quick else max(self.interval_secs, LEAST_SECS_AFTER))

    async def _ping(self, connection: Connection, watched: _Watched) -> None:
        try:
            with trio.move_on_after(self.timeout_secs) as limit:
                await run_aio(connection.aio_ping)
        except RpcError:  # the connection was lost or drains meanwhile; its streams know
            return
        finally:
            watched.since, watched.under_way = trio.current_time(), False
        if limit.cancelled_caught:
            connection.close(f"the peer did not answer a keepalive ping within {format_seconds(self.timeout_secs)}")
