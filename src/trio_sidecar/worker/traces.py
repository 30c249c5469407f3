"""What Dynamo's runtime has to be told, so that a trace goes through it.

The runtime (1.6.1) reads the trace context of a request, sends it to the next process and hands it to Python only if it
exports spans itself or logs JSON. Which it does is decided by variables of its own, read as it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from trio_sidecar.tracing import trace_settings

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ["let_runtime_trace"]

EXPORT = "OTEL_EXPORT_ENABLED"
JSON_LOGS = "DYN_LOGGING_JSONL"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
HTTP = "http/protobuf"
TRUE = ("1", "true", "yes", "on")

log = structlog.get_logger("trio_sidecar.tracing")


def let_runtime_trace(environment: MutableMapping[str, str]) -> None:
    """Where OpenTelemetry's variables ask for traces, turn on Dynamo's own, to the same place, unless it has been told.

    Raises:
        InvalidConfig: A variable of OpenTelemetry's holds a value that cannot be used.
    """
    settings = trace_settings(environment)
    if settings is None:
        return
    if "otlp" not in settings.exporters:
        environment.setdefault(JSON_LOGS, "1")  # its exporter knows OTLP only
    elif EXPORT not in environment:
        environment[EXPORT] = "1"
        if not settings.protocol_chosen:
            environment[PROTOCOL] = HTTP
    elif environment[EXPORT].lower() in TRUE and not settings.protocol_chosen:
        reason = f"without {PROTOCOL} Dynamo's spans go over gRPC, as they always did, and ours over HTTP"
        log.warning("traces_take_two_protocols", reason=reason, advice=f"{PROTOCOL}={HTTP}")
