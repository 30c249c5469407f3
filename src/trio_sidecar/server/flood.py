"""Limits on what one client may make the server do for nothing."""

from __future__ import annotations

import attrs

__all__ = ["MAX_UNREAD_BYTES", "ResetBudget"]

MAX_UNREAD_BYTES = 32 << 20
"""What may wait in memory for a client that does not read, in bytes.

Answers to calls stop at a full buffer, so only answers to floods (pings, settings, refused calls) come this far."""

BURST = 1024
"""Calls that a client may give up unanswered at once: as many as one connection may have open."""

PER_SECOND = 64.0
"""How many more it may give up each second after that."""


@attrs.define(eq=False)
class ResetBudget:
    """How many calls a client may still open and reset before they are answered, which costs it next to nothing.

    A call that was answered, if only by its headers, may be reset for free: that is how clients cancel.
    """

    _left: float = BURST
    _counted_at: float = -1.0

    def spend(self, now: float) -> bool:
        """Count one reset of an unanswered call, at a time in seconds; False if that was one too many."""
        if self._counted_at >= 0:
            self._left = min(BURST, self._left + (now - self._counted_at) * PER_SECOND)
        self._counted_at = now
        self._left -= 1
        return self._left >= 0
