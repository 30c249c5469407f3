"""OpenTelemetry behind our protocols: whereto it exports, and that closing it takes no longer than allowed."""

from __future__ import annotations

import json
import socket
import time

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc
from opentelemetry.sdk.trace import TracerProvider

from support.traces import PARENT, SPAN_ID, TRACE_ID, RecordedTraces, running_collector
from trio_sidecar.tracing import NO_TRACES
from trio_sidecar.tracing.otel import OtelTracer, make_tracer
from trio_sidecar.tracing.settings import TraceSettings

OTLP = TraceSettings(exporters=("otlp",))
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tester's own settings change nothing."""
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


def test_spans_arrive_at_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing exports what has ended; the service has our name where no variable gives one."""
    with running_collector() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        tracer = make_tracer(OTLP, "our-service")
        span = tracer.begin("request", {"traceparent": PARENT}, attributes={"role": "server", "prompt_tokens": 3})
        span.end(failure="INTERNAL", attributes={"end_reason": "error"})
        assert tracer.close(10)
    (seen,) = collector.seen
    assert ("request", TRACE_ID, SPAN_ID) == (seen.name, seen.trace_id, seen.parent)
    assert ("our-service", "INTERNAL") == (seen.service, seen.failure)
    attributes = {"trio_sidecar.role": "server", "gen_ai.usage.input_tokens": 3, "trio_sidecar.end_reason": "error"}
    assert attributes == seen.attributes


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_SERVICE_NAME", "theirs"), ("OTEL_RESOURCE_ATTRIBUTES", "a=b,service.name=theirs")]
)
def test_the_users_service_name_wins(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """Either variable gives the name."""
    monkeypatch.setenv(variable, value)
    tracer = make_tracer(OTLP, "ours")
    assert "theirs" == tracer.provider.resource.attributes["service.name"]
    assert tracer.close(10)


def test_a_silent_collector_takes_no_longer_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that accepts and never answers is left behind."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracer = make_tracer(OTLP, "ours")
        tracer.begin("request").end()
        started = time.monotonic()
        assert not tracer.close(0.2)
        assert time.monotonic() - started < 5
    # Without its peer the exporter would try again; this ends its thread before the next test.
    for processor in tracer.provider._active_span_processor._span_processors:
        processor.span_exporter.shutdown()  # type: ignore[attr-defined]


def test_the_console_is_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """One line of JSON a span; stdout is for what a command is asked to print."""
    tracer = make_tracer(TraceSettings(exporters=("console",)), "ours")
    tracer.begin("request", {"traceparent": PARENT}).end()
    assert tracer.close(10)
    out, err = capsys.readouterr()
    assert "" == out
    (line,) = err.splitlines()
    assert ("request", f"0x{TRACE_ID}") == (json.loads(line)["name"], json.loads(line)["context"]["trace_id"])


def test_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other exporter is taken if it is asked for."""
    made = []

    class Exporter(over_grpc.OTLPSpanExporter):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            made.append(self)

        def shutdown(self, timeout_millis: float = 0, **_: object) -> None:
            pass

    monkeypatch.setattr(over_grpc, "OTLPSpanExporter", Exporter)
    tracer = make_tracer(TraceSettings(exporters=("otlp",), grpc=True), "ours")
    assert 1 == len(made)
    assert tracer.close(10)


def test_a_sampler_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK reads its own variables."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracer = make_tracer(OTLP, "ours")
    flags = int(tracer.begin("request").headers["traceparent"][-2:], 16)
    assert 0 == flags & trace.TraceFlags.SAMPLED
    assert tracer.close(10)


def test_nothing_is_taken_from_the_surroundings() -> None:
    """A span that somebody else has made current in this task is no parent of ours."""
    traces = RecordedTraces()
    other = TracerProvider(shutdown_on_exit=False).get_tracer("other")
    with other.start_as_current_span("other"):
        traces.tracer.begin("drain").end()
        traces.tracer.begin("request", {"traceparent": "garbage"}).end()
        traces.tracer.begin("request", NO_TRACES.begin("x")).end()
        ours = traces.tracer.begin("request")
        assert "other" == trace.get_current_span().name  # type: ignore[attr-defined]
        ours.end()
    assert [""] * 4 == [span.parent for span in traces.seen]


def test_a_span_ends_once() -> None:
    """A second end neither counts nor changes anything."""
    traces = RecordedTraces()
    span = traces.tracer.begin("request")
    span.end(attributes={"cut": 1})
    span.end(failure="INTERNAL", attributes={"cut": 2})
    (seen,) = traces.seen
    assert (None, {"trio_sidecar.cut": 1}) == (seen.failure, seen.attributes)


def test_the_global_provider_is_left_alone() -> None:
    """It belongs to whoever else traces in this process, as vLLM does."""
    before = trace.get_tracer_provider()
    tracer = make_tracer(OTLP, "ours")
    assert before is trace.get_tracer_provider()
    assert isinstance(tracer, OtelTracer)
    assert tracer.close(10)
