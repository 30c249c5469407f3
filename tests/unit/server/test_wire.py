"""What a hostile or broken client may send, down to single frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trio
from h2.events import ConnectionTerminated, DataReceived, StreamReset

from support.mock_engine import mock_settings, token_settings
from support.raw_client import STREAM, UNARY, framed, raw_client
from support.serving import Client, generate_request, serving, wait_until
from trio_sidecar.engines.mock import MockEngine, open_mock

if TYPE_CHECKING:
    import asyncio

MIB = 1 << 20

BAD_BODIES = [
    ("no message", b"", "13", "without a GenerateRequest"),
    ("compressed", framed(b"abc", compressed=True), "12", "gzip"),
    ("too large", framed(b"", size=2**32 - 1), "11", "4294967295 bytes; at most 33554432"),
    ("cut in the prefix", b"\0\0", "13", "middle of a message"),
    ("cut in the message", framed(b"abc", size=10), "13", "middle of a message"),
    ("malformed", framed(b"\x22\x7f\x01"), "3", "GenerateRequest could not be decoded"),
    ("bad UTF-8", framed(b"\x0a\x01\xff"), "3", "request_id"),
]


@pytest.mark.rule("FR-104", "FR-105")
@pytest.mark.parametrize("path", [UNARY, STREAM])
async def test_bad_bodies(aio_loop: asyncio.AbstractEventLoop, path: str) -> None:
    """Each gets its status and a reason, trailers only, and the connection serves on."""
    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        client = await raw_client(server)
        for name, body, code, words in BAD_BODIES:
            stream_id = await client.open(path, ("grpc-encoding", "gzip"))
            await client.send(stream_id, body)
            headers = await client.status(stream_id)
            assert (name, "200", code) == (name, headers.get(":status"), headers["grpc-status"])
            assert words in headers["grpc-message"]
        stream_id = await client.open(path)
        await client.send(stream_id, framed(generate_request().SerializeToString()))
        assert "0" == (await client.status(stream_id))["grpc-status"]
        assert 1 == engine.statistics().accepted
        await client.stream.aclose()


async def test_too_large_is_refused_before_it_is_sent(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The prefix is enough to refuse, and the rest of the request is called off."""
    async with open_mock(mock_settings()) as engine, serving(engine, max_message_bytes=1000) as server:
        client = await raw_client(server)
        stream_id = await client.open(UNARY)
        await client.send(stream_id, framed(b"x", size=1001), end=False)
        assert "11" == (await client.status(stream_id))["grpc-status"]
        with trio.fail_after(5):
            while not any(isinstance(event, StreamReset) for event in client.events):
                await client.receive()
        await client.stream.aclose()


@pytest.mark.rule("FR-104")
async def test_five_mebibytes_are_fine_and_more_than_the_limit_is_not(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A long prompt passes; one beyond 32 MiB is refused, by whichever side notices first."""

    def ask(client: Client) -> Any:
        long = client.call(UNARY[1:], generate_request(range(2_000_000), truncate_prompt_tokens=5))
        huge = client.failure(UNARY[1:], generate_request(session_id="x" * (33 * MIB)))
        return long.prompt_info.num_prompt_tokens, huge[0]

    async with open_mock(token_settings()) as engine, serving(engine) as server:
        count, code = await server.ask(ask)
    assert 5 == count
    assert code in (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.RESOURCE_EXHAUSTED)


BAD_CALLS = [
    ("unknown method", "/vllm.Inference/Nothing", {}, "200", "12", "unknown method 'Nothing' of vllm.Inference"),
    ("unknown service", "/vllm.Lora/LoadLora", {}, "200", "12", "unknown service 'vllm.Lora'"),
    ("reflection", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", {}, "200", "12", "unknown service"),
    ("root", "/", {}, "200", "12", "unknown service"),
    ("json", UNARY, {"content-type": "application/json"}, "415", "13", "content-type"),
    ("get", UNARY, {":method": "GET"}, "405", "12", "POST"),
    ("timeout", UNARY, {"grpc-timeout": "soon"}, "200", "3", "grpc-timeout"),
]


@pytest.mark.parametrize(
    ("path", "changes", "http", "code", "words"), [row[1:] for row in BAD_CALLS], ids=[row[0] for row in BAD_CALLS]
)
async def test_bad_calls(
    aio_loop: asyncio.AbstractEventLoop, path: str, changes: dict[str, str], http: str, code: str, words: str
) -> None:
    """Unknown paths and foreign requests are answered at once."""
    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        client = await raw_client(server)
        headers = await client.status(await client.open(path, **changes))
        assert (http, code) == (headers[":status"], headers["grpc-status"])
        assert words in headers["grpc-message"]
        await client.stream.aclose()


async def test_unknown_frames_are_ignored(aio_loop: asyncio.AbstractEventLoop) -> None:
    """HTTP/2 demands it."""
    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        client = await raw_client(server)
        await client.stream.send_all(b"\0\0\2\xbb\0\0\0\0\0hi")
        stream_id = await client.open(STREAM)
        await client.send(stream_id, framed(generate_request().SerializeToString()))
        assert "0" == (await client.status(stream_id))["grpc-status"]
        await client.stream.aclose()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100])
async def test_foreign_protocols_are_hung_up_on(aio_loop: asyncio.AbstractEventLoop, data: bytes) -> None:
    """Another protocol gets a GOAWAY and a closed connection, and nothing is left of it."""
    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        stream = await trio.open_tcp_stream(server.tcp.host, server.tcp.port)
        await stream.send_all(data)
        with trio.fail_after(5):
            while await stream.receive_some():
                pass
        await stream.aclose()


async def test_the_end_says_goaway(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A client is told that the connection ends in order."""
    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        client = await raw_client(server)
        await client.receive()
        server.scope.cancel()
        with trio.fail_after(5):
            while not client.closed:
                await client.receive()
        assert [0] == [event.error_code for event in client.events if isinstance(event, ConnectionTerminated)]
        await client.stream.aclose()


@pytest.mark.rule("FR-101")
async def test_a_client_that_shuts_its_window(aio_loop: asyncio.AbstractEventLoop) -> None:
    """With a window of 100 bytes the engine waits for the client; when that resets, all is released."""
    async with open_mock(token_settings()) as engine, serving(engine) as server:
        client = await raw_client(server)
        client.h2.update_settings({4: 100})
        await client.flush()
        stream_id = await client.open(STREAM)
        await client.send(stream_id, framed(generate_request(stopping={"max_new_tokens": 30_000}).SerializeToString()))
        with trio.fail_after(5):
            while not any(isinstance(event, DataReceived) for event in client.events):
                client.events += client.h2.receive_data(await client.stream.receive_some())
        await trio.sleep(0.05)
        assert 1 == engine.statistics().open
        client.h2.reset_stream(stream_id, 8)
        await client.flush()
        await wait_until(lambda: engine.statistics().open == 0, 0.5)
        await client.stream.aclose()


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_crash_in_the_engine_is_not_told(
    aio_loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """An unexpected exception becomes INTERNAL without its text, and the server lives."""

    def crash(self: MockEngine, request: object, metadata: object) -> Any:
        reason = "secret"
        raise LookupError(reason)

    monkeypatch.setattr(MockEngine, "aio_generate", crash)
    path = STREAM if streamed else UNARY
    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        code, message, _ = await server.ask(lambda client: client.failure(path[1:], generate_request()))
        assert grpc.StatusCode.INTERNAL == code
        assert "secret" not in message
        assert (await server.ask(lambda client: client.failure(path[1:], generate_request())))[0] == code
