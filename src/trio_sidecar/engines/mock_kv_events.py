"""KV events of the mock engine, published as vLLM publishes them: MessagePack over ZMQ, with replay.

One publisher per data-parallel rank. Sending never waits: an event that no subscriber takes is lost, as it is with
vLLM, but can be asked for again.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import structlog
import trio

from trio_sidecar.engines.mock_kv_cache import BlocksRemoved, BlocksStored
from trio_sidecar.errors import InvalidConfig, MissingExtra
from trio_sidecar.wire import KvEventSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["KvPublisher", "encode_batch", "open_publisher"]

BUFFER_STEPS = 10_000
"""How many batches can be asked for again."""

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

log = structlog.get_logger("trio_sidecar.engines.mock")


def load_libraries() -> tuple[Any, Any]:
    """ZMQ and MessagePack.

    Raises:
        MissingExtra: They are not installed.
    """
    try:
        import msgspec.msgpack  # noqa: PLC0415 - an optional extra
        import zmq  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtra("publishing KV events", "kv-events") from error  # noqa: EM101
    return zmq, msgspec.msgpack


def encode_batch(
    packer: Any, changes: Sequence[BlocksStored | BlocksRemoved | None], *, block_size: int, rank: int, now: float
) -> bytes:
    """One batch, in the array form of vLLM's event classes; None means that everything was removed."""
    events: list[list[Any]] = []
    for change in changes:
        match change:
            case BlocksStored():
                events.append(
                    [
                        "BlockStored",
                        list(change.hashes),
                        change.parent,
                        list(change.tokens),
                        block_size,
                        None,
                        "GPU",
                        change.adapter or None,
                    ]
                )
            case BlocksRemoved():
                events.append(["BlockRemoved", list(change.hashes), "GPU"])
            case None:
                events.append(["AllBlocksCleared"])
    batch: bytes = packer.encode([now, events, rank])
    return batch


@attrs.define(eq=False, kw_only=True)
class KvPublisher:
    """The events of one rank; made by :func:`open_publisher`.

    Attributes:
        source: How subscribers find it.
    """

    source: KvEventSource
    block_size: int
    _zmq: Any
    _packer: Any
    _live: Any
    _replay: Any
    _sequence: int = attrs.field(default=0, init=False)
    _sent: deque[tuple[bytes, bytes]] = attrs.field(factory=lambda: deque(maxlen=BUFFER_STEPS), init=False)

    def publish(self, changes: Sequence[BlocksStored | BlocksRemoved | None]) -> None:
        """Send one batch, if there is anything in it."""
        if not changes:
            return
        rank = self.source.data_parallel_rank or 0
        payload = encode_batch(self._packer, changes, block_size=self.block_size, rank=rank, now=time.time())
        number = self._sequence.to_bytes(8, "big", signed=True)
        self._sequence += 1
        self._sent.append((number, payload))
        try:
            self._live.send_multipart([self.source.topic.encode(), number, payload], self._zmq.NOBLOCK)
        except self._zmq.ZMQError as error:
            log.warning("kv_events_lost", dp_rank=rank, reason=str(error))

    async def answer_replays(self) -> None:
        """Send batches again to whoever asks, until cancelled (Trio-flavoured); at once if there is nobody to."""
        if self._replay is None:
            return
        while True:
            # ZMQ's file descriptor only tells of changes, so everything has to be read before the next wait.
            while self._replay.getsockopt(self._zmq.EVENTS) & self._zmq.POLLIN:
                self._answer(self._replay.recv_multipart(self._zmq.NOBLOCK))
            await trio.lowlevel.wait_readable(self._replay.getsockopt(self._zmq.FD))

    def _answer(self, question: list[bytes]) -> None:
        match question:
            case [client, b"", start] if len(start) == len(END_OF_REPLAY):
                first = int.from_bytes(start, "big", signed=True)
            case _:
                log.warning("kv_replay_question_ignored", frames=len(question))
                return
        for number, payload in tuple(self._sent):
            if int.from_bytes(number, "big", signed=True) >= first:
                self._replay.send_multipart([client, b"", number, payload])
        self._replay.send_multipart([client, b"", END_OF_REPLAY, b""])


@contextmanager
def open_publisher(*, port: int, replay_port: int | None, rank: int, block_size: int) -> Iterator[KvPublisher]:
    """Bind the sockets of one rank.

    Args:
        port: Where events are published; 0 lets the system choose, otherwise the rank is added to it.
        replay_port: Where they can be asked for; likewise; None keeps none.
        rank: The data-parallel rank.
        block_size: Tokens per block.

    Raises:
        MissingExtra: The libraries are not installed.
        InvalidConfig: A port cannot be used.
    """
    zmq, packer = load_libraries()
    context = zmq.Context()
    live = context.socket(zmq.PUB)
    replay = None if replay_port is None else context.socket(zmq.ROUTER)
    try:
        source = KvEventSource(
            transport="zmq",
            endpoint=_bind(zmq, live, port, rank),
            data_parallel_rank=rank,
            encoding="msgpack",
            schema_version=1,
        )
        if replay is not None and replay_port is not None:
            source.replay_endpoint = _bind(zmq, replay, replay_port, rank)
            source.buffer_steps = BUFFER_STEPS
        yield KvPublisher(
            source=source, block_size=block_size, zmq=zmq, packer=packer.Encoder(), live=live, replay=replay
        )
    finally:
        context.destroy(linger=0)


def _bind(zmq: Any, socket: Any, port: int, rank: int) -> str:
    wanted = port + rank if port else 0
    try:
        socket.bind(f"tcp://*:{wanted or '*'}")
    except zmq.ZMQError as error:
        raise InvalidConfig("zmq_kv_events_port, zmq_replay_port", f"cannot bind port {wanted}: {error}") from error  # noqa: EM101
    bound = socket.getsockopt(zmq.LAST_ENDPOINT).decode()
    # As vLLM reports it: whoever subscribes knows from where it can reach this machine.
    return f"tcp://*:{bound.rpartition(':')[2]}"
