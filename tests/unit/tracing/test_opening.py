"""A process's tracer: there where it is asked for, and no burden where it is not."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from support.traces import running_collector
from trio_sidecar import tracing
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.tracing import NO_TRACES, open_tracer, opening, otel

if TYPE_CHECKING:
    from collections.abc import MutableMapping

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our module be imported again, until the test's end."""
    monkeypatch.setattr(tracing, "otel", otel)
    monkeypatch.delitem(sys.modules, otel.__name__)


def test_nothing_is_imported_unless_asked_for() -> None:
    """A process without OpenTelemetry's variables never loads it."""
    program = (
        "import sys; import trio_sidecar.cli.commands, trio_sidecar.server, trio_sidecar.requests.sessions\n"
        "from trio_sidecar.tracing import open_tracer\n"
        "with open_tracer({}, 'x') as tracer: assert not tracer.enabled\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "[]\n" == done.stdout


def test_asked_for(monkeypatch: pytest.MonkeyPatch, logs: list[MutableMapping[str, Any]]) -> None:
    """The tracer works while the block lasts, and what it has seen is exported at its end, which says nothing."""
    with running_collector() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        with open_tracer({ENDPOINT: collector.url}, "ours") as tracer:
            assert tracer.enabled
            tracer.begin("request").end()
    assert [("request", "ours")] == [(span.name, span.service) for span in collector.seen]
    assert [("traces_on", "info", "otlp", ENDPOINT)] == [
        (line["event"], line["log_level"], line["exporters"], line["asked_by"]) for line in logs
    ]


def test_an_error_in_the_block_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is exported all the same, within the budget, and the error is the block's own."""
    budgets = []
    monkeypatch.setattr(otel.OtelTracer, "close", lambda self, budget: budgets.append(budget))
    with pytest.raises(KeyError), open_tracer({"OTEL_TRACES_EXPORTER": "console"}, "ours"):
        raise KeyError
    assert [opening.FLUSH_SECS] == budgets


@pytest.mark.parametrize(
    ("missing", "environ", "package"),
    [
        ("opentelemetry.sdk.trace", {ENDPOINT: "http://x"}, "trio-sidecar[traces]"),
        ("opentelemetry.exporter.otlp.proto.http.trace_exporter", {ENDPOINT: "http://x"}, "trio-sidecar[traces]"),
        (
            "opentelemetry.exporter.otlp.proto.grpc",
            {ENDPOINT: "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "opentelemetry-exporter-otlp-proto-grpc",
        ),
    ],
)
def test_missing_packages_are_one_warning(
    monkeypatch: pytest.MonkeyPatch,
    logs: list[MutableMapping[str, Any]],
    missing: str,
    environ: dict[str, str],
    package: str,
) -> None:
    """The variables may be for others that read them: work goes on, and the advice names what to install."""
    forget(monkeypatch)
    monkeypatch.setitem(sys.modules, missing, None)
    with open_tracer(environ, "ours") as tracer:
        assert NO_TRACES is tracer
    (line,) = logs
    assert ("traces_off", "warning") == (line["event"], line["log_level"])
    assert f"pip install '{package}'" == line["advice"]
    assert f"{ENDPOINT} asks for traces" in line["reason"]


def test_what_is_broken_is_not_taken_for_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that fails for another reason says so."""
    forget(monkeypatch)
    monkeypatch.setitem(sys.modules, "structlog", None)
    with pytest.raises(ImportError, match="structlog"), open_tracer({ENDPOINT: "http://x"}, "ours"):
        pass


def test_values_that_the_sdk_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are wrong settings, too."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "20")
    with pytest.raises(InvalidConfig, match="OTEL_"), open_tracer({"OTEL_TRACES_EXPORTER": "console"}, "ours"):
        pass
    with pytest.raises(InvalidConfig, match="OTEL_TRACES_EXPORTER"), open_tracer({"OTEL_TRACES_EXPORTER": "x"}, "ours"):
        pass
