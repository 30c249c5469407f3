"""Tokens that carry the moment at which they were sent, so that their reader knows what the way took.

A token id is the sender's monotonic clock in units of 16 µs, cut to 20 bits, with one bit more on top: like nearly all
ids of real vocabularies it takes three bytes on the wire. Linux's monotonic clock is one for all processes of a
machine.
"""

from __future__ import annotations

import time

__all__ = ["STAMP_BIT", "STAMP_MASK", "age", "between", "now_us", "stamp"]

STAMP_BIT = 1 << 20
STAMP_MASK = STAMP_BIT - 1
UNIT_SHIFT = 4


def now_us() -> int:
    """Microseconds on the monotonic clock."""
    return time.monotonic_ns() // 1000


def stamp(at_us: int) -> int:
    """The token id for that moment."""
    return STAMP_BIT | (at_us >> UNIT_SHIFT & STAMP_MASK)


def age(token_id: int, at_us: int) -> int:
    """Microseconds from a token's stamp to a later moment, at most 16 s later; exact to 16 µs."""
    return ((at_us >> UNIT_SHIFT) - token_id & STAMP_MASK) << UNIT_SHIFT


def between(first_id: int, second_id: int) -> int:
    """Microseconds between the stamps of two tokens."""
    return (second_id - first_id & STAMP_MASK) << UNIT_SHIFT
