"""A tracer that only keeps books, and what must hold of every request's spans at the end of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from simulation.client import Client
    from simulation.world import World
    from trio_sidecar.tracing import Span

__all__ = ["SpanBook", "check_spans", "trace_of"]

OF_ENDS = {"length": "finished", "stop": "finished"}
PHASES = ("admission", "wait_for_stream", "first_token", "stream")


def trace_of(number: int) -> dict[str, str]:
    """The trace context of a client's request."""
    return {"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01"}


@attrs.define(eq=False)
class BookSpan:
    """A span: how often it has ended, and with what."""

    name: str
    number: int
    trace: str
    parent: object
    ends: int = 0
    failure: str = ""
    attributes: dict[str, object] = attrs.field(factory=dict)

    @property
    def headers(self) -> Mapping[str, str]:
        """It, as the engine is told."""
        return {"traceparent": f"00-{self.trace}-{self.number:016x}-01"}

    @property
    def recorded(self) -> bool:
        """Always."""
        return True

    def end(self, *, failure: str = "", attributes: Mapping[str, object] | None = None) -> None:
        """Count."""
        self.ends += 1
        self.failure = failure
        self.attributes |= attributes or {}


@attrs.define(eq=False)
class SpanBook:
    """Every span of a run."""

    spans: list[BookSpan] = attrs.field(factory=list)

    @property
    def enabled(self) -> bool:
        """Always."""
        return True

    def begin(
        self,
        name: str,
        parent: Span | Mapping[str, str] | None = None,
        *,
        serves: bool = False,
        attributes: Mapping[str, object] | None = None,
    ) -> BookSpan:
        """Note one more."""
        del serves
        number = len(self.spans) + 1
        if isinstance(parent, BookSpan):
            trace = parent.trace
        else:
            assert parent is None or isinstance(parent, Mapping)
            trace = (parent or {}).get("traceparent", f"00-{number:032x}")[3:35]
        span = BookSpan(name, number, trace, parent, attributes=dict(attributes or {}))
        self.spans.append(span)
        return span


def check_spans(world: World) -> None:
    """Each span has ended once; each request has one, which tells its end; its phases are in order."""
    spans = world.spans.spans
    for span in spans:
        if span.ends != 1:
            world.fault(f"the span {span.name} {span.number} has ended {span.ends} times")
    requests = {span.trace: span for span in spans if span.name == "request"}
    started = [client for client in world.dynamo.clients if client.started_at is not None]
    counted = Counter(span.name for span in spans)
    if counted["request"] != len(requests) or len(requests) != len(started):
        world.fault(f"{len(started)} requests, {counted['request']} spans of requests, {len(requests)} traces")
    for client in started:
        request = requests.get(trace_of(client.plan.number)["traceparent"][3:35])
        if request is not None:
            _check_request(world, client, request)


def _check_request(world: World, client: Client, request: BookSpan) -> None:
    name = f"request {client.plan.number}"
    phases = [span.name for span in world.spans.spans if span.parent is request]
    if phases != list(PHASES[: len(phases)]) or not phases:
        world.fault(f"{name}: its phases are {phases}")
    reason = request.attributes.get("end_reason")
    for end in client.ends:
        if OF_ENDS.get(end) == "finished" and (reason, request.failure) != ("finished", ""):
            world.fault(f"{name}: it ended with {end}, its trace with {reason} {request.failure}")
        if end not in OF_ENDS and end != "cancelled" and not request.failure:
            world.fault(f"{name}: it failed with {end}, its trace says {reason}")
    tokens = request.attributes.get("output_tokens", 0)
    if client.ends and client.ends[0] in OF_ENDS and tokens != len(client.tokens):
        world.fault(f"{name}: {len(client.tokens)} tokens, its trace counts {tokens}")
