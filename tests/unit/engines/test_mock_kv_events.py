"""KV events of the mock engine over real sockets on this machine."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import structlog
import trio
import zmq

from support.mock_engine import mock_settings, request_of
from trio_sidecar.bridge import run_aio
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.engines.contract import RANK_METADATA_KEY
from trio_sidecar.engines.mock import MockEngine, open_mock
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.kv_events import EndOfReplay, EventBatch, check_sources, parse_replay_frames
from trio_sidecar.wire import GetKvEventSourcesRequest
from trio_sidecar.wire.methods import GET_KV_EVENT_SOURCES

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from trio_sidecar.kv_events import KvSource

PROMPT = list(range(100, 140))
PORTS = {"zmq_kv_events_port": 0, "zmq_replay_port": 0, "block_size": 16, "ttft_ms": 0.0, "itl_ms": 0.0}


async def sources_of(engine: MockEngine, ranks: int = 1) -> tuple[KvSource, ...]:
    answer = await run_aio(engine.aio_call, GET_KV_EVENT_SOURCES, GetKvEventSourcesRequest())
    return check_sources(answer.sources, range(ranks), "127.0.0.1")


async def run(engine: MockEngine, prompt: list[int] = PROMPT, rank: int | None = None) -> int:
    """Run a prompt to its end; returns how many of its tokens were cached."""

    async def aio_run() -> int:
        metadata = {} if rank is None else {RANK_METADATA_KEY: str(rank)}
        async with engine.aio_generate(request_of(prompt, stopping={"max_new_tokens": 1}), metadata) as stream:
            while answers := await stream.aio_receive():
                last = answers[-1].outputs
                if last is not None and last.finish_info is not None:
                    return last.finish_info.num_cached_tokens or 0
        pytest.fail("the stream ended without a terminal")

    return await run_aio(aio_run)


@contextmanager
def socket(kind: int, endpoint: str) -> Iterator[Any]:
    context = zmq.Context()
    made = context.socket(kind)
    made.setsockopt(zmq.RCVTIMEO, 5000)
    if kind == zmq.SUB:
        made.setsockopt(zmq.SUBSCRIBE, b"")
    made.connect(endpoint)
    try:
        yield made
    finally:
        context.destroy(linger=0)


def replay(source: KvSource, start: int = 0) -> list[EventBatch]:
    """Ask for all batches from a number on (blocking)."""
    batches = []
    with socket(zmq.DEALER, source.replay_endpoint) as dealer:
        dealer.send_multipart([b"", start.to_bytes(8, "big", signed=True)])
        while not isinstance(batch := parse_replay_frames(dealer.recv_multipart()), EndOfReplay):
            batches.append(batch)
    return batches


def events(batch: EventBatch | bytes) -> tuple[list[Any], int]:
    """Events and rank of a batch."""
    _, found, rank = msgspec.msgpack.decode(batch.payload if isinstance(batch, EventBatch) else batch)
    return found, rank


@pytest.mark.rule("R16.6")
@pytest.mark.parametrize(
    "changes",
    [
        {"zmq_kv_events_port": None},
        {"enable_prefix_caching": False},
        {"disaggregation_mode": DisaggregationMode.DECODE},
    ],
)
async def test_sources_are_listed_where_there_is_something_to_publish(
    aio_loop: asyncio.AbstractEventLoop, changes: dict[str, Any]
) -> None:
    """Without a port, without prefix caching and in decode mode there is no source."""
    async with open_mock(mock_settings(**(PORTS | changes))) as engine:
        assert () == await sources_of(engine)


@pytest.mark.rule("R16.6", "R14.7", "R14.11")
async def test_stored_blocks_can_be_asked_for_again(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Events have vLLM's form; the replay ends properly, and begins where asked; a repeated prompt makes none."""
    async with open_mock(mock_settings(**PORTS)) as engine:
        (source,) = await sources_of(engine)
        assert source.buffer_steps > 0
        assert [0, 32] == [await run(engine), await run(engine)]
        await run(engine, [7] * 16)
        batches = await trio.to_thread.run_sync(replay, source)
        assert [0, 1] == [batch.sequence for batch in batches]
        ((stored,), rank) = events(batches[0])
        kind, hashes, parent, tokens, block_size, *rest = stored
        assert ("BlockStored", None, PROMPT[:32], 16, 0) == (kind, parent, tokens, block_size, rank)
        assert (2, [None, "GPU", None]) == (len(set(hashes)), rest)
        assert [1] == [batch.sequence for batch in await trio.to_thread.run_sync(replay, source, 1)]


@pytest.mark.rule("R16.6", "R16.19")
async def test_subscribers_get_events_as_they_come(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A batch has topic, number and payload; removed blocks are told as well."""
    async with open_mock(mock_settings(**PORTS, num_gpu_blocks=4)) as engine:
        (source,) = await sources_of(engine)
        with socket(zmq.SUB, source.endpoint) as subscriber:
            kinds: set[str] = set()
            start = 0
            with trio.fail_after(10):
                # Nobody is told that a subscriber has arrived, so prompts go on until one is heard of.
                while kinds != {"BlockStored", "BlockRemoved"}:
                    start += 1
                    await run(engine, [start] * 40)
                    while subscriber.poll(10):
                        topic, number, payload = subscriber.recv_multipart()
                        assert (b"", 8) == (topic, len(number))
                        kinds |= {event[0] for event in events(payload)[0]}


@pytest.mark.rule("R16.6")
async def test_each_rank_publishes_its_own(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Ranks have sources and caches of their own."""
    async with open_mock(mock_settings(**PORTS, data_parallel_size=2)) as engine:
        zero, one = await sources_of(engine, 2)
        assert zero.endpoint != one.endpoint
        assert [0, 32, 0] == [await run(engine, rank=rank) for rank in (1, 1, 0)]
        (batch,) = await trio.to_thread.run_sync(replay, one)
        assert 1 == events(batch)[1]


@pytest.mark.rule("R16.7")
async def test_a_publisher_that_fails_does_not_end_the_engine(
    aio_loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that cannot be sent are logged as lost; requests go on, and a replay still has them."""

    def fail(*_: object, **__: object) -> None:
        raise zmq.ZMQError(zmq.EAGAIN)

    async with open_mock(mock_settings(**PORTS)) as engine:
        (source,) = await sources_of(engine)
        with monkeypatch.context() as patched, structlog.testing.capture_logs() as logs:
            patched.setattr(zmq.Socket, "send_multipart", fail)
            assert [0, 32] == [await run(engine), await run(engine)]
        assert ["kv_events_lost"] == [entry["event"] for entry in logs if entry["log_level"] == "warning"]
        assert [0] == [batch.sequence for batch in await trio.to_thread.run_sync(replay, source)]


async def test_strange_replay_questions_are_ignored(aio_loop: asyncio.AbstractEventLoop) -> None:
    """What cannot be understood gets no answer, and the next question does."""
    async with open_mock(mock_settings(**PORTS)) as engine:
        (source,) = await sources_of(engine)
        await run(engine)
        with socket(zmq.DEALER, source.replay_endpoint) as dealer:
            dealer.send_multipart([b"", b"what?"])
            dealer.send_multipart([b"x"])
        assert 1 == len(await trio.to_thread.run_sync(replay, source))


async def test_a_taken_port_is_named(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Two engines cannot publish in one place."""
    async with open_mock(mock_settings(**PORTS)) as engine:
        (source,) = await sources_of(engine)
        port = int(source.endpoint.rpartition(":")[2])
        with pytest.raises(InvalidConfig, match=f"cannot bind port {port}"):
            async with open_mock(mock_settings(**(PORTS | {"zmq_kv_events_port": port}))):
                pass
