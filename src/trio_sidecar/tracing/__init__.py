"""Traces: which spans there are, how a trace's context goes on, and OpenTelemetry where its variables ask for it.

Only :mod:`~trio_sidecar.tracing.otel` imports OpenTelemetry, and only :func:`open_tracer` imports that.
"""

from trio_sidecar.tracing.headers import passed_on, with_trace
from trio_sidecar.tracing.opening import open_tracer
from trio_sidecar.tracing.request import UNTRACED, Phase, RequestTrace, trace_request
from trio_sidecar.tracing.settings import TraceSettings, trace_settings
from trio_sidecar.tracing.spans import NO_TRACES, Activity, NoTraces, Span, Tracer

__all__ = [
    "NO_TRACES",
    "UNTRACED",
    "Activity",
    "NoTraces",
    "Phase",
    "RequestTrace",
    "Span",
    "TraceSettings",
    "Tracer",
    "open_tracer",
    "passed_on",
    "trace_request",
    "trace_settings",
    "with_trace",
]
