"""Connections to a scripted peer, over the fast path and the fallback."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.transport.connection import Connection, ConnectionSettings
from trio_sidecar.transport.dial import aio_connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from trio_sidecar.testing.peer import Peer

    Connect = Callable[..., AbstractAsyncContextManager[Connection]]


@pytest.fixture(params=[True, False], ids=["fast", "public"])
def fast(request: pytest.FixtureRequest) -> bool:
    """Which of the two implementations a test runs over."""
    return bool(request.param)


@pytest.fixture
def connect(fast: bool, aio_loop: object) -> Connect:
    """A way to open connections, for ``async with``."""

    @asynccontextmanager
    async def connect_to(peer: Peer, **more: Any) -> AsyncIterator[Connection]:
        settings = ConnectionSettings(endpoint=GrpcEndpoint.parse(f"127.0.0.1:{peer.port}"), **more)

        async def aio_main() -> Connection:
            return await aio_connect(settings, lambda connection: None, fast=fast)

        connection = await run_aio(aio_main)
        try:
            yield connection
        finally:
            connection.close("the test is over")
            with trio.move_on_after(1, shield=True):
                await connection.closed.wait()

    return connect_to


async def aio_collect(connection: Connection, path: str = "/t.T/Stream", request: bytes = b"") -> list[bytes]:
    """All messages of one call."""
    messages: list[bytes] = []
    async with connection.aio_open(path, request, metadata={}) as stream:
        while batch := await stream.aio_receive():
            messages += batch
    return messages


@pytest.fixture
def collect(aio_loop: object) -> Callable[..., Awaitable[list[bytes]]]:
    """A way to make one call from Trio and get all its messages."""

    async def from_trio(connection: Connection, path: str = "/t.T/Stream", request: bytes = b"") -> list[bytes]:
        return await run_aio(aio_collect, connection, path, request)

    return from_trio
