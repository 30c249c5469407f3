"""From two samples of a target to the figures of the time between them; pure functions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trio_sidecar.top.scrape import Sample

__all__ = ["increase", "quantile", "rate"]

BOUND = "le"


def increase(before: Sample | None, now: Sample, name: str, **labels: str) -> float | None:
    """How much a counter has grown; None without two samples of it.

    One that has become smaller belongs to a process that was started anew, and has grown from 0.
    """
    last = now.total(name, **labels)
    first = None if before is None else before.total(name, **labels)
    if last is None or first is None:
        return None
    return last if last < first else last - first


def rate(before: Sample | None, now: Sample, name: str, **labels: str) -> float | None:
    """How much a counter grows in a second."""
    grown = increase(before, now, name, **labels)
    if grown is None or before is None or now.at <= before.at:
        return None
    return grown / (now.at - before.at)


def quantile(before: Sample | None, now: Sample, name: str, share: float) -> float | None:
    """The value below which that share of a histogram's new observations lie; None if there are none.

    Within a bucket they are taken to be spread evenly, as Prometheus does; beyond the last bound there is only that
    bound.
    """
    if before is None:
        return None
    bounds = sorted((_bound(text), grown) for text, grown in _grown(before, now, f"{name}_bucket").items())
    if not bounds or bounds[-1][1] <= 0:
        return None
    wanted = share * bounds[-1][1]
    low, below = 0.0, 0.0
    for bound, count in bounds:
        if count >= wanted and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


def _grown(before: Sample, now: Sample, name: str) -> Mapping[str, float]:
    """The increase of each bucket; from 0 where the process was started anew."""
    first, last = before.by(name, BOUND), now.by(name, BOUND)
    anew = any(count < first.get(bound, 0.0) for bound, count in last.items())
    return {bound: count - (0.0 if anew else first.get(bound, 0.0)) for bound, count in last.items()}


def _bound(text: str) -> float:
    return math.inf if text == "+Inf" else float(text)
