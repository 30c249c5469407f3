"""A worker with its engine in its own process: ``python moody_worker_main.py HOST_LOOP``.

The engine is the mock, but the first token id of a prompt can make it fail: a gRPC status's number plus ``MOODY`` fails
the request as it is opened, plus ``LATE`` after the first tokens.
"""

from __future__ import annotations

import functools
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from trio_sidecar.bridge import Host, run
from trio_sidecar.config import LogLevel, LogSettings, MockSettings, TransportSettings, WorkerSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.engines.mock import MockEngine, open_mock
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.observe.logging import configure_logging
from trio_sidecar.worker import run_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from trio_sidecar.engines.contract import EngineStream
    from trio_sidecar.wire import GenerateRequest, GenerateResponse

MOODY = 100
LATE = 200
REASON = "a mood"
SETTINGS = WorkerSettings(
    transport=TransportSettings(grpc_endpoint=GrpcEndpoint.parse("in-process:1")),
    withdraw_grace_secs=0.5,
    drain_secs=10,
)


class MoodyStream:
    """A stream that ends badly after the first tokens."""

    def __init__(self, stream: EngineStream, error: RpcError) -> None:
        self._stream = stream
        self._error: RpcError = error
        self._received = False

    async def aio_receive(self) -> Sequence[GenerateResponse]:
        """Some answers, then the error."""
        if self._received:
            raise self._error
        self._received = True
        return await self._stream.aio_receive()


class MoodyEngine:
    """The mock engine with moods."""

    def __init__(self, engine: MockEngine) -> None:
        self._engine = engine
        self.aio_call = engine.aio_call
        self.aio_check_health = engine.aio_check_health

    @asynccontextmanager
    async def aio_generate(self, request: GenerateRequest, metadata: Mapping[str, str]) -> AsyncIterator[Any]:
        """Fail, or ask the mock."""
        assert request.token_ids is not None
        mood, number = divmod(request.token_ids.ids[0], 100)
        if mood == MOODY // 100:
            raise RpcError(StatusCode(number), REASON)
        async with self._engine.aio_generate(request, metadata) as stream:
            yield MoodyStream(stream, RpcError(StatusCode(number), REASON)) if mood == LATE // 100 else stream


def open_engine(*, bootstrap: bool) -> AbstractAsyncContextManager[MoodyEngine]:
    """Open the engine; both times it is in this process."""
    return _open(bootstrap=bootstrap)


@asynccontextmanager
async def _open(*, bootstrap: bool) -> AsyncIterator[MoodyEngine]:
    async with open_mock(MockSettings(ttft_ms=10, itl_ms=10)) as engine:
        yield MoodyEngine(engine)


if __name__ == "__main__":
    configure_logging(LogSettings(level=LogLevel.DEBUG))
    main = functools.partial(run_worker, SETTINGS, open_engine, process_ends_after=True)
    sys.exit(run(main, host=Host(sys.argv[1])))
