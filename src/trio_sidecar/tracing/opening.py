"""A process's tracer: made where variables ask for one, and closed within a budget."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from trio_sidecar.errors import InvalidConfig
from trio_sidecar.tracing.settings import trace_settings
from trio_sidecar.tracing.spans import NO_TRACES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trio_sidecar.tracing.settings import TraceSettings
    from trio_sidecar.tracing.spans import Tracer

__all__ = ["FLUSH_SECS", "open_tracer"]

VARIABLES = "one of OpenTelemetry's variables, OTEL_*"
EXTRA = "trio-sidecar[traces]"
GRPC_PACKAGE = "opentelemetry-exporter-otlp-proto-grpc"

FLUSH_SECS = 2.0
"""How long exporting the last spans may take as a process ends, in seconds."""

log = structlog.get_logger("trio_sidecar.tracing")


@contextmanager
def open_tracer(environ: Mapping[str, str], service: str) -> Iterator[Tracer]:
    """The tracer for a process; without OpenTelemetry's variables it does nothing, and nothing is imported for it.

    Missing packages are one warning and no traces: the variables may be meant for others that read them, too.

    Args:
        environ: OpenTelemetry's SDK also looks into the process's own.
        service: The service's name, where no variable gives one.

    Raises:
        InvalidConfig: A variable of OpenTelemetry's holds a value that cannot be used.
    """
    settings = trace_settings(environ)
    if settings is None:
        yield NO_TRACES
        return
    try:
        from trio_sidecar.tracing.otel import make_tracer  # noqa: PLC0415 - an extra, and slow to import

        tracer = make_tracer(settings, service)
    except ImportError as error:
        _warn_missing(settings, error)
        yield NO_TRACES
        return
    except ValueError as error:
        raise InvalidConfig(VARIABLES, str(error)) from error
    log.info("traces_on", exporters=",".join(settings.exporters), asked_by=settings.asked_by)
    try:
        yield tracer
    finally:
        tracer.close(FLUSH_SECS)


def _warn_missing(settings: TraceSettings, error: ImportError) -> None:
    if (error.name or "").partition(".")[0] != "opentelemetry":
        raise error  # installed but broken: its own message says more
    what = GRPC_PACKAGE if settings.grpc and "grpc" in str(error.name) else EXTRA
    log.warning("traces_off", reason=f"{settings.asked_by} asks for traces", advice=f"pip install '{what}'")
