"""Which connection a stream goes to, as pure functions, and what a pool says about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PoolStatistics", "SlotLoad", "choose", "stream_cap"]

MAX_STREAMS_PER_CONNECTION = 256
"""Our own cap; beyond it a frame waits long behind those of other streams (FR-101)."""


@attrs.frozen(slots=True)
class SlotLoad:
    """What :func:`choose` knows about one slot.

    Attributes:
        open_streams: Streams that the slot's connection carries.
        cap: How many it may carry; 0 while it takes none.
    """

    open_streams: int
    cap: int


def choose(slots: Sequence[SlotLoad], last: int) -> int | None:
    """The index of the slot for the next stream, or None if all are full or down.

    Args:
        slots: The load of every slot, in order.
        last: The index that was chosen before; equals are taken in turn after it.
    """
    best: int | None = None
    for step in range(1, len(slots) + 1):
        index = (last + step) % len(slots)
        slot = slots[index]
        if slot.open_streams < slot.cap and (best is None or slot.open_streams < slots[best].open_streams):
            best = index
    return best


def stream_cap(announced: int) -> int:
    """How many streams to put on a connection whose peer announced that limit: one below it, where that leaves any."""
    return min(MAX_STREAMS_PER_CONNECTION, max(announced - 1, min(announced, 1)))


@attrs.frozen(slots=True, kw_only=True)
class PoolStatistics:
    """A snapshot of a pool.

    Attributes:
        connections: Configured connections (R3.14).
        active: Connections that carry at least one stream.
        idle: Connections that are ready and carry none.
        draining: Connections that only finish their streams.
        open_streams: Streams on all of them.
        queued: Calls that wait for a free connection.
        reconnects: Connections that were replaced.
        failed_reconnects: Attempts to replace one that failed.
        stream_caps: For each slot how many streams it takes; 0 while it is down (FR-100).
    """

    connections: int
    active: int
    idle: int
    draining: int
    open_streams: int
    queued: int
    reconnects: int
    failed_reconnects: int
    stream_caps: tuple[int, ...]
