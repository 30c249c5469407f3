"""The fallback over a grpclib that only takes notes: what it is asked, and what its errors become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, cast

import attrs
import pytest
import trio
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.exceptions import ProtocolError as GrpclibProtocolError

from trio_sidecar.bridge import aio_checkpoint, aio_sleep, run_aio
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import InvalidRequest, RpcError, StatusCode
from trio_sidecar.transport import publicpath
from trio_sidecar.transport.connection import ConnectionSettings, ConnectionState, NotProcessed
from trio_sidecar.transport.publicpath import PublicConnection

if TYPE_CHECKING:
    import asyncio

    from trio.testing import MockClock

    Loop = asyncio.AbstractEventLoop
    Lines = list[dict[str, Any]]

SETTINGS = ConnectionSettings(endpoint=GrpcEndpoint.parse("engine:50051"), max_message_bytes=10)


@attrs.define(eq=False)
class FakeGrpclib:
    """A channel, its socket's protocol, and its one stream.

    Attributes:
        asked: Everything that was called, with what.
        faults: Raised by a call, by its name.
        messages: What the stream gives, then None.
        initial_metadata: The response's headers.
        trailers_after: How long the trailers take, in seconds.
        waits: A call that never returns.
    """

    asked: list[Any] = attrs.field(factory=list)
    faults: dict[str, BaseException] = attrs.field(factory=dict)
    messages: list[bytes] = attrs.field(factory=list)
    initial_metadata: dict[str, Any] | None = None
    trailers_after: float = 0.0
    waits: str = ""

    async def _aio_note(self, name: str, *what: Any) -> None:
        await aio_checkpoint()
        self.asked.append((name, *what))
        if name == self.waits:
            await aio_sleep(10_000)
        if name in self.faults:
            raise self.faults[name]

    def request(self, *positional: Any, **named: Any) -> FakeGrpclib:
        self.asked.append(("request", positional, named))
        return self

    def close(self) -> None:
        self.asked.append("close")

    async def __aenter__(self) -> Self:
        """Open the stream."""
        await self._aio_note("enter")
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        """Forget the stream."""
        await self._aio_note("exit", kind, str(error), traceback)  # noqa: ASYNC102 - asyncio-flavoured

    async def send_message(self, data: bytes, **more: Any) -> None:
        await self._aio_note("send", data, more)

    async def recv_initial_metadata(self) -> None:
        await self._aio_note("headers")

    async def recv_message(self) -> bytes | None:
        await self._aio_note("message")
        return self.messages.pop(0) if self.messages else None

    async def recv_trailing_metadata(self) -> None:
        await aio_sleep(self.trailers_after)
        await self._aio_note("trailers")

    async def cancel(self) -> None:
        await self._aio_note("cancel")


@attrs.define(eq=False)
class Scene:
    """A connection over the stand-in.

    Attributes:
        changes: State and open streams at each change that was told.
    """

    connection: PublicConnection
    grpclib: FakeGrpclib
    changes: list[tuple[ConnectionState, int]]

    async def call(self, **more: Any) -> list[bytes]:
        """Make a call and take all of it."""

        async def aio_main() -> list[bytes]:
            taken: list[bytes] = []
            call = self.connection.aio_open("/t.T/Stream", b"request", metadata={"x-rank": "3"}, **more)
            async with call as stream:
                while batch := await stream.aio_receive():
                    taken += batch
            return taken

        return await run_aio(aio_main)

    async def failing(self) -> RpcError:
        """Make a call that fails."""
        with pytest.raises(RpcError) as caught:
            await self.call()
        return caught.value

    @property
    def steps(self) -> list[str]:
        """The names of what was called."""
        return [step if isinstance(step, str) else step[0] for step in self.grpclib.asked]


@pytest.fixture
async def scene(aio_loop: Loop) -> Scene:
    """A connection that was just made."""
    changes: list[tuple[ConnectionState, int]] = []

    async def aio_make() -> PublicConnection:
        await aio_checkpoint()
        return PublicConnection(SETTINGS, lambda made: changes.append((made.state, made.open_streams)))

    connection = await run_aio(aio_make)
    connection.channel.close()
    grpclib = FakeGrpclib()
    connection.channel = cast("Any", grpclib)
    return Scene(connection, grpclib, changes)


# -- The connection


async def test_a_new_connection(scene: Scene) -> None:
    """Is ready, has no reason to give, and assumes what HTTP/2 recommends."""
    connection = scene.connection
    assert (ConnectionState.READY, "", 0, 100) == (
        connection.state, connection.reason, connection.open_streams, connection.stream_limit
    )  # fmt: skip
    assert "<PublicConnection engine:50051: ready, 0 streams>" == repr(connection)
    await run_aio(connection.aio_ping)


async def test_a_connection_that_was_never_made_is_closed_at_once(scene: Scene) -> None:
    """There is no socket that could tell; later reasons change nothing."""
    await trio.lowlevel.checkpoint()
    connection = scene.connection
    connection.close("first")
    connection.close("second")
    assert (ConnectionState.CLOSED, "first", True) == (connection.state, connection.reason, connection.closed.is_set())
    assert (["close"], [(ConnectionState.CLOSED, 0)]) == (scene.grpclib.asked, scene.changes)


async def test_a_connection_is_closed_when_its_socket_is(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is grpclib that learns of the loss first, with what the socket said."""
    told: list[Any] = []
    protocol = SimpleNamespace(connection_lost=told.append)
    given: list[Any] = []

    async def aio_handshake(*arguments: Any) -> Any:
        await aio_checkpoint()
        given.extend(arguments)
        return protocol

    monkeypatch.setattr(publicpath, "aio_handshake", aio_handshake)
    await run_aio(scene.connection.aio_establish)
    assert [scene.grpclib, SETTINGS] == given
    scene.connection.close("done")
    assert not scene.connection.closed.is_set()
    error = OSError("reset")
    protocol.connection_lost(error)
    assert ([error], True) == (told, scene.connection.closed.is_set())


async def test_an_attempt_that_fails_closes_the_channel(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was begun."""

    async def aio_handshake(*_: Any) -> Any:
        await aio_checkpoint()
        raise OSError(111, "refused")

    monkeypatch.setattr(publicpath, "aio_handshake", aio_handshake)
    with pytest.raises(OSError, match="refused"):
        await run_aio(scene.connection.aio_establish)
    assert ["close"] == scene.grpclib.asked


async def test_a_connection_is_made_with_what_it_was_given(
    aio_loop: Loop, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, listener, and a codec that leaves bytes alone."""
    protocol = SimpleNamespace(connection_lost=lambda error: None)

    async def aio_handshake(*_: Any) -> Any:
        await aio_checkpoint()
        return protocol

    monkeypatch.setattr(publicpath, "aio_handshake", aio_handshake)
    changes: list[Any] = []
    made = await run_aio(publicpath.aio_connect, SETTINGS, changes.append)
    assert SETTINGS is made.settings
    codec = made.channel._codec
    assert (b"request", b"answer") == (codec.encode(bytearray(b"request"), bytes), codec.decode(b"answer", bytes))
    assert ("engine", 50051) == (made.channel._host, made.channel._port)
    made.close("done")
    assert [made] == changes


# -- Calls


async def test_what_a_call_asks_of_grpclib(scene: Scene) -> None:
    """Path, metadata, timeout and the whole request; in the end the stream is reset and forgotten."""
    scene.grpclib.messages = [b"one", b"two"]
    assert [b"one", b"two"] == await scene.call(timeout_secs=5.0)
    assert [
        (
            "request",
            ("/t.T/Stream", Cardinality.UNARY_STREAM, bytes, bytes),
            {"timeout": 5.0, "metadata": {"x-rank": "3"}},
        ),
        ("enter",),
        ("send", b"request", {"end": True}),
        ("headers",),
        ("message",),
        ("message",),
        ("message",),
        ("trailers",),
        ("cancel",),
        ("exit", StreamTerminatedError, "left early", None),
    ] == scene.grpclib.asked


async def test_open_streams_are_counted(scene: Scene) -> None:
    """From entering to leaving; only a place that becomes free is told."""

    async def aio_main() -> None:
        async with scene.connection.aio_open("/t.T/Stream", b"", metadata={}):
            assert (1, []) == (scene.connection.open_streams, scene.changes)

    await run_aio(aio_main)
    assert (0, [(ConnectionState.READY, 0)]) == (scene.connection.open_streams, scene.changes)


@pytest.mark.parametrize(
    ("metadata", "headers"),
    [(None, {}), ({}, {}), ({"x-node": "seven", "x-number": 7}, {"x-node": "seven", "x-number": "7"})],
)
async def test_headers_are_text(scene: Scene, metadata: dict[str, Any] | None, headers: dict[str, str]) -> None:
    """Also where there are none."""
    scene.grpclib.initial_metadata = metadata

    async def aio_main() -> dict[str, str]:
        async with scene.connection.aio_open("/t.T/Stream", b"", metadata={}) as stream:
            return stream.headers

    assert headers == await run_aio(aio_main)


def test_metadata_is_checked_before_anything_is_asked() -> None:
    """As on the fast path."""
    with pytest.raises(InvalidRequest, match="te"):
        PublicConnection.aio_open(cast("Any", None), "/t.T/Stream", b"", metadata={"te": "x"})


async def test_a_closed_connection_begins_nothing(scene: Scene) -> None:
    """The call may be sent on another one, and its error says why it was not sent here."""
    scene.connection.close("the pool is closing")
    error = await scene.failing()
    assert isinstance(error, NotProcessed)
    assert "the connection to engine:50051 is closed: the pool is closing" == error.detail
    assert ["close", "request"] == scene.steps


@pytest.mark.parametrize("step", ["enter", "send", "headers"])
async def test_a_refusal_on_entering(scene: Scene, step: str) -> None:
    """Leaves nothing behind, and keeps what grpclib said as its cause."""
    fault = GRPCError(Status.NOT_FOUND, "no such model")
    scene.grpclib.faults[step] = fault
    error = await scene.failing()
    assert (StatusCode.NOT_FOUND, "no such model", fault) == (error.status, error.detail, error.__cause__)
    assert (0, ["cancel", "exit"]) == (scene.connection.open_streams, scene.steps[-2:])


async def test_a_call_that_is_cancelled_on_entering(autojump_clock: MockClock, scene: Scene) -> None:
    """Leaves nothing behind either."""
    scene.grpclib.waits = "headers"
    with trio.move_on_after(5) as scope:
        await scene.call()
    assert scope.cancelled_caught
    assert (0, ["cancel", "exit"]) == (scene.connection.open_streams, scene.steps[-2:])


async def test_a_stream_of_a_lost_connection_is_not_reset(scene: Scene) -> None:
    """Only forgotten; and nobody is told of a place that nobody can have."""
    scene.grpclib.faults["message"] = StreamTerminatedError("Connection lost")
    error = await scene.failing()
    assert (StatusCode.UNAVAILABLE, "lost the connection to engine:50051: Connection lost") == (
        error.status, error.detail
    )  # fmt: skip
    assert ["message", "close", "exit"] == scene.steps[-3:]
    assert [(ConnectionState.CLOSED, 1)] == scene.changes


async def test_what_grpclib_cannot_clear_away_is_noted(scene: Scene, logs: Lines) -> None:
    """It is no fault of the call."""
    scene.grpclib.messages = [b"one"]
    scene.grpclib.faults = {"cancel": RuntimeError("no stream"), "exit": KeyError("gone")}
    assert [b"one"] == await scene.call()
    assert [
        {"event": "reset_not_sent", "log_level": "debug", "error": "no stream"},
        {"event": "stream_not_forgotten", "log_level": "debug", "error": "'gone'"},
    ] == logs
    assert 0 == scene.connection.open_streams


# -- Answers


@pytest.mark.rule("R3.12")
async def test_a_message_may_be_as_long_as_the_limit(scene: Scene) -> None:
    """And no longer."""
    scene.grpclib.messages = [bytes(10), bytes(11)]
    error = await scene.failing()
    assert (StatusCode.RESOURCE_EXHAUSTED, "the peer sent a message of 11 bytes, more than the limit of 10") == (
        error.status, error.detail
    )  # fmt: skip
    assert "message" == scene.steps[-3]


@pytest.mark.parametrize(("after", "fails"), [(0.4, False), (0.6, True)])
async def test_trailers_are_not_waited_for_long(
    autojump_clock: MockClock, scene: Scene, after: float, fails: bool
) -> None:
    """They come with the end of the stream, or never."""
    scene.grpclib.trailers_after = after
    if fails:
        error = await scene.failing()
        assert (StatusCode.UNKNOWN, "the response has no grpc-status") == (error.status, error.detail)
    else:
        assert [] == await scene.call()


async def test_a_timeout_of_somebody_else_is_no_missing_status(scene: Scene) -> None:
    """A socket's is the loss of the connection."""
    scene.grpclib.faults["trailers"] = TimeoutError("timed out")
    error = await scene.failing()
    assert (StatusCode.UNAVAILABLE, "lost the connection to engine:50051: timed out") == (error.status, error.detail)


@pytest.mark.parametrize(
    ("fault", "status", "sentence"),
    [
        (GRPCError(Status.ABORTED), StatusCode.ABORTED, ""),
        (GRPCError(Status.ABORTED, "words"), StatusCode.ABORTED, "words"),
        (
            StreamTerminatedError("Stream reset by remote party, error_code: 8"),
            StatusCode.CANCELLED,
            "the peer reset the stream (HTTP/2 error code 8)",
        ),
        (
            StreamTerminatedError("Stream reset by remote party, error_code: ErrorCodes.CANCEL 11"),
            StatusCode.RESOURCE_EXHAUSTED,
            "the peer reset the stream (HTTP/2 error code 11)",
        ),
        (NotImplementedError("Compression"), StatusCode.INTERNAL, "the peer sent a compressed message, unasked"),
        (AssertionError("Data"), StatusCode.INTERNAL, "the stream ended within a message"),
    ],
)
async def test_faults_of_one_stream(scene: Scene, fault: Exception, status: StatusCode, sentence: str) -> None:
    """The others go on; a reset is counted."""
    await trio.lowlevel.checkpoint()
    before = dict(scene.connection.settings.meter.resets)
    error = scene.connection.translated(fault)
    assert (status, sentence) == (error.status, error.detail)
    assert (ConnectionState.READY, []) == (scene.connection.state, scene.changes)
    after = scene.connection.settings.meter.resets
    reset = {StatusCode.CANCELLED: "CANCEL", StatusCode.RESOURCE_EXHAUSTED: "ENHANCE_YOUR_CALM"}.get(status)
    assert ({reset: 1} if reset else {}) == {name: n - before[name] for name, n in after.items() if n != before[name]}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (StreamTerminatedError("Connection lost"), "Connection lost"),
        (GrpclibProtocolError("broken"), "broken"),
        (OSError(104, "reset"), "[Errno 104] reset"),
        (AttributeError(), "AttributeError"),
    ],
)
async def test_faults_that_cost_the_connection(scene: Scene, fault: Exception, told: str) -> None:
    """All of its streams fail with the reason that came first."""
    await trio.lowlevel.checkpoint()
    error = scene.connection.translated(fault)
    assert (StatusCode.UNAVAILABLE, f"lost the connection to engine:50051: {told}") == (error.status, error.detail)
    assert (ConnectionState.CLOSED, told) == (scene.connection.state, scene.connection.reason)
    later = scene.connection.translated(OSError("later"))
    assert f"lost the connection to engine:50051: {told}" == later.detail
