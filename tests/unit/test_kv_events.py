"""Sources of KV events, and the order of replayed ones (spec 14)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trio_sidecar import wire
from trio_sidecar.bridge import run_aio
from trio_sidecar.errors import ErrorKind, ProtocolError, RpcError, StatusCode
from trio_sidecar.kv_events import (
    EndOfReplay,
    EventBatch,
    KvSource,
    ReplayGap,
    ReplayMerge,
    aio_list_sources,
    check_sources,
    parse_replay_frames,
    reachable,
)
from trio_sidecar.testing.fake_engine import FakeEngine

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

HOST = "127.0.0.1"


def source(rank: int | None = 0, **changes: Any) -> wire.KvEventSource:
    """A source that is fine."""
    fields: dict[str, Any] = {
        "transport": "zmq",
        "endpoint": f"tcp://*:{20081 + (rank or 0)}",
        "topic": "kv",
        "replay_endpoint": f"tcp://*:{21081 + (rank or 0)}",
        "data_parallel_rank": rank,
        "encoding": "msgpack",
        "schema_version": 1,
        "buffer_steps": 10,
    }
    return wire.KvEventSource(**(fields | changes))


def batches(*sequences: int) -> list[EventBatch]:
    return [EventBatch(sequence, b"%d" % sequence) for sequence in sequences]


# -- Sources


@pytest.mark.rule("R14.2")
def test_no_sources_are_fine() -> None:
    """An engine that publishes nothing has none, whatever its ranks."""
    assert () == check_sources([], range(4, 8), HOST, require_replay=True)


@pytest.mark.rule("R14.3", "R14.5", "R14.6")
def test_each_rank_has_its_source() -> None:
    """Sources come out by rank, with topic and replay, and with hosts that can be dialled."""
    assert (
        KvSource(
            endpoint=f"tcp://{HOST}:20085",
            topic="kv",
            dp_rank=4,
            replay_endpoint=f"tcp://{HOST}:21085",
            buffer_steps=10,
        ),
        KvSource(
            endpoint="ipc:///tmp/five", topic="", dp_rank=5, replay_endpoint=f"tcp://{HOST}:21086", buffer_steps=10
        ),
    ) == check_sources([source(5, endpoint="ipc:///tmp/five", topic=""), source(4)], range(4, 6), HOST)


@pytest.mark.rule("R14.3", "FR-095")
def test_sources_of_all_local_ranks_are_accepted_in_any_order() -> None:
    """A group of four from rank four on needs exactly those."""
    checked = check_sources([source(rank) for rank in (6, 4, 7, 5)], range(4, 8), HOST)
    assert [4, 5, 6, 7] == [one.dp_rank for one in checked]


@pytest.mark.rule("R14.3", "R14.4", "FR-095")
@pytest.mark.parametrize("ranks", [(3, 5, 6, 7), (4, 5, 6, 8), (4, 5, 6), (4, 5, 6, 6), (4, 5, 6, 7, 7)])
def test_missing_foreign_and_doubled_ranks_are_refused(ranks: tuple[int, ...]) -> None:
    """Anything but exactly one source per local rank is the engine's fault, and both lists are shown."""
    with pytest.raises(ProtocolError, match=r"\[4, 5, 6, 7\]") as caught:
        check_sources([source(rank) for rank in ranks], range(4, 8), HOST)
    assert str(list(ranks)) in str(caught.value)
    assert ErrorKind.UNKNOWN == caught.value.kind


@pytest.mark.rule("R14.4")
def test_a_source_without_a_rank_is_refused() -> None:
    """Rank zero is not assumed."""
    with pytest.raises(ProtocolError, match=r"a KV event source has no data_parallel_rank$"):
        check_sources([source(None)], range(1), HOST)


@pytest.mark.rule("R14.4")
@pytest.mark.parametrize("changes", [{"transport": "nats"}, {"encoding": "json"}, {"schema_version": 2}])
def test_other_kinds_of_sources_are_refused(changes: dict[str, object]) -> None:
    """Transport, encoding and schema must be the ones that Dynamo reads; the message names all three."""
    with pytest.raises(ProtocolError, match=r"transport .*, encoding .* and schema_version .*") as caught:
        check_sources([source(0, **changes)], range(1), HOST)
    assert str(next(iter(changes.values()))) in str(caught.value)


@pytest.mark.rule("R14.7")
@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_a_source_needs_its_endpoints(name: str) -> None:
    """Where replay is required, both endpoints are."""
    with pytest.raises(ProtocolError, match=f"has no {name}$"):
        check_sources([source(0, **{name: ""})], range(1), HOST, require_replay=True)


@pytest.mark.rule("R14.7")
def test_replay_needs_a_buffer() -> None:
    """A publisher that keeps nothing cannot be asked again; one that keeps a single batch can."""
    (checked,) = check_sources([source(0, buffer_steps=1)], range(1), HOST, require_replay=True)
    assert 1 == checked.buffer_steps
    with pytest.raises(ProtocolError, match="has no buffer_steps"):
        check_sources([source(0, buffer_steps=0)], range(1), HOST, require_replay=True)


@pytest.mark.rule("R14.7")
def test_all_that_a_source_lacks_is_named_at_once() -> None:
    """One message tells the rank and everything that is missing."""
    bare = source(3, endpoint="", replay_endpoint="", buffer_steps=0)
    with pytest.raises(ProtocolError, match=r"rank 3 has no endpoint, replay_endpoint, buffer_steps$"):
        check_sources([bare], range(3, 4), HOST, require_replay=True)


@pytest.mark.rule("R14.7")
def test_replay_may_be_missing_where_nobody_asks_for_it() -> None:
    """Without the requirement only the live endpoint is needed."""
    (checked,) = check_sources([source(0, replay_endpoint="", buffer_steps=0)], range(1), HOST)
    assert ("", 0) == (checked.replay_endpoint, checked.buffer_steps)
    with pytest.raises(ProtocolError, match="has no endpoint"):
        check_sources([source(0, endpoint="")], range(1), HOST)


@pytest.mark.rule("R14.5", "FR-093", "FR-094")
@pytest.mark.parametrize(
    ("endpoint", "host", "dialled"),
    [
        ("tcp://*:20081", HOST, "tcp://127.0.0.1:20081"),
        ("tcp://0.0.0.0:20081", HOST, "tcp://127.0.0.1:20081"),
        ("tcp://[::]:20081", HOST, "tcp://127.0.0.1:20081"),
        ("tcp://*:20081", "::1", "tcp://[::1]:20081"),
        ("tcp://*:20081", "engine.example", "tcp://engine.example:20081"),
        ("tcp://10.0.0.7:20081", HOST, "tcp://10.0.0.7:20081"),
        ("tcp://[2001:db8::1]:20081", HOST, "tcp://[2001:db8::1]:20081"),
        ("tcp://0.0.0.0.example:1", HOST, "tcp://0.0.0.0.example:1"),
        ("ipc:///tmp/*:1", HOST, "ipc:///tmp/*:1"),
        ("inproc://*:1", HOST, "inproc://*:1"),
        ("", HOST, ""),
    ],
)
def test_only_wildcard_hosts_are_replaced(endpoint: str, host: str, dialled: str) -> None:
    """A wildcard becomes the gRPC endpoint's host, in brackets if it must; everything else stays."""
    assert dialled == reachable(endpoint, host)


async def test_sources_are_asked_for_once(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The engine's answer is checked and handed out."""
    engine = FakeEngine(answers={"GetKvEventSources": wire.GetKvEventSourcesResponse(sources=[source(0)])})
    (checked,) = await run_aio(aio_list_sources, engine, range(1), "::1")
    assert "tcp://[::1]:20081" == checked.endpoint
    assert [("GetKvEventSources", wire.GetKvEventSourcesRequest())] == engine.calls


@pytest.mark.rule("R14.7")
async def test_replay_can_be_required_of_an_engine(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Whoever wants to ask again says so, and a source that keeps nothing is refused; others do not care."""
    bare = wire.GetKvEventSourcesResponse(sources=[source(0, buffer_steps=0)])
    engine = FakeEngine(answers={"GetKvEventSources": bare})
    (checked,) = await run_aio(aio_list_sources, engine, range(1), HOST)
    assert 0 == checked.buffer_steps

    async def aio_list() -> object:
        return await aio_list_sources(engine, range(1), HOST, require_replay=True)

    with pytest.raises(ProtocolError, match="has no buffer_steps"):
        await run_aio(aio_list)


@pytest.mark.rule("R14.10", "R4.4")
@pytest.mark.parametrize(
    ("status", "kind"), [(StatusCode.UNAVAILABLE, ErrorKind.CANNOT_CONNECT), (StatusCode.INTERNAL, ErrorKind.UNKNOWN)]
)
async def test_a_refusal_names_the_call(
    aio_loop: asyncio.AbstractEventLoop, status: StatusCode, kind: ErrorKind
) -> None:
    """If the engine cannot say, the error has the status's kind and the call's name."""
    engine = FakeEngine(answers={"GetKvEventSources": RpcError(status, "not now")})
    with pytest.raises(RpcError, match="GetKvEventSources: not now") as caught:
        await run_aio(aio_list_sources, engine, range(1), HOST)
    assert kind == caught.value.kind


# -- Replay


def number(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "big", signed=True)


SHAPE = "bytes; expected an empty one, possibly a topic, a sequence number and a payload"
NUMBER = "expected a number from 0 with a payload, or -1 without one"


@pytest.mark.rule("R14.11")
@pytest.mark.parametrize(
    ("frames", "parsed"),
    [
        ([b"", number(7), b"payload"], EventBatch(7, b"payload")),
        ([b"", b"topic", number(7), b"payload"], EventBatch(7, b"payload")),
        ([b"", b"", number(0), b"payload"], EventBatch(0, b"payload")),
        ([b"", number(2**40), b"x"], EventBatch(2**40, b"x")),
        ([b"", number(-1), b""], EndOfReplay()),
        ([b"", b"topic", number(-1), b""], EndOfReplay()),
    ],
)
def test_replay_frames(frames: list[bytes], parsed: object) -> None:
    """A message has a number and a payload, and maybe a topic; minus one without payload ends the replay."""
    assert parsed == parse_replay_frames(frames)


@pytest.mark.rule("R14.11")
@pytest.mark.parametrize(
    ("frames", "has"),
    [
        ([], f"frames of [] {SHAPE}"),
        ([b""], f"frames of [0] {SHAPE}"),
        ([b"", number(1)], f"frames of [0, 8] {SHAPE}"),
        ([number(1), b"payload"], f"frames of [8, 7] {SHAPE}"),
        ([b"x", number(1), b"payload"], f"frames of [1, 8, 7] {SHAPE}"),
        ([b"x", b"topic", number(1), b"payload"], f"frames of [1, 5, 8, 7] {SHAPE}"),
        ([b"", b"topic", number(1), b"payload", b"more"], f"frames of [0, 5, 8, 7, 4] {SHAPE}"),
        ([b"", number(1, 4), b"payload"], "a sequence number of 4 bytes; expected 8"),
        ([b"", number(1, 9), b"payload"], "a sequence number of 9 bytes; expected 8"),
        ([b"", number(1), b""], f"sequence number 1 and 0 bytes of payload; {NUMBER}"),
        ([b"", number(-1), b"payload"], f"sequence number -1 and 7 bytes of payload; {NUMBER}"),
        ([b"", number(-2), b""], f"sequence number -2 and 0 bytes of payload; {NUMBER}"),
        ([b"", number(-2), b"payload"], f"sequence number -2 and 7 bytes of payload; {NUMBER}"),
    ],
)
def test_other_replay_frames_are_refused(frames: list[bytes], has: str) -> None:
    """Any other shape is the publisher's fault, and the message says what came and what is expected."""
    with pytest.raises(ProtocolError) as caught:
        parse_replay_frames(frames)
    assert f"a KV replay message has {has}" in str(caught.value)


def drain(merge: ReplayMerge) -> Iterable[int]:
    while (batch := merge.pop()) is not None:
        yield batch.sequence


@pytest.mark.rule("R14.12")
def test_replayed_and_live_batches_come_out_in_order() -> None:
    """Numbers decide, not arrival; a gap is visible until it is filled; later ones show a new gap."""
    merge = ReplayMerge()
    assert None is merge.gap()
    merge.insert(batches(2))
    assert ReplayGap(0, 2) == merge.gap()
    assert None is merge.pop()
    merge.insert(batches(1, 0))
    assert None is merge.gap()
    assert [0, 1, 2] == list(drain(merge))
    assert None is merge.gap()
    merge.insert(batches(4))
    assert ReplayGap(3, 4) == merge.gap()


@pytest.mark.rule("R14.12")
def test_old_and_doubled_batches_change_nothing() -> None:
    """What was handed out does not come again, and of two with one number the first one counts."""
    merge = ReplayMerge()
    merge.insert(batches(0, 1))
    assert [0, 1] == list(drain(merge))
    merge.insert(batches(0, 1))
    merge.insert([EventBatch(2, b"first"), EventBatch(2, b"second"), EventBatch(1, b"old"), EventBatch(3, b"third")])
    assert EventBatch(2, b"first") == merge.pop()
    assert EventBatch(3, b"third") == merge.pop()
    assert None is merge.pop()


@pytest.mark.rule("R14.12")
def test_waiting_batches_are_limited_in_number() -> None:
    """At most 4096 may wait; one more is refused, but an old or doubled one still is not."""
    merge = ReplayMerge()
    merge.insert(batches(*range(1, 4097)))
    merge.insert(batches(1, 4096))
    with pytest.raises(ProtocolError, match=r"4096 batches of .* wait for batch 0"):
        merge.insert(batches(4097))


@pytest.mark.rule("R14.12")
def test_waiting_batches_are_limited_in_bytes() -> None:
    """Bytes count while they wait, and no longer."""
    merge = ReplayMerge(max_bytes=10)
    merge.insert([EventBatch(0, b"1234"), EventBatch(1, b"123456")])
    with pytest.raises(ProtocolError, match=r"at most .* of 10 bytes"):
        merge.insert([EventBatch(2, b"1")])
    assert EventBatch(0, b"1234") == merge.pop()
    merge.insert([EventBatch(2, b"123")])
    with pytest.raises(ProtocolError, match=r"2 batches of 9 bytes wait for batch 1"):
        merge.insert([EventBatch(3, b"123")])
    assert [1, 2] == list(drain(merge))
