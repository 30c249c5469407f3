"""The doctor names the layer that is broken, for every way in which one can be."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from support.mock_engine import mock_settings
from trio_sidecar import wire
from trio_sidecar.config import ClientTlsSettings, ServerSettings, ServerTlsSettings, TransportSettings
from trio_sidecar.doctor.endpoint import examine_endpoint
from trio_sidecar.doctor.report import Finding, Mark
from trio_sidecar.endpoint import ListenAddress, UnixAddress, parse_engine_endpoint
from trio_sidecar.engines.mock import MockEngine, open_mock
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.server import serve
from trio_sidecar.testing.peer import PeerStream, open_peer
from trio_sidecar.wire import HealthCheckResponseServingStatus as Health

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from support.certificates import Certificates

    Opened = AbstractAsyncContextManager[str]

LOOPBACK = ListenAddress(host="127.0.0.1", port=0)
SECONDS = 0.5
ROUTED_NOWHERE = "192.0.2.1:50051"
"""An address for documentation, which nobody answers."""


@asynccontextmanager
async def at(address: str) -> AsyncIterator[str]:
    """Nothing but an address."""
    yield address


@asynccontextmanager
async def raw(answer: Callable[[trio.SocketStream], Awaitable[None]]) -> AsyncIterator[str]:
    """A server that does what it likes with a connection."""
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(trio.serve_listeners, answer, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def silent(_: trio.SocketStream) -> None:
    """Accept, and say nothing."""
    await trio.sleep_forever()


async def hangs_up(stream: trio.SocketStream) -> None:
    """Accept, and close."""
    await stream.aclose()


async def http1(stream: trio.SocketStream) -> None:
    """Speak HTTP/1."""
    await stream.receive_some()
    await stream.send_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
    await stream.aclose()


@asynccontextmanager
async def peer(script: Callable[[PeerStream], Awaitable[None]]) -> AsyncIterator[str]:
    """An HTTP/2 server that plays a script for each call."""
    async with open_peer(script) as running:
        yield f"127.0.0.1:{running.port}"


def web_server(status: str) -> Callable[[PeerStream], Awaitable[None]]:
    """One that speaks HTTP/2, such as Dynamo's front end (404)."""

    async def answer(stream: PeerStream) -> None:
        headers = [(":status", status), ("content-type", "text/html")]
        await stream.connection.send_headers(stream.id, headers, end_stream=True)

    return answer


async def never(_: PeerStream) -> None:
    """A frozen server: it has greeted, and answers no call."""
    await trio.sleep_forever()


def refusing(*services: str) -> Callable[[PeerStream], Awaitable[None]]:
    """A server that knows nothing of some services and answers health checks of others."""

    async def script(stream: PeerStream) -> None:
        if any(service in stream.path for service in services):
            await stream.send_trailers_only(12, "unknown service")
            return
        await stream.receive_request()
        await stream.send_headers()
        await stream.send_message(b"\x08\x01")
        await stream.send_trailers()

    return script


class Odd(MockEngine):
    """A mock engine of which something is changed."""

    changes: dict[str, Any]

    async def aio_call(self, method: Any, request: Any) -> Any:
        """Change an answer, or refuse it."""
        change = self.changes.get(method.name)
        if isinstance(change, Exception):
            raise change
        if method.name == "Generate":
            raise RpcError(StatusCode.INVALID_ARGUMENT, "no prompt")
        answer = await super().aio_call(method, request)
        for name, value in (change or {}).items():
            setattr(answer, name, value)
        return answer


@asynccontextmanager
async def served(
    listen: ListenAddress | UnixAddress = LOOPBACK,
    *,
    tls: ServerTlsSettings | None = None,
    health: Health = Health.SERVING,
    **changes: Any,
) -> AsyncIterator[str]:
    """Our server over a mock engine that may be odd."""
    settings = ServerSettings(listen=listen, drain_secs=0.2, tls=tls or ServerTlsSettings())
    async with open_mock(mock_settings()) as engine, trio.open_nursery() as nursery:
        odd = Odd(engine.facts)
        odd.changes = changes
        odd.set_health(health)
        (address, *_) = await nursery.start(serve, odd, settings)
        yield str(address)
        nursery.cancel_scope.cancel()


async def examine(address: str, tls: ClientTlsSettings | None = None) -> Sequence[Finding]:
    """What the doctor finds there."""
    options = {} if tls is None else {"tls": tls}
    endpoint: Any = parse_engine_endpoint(address)
    if tls is not None and not isinstance(endpoint, UnixAddress):
        endpoint = attrs.evolve(endpoint, tls=True)
    return await examine_endpoint(TransportSettings(grpc_endpoint=endpoint, **options), seconds=SECONDS)  # type: ignore[arg-type]


def broken(findings: Sequence[Finding]) -> tuple[str, str]:
    """The first layer that has failed, and what is said of it."""
    found = next(finding for finding in findings if finding.mark is Mark.FAILED)
    return found.name, f"{found.detail} {found.hint}"


def unimplemented(detail: str = "unknown") -> RpcError:
    """The refusal of a server that does not know a call."""
    return RpcError(StatusCode.UNIMPLEMENTED, detail)


BROKEN: list[tuple[str, Callable[[], Opened], str, str]] = [
    ("closed port", lambda: at("127.0.0.1:1"), "TCP", "refused"),
    ("no route", lambda: at(ROUTED_NOWHERE), "TCP", ""),
    ("unknown name", lambda: at("no-such-host.invalid:5"), "DNS", "no-such-host.invalid"),
    ("says nothing", lambda: raw(silent), "HTTP/2", "no answer within 0.5 s"),
    ("hangs up", lambda: raw(hangs_up), "HTTP/2", ""),
    ("HTTP/1", lambda: raw(http1), "HTTP/2", "HTTP port"),
    ("no gRPC", lambda: peer(web_server("502")), "gRPC", "gRPC port"),
    ("no such path", lambda: peer(web_server("404")), "gRPC", "gRPC port"),
    ("no access", lambda: peer(web_server("403")), "gRPC", "gRPC port"),
    ("frozen", lambda: peer(never), "gRPC", "no answer within 0.5 s"),
    ("no health service", lambda: peer(refusing("Health")), "health", "UNIMPLEMENTED"),
    ("not serving", lambda: served(health=Health.NOT_SERVING), "health", "NOT_SERVING"),
    ("no Inference", lambda: peer(refusing("vllm.Inference")), "vllm.Inference", "UNIMPLEMENTED"),
    ("no Control", lambda: peer(refusing("vllm.Control")), "vllm.Control", "GetServerInfo"),
    ("no model info", lambda: served(GetModelInfo=unimplemented()), "vllm.Control", "GetModelInfo: UNIMPLEMENTED"),
    ("other API", lambda: served(GetServerInfo={"api_version": "sglang"}), "model", "'sglang'"),
    ("no name", lambda: served(GetModelInfo={"model_id": ""}), "model", "model_id"),
    ("no ids", lambda: served(GetModelInfo={"supports_token_ids_input": False}), "model", "token-ID"),
    (
        "no ranks",
        lambda: served(GetServerInfo={"parallelism": wire.ParallelismInfo(data_parallel_size=0)}),
        *("model", "data-parallel size of zero"),
    ),
    ("no block size", lambda: served(GetServerInfo={"effective_attention_block_size": 0}), "model", "block_size"),
]


@pytest.mark.parametrize(("opened", "layer", "words"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
async def test_the_broken_layer_is_named(
    aio_loop: asyncio.AbstractEventLoop, opened: Callable[[], Opened], layer: str, words: str
) -> None:
    """One layer has failed, those below it are fine, and those above were not reached."""
    async with opened() as address:
        findings = await examine(address)
    name, said = broken(findings)
    assert layer == name
    assert words in said
    after = [finding.mark for finding in findings[[finding.name for finding in findings].index(layer) + 1 :]]
    if layer not in ("health", "vllm.Inference"):  # what is beside them can be asked all the same
        assert {Mark.SKIPPED} >= set(after)


@pytest.mark.parametrize(
    ("server", "client", "words"),
    [
        ("plain", "trusting", "does not speak TLS"),
        ("serving", "other_ca", "certificate"),
        ("elsewhere", "trusting", "certificate"),
        ("mutual", "trusting", "client certificate"),
        ("mutual", "stranger", "--grpc-tls-cert"),
    ],
)
async def test_what_is_wrong_with_tls(
    aio_loop: asyncio.AbstractEventLoop, certificates: Certificates, server: str, client: str, words: str
) -> None:
    """The handshake is a layer of its own, and its fault is told in words."""
    servers = {
        "plain": None,
        "serving": certificates.serving(),
        "elsewhere": attrs.evolve(certificates.serving(), certfile=certificates.elsewhere),
        "mutual": certificates.mutual(),
    }
    clients = {
        "trusting": certificates.trusting(),
        "other_ca": certificates.trusting(ca=certificates.other_ca),
        "stranger": certificates.trusting(cert=certificates.stranger),
    }
    async with served(tls=servers[server]) as address:
        name, said = broken(await examine(address, clients[client]))
    assert "TLS" == name
    assert words in said


async def test_a_tls_file_is_missing(aio_loop: asyncio.AbstractEventLoop, certificates: Certificates) -> None:
    """The file is named, as the fault of the handshake."""
    async with served(tls=certificates.serving()) as address:
        name, said = broken(await examine(address, certificates.trusting(ca="/no/such/ca.pem")))
    assert "TLS" == name
    assert "/no/such/ca.pem" in said


async def test_tls_is_missing(aio_loop: asyncio.AbstractEventLoop, certificates: Certificates) -> None:
    """A plaintext client of a TLS server is told what it lacks."""
    async with served(tls=certificates.serving()) as address:
        name, said = broken(await examine(address))
    assert "HTTP/2" == name
    assert "--grpc-tls" in said


async def test_unix_sockets(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that is missing, no socket, forbidden or left over is told apart from a server that is ill."""
    path = tmp_path / "s"
    assert ("socket", True) == _has(broken(await examine(f"unix://{path}")), "No such file")
    path.write_text("")
    assert ("socket", True) == _has(broken(await examine(f"unix://{path}")), "is no socket")
    path.unlink()
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    assert ("TCP", True) == _has(broken(await examine(f"unix://{path}")), "refused")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert ("socket", True) == _has(broken(await examine(f"unix://{path}")), "no permission")
    os.unlink(path)  # noqa: PTH108
    async with served(UnixAddress.parse(f"unix://{path}", "--listen")) as address:
        findings = await examine(address)
    assert [] == [finding for finding in findings if finding.mark in (Mark.FAILED, Mark.WARNED)]


def _has(found: tuple[str, str], words: str) -> tuple[str, bool]:
    return found[0], words in found[1]


async def test_a_healthy_engine_is_described(aio_loop: asyncio.AbstractEventLoop, certificates: Certificates) -> None:
    """Every layer is fine and has its time; the last says what is served, by which versions."""
    async with served(tls=certificates.serving()) as address:
        findings = await examine(address, certificates.trusting())
    assert {Mark.FINE} == {finding.mark for finding in findings}
    timed = {finding.name for finding in findings if finding.seconds is not None}
    assert {"DNS", "TCP", "TLS", "HTTP/2", "vllm.Control GetServerInfo", "health vllm.Inference"} <= timed
    assert "model" == findings[-1].name
    assert "mocker-model" in findings[-1].detail
    assert "engine mock-" in findings[-1].detail
    assert any("ListLoras" in finding.name and "not offered" in finding.detail for finding in findings)


async def test_an_optional_call_that_fails_is_a_warning(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The engine can be served, but something is odd about it."""
    async with served(IsPaused=RpcError(StatusCode.INTERNAL, "oops")) as address:
        findings = await examine(address)
    warned = [(finding.name, finding.detail) for finding in findings if finding.mark is Mark.WARNED]
    assert [("vllm.Control IsPaused", "INTERNAL: oops")] == warned


async def test_a_name_of_which_one_address_is_dead(
    aio_loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works, and the dead address is named."""

    async def two(host: str, port: int, **_: Any) -> list[Any]:  # noqa: ASYNC124 - stands in for a coroutine
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ("127.0.0.2", "127.0.0.1")]

    async with served() as address:
        monkeypatch.setattr(trio.socket, "getaddrinfo", two)
        findings = await examine(address.replace("127.0.0.1", "localhost"))
    (warned,) = [finding for finding in findings if finding.mark is Mark.WARNED]
    assert ("TCP", True) == (warned.name, "127.0.0.2" in warned.detail)
