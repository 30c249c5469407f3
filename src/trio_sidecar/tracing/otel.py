"""OpenTelemetry behind our protocols; the only module that imports it.

The provider is our own and never the process's global one, which belongs to vLLM where it runs in our process.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trio_sidecar import __version__
from trio_sidecar.tracing.headers import passed_on

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

    from trio_sidecar.tracing.settings import TraceSettings
    from trio_sidecar.tracing.spans import Attribute, Span

__all__ = ["OtelTracer", "make_tracer"]

SCOPE = "trio_sidecar"
NAMES = {"prompt_tokens": "gen_ai.usage.input_tokens", "output_tokens": "gen_ai.usage.output_tokens"}
"""Attributes that OpenTelemetry has a name for; the others are ours."""

UNNAMED_SERVICE = "unknown_service"

log = structlog.get_logger("trio_sidecar.tracing")


class OtelTracer:
    """Implements :class:`~trio_sidecar.tracing.spans.Tracer`.

    Attributes:
        provider: OpenTelemetry's, with whatever exports.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self.provider = provider
        self._tracer = provider.get_tracer(SCOPE, __version__)
        self._propagator = TraceContextTextMapPropagator()

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
        attributes: Mapping[str, Attribute] | None = None,
    ) -> Span:
        """Begin a span."""
        if isinstance(parent, _OtelSpan):
            context = parent.context
        elif isinstance(parent, Mapping):
            context = self._propagator.extract(passed_on(parent), Context())
        else:
            context = Context()  # given, because otherwise the surrounding one would be taken
        kind = SpanKind.SERVER if serves else SpanKind.INTERNAL
        span = self._tracer.start_span(name, context, kind, _named(attributes))
        return _OtelSpan(span, self._propagator)

    def close(self, budget_secs: float) -> bool:
        """Export what has ended, for so long at most.

        An exporter whose peer is silent can take its own time-out, and as long again for each further batch; it is left
        behind in its daemon thread, which does not keep the process.

        Returns:
            Whether everything that was left has been tried.
        """
        thread = threading.Thread(target=self.provider.shutdown, name="trio-sidecar-traces", daemon=True)
        thread.start()
        thread.join(budget_secs)
        if thread.is_alive():
            log.warning("traces_lost", reason=f"the last spans were not exported within {budget_secs:g} s")
            return False
        return True


class _OtelSpan:
    __slots__ = ("_ended", "_propagator", "_span", "context")

    def __init__(self, span: trace.Span, propagator: TraceContextTextMapPropagator) -> None:
        self._span = span
        self._propagator = propagator
        self._ended = False
        self.context = set_span_in_context(span, Context())

    @property
    def headers(self) -> Mapping[str, str]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self.context)
        return carrier

    @property
    def recorded(self) -> bool:
        return self._span.is_recording()

    def end(self, *, failure: str = "", attributes: Mapping[str, Attribute] | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        if attributes:
            self._span.set_attributes(_named(attributes) or {})
        if failure:
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end()


def make_tracer(settings: TraceSettings, service: str) -> OtelTracer:
    """Set OpenTelemetry up as its variables say.

    Args:
        settings: What was asked for.
        service: The service's name, where no variable gives one.

    Raises:
        ImportError: The exporter is not installed.
        ValueError: A variable that the SDK reads holds no sense.
    """
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, UNNAMED_SERVICE)).startswith(UNNAMED_SERVICE):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    exporters = [_exporter(name, grpc=settings.grpc) for name in settings.exporters]
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTracer(provider)


def _exporter(name: str, *, grpc: bool) -> SpanExporter:
    if name == "console":
        # stdout is for what a command is asked to print.
        return ConsoleSpanExporter(out=sys.stderr, formatter=_line)
    if grpc:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc  # noqa: PLC0415

        exporter: SpanExporter = over_grpc.OTLPSpanExporter()
        return exporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    return OTLPSpanExporter()


def _line(span: ReadableSpan) -> str:
    return str(span.to_json(indent=None)) + "\n"


def _named(attributes: Mapping[str, Attribute] | None) -> dict[str, Attribute] | None:
    if not attributes:
        return None
    return {NAMES.get(name, f"{SCOPE}.{name}"): value for name, value in attributes.items()}
