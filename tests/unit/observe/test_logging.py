"""Logging: one look for structlog's and the standard library's records."""

from __future__ import annotations

import io
import json
import logging
import warnings

import pytest
import structlog

from trio_sidecar.config import LogFormat, LogLevel, LogSettings
from trio_sidecar.observe.logging import calm_dynamo, configure_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def log_everything(log_format: LogFormat, stream: io.StringIO, level: LogLevel = LogLevel.INFO) -> list[str]:
    configure_logging(LogSettings(level=level, format=log_format), stream)
    log = structlog.get_logger("trio_sidecar.pool")
    log.debug("slot_connecting", slot=1)
    log.info("slot_ready", slot=1)
    logging.getLogger("asyncio").warning("slow %s", "callback")
    logging.getLogger("grpclib.server").info("noise")
    return stream.getvalue().splitlines()


def test_json_has_one_object_for_each_record() -> None:
    """Records of both kinds are objects with event, level, logger and time, in order."""
    first, second = [json.loads(line) for line in log_everything(LogFormat.JSON, io.StringIO())]

    assert ("slot_ready", "info", "trio_sidecar.pool", 1) == (
        first["event"],
        first["level"],
        first["logger"],
        first["slot"],
    )
    assert ("slow callback", "warning", "asyncio") == (second["event"], second["level"], second["logger"])
    assert first["timestamp"].endswith("Z")


def test_console_is_for_people() -> None:
    """Lines hold the event and its keys, coloured on a terminal only."""
    plain = log_everything(LogFormat.CONSOLE, io.StringIO())
    coloured = log_everything(LogFormat.CONSOLE, Terminal())

    assert "slot_ready" in plain[0]
    assert "slot=1" in plain[0]
    assert "\x1b[" not in plain[0]
    assert "\x1b[" in coloured[0]


@pytest.mark.parametrize(("stream", "is_json"), [(io.StringIO(), True), (Terminal(), False)], ids=["pipe", "terminal"])
def test_auto_is_json_unless_a_terminal_reads(stream: io.StringIO, is_json: bool) -> None:
    """Machines get JSON, people do not."""
    assert is_json is log_everything(LogFormat.AUTO, stream)[0].startswith("{")


def test_level_is_the_least_severe_that_is_written() -> None:
    """Debug shows all of our own, error hides the rest; libraries that log each frame stay quiet."""
    debug = [json.loads(line)["event"] for line in log_everything(LogFormat.JSON, io.StringIO(), LogLevel.DEBUG)]

    assert ["slot_connecting", "slot_ready", "slow callback"] == debug
    assert [] == log_everything(LogFormat.JSON, io.StringIO(), LogLevel.ERROR)


@pytest.mark.parametrize("log_format", [LogFormat.JSON, LogFormat.CONSOLE])
def test_tracebacks_do_not_show_local_variables(log_format: LogFormat) -> None:
    """Locals hold prompts; a traceback has the lines of code only."""
    stream = io.StringIO()
    configure_logging(LogSettings(format=log_format), stream)
    prompt = "SECRET".lower()
    try:
        raise ValueError(len(prompt))
    except ValueError:
        structlog.get_logger("trio_sidecar.x").exception("failed")
        logging.getLogger("x").exception("failed too")

    assert 2 == stream.getvalue().count("ValueError: 6")
    assert "secret" not in stream.getvalue()


def test_context_is_joined() -> None:
    """Keys bound for the current task appear in its records."""
    stream = io.StringIO()
    configure_logging(LogSettings(format=LogFormat.JSON), stream)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger("trio_sidecar.x").info("request_ended")

    assert "r1" == json.loads(stream.getvalue())["request_id"]


def test_configuring_again_replaces() -> None:
    """A second call leaves one handler, and loggers made before follow it."""
    log = structlog.get_logger("trio_sidecar.x")
    old, new = io.StringIO(), io.StringIO()
    configure_logging(LogSettings(format=LogFormat.JSON), old)
    log.info("one")
    configure_logging(LogSettings(format=LogFormat.JSON), new)
    log.info("two")

    assert (["one"], ["two"]) == tuple(
        [json.loads(line)["event"] for line in stream.getvalue().splitlines()] for stream in (old, new)
    )


def test_warnings_are_records() -> None:
    """Python's warnings take the same way."""
    stream = io.StringIO()
    configure_logging(LogSettings(format=LogFormat.JSON), stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("old call", DeprecationWarning, stacklevel=1)

    assert "old call" in json.loads(stream.getvalue())["event"]


@pytest.mark.parametrize(
    ("level", "log_format", "tty", "expected"),
    [
        (LogLevel.INFO, LogFormat.AUTO, True, {"DYN_LOG": "warn"}),
        (
            LogLevel.DEBUG,
            LogFormat.AUTO,
            False,
            {"DYN_LOG": "info", "DYN_LOGGING_JSONL": "1", "DYN_SDK_DISABLE_ANSI_LOGGING": "1"},
        ),
        (LogLevel.ERROR, LogFormat.JSON, True, {"DYN_LOG": "error", "DYN_LOGGING_JSONL": "1"}),
        (LogLevel.INFO, LogFormat.CONSOLE, False, {"DYN_LOG": "warn", "DYN_SDK_DISABLE_ANSI_LOGGING": "1"}),
    ],
)
def test_dynamos_logs_follow_ours(
    level: LogLevel,
    log_format: LogFormat,
    tty: bool,
    expected: dict[str, str],
) -> None:
    """Level and format carry over to Dynamo's runtime, a step quieter."""
    environ: dict[str, str] = {}
    calm_dynamo(environ, LogSettings(level=level, format=log_format), tty=tty)

    assert expected == environ


def test_the_users_choice_for_dynamo_stays() -> None:
    """Variables that are set are not touched."""
    environ = {"DYN_LOG": "debug"}
    calm_dynamo(environ, LogSettings(), tty=True)

    assert {"DYN_LOG": "debug"} == environ
