"""The process's standard streams, when they are closed or nobody reads them any more."""

from __future__ import annotations

import errno
import os
import sys

__all__ = ["finish_output", "open_missing", "silence"]

STANDARD = (0, 1, 2)


def open_missing() -> None:
    """Open what the process was started without (``>&-``) on the null device.

    Otherwise the next file or socket would get the number, and whoever writes to stdout would write into that.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) in STANDARD:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as we
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def finish_output() -> OSError | None:
    """Write out what is left of stdout and stderr; where that fails, silence them for the end of the process.

    Returns:
        Why stdout could not be written; None if it could, or if its reader has only gone away.
    """
    failed: OSError | None = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if stream is sys.stdout and error.errno != errno.EPIPE:
                failed = error
            silence(stream.fileno())
    return failed


def silence(descriptor: int) -> None:
    """Let a stream write to the null device from now on, so that Python does not complain about it when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
