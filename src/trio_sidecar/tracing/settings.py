"""Whether to trace, and whereto: OpenTelemetry's own variables say so, and nothing else does.

Read here are only those that decide whether OpenTelemetry is imported at all, and with what; the rest (sampler, queue
sizes, headers, time-outs, resource) is for its SDK to read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TraceSettings", "trace_settings"]

DISABLED = "OTEL_SDK_DISABLED"
EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

EXPORTERS = ("otlp", "console")
NONE = "none"
HTTP = "http/protobuf"
GRPC = "grpc"


@attrs.frozen(slots=True, kw_only=True)
class TraceSettings:
    """How to trace.

    Attributes:
        exporters: Any of ``otlp`` and ``console``.
        grpc: Whether OTLP goes over gRPC instead of HTTP.
        protocol_chosen: Whether a variable says over which.
        asked_by: The variable that wants traces.
    """

    exporters: tuple[str, ...]
    grpc: bool = False
    protocol_chosen: bool = False
    asked_by: str = EXPORTER


def trace_settings(environ: Mapping[str, str]) -> TraceSettings | None:
    """What the variables ask for; None if they do not ask for traces.

    Raises:
        InvalidConfig: An exporter, a protocol or an endpoint that cannot be used; it names the variable.
    """
    if _value(environ, DISABLED)[1].lower() == "true":
        return None
    asked_by, endpoint = _value(environ, *ENDPOINTS)
    _, chosen = _value(environ, EXPORTER)
    if chosen:
        asked_by = EXPORTER
    elif not endpoint:
        return None
    exporters = tuple(dict.fromkeys(name.strip().lower() for name in (chosen or EXPORTERS[0]).split(",")))
    if exporters == (NONE,):
        return None
    for name in exporters:
        if name not in EXPORTERS:
            raise InvalidConfig(EXPORTER, f"{name!r} is not one of {', '.join(EXPORTERS)}, or {NONE} alone")
    if EXPORTERS[0] not in exporters:
        return TraceSettings(exporters=exporters)
    variable, protocol = _value(environ, *PROTOCOLS)
    if protocol not in ("", HTTP, GRPC):
        raise InvalidConfig(variable, f"{protocol!r} is not supported; allowed are {HTTP} and {GRPC}")
    if protocol != GRPC and endpoint and not endpoint.lower().startswith(("http://", "https://")):
        variable, _ = _value(environ, *ENDPOINTS)
        raise InvalidConfig(variable, f"{endpoint!r} is no URL that begins with http:// or https://")
    return TraceSettings(exporters=exporters, grpc=protocol == GRPC, protocol_chosen=bool(protocol), asked_by=asked_by)


def _value(environ: Mapping[str, str], *names: str) -> tuple[str, str]:
    """The first of these variables that is set, and not to nothing, which OpenTelemetry takes for unset."""
    for name in names:
        if value := environ.get(name, "").strip():
            return name, value
    return names[-1], ""
