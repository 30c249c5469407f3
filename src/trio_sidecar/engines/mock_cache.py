"""The caches of the mock engine's ranks, and the publishers that tell of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.engines.mock_kv_cache import KvCache
from trio_sidecar.engines.mock_kv_events import open_publisher

if TYPE_CHECKING:
    from contextlib import ExitStack

    from trio_sidecar.config import MockSettings
    from trio_sidecar.engines.mock_facts import MockFacts
    from trio_sidecar.engines.mock_kv_events import KvPublisher
    from trio_sidecar.engines.mock_request import MockJob
    from trio_sidecar.wire import KvEventSource

__all__ = ["MockCache", "open_publishers"]


def open_publishers(settings: MockSettings, stack: ExitStack) -> list[KvPublisher]:
    """One publisher per rank; none without a port, without prefix caching, or in decode mode (R16.6).

    Raises:
        MissingExtra: The libraries are not installed.
        InvalidConfig: A port cannot be used.
    """
    port = settings.zmq_kv_events_port
    if port is None or not settings.enable_prefix_caching or settings.disaggregation_mode is DisaggregationMode.DECODE:
        return []
    return [
        stack.enter_context(
            open_publisher(port=port, replay_port=settings.zmq_replay_port, rank=rank, block_size=settings.block_size)
        )
        for rank in range(settings.data_parallel_size)
    ]


class MockCache:
    """The caches of all ranks.

    Attributes:
        publishers: One per rank, or none.
    """

    def __init__(self, facts: MockFacts) -> None:
        self._enabled = facts.enable_prefix_caching
        self._ranks = [KvCache(facts.block_size, facts.num_gpu_blocks) for _ in range(facts.data_parallel_size)]
        self._next = 0
        self.publishers: list[KvPublisher] = []

    def sources(self) -> list[KvEventSource]:
        """The answer to GetKvEventSources."""
        return [publisher.source for publisher in self.publishers]

    def use(self, job: MockJob) -> int:
        """Run a prompt on its rank, or on the next one in turn if it names none.

        Returns:
            How many of its tokens were cached.
        """
        if not (self._enabled and job.uses_cache):
            return 0
        rank = job.rank
        if rank is None:
            rank, self._next = self._next, (self._next + 1) % len(self._ranks)
        cached, changes = self._ranks[rank].use(job.prompt, job.adapter)
        if self.publishers:
            self.publishers[rank].publish(changes)
        return cached

    def clear(self) -> None:
        """Forget everything."""
        for rank, cache in enumerate(self._ranks):
            if cache.clear() and self.publishers:
                self.publishers[rank].publish([None])
