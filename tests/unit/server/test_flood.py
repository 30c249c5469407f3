"""What one client may make the server do for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated

from support.mock_engine import mock_settings, token_settings
from support.raw_client import STREAM, framed, raw_client
from support.serving import generate_request, serving
from trio_sidecar.bridge import run_aio
from trio_sidecar.engines.mock import open_mock
from trio_sidecar.server.flood import BURST, MAX_UNREAD_BYTES, PER_SECOND, ResetBudget
from trio_sidecar.server.protocol import ConnectionHandler, ServerProtocol

if TYPE_CHECKING:
    import asyncio


def test_the_budget_is_a_burst_that_refills() -> None:
    """A burst is free, one more is not, and a second later there is room for some again."""
    budget = ResetBudget()
    assert [True] * BURST == [budget.spend(100.0) for _ in range(BURST)]
    assert not budget.spend(100.0)
    refilled = int(PER_SECOND) - 1  # one was overdrawn
    assert [True] * refilled + [False] == [budget.spend(101.0) for _ in range(refilled + 1)]
    assert budget.spend(10_000.0)


def test_time_does_not_save_up_more_than_a_burst() -> None:
    """A client that was quiet for a day has the same burst as a new one."""
    budget = ResetBudget()
    budget.spend(0.0)
    assert [True] * BURST + [False] == [budget.spend(86_400.0) for _ in range(BURST + 1)]


async def open_and_reset(client: H2Connection, count: int) -> bytes:
    """The bytes of that many calls that are reset before anybody could have answered them."""
    for _ in range(count):
        stream_id = client.get_next_available_stream_id()
        headers = {":method": "POST", ":scheme": "http", ":path": STREAM, ":authority": "x"}
        client.send_headers(stream_id, [*headers.items(), ("te", "trailers"), ("content-type", "application/grpc")])
        client.reset_stream(stream_id, ErrorCodes.CANCEL)
    await trio.lowlevel.checkpoint()
    return client.data_to_send()


async def test_a_flood_of_resets_ends_the_connection_and_touches_no_other(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A client that opens and resets calls over and over is told ENHANCE_YOUR_CALM; the next client is served."""
    async with open_mock(mock_settings()) as engine, serving(engine) as server:
        flooder, other = await raw_client(server), await raw_client(server)
        await flooder.stream.send_all(await open_and_reset(flooder.h2, BURST + 200))
        with trio.fail_after(10):
            while data := await flooder.stream.receive_some():  # and answer nothing, or its last words may get lost
                flooder.events += flooder.h2.receive_data(data)
        codes = [event.error_code for event in flooder.events if isinstance(event, ConnectionTerminated)]
        assert [ErrorCodes.ENHANCE_YOUR_CALM] == codes
        stream_id = await other.open(STREAM)
        await other.send(stream_id, framed(generate_request().SerializeToString()))
        assert "0" == (await other.status(stream_id))["grpc-status"]
        assert 0 == engine.statistics().open
        await flooder.stream.aclose()
        await other.stream.aclose()


async def test_cancelling_what_was_answered_is_free(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Clients that read headers and then cancel, more often than a burst, keep their connection."""
    async with open_mock(token_settings()) as engine, serving(engine) as server:
        client = await raw_client(server)
        client.h2.update_settings({4: 100})  # so small a window that no answer ends by itself
        await client.flush()
        body = framed(generate_request(stopping={"max_new_tokens": 1000}).SerializeToString())
        for _ in range(0, BURST + 64, 64):
            ids = [await client.open(STREAM) for _ in range(64)]
            for stream_id in ids:
                await client.send(stream_id, body)
            with trio.fail_after(10):
                while {*ids} - {getattr(event, "stream_id", None) for event in client.events}:
                    await client.receive()
            for stream_id in ids:
                client.h2.reset_stream(stream_id, ErrorCodes.CANCEL)
            await client.flush()
            client.events.clear()
        stream_id = await client.open(STREAM)
        await client.send(stream_id, framed(generate_request().SerializeToString()))
        assert "0" == (await client.status(stream_id))["grpc-status"]
        await client.stream.aclose()


class StuckTransport:
    """A byte stream whose client does not read."""

    def __init__(self, unread: int) -> None:
        self.unread = unread
        self.aborted = False

    def get_extra_info(self, name: str) -> None:
        """Nothing is known."""

    def is_closing(self) -> bool:
        """Whether it was aborted."""
        return self.aborted

    def write(self, data: bytes) -> None:
        """Keep."""
        self.unread += len(data)

    def get_write_buffer_size(self) -> int:
        """What waits."""
        return self.unread

    def abort(self) -> None:
        """Close."""
        self.aborted = True


class Nobody(ConnectionHandler):
    """Hears of connections and does nothing."""

    def connected(self, protocol: ServerProtocol) -> None:
        """Fine."""

    def disconnected(self, protocol: ServerProtocol) -> None:
        """Fine."""

    def accept(self, stream: object, headers: object, release_stream: object) -> None:
        """No call comes."""

    def cancel(self, stream: object) -> None:
        """No call comes."""

    def close(self) -> None:
        """Fine."""


@pytest.mark.parametrize(("unread", "aborted"), [(MAX_UNREAD_BYTES - 10_000, False), (MAX_UNREAD_BYTES, True)])
async def test_answers_that_nobody_reads_are_bounded(
    aio_loop: asyncio.AbstractEventLoop, unread: int, aborted: bool
) -> None:
    """A client that floods with pings and does not read the answers is dropped before they fill the memory."""
    transport = StuckTransport(unread)
    protocol = ServerProtocol(Nobody())

    async def feed() -> None:  # noqa: ASYNC124 - callbacks of a transport run under asyncio
        protocol.connection_made(transport)
        client = H2Connection()
        client.initiate_connection()
        client.ping(b"12345678")
        protocol.data_received(client.data_to_send())

    await run_aio(feed)
    assert aborted == transport.aborted
