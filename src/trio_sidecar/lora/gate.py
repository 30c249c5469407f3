"""An engine that lets only published adapters be selected (spec 7.14, 13.8)."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import betterproto2

from trio_sidecar.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from trio_sidecar.engines.contract import Engine, EngineStream
    from trio_sidecar.lora.locks import LockRegistry
    from trio_sidecar.lora.records import Records
    from trio_sidecar.wire import GenerateRequest, HealthCheckResponseServingStatus
    from trio_sidecar.wire.methods import Method

__all__ = ["AdapterGate"]

Req = TypeVar("Req", bound=betterproto2.Message)
Resp = TypeVar("Resp", bound=betterproto2.Message)


class AdapterGate:
    """Implements :class:`~trio_sidecar.engines.contract.Engine` over another one.

    Args:
        engine: The other one.
        records: Which adapters are published.
        locks: Their locks.
    """

    def __init__(self, engine: Engine, records: Records, locks: LockRegistry) -> None:
        self._engine = engine
        self._records = records
        self._locks = locks

    def aio_generate(
        self, request: GenerateRequest, metadata: Mapping[str, str]
    ) -> AbstractAsyncContextManager[EngineStream]:
        """Open one generation; one without an adapter goes straight to the engine.

        Raises:
            InvalidRequest: On entering, if the adapter is not published (R7.77); the engine was not asked.
        """
        if not request.lora_name:
            return self._engine.aio_generate(request, metadata)
        return self._aio_generate_with_adapter(request, metadata)

    @asynccontextmanager
    async def _aio_generate_with_adapter(
        self, request: GenerateRequest, metadata: Mapping[str, str]
    ) -> AsyncIterator[EngineStream]:
        name = request.lora_name
        async with AsyncExitStack() as stack:
            async with self._locks.aio_reading(name):
                # Looked up under the lock, because an unload that this request has waited for may have removed it.
                if not self._records.is_published(name):
                    reason = f"unknown model {name!r}: no LoRA adapter of that name is published by this worker"
                    raise InvalidRequest(reason)
                stream = await stack.enter_async_context(self._engine.aio_generate(request, metadata))
            yield stream

    async def aio_call(self, method: Method[Req, Resp], request: Req) -> Resp:
        """Make one call of ``vllm.Control``."""
        return await self._engine.aio_call(method, request)

    async def aio_check_health(self, service: str) -> HealthCheckResponseServingStatus:
        """The health of one service."""
        return await self._engine.aio_check_health(service)
