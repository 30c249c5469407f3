"""What OpenTelemetry's variables ask for."""

from __future__ import annotations

import pytest

from trio_sidecar.errors import InvalidConfig
from trio_sidecar.tracing.settings import TraceSettings, trace_settings

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
EXPORTER = "OTEL_TRACES_EXPORTER"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
URL = "http://collector:4318"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on", "OTEL_EXPORT_ENABLED": "1"},
        {ENDPOINT: "", EXPORTER: " "},
        {ENDPOINT: URL, EXPORTER: "none"},
        {ENDPOINT: URL, EXPORTER: "None"},
        {ENDPOINT: URL, "OTEL_SDK_DISABLED": "TRUE"},
        {EXPORTER: "nonsense", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_nobody_asks(environ: dict[str, str]) -> None:
    """Without an exporter or an endpoint there are no traces, and a switch turns them off."""
    assert trace_settings(environ) is None


def test_an_endpoint_asks_for_otlp() -> None:
    """Either endpoint is enough; the one for traces is the one that is named."""
    assert TraceSettings(exporters=("otlp",), asked_by=ENDPOINT) == trace_settings({ENDPOINT: URL})
    both = {ENDPOINT: URL, TRACES_ENDPOINT: "HTTPS://collector/path"}
    assert TraceSettings(exporters=("otlp",), asked_by=TRACES_ENDPOINT) == trace_settings(both)
    assert trace_settings({ENDPOINT: URL, "OTEL_SDK_DISABLED": "false"}) is not None


def test_an_exporter_asks() -> None:
    """Without an endpoint OTLP goes to OpenTelemetry's default; there may be two exporters, each once."""
    assert TraceSettings(exporters=("otlp",)) == trace_settings({EXPORTER: "otlp"})
    assert TraceSettings(exporters=("console",)) == trace_settings({EXPORTER: "Console", ENDPOINT: "junk"})
    assert TraceSettings(exporters=("otlp", "console")) == trace_settings({EXPORTER: "otlp, console,otlp"})


def test_the_protocol() -> None:
    """HTTP unless gRPC is asked for; the variable for traces wins; gRPC needs no scheme in the address."""
    chosen = TraceSettings(exporters=("otlp",), protocol_chosen=True)
    assert chosen == trace_settings({EXPORTER: "otlp", PROTOCOL: "http/protobuf"})
    over_grpc = trace_settings(
        {EXPORTER: "otlp", TRACES_PROTOCOL: "grpc", PROTOCOL: "junk", ENDPOINT: "collector:4317"}
    )
    assert TraceSettings(exporters=("otlp",), protocol_chosen=True, grpc=True) == over_grpc


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({EXPORTER: "zipkin"}, f"{EXPORTER}: 'zipkin' is not one of otlp, console, or none alone"),
        ({EXPORTER: "otlp,none"}, f"{EXPORTER}: 'none' is not one of otlp, console, or none alone"),
        (
            {EXPORTER: "otlp", PROTOCOL: "http/json"},
            f"{PROTOCOL}: 'http/json' is not supported; allowed are http/protobuf and grpc",
        ),
        (
            {ENDPOINT: URL, TRACES_PROTOCOL: "udp", PROTOCOL: "grpc"},
            f"{TRACES_PROTOCOL}: 'udp' is not supported; allowed are http/protobuf and grpc",
        ),
        ({ENDPOINT: "collector:4318"}, f"{ENDPOINT}: 'collector:4318' is no URL that begins with http:// or https://"),
        (
            {ENDPOINT: URL, TRACES_ENDPOINT: "tcp://x"},
            f"{TRACES_ENDPOINT}: 'tcp://x' is no URL that begins with http:// or https://",
        ),
    ],
)
def test_values_that_cannot_be_used_are_named(environ: dict[str, str], told: str) -> None:
    """The error names the variable, its value and what is allowed."""
    with pytest.raises(InvalidConfig) as caught:
        trace_settings(environ)
    assert told == str(caught.value)
