"""A worker with the mock engine in it: ``python -m trio_sidecar_bench.inproc_worker NAMESPACE {trio,asyncio}``.

``trio`` is our worker; ``asyncio`` is the least that serves the same engine: conversion, and a loop over its answers.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

import uvloop

from trio_sidecar.bridge import run
from trio_sidecar.config import LogLevel, LogSettings, MockReply, MockSettings, TransportSettings, WorkerSettings
from trio_sidecar.convert.request import ModelFacts, convert_request
from trio_sidecar.convert.response import ResponseConverter
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.engines.mock import MockEngine, open_mock
from trio_sidecar.engines.mock_facts import MockFacts
from trio_sidecar.observe.logging import configure_logging
from trio_sidecar.worker import run_worker
from trio_sidecar_bench.dynamo_object import MODEL, EngineObject, aio_run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager

MOCK = MockSettings(
    served_model_name=MODEL,
    ttft_ms=0.0,
    itl_ms=0.0,
    reply=MockReply.TOKENS,
    max_concurrent_requests=1 << 16,
    max_num_seqs=1 << 16,
    max_model_len=1 << 20,
    num_gpu_blocks=1 << 20,
)


class PlainEngine(EngineObject):
    """The mock engine behind Dynamo with no Trio, no buffer and no cancellation."""

    def __init__(self) -> None:
        self._engine = MockEngine(MockFacts.resolve(MOCK))
        self._facts = ModelFacts(served_model_name=MODEL, base_names=frozenset({MODEL}))

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[Any, None]:
        """One chunk per answer."""
        converted = convert_request(request, request_id=context.id(), model=self._facts)
        converter = ResponseConverter(converted.response)
        async with self._engine.aio_generate(converted.wire, converted.metadata) as stream:
            while answers := await stream.aio_receive():
                for answer in answers:
                    chunk = converter.convert(answer)
                    if context.is_stopped():
                        return
                    if chunk is not None:
                        yield chunk  # noqa: ASYNC119 - the runtime takes every chunk, or the process ends


def open_engine(*, bootstrap: bool) -> AbstractAsyncContextManager[MockEngine]:  # noqa: ARG001
    """Open the engine; both times it is in this process."""
    return open_mock(MOCK)


def main(namespace: str, kind: str) -> int:
    """Serve."""
    if kind == "asyncio":
        engine = PlainEngine()
        uvloop.run(aio_run(engine, namespace, engine._engine.facts.model_id))  # noqa: SLF001
        return 0
    os.environ.setdefault("DYN_LOG", "warn")
    configure_logging(LogSettings(level=LogLevel.WARNING))
    settings = WorkerSettings(
        transport=TransportSettings(grpc_endpoint=GrpcEndpoint.parse("127.0.0.1:1")),
        namespace=namespace,
        discovery_backend="file",
        request_plane="tcp",
        event_plane="zmq",
        drain_secs=1.0,
    )
    return run(functools.partial(run_worker, settings, open_engine, process_ends_after=True))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
