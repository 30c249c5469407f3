"""``grpc.health.v1`` over an engine (asyncio-flavoured)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_sidecar.bridge import AioEvent, aio_timeout
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import HealthCheckRequest, HealthCheckResponse, HealthCheckResponseServingStatus
from trio_sidecar.wire.methods import CONTROL, INFERENCE

if TYPE_CHECKING:
    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.server.call import ServerCall

__all__ = ["HealthFace"]

WATCH_POLL_SECS = 0.5
"""How often a watch asks the engine, which does not announce changes."""

_NAMES = ("", INFERENCE, CONTROL)


class HealthFace:
    """The health service. Once withdrawn, every known service is NOT_SERVING, whatever the engine says."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._withdrawn = AioEvent()

    def withdraw(self) -> None:
        """Report NOT_SERVING from now on; watches hear of it at once."""
        self._withdrawn.set()

    @property
    def withdrawn(self) -> bool:
        """Whether the server ends."""
        return self._withdrawn.is_set()

    async def aio_check(self, call: ServerCall) -> None:
        """``Check``."""
        request = await call.aio_request(HealthCheckRequest)
        await call.aio_send([HealthCheckResponse(status=await self.aio_status(request.service))])

    async def aio_watch(self, call: ServerCall) -> None:
        """``Watch``: the status now, then every change, until the client or the server goes."""
        request = await call.aio_request(HealthCheckRequest)
        call.draining = False
        last: HealthCheckResponseServingStatus | None = None
        while True:
            status = await self.aio_status(request.service)
            if status != last:
                last = status
                await call.aio_send([HealthCheckResponse(status=status)])
            if self._withdrawn.is_set():
                # Nothing will change any more; the server ends this call when it goes.
                await AioEvent().aio_wait()
            try:
                async with aio_timeout(WATCH_POLL_SECS):
                    await self._withdrawn.aio_wait()
            except TimeoutError:
                continue

    async def aio_status(self, service: str) -> HealthCheckResponseServingStatus:
        """The status of a service.

        Raises:
            RpcError: NOT_FOUND for a name that is none.
        """
        if service not in _NAMES:
            known = ", ".join(repr(name) for name in _NAMES)
            raise RpcError(StatusCode.NOT_FOUND, f"unknown service {service[:64]!r}; known are {known}")
        if self._withdrawn.is_set():
            return HealthCheckResponseServingStatus.NOT_SERVING
        try:
            return await self._engine.aio_check_health(service)
        except RpcError:
            # The engine could not be asked, and what cannot be asked cannot serve.
            return HealthCheckResponseServingStatus.NOT_SERVING
