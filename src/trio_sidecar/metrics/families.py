"""The table of all metric families; ``docs/metrics.md`` is made from it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["END_REASONS", "ENGINE_FAMILIES", "LATENCY_BOUNDS", "REFUSALS", "WORKER_FAMILIES", "Family", "Kind"]

PREFIX = "trio_sidecar_"

LATENCY_BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Bounds of every histogram, in seconds."""

ROLES = ("agg", "prefill", "decode", "encode")
END_REASONS = ("finished", "cancelled", "consumer_gone", "error", "shutdown", "timeout")
REFUSALS = ("invalid", "overloaded", "unavailable", "internal")
OTHER = "other"
RESET_CODES = (
    *("NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "STREAM_CLOSED", "REFUSED_STREAM"),
    *("CANCEL", "ENHANCE_YOUR_CALM", OTHER),
)


class Kind(enum.Enum):
    """What a family's values mean; the value is Prometheus' name of the type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@attrs.frozen(slots=True)
class Family:
    """One metric family.

    Attributes:
        name: As it is exposed, but a counter's without ``_total``.
        kind: What the values mean.
        help: One sentence, with the unit.
        labels: Names of labels, each with its possible values; an empty tuple where these are not known beforehand.
    """

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)

    @property
    def key(self) -> str:
        """The name without the prefix that all have."""
        return self.name.removeprefix(PREFIX)

    @property
    def exposed(self) -> str:
        """The name under which samples are found, but for a histogram's three."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


def _family(kind: Kind, name: str, text: str, **labels: tuple[str, ...]) -> Family:
    return Family(PREFIX + name, kind, text, labels)


_PROCESS_FAMILIES = (
    _family(Kind.GAUGE, "build_info", "Always 1; which version runs.", version=()),
    _family(Kind.HISTOGRAM, "loop_lag_seconds", "How late the event loop was for a timer, in seconds; four a second."),
)

WORKER_FAMILIES = (
    *_PROCESS_FAMILIES,
    _family(
        Kind.GAUGE,
        "engine_info",
        "Always 1; which engine is served. instance_id changes with every life of the engine.",
        model=(),
        engine_version=(),
        instance_id=(),
    ),
    _family(
        Kind.GAUGE,
        "engine_state",
        "1 for the state that the engine is in, from the worker's view, and 0 for the others.",
        state=("starting", "serving", "away", "stopped"),
    ),
    _family(Kind.COUNTER, "engine_recoveries", "How often the engine came back after it had been away."),
    _family(Kind.GAUGE, "draining", "1 while the worker takes itself out of service to end, else 0."),
    _family(Kind.GAUGE, "requests_in_flight", "Requests accepted and not yet ended.", role=ROLES),
    _family(Kind.COUNTER, "requests_accepted", "Requests accepted.", role=ROLES),
    _family(
        Kind.COUNTER,
        "requests_refused",
        "Requests not accepted: malformed, too many open, or no engine to serve them.",
        role=ROLES,
        reason=REFUSALS,
    ),
    _family(
        Kind.COUNTER, "requests_ended", "Accepted requests that have ended, by reason.", role=ROLES, reason=END_REASONS
    ),
    _family(Kind.COUNTER, "prompt_tokens", "Prompt tokens of accepted requests.", role=ROLES),
    _family(Kind.COUNTER, "output_tokens", "Output tokens handed to Dynamo.", role=ROLES),
    _family(
        Kind.COUNTER,
        "chunks",
        "Messages handed to Dynamo; fewer than tokens where deltas were merged.",
        role=ROLES,
    ),
    _family(
        Kind.HISTOGRAM,
        "first_response_seconds",
        "From a request's acceptance to the engine's first message for it, in seconds.",
        role=ROLES,
    ),
    _family(
        Kind.HISTOGRAM,
        "time_to_first_token_seconds",
        "From a request's acceptance to the arrival of its first output token, in seconds.",
        role=ROLES,
    ),
    _family(
        Kind.HISTOGRAM,
        "inter_token_latency_seconds",
        "Time between output tokens of a request, in seconds; tokens that arrive together share it evenly.",
        role=ROLES,
    ),
    _family(
        Kind.HISTOGRAM,
        "request_duration_seconds",
        "From a request's acceptance until its consumer has its end, in seconds.",
        role=ROLES,
    ),
    _family(
        Kind.GAUGE,
        "pool_connections",
        "Connections to the engine by state; down are those that are being made anew.",
        state=("active", "idle", "draining", "down"),
    ),
    _family(Kind.GAUGE, "pool_streams", "Open streams of a connection, by its place in the pool.", connection=()),
    _family(
        Kind.GAUGE,
        "pool_stream_limit",
        "How many streams a connection may carry, by its place in the pool; 0 while it is down.",
        connection=(),
    ),
    _family(Kind.GAUGE, "pool_waiters", "Calls that wait for a connection with room for them."),
    _family(Kind.HISTOGRAM, "pool_wait_seconds", "How long calls waited for a connection, in seconds; 0 is usual."),
    _family(Kind.COUNTER, "pool_reconnects", "Connections that were replaced."),
    _family(Kind.COUNTER, "pool_reconnect_failures", "Attempts to replace a connection that failed."),
    _family(
        Kind.COUNTER, "pool_stream_resets", "Streams that the engine's server reset, by HTTP/2 code.", code=RESET_CODES
    ),
)

ENGINE_FAMILIES = (
    *_PROCESS_FAMILIES,
    _family(Kind.GAUGE, "server_connections", "Open connections of clients."),
    _family(Kind.GAUGE, "server_calls_in_flight", "Open calls, health watches included."),
    _family(Kind.COUNTER, "server_calls", "Calls that have ended, by method and gRPC status.", method=(), status=()),
    _family(Kind.HISTOGRAM, "server_call_duration_seconds", "How long calls took, in seconds.", method=()),
    _family(Kind.COUNTER, "server_output_tokens", "Output tokens sent to clients."),
    _family(Kind.GAUGE, "server_draining", "1 while the server ends, else 0."),
)
