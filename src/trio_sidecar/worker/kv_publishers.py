"""Dynamo's publishers of KV events, one per source; made here because an engine that is replaced needs new ones.

Dynamo's worker would make them itself from a list of sources, once, and keep them. A publisher holds an index of the
blocks that its source has announced, and routers read that index whenever the worker appears: they would go on
crediting a new engine with the blocks of the one before it, and sources at new addresses would never be heard (R15.6).
A new publisher has an empty index, and routers forget what the one before it had said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import structlog

from trio_sidecar.errors import EngineShutdown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_sidecar.kv_events import KvSource
    from trio_sidecar.worker.binding import Binding

__all__ = ["KvPublishers"]

log = structlog.get_logger("trio_sidecar.worker")


@attrs.define(eq=False)
class KvPublishers:
    """The publishers of one worker.

    Attributes:
        binding: Dynamo.
    """

    binding: Binding
    _running: list[Any] = attrs.field(factory=list, init=False)

    def follow(self, endpoint: object, sources: Sequence[KvSource], block_size: int | None) -> None:
        """Publish what these sources say, and nothing of what others have said before (asyncio-flavoured, though sync).

        Args:
            endpoint: The worker's, from the runtime.
            sources: One per rank.
            block_size: Tokens per KV block; None if the engine does not say, and then nothing can be published.

        Raises:
            EngineShutdown: Dynamo cannot make a publisher.
        """
        self.stop()
        if not sources or self.binding.kv_event_publisher is None:
            return
        if block_size is None:
            log.warning("kv_events_not_published", reason="the engine does not report its KV block size")
            return
        for source in sources:
            try:
                publisher = self.binding.kv_event_publisher(
                    endpoint,
                    kv_block_size=block_size,
                    dp_rank=source.dp_rank,
                    enable_local_indexer=True,  # as the worker's record says
                    zmq_endpoint=source.endpoint,
                    zmq_topic=source.topic,
                )
            except Exception as error:
                reason = f"the KV events of rank {source.dp_rank} at {source.endpoint} cannot be published: {error}"
                raise EngineShutdown(reason) from error
            self._running.append(publisher)
            log.info("kv_event_source", dp_rank=source.dp_rank, endpoint=source.endpoint, topic=source.topic)

    def stop(self) -> None:
        """Publish nothing any more; idempotent."""
        while self._running:
            try:
                self._running.pop().shutdown()
            except Exception as error:  # noqa: BLE001 - Dynamo raises plain exceptions
                log.warning("kv_publisher_not_stopped", reason=str(error))
