"""What a running worker holds, logged when SIGUSR1 asks for it: the first thing to look at when something may leak."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from trio_sidecar.bridge import count_aio_tasks, open_signals

if TYPE_CHECKING:
    from trio_sidecar.requests.sessions import Sessions

__all__ = ["log_snapshots"]

OPEN_FILES = Path("/proc/self/fd")

log = structlog.get_logger("trio_sidecar.worker")


async def log_snapshots(sessions: Sessions) -> None:
    """Log one snapshot for each SIGUSR1, until cancelled (in the main thread)."""
    with open_signals(signal.SIGUSR1) as asked:
        async for _ in asked:
            log.info("worker_snapshot", **snapshot(sessions))


def snapshot(sessions: Sessions) -> dict[str, object]:
    """Requests by state, tasks of both flavours, and open file descriptors (None where there is no ``/proc``)."""
    return {
        "requests": attrs.asdict(sessions.statistics()),
        "trio_tasks": trio.lowlevel.current_statistics().tasks_living,
        "aio_tasks": count_aio_tasks(),
        "open_files": sum(1 for _ in OPEN_FILES.iterdir()) if OPEN_FILES.is_dir() else None,
    }
