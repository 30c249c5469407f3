"""What is shown of one target, made from its samples; no I/O."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs

from trio_sidecar.top.figures import increase, quantile, rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trio_sidecar.top.scrape import Sample

__all__ = ["HISTORY", "Course", "Latency", "Slot", "View", "view"]

HISTORY = 60
"""How many points of each course are kept."""

P = "trio_sidecar_"


@attrs.frozen(slots=True)
class Latency:
    """Quantiles of the observations since the sample before, in seconds; None where there were none."""

    p50: float | None = None
    p99: float | None = None


@attrs.frozen(slots=True)
class Slot:
    """A connection of the pool: its place, its streams, and how many it may have; 0 while it is down."""

    place: str
    streams: float
    limit: float


@attrs.frozen(slots=True, kw_only=True)
class View:
    """The figures of one moment; None where the target has no such metric, or there is no earlier sample.

    Attributes:
        model: What is served, and by which version.
        engine: The state of the engine, in a word; empty for a target that is no worker.
        engine_id: Which life of it.
        draining: Whether the process ends.
        recoveries: How often the engine came back.
        in_flight: Requests, or calls of a server.
        ended: Ended requests per second, by reason; of a server calls, by status.
        tokens_out: Output tokens per second.
        tokens_in: Prompt tokens per second.
        chunks_per_token: Messages to Dynamo for each token.
        ttft: Time to first token.
        itl: Time between tokens.
        slots: The pool's connections.
        waiting: Calls that wait for one.
        reconnects: Connections that were replaced, since the process began.
        loop_lag: How late the loop's timers were.
    """

    model: str = ""
    engine: str = ""
    engine_id: str = ""
    draining: bool = False
    recoveries: float | None = None
    in_flight: float | None = None
    ended: Mapping[str, float] = attrs.field(factory=dict)
    tokens_out: float | None = None
    tokens_in: float | None = None
    chunks_per_token: float | None = None
    ttft: Latency = Latency()
    itl: Latency = Latency()
    slots: tuple[Slot, ...] = ()
    waiting: float | None = None
    reconnects: float | None = None
    loop_lag: Latency = Latency()


def view(before: Sample | None, now: Sample) -> View:
    """The figures between two samples of a worker's metrics, or of an engine's."""
    if now.total(P + "requests_in_flight") is None:
        return _engine_view(before, now)
    info = next((one.labels for one in now.series.get(P + "engine_info", ())), {})
    model, version = info.get("model", ""), info.get("engine_version", "")
    states = now.by(P + "engine_state", "state")
    tokens = increase(before, now, P + "output_tokens_total")
    chunks = increase(before, now, P + "chunks_total")
    return View(
        model=f"{model} ({version})" if version else model,
        engine=next((state for state, value in states.items() if value), ""),
        engine_id=info.get("instance_id", ""),
        draining=bool(now.total(P + "draining")),
        recoveries=now.total(P + "engine_recoveries_total"),
        in_flight=now.total(P + "requests_in_flight"),
        ended=_rates(before, now, P + "requests_ended_total", "reason"),
        tokens_out=rate(before, now, P + "output_tokens_total"),
        tokens_in=rate(before, now, P + "prompt_tokens_total"),
        chunks_per_token=chunks / tokens if tokens and chunks is not None else None,
        ttft=_latency(before, now, P + "time_to_first_token_seconds"),
        itl=_latency(before, now, P + "inter_token_latency_seconds"),
        slots=_slots(now),
        waiting=now.total(P + "pool_waiters"),
        reconnects=now.total(P + "pool_reconnects_total"),
        loop_lag=_latency(before, now, P + "loop_lag_seconds"),
    )


def _engine_view(before: Sample | None, now: Sample) -> View:
    return View(
        draining=bool(now.total(P + "server_draining")),
        in_flight=now.total(P + "server_calls_in_flight"),
        ended=_rates(before, now, P + "server_calls_total", "status"),
        tokens_out=rate(before, now, P + "server_output_tokens_total"),
        loop_lag=_latency(before, now, P + "loop_lag_seconds"),
    )


def _rates(before: Sample | None, now: Sample, name: str, label: str) -> dict[str, float]:
    rates = {value: rate(before, now, name, **{label: value}) for value in now.by(name, label)}
    return {value: grown for value, grown in rates.items() if grown}


def _latency(before: Sample | None, now: Sample, name: str) -> Latency:
    return Latency(quantile(before, now, name, 0.5), quantile(before, now, name, 0.99))


def _slots(now: Sample) -> tuple[Slot, ...]:
    limits = now.by(P + "pool_stream_limit", "connection")
    streams = now.by(P + "pool_streams", "connection")
    return tuple(Slot(place, count, limits.get(place, 0.0)) for place, count in streams.items())


@attrs.define(eq=False)
class Course:
    """The last points of what is drawn over time; None is a gap."""

    tokens: deque[float | None] = attrs.field(factory=lambda: deque(maxlen=HISTORY))
    ttft: deque[float | None] = attrs.field(factory=lambda: deque(maxlen=HISTORY))
    itl: deque[float | None] = attrs.field(factory=lambda: deque(maxlen=HISTORY))

    def add(self, now: View | None) -> None:
        """Add a moment; None if the target could not be asked."""
        self.tokens.append(None if now is None else now.tokens_out)
        self.ttft.append(None if now is None else now.ttft.p50)
        self.itl.append(None if now is None else now.itl.p50)
