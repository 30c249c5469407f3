"""One stream of the fast path, over a connection that only takes notes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_sidecar.bridge import run_aio
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.transport.connection import NotProcessed
from trio_sidecar.transport.faststream import FastStream
from trio_sidecar.transport.framing import frame_message

if TYPE_CHECKING:
    import asyncio

    Loop = asyncio.AbstractEventLoop

LOT = 32 << 10
HEADERS = [(b":status", b"200"), (b"content-type", b"application/grpc")]


@attrs.define(eq=False)
class FakeConnection:
    """Notes what its streams ask.

    Attributes:
        acknowledged: Stream and bytes, in order.
        left: Streams that left by themselves.
        sent: What was sent: bytes, and whether they end the stream.
        window: How much h2 lets a stream send.
        max_outbound_frame_size: The longest frame.
        writable: Whether the socket takes more.
        senders: Streams that wait for window.
    """

    acknowledged: list[tuple[int, int]] = attrs.field(factory=list)
    left: list[Any] = attrs.field(factory=list)
    sent: list[tuple[bytes, bool]] = attrs.field(factory=list)
    window: int = 1000
    max_outbound_frame_size: int = 16
    writable: bool = True
    senders: set[Any] = attrs.field(factory=set)
    flushed: int = 0

    @property
    def h2(self) -> FakeConnection:
        return self

    @property
    def protocol(self) -> Any:
        return SimpleNamespace(writable=self.writable)

    def acknowledge(self, stream_id: int, size: int) -> None:
        self.acknowledged.append((stream_id, size))

    def leave(self, stream: FastStream) -> None:
        self.left.append(stream)

    def local_flow_control_window(self, stream_id: int) -> int:
        assert 7 == stream_id
        return self.window

    def send_data(self, stream_id: int, data: bytes, *, end_stream: bool) -> None:
        assert 7 == stream_id
        self.sent.append((data, end_stream))
        self.window -= len(data)

    def flush(self) -> None:
        self.flushed += 1


def made(limit: int = 1 << 20) -> tuple[FakeConnection, FastStream]:
    connection = FakeConnection()
    stream = FastStream(cast("Any", connection), limit)
    stream.id = 7
    return connection, stream


async def take(stream: FastStream) -> list[bytes]:
    return await run_aio(stream.aio_receive)


async def failing(stream: FastStream) -> RpcError:
    with pytest.raises(RpcError) as caught:
        await take(stream)
    return caught.value


def give(stream: FastStream, *sizes: int) -> int:
    """Let messages of these sizes arrive together; the bytes that they take."""
    data = b"".join(frame_message(bytes(size)) for size in sizes)
    stream.add(data, len(data))
    return len(data)


# -- What is acknowledged


async def test_bytes_are_acknowledged_in_lots(aio_loop: Loop) -> None:
    """Of 32 KiB or more, when they are taken; what is less waits for more."""
    connection, stream = made()
    give(stream, LOT - 6)
    assert [LOT - 6] == [len(message) for message in await take(stream)]
    assert ([], LOT - 1) == (connection.acknowledged, stream.unacknowledged)
    give(stream, 0)
    await take(stream)
    assert ([(7, LOT + 4)], 0) == (connection.acknowledged, stream.unacknowledged)
    give(stream, LOT - 5)
    assert [(7, LOT + 4)] == connection.acknowledged  # not before they are taken
    await take(stream)
    assert ([(7, LOT + 4), (7, LOT)], 0) == (connection.acknowledged, stream.unacknowledged)


async def test_of_many_messages_some_are_taken_and_acknowledged(aio_loop: Loop) -> None:
    """Sixty-four at once; the window of the others stays with us until they are taken."""
    connection, stream = made()
    total = give(stream, *[507] * 192, 1)  # 64 of these are 32 KiB with their prefixes
    assert 64 == len(await take(stream))
    assert ([(7, LOT)], total - LOT) == (connection.acknowledged, stream.unacknowledged)
    assert 64 == len(await take(stream))
    assert ([(7, LOT)] * 2, total - 2 * LOT) == (connection.acknowledged, stream.unacknowledged)
    assert 64 == len(await take(stream))
    assert ([(7, LOT)] * 3, total - 3 * LOT) == (connection.acknowledged, stream.unacknowledged)
    assert [b"\0"] == await take(stream)
    assert ([(7, LOT)] * 3, 6) == (connection.acknowledged, stream.unacknowledged)


async def test_what_was_taken_in_several_turns_makes_a_lot(aio_loop: Loop) -> None:
    """And what is left over of a lot does not count twice."""
    connection, stream = made()
    total = give(stream, *[300] * 400)
    for turn in (1, 2, 3, 4, 5, 6):
        assert 64 == len(await take(stream))
        lots = [(7, 2 * 64 * 305)] * (turn // 2)
        assert (lots, total - sum(size for _, size in lots)) == (connection.acknowledged, stream.unacknowledged)
    assert 16 == len(await take(stream))
    assert ([(7, 2 * 64 * 305)] * 3, 16 * 305) == (connection.acknowledged, stream.unacknowledged)


async def test_after_all_was_taken_counting_begins_anew(aio_loop: Loop) -> None:
    """Bytes that were taken with the rest are acknowledged with it, not again with later ones."""
    connection, stream = made()
    give(stream, *[250] * 70)
    assert [64, 6] == [len(await take(stream)) for _ in range(2)]
    assert ([], 70 * 255) == (connection.acknowledged, stream.unacknowledged)
    give(stream, *[250] * 65)
    assert 64 == len(await take(stream))
    assert [] == connection.acknowledged
    assert 1 == len(await take(stream))
    assert [(7, 135 * 255)] == connection.acknowledged


async def test_a_message_larger_than_the_window_can_go_on(aio_loop: Loop) -> None:
    """While its reader waits, what has come of it is acknowledged, since it is all there is."""
    connection, stream = made()
    message = frame_message(bytes(3 * LOT))
    taken: list[bytes] = []

    async def read() -> None:
        taken.extend(await take(stream))

    stream.add(message[:LOT], LOT)
    assert [] == connection.acknowledged
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        assert [(7, LOT)] == connection.acknowledged
        stream.add(message[LOT : 2 * LOT - 1], LOT - 1)
        assert [(7, LOT)] == connection.acknowledged
        stream.add(message[2 * LOT - 1 : 2 * LOT], 1)
        assert [(7, LOT)] * 2 == connection.acknowledged
        stream.add(message[2 * LOT :], len(message) - 2 * LOT)
    assert [3 * LOT] == [len(message) for message in taken]
    assert [(7, LOT), (7, LOT), (7, LOT + 5)] == connection.acknowledged
    stream.add(message[:LOT], LOT)  # nobody waits any more
    assert 3 == len(connection.acknowledged)


async def test_padding_is_window_too(aio_loop: Loop) -> None:
    """The peer has paid for it."""
    connection, stream = made()
    stream.add(frame_message(b"x"), LOT)
    assert [b"x"] == await take(stream)
    assert [(7, LOT)] == connection.acknowledged


async def test_as_many_messages_as_a_reader_may_have_are_all(aio_loop: Loop) -> None:
    """So everything is acknowledged, padding too."""
    connection, stream = made()
    data = frame_message(bytes(507)) * 64
    stream.add(data, LOT + 100)
    assert 64 == len(await take(stream))
    assert ([(7, LOT + 100)], 0) == (connection.acknowledged, stream.unacknowledged)


async def test_not_a_byte_is_counted_that_was_not_taken(aio_loop: Loop) -> None:
    """One less than a lot is none, also after something else was taken."""
    connection, stream = made()
    give(stream, 1)
    await take(stream)
    give(stream, *[507] * 63, 506, 1)
    assert 64 == len(await take(stream))
    assert [] == connection.acknowledged


# -- Ends


async def test_a_message_over_the_limit_ends_the_stream(aio_loop: Loop) -> None:
    """It leaves by itself; messages before it can still be taken."""
    connection, stream = made(limit=10)
    stream.on_headers(HEADERS)
    give(stream, 10)
    give(stream, 11)
    assert ([stream], False) == (connection.left, stream.direct)
    assert [bytes(10)] == await take(stream)
    error = await failing(stream)
    assert (StatusCode.RESOURCE_EXHAUSTED, "the peer sent a message of 11 bytes, more than the limit of 10") == (
        error.status, error.detail
    )  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "trailers", "status", "sentence"),
    [
        ([], [(b"grpc-status", b"0")], None, ""),
        ([], [(b"grpc-status", b"5"), (b"grpc-message", b"no%20such")], StatusCode.NOT_FOUND, "no such"),
        ([], [], StatusCode.UNKNOWN, "the response has no grpc-status"),
        ([(b"grpc-status", b"0")], [], None, ""),
    ],
)
async def test_the_end_of_a_stream(
    aio_loop: Loop,
    headers: list[tuple[bytes, bytes]],
    trailers: list[tuple[bytes, bytes]],
    status: StatusCode | None,
    sentence: str,
) -> None:
    """Comes after the messages, and says the same as often as it is asked."""
    _, stream = made()
    stream.on_headers([*HEADERS, *headers])
    give(stream, 1)
    if trailers:
        stream.on_trailers(trailers)
    stream.on_end()
    assert not stream.direct
    assert [b"\0"] == await take(stream)
    for _ in range(2):
        if status is None:
            assert [] == await take(stream)
        else:
            error = await failing(stream)
            assert (status, sentence) == (error.status, error.detail)


async def test_an_end_within_a_message(aio_loop: Loop) -> None:
    """Is a fault, unless the peer says itself what went wrong."""
    for code, status, sentence in (
        (b"0", StatusCode.INTERNAL, "the stream ended within a message"),
        (b"13", StatusCode.INTERNAL, ""),
        (b"1", StatusCode.CANCELLED, ""),
    ):
        _, stream = made()
        stream.on_headers(HEADERS)
        stream.add(frame_message(b"whole")[:-1], 9)
        stream.on_trailers([(b"grpc-status", code)])
        stream.on_end()
        error = await failing(stream)
        assert (status, sentence) == (error.status, error.detail)


@pytest.mark.parametrize(
    ("code", "by_peer", "headers", "not_begun", "status", "sentence"),
    [
        (7, True, False, True, StatusCode.UNAVAILABLE, "the peer refused the stream"),
        (7, True, True, False, StatusCode.UNAVAILABLE, "the peer reset the stream (HTTP/2 error code 7)"),
        (8, True, False, False, StatusCode.CANCELLED, "the peer reset the stream (HTTP/2 error code 8)"),
        (1, False, True, False, StatusCode.INTERNAL, "the peer broke HTTP/2 on this stream (code 1)"),
        (7, False, False, False, StatusCode.INTERNAL, "the peer broke HTTP/2 on this stream (code 7)"),
    ],
)
async def test_a_reset(
    aio_loop: Loop, code: int, by_peer: bool, headers: bool, not_begun: bool, status: StatusCode, sentence: str
) -> None:
    """Says who is at fault, and whether the call may be sent again."""
    _, stream = made()
    if headers:
        stream.on_headers(HEADERS)
    stream.on_reset(code, by_peer=by_peer)
    error = await failing(stream)
    assert (status, sentence) == (error.status, error.detail)
    assert not_begun is isinstance(error, NotProcessed)


@pytest.mark.parametrize("where", ["headers", "trailers"])
@pytest.mark.parametrize("by_peer", [True, False])
async def test_a_reset_after_the_status_is_no_failure(aio_loop: Loop, where: str, by_peer: bool) -> None:
    """The peer has answered, and only does not read the rest of the request."""
    _, stream = made()
    status = [(b"grpc-status", b"0")]
    stream.on_headers([*HEADERS, *(status if where == "headers" else [])])
    if where == "trailers":
        stream.on_trailers(status)
    stream.on_reset(0, by_peer=by_peer)
    assert [] == await take(stream)


async def test_the_first_failure_stands(aio_loop: Loop) -> None:
    """And none that comes after the end."""
    _, stream = made()
    stream.fail(RpcError(StatusCode.ABORTED, "first"))
    stream.fail(RpcError(StatusCode.ABORTED, "second"))
    assert "first" == (await failing(stream)).detail
    _, stream = made()
    stream.on_headers(HEADERS)
    stream.on_trailers([(b"grpc-status", b"0")])
    stream.on_end()
    stream.fail(RpcError(StatusCode.ABORTED, "late"))
    assert [] == await take(stream)


@pytest.mark.parametrize(("more", "direct"), [([], True), ([(b"content-length", b"5")], False)])
def test_frames_go_past_h2_only_where_it_has_nothing_to_check(more: list[tuple[bytes, bytes]], direct: bool) -> None:
    """Between the headers and the end, and not with a content length."""
    _, stream = made()
    assert not stream.direct
    stream.on_headers([*HEADERS, *more])
    assert direct is stream.direct
    stream.on_end()
    assert not stream.direct


# -- Headers and requests


async def test_headers_that_refuse_the_call(aio_loop: Loop) -> None:
    """Are its error."""
    _, stream = made()
    stream.on_headers([(b":status", b"503")])
    with pytest.raises(RpcError, match="HTTP status 503"):
        await run_aio(stream.aio_headers)


async def test_a_failure_before_the_headers(aio_loop: Loop) -> None:
    """Reaches whoever waits for them."""
    _, stream = made()
    errors: list[str] = []

    async def wait() -> None:
        with pytest.raises(RpcError) as caught:
            await run_aio(stream.aio_headers)
        errors.append(caught.value.detail)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        stream.wake()  # for nothing
        await wait_all_tasks_blocked()
        stream.fail(RpcError(StatusCode.ABORTED, "lost"))
    assert ["lost"] == errors


async def test_a_request_goes_out_in_frames(aio_loop: Loop) -> None:
    """As long as they may be, each at once, the last one with the end of the stream."""
    connection, stream = made()
    await run_aio(stream.aio_send, bytes(range(40)))
    assert [(bytes(range(16)), False), (bytes(range(16, 32)), False), (bytes(range(32, 40)), True)] == connection.sent
    assert 3 == connection.flushed


async def test_a_request_waits_for_window_and_socket(aio_loop: Loop) -> None:
    """Its first frame goes even if the socket is full, because the headers have gone that way before."""
    connection, stream = made()
    connection.window, connection.writable = 20, False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, stream.aio_send, bytes(40))
        await wait_all_tasks_blocked()
        assert ([16], {stream}) == ([len(data) for data, _ in connection.sent], connection.senders)
        connection.writable = True
        stream.wake()
        await wait_all_tasks_blocked()
        assert ([16, 4], {stream}) == ([len(data) for data, _ in connection.sent], connection.senders)
        connection.window = 1
        stream.wake()
        await wait_all_tasks_blocked()
        assert [16, 4, 1] == [len(data) for data, _ in connection.sent]
        connection.window = 100
        stream.wake()
    assert ([16, 4, 1, 16, 3], set()) == ([len(data) for data, _ in connection.sent], connection.senders)
    assert [False] * 4 + [True] == [end for _, end in connection.sent]


@pytest.mark.parametrize("how", ["end", "fail"])
async def test_a_request_that_nobody_wants_any_more(aio_loop: Loop, how: str) -> None:
    """Stops in the midst."""
    connection, stream = made()
    connection.window = 16
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, stream.aio_send, bytes(40))
        await wait_all_tasks_blocked()
        connection.window = 100
        if how == "end":
            stream.on_end()
        else:
            stream.fail(RpcError(StatusCode.ABORTED, "lost"))
    assert ([(bytes(16), False)], set()) == (connection.sent, connection.senders)
