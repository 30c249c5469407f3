"""The output buffer alone: order, merging, bounds, ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.convert.response import Chunk, merge_chunks
from trio_sidecar.requests.buffer import BufferLimit, OutputBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence


def chunk(*ids: int) -> Chunk:
    return {"token_ids": list(ids), "index": 0}


def ids_of(chunks: Sequence[Chunk | None]) -> list[list[int] | None]:
    return [None if each is None else each["token_ids"] for each in chunks]


def make(*, tokens: int = 100, chunks: int = 100, coalesce: bool = True) -> OutputBuffer:
    limit = BufferLimit(max_tokens=tokens, max_chunks=chunks)
    return OutputBuffer(limit, merge=merge_chunks if coalesce else None)


async def take(buffer: OutputBuffer, times: int) -> list[list[int] | None]:
    return ids_of([await run_aio(buffer.aio_take) for _ in range(times)])


async def test_takes_all_that_arrived_as_one(aio_loop: object) -> None:
    """With coalescing the consumer gets everything that waits in one chunk, then the end."""
    buffer = make()
    assert all(buffer.put_nowait(chunk(i)) for i in (1, 2, 3))
    buffer.close()
    assert [[1, 2, 3], None, None] == await take(buffer, 3)


async def test_one_by_one(aio_loop: object) -> None:
    """Without coalescing every chunk is handed out as it was put in."""
    buffer = make(coalesce=False)
    for i in (1, 2, 3):
        buffer.put_nowait(chunk(i))
    buffer.close()
    assert [[1], [2], [3], None] == await take(buffer, 4)


async def test_single_chunk_is_not_touched(aio_loop: object) -> None:
    """A chunk that waits alone goes out as it is, at once."""
    buffer = make()
    only = chunk(1)
    buffer.put_nowait(only)
    assert only is await run_aio(buffer.aio_take)


async def test_waiting_consumer_is_woken(aio_loop: object, autojump_clock: object) -> None:
    """A consumer that waits gets a chunk as soon as it is put, without any time passing."""
    buffer = make()
    got: list[float] = []

    async def consume() -> None:
        await run_aio(buffer.aio_take)
        got.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(consume)
        await trio.sleep(5)
        at = trio.current_time()
        buffer.put_nowait(chunk(1))
    assert [at] == got


@pytest.mark.parametrize(
    ("limit", "accepted"),
    [
        (BufferLimit(max_tokens=4), 2),
        (BufferLimit(max_tokens=5), 2),
        (BufferLimit(max_tokens=6), 3),
        (BufferLimit(max_chunks=3), 3),
        (BufferLimit(max_tokens=1), 1),
    ],
)
async def test_bounds(aio_loop: object, limit: BufferLimit, accepted: int) -> None:
    """The buffer refuses a chunk that would exceed a bound, but an empty one takes any chunk."""
    await trio.lowlevel.checkpoint()
    buffer = OutputBuffer(limit, merge=None)
    assert [True] * accepted + [False] == [buffer.put_nowait(chunk(1, 2)) for _ in range(accepted + 1)]


async def test_producer_waits_until_there_is_room(aio_loop: object, autojump_clock: object) -> None:
    """A producer with a full buffer waits for the consumer, and everything arrives in order."""
    buffer = make(tokens=2)
    progress: list[int] = []

    async def aio_produce() -> None:
        for i in range(1, 6):
            await buffer.aio_put(chunk(i))
            progress.append(i)
        buffer.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, aio_produce)
        await trio.sleep(1)
        assert [1, 2] == progress
        assert [[1, 2]] == await take(buffer, 1)
        await trio.sleep(1)
        assert [1, 2, 3, 4] == progress
        assert [[3, 4], [5], None] == await take(buffer, 3)
    statistics = buffer.statistics()
    assert (5, 3, 5) == (statistics.put, statistics.taken, statistics.delivered_tokens)
    assert (2, 2, 2) == (statistics.peak_chunks, statistics.peak_tokens, statistics.stalls)
    assert (0, 0) == (statistics.chunks, statistics.tokens)


async def test_error_comes_after_the_prefix_once(aio_loop: object) -> None:
    """An error reaches the consumer after the chunks before it, exactly once; what follows it is ignored."""
    buffer = make()
    buffer.put_nowait(chunk(1))
    buffer.fail(ValueError("first"))
    buffer.fail(ValueError("second"))
    buffer.close()
    assert buffer.put_nowait(chunk(2))
    assert [[1]] == await take(buffer, 1)
    with pytest.raises(ValueError, match="first"):
        await run_aio(buffer.aio_take)
    assert [None] == await take(buffer, 1)


@pytest.mark.rule("FR-011")
@pytest.mark.parametrize("ended_before", ["open", "closed", "failed"])
async def test_cut_drops_what_waits(aio_loop: object, ended_before: str) -> None:
    """A cut hands out its own chunk and nothing else, also if the buffer had ended but not been read to its end."""
    buffer = make()
    for i in range(50):
        buffer.put_nowait(chunk(i))
    if ended_before == "closed":
        buffer.close()
    if ended_before == "failed":
        buffer.fail(ValueError("dropped"))
    buffer.cut(chunk())
    buffer.put_nowait(chunk(99))
    assert [[], None] == await take(buffer, 2)
    assert 0 == buffer.statistics().delivered_tokens


async def test_cut_after_the_end_was_seen(aio_loop: object) -> None:
    """A cut has no effect once the consumer has taken the last chunk."""
    buffer = make()
    buffer.put_nowait(chunk(1))
    buffer.close()
    assert [[1]] == await take(buffer, 1)
    buffer.cut(chunk(2))
    assert [None] == await take(buffer, 1)


async def test_cut_without_a_chunk(aio_loop: object) -> None:
    """A cut without a chunk ends the buffer at once."""
    buffer = make()
    buffer.put_nowait(chunk(1))
    buffer.cut(None)
    assert buffer.exhausted
    assert (0, 0) == (buffer.statistics().chunks, buffer.statistics().tokens)
    assert [None] == await take(buffer, 1)


@pytest.mark.parametrize("end", ["close", "fail", "cut"])
async def test_ends_wake_a_waiting_consumer(aio_loop: object, autojump_clock: object, end: str) -> None:
    """Whatever the end, a consumer that waits learns of it."""
    buffer = make()
    outcomes: list[object] = []

    async def consume() -> None:
        try:
            outcomes.append(await run_aio(buffer.aio_take))
        except ValueError as error:
            outcomes.append(str(error))

    last = chunk()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(consume)
        await trio.sleep(1)
        if end == "close":
            buffer.close()
        elif end == "fail":
            buffer.fail(ValueError("failed"))
        else:
            buffer.cut(last)
    assert [{"close": None, "fail": "failed", "cut": last}[end]] == outcomes


async def test_ends_wake_a_waiting_producer(aio_loop: object, autojump_clock: object) -> None:
    """A producer that waits for room goes on when the buffer is cut; its chunk is dropped."""
    buffer = make(tokens=1)
    buffer.put_nowait(chunk(1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, buffer.aio_put, chunk(2))
        await trio.sleep(1)
        buffer.cut(chunk())
    assert [[], None] == await take(buffer, 2)


async def test_wait_until_exhausted(aio_loop: object, autojump_clock: object) -> None:
    """The producer can wait until the consumer has taken the last chunk."""
    buffer = make()
    buffer.put_nowait(chunk(1))
    buffer.close()
    seen: list[str] = []

    async def produce() -> None:
        await run_aio(buffer.aio_wait_exhausted)
        seen.append("exhausted")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce)
        await trio.sleep(1)
        assert [] == seen
        await take(buffer, 1)
    assert ["exhausted"] == seen


async def test_cancelled_take_loses_nothing(aio_loop: object, autojump_clock: object) -> None:
    """A consumer that gives up waiting loses no chunk that comes later."""
    buffer = make()
    with trio.move_on_after(1):
        await run_aio(buffer.aio_take)
    buffer.put_nowait(chunk(1))
    assert [[1]] == await take(buffer, 1)
