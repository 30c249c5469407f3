"""The engine contract: what a face may ask of an engine.

It is the wire contract minus the wire: a :class:`~trio_sidecar.wire.GenerateRequest` goes in, a stream of
:class:`~trio_sidecar.wire.GenerateResponse` comes out, and every call of ``vllm.Control`` is one method descriptor. The
functions are asyncio-flavoured, because the libraries on both sides are; a token therefore never crosses the bridge.
An engine's own life (start, stop) is Trio's: whoever opens one does so with an async context manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import betterproto2

from trio_sidecar.wire.methods import RANK_METADATA_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from trio_sidecar.wire import GenerateRequest, GenerateResponse, HealthCheckResponseServingStatus
    from trio_sidecar.wire.methods import Method

__all__ = ["RANK_METADATA_KEY", "Engine", "EngineStream"]

Req = TypeVar("Req", bound=betterproto2.Message)
Resp = TypeVar("Resp", bound=betterproto2.Message)


class EngineStream(Protocol):
    """The answers to one request, in order."""

    async def aio_receive(self) -> Sequence[GenerateResponse]:
        """Wait for answers, then take what has arrived, perhaps not all: what is taken is decoded and costs memory.

        Not calling it is backpressure: an engine holds only a bounded amount for a reader that does not read.

        Returns:
            At least one answer, or none at all once the stream has ended with OK. The last answer of a whole stream is
            the one with ``finish_info``.

        Raises:
            RpcError: The stream ended with another status. Answers that arrived before it were returned first.
        """
        ...


class Engine(Protocol):
    """Whatever answers the contract: a remote server, vLLM in this process, a mock."""

    def aio_generate(
        self, request: GenerateRequest, metadata: Mapping[str, str]
    ) -> AbstractAsyncContextManager[EngineStream]:
        """Open one generation.

        Entering returns once the engine has accepted the request (on the wire: response headers have arrived), before
        any token. Leaving, for whatever reason, releases all that the engine holds for the request.

        Raises:
            RpcError: On entering, if the engine refuses the request.
        """
        ...

    async def aio_call(self, method: Method[Req, Resp], request: Req) -> Resp:
        """Make one unary call of ``vllm.Control``.

        Raises:
            RpcError: The engine refused; UNIMPLEMENTED where it does not know the call.
        """
        ...

    async def aio_check_health(self, service: str) -> HealthCheckResponseServingStatus:
        """The health of one service: ``""``, ``vllm.Inference`` or ``vllm.Control``.

        Raises:
            RpcError: NOT_FOUND for another name; any status of a peer that could not be asked.
        """
        ...
