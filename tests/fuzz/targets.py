"""What the fuzzers feed: each target takes any bytes and ends in an answer or in an error of the kind that it promises.

A target knows its inputs only as bytes, so that a coverage-guided fuzzer can work on them; it says in its docstring how
it reads them. It fails by raising anything else, or by an assertion, and
returns whether the input was sound to its end.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import structlog
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import ProtocolError as Http2Error

from support.samples import minimal_request, model_facts
from trio_sidecar import wire
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert.request import ResponseOptionsState, convert_request
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import InvalidRequest, ProtocolError, RpcError
from trio_sidecar.server.server import GrpcServer
from trio_sidecar.testing.fake_engine import FakeEngine, Script, Send, finish, tokens
from trio_sidecar.transport.connection import ConnectionSettings, ConnectionState
from trio_sidecar.transport.fastconnection import FastConnection
from trio_sidecar.transport.fastpath import FastProtocol
from trio_sidecar.transport.faststream import FastStream
from trio_sidecar.wire.codec import DecodeError, decode, encode
from trio_sidecar.wire.methods import CONTROL_METHODS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TARGETS", "quiet"]

MESSAGES: tuple[type[Any], ...] = (
    wire.GenerateRequest,
    wire.GenerateResponse,
    wire.HealthCheckRequest,
    wire.HealthCheckResponse,
    *(method.request for method in CONTROL_METHODS),
    *(method.response for method in CONTROL_METHODS),
)
ROLES = tuple(DisaggregationMode)
LIMIT_BYTES = 1 << 20


def quiet() -> None:
    """Log nothing: a fuzzer makes a thousand errors a second."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def codec(data: bytes) -> bool:
    """The first byte chooses the message, the rest is its encoding.

    What is read and written again reads as the same.
    """
    message_class = MESSAGES[data[0] % len(MESSAGES)] if data else MESSAGES[0]
    try:
        message = decode(message_class, data[1:])
    except DecodeError:
        return False
    again = encode(message)
    assert again == encode(decode(message_class, again))
    return True


def answers(data: bytes) -> bool:
    """Three bytes say what was asked for; then answers of an engine, each behind two bytes of length.

    However an engine lies, there is at most one terminal, usage counts what was delivered, and nothing follows.
    """
    head, rest = data[:3].ljust(3, b"\0"), data[3:]
    mode = ROLES[head[0] % len(ROLES)]
    converter = ResponseConverter(
        ResponseOptionsState(
            prompt_tokens=head[1] % 8,
            logprobs=(None, 0, 2)[head[0] // 8 % 3],
            prompt_logprobs=(None, 0, 2)[head[0] // 32 % 3],
            user_stop_ids=frozenset({head[2] % 16}),
            hidden_stop_ids=frozenset({head[2] // 16}),
            mode=mode,
            expands_prompt=bool(head[1] & 128),
        )
    )
    chunks: list[Any] = []
    while len(rest) >= 2:
        size = int.from_bytes(rest[:2], "big")
        body, rest = rest[2 : 2 + size], rest[2 + size :]
        try:
            response = decode(wire.GenerateResponse, body)
            chunk = converter.convert(response)
        except (DecodeError, ProtocolError):
            return False
        if chunk is not None:
            chunks.append(chunk)
    terminals = [chunk for chunk in chunks if "finish_reason" in chunk]
    assert converter.finished == bool(terminals)
    assert terminals == chunks[-1:] if terminals else all("finish_reason" not in chunk for chunk in chunks)
    for chunk in terminals:
        usage = chunk["completion_usage"]
        assert sum(len(chunk["token_ids"]) for chunk in chunks) == usage["completion_tokens"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
        assert usage["total_tokens"] == merge_chunks(*chunks)["completion_usage"]["total_tokens"]
    json.dumps(chunks, allow_nan=False)
    return converter.finished


def requests(data: bytes) -> bool:
    """The first byte chooses the role; the rest is JSON: members that replace those of a small request.

    A request is refused with a reason, or it can be sent.
    """
    try:
        changes = json.loads(data[1:])
    except (ValueError, RecursionError):
        return False
    if not isinstance(changes, dict):
        return False
    mode = ROLES[data[0] % len(ROLES)]
    request = {**minimal_request(), **changes}
    try:
        converted = convert_request(
            request, request_id="request-0", model=model_facts(mode=mode, supports_multimodal=bool(data[0] & 128))
        )
    except InvalidRequest:
        return False
    assert decode(wire.GenerateRequest, encode(converted.wire)) is not None
    assert all(isinstance(value, str) for value in converted.metadata.values())
    return True


class MemoryTransport:
    """A byte stream whose other end keeps what it gets."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.closed = False

    def get_extra_info(self, name: str) -> None:
        """Nothing is known of it."""

    def get_write_buffer_size(self) -> int:
        """All was sent."""
        return 0

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self.closed

    def write(self, data: bytes) -> None:
        """Send."""
        self.sent += data

    def close(self) -> None:
        """Close."""
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        """Not needed."""

    def resume_reading(self) -> None:
        """Not needed."""


async def _aio_serve(data: bytes) -> bool:
    engine = FakeEngine(Script(stream=[Send(tokens(7)), Send(finish(8))]))
    server = GrpcServer(engine, max_message_bytes=LIMIT_BYTES)
    protocol, transport = server.protocol(), MemoryTransport()
    protocol.connection_made(transport)
    client = H2Connection()
    client.initiate_connection()
    # A call that is there when the rest arrives, so that frames have something to hit.
    headers = {":method": "POST", ":scheme": "http", ":path": "/vllm.Inference/GenerateStream", ":authority": "x"}
    client.send_headers(1, [*headers.items(), ("te", "trailers"), ("content-type", "application/grpc")])
    cut = int.from_bytes(data[:2].ljust(2, b"\0"), "big")
    for part in (client.data_to_send() if not data or data[0] < 224 else b"", data[2:cut], data[max(cut, 2) :]):
        if part and not transport.closed:
            protocol.data_received(part)
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    protocol.connection_lost(None)
    await asyncio.wait_for(server.aio_wait_calls_ended(), 5)
    assert 0 == server.statistics().connections
    assert all(request.released for request in engine.requests)
    return bool(engine.requests)


def server_face(data: bytes) -> bool:
    """Two bytes say where a read ends; the rest is what a client sends after its preface and one call's headers.

    If the first byte is large there is no preface. No call outlives its connection.
    """
    return asyncio.run(_aio_serve(data))


async def _aio_listen(data: bytes) -> bool:
    connection = FastConnection(
        ConnectionSettings(endpoint=GrpcEndpoint.parse("127.0.0.1:1"), max_message_bytes=LIMIT_BYTES), lambda _: None
    )
    channel = connection._channel
    protocol, transport = FastProtocol(connection, channel._config), MemoryTransport()
    protocol.connection_made(transport)
    server = H2Connection(H2Configuration(client_side=False))
    server.initiate_connection()
    protocol.data_received(server.data_to_send())
    stream = FastStream(connection, LIMIT_BYTES)
    stream.id = connection.begin(
        stream, [(":method", "POST"), (":path", "/x"), (":scheme", "http"), (":authority", "x")]
    )
    reader = asyncio.ensure_future(_aio_read(stream))
    cut = int.from_bytes(data[:2].ljust(2, b"\0"), "big")
    for part in (data[2:cut], data[max(cut, 2) :]):
        if part:
            protocol.data_received(part)
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    sound = await asyncio.wait_for(reader, 5)
    connection.leave(stream)
    channel.close()
    assert ConnectionState.CLOSED is connection.state
    assert 0 == connection.open_streams
    return sound


async def _aio_read(stream: FastStream) -> bool:
    try:
        await stream.aio_headers()
        while await stream.aio_receive():
            pass
    except (RpcError, Http2Error):
        return False
    return True


def client_connection(data: bytes) -> bool:
    """Two bytes say where a read ends; the rest is what a server sends to a connection of ours with one open call.

    The call ends with a status, whatever came.
    """
    return asyncio.run(_aio_listen(data))


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "codec": codec,
    "answers": answers,
    "requests": requests,
    "server-face": server_face,
    "client-connection": client_connection,
}
