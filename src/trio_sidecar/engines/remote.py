"""The engine behind a gRPC endpoint: any server of ``vllm.Inference`` and ``vllm.Control``."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import attrs
import betterproto2

from trio_sidecar.transport.client import Client
from trio_sidecar.transport.pool import open_pool
from trio_sidecar.wire import GenerateRequest, GenerateResponse, HealthCheckRequest
from trio_sidecar.wire.codec import prepare
from trio_sidecar.wire.methods import GENERATE_STREAM, HEALTH_CHECK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from trio_sidecar.config import TransportSettings
    from trio_sidecar.transport.client import MessageStream
    from trio_sidecar.transport.pool import Pool
    from trio_sidecar.wire import HealthCheckResponseServingStatus
    from trio_sidecar.wire.methods import Method

__all__ = ["RemoteEngine", "open_remote"]

Req = TypeVar("Req", bound=betterproto2.Message)
Resp = TypeVar("Resp", bound=betterproto2.Message)


class RemoteEngine:
    """The contract (:class:`~trio_sidecar.engines.contract.Engine`) over a pool of connections.

    Attributes:
        pool: The connections.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._client = Client(pool)

    def __repr__(self) -> str:
        """What the pool says."""
        return f"<RemoteEngine over {self.pool!r}>"

    async def reconnected(self) -> None:
        """Return when the next lost connection has been replaced (Trio-flavoured)."""
        await self.pool.reconnected()

    def aio_generate(
        self, request: GenerateRequest, metadata: Mapping[str, str]
    ) -> AbstractAsyncContextManager[MessageStream[GenerateResponse], None]:
        """Open one generation (asyncio-flavoured); entering returns at the response's headers.

        Raises:
            EncodeError: The request cannot be encoded.
            RpcError: On entering: refused, or UNAVAILABLE if there is no connection.
            Overloaded: On entering: too many requests wait for a connection with room.
        """
        return self._client.aio_stream(GENERATE_STREAM, request, metadata=metadata)

    def aio_probe(
        self, request: GenerateRequest, metadata: Mapping[str, str]
    ) -> AbstractAsyncContextManager[MessageStream[GenerateResponse], None]:
        """Open one generation that does not wait behind others for a connection with room; see :meth:`aio_generate`."""
        return self._client.aio_stream(GENERATE_STREAM, request, metadata=metadata, urgent=True)

    async def aio_call(self, method: Method[Req, Resp], request: Req) -> Resp:
        """Make one unary call (asyncio-flavoured).

        Raises:
            RpcError: The engine refused, or UNAVAILABLE if there is no connection.
            ProtocolError: The answer is not one message of the declared kind.
        """
        return await self._client.aio_unary(method, request)

    async def aio_check_health(self, service: str) -> HealthCheckResponseServingStatus:
        """Ask for the health of one service (asyncio-flavoured); numbers that we do not know are passed on.

        Raises:
            RpcError: NOT_FOUND for a name that the peer does not know; any other refusal.
        """
        response = await self._client.aio_unary(HEALTH_CHECK, HealthCheckRequest(service=service))
        return response.status


@asynccontextmanager
async def open_remote(
    settings: TransportSettings, *, bootstrap: bool = False, peer: str = "vLLM"
) -> AsyncIterator[RemoteEngine]:
    """Connect to an engine and keep the connections up while the block runs (Trio-flavoured).

    That the peer accepts connections does not mean that it serves: :func:`~trio_sidecar.discovery.wait_until_serving`.

    Args:
        settings: The endpoint, the number of connections, and times.
        bootstrap: Use exactly one connection, whatever the settings say (R5.7).
        peer: Name of the engine, for messages.

    Raises:
        StartupError: A connection could not be made before the start-up deadline.
    """
    if bootstrap:
        settings = attrs.evolve(settings, grpc_connections=1)
    prepare(GenerateRequest, GenerateResponse)
    async with open_pool(settings, bootstrap=bootstrap, peer=peer) as pool:
        yield RemoteEngine(pool)
