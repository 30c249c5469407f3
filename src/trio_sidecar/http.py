"""The little HTTP that is needed to ask a front end or a metrics port: h11 over a Trio stream.

A full client would bring proxies, redirects and pools, none of which may play a part here.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import h11
import trio

from trio_sidecar.errors import SidecarError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

READ_BYTES = 64 << 10
MAX_BODY_BYTES = 16 << 20


class HttpFailed(SidecarError):
    """The exchange broke down: no connection, a malformed or a truncated answer."""


@attrs.frozen(slots=True)
class HttpAddress:
    """Where an HTTP server listens; a host without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        """``HOST:PORT``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Exchange:
    """One request that has been sent, and its answer, read piece by piece."""

    def __init__(self, stream: trio.abc.Stream, connection: h11.Connection) -> None:
        self._stream = stream
        self._connection = connection
        self.status = 0

    async def read_head(self) -> None:
        """Read up to the status line and the headers."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                self.status = event.status_code
                return
            if not isinstance(event, h11.InformationalResponse):
                msg = "the server ended the connection without an answer"
                raise HttpFailed(msg)

    async def read_some(self) -> bytes:
        """The next piece of the body; empty at its end."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                return bytes(event.data)
            if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return b""

    async def read_all(self) -> bytes:
        """The rest of the body, up to 16 MiB."""
        body = bytearray()
        while piece := await self.read_some():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                msg = f"the answer is longer than {MAX_BODY_BYTES} bytes"
                raise HttpFailed(msg)
        return bytes(body)

    async def _next(self) -> object:
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                self._connection.receive_data(bytes(await self._stream.receive_some(READ_BYTES)))
        except (h11.RemoteProtocolError, trio.BrokenResourceError) as error:
            msg = f"the HTTP connection broke: {error}"
            raise HttpFailed(msg) from error
        return event


@asynccontextmanager
async def open_exchange(address: HttpAddress, method: str, path: str, body: bytes = b"") -> AsyncIterator[Exchange]:
    """Send a request on a connection of its own and read the answer's head.

    Raises:
        HttpFailed: No connection, or no proper answer.
    """
    try:
        stream = await trio.open_tcp_stream(address.host, address.port)
    except OSError as error:
        msg = f"cannot connect to {address}: {error.strerror or error}"
        raise HttpFailed(msg) from error
    async with stream:
        connection = h11.Connection(h11.CLIENT)
        headers = [("host", str(address)), ("connection", "close"), ("content-length", str(len(body)))]
        if body:
            headers.append(("content-type", "application/json"))
        data = connection.send(h11.Request(method=method, target=path, headers=headers)) or b""
        data += connection.send(h11.Data(data=body)) or b""
        data += connection.send(h11.EndOfMessage()) or b""
        try:
            await stream.send_all(data)
        except trio.BrokenResourceError as error:
            msg = f"the HTTP connection broke: {error}"
            raise HttpFailed(msg) from error
        exchange = Exchange(stream, connection)
        await exchange.read_head()
        yield exchange
