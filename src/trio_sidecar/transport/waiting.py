"""Calls that wait for a connection with room: who is next, and how many may wait."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import attrs

from trio_sidecar.bridge import AioEvent
from trio_sidecar.errors import Overloaded

if TYPE_CHECKING:
    from trio_sidecar.errors import ConnectError
    from trio_sidecar.transport.pool import Lease

__all__ = ["Line", "Waiter"]

MAX_WAITING_CALLS = 16_384
"""How many calls may wait for a stream; only an unlimited number of requests gets there."""


@attrs.define(eq=False)
class Waiter:
    """A call that waits.

    Attributes:
        urgent: A short one, which goes before others.
        ready: Set when it has a lease or an error.
    """

    urgent: bool = False
    ready: AioEvent = attrs.field(factory=AioEvent)
    lease: Lease | None = None
    error: ConnectError | None = None


class Line(collections.deque[Waiter]):
    """The calls that wait, in the order in which they are served: the urgent ones first."""

    def join(self, waiter: Waiter, where: str) -> None:
        """Take a place.

        Raises:
            Overloaded: As many calls as may wait for that peer already do; urgent ones do not count so strictly.
        """
        if waiter.urgent:
            self.insert(sum(other.urgent for other in self), waiter)
        elif len(self) < MAX_WAITING_CALLS:
            self.append(waiter)
        else:
            raise Overloaded(len(self), f"{len(self)} calls wait for {where} to take them, the most that may")
