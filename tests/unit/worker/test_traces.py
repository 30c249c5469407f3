"""What Dynamo's runtime is told where OpenTelemetry's variables ask for traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trio_sidecar.errors import InvalidConfig
from trio_sidecar.worker.traces import let_runtime_trace

if TYPE_CHECKING:
    from collections.abc import MutableMapping

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
HTTP = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
GRPC = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
CONSOLE = {"OTEL_TRACES_EXPORTER": "console"}
ON = {"OTEL_EXPORT_ENABLED": "1"}


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {}),
        ({"OTEL_SDK_DISABLED": "true"} | ENDPOINT, {}),
        (ENDPOINT, ON | HTTP),
        (ENDPOINT | HTTP, ON),
        (ENDPOINT | GRPC, ON),
        (ENDPOINT | ON | HTTP, {}),
        (ENDPOINT | {"OTEL_EXPORT_ENABLED": "0"}, {}),
        (CONSOLE, {"DYN_LOGGING_JSONL": "1"}),
        (CONSOLE | {"DYN_LOGGING_JSONL": "0"}, {}),
        ({"OTEL_TRACES_EXPORTER": "console,otlp"}, ON | HTTP),
    ],
)
def test_what_is_added(given: dict[str, str], added: dict[str, str], logs: list[MutableMapping[str, Any]]) -> None:
    """Its own spans go where ours go, by the same protocol; what the user told it stays, and nothing is said."""
    environment = dict(given)
    let_runtime_trace(environment)
    assert given | added == environment
    assert [] == logs


@pytest.mark.parametrize("switch", ["1", "True"])
def test_two_protocols_are_warned_about(switch: str, logs: list[MutableMapping[str, Any]]) -> None:
    """Whoever has turned Dynamo's spans on gets them where they went before, and is told that ours go otherwise."""
    environment = ENDPOINT | {"OTEL_EXPORT_ENABLED": switch}
    let_runtime_trace(environment)
    assert ENDPOINT | {"OTEL_EXPORT_ENABLED": switch} == environment
    (line,) = logs
    assert ("traces_take_two_protocols", "warning", "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf") == (
        line["event"],
        line["log_level"],
        line["advice"],
    )


def test_a_wrong_value_is_named() -> None:
    """It is not left for Dynamo to ignore."""
    with pytest.raises(InvalidConfig, match="OTEL_TRACES_EXPORTER: 'zipkin'"):
        let_runtime_trace({"OTEL_TRACES_EXPORTER": "zipkin"})
