"""A gRPC server that is never the bottleneck: HTTP/2 by hand, answers encoded in advance, few and large writes.

``python -m trio_sidecar_bench.server`` prints the port that it listens on, then answers every line on its standard
input with a line of JSON: what it has sent, and how late.

It knows ``GenerateStream``, the calls that a worker makes as it starts, and no more HTTP/2 than gRPC clients use. The
pace of a stream is the request's seed; see :class:`~trio_sidecar_bench.messages.Ask`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

import attrs
import hpack
import uvloop

from trio_sidecar import wire
from trio_sidecar.config import MockSettings
from trio_sidecar.engines.mock import MockEngine
from trio_sidecar.engines.mock_facts import MockFacts
from trio_sidecar.wire import methods
from trio_sidecar.wire.codec import encode
from trio_sidecar_bench import messages
from trio_sidecar_bench.stamps import now_us

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 32
INITIAL_WINDOW_SIZE = 4
FLOOD_ROUNDS = 4
"""Tokens of each stream in a flood that go into one write."""

MODEL = "bench-model"
HIGH_WATER_BYTES = 64 << 10
LATENESS_SAMPLES = 10_000


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """One HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


RESPONSE_HEADERS = b"\x88" + _literal(b"content-type", b"application/grpc")
TRAILERS = _literal(b"grpc-status", b"0")
GREETING = frame(SETTINGS, 0, 0, b"\0\3" + (4096).to_bytes(4, "big") + b"\0\4" + (1 << 24).to_bytes(4, "big")) + frame(
    WINDOW_UPDATE, 0, 0, (1 << 29).to_bytes(4, "big")
)


@attrs.define(eq=False, slots=True)
class Stream:
    """One call."""

    connection: Connection
    id: int
    window: int
    path: str = ""
    body: bytearray = attrs.field(factory=bytearray)
    ask: messages.Ask | None = None
    sent: int = 0
    due_us: int = 0
    open: bool = True
    blocked: list[bytes] = attrs.field(factory=list)


@attrs.define(slots=True)
class Statistics:
    """What the server has done."""

    requests: int = 0
    tokens: int = 0
    resets: int = 0
    open: int = 0
    peak_open: int = 0
    lateness_us: list[int] = attrs.field(factory=list)


class Tokens:
    """The token messages of one moment, each made once."""

    def __init__(self) -> None:
        self.at_us = now_us()
        self._made: dict[int | None, bytes] = {}

    def make(self, candidates: int | None) -> bytes:
        """The message with that many alternatives."""
        message = self._made.get(candidates)
        if message is None:
            message = self._made[candidates] = messages.token_message(self.at_us, candidates)
        return message


class Pace:
    """Sends what is due on all streams of the server."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.statistics = Statistics()
        self.flooded: set[Connection] = set()
        self._order = itertools.count()
        self._due: list[tuple[int, int, Stream]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0
        self._flooding = False

    def begin(self, stream: Stream) -> None:
        """Start a generation."""
        ask = stream.ask
        assert ask is not None  # noqa: S101 - set by the caller
        self.statistics.requests += 1
        self.statistics.open += 1
        self.statistics.peak_open = max(self.statistics.peak_open, self.statistics.open)
        stream.connection.send(stream, messages.first_message(ask.prompt_tokens))
        if not ask.interval_us:
            stream.connection.flood.append(stream)
            self.flood(stream.connection)
            return
        now = now_us()
        stream.due_us = now if not ask.lockstep else now - now % ask.interval_us + ask.interval_us
        heapq.heappush(self._due, (stream.due_us, next(self._order), stream))
        self._arm()

    def _arm(self) -> None:
        if not self._due:
            return
        first = self._due[0][0]
        if self._timer is not None:
            if self._timer_us <= first:
                return
            self._timer.cancel()
        self._timer_us = first
        self._timer = self.loop.call_later(max(0, first - now_us()) / 1e6, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        due, tokens = self._due, Tokens()
        now = tokens.at_us
        lateness = self.statistics.lateness_us
        written: set[Connection] = set()
        while due and due[0][0] <= now:
            moment, _, stream = heapq.heappop(due)
            if not stream.open:
                continue
            ask = stream.ask
            assert ask is not None  # noqa: S101 - set before it was queued
            if len(lateness) < LATENESS_SAMPLES:
                lateness.append(now - moment)
            connection = stream.connection
            written.add(connection)
            stream.sent += 1
            if stream.sent == ask.tokens:
                connection.finish(stream, messages.last_message(now, ask.candidates, ask.tokens))
            else:
                connection.send(stream, tokens.make(ask.candidates))
                stream.due_us += ask.interval_us
                heapq.heappush(due, (stream.due_us, next(self._order), stream))
            self.statistics.tokens += 1
        for connection in written:
            connection.flush()
        self._arm()

    def flood(self, connection: Connection) -> None:
        """Send on the flooded streams of a connection, soon."""
        self.flooded.add(connection)
        if not self._flooding:
            self._flooding = True
            self.loop.call_soon(self._on_flood)

    def _on_flood(self) -> None:
        self._flooding = False
        connections, self.flooded = self.flooded, set()
        for connection in connections:
            if connection.writable and connection.flood:
                sent = connection.pour()
                self.statistics.tokens += sent
                if sent:
                    self.flood(connection)

    def take(self) -> str:
        """The statistics as JSON; lateness starts anew."""
        late = sorted(self.statistics.lateness_us)
        self.statistics.lateness_us.clear()
        figures = attrs.asdict(self.statistics, filter=lambda attribute, _: attribute.name != "lateness_us")
        figures["late_p99_us"] = late[len(late) * 99 // 100] if late else 0
        return json.dumps(figures)


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, pace: Pace, replies: dict[str, bytes]) -> None:
        self.pace = pace
        self.replies = replies
        self.writable = True
        self.flood: list[Stream] = []
        self._window = self._initial_window = 65535
        self._streams: dict[int, Stream] = {}
        self._out: list[bytes] = []
        self._stalled: set[Stream] = set()
        self._buffer = b""
        self._greeted = False
        self._hpack = hpack.Decoder()
        self._header_block = b""

    def connection_made(self, transport: Any) -> None:
        """Greet."""
        self._transport: asyncio.Transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        transport.write(GREETING)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Forget all streams."""
        for stream in tuple(self._streams.values()):
            self._drop(stream)

    def pause_writing(self) -> None:
        """The client does not keep up."""
        self.writable = False

    def resume_writing(self) -> None:
        """It does again."""
        self.writable = True
        if self.flood:
            self.pace.flood(self)

    # -- Out

    def send(self, stream: Stream, message: bytes) -> None:
        """Queue one message; :meth:`flush` writes."""
        if stream.blocked or len(message) > min(self._window, stream.window):
            stream.blocked.append(message)
            self._stalled.add(stream)
            return
        self._window -= len(message)
        stream.window -= len(message)
        self._out.append(frame(DATA, 0, stream.id, message))

    def finish(self, stream: Stream, message: bytes) -> None:
        """Queue the last message and the trailers."""
        self.send(stream, message)
        if stream.blocked:
            stream.blocked.append(b"")
        else:
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        self._out.append(frame(HEADERS, END_HEADERS | END_STREAM, stream.id, TRAILERS))
        self._drop(stream)

    def flush(self) -> None:
        """Write what is queued."""
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()

    def pour(self) -> int:
        """Some tokens on each flooded stream, in turn, as from an engine's steps; returns how many."""
        count = 0
        tokens = Tokens()
        for _ in range(FLOOD_ROUNDS):
            for stream in self.flood.copy():
                if stream.blocked:
                    continue
                ask = stream.ask
                assert ask is not None  # noqa: S101 - set before it was listed
                count += 1
                stream.sent += 1
                if stream.sent == ask.tokens:
                    self.flood.remove(stream)
                    self.finish(stream, messages.last_message(tokens.at_us, ask.candidates, ask.tokens))
                else:
                    self.send(stream, tokens.make(ask.candidates))
        self.flush()
        return count

    def _unblock(self, stream: Stream) -> None:
        """Send what the stream's window, or the connection's, has held back; an empty message is the end."""
        blocked, stream.blocked = stream.blocked, []
        self._stalled.discard(stream)
        for message in blocked:
            if message or stream.blocked:
                self.send(stream, message)
            else:
                self._end(stream)
        if self.flood and self.writable:
            self.pace.flood(self)

    def _drop(self, stream: Stream) -> None:
        if self._streams.pop(stream.id, None) is None:
            return
        stream.open = False
        self._stalled.discard(stream)
        if stream.ask is not None:
            self.pace.statistics.open -= 1
        if stream in self.flood:
            self.flood.remove(stream)

    # -- In

    def data_received(self, data: bytes) -> None:
        """Read frames."""
        self._buffer += data
        if not self._greeted:
            if len(self._buffer) < len(PREFACE):
                return
            self._buffer = self._buffer[len(PREFACE) :]
            self._greeted = True
        for kind, flags, stream_id, payload in self._frames():
            self._take(kind, flags, stream_id, payload)
        self.flush()

    def _frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        buffer, at = self._buffer, 0
        while len(buffer) - at >= HEADER_BYTES:
            end = at + HEADER_BYTES + int.from_bytes(buffer[at : at + 3], "big")
            if end > len(buffer):
                break
            stream_id = int.from_bytes(buffer[at + 5 : at + 9], "big")
            yield buffer[at + 3], buffer[at + 4], stream_id, buffer[at + HEADER_BYTES : end]
            at = end
        self._buffer = buffer[at:]

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE:
            size = int.from_bytes(payload, "big")
            if not stream_id:
                self._window += size
                for stalled in tuple(self._stalled):
                    self._unblock(stalled)
            elif (stream := self._streams.get(stream_id)) is not None:
                stream.window += size
                if stream.blocked:
                    self._unblock(stream)
        elif kind == DATA:
            self._take_data(flags, stream_id, payload)
        elif kind in (HEADERS, CONTINUATION):
            self._take_headers(kind, flags, stream_id, payload)
        elif kind == RST_STREAM:
            self.pace.statistics.resets += 1
            if (stream := self._streams.get(stream_id)) is not None:
                self._drop(stream)
        elif kind == PING and not flags & ACK:
            self._out.append(frame(PING, ACK, 0, payload))
        elif kind == SETTINGS and not flags & ACK:
            self._take_settings(payload)

    def _take_settings(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            if int.from_bytes(payload[at : at + 2], "big") == INITIAL_WINDOW_SIZE:
                window = int.from_bytes(payload[at + 2 : at + 6], "big")
                for stream in self._streams.values():
                    stream.window += window - self._initial_window
                self._initial_window = window
        self._out.append(frame(SETTINGS, ACK, 0, b""))

    def _take_headers(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == HEADERS:
            if flags & PADDED:
                payload = payload[1 : len(payload) - payload[0]]
            if flags & PRIORITY:
                payload = payload[5:]
            self._streams[stream_id] = Stream(self, stream_id, self._initial_window)
        self._header_block += payload
        if flags & END_HEADERS:
            headers: dict[str, str] = {str(name): str(value) for name, value in self._hpack.decode(self._header_block)}
            self._header_block = b""
            self._streams[stream_id].path = headers[":path"]

    def _take_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        if payload:
            size = len(payload).to_bytes(4, "big")
            self._out.append(frame(WINDOW_UPDATE, 0, 0, size))
            if not flags & END_STREAM:
                self._out.append(frame(WINDOW_UPDATE, 0, stream_id, size))
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        stream.body += payload
        if flags & END_STREAM:
            self._answer(stream)

    def _answer(self, stream: Stream) -> None:
        self._out.append(frame(HEADERS, END_HEADERS, stream.id, RESPONSE_HEADERS))
        if stream.path == methods.GENERATE_STREAM.path:
            stream.ask = messages.read_request(bytes(stream.body[5:]))
            stream.body.clear()
            self.pace.begin(stream)
        elif (reply := self.replies.get(stream.path)) is not None:
            self.finish(stream, reply)
        else:
            trailers = _literal(b"grpc-status", b"12")
            self._out.append(frame(HEADERS, END_HEADERS | END_STREAM, stream.id, trailers))
            self._drop(stream)


async def start_up_replies() -> dict[str, bytes]:
    """What workers ask as they start, as the mock engine answers it."""
    engine = MockEngine(MockFacts.resolve(MockSettings(served_model_name=MODEL, max_model_len=1 << 20)))
    calls: tuple[tuple[methods.Method[Any, Any], Any], ...] = (
        (methods.GET_SERVER_INFO, wire.GetServerInfoRequest()),
        (methods.GET_MODEL_INFO, wire.GetModelInfoRequest()),
        (methods.GET_KV_EVENT_SOURCES, wire.GetKvEventSourcesRequest()),
    )
    replies = {}
    for method, request in calls:
        replies[method.path] = encode(await engine.aio_call(method, request))
    health = wire.HealthCheckResponse(status=wire.HealthCheckResponseServingStatus.SERVING)
    replies[methods.HEALTH_CHECK.path] = encode(health)
    return {path: b"\0" + len(reply).to_bytes(4, "big") + reply for path, reply in replies.items()}


async def serve() -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    pace = Pace(loop)
    replies = await start_up_replies()
    server = await loop.create_server(lambda: Connection(pace, replies), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(pace.take(), flush=True)  # noqa: T201
    server.close()


if __name__ == "__main__":
    uvloop.run(serve())
