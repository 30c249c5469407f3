"""The Rust sidecar that ships with Dynamo's runtime, in our worker's place."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import structlog

from trio_sidecar.errors import MissingExtra
from trio_sidecar.worker.binding import load_binding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["run_rust_worker"]

log = structlog.get_logger("trio_sidecar.worker")


def run_rust_worker(arguments: Sequence[str], *, run_sidecar: Callable[[Sequence[str]], None] | None = None) -> int:
    """Run it until it ends; it has the main thread, and handles SIGTERM and SIGINT itself.

    Args:
        arguments: Its flags, which are ours too.
        run_sidecar: Runs it; by default the installed one.

    Returns:
        The exit code: 0 if it was asked to end; 2 for a wrong flag, which it explains on stderr; 1 if it failed, with
        one line in the log that says why.
    """
    try:
        run_sidecar = run_sidecar or load_binding().run_vllm_sidecar
    except MissingExtra as error:
        log.error("worker_failed", reason=str(error))
        return 1
    # Python's handler would turn a Ctrl-C that the sidecar has dealt with into a KeyboardInterrupt.
    earlier = signal.signal(signal.SIGINT, lambda signum, frame: None)  # noqa: ARG005
    try:
        run_sidecar(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except Exception as error:  # noqa: BLE001 - the binding raises plain exceptions
        log.error("worker_failed", reason=str(error))
        return 1
    finally:
        signal.signal(signal.SIGINT, earlier)
    return 0
