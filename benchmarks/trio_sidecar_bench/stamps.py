"""Tokens that carry the moment at which they were sent, so that their reader knows what the way took.

A token id is the sender's monotonic clock in microseconds, with the top bit set so that every id takes five bytes on the
wire. Linux's monotonic clock is one for all processes of a machine.
"""

from __future__ import annotations

import time

__all__ = ["STAMP_BIT", "STAMP_MASK", "age", "now_us", "stamp"]

STAMP_BIT = 0x8000_0000
STAMP_MASK = 0x7FFF_FFFF


def now_us() -> int:
    """Microseconds on the monotonic clock."""
    return time.monotonic_ns() // 1000


def stamp(at_us: int) -> int:
    """The token id for that moment."""
    return STAMP_BIT | (at_us & STAMP_MASK)


def age(token_id: int, at_us: int) -> int:
    """Microseconds from a token's stamp to a later moment, at most 35 minutes later."""
    return (at_us - token_id) & STAMP_MASK
