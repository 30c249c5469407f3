"""A worker's metrics, over parts that do nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs

from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.lifecycle import StopRequest
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.worker.metrics import WorkerMetrics

__all__ = ["MODEL", "FakeRecovery", "new_metrics"]

MODEL: Any = SimpleNamespace(served_model_name="served-model", engine_version="0.32.0")
"""What is known of the engine."""


@attrs.define
class FakeRecovery:
    """The watch over an engine."""

    away: bool = False
    recoveries: int = 2
    instance_id: str = "life-1"


def new_metrics() -> WorkerMetrics:
    """Those of a decode worker that has not started."""
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks)
    return WorkerMetrics(sessions=sessions, stop=StopRequest(), role="decode")
