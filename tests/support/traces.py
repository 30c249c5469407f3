"""Spans in memory, and an OpenTelemetry collector in miniature."""

from __future__ import annotations

import contextlib
import http.server
import threading
from typing import TYPE_CHECKING

import attrs
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import format_span_id, format_trace_id

from trio_sidecar.tracing.otel import OtelTracer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
"""A trace context from elsewhere."""

REQUEST_PHASES = ["admission", "wait_for_stream", "first_token", "stream"]


@attrs.frozen(slots=True, kw_only=True)
class SeenSpan:
    """A span that has ended.

    Attributes:
        parent: The id of the one that it is a part of; empty for the first of a trace.
        kind: As OpenTelemetry calls it.
        failure: The description of its error; None without one.
    """

    name: str
    trace_id: str
    span_id: str
    parent: str
    kind: str = "INTERNAL"
    failure: str | None = None
    attributes: Mapping[str, object] = attrs.field(factory=dict)
    service: str = ""

    @property
    def headers(self) -> str:
        """The ``traceparent`` of what is a part of it."""
        return f"00-{self.trace_id}-{self.span_id}-01"


class _Keeper(SpanProcessor):
    def __init__(self) -> None:
        self.open = 0
        self.seen: list[SeenSpan] = []

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self.open += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.open -= 1
        context, parent = span.get_span_context(), span.parent
        assert context is not None
        self.seen.append(
            SeenSpan(
                name=span.name,
                trace_id=format_trace_id(context.trace_id),
                span_id=format_span_id(context.span_id),
                parent="" if parent is None else format_span_id(parent.span_id),
                kind=span.kind.name,
                failure=None if span.status.is_ok or span.status.is_unset else span.status.description,
                attributes=dict(span.attributes or {}),
            )
        )


class RecordedTraces:
    """A tracer whose spans stay in memory.

    Attributes:
        tracer: The tracer.
    """

    def __init__(self) -> None:
        self._keeper = _Keeper()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(self._keeper)
        self.tracer = OtelTracer(provider)

    @property
    def open(self) -> int:
        """How many spans have begun and not ended."""
        return self._keeper.open

    @property
    def seen(self) -> list[SeenSpan]:
        """Those that have ended, in that order; each as often as it has ended."""
        return self._keeper.seen

    def names(self) -> list[str]:
        """Their names."""
        return [span.name for span in self.seen]

    def only(self, name: str) -> SeenSpan:
        """The only one of that name."""
        (span,) = [span for span in self.seen if span.name == name]
        return span


@attrs.define(eq=False)
class Collector:
    """Takes spans over OTLP/HTTP.

    Attributes:
        url: Its base address, for ``OTEL_EXPORTER_OTLP_ENDPOINT``.
    """

    url: str = ""
    _spans: list[SeenSpan] = attrs.field(factory=list)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    @property
    def seen(self) -> list[SeenSpan]:
        """What has arrived."""
        with self._lock:
            return list(self._spans)

    def named(self, name: str, service: str) -> list[SeenSpan]:
        """Those of one name from one service."""
        return [span for span in self.seen if (span.name, span.service) == (name, service)]

    def take(self, body: bytes) -> None:
        """An export request has arrived."""
        message = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for resource in message.resource_spans:
                facts = {item.key: item.value.string_value for item in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self._spans += [_seen(span, facts.get("service.name", "")) for span in scope.spans]


def _seen(span: object, service: str) -> SeenSpan:
    read = span.attributes  # type: ignore[attr-defined]
    return SeenSpan(
        name=span.name,  # type: ignore[attr-defined]
        trace_id=span.trace_id.hex(),  # type: ignore[attr-defined]
        span_id=span.span_id.hex(),  # type: ignore[attr-defined]
        parent=span.parent_span_id.hex(),  # type: ignore[attr-defined]
        failure=span.status.message or None,  # type: ignore[attr-defined]
        attributes={item.key: getattr(item.value, item.value.WhichOneof("value") or "string_value") for item in read},
        service=service,
    )


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a port that the system chooses."""
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                collector.take(body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_request(self, code: object = "-", size: object = "-") -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
