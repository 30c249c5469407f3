"""A bad network between a real worker and real engines: nobody hangs, nothing is lost in silence, and it heals."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from support.backends import EngineKind, mock_backend, vllm_backend
from support.faults import ProxyThread, Service, open_service, proxy_thread
from support.stack import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.faults import Ending
    from trio_sidecar.testing.proxy import Proxy

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(120)]

CLIENTS = 4
TOLD_SECONDS = 5.0
PINGED_SECONDS = 8.0
FREED_SECONDS = 2.0
CUTS = ((True, 1500), (False, 400), (True, 300), (True, 40), (False, 20), (True, 1))
"""Whether the engine's bytes are counted, or the worker's; and after how many of them a connection is cut."""
ARGUMENTS = (
    "--keepalive-secs=1",
    "--keepalive-timeout-secs=1",
    "--grpc-connect-attempt-timeout-secs=1",
    "--grpc-connections=4",
)


@pytest.fixture(scope="module", params=list(EngineKind), ids=lambda kind: kind.value)
def whole_service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A worker before an engine, with a proxy between them."""
    directory = tmp_path_factory.mktemp("network")
    make = vllm_backend if request.param is EngineKind.VLLM_RS else mock_backend
    with (
        make(directory / "engine", tokens_per_second=50) as backend,
        proxy_thread(backend.engine.port) as proxy,
        open_service(backend, directory, arguments=ARGUMENTS, proxy=proxy) as running,
    ):
        yield running


@pytest.fixture
def service(whole_service: Service) -> Iterator[Service]:
    """The service with a network that is well, at first."""
    yield whole_service
    proxy_of(whole_service).heal()


def proxy_of(service: Service) -> ProxyThread:
    """Its proxy."""
    assert service.proxy is not None
    return service.proxy


def check_told(endings: list[Ending], *, count: int = CLIENTS) -> None:
    """Each client got one error, and nothing after it."""
    assert count == len(endings)
    assert all(ending.single for ending in endings), endings
    assert [1] * count == [ending.errors for ending in endings]


@pytest.mark.rule("FR-018")
async def test_connections_that_are_cut(service: Service) -> None:
    """Clients are told at once; the worker stays in service, since its engine is well."""
    proxy = proxy_of(service)
    away = service.worker.log.count('"engine_away"')
    async with service.client() as client:
        await service.serves(client)
        endings, seconds = await service.interrupted(client, CLIENTS, lambda: proxy.do(lambda one: one.cut()))
        check_told(endings)
        assert seconds < TOLD_SECONDS
        await service.serves(client, seconds=8)
    assert away == service.worker.log.count('"engine_away"')


@pytest.mark.rule("FR-018")
async def test_connections_that_break_anywhere(service: Service) -> None:
    """Wherever in the bytes a connection ends, greeting, headers or message, each request has one end, in time."""
    proxy = proxy_of(service)
    endings: list[Ending] = []
    async with service.client() as client:
        await service.serves(client)
        for down, limit in CUTS:
            proxy.do(partial(limit_bytes, limit=limit, down=down))
            with trio.fail_after(TOLD_SECONDS):
                await service.ask(client, CLIENTS, endings, tokens=40)
        assert len(CUTS) * CLIENTS == len(endings)
        assert all(ending.single for ending in endings), endings
        assert sum(ending.errors for ending in endings) >= CLIENTS
        proxy.heal()
        await service.serves(client)


def limit_bytes(proxy: Proxy, limit: int, *, down: bool) -> None:
    """Cut connections after so many bytes, in one direction."""
    proxy.up.cut_after_bytes = None if down else limit
    proxy.down.cut_after_bytes = limit if down else None


@pytest.mark.rule("FR-022")
@pytest.mark.parametrize("way", ["both", "down", "half-open"])
async def test_a_network_that_falls_silent(service: Service, way: str) -> None:
    """Nothing gets through and nobody is told: pings find it, the clients are told, and the engine's side is closed."""
    proxy = proxy_of(service)

    def fault(one: Proxy) -> None:
        if way == "half-open":
            one.half_open()
        elif way == "down":
            one.down.stall()
        else:
            one.stall()

    async with service.client() as client:
        await service.serves(client)
        endings, seconds = await service.interrupted(client, CLIENTS, lambda: proxy.do(fault))
        check_told(endings)
        assert seconds < PINGED_SECONDS
        if way != "both":  # there nobody can tell the engine that the worker has closed its connections
            await eventually(lambda: service.backend.open_requests() == 0, "the engine is free", seconds=FREED_SECONDS)
        proxy.heal()
        await service.serves(client)


async def test_a_slow_network(service: Service) -> None:
    """Connections that are slow in different ways, answers that overtake each other: every token is there, once."""
    proxy = proxy_of(service)

    def fault(one: Proxy) -> None:
        one.up.jitter_secs = one.down.jitter_secs = 0.3
        one.down.piece_bytes = 7

    def end(one: Proxy) -> None:
        one.down.piece_bytes = 65536

    texts: list[str] = []
    async with service.client() as client:

        async def one() -> None:
            texts.append((await client.stream_complete(max_tokens=30, ignore_eos=True)).text)

        await service.serves(client)
        proxy.do(fault)
        async with trio.open_nursery() as nursery:
            for _ in range(2 * CLIENTS):
                nursery.start_soon(one)
        assert [service.backend.reply.text(30)] * 2 * CLIENTS == texts
        proxy.do(end)


@pytest.mark.rule("R15.2", "R15.5")
@pytest.mark.parametrize("way", ["refused", "unanswered"])
async def test_an_engine_that_cannot_be_reached(service: Service, way: str) -> None:
    """Its connections break and none can be made: the worker leaves service, and comes back when one can."""
    proxy = proxy_of(service)
    before = service.worker.log.count('"engine_back"')

    def fault(one: Proxy) -> None:
        one.cut()
        if way == "refused":
            one.refuse()
        else:
            one.ignore()

    async with service.client() as client:
        await service.serves(client)
        endings, seconds = await service.interrupted(client, CLIENTS, lambda: proxy.do(fault))
        check_told(endings)
        assert seconds < TOLD_SECONDS
        await eventually(lambda: service.worker.log.count('"engine_away"') > before, "the worker knows", seconds=20)
        with trio.fail_after(TOLD_SECONDS):
            assert (await client.complete(max_tokens=3)).status >= 400
        proxy.heal()
        await service.serves(client)
    assert before + 1 == service.worker.log.count('"engine_back"')
