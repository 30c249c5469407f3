"""Work that belongs to no request, and spans that nobody wants to see."""

from __future__ import annotations

import pytest
import trio

from support.traces import RecordedTraces
from trio_sidecar.tracing import NO_TRACES, Activity


def test_an_activity_is_a_trace_of_its_own() -> None:
    """It has what was known at its beginning and at its end."""
    traces = RecordedTraces()
    with Activity(traces.tracer, "drain", requests=2) as activity:
        activity.results["cut"] = 1
    drain = traces.only("drain")
    assert ("", None) == (drain.parent, drain.failure)
    assert {"trio_sidecar.requests": 2, "trio_sidecar.cut": 1} == drain.attributes


async def test_what_leaves_an_activity_is_its_failure() -> None:
    """An error and a cancel alike; both go on."""
    traces = RecordedTraces()
    with pytest.raises(ValueError, match="secret"), Activity(traces.tracer, "one"):
        int("secret")
    with trio.CancelScope() as scope, Activity(traces.tracer, "two"):
        scope.cancel()
        await trio.sleep_forever()
    assert [("one", "ValueError"), ("two", "Cancelled")] == [(span.name, span.failure) for span in traces.seen]


def test_nobody_wants_to_see() -> None:
    """Without a tracer there is nothing to be done, and no header."""
    with Activity(NO_TRACES, "drain", requests=2) as activity:
        activity.results["cut"] = 1
    span = NO_TRACES.begin("request", {"traceparent": "x"}, serves=True)
    span.end(failure="x")
    assert ({}, False, False) == (span.headers, span.recorded, NO_TRACES.enabled)
