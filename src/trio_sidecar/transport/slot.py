"""A place for one connection in a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from trio_sidecar.transport.balance import SlotLoad, stream_cap

if TYPE_CHECKING:
    from trio_sidecar.transport.connection import Connection

__all__ = ["Slot"]


@attrs.define(eq=False)
class Slot:
    """A place for one connection.

    Attributes:
        number: From 1.
        connection: The one that takes streams; None while there is none.
        open_streams: Leases on it.
        hopeful: Whether it is there, or the first try to replace it is under way.
        lost: Set when it has to be replaced.
    """

    number: int
    connection: Connection | None = None
    open_streams: int = 0
    hopeful: bool = False
    lost: trio.Event = attrs.field(factory=trio.Event)

    def load(self, *, urgent: bool = False) -> SlotLoad:
        """What the choice of a slot goes by; an urgent call may use the stream that others leave free."""
        # One that drains or is closed has left the slot before anybody looks.
        if self.connection is None:
            return SlotLoad(self.open_streams, 0)
        limit = self.connection.stream_limit
        return SlotLoad(self.open_streams, limit if urgent else stream_cap(limit))
