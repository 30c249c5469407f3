"""One request's spans: the phases follow each other, and each span ends once."""

from __future__ import annotations

import pytest

from support.traces import PARENT, REQUEST_PHASES, SPAN_ID, TRACE_ID, RecordedTraces
from trio_sidecar.tracing import NO_TRACES, UNTRACED, Phase, trace_request


def test_phases_follow_each_other_in_the_request() -> None:
    """Each phase is a part of the request, and the request a part of what came; one trace."""
    traces = RecordedTraces()
    request = trace_request(traces.tracer, {"traceparent": PARENT}, "decode")
    for phase in (Phase.STREAM_WAIT, Phase.FIRST_TOKEN, Phase.STREAM):
        request.enter(phase)
    request.released()
    request.end("finished", prompt_tokens=3, output_tokens=2)
    whole = traces.only("request")
    assert [*REQUEST_PHASES, "request"] == traces.names()
    assert [whole.span_id] * 4 + [SPAN_ID] == [span.parent for span in traces.seen]
    assert {TRACE_ID} == {span.trace_id for span in traces.seen}
    assert ("SERVER", None) == (whole.kind, whole.failure)
    assert {
        "trio_sidecar.role": "decode",
        "trio_sidecar.end_reason": "finished",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
    } == whole.attributes
    assert 0 == traces.open


def test_the_engine_works_for_the_request() -> None:
    """What the engine is told is the request's span, not what came."""
    traces = RecordedTraces()
    request = trace_request(traces.tracer, {"traceparent": PARENT, "tracestate": "a=b"}, "aggregated")
    request.end("finished")
    assert {"traceparent": traces.only("request").headers, "tracestate": "a=b"} == request.headers


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "garbage"}])
def test_a_request_without_a_context_begins_a_trace(headers: dict[str, str] | None) -> None:
    """So does one with a malformed context."""
    traces = RecordedTraces()
    trace_request(traces.tracer, headers, "aggregated").end("finished")
    assert "" == traces.only("request").parent


def test_an_unsampled_context_goes_on_as_one() -> None:
    """Who began the trace has decided that nobody records it; neither do we, but the engine is told."""
    traces = RecordedTraces()
    request = trace_request(traces.tracer, {"traceparent": PARENT[:-1] + "0"}, "aggregated")
    request.enter(Phase.STREAM)
    request.end("finished")
    assert [] == traces.seen
    assert request.headers["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert request.headers["traceparent"].endswith("-00")


def test_a_failure_ends_the_phase_that_it_came_in() -> None:
    """Both spans say what it was, and what comes after the end changes nothing."""
    traces = RecordedTraces()
    request = trace_request(traces.tracer, None, "aggregated")
    request.enter(Phase.STREAM_WAIT)
    request.end("error", failure="UNAVAILABLE")
    request.end("finished")
    request.released()
    request.enter(Phase.STREAM)
    failures = [("admission", None), ("wait_for_stream", "UNAVAILABLE"), ("request", "UNAVAILABLE")]
    assert failures == [(span.name, span.failure) for span in traces.seen]
    assert {"trio_sidecar.role": "aggregated", "trio_sidecar.end_reason": "error"} == traces.only("request").attributes
    assert 0 == traces.open


def test_without_a_tracer_the_context_goes_on_as_it_came() -> None:
    """Nobody traces here, but perhaps before and behind us; a malformed context ends here."""
    headers = {"traceparent": PARENT, "tracestate": "a=b", "x-request-id": "1"}
    request = trace_request(NO_TRACES, headers, "aggregated")
    request.enter(Phase.STREAM)
    request.released()
    request.end("finished")
    assert {"traceparent": PARENT, "tracestate": "a=b"} == request.headers
    assert UNTRACED is trace_request(NO_TRACES, {"traceparent": "garbage"}, "aggregated")
    assert {} == UNTRACED.headers
