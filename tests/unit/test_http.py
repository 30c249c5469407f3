"""The little HTTP that is needed to ask a front end."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from trio_sidecar import http
from trio_sidecar.http import HttpAddress, HttpFailed, open_exchange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@attrs.define
class Server:
    """Answers each connection with the same bytes, then closes it."""

    address: HttpAddress
    request: bytes = b""


@asynccontextmanager
async def serving(answer: bytes) -> AsyncIterator[Server]:
    """A server of canned bytes."""

    async def handle(stream: trio.SocketStream) -> None:
        server.request = bytes(await stream.receive_some(1 << 16))
        await stream.send_all(answer)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(trio.serve_listeners, handle, listeners)
        server = Server(HttpAddress("127.0.0.1", listeners[0].socket.getsockname()[1]))
        yield server
        nursery.cancel_scope.cancel()


async def get(answer: bytes) -> tuple[int, bytes]:
    """Status and body as the client reads them."""
    async with serving(answer) as server, open_exchange(server.address, "GET", "/x") as exchange:
        return exchange.status, await exchange.read_all()


async def test_request_as_sent() -> None:
    """Method, path, host, length and body are on the wire, and the connection is for one request."""
    async with (
        serving(b"HTTP/1.1 204 No Content\r\n\r\n") as server,
        open_exchange(server.address, "POST", "/v1/x", b'{"a": 1}') as exchange,
    ):
        assert 204 == exchange.status

    head, _, body = server.request.partition(b"\r\n\r\n")
    assert b'{"a": 1}' == body
    assert b"POST /v1/x HTTP/1.1" == head.splitlines()[0]
    assert {f"host: {server.address}".encode(), b"connection: close", b"content-length: 8"} <= {
        *head.lower().splitlines()
    }


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    ],
    ids=["length", "chunked", "until-close", "after-100"],
)
async def test_bodies_in_each_framing(answer: bytes) -> None:
    """However a server frames its body, it is read to its end."""
    assert (200, b"hello") == await get(answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "without an answer|broke"),
        (b"SSH-2.0-x\r\n\r\n", "broke"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello", "broke"),
    ],
    ids=["nothing", "not-http", "truncated"],
)
async def test_broken_answers_are_errors(answer: bytes, words: str) -> None:
    """An answer that is none, or not whole, is never taken for one."""
    with pytest.RaisesGroup(pytest.RaisesExc(HttpFailed, match=words)):
        await get(answer)


async def test_body_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body without end is given up on."""
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 10)
    with pytest.RaisesGroup(pytest.RaisesExc(HttpFailed, match="longer than 10 bytes")):
        await get(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100)


async def test_no_server() -> None:
    """The error names the address."""
    async with serving(b"") as server:
        pass
    with pytest.raises(HttpFailed, match=f"cannot connect to {server.address}"):
        async with open_exchange(server.address, "GET", "/"):
            pass


async def test_proxies_play_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the proxy variables say, the server itself is asked."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    assert (200, b"hello") == await get(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")


def test_ipv6_addresses_have_brackets() -> None:
    """As URLs want them."""
    assert ("[::1]:80", "h:80") == (str(HttpAddress("::1", 80)), str(HttpAddress("h", 80)))
