"""Where an engine publishes which KV blocks it holds (spec 14), and how its publisher can be asked again.

A router that knows the blocks of every worker sends a prompt where its prefix is. It subscribes through Dynamo, which
needs one source per data-parallel rank. A source list that is short, doubled or foreign is refused: a router that
misses a rank's events is quietly wrong for ever.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from typing import TYPE_CHECKING

import attrs

from trio_sidecar.errors import ProtocolError, RpcError
from trio_sidecar.wire import GetKvEventSourcesRequest
from trio_sidecar.wire.methods import GET_KV_EVENT_SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.wire import KvEventSource

__all__ = [
    "EndOfReplay",
    "EventBatch",
    "KvSource",
    "ReplayGap",
    "ReplayMerge",
    "aio_list_sources",
    "check_sources",
    "parse_replay_frames",
    "reachable",
]

MAX_PENDING_BATCHES = 4096
"""How many batches a merge keeps that it cannot hand out yet (R14.12)."""

MAX_PENDING_BYTES = 256 << 20
"""How many bytes these may have together."""

_SEQUENCE_BYTES = 8
_WILDCARD = re.compile(r"tcp://(\*|0\.0\.0\.0|\[::\])(:.*)")


@attrs.frozen(slots=True, kw_only=True)
class KvSource:
    """One rank's publisher.

    Attributes:
        endpoint: What to connect to, a ZMQ address.
        topic: What to subscribe to; empty means everything (R14.6).
        dp_rank: The rank, absolute.
        replay_endpoint: Where past batches can be asked for; empty if nowhere.
        buffer_steps: How many of them the engine keeps.
    """

    endpoint: str
    topic: str
    dp_rank: int
    replay_endpoint: str = ""
    buffer_steps: int = 0


async def aio_list_sources(
    engine: Engine, ranks: range, host: str, *, require_replay: bool = False
) -> tuple[KvSource, ...]:
    """Ask the engine (asyncio-flavoured).

    Args:
        engine: Whom to ask.
        ranks: The data-parallel ranks behind it.
        host: Where its gRPC endpoint is, without brackets.
        require_replay: Whether a source that cannot be asked again is refused (R14.7).

    Returns:
        One source per rank, by rank; none at all if the engine publishes nothing (R14.2).

    Raises:
        RpcError: It refused to say; names the call (R14.10).
        ProtocolError: What it said is not a source for each rank.
    """
    try:
        answer = await engine.aio_call(GET_KV_EVENT_SOURCES, GetKvEventSourcesRequest())
    except RpcError as error:
        raise error.named(GET_KV_EVENT_SOURCES.name) from error
    return check_sources(answer.sources, ranks, host, require_replay=require_replay)


def check_sources(
    sources: Sequence[KvEventSource], ranks: range, host: str, *, require_replay: bool = False
) -> tuple[KvSource, ...]:
    """The sources as a subscriber needs them (R14.2 to R14.7); see :func:`aio_list_sources`.

    Raises:
        ProtocolError: A rank is missing, foreign or doubled; or a source is of another kind or incomplete.
    """
    if not sources:
        return ()
    checked = [_check_source(source, host, require_replay=require_replay) for source in sources]
    found = Counter(source.dp_rank for source in checked)
    if found != Counter(ranks):
        reason = (
            f"KV event sources are for the data-parallel ranks {sorted(found.elements())}; "
            f"expected exactly one for each of {list(ranks)}"
        )
        raise ProtocolError(reason)
    return tuple(sorted(checked, key=lambda source: source.dp_rank))


def _check_source(source: KvEventSource, host: str, *, require_replay: bool) -> KvSource:
    rank = source.data_parallel_rank
    if rank is None:
        reason = "a KV event source has no data_parallel_rank"
        raise ProtocolError(reason)
    if (source.transport, source.encoding, source.schema_version) != ("zmq", "msgpack", 1):
        reason = (
            f"the KV event source of rank {rank} has transport {source.transport!r}, encoding {source.encoding!r} and "
            f"schema_version {source.schema_version}; expected 'zmq', 'msgpack' and 1"
        )
        raise ProtocolError(reason)
    missing = [] if source.endpoint else ["endpoint"]
    if require_replay:
        missing += [] if source.replay_endpoint else ["replay_endpoint"]
        missing += [] if source.buffer_steps > 0 else ["buffer_steps"]
    if missing:
        reason = f"the KV event source of rank {rank} has no {', '.join(missing)}"
        raise ProtocolError(reason)
    return KvSource(
        endpoint=reachable(source.endpoint, host),
        topic=source.topic,
        dp_rank=rank,
        replay_endpoint=reachable(source.replay_endpoint, host),
        buffer_steps=source.buffer_steps,
    )


def reachable(endpoint: str, host: str) -> str:
    """The endpoint, with a wildcard host replaced by the one where the engine's gRPC endpoint is (R14.5).

    Args:
        endpoint: A ZMQ address as the engine bound it. Its port is never computed, only taken over.
        host: Without brackets.
    """
    wildcard = _WILDCARD.fullmatch(endpoint)
    if wildcard is None:
        return endpoint
    bracketed = f"[{host}]" if ":" in host else host
    return f"tcp://{bracketed}{wildcard[2]}"


# -- Replay (R14.11, R14.12) -------------------------------------------------------------------------------------------


@attrs.frozen(slots=True)
class EventBatch:
    """One message of a publisher: its number, counted from 0, and its payload as it came."""

    sequence: int
    payload: bytes


@attrs.frozen(slots=True)
class EndOfReplay:
    """The publisher has sent all it had."""


def parse_replay_frames(frames: Sequence[bytes]) -> EventBatch | EndOfReplay:
    """One message of a replay socket (R14.11).

    Raises:
        ProtocolError: It has another shape than ``["", sequence, payload]`` or ``["", topic, sequence, payload]``.
    """
    match frames:
        case [b"", sequence, payload] | [b"", _, sequence, payload]:
            pass
        case _:
            reason = f"a KV replay message has frames of {[len(frame) for frame in frames]} bytes; expected an empty "
            reason += "one, possibly a topic, a sequence number and a payload"
            raise ProtocolError(reason)
    if len(sequence) != _SEQUENCE_BYTES:
        reason = f"a KV replay message has a sequence number of {len(sequence)} bytes; expected {_SEQUENCE_BYTES}"
        raise ProtocolError(reason)
    number = int.from_bytes(sequence, "big", signed=True)
    if number == -1 and not payload:
        return EndOfReplay()
    if number < 0 or not payload:
        reason = f"a KV replay message has sequence number {number} and {len(payload)} bytes of payload; "
        reason += "expected a number from 0 with a payload, or -1 without one"
        raise ProtocolError(reason)
    return EventBatch(number, payload)


@attrs.frozen(slots=True)
class ReplayGap:
    """Batches are missing: the next one expected, and the next one there is."""

    expected: int
    got: int


@attrs.define(eq=False, kw_only=True)
class ReplayMerge:
    """Puts replayed and live batches in order, each once (R14.12).

    Attributes:
        expected: The number of the next batch to hand out.
        max_batches: Most batches that may wait for one before them.
        max_bytes: Most bytes that these may have together.
    """

    expected: int = 0
    max_batches: int = MAX_PENDING_BATCHES
    max_bytes: int = MAX_PENDING_BYTES
    _waiting: dict[int, EventBatch] = attrs.field(factory=dict, init=False)
    _numbers: list[int] = attrs.field(factory=list, init=False)
    _bytes: int = attrs.field(default=0, init=False)

    def insert(self, batches: Iterable[EventBatch]) -> None:
        """Add batches in any order; those that were seen before change nothing.

        Raises:
            ProtocolError: Too many wait for one that does not come.
        """
        for batch in batches:
            if batch.sequence < self.expected or batch.sequence in self._waiting:
                continue
            if len(self._waiting) >= self.max_batches or self._bytes + len(batch.payload) > self.max_bytes:
                reason = (
                    f"KV events: {len(self._waiting)} batches of {self._bytes} bytes wait for batch {self.expected}; "
                    f"at most {self.max_batches} batches of {self.max_bytes} bytes are kept"
                )
                raise ProtocolError(reason)
            self._waiting[batch.sequence] = batch
            self._bytes += len(batch.payload)
            heapq.heappush(self._numbers, batch.sequence)

    def pop(self) -> EventBatch | None:
        """Take the next batch; None if it is not there."""
        batch = self._waiting.pop(self.expected, None)
        if batch is not None:
            heapq.heappop(self._numbers)
            self._bytes -= len(batch.payload)
            self.expected += 1
        return batch

    def gap(self) -> ReplayGap | None:
        """What is missing before the next batch there is; None if that is the expected one, or there is none."""
        if not self._numbers or self._numbers[0] == self.expected:
            return None
        return ReplayGap(self.expected, self._numbers[0])
