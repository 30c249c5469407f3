"""The parts of an engine object for Dynamo that every worker here shares, and how one is run; asyncio, no Trio."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from dynamo._core import backend

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EngineObject", "aio_run"]

MODEL = "bench-model"


class EngineObject:
    """An engine object without ``generate``."""

    async def start(self, worker_id: int) -> Any:  # noqa: ARG002
        """What this worker registers as."""
        return backend.EngineConfig(
            model=MODEL,
            served_model_name=MODEL,
            model_aliases=[],
            runtime_data={},
            llm=backend.LlmRegistration(
                context_length=1 << 20, kv_cache_block_size=16, total_kv_blocks=1 << 20, max_num_seqs=4096
            ),
        )

    async def abort(self, context: Any) -> None:
        """Nothing: each generator looks at its context."""

    async def cleanup(self) -> None:
        """Nothing to clean up."""

    async def is_quiescent(self) -> bool:
        """Nothing is left to do."""
        return True

    async def register_prometheus(self, metrics: object) -> None:
        """No metrics."""

    async def kv_event_sources(self) -> list[object]:
        """No KV events."""
        return []

    def component_metrics_dp_ranks(self) -> list[int]:
        """No load snapshots."""
        return []

    def attach_snapshot_publisher(self, publisher: object) -> None:
        """No load snapshots."""

    async def on_endpoint_ready(self, endpoint: object) -> None:
        """Nothing to do."""

    def supported_controls(self) -> list[str]:
        """No controls."""
        return []

    def supported_updates(self) -> list[str]:
        """No updates."""
        return []

    async def health_check_payload(self) -> Mapping[str, object] | None:
        """No health check."""
        return None

    def logits_processor_spec(self) -> object:
        """No logits processors."""
        return None


async def aio_run(engine: EngineObject, namespace: str, model_directory: str) -> None:
    """Serve as a worker of that namespace until a signal."""
    os.environ.setdefault("DYN_LOG", "warn")
    config = backend.WorkerConfig(
        namespace=namespace,
        component="backend",
        endpoint="generate",
        model_name=model_directory,
        served_model_name=MODEL,
        endpoint_types="chat,completions",
        runtime=backend.RuntimeConfig("file", "tcp", "zmq"),
    )
    await backend.Worker(engine, config, asyncio.get_running_loop(), raw=False).run()
