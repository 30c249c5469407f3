"""The server over TLS and Unix sockets, seen by grpcio's client, on both hosts."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import structlog
import trio

from support.mock_engine import token_settings
from support.serving import CLIENT_OPTIONS, Client, generate_request, serving
from trio_sidecar.bridge import Host, run
from trio_sidecar.config import ServerSettings, ServerTlsSettings, resolve
from trio_sidecar.endpoint import ListenAddress, UnixAddress
from trio_sidecar.engines.mock import open_mock
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.server.listen import bind, check_free

if TYPE_CHECKING:
    from support.certificates import Certificates


def read(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def count(address: str, ca: str, client: str | None = None) -> int:
    """How many answers a generation has, over TLS."""
    credentials = grpc.ssl_channel_credentials(read(ca), read(client), read(client))
    with grpc.secure_channel(address, credentials, CLIENT_OPTIONS) as channel:
        return sum(1 for _ in Client(channel).generate(generate_request()))


def code_of(address: str, ca: str, client: str | None = None) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        count(address, ca, client)
    return caught.value.code()


def test_tls(certificates: Certificates, host: Host) -> None:
    """A client that trusts the server's CA is served; with mutual TLS only if its own certificate is trusted."""

    async def main() -> None:
        ask = trio.to_thread.run_sync
        async with open_mock(token_settings()) as engine:
            async with serving(engine, tls=certificates.serving()) as server:
                assert 21 == await ask(count, str(server.address), certificates.ca)
            async with serving(engine, tls=certificates.mutual()) as server:
                address = str(server.address)
                assert 21 == await ask(count, address, certificates.ca, certificates.client)
                for client in (None, certificates.stranger):
                    assert grpc.StatusCode.UNAVAILABLE is await ask(code_of, address, certificates.ca, client)

    run(main, host=host)


@pytest.mark.parametrize(("version", "works"), [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_versions_and_log(
    certificates: Certificates, aio_loop: object, version: ssl.TLSVersion, works: bool
) -> None:
    """TLS 1.2 is the least; a handshake that fails leaves a line in the log that says why."""
    context = ssl.create_default_context(cafile=certificates.ca)
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    context.set_ciphers("DEFAULT:@SECLEVEL=0")

    def shake(port: int) -> str | None:
        with socket.create_connection(("127.0.0.1", port), 5) as raw:
            try:
                with context.wrap_socket(raw, server_hostname="localhost") as tls:
                    return tls.selected_alpn_protocol()
            except (OSError, ssl.SSLError):
                return None

    with structlog.testing.capture_logs() as logs:
        async with open_mock(token_settings()) as engine, serving(engine, tls=certificates.serving()) as server:
            assert ("h2" if works else None) == await trio.to_thread.run_sync(shake, server.tcp.port)
            await trio.sleep(0.02)
    assert (0 if works else 1) == sum(entry["event"] == "tls_handshake_failed" for entry in logs)


async def test_tls_is_not_warned_about(certificates: Certificates) -> None:
    """An address that others can reach is no reason for a warning once it is encrypted."""
    settings = ServerSettings(listen=ListenAddress(host="0.0.0.0", port=0), tls=certificates.serving())
    with structlog.testing.capture_logs() as logs:
        (await bind(settings)).close()
    assert [] == [entry for entry in logs if entry["log_level"] == "warning"]


async def test_tls_files_are_checked_before_the_engine_opens() -> None:
    """A certificate that is not there is found before minutes are spent on an engine."""
    with pytest.raises(InvalidConfig, match=r"--ssl-certfile: '/nowhere' cannot be read: No such file or directory"):
        await check_free(ServerSettings(tls=ServerTlsSettings(certfile="/nowhere")))


# -- Unix sockets


def test_unix_socket(tmp_path: Path, host: Host) -> None:
    """A socket is served, belongs to its owner alone unless told otherwise, and is gone at the end."""
    path = tmp_path / "s"

    async def main(mode: dict[str, Any], expected: int) -> None:
        async with open_mock(token_settings()) as engine:
            async with serving(engine, listen=UnixAddress(str(path)), **mode) as server:
                assert expected == stat.S_IMODE(path.stat().st_mode)
                assert 21 == await server.ask(lambda client: sum(1 for _ in client.generate(generate_request())))
            assert not path.exists()

    run(main, {}, 0o600, host=host)
    run(main, {"listen_mode": 0o660}, 0o660, host=host)


async def test_what_stands_in_the_way_of_a_socket(tmp_path: Path) -> None:
    """A dead server's socket is replaced; a live one, another kind of file, and a missing directory are refused."""
    path = tmp_path / "s"
    settings = ServerSettings(listen=UnixAddress(str(path)))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    await check_free(settings)
    assert not path.exists()
    bound = await bind(settings)
    with pytest.raises(InvalidConfig, match="is in use by another server"):
        await bind(settings)
    bound.close()
    path.write_text("precious")
    with pytest.raises(InvalidConfig, match="it is no socket"):
        await bind(settings)
    assert "precious" == path.read_text()
    with pytest.raises(InvalidConfig, match=r"cannot listen on unix:///.*: No such file or directory"):
        await bind(ServerSettings(listen=UnixAddress(str(tmp_path / "no" / "s"))))


async def test_another_servers_socket_is_left(tmp_path: Path) -> None:
    """A server removes its own socket only, not one that has taken its place."""
    path = tmp_path / "s"
    first = await bind(ServerSettings(listen=UnixAddress(str(path))))
    path.unlink()
    second = await bind(ServerSettings(listen=UnixAddress(str(path))))
    first.close()
    assert path.exists()
    second.close()
    assert [] == os.listdir(tmp_path)  # noqa: PTH208


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"--listen": "unix://relative"}, "--listen: a Unix socket is written as unix:///PATH"),
        ({"--listen": "unix:///" + "x" * 107}, "has 108 bytes; at most 107 are allowed"),
        ({"--listen-mode": "rw"}, "--listen-mode: 'rw' is not allowed; use three octal digits"),
        ({"--listen-mode": "7777"}, "7777 is not allowed"),
    ],
)
def test_unix_settings_that_are_refused(flags: dict[str, str], words: str) -> None:
    """Paths that no socket can have, and modes that are none, are refused by name."""
    with pytest.raises(InvalidConfig) as caught:
        resolve(ServerSettings, flags=flags, environ={})
    assert words in str(caught.value)
