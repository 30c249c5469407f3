"""What grpclib is given to connect with, and the words for a connection that fails or is lost."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, cast

import pytest

from trio_sidecar.bridge import aio_checkpoint, run_aio
from trio_sidecar.endpoint import GrpcEndpoint, UnixAddress
from trio_sidecar.errors import ConnectError
from trio_sidecar.transport.connection import ConnectionSettings
from trio_sidecar.transport.handshake import aio_handshake, channel_arguments, loss

if TYPE_CHECKING:
    import asyncio

ENDPOINT = GrpcEndpoint.parse("engine:50051")
CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def of(**more: Any) -> ConnectionSettings:
    return ConnectionSettings(**({"endpoint": ENDPOINT} | more))


def arguments(**more: Any) -> tuple[dict[str, Any], tuple[int, int, str | None]]:
    """Where to and how encrypted; windows and name."""
    given = channel_arguments(of(**more))
    config = given.pop("config")
    windows = (config.http2_connection_window_size, config.http2_stream_window_size)
    return given, (*windows, config.ssl_target_name_override)


def test_where_a_channel_goes() -> None:
    """To host and port in plaintext, with our windows and no name to check."""
    given, config = arguments(stream_window_bytes=70_000, connection_window_bytes=80_000, server_name="ignored")
    assert {"host": "engine", "port": 50051, "ssl": None} == given
    assert (80_000, 70_000, None) == config


@pytest.mark.parametrize("name", [None, "engine.internal"])
def test_whose_certificate_a_channel_wants(name: str | None) -> None:
    """The endpoint's own, which grpclib takes from the host, unless another name is given."""
    given, config = arguments(tls=CONTEXT, server_name=name)
    assert CONTEXT is given["ssl"]
    assert name == config[2]


@pytest.mark.parametrize("name", [None, "engine.internal"])
def test_a_socket_file_has_a_name_too(name: str | None) -> None:
    """Without one, the authority of its requests is what the certificate must have."""
    given, config = arguments(endpoint=UnixAddress("/run/engine.sock"), tls=CONTEXT, server_name=name)
    assert {"path": "/run/engine.sock", "ssl": CONTEXT} == given
    assert (name or "localhost") == config[2]


# -- Failures


class Unreachable:
    """A channel whose connecting fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def __connect__(self) -> None:
        """Fail."""
        await aio_checkpoint()
        raise self.error


async def shake(error: Exception, **more: Any) -> None:
    async def aio_main() -> None:
        await aio_handshake(cast("Any", Unreachable(error)), of(**more))

    await run_aio(aio_main)


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), ConnectionAbortedError(103, "aborted")])
@pytest.mark.parametrize("shows", [False, True])
async def test_a_handshake_that_is_cut_off(aio_loop: asyncio.AbstractEventLoop, error: OSError, shows: bool) -> None:
    """The sentence names the server and says what may be wrong; where we show a certificate, one thing less."""
    with pytest.raises(ConnectError) as caught:
        await shake(error, tls=CONTEXT, shows_certificate=shows)
    hint = "it may be a plaintext server" + ("" if shows else ", or demand a client certificate")
    assert f"TLS handshake with engine:50051 failed: the server closed the connection; {hint}" == str(caught.value)
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


async def test_a_handshake_that_is_refused(aio_loop: asyncio.AbstractEventLoop) -> None:
    """What the server says is said on."""
    with pytest.raises(ConnectError) as caught:
        await shake(FAULT, tls=CONTEXT)
    assert "TLS handshake with engine:50051 failed: tlsv1 alert internal error" == str(caught.value)


async def test_a_failure_of_another_kind_is_left_as_it_is(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Nobody listens, or there is no TLS that could have failed."""
    refused, reset = ConnectionRefusedError(111, "refused"), ConnectionResetError(104, "reset")
    with pytest.raises(ConnectionRefusedError) as caught:
        await shake(refused, tls=CONTEXT)
    assert refused is caught.value
    with pytest.raises(ConnectionResetError) as caught_reset:
        await shake(reset)
    assert reset is caught_reset.value


FAULT = ssl.SSLError(1, "")
FAULT.reason = "TLSV1_ALERT_INTERNAL_ERROR"
HINT = "TLS: the server closed the connection; it may be a plaintext server"


@pytest.mark.parametrize(
    ("error", "more", "told"),
    [
        (None, {"greeted": True}, "the peer closed the connection"),
        (None, {}, "the peer closed the connection"),
        (OSError(104, "reset"), {"greeted": True}, "[Errno 104] reset"),
        (ConnectionResetError(), {"greeted": True}, "ConnectionResetError"),
        (None, {"unread": b"\x15\x03\x01\0\2"}, "the server speaks TLS; --grpc-tls connects so"),
        (None, {"unread": b"\x15\x03\x01\0\2", "greeted": True}, "the peer closed the connection"),
        (None, {"unread": b"x\x15\x03"}, "the peer closed the connection"),
        (None, {"tls": CONTEXT, "greeted": True}, "the peer closed the connection"),
        (None, {"tls": CONTEXT, "shows_certificate": True}, HINT),
        (None, {"tls": CONTEXT}, f"{HINT}, or demand a client certificate"),
        (RuntimeError("odd"), {"tls": CONTEXT, "shows_certificate": True}, HINT),
        (FAULT, {"tls": CONTEXT, "greeted": True}, "TLS: tlsv1 alert internal error"),
        (FAULT, {"tls": CONTEXT}, "TLS: tlsv1 alert internal error"),
        (OSError(104, "reset"), {"tls": CONTEXT, "greeted": True}, "[Errno 104] reset"),
    ],
)
def test_the_words_for_a_loss(error: Exception | None, more: dict[str, Any], told: str) -> None:
    """They tell a peer that went from one that never understood us."""
    settings = of(**{name: value for name, value in more.items() if name not in ("greeted", "unread")})
    assert told == loss(error, settings, greeted=more.get("greeted", False), unread=more.get("unread", b""))
