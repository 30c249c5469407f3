"""grpc.health.v1 over an engine."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trio

from support.grpc_stubs import stubs
from support.mock_engine import mock_settings
from support.serving import Client, serving
from trio_sidecar.engines.mock import MockEngine, open_mock
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import HealthCheckResponseServingStatus as Status

if TYPE_CHECKING:
    import asyncio

CHECK, WATCH = "grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"
NAMES = ("", "vllm.Inference", "vllm.Control")


def health_request(service: str) -> Any:
    """A HealthCheckRequest."""
    return stubs().message("grpc.health.v1.HealthCheckRequest")(service=service)


def check(client: Client) -> list[int]:
    """The status of each known name."""
    return [client.call(CHECK, health_request(name)).status for name in NAMES]


@pytest.mark.rule("R16.4")
async def test_check(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Known names report the engine's health, now and after a change."""
    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        assert [Status.SERVING] * 3 == await server.ask(check)
        engine.set_health(Status.NOT_SERVING)
        assert [Status.NOT_SERVING] * 3 == await server.ask(check)


@pytest.mark.parametrize("path", [CHECK, WATCH])
async def test_unknown_name(aio_loop: asyncio.AbstractEventLoop, path: str) -> None:
    """Other names are NOT_FOUND, also the health service's own."""
    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        for name in ("vllm.Lora", "grpc.health.v1.Health", "x" * 1000):
            ask = partial(Client.failure, path=path, request=health_request(name))
            code, message, count = await server.ask(ask)
            assert (grpc.StatusCode.NOT_FOUND, 0) == (code, count)
            assert "vllm.Inference" in message


async def test_engine_that_cannot_be_asked(
    aio_loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that fails to answer is NOT_SERVING, and the check itself succeeds."""

    async def aio_fail(self: MockEngine, service: str) -> Status:  # noqa: ASYNC124 - the contract is async
        raise RpcError(StatusCode.UNAVAILABLE, "gone")

    monkeypatch.setattr(MockEngine, "aio_check_health", aio_fail)
    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        assert [Status.NOT_SERVING] * 3 == await server.ask(check)


async def test_watch_reports_changes_and_the_drain(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Now, then each change; NOT_SERVING when the server withdraws, and UNAVAILABLE when it goes."""
    seen: list[int] = []
    news = threading.Condition()

    def watch(client: Client) -> grpc.StatusCode:
        stream = client.call(WATCH, health_request("vllm.Inference"))
        try:
            for message in stream:
                with news:
                    seen.append(message.status)
                    news.notify_all()
        except grpc.RpcError as error:
            return error.code()
        return stream.code()

    async def wait_for(count: int) -> None:
        def wait() -> bool:
            with news:
                return news.wait_for(lambda: len(seen) >= count, timeout=5)

        assert await trio.to_thread.run_sync(wait)

    codes: list[grpc.StatusCode] = []
    async with open_mock(mock_settings()) as engine, trio.open_nursery() as nursery, serving(engine) as server:

        async def run() -> None:
            codes.append(await server.ask(watch))

        nursery.start_soon(run)
        await wait_for(1)
        engine.set_health(Status.NOT_SERVING)
        await wait_for(2)
        engine.set_health(Status.SERVING)
        await wait_for(3)
    assert [Status.SERVING, Status.NOT_SERVING, Status.SERVING, Status.NOT_SERVING] == seen
    assert [grpc.StatusCode.UNAVAILABLE] == codes
