"""Logging: structlog in front, the standard library's handlers behind, one look for both.

Everything goes to stderr, because stdout belongs to what a command is asked to print. Prompts, answers and token ids
are never logged; whoever logs sees to that.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import structlog

from trio_sidecar.config import LogFormat, LogLevel

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import TextIO

    from structlog.typing import Processor

    from trio_sidecar.config import LogSettings

# Libraries that log each frame or header at their lower levels.
NOISY = ("asyncio", "grpclib", "h2", "hpack", "urllib3")
DYNAMO_LEVELS = {LogLevel.DEBUG: "info", LogLevel.INFO: "warn", LogLevel.WARNING: "warn", LogLevel.ERROR: "error"}


def configure_logging(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Send the logs of this process to a stream, replacing what was configured before.

    Args:
        settings: Level and format.
        stream: stderr unless given.
    """
    stream = sys.stderr if stream is None else stream
    level = logging.getLevelNamesMapping()[settings.level.name]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # loggers made at import time must follow this call
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(settings.format, stream),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    logging.captureWarnings(capture=True)


def calm_dynamo(environ: MutableMapping[str, str], settings: LogSettings, *, tty: bool) -> None:
    """Set Dynamo's own log variables where the user has not; must happen before its runtime starts.

    Its runtime logs a page at ``info`` for each start, so it is asked for warnings, in the format of ours.
    """
    environ.setdefault("DYN_LOG", DYNAMO_LEVELS[settings.level])
    if _is_json(settings.format, tty=tty):
        environ.setdefault("DYN_LOGGING_JSONL", "1")
    if not tty:
        environ.setdefault("DYN_SDK_DISABLE_ANSI_LOGGING", "1")


def _is_json(log_format: LogFormat, *, tty: bool) -> bool:
    return log_format is LogFormat.JSON or (log_format is LogFormat.AUTO and not tty)


def _rendering(log_format: LogFormat, stream: TextIO) -> list[Processor]:
    tty = stream.isatty()
    if _is_json(log_format, tty=tty):
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # Plain tracebacks: the pretty ones show local variables, and those hold prompts.
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=tty, exception_formatter=plain, pad_event_to=32)]
