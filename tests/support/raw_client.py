"""A client of our server that sends what it is told to, down to single frames."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, TrailersReceived

if TYPE_CHECKING:
    from support.serving import Serving

UNARY, STREAM = "/vllm.Inference/Generate", "/vllm.Inference/GenerateStream"


class RawClient:
    """An HTTP/2 connection that sends what it is told to."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.h2 = H2Connection(
            H2Configuration(client_side=True, header_encoding="utf-8", validate_outbound_headers=False)
        )
        self.events: list[Any] = []
        self.closed = False

    async def flush(self) -> None:
        """Send what is pending."""
        await self.stream.send_all(self.h2.data_to_send())

    async def open(self, path: str, *extra: tuple[str, str], **changes: str) -> int:
        """Send request headers; the new stream's id."""
        headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
        headers |= {"content-type": "application/grpc"} | changes
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, [*headers.items(), *extra])
        await self.flush()
        return stream_id

    async def send(self, stream_id: int, data: bytes, *, end: bool = True) -> None:
        """Send bytes on a stream, minding the windows."""
        while len(data) > 0:
            size = min(len(data), self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            if size <= 0:
                await self.receive()
                continue
            self.h2.send_data(stream_id, data[:size])
            data = data[size:]
            await self.flush()
        if end:
            self.h2.end_stream(stream_id)
            await self.flush()

    async def receive(self) -> None:
        """Take what arrives next."""
        data = await self.stream.receive_some()
        self.closed = not data
        for event in self.h2.receive_data(data):
            if isinstance(event, DataReceived):
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self.events.append(event)
        await self.flush()

    async def status(self, stream_id: int) -> dict[str, str]:
        """The headers with which a stream ends."""
        with trio.fail_after(5):
            while True:
                for event in self.events:
                    if getattr(event, "stream_id", None) != stream_id:
                        continue
                    if isinstance(event, ResponseReceived | TrailersReceived):
                        headers = {str(name): str(value) for name, value in event.headers}
                        if "grpc-status" in headers:
                            return headers
                assert not self.closed
                await self.receive()


async def raw_client(server: Serving) -> RawClient:
    """A raw client."""
    client = RawClient(await trio.open_tcp_stream(server.tcp.host, server.tcp.port))
    client.h2.initiate_connection()
    await client.flush()
    return client


def framed(data: bytes, *, compressed: bool = False, size: int | None = None) -> bytes:
    """A gRPC message."""
    return struct.pack(">BI", compressed, len(data) if size is None else size) + data
