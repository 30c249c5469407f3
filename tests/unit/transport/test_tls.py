"""Encrypted connections and Unix sockets: our pool against our server and grpcio's, on both hosts and both paths."""

from __future__ import annotations

import ssl
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import structlog
import trio

from support.mock_engine import request_of, token_settings
from trio_sidecar import wire
from trio_sidecar.bridge import Host, run, run_aio
from trio_sidecar.config import ClientTlsSettings, ServerSettings, ServerTlsSettings, TransportSettings
from trio_sidecar.endpoint import ListenAddress, UnixAddress, parse_engine_endpoint
from trio_sidecar.engines.mock import open_mock
from trio_sidecar.engines.remote import RemoteEngine
from trio_sidecar.errors import ConnectError, InvalidConfig, RpcError
from trio_sidecar.server import serve
from trio_sidecar.transport.dial import aio_connect, connection_settings
from trio_sidecar.transport.pool import open_pool
from trio_sidecar.wire.codec import encode
from trio_sidecar.wire.methods import GENERATE_STREAM

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from support.certificates import Certificates
    from trio_sidecar.transport.connection import ConnectionSettings

LOOPBACK = ListenAddress(host="127.0.0.1", port=0)


@asynccontextmanager
async def served(tls: ServerTlsSettings, listen: ListenAddress | UnixAddress = LOOPBACK) -> AsyncIterator[str]:
    """Our server over a mock engine; yields its address."""
    settings = ServerSettings(listen=listen, tls=tls, drain_secs=1.0)
    async with open_mock(token_settings()) as engine, trio.open_nursery() as nursery:
        (address, *_) = await nursery.start(serve, engine, settings)
        yield str(address)
        nursery.cancel_scope.cancel()


@contextmanager
def grpcio_served(certificates: Certificates, *, mutual: bool) -> Iterator[str]:
    """A grpcio server that answers every generation with one message; yields its address."""
    pem = Path(certificates.server).read_bytes()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    handler = grpc.unary_stream_rpc_method_handler(lambda _request, _context: iter([encode(wire.GenerateResponse())]))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("vllm.Inference", {"GenerateStream": handler}),)
    )
    credentials = grpc.ssl_server_credentials(
        [(pem, pem)], Path(certificates.ca).read_bytes() if mutual else None, require_client_auth=mutual
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def settings(address: str, tls: ClientTlsSettings) -> TransportSettings:
    return TransportSettings(
        grpc_endpoint=parse_engine_endpoint(address), grpc_connections=2, grpc_startup_deadline_secs=5.0, tls=tls
    )


def address_of(listener: object) -> str:
    assert isinstance(listener, trio.SocketListener)
    return f"127.0.0.1:{listener.socket.getsockname()[1]}"


async def aio_count(engine: RemoteEngine) -> int:
    """How many answers one generation has."""
    count = 0
    async with engine.aio_generate(request_of(), {}) as stream:
        while batch := await stream.aio_receive():
            count += len(batch)
    return count


async def generation(address: str, tls: ClientTlsSettings, fast: bool) -> int:
    async with open_pool(settings(address, tls), fast=fast) as pool:
        return await run_aio(aio_count, RemoteEngine(pool))


async def aio_attempt(settings: ConnectionSettings, fast: bool) -> None:
    connection = await aio_connect(settings, lambda _connection: None, fast=fast)
    try:
        async with connection.aio_open(GENERATE_STREAM.path, encode(request_of()), metadata={}) as stream:
            await stream.aio_receive()
    finally:
        connection.close("the test is over")


async def failure(address: str, tls: ClientTlsSettings, fast: bool) -> str:
    """What one reads when no generation is possible, after one attempt to connect or at the first call."""
    with pytest.raises((ConnectError, RpcError)) as caught:
        await run_aio(aio_attempt, connection_settings(settings(address, tls)), fast)
    return str(caught.value)


def test_tls(certificates: Certificates, host: Host, fast: bool) -> None:
    """A generation passes over TLS, and over mutual TLS with a certificate that the server trusts."""

    async def main() -> None:
        async with served(certificates.serving()) as address:
            assert 21 == await generation(address, certificates.trusting(), fast)
            assert 21 == await generation(f"https://{address}", certificates.trusting(), fast)
        async with served(certificates.mutual()) as address:
            assert 21 == await generation(address, certificates.trusting(cert=certificates.client), fast)

    run(main, host=host)


def test_tls_against_grpcio(certificates: Certificates, host: Host, fast: bool) -> None:
    """The same against a grpcio server."""
    for mutual in (False, True):
        tls = certificates.trusting(cert=certificates.client if mutual else None)
        with grpcio_served(certificates, mutual=mutual) as address:
            assert 1 == run(generation, address, tls, fast, host=host)


def test_unix_socket(tmp_path: Path, certificates: Certificates, host: Host, fast: bool) -> None:
    """A generation passes over a Unix socket, in plaintext and over TLS."""
    listen = UnixAddress(str(tmp_path / "s"))

    async def main() -> None:
        async with served(ServerTlsSettings(), listen) as address:
            assert f"unix://{tmp_path}/s" == address
            assert 21 == await generation(address, ClientTlsSettings(), fast)
        async with served(certificates.serving(), listen) as address:
            assert 21 == await generation(address, certificates.trusting(), fast)

    run(main, host=host)


def test_what_one_reads_when_the_server_is_not_trusted(certificates: Certificates, host: Host, fast: bool) -> None:
    """An unknown CA and another name are told apart, and the flag that helps is named."""

    async def main() -> None:
        async with served(certificates.serving()) as address:
            found = await failure(address, ClientTlsSettings(enabled=True, ca=certificates.other_ca), fast)
            assert f"TLS handshake with {address} failed: the certificate of the server is not trusted (" in found
            assert "--grpc-tls-ca" in found
            found = await failure(address, certificates.trusting(server_name="other.example"), fast)
            assert "the certificate is for another name (" in found
            assert "--grpc-tls-server-name" in found
        async with served(ServerTlsSettings(certfile=certificates.elsewhere)) as address:
            named = certificates.trusting(server_name="elsewhere.example")
            assert 21 == await generation(address, named, fast)

    run(main, host=host)


def test_what_one_reads_when_the_client_is_not_trusted(certificates: Certificates, host: Host) -> None:
    """A server that demands a certificate, and one that knows ours not, leave a message that says so.

    Whether their alert arrives before the end of the connection is up to the server, so the message may be a guess.
    """
    with grpcio_served(certificates, mutual=True) as address:
        assert "demand" in run(failure, address, certificates.trusting(), True, host=host)
        found = run(failure, address, certificates.trusting(cert=certificates.stranger), True, host=host)
        assert f"{address} did not greet as an HTTP/2 server: TLS: the server" in found

    async def main() -> None:
        async with served(certificates.mutual()) as address:
            found = await failure(address, certificates.trusting(), True)
            assert "demand a client certificate" in found

    run(main, host=host)


def test_without_a_client_certificate_over_the_fallback(certificates: Certificates, host: Host) -> None:
    """The fallback cannot see why, but it fails, in words that name the endpoint."""
    with grpcio_served(certificates, mutual=True) as address:
        assert address in run(failure, address, certificates.trusting(), False, host=host)


def test_a_plaintext_server_and_a_plaintext_client(certificates: Certificates, host: Host, fast: bool) -> None:
    """TLS against a plaintext server, and the other way round, names the side that does not speak TLS."""

    async def main() -> None:
        async with served(ServerTlsSettings()) as address:
            found = await failure(address, certificates.trusting(), fast)
            assert f"TLS handshake with {address} failed: the server" in found
            assert "does not speak TLS" in found or "plaintext server" in found

    run(main, host=host)


def test_a_plaintext_client_is_told_of_tls(certificates: Certificates, host: Host) -> None:
    """A server that answers plaintext with a TLS alert, as OpenSSL and rustls do, is recognised."""

    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"\x15\x03\x03\x00\x02\x02\x46")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, answer, [listener])
            address = address_of(listener)
            found = await failure(address, ClientTlsSettings(), True)
            assert "the server speaks TLS; --grpc-tls connects so" in found
            nursery.cancel_scope.cancel()

    run(main, host=host)


def test_a_server_without_http2(certificates: Certificates, host: Host, fast: bool) -> None:
    """A TLS server that does not choose ALPN h2, such as an HTTP/1.1 server, is refused by name of that."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server)

    async def hold(stream: trio.SSLStream[trio.SocketStream]) -> None:
        with trio.move_on_after(5):
            try:
                await stream.receive_some()
            except trio.BrokenResourceError:
                return

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_ssl_over_tcp_listeners(0, context, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, hold, [listener])
            address = address_of(listener.transport_listener)
            assert "the server does not offer HTTP/2 (ALPN h2)" in await failure(address, certificates.trusting(), fast)
            nursery.cancel_scope.cancel()

    run(main, host=host)


async def test_a_tls_file_that_is_missing(aio_loop: object) -> None:
    """A pool with a TLS file that cannot be read is not opened, and the flag is named."""
    tls = ClientTlsSettings(enabled=True, ca="/nowhere/ca.pem")
    with pytest.raises(InvalidConfig, match=r"--grpc-tls-ca: '/nowhere/ca\.pem' cannot be read"):
        await generation("127.0.0.1:1", tls, True)


@pytest.mark.parametrize(
    ("endpoint", "warnings"),
    [("engine.example:1", 1), ("192.0.2.7:1", 1), ("localhost:1", 0), ("[::1]:1", 0), ("unix:///nowhere/s", 0)],
)
async def test_plaintext_to_another_machine_is_warned_about(aio_loop: object, endpoint: str, warnings: int) -> None:
    """Prompts in plaintext on a network are worth a warning; on this machine, or over TLS, they are not."""

    async def warned(tls: ClientTlsSettings, *, bootstrap: bool) -> int:
        with structlog.testing.capture_logs() as logs, trio.CancelScope() as scope:
            scope.cancel()
            async with open_pool(settings(endpoint, tls), bootstrap=bootstrap):
                pass
        return sum(entry["event"] == "plaintext_connection" for entry in logs)

    assert warnings == await warned(ClientTlsSettings(), bootstrap=False)
    assert 0 == await warned(ClientTlsSettings(), bootstrap=True)
    assert 0 == await warned(ClientTlsSettings(enabled=True), bootstrap=False)


async def test_a_peer_that_never_ends_tls_is_left(certificates: Certificates, aio_loop: object) -> None:
    """Closing a pool does not wait long for a peer that does not answer the end of TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server)
    context.set_alpn_protocols(["h2"])
    greeted = b"\0\0\0\x04\0\0\0\0\0"

    async def hold(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.send_all(greeted)
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_ssl_over_tcp_listeners(0, context, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, hold, [listener])
        address = address_of(listener.transport_listener)
        with trio.fail_after(5):
            async with open_pool(settings(address, certificates.trusting())) as pool:
                connections = [slot.connection for slot in pool.slots]
            for connection in connections:
                assert connection is not None
                await connection.closed.wait()
        nursery.cancel_scope.cancel()
