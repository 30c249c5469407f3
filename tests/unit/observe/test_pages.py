"""Small pages over HTTP; over real sockets on this machine."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from trio_sidecar.observe.pages import NOT_FOUND, Page, serve_pages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HOST = b"Host: x\r\n\r\n"


async def page(path: str) -> Page:
    """One page that exists, and one that never comes."""
    if path == "/slow":
        await trio.sleep_forever()
    return Page(200, "grün\n", "text/x") if path == "/there" else NOT_FOUND


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """The pages; their port."""
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(serve_pages, listeners, page)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def ask(port: int, request: bytes) -> bytes:
    """The whole answer, up to the end of the connection."""
    with trio.fail_after(30):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request)
            return b"".join([part async for part in stream])


async def test_a_page() -> None:
    """Status, type, length in bytes, body; the query is not part of the path, and the connection ends."""
    async with serving() as port:
        answer = await ask(port, b"GET /there?a=b HTTP/1.1\r\n" + HOST)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"HTTP/1.1 200 OK" == head.splitlines()[0]
    assert {b"content-type: text/x", b"content-length: 6", b"connection: close"} <= set(head.lower().splitlines()[1:])
    assert "grün\n".encode() == body


async def test_a_head() -> None:
    """It has everything but the body."""
    async with serving() as port:
        answer = await ask(port, b"HEAD /there HTTP/1.1\r\n" + HOST)
    assert b"content-length: 6" in answer.lower()
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /other HTTP/1.1\r\n" + HOST, b"404"),
        (b"POST /there HTTP/1.1\r\n" + HOST, b"405"),
        (b"GET /there HTTP/1.1\r\n\r\n", b"400"),
        (b"junk\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 10_000, b"431"),
    ],
)
async def test_what_is_no_page(request_: bytes, status: bytes) -> None:
    """Other paths, other methods, no host, no HTTP, and more than a request may have."""
    async with serving() as port:
        assert b"HTTP/1.1 " + status == (await ask(port, request_))[:12]


async def test_a_peer_that_leaves() -> None:
    """One that says nothing and goes, or goes in the middle, does no harm to others."""
    async with serving() as port:
        for begun in (b"", b"GET /th"):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(begun)
            await stream.aclose()
        assert b"HTTP/1.1 200" == (await ask(port, b"GET /there HTTP/1.1\r\n" + HOST))[:12]


@pytest.mark.parametrize("request_", [b"", b"GET /slow HTTP/1.1\r\n" + HOST])
async def test_time_is_limited(autojump_clock: trio.testing.MockClock, request_: bytes) -> None:
    """A peer that stays silent, and a page that does not come, end after five seconds without an answer."""
    async with serving() as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request_)
        began = trio.current_time()
        with trio.fail_after(60):
            assert b"" == await stream.receive_some()
        assert 5.0 == pytest.approx(trio.current_time() - began, abs=0.1)
