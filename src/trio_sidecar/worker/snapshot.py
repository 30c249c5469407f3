"""What a running worker holds, logged when SIGUSR1 asks for it: the first thing to look at when something may leak."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import structlog

from trio_sidecar import lifecycle

if TYPE_CHECKING:
    from trio_sidecar.requests.sessions import Sessions

__all__ = ["log_snapshots"]

log = structlog.get_logger("trio_sidecar.worker")


async def log_snapshots(sessions: Sessions) -> None:
    """Log one snapshot for each SIGUSR1, requests by state among it, until cancelled (in the main thread)."""
    await lifecycle.log_snapshots(log, "worker_snapshot", lambda: {"requests": attrs.asdict(sessions.statistics())})
