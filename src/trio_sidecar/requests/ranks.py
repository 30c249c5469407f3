"""An engine of which only some data-parallel ranks are this worker's (``--dp-ranks``)."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import betterproto2

from trio_sidecar.engines.contract import RANK_METADATA_KEY
from trio_sidecar.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from trio_sidecar.engines.contract import Engine, EngineStream
    from trio_sidecar.wire import GenerateRequest, HealthCheckResponseServingStatus
    from trio_sidecar.wire.methods import Method

__all__ = ["RankGate"]

Req = TypeVar("Req", bound=betterproto2.Message)
Resp = TypeVar("Resp", bound=betterproto2.Message)


class RankGate:
    """Implements :class:`~trio_sidecar.engines.contract.Engine` over another one, of which several workers have a part.

    A router that knows ranks names one. For a request without, the engine would choose among all of its ranks, and KV
    events would then speak of blocks that this worker's router never sent there: so the choice is made here, among the
    ranks of this worker, by what this worker has open on each.

    Args:
        engine: The other one.
        ranks: The absolute ranks of this worker.
    """

    def __init__(self, engine: Engine, ranks: range) -> None:
        self._engine = engine
        self._open = dict.fromkeys(ranks, 0)

    @property
    def open(self) -> Mapping[int, int]:
        """Open requests by rank."""
        return self._open

    @asynccontextmanager
    async def aio_generate(self, request: GenerateRequest, metadata: Mapping[str, str]) -> AsyncIterator[EngineStream]:
        """Open one generation on a rank of this worker.

        Raises:
            InvalidRequest: On entering, if the request names a rank that is not this worker's.
        """
        rank = self._rank(metadata)
        self._open[rank] += 1
        try:
            async with self._engine.aio_generate(request, {**metadata, RANK_METADATA_KEY: str(rank)}) as stream:
                yield stream
        finally:
            self._open[rank] -= 1

    def _rank(self, metadata: Mapping[str, str]) -> int:
        named = metadata.get(RANK_METADATA_KEY)
        if named is None:
            return min(self._open, key=self._open.__getitem__)
        rank = int(named)  # converted from an unsigned number of the request
        if rank not in self._open:
            allowed = ", ".join(map(str, self._open))
            reason = f"data-parallel rank {rank} is not one of this worker's; allowed are {allowed}"
            raise InvalidRequest(reason)
        return rank

    async def aio_call(self, method: Method[Req, Resp], request: Req) -> Resp:
        """Make one call of ``vllm.Control``."""
        return await self._engine.aio_call(method, request)

    async def aio_check_health(self, service: str) -> HealthCheckResponseServingStatus:
        """The health of one service."""
        return await self._engine.aio_check_health(service)
