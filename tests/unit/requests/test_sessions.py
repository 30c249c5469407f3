"""Sessions in virtual time: who is taken and who refused, and what is logged about an end (spec 10, 11, 15)."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from support.conversion import convert
from support.samples import minimal_request
from support.traces import RecordedTraces
from trio_sidecar import wire
from trio_sidecar.bridge import run_aio
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.deadline import Deadline
from trio_sidecar.errors import (
    ConnectionTimeoutError,
    EngineShutdown,
    InvalidRequest,
    Overloaded,
    RpcError,
    SidecarError,
    StatusCode,
)
from trio_sidecar.requests.buffer import BufferLimit
from trio_sidecar.requests.cancel import CancelAfterFirstToken
from trio_sidecar.requests.limits import SilenceLimits
from trio_sidecar.requests.session import EndReason
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Script, Send, Wait, finish, tokens
from trio_sidecar.wire import FinishInfoFinishReason

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Mapping

    from trio.testing import MockClock

    from trio_sidecar.requests.session import Session

    Loop = asyncio.AbstractEventLoop
    Lines = list[dict[str, Any]]

WHOLE = Script(stream=[Send(tokens(1)), Send(finish(2, total=2))])
ENDLESS = Script(stream=[Send(tokens(1)), Wait(1000)])


@attrs.define(eq=False)
class Scene:
    """Sessions before an engine that plays a script."""

    engine: FakeEngine
    sessions: Sessions

    def open(self, request_id: str = "r", **more: Any) -> Session:
        return self.sessions.open(minimal_request(), request_id, **more)


@asynccontextmanager
async def scene(script: Script, **more: Any) -> AsyncIterator[Scene]:
    engine = FakeEngine(script)
    sessions = Sessions(**{"responder": ResponseConverter, "merge": merge_chunks, **more})

    def converted(request: Mapping[str, object], _: str) -> Any:
        return convert(dict(request))

    async with sessions.serving(engine, converted):
        yield Scene(engine, sessions)


class Never:
    """A policy that lets no cancel act."""

    def ready(self) -> bool:
        return False

    def observe(self, response: object) -> None:
        """Nothing changes that."""


async def take(session: Session) -> tuple[list[int], str]:
    """The tokens, and the finish reason."""
    ids: list[int] = []
    end = "none"
    while (chunk := await run_aio(session.aio_next)) is not None:
        ids += chunk["token_ids"]
        end = chunk.get("finish_reason", end)
    return ids, end


async def usage(session: Session) -> tuple[int, int]:
    """What the next chunk, a terminal, says of tokens: of the answer, and beyond the prompt's."""
    chunk = await run_aio(session.aio_next)
    assert chunk is not None
    counted = chunk["completion_usage"]
    return counted["completion_tokens"], counted["total_tokens"] - len(minimal_request()["token_ids"])


async def failure(session: Session) -> SidecarError:
    with pytest.raises(SidecarError) as caught:
        await take(session)
    return caught.value


def other_than(logs: Lines, event: str) -> Lines:
    return [line for line in logs if line["event"] != event]


# -- Who is taken


@pytest.mark.rule("R11.2")
async def test_life_begins_once(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Before it, and for a second one, the error says why not."""
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks)
    with pytest.raises(EngineShutdown) as early:
        sessions.open(minimal_request(), "r")
    assert "the worker has not started" == str(early.value)
    async with scene(WHOLE) as s:
        with pytest.raises(EngineShutdown) as again:
            async with s.sessions.serving(s.engine, lambda *_: pytest.fail("nothing to convert")):
                pytest.fail("started twice")
        assert "the worker was started already" == str(again.value)


@pytest.mark.rule("R15.3")
async def test_suspended_sessions_take_nobody(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """The refusal has the reason; requests that are open go on; after it all is as before."""
    async with scene(WHOLE) as s:
        before = s.open()
        s.sessions.suspend("the engine has died")
        with pytest.raises(EngineShutdown) as caught:
            s.open()
        assert "recovering: the engine has died" == str(caught.value)
        assert ([1, 2], "length") == await take(before)
        s.sessions.resume()
        assert ([1, 2], "length") == await take(s.open())


@pytest.mark.rule("R11.4", "R15.3")
async def test_after_the_end_nobody_hears_of_a_recovery(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """The worker stops while it recovers: requests get cancelled terminals, as after any stop."""
    async with scene(WHOLE) as s:
        s.sessions.suspend("the engine has died")
    assert ([], "cancelled") == await take(s.open())


async def test_a_full_worker_refuses(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """What is allowed is open, one more is refused and counted; when one has ended there is room again."""
    async with scene(ENDLESS, max_open=2) as s:
        one, _ = s.open("1"), s.open("2")
        for _ in range(2):
            with pytest.raises(Overloaded, match="2 requests open"):
                s.open("3")
        now = s.sessions.statistics()
        assert (2, 2, 2) == (now.open, now.peak_open, now.refused)
        one.close()
        await trio.sleep(1)
        assert (1, {"consumer_gone": 1}) == (s.sessions.statistics().open, s.sessions.statistics().ended)
        s.open("3")
        assert (2, 2) == (s.sessions.statistics().open, s.sessions.statistics().peak_open)


async def test_ends_are_counted_by_reason(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Each by its own."""
    async with scene(WHOLE) as s:
        for _ in range(3):
            await take(s.open())
        for _ in range(2):
            s.open().close()
        await trio.sleep(1)
    assert {"finished": 3, "consumer_gone": 2} == s.sessions.statistics().ended
    assert (3, 2) == (s.sessions.meter.ended["finished"], s.sessions.meter.ended["consumer_gone"])


async def test_what_is_counted_of_requests(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Accepted and refused ones, tokens and chunks that were taken, and how long everything took."""
    steps: list[Any] = [
        Wait(2),
        Send(tokens(1)),
        Wait(1),
        Send(tokens(2), tokens(3)),
        Wait(3),
        Send(finish(4, total=4)),
    ]
    async with scene(Script(stream=steps), max_open=2) as s:
        with pytest.raises(InvalidRequest):
            s.sessions.open({**minimal_request(), "sampling_options": {"n": 2}}, "bad")
        taken = s.open()
        s.open().close()
        with pytest.raises(Overloaded):
            s.open()
        await take(taken)
        await trio.sleep(1)
    prompt = len(minimal_request()["token_ids"])
    meter = s.sessions.meter
    assert (2, 2 * prompt, 4, 3) == (meter.accepted, meter.prompt_tokens, meter.output_tokens, meter.chunks)
    assert {"overloaded": 1, "invalid": 1} == {name: count for name, count in meter.refused.items() if count}
    assert {"finished": 1, "consumer_gone": 1} == {name: count for name, count in meter.ended.items() if count}
    for histogram, count, total in (
        (meter.first_response, 1, 2.0),
        (meter.first_token, 1, 2.0),
        (meter.inter_token, 3, 4.0),
        (meter.duration, 2, 6.0),
    ):
        assert count == sum(histogram.counts)
        assert pytest.approx(total, abs=0.01) == histogram.sum


async def test_refusals_are_counted_by_their_reason(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """A worker that is away is told from a fault in the program."""

    def crash(_: object) -> Any:
        raise ZeroDivisionError

    async with scene(WHOLE, responder=crash) as s:
        with pytest.raises(ZeroDivisionError):
            s.open()
        s.sessions.suspend("the engine has died")
        for _ in range(2):
            with pytest.raises(EngineShutdown):
                s.open()
        refused = s.sessions.meter.refused
        assert {"internal": 1, "unavailable": 2} == {name: count for name, count in refused.items() if count}
        s.sessions.resume()


# -- Cancels and silence


@pytest.mark.rule("R10.3")
async def test_a_cancel_counts_what_was_taken(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Not what waits in the buffer, which nobody gets."""
    async with scene(Script(stream=[Send(tokens(1)), Wait(1), Send(tokens(2, 3)), Wait(1000)])) as s:
        session = s.open()
        await run_aio(session.aio_next)
        await trio.sleep(2)
        session.cancel()
        assert (1, 1) == await usage(session)


@pytest.mark.rule("R10.8")
async def test_a_cancel_that_waited_counts_what_it_waited_for(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Though nobody gets that token."""
    async with scene(Script(stream=[Wait(1), Send(tokens(1)), Wait(1000)])) as s:
        session = s.open(policy=CancelAfterFirstToken(lambda: None))
        session.cancel()
        assert (1, 1) == await usage(session)


async def test_a_silent_engine_is_a_timeout(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """The client reads who was silent and for how long; metrics and traces call it what it is."""
    traces = RecordedTraces()
    async with scene(ENDLESS, silence=SilenceLimits(idle_secs=5), tracer=traces.tracer) as s:
        error = await failure(s.open())
        await trio.sleep(1)
        assert isinstance(error, ConnectionTimeoutError)
        assert "GenerateStream: the engine has sent no further message for 5 s" == str(error)
        assert {"timeout": 1} == s.sessions.statistics().ended
    assert "DEADLINE_EXCEEDED" == traces.only("request").failure


@pytest.mark.rule("R10.10")
async def test_a_cancel_waits_no_longer_for_a_silent_engine(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Its client has what it wanted; that the engine is silent is no error of the request."""
    async with scene(ENDLESS, silence=SilenceLimits(idle_secs=5)) as s:
        session = s.open(policy=Never())
        session.cancel()
        assert ([1], "cancelled") == await take(session)
        await trio.sleep(1)
        assert {"cancelled": 1} == s.sessions.statistics().ended


# -- Requests for the sake of what the engine releases


async def test_what_is_let_go_is_read_to_its_end(autojump_clock: MockClock, aio_loop: Loop, logs: Lines) -> None:
    """Nobody takes the answer, and the request ends all the same, when its policy lets it."""
    steps: list[Any] = [Send(tokens(1)), Wait(1), Send(tokens(2)), Wait(1), Send(finish(3, total=3))]
    async with scene(Script(stream=steps)) as s:
        s.sessions.let_go(minimal_request(), "id-1", policy=Never())
        await trio.sleep(10)
        assert (0, {"finished": 1}) == (s.sessions.statistics().open, s.sessions.statistics().ended)
        s.sessions.let_go(minimal_request(), "id-2", policy=CancelAfterFirstToken(lambda: None))
        await trio.sleep(10)
        assert {"finished": 1, "cancelled": 1} == s.sessions.statistics().ended
    prompt = wire.TokenIds(ids=minimal_request()["token_ids"])
    assert [prompt, prompt] == [received.request.token_ids for received in s.engine.requests]
    assert ["id-1", "id-2"] == [line["request_id"] for line in logs]


async def test_what_was_not_let_go_is_logged(autojump_clock: MockClock, aio_loop: Loop, logs: Lines) -> None:
    """There is no client who could be told why."""
    async with scene(ENDLESS) as s:
        s.sessions.let_go(minimal_request(), "id-1", policy=Never())
        await s.sessions.drain(Deadline.after(5))
        await trio.sleep(1)
    reason = "the worker is draining and the request outlived its budget"
    assert {"event": "not_let_go", "log_level": "warning", "request_id": "id-1", "reason": reason} in logs


# -- Drain and stop


async def test_a_drain_tells_whom_it_ends(autojump_clock: MockClock, aio_loop: Loop, logs: Lines) -> None:
    """The client reads why, the operator how many; a drain that ended nobody is not worth a line."""
    async with scene(ENDLESS) as s:
        assert 0 == await s.sessions.drain(Deadline.after(1))
        sessions = [s.open(str(number)) for number in range(2)]
        assert 2 == await s.sessions.drain(Deadline.after(5))
        for session in sessions:
            reason = "the worker is draining and the request outlived its budget"
            assert reason == str(await failure(session))
        await trio.sleep(1)
    assert [
        {"event": "drain_deadline_passed", "log_level": "warning", "requests": 2},
    ] == other_than(logs, "request_ended")


@pytest.mark.rule("R10.12", "R11.3")
async def test_a_stop_leaves_a_shutdown_as_it_is(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Its client must try another worker, and would take a terminal for a normal end."""
    async with scene(ENDLESS) as s:
        session = s.open()
        await trio.sleep(1)
        session.shut_down("going down")
        session.stop()
        assert (EndReason.SHUTDOWN, "going down") == (session.reason, str(await failure(session)))


@pytest.mark.rule("R11.3")
async def test_a_stop_after_the_end_changes_nothing(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """What ended by itself has not been cancelled."""
    async with scene(WHOLE) as s:
        session = s.open()
        await take(session)
        session.stop()
        assert (None, {"finished": 1}) == (session.reason, s.sessions.statistics().ended)
        session.close()
        session.cancel()
        assert session.reason is None


@pytest.mark.rule("R11.2")
async def test_a_drain_ends_with_the_last_request(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Neither with the first that ends, nor only at its deadline; its trace says how many there were."""
    traces = RecordedTraces()
    script = Script(stream=[Wait(2), Send(tokens(1)), Wait(3), Send(finish(2, total=2))])
    async with scene(script, tracer=traces.tracer) as s, trio.open_nursery() as nursery:
        began_at = trio.current_time()
        for number in range(2):
            nursery.start_soon(take, s.open(str(number)))
            await trio.sleep(1)
        assert 0 == await s.sessions.drain(Deadline.after(100))
        assert pytest.approx(6.0, abs=0.01) == trio.current_time() - began_at
    assert {"trio_sidecar.requests": 2, "trio_sidecar.cut": 0} == traces.only("drain").attributes


async def test_an_engine_has_five_seconds_to_let_go(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Then its cleanup is cut off, and the request is over."""
    async with scene(Script(stream=ENDLESS.stream, closing=[Wait(1000)])) as s:
        session = s.open()
        await trio.sleep(1)
        session.close()
        await trio.sleep(4.9)
        assert 1 == s.sessions.statistics().open
        await trio.sleep(0.2)
        assert 0 == s.sessions.statistics().open


# -- Clients that do not read


async def test_a_full_buffer_loses_nothing(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """The engine is not read on until there is room; then all goes on in order."""
    steps = [Send(tokens(number)) for number in range(9)]
    async with scene(
        Script(stream=[*steps, Send(finish(9, total=10))]), limit=BufferLimit(max_chunks=2), coalesce=False
    ) as s:
        session = s.open()
        await trio.sleep(1)
        assert 10 > s.engine.requests[0].reads
        assert (list(range(10)), "length") == await take(session)


@pytest.mark.parametrize(("coalesce", "chunks"), [(False, 10), (True, 1)])
async def test_what_waits_is_joined_if_wanted(
    autojump_clock: MockClock, aio_loop: Loop, coalesce: bool, chunks: int
) -> None:
    """Otherwise there is one chunk for each answer of the engine."""
    steps = [Send(tokens(number)) for number in range(9)]
    async with scene(Script(stream=[*steps, Send(finish(9, total=10))]), coalesce=coalesce) as s:
        session = s.open()
        await trio.sleep(1)
        assert (list(range(10)), "length") == await take(session)
    assert chunks == s.sessions.meter.chunks


# -- What is logged


async def test_a_fault_in_the_program_is_logged_and_wrapped(
    autojump_clock: MockClock, aio_loop: Loop, logs: Lines
) -> None:
    """With the traceback for us, and the kind of error for the client."""
    fault = ZeroDivisionError("by nought")
    async with scene(Script(stream=[Fail(fault)])) as s:
        error = await failure(s.open("id-1"))
        await trio.sleep(1)
    assert ("GenerateStream: ZeroDivisionError: by nought", fault) == (str(error), error.__cause__)
    assert [
        {"event": "request_crashed", "log_level": "error", "request_id": "id-1", "exc_info": fault},
    ] == other_than(logs, "request_ended")


async def test_a_refusal_is_named_after_the_call(autojump_clock: MockClock, aio_loop: Loop, logs: Lines) -> None:
    """It is the engine's, so it is not logged again."""
    async with scene(Script(opening=[Fail(RpcError(StatusCode.INVALID_ARGUMENT, "no"))])) as s:
        assert "GenerateStream: no (InvalidArgument)" == str(await failure(s.open()))
        await trio.sleep(1)
        assert {"error": 1} == s.sessions.statistics().ended
    assert [] == other_than(logs, "request_ended")


async def test_a_stream_that_just_ends_is_the_engines_fault(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """A client must not take it for the whole answer."""
    async with scene(Script(stream=[Send(tokens(1))])) as s:
        error = await failure(s.open())
    assert "GenerateStream ended before a terminal response with finish_info" in str(error)


async def test_an_abort_by_the_engine_is_logged(autojump_clock: MockClock, aio_loop: Loop, logs: Lines) -> None:
    """Nobody asked for it."""
    aborted = finish(2, total=1, reason=FinishInfoFinishReason.ABORTED)
    async with scene(Script(stream=[Send(aborted)])) as s:
        assert "cancelled" == (await take(s.open("id-1")))[1]
        await trio.sleep(1)
    assert [
        {"event": "engine_aborted_request", "log_level": "warning", "request_id": "id-1"},
    ] == other_than(logs, "request_ended")


async def test_what_fails_after_the_end_is_only_noted(autojump_clock: MockClock, aio_loop: Loop, logs: Lines) -> None:
    """The client has its answer; an engine that cannot let go is of interest for us alone."""
    fault = RpcError(StatusCode.INTERNAL, "cannot let go", rpc="GenerateStream")
    async with scene(Script(stream=WHOLE.stream, closing=[Fail(fault)])) as s:
        assert ([1, 2], "length") == await take(s.open("id-1"))
        await trio.sleep(1)
    assert [
        {"event": "request_failed_after_end", "log_level": "debug", "request_id": "id-1", "exc_info": fault},
    ] == other_than(logs, "request_ended")


@pytest.mark.rule("R10.10")
async def test_an_engine_that_fails_while_a_cancel_waits_is_logged(
    autojump_clock: MockClock, aio_loop: Loop, logs: Lines
) -> None:
    """The client has what it wanted, so its log line is the only trace of the fault."""
    fault = OSError("gone")
    async with scene(Script(opening=[Wait(1), Fail(fault)])) as s:
        session = s.open("id-1", policy=Never())
        session.cancel()
        assert ([], "cancelled") == await take(session)
        await trio.sleep(1)
    assert [
        {"event": "engine_failed_after_cancel", "log_level": "warning", "request_id": "id-1", "exc_info": fault},
    ] == other_than(logs, "request_ended")


async def test_the_last_line_of_a_request(autojump_clock: MockClock, aio_loop: Loop, logs: Lines) -> None:
    """Who, in which role, how much, how long, and why it ended."""
    async with scene(ENDLESS, role="decode") as s:
        session = s.open("id-1")
        await trio.sleep(7 / 3)
        session.cancel()
        await take(session)
        await trio.sleep(1)
    (line,) = logs
    assert {
        "event": "request_ended",
        "log_level": "debug",
        "request_id": "id-1",
        "role": "decode",
        "prompt_tokens": len(minimal_request()["token_ids"]),
        "output_tokens": 0,
        "seconds": 2.333333,
        "reason": "cancelled",
    } == line


# -- Faults of our own


async def test_a_converter_that_cannot_say_the_end_fails_its_request_alone(
    autojump_clock: MockClock, aio_loop: Loop, logs: Lines
) -> None:
    """The fault comes where another one is dealt with; the client gets an error, the ring and the others nothing."""
    fault = ZeroDivisionError("in cancelled()")

    class Broken(ResponseConverter):
        def cancelled(self) -> Any:
            raise fault

    async with scene(Script(opening=[Wait(1), Fail(OSError("gone"))]), responder=Broken) as s:
        session = s.open("id-1", policy=Never())
        session.cancel()
        error = await failure(session)
        await trio.sleep(1)
        assert {"error": 1} == s.sessions.statistics().ended
    assert ("GenerateStream: ZeroDivisionError: in cancelled()", fault) == (str(error), error.__cause__)
    assert ["engine_failed_after_cancel", "request_crashed", "request_ended"] == [line["event"] for line in logs]


async def test_a_ring_that_dies_is_a_shutdown(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """The client reads why, and the end is counted as one."""
    engine = FakeEngine(ENDLESS)
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks)
    with trio.move_on_after(1):
        async with sessions.serving(engine, lambda request, _: convert(dict(request))):
            session = sessions.open(minimal_request(), "r")
            await trio.sleep(0.5)
            with trio.CancelScope(shield=True):
                await trio.sleep(1)
                error = await failure(session)
                await trio.sleep(1)
    assert ("the worker is shutting down", {"shutdown": 1}) == (str(error), sessions.statistics().ended)
