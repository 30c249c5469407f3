"""What each process that vLLM starts does first; vLLM loads this as a plugin (group ``vllm.general_plugins``).

vLLM's processes must die with us, however we die, or they would keep the accelerator's memory. They must leave Ctrl-C,
which a terminal sends to all of them, to us, or a drain would have nothing left to drain. And why one of them fails to
start must reach us in one line. In any other vLLM process on the machine this does nothing.

Imports stay few: vLLM's front end loads this too.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEBUG_VARIABLE", "OWNER_VARIABLE", "REPORT_VARIABLE", "end_quickly", "first_report", "plugin"]

OWNER_VARIABLE = "TRIO_SIDECAR_VLLM_OWNER"
"""Process id of the process that owns the engine."""

REPORT_VARIABLE = "TRIO_SIDECAR_VLLM_REPORT"
"""File that gets one JSON line per error."""

DEBUG_VARIABLE = "TRIO_SIDECAR_VLLM_DEBUG"
"""Set if tracebacks of vLLM's processes are wanted."""

PR_SET_PDEATHSIG = 1
FORMAT = "%(asctime)s %(levelname)-8s %(processName)s %(name)s: %(message)s"


def plugin() -> None:
    """Take charge of this process, if it is one that an engine of ours has started."""
    parent = multiprocessing.parent_process()
    if OWNER_VARIABLE not in os.environ or parent is None:
        return
    die_with(parent.pid or 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_quickly()
    configure_logging(os.environ)


def end_quickly() -> None:
    """Let this process, once all is shut down, end without a last search for garbage among a million objects."""
    atexit.register(gc.freeze)


def die_with(parent: int) -> None:
    """Be killed when the parent dies; at once if it is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def configure_logging(environ: Mapping[str, str]) -> None:
    """Log to stderr, without tracebacks unless they are wanted; report errors to the owner."""
    debug = DEBUG_VARIABLE in environ
    root = logging.getLogger()
    if not root.handlers:
        fresh = logging.StreamHandler()
        fresh.setFormatter(logging.Formatter(FORMAT))
        root.addHandler(fresh)
        root.setLevel(environ.get("VLLM_LOGGING_LEVEL", "INFO"))
    for handler in root.handlers:
        handler.addFilter(_Reporter(Path(environ[REPORT_VARIABLE]), debug=debug))


class _Reporter(logging.Filter):
    """Writes errors with their exception to a file; drops the traceback, and what the interpreter would print of it."""

    def __init__(self, report: Path, *, debug: bool) -> None:
        super().__init__()
        self._report = report
        self._debug = debug

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if record.levelno < logging.ERROR or error is None:
            return True
        with self._report.open("a", encoding="utf-8") as report:
            report.write(json.dumps({"type": type(error).__name__, "message": str(error)}) + "\n")
        if not self._debug:
            record.exc_info = None
            record.exc_text = None
            # The process ends with this error; what multiprocessing prints then would say it again, with a traceback.
            sys.stderr.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        return self._debug


def first_report(report: Path) -> str | None:
    """Why a process of vLLM failed, the first one of all; None if nothing was reported."""
    try:
        lines = report.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    for line in lines:
        found = json.loads(line)
        return f"{found['type']}: {' '.join(found['message'].split())}"
    return None
