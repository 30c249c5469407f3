"""A few small HTTP pages for orchestrators and scrapers (Trio-flavoured).

Whatever a peer does here, it does to itself only: a request has a size, a connection a time, and one request ends it.
"""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

import attrs
import h11
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

__all__ = ["NOT_FOUND", "Page", "serve_pages"]

REQUEST_SECS = 5.0
MAX_REQUEST_BYTES = 8192
READ_BYTES = 4096
METHODS = (b"GET", b"HEAD")


@attrs.frozen(slots=True)
class Page:
    """An answer.

    Attributes:
        status: The HTTP status.
        body: Text, sent as UTF-8.
        content_type: Its kind.
    """

    status: int = 200
    body: str = ""
    content_type: str = "text/plain; charset=utf-8"


NOT_FOUND = Page(404, "not found\n")


async def serve_pages(listeners: Sequence[trio.SocketListener], page: Callable[[str], Awaitable[Page]]) -> None:
    """Answer until cancelled.

    Args:
        listeners: Sockets that listen already.
        page: Gives the page for a path, without its query.
    """
    await trio.serve_listeners(partial(_answer, page), list(listeners))


async def _answer(page: Callable[[str], Awaitable[Page]], stream: trio.SocketStream) -> None:
    with trio.move_on_after(REQUEST_SECS):
        try:
            async with stream:
                if answer := await _exchange(page, stream):
                    await stream.send_all(answer)
        except trio.BrokenResourceError:
            return


async def _exchange(page: Callable[[str], Awaitable[Page]], stream: trio.SocketStream) -> bytes:
    """Read one request; the bytes of its answer, none if there was no request."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(bytes(await stream.receive_some(READ_BYTES)))
    except h11.RemoteProtocolError as error:
        return _bytes(connection, Page(error.error_status_hint, f"{error}\n"))
    if not isinstance(event, h11.Request):
        return b""
    if event.method not in METHODS:
        return _bytes(connection, Page(405, "use GET\n"))
    path = event.target.partition(b"?")[0].decode("latin-1")
    return _bytes(connection, await page(path), bare=event.method == b"HEAD")


def _bytes(connection: h11.Connection, page: Page, *, bare: bool = False) -> bytes:
    body = page.body.encode()
    headers = [("content-type", page.content_type), ("content-length", str(len(body))), ("connection", "close")]
    head = h11.Response(status_code=page.status, headers=headers, reason=HTTPStatus(page.status).phrase)
    events = [head, h11.EndOfMessage()] if bare else [head, h11.Data(data=body), h11.EndOfMessage()]
    return b"".join(connection.send(event) or b"" for event in events)
