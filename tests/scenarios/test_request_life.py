"""One request's life against a scripted engine, in virtual time (spec 10, 11)."""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import structlog
import trio

from trio_sidecar.bridge import aio_sleep, run_aio
from trio_sidecar.convert.request import ModelFacts, convert_request
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.deadline import Deadline
from trio_sidecar.errors import EngineShutdown, ErrorKind, InvalidRequest, RpcError, SidecarError, StatusCode
from trio_sidecar.requests.buffer import BufferLimit
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Gate, Script, Send, Wait, finish, tokens
from trio_sidecar.wire import FinishInfoFinishReason, GenerateRequest, GenerateResponse, PromptInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from trio_sidecar.convert.request import ConvertedRequest
    from trio_sidecar.convert.response import Chunk
    from trio_sidecar.requests.session import Session

PROMPT = [11, 22, 33]
REQUEST: dict[str, object] = {"model": "served-model", "token_ids": PROMPT}
MODEL = ModelFacts(served_model_name="served-model")


def convert(request: Mapping[str, object], request_id: str) -> ConvertedRequest:
    return convert_request(request, request_id=request_id, model=MODEL)


@attrs.define(eq=False)
class Taker:
    """A consumer that takes chunks until the end and notes what it saw and when."""

    session: Session
    pause: float = 0.0
    chunks: list[Chunk] = attrs.field(factory=list)
    error: SidecarError | None = None
    ended_at: float | None = None

    async def run(self) -> None:
        await run_aio(self._aio_run)
        self.ended_at = trio.current_time()

    async def _aio_run(self) -> None:
        try:
            while (chunk := await self.session.aio_next()) is not None:
                self.chunks.append(chunk)
                await aio_sleep(self.pause)
        except SidecarError as error:
            self.error = error

    @property
    def ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk["token_ids"]]

    @property
    def terminals(self) -> list[str]:
        return [chunk["finish_reason"] for chunk in self.chunks if "finish_reason" in chunk]

    @property
    def usage(self) -> tuple[int, int, int]:
        usage = self.chunks[-1]["completion_usage"]
        return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


@attrs.define(eq=False)
class World:
    """A scripted engine, the sessions in front of it, and the takers behind."""

    engine: FakeEngine
    sessions: Sessions
    nursery: trio.Nursery

    def open(self, request_id: str = "r", request: Mapping[str, object] = REQUEST) -> Session:
        return self.sessions.open(request, request_id)

    def take(self, session: Session, pause: float = 0.0) -> Taker:
        taker = Taker(session, pause)
        self.nursery.start_soon(taker.run)
        return taker


@asynccontextmanager
async def world(
    script: Script | Callable[[GenerateRequest], Script],
    *,
    coalesce: bool = True,
    limit: BufferLimit | None = None,
) -> AsyncIterator[World]:
    engine = FakeEngine(script)
    sessions = Sessions(
        responder=ResponseConverter, merge=merge_chunks, coalesce=coalesce, limit=limit or BufferLimit()
    )
    async with trio.open_nursery() as nursery, sessions.serving(engine, convert):
        yield World(engine, sessions, nursery)
    assert 0 == engine.open_streams
    assert 0 == sessions.statistics().open


# -- Ends by itself -------------------------------------------------------------------------------------------------


@pytest.mark.rule("R8.13", "R8.14")
@pytest.mark.parametrize("coalesce", [True, False])
async def test_whole_stream(aio_loop: object, autojump_clock: object, coalesce: bool) -> None:
    """Tokens go out as they arrive; the terminal is the last chunk, with the usage; then the engine is released."""
    steps = (Send(tokens(42)), Wait(1), Send(tokens(43), tokens(44)), Wait(1), Send(finish(45, total=4)))
    async with world(Script(stream=steps), coalesce=coalesce) as w:
        taker = w.take(w.open())
        await trio.sleep(1.5)
        assert [42, 43, 44] == taker.ids
        await trio.sleep(1)
        assert [42, 43, 44, 45] == taker.ids
        assert (3 if coalesce else 4) == len(taker.chunks)
        assert ["length"] == taker.terminals
        assert (3, 4, 7) == taker.usage
        assert w.engine.requests[0].released
        assert {"finished": 1} == w.sessions.statistics().ended


async def test_engine_is_released_before_the_terminal_is_taken(aio_loop: object, autojump_clock: object) -> None:
    """A slow consumer does not keep the engine's stream open after the engine's terminal."""
    async with world(Script(stream=(Send(tokens(1)), Send(finish(2, total=2))))) as w:
        session = w.open()
        await trio.sleep(1)
        assert w.engine.requests[0].released
        assert 1 == w.sessions.statistics().open
        taker = w.take(session)
        await trio.sleep(1)
        assert ([1, 2], 0) == (taker.ids, w.sessions.statistics().open)


@pytest.mark.rule("R10.18")
async def test_nothing_is_read_after_the_terminal(aio_loop: object, autojump_clock: object) -> None:
    """Messages after the terminal, in the same batch or later, are not read."""
    script = Script(stream=(Send(tokens(1), finish(2, total=2), tokens(3)), Send(tokens(1)), Fail(ValueError("late"))))
    async with world(script) as w:
        taker = w.take(w.open())
        await trio.sleep(1)
        assert ([1, 2], None) == (taker.ids, taker.error)
        assert 1 == w.engine.requests[0].reads


@pytest.mark.rule("R8.12", "FR-019")
async def test_engine_aborts(aio_loop: object, autojump_clock: object) -> None:
    """A terminal ABORTED that we did not ask for is a cancelled terminal, and the log warns."""
    script = Script(stream=(Send(tokens(1)), Send(finish(total=1, reason=FinishInfoFinishReason.ABORTED))))
    with structlog.testing.capture_logs() as logs:
        async with world(script) as w:
            taker = w.take(w.open())
            await trio.sleep(1)
            assert (["cancelled"], (3, 1, 4)) == (taker.terminals, taker.usage)
    assert [("engine_aborted_request", "warning")] == [
        (entry["event"], entry["log_level"]) for entry in logs if entry["log_level"] != "debug"
    ]


async def test_log_line(aio_loop: object, autojump_clock: object) -> None:
    """The end is logged once, with counts and duration and without ids or text."""
    with structlog.testing.capture_logs() as logs:
        async with world(Script(stream=(Send(tokens(42, text="secret")), Wait(2), Send(finish(43, total=2))))) as w:
            w.take(w.open("id-1"))
            await trio.sleep(3)
    assert [
        {
            "event": "request_ended",
            "log_level": "debug",
            "request_id": "id-1",
            "role": "aggregated",
            "prompt_tokens": 3,
            "output_tokens": 2,
            "seconds": 2.0,
            "reason": "finished",
        }
    ] == logs


# -- Cancelled ------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R10.1")
async def test_cancel_before_submission(aio_loop: object, autojump_clock: object) -> None:
    """A request that is cancelled before it was submitted gets one cancelled terminal, and the engine hears nothing."""
    async with world(Script()) as w:
        session = w.open()
        session.cancel()
        taker = w.take(session)
        await trio.sleep(1)
        assert (["cancelled"], (3, 0, 3)) == (taker.terminals, taker.usage)
        assert [] == w.engine.requests


@pytest.mark.rule("FR-001")
async def test_cancel_while_waiting_for_headers(aio_loop: object, autojump_clock: object) -> None:
    """A cancel acts at once while the engine has not accepted the request yet, and the call is dropped."""
    async with world(Script(opening=(Wait(100),))) as w:
        session = w.open()
        taker = w.take(session)
        await trio.sleep(0.2)
        session.cancel()
        await trio.sleep(0.1)
        assert (["cancelled"], (3, 0, 3)) == (taker.terminals, taker.usage)
        [request] = w.engine.requests
        assert (False, True) == (request.opened, request.released)


@pytest.mark.rule("FR-001", "R10.4")
async def test_cancel_between_chunks(aio_loop: object, autojump_clock: object) -> None:
    """Delivered tokens stay; the terminal counts exactly them; what the engine would answer later is not delivered."""
    script = Script(stream=(Send(tokens(42)), Send(tokens(43)), Wait(10), Send(finish(44, total=3))))
    async with world(script) as w:
        session = w.open()
        taker = w.take(session)
        await trio.sleep(1)
        session.cancel()
        session.cancel()
        await trio.sleep(0.5)
        assert w.engine.requests[0].released
        await trio.sleep(20)
        assert ([42, 43], ["cancelled"], (3, 2, 5)) == (taker.ids, taker.terminals, taker.usage)


@pytest.mark.rule("FR-011")
@pytest.mark.parametrize("coalesce", [True, False])
async def test_cancel_drops_what_was_not_taken(aio_loop: object, autojump_clock: object, coalesce: bool) -> None:
    """With a consumer that does not read, a cancel drops all that waits and the usage counts only what was taken."""
    script = Script(stream=(Send(tokens(1)), Wait(1), *(Send(tokens(i)) for i in range(500)), Wait(100)))
    async with world(script, coalesce=coalesce) as w:
        session = w.open()
        taker = w.take(session, pause=10)
        await trio.sleep(5)
        session.cancel()
        await trio.sleep(0.5)
        assert w.engine.requests[0].released
        await trio.sleep(20)
        assert ([1], ["cancelled"], (3, 1, 4)) == (taker.ids, taker.terminals, taker.usage)
        assert 2 == len(taker.chunks)


@pytest.mark.rule("R10.2")
async def test_cancel_beats_an_untaken_terminal(aio_loop: object, autojump_clock: object) -> None:
    """A terminal that the consumer has not taken when the cancel comes is replaced: there is only one."""
    async with world(Script(stream=(Send(finish(1, 2)),))) as w:
        session = w.open()
        await trio.sleep(1)
        session.cancel()
        taker = w.take(session)
        await trio.sleep(1)
        assert ([], ["cancelled"], (3, 0, 3)) == (taker.ids, taker.terminals, taker.usage)


async def test_cancel_after_the_terminal(aio_loop: object, autojump_clock: object) -> None:
    """After the terminal was taken a cancel has no effect; there is exactly one terminal ever."""
    async with world(Script(stream=(Send(finish(1)),))) as w:
        session = w.open()
        taker = w.take(session)
        await trio.sleep(1)
        session.cancel()
        session.close()
        assert None is await run_aio(session.aio_next)
        assert ["length"] == taker.terminals
        assert {"finished": 1} == w.sessions.statistics().ended


async def test_cancel_in_the_step_that_takes_the_terminal(aio_loop: object, autojump_clock: object) -> None:
    """A cancel right after the terminal was taken, before anything else ran, changes nothing, in the books either."""
    async with world(Script(stream=(Send(finish(1)),))) as w:

        async def aio_face() -> Chunk | None:
            session = w.open()
            chunk = await session.aio_next()
            session.cancel()
            session.close()
            assert chunk is not None
            assert "length" == chunk["finish_reason"]
            return await session.aio_next()

        assert None is await run_aio(aio_face)
        await trio.sleep(1)
        assert {"finished": 1} == w.sessions.statistics().ended


async def test_cancel_from_asyncio(aio_loop: object, autojump_clock: object) -> None:
    """Sessions are opened, cancelled and closed from asyncio code just as well."""
    async with world(Script(stream=(Send(tokens(1)), Wait(100)))) as w:

        async def aio_face() -> list[str | None]:
            session = w.open()
            first = await session.aio_next()
            session.cancel()
            second = await session.aio_next()
            assert first is not None
            assert second is not None
            return [first.get("finish_reason"), second.get("finish_reason")]

        assert [None, "cancelled"] == await run_aio(aio_face)


async def test_cancel_does_not_wait_for_a_slow_release(aio_loop: object, autojump_clock: object) -> None:
    """The consumer has its terminal at once, even if the engine takes long to let go."""
    async with world(Script(stream=(Wait(100),), closing=(Wait(4),))) as w:
        session = w.open()
        taker = w.take(session)
        await trio.sleep(1)
        cancelled_at = trio.current_time()
        session.cancel()
        await trio.sleep(0.5)
        assert (["cancelled"], cancelled_at) == (taker.terminals, taker.ended_at)


async def test_engine_that_does_not_let_go(aio_loop: object, autojump_clock: object) -> None:
    """An engine whose release hangs delays the end of the ring by a few seconds, not for ever, and the log tells."""
    with structlog.testing.capture_logs() as logs:
        async with world(Script(stream=(Wait(100),), closing=(Wait(1000),))) as w:
            taker = w.take(w.open())
            await trio.sleep(1)
            w.sessions.cancel_all()
            start = trio.current_time()
            await trio.sleep(0.1)
            assert ["cancelled"] == taker.terminals
            while w.sessions.statistics().open:  # noqa: ASYNC110
                await trio.sleep(1)
            assert trio.current_time() - start < 10
            w.engine.requests[0].released = True  # the cut kept the script from saying so
    assert 1 == sum(entry["event"] == "aio_cleanup_too_slow" for entry in logs)


@pytest.mark.rule("R10.3")
async def test_cancelling_one_leaves_the_other(aio_loop: object, autojump_clock: object) -> None:
    """A is cancelled after two tokens; B, waiting meanwhile, ends by itself with its five."""
    gate = Gate()
    scripts = {
        "a": Script(stream=(Send(tokens(1)), Wait(1), Send(tokens(2)), Wait(100))),
        "b": Script(stream=(gate, *(Send(tokens(i)) for i in range(4)), Send(finish(4, total=5)))),
    }
    async with world(lambda request: scripts[request.request_id]) as w:
        a, b = w.open("a"), w.open("b", {**REQUEST, "token_ids": [1, 2, 3, 4, 5]})
        take_a, take_b = w.take(a), w.take(b)
        await trio.sleep(2)
        a.cancel()
        await trio.sleep(1)
        assert ([1, 2], ["cancelled"], (3, 2, 5)) == (take_a.ids, take_a.terminals, take_a.usage)
        assert [] == take_b.chunks
        gate.open()
        await trio.sleep(1)
        assert ([0, 1, 2, 3, 4], ["length"], (5, 5, 10)) == (take_b.ids, take_b.terminals, take_b.usage)


@pytest.mark.rule("R10.1", "R10.17")
async def test_invalid_request_is_refused_at_once(aio_loop: object, autojump_clock: object) -> None:
    """A request that cannot be expressed raises when it is opened, and nothing is submitted; the next one is served."""
    async with world(Script(stream=(Send(finish(1)),))) as w:
        with pytest.raises(InvalidRequest):
            w.open("bad", {**REQUEST, "sampling_options": {"n": 2}})
        taker = w.take(w.open("good"))
        await trio.sleep(1)
        assert (["length"], 1) == (taker.terminals, len(w.engine.requests))


# -- Consumer gone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "aclose", "break", "cancelled"])
async def test_consumer_goes(aio_loop: object, autojump_clock: object, how: str) -> None:
    """However the consumer goes, it returns at once, there is no terminal, and the engine is released within 0.5 s."""
    async with world(Script(stream=(Send(tokens(1)), Send(tokens(2)), Wait(100)), closing=(Wait(0.4),))) as w:

        async def aio_face() -> None:
            session = w.open()
            chunks = session.aio_chunks()
            await anext(chunks)
            if how == "close":
                session.close()
                assert None is await anext(chunks, None)
            elif how == "aclose":
                await chunks.aclose()  # type: ignore[attr-defined]
            elif how == "break":
                del chunks
                gc.collect()
            else:
                await anext(chunks)
                await anext(chunks)

        start = trio.current_time()
        with trio.move_on_after(0.05 if how == "cancelled" else 10):
            await run_aio(aio_face)
        assert trio.current_time() - start < 0.1
        await trio.sleep(0.45)
        assert 0 == w.engine.open_streams
        assert {"consumer_gone": 1} == w.sessions.statistics().ended


async def test_consumer_goes_with_a_full_buffer(aio_loop: object, autojump_clock: object) -> None:
    """A pump that waits for room is released when the consumer goes."""
    script = Script(stream=tuple(Send(tokens(i)) for i in range(100)))
    async with world(script, limit=BufferLimit(max_tokens=4)) as w:
        session = w.open()
        await trio.sleep(1)
        assert 1 == w.engine.open_streams
        session.close()
        await trio.sleep(0.1)
        assert 0 == w.engine.open_streams


# -- Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R10.16")
@pytest.mark.parametrize("code", [StatusCode.UNAVAILABLE, StatusCode.INVALID_ARGUMENT, StatusCode.CANCELLED])
async def test_error_at_open(aio_loop: object, autojump_clock: object, code: StatusCode) -> None:
    """A refusal is the request's one error, with the status's kind and the call's name."""
    async with world(Script(opening=(Fail(RpcError(code, "no")),))) as w:
        taker = w.take(w.open())
        await trio.sleep(1)
        assert [] == taker.chunks
        assert isinstance(taker.error, RpcError)
        assert (code.kind, code) == (taker.error.kind, taker.error.status)
        assert "GenerateStream" in str(taker.error)
        assert {"error": 1} == w.sessions.statistics().ended


@pytest.mark.rule("R10.16", "R10.19")
@pytest.mark.parametrize("coalesce", [True, False])
async def test_error_in_mid_stream_keeps_the_prefix(aio_loop: object, autojump_clock: object, coalesce: bool) -> None:
    """Tokens that arrived before an error are delivered before it; there is no terminal beside the error."""
    script = Script(stream=(Send(tokens(1), tokens(2)), Fail(RpcError(StatusCode.UNAVAILABLE, "gone"))))
    async with world(script, coalesce=coalesce) as w:
        taker = w.take(w.open())
        await trio.sleep(1)
        assert ([1, 2], []) == (taker.ids, taker.terminals)
        assert isinstance(taker.error, RpcError)
        assert ErrorKind.CANNOT_CONNECT is taker.error.kind


@pytest.mark.rule("R10.15")
async def test_end_without_terminal(aio_loop: object, autojump_clock: object) -> None:
    """A stream that just ends is an error of kind Unknown that names the missing terminal."""
    async with world(Script(stream=(Send(tokens(1)),))) as w:
        taker = w.take(w.open())
        await trio.sleep(1)
        assert [1] == taker.ids
        assert taker.error is not None
        assert ErrorKind.UNKNOWN is taker.error.kind
        assert "terminal" in str(taker.error)


@pytest.mark.rule("R10.17")
async def test_malformed_message(aio_loop: object, autojump_clock: object) -> None:
    """A message that contradicts the request ends this request with that error; the next one is served."""
    wrong = GenerateResponse(prompt_info=PromptInfo(num_prompt_tokens=99))
    scripts = iter([Script(stream=(Send(tokens(1), wrong, tokens(2)), Wait(100))), Script(stream=(Send(finish(1)),))])
    async with world(lambda _: next(scripts)) as w:
        bad = w.take(w.open())
        await trio.sleep(1)
        assert [1] == bad.ids
        assert "invalid gRPC response" in str(bad.error)
        assert 0 == w.engine.open_streams
        good = w.take(w.open())
        await trio.sleep(1)
        assert ["length"] == good.terminals


async def test_a_bug_stays_in_its_request(aio_loop: object, autojump_clock: object) -> None:
    """An exception that nobody foresaw becomes one error of its request and is logged; others go on."""
    scripts = {
        "bad": Script(stream=(Fail(ZeroDivisionError("bug")),)),
        "good": Script(stream=(Wait(2), Send(finish(1)))),
    }
    with structlog.testing.capture_logs() as logs:
        async with world(lambda request: scripts[request.request_id]) as w:
            bad, good = w.take(w.open("bad")), w.take(w.open("good"))
            await trio.sleep(5)
            assert isinstance(bad.error, SidecarError)
            assert ErrorKind.UNKNOWN is bad.error.kind
            assert isinstance(bad.error.__cause__, ZeroDivisionError)
            assert ["length"] == good.terminals
    assert 1 == sum(entry["event"] == "request_crashed" for entry in logs)


async def test_error_while_releasing_after_cancel(aio_loop: object, autojump_clock: object) -> None:
    """An engine that fails to let go after a cancel disturbs neither the terminal nor the ring."""
    async with world(Script(stream=(Send(tokens(1)), Wait(100)), closing=(Fail(OSError("broken")),))) as w:
        session = w.open()
        taker = w.take(session)
        await trio.sleep(1)
        session.cancel()
        await trio.sleep(1)
        assert (["cancelled"], None) == (taker.terminals, taker.error)
        w.engine.requests[0].released = True  # the script's failure kept it from saying so


# -- Backpressure ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coalesce", [True, False])
async def test_backpressure(aio_loop: object, autojump_clock: object, coalesce: bool) -> None:
    """While the consumer does not read, the engine's stream is not read either, beyond the buffer's bound."""
    script = Script(stream=(*(Send(tokens(i)) for i in range(200)), Send(finish(200, total=201))))
    async with world(script, coalesce=coalesce, limit=BufferLimit(max_tokens=8)) as w:
        session = w.open()
        await trio.sleep(100)
        assert 9 == w.engine.requests[0].reads
        taker = w.take(session)
        await trio.sleep(1)
        assert list(range(201)) == taker.ids
        assert session.statistics().peak_tokens <= 8


async def test_slow_consumer_gets_merged_chunks(aio_loop: object, autojump_clock: object) -> None:
    """A consumer slower than the engine gets fewer, larger chunks; a fast one gets one per token."""
    steps = [step for i in range(20) for step in (Send(tokens(i)), Wait(1.0))]
    async with world(Script(stream=(*steps, Send(finish(20, total=21))))) as w:
        slow, fast = w.take(w.open(), pause=4.5), w.take(w.open())
        await trio.sleep(60)
        assert list(range(21)) == slow.ids == fast.ids
        assert 21 == len(fast.chunks)
        assert 6 == len(slow.chunks)


# -- Start, drain, stop ---------------------------------------------------------------------------------------------


@pytest.mark.rule("R11.2")
async def test_before_start(aio_loop: object) -> None:
    """Before the worker has started a request is refused with EngineShutdown; cancelling all is harmless, twice."""
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks)
    with pytest.raises(EngineShutdown, match="not started"):
        sessions.open(REQUEST, "r")
    sessions.cancel_all()
    sessions.cancel_all()
    await trio.lowlevel.checkpoint()


@pytest.mark.rule("R11.4", "R10.1")
async def test_after_stop(aio_loop: object, autojump_clock: object) -> None:
    """After the worker has stopped a valid request gets one cancelled terminal and an invalid one its error."""
    async with world(Script(stream=(Send(finish(1)),))) as w:
        pass
    async with trio.open_nursery() as nursery:
        taker = Taker(w.open())
        nursery.start_soon(taker.run)
    assert (["cancelled"], (3, 0, 3)) == (taker.terminals, taker.usage)
    assert [] == w.engine.requests
    with pytest.raises(InvalidRequest):
        w.open("bad", {**REQUEST, "sampling_options": {"n": 2}})
    with pytest.raises(EngineShutdown, match="already"):
        async with w.sessions.serving(w.engine, convert):
            pass


@pytest.mark.rule("R11.3", "R11.1")
async def test_stop_during_a_read(aio_loop: object, autojump_clock: object) -> None:
    """Stopping during a read gives the cancelled terminal with the tokens so far and drops the engine's stream."""
    async with trio.open_nursery() as nursery, world(Script(stream=(Send(tokens(1, 2)), Wait(100)))) as w:
        taker = Taker(w.open())
        nursery.start_soon(taker.run)
        await trio.sleep(1)
        w.sessions.cancel_all()
        w.sessions.cancel_all()
    assert ([1, 2], ["cancelled"], (3, 2, 5)) == (taker.ids, taker.terminals, taker.usage)


async def test_drain(aio_loop: object, autojump_clock: object) -> None:
    """Requests of 1 s and 5 s end by themselves; one of 100 s is ended at the deadline with an error."""

    def script(request: GenerateRequest) -> Script:
        return Script(stream=(Send(tokens(1)), Wait(float(request.request_id)), Send(finish(2, total=2))))

    async with world(script) as w:
        takers = [w.take(w.open(seconds)) for seconds in ("1", "5", "100")]
        await trio.sleep(0.5)
        start = trio.current_time()
        assert 1 == await w.sessions.drain(Deadline.after(10))
        assert pytest.approx(10) == trio.current_time() - start
        await trio.sleep(0.1)
        assert [["length"], ["length"], []] == [taker.terminals for taker in takers]
        assert [1] == takers[2].ids
        assert isinstance(takers[2].error, EngineShutdown)
        assert "draining" in str(takers[2].error)
        assert 0 == w.engine.open_streams
        assert {"finished": 2, "shutdown": 1} == w.sessions.statistics().ended


async def test_drain_of_nothing(aio_loop: object, autojump_clock: object) -> None:
    """Draining returns at once when nothing is open, and as soon as the last request has ended."""
    async with world(Script(stream=(Wait(3), Send(finish(1))))) as w:
        start = trio.current_time()
        assert 0 == await w.sessions.drain(Deadline.after(10))
        assert start == trio.current_time()
        taker = w.take(w.open())
        assert 0 == await w.sessions.drain(Deadline.after(10))
        assert pytest.approx(3) == trio.current_time() - start
        assert ["length"] == taker.terminals


async def test_drain_waits_for_the_consumer(aio_loop: object, autojump_clock: object) -> None:
    """A request whose terminal has not been taken yet is still open for the drain, and is not cut by its deadline."""
    async with world(Script(stream=(Send(tokens(1)), Wait(1), Send(tokens(2)), Send(finish(3, total=3))))) as w:
        taker = w.take(w.open(), pause=6)
        assert 0 == await w.sessions.drain(Deadline.after(10))
        assert ([1, 2, 3], ["length"]) == (taker.ids, taker.terminals)
        late = w.open()
        await trio.sleep(5)
        assert 1 == await w.sessions.drain(Deadline.after(10))
        taker = w.take(late)
        await trio.sleep(1)
        assert ([1, 2, 3], ["length"]) == (taker.ids, taker.terminals)


async def test_dying_ring(aio_loop: object, autojump_clock: object) -> None:
    """If the ring is cancelled from outside, no request ends as if all were well, as a cancelled terminal would say."""
    engine = FakeEngine(Script(stream=(Send(tokens(1)), Wait(100))))
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks)
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(1):
            async with sessions.serving(engine, convert):
                taker = Taker(sessions.open(REQUEST, "r"))
                nursery.start_soon(taker.run)
                await trio.sleep_forever()
    assert ([1], []) == (taker.ids, taker.terminals)
    assert isinstance(taker.error, EngineShutdown)
    with pytest.raises(EngineShutdown, match="the engine is gone"):
        sessions.open(REQUEST, "late")
    assert 0 == engine.open_streams


async def test_ring_cancelled_under_an_open_block(aio_loop: object, autojump_clock: object) -> None:
    """If the ring is cancelled while its block still runs, requests end with an EngineShutdown error."""
    engine = FakeEngine(Script(stream=(Send(tokens(1)), Wait(100))))
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks)
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(1):
            async with sessions.serving(engine, convert):
                taker = Taker(sessions.open(REQUEST, "r"))
                nursery.start_soon(taker.run)
                with trio.move_on_after(5, shield=True):
                    await trio.sleep_forever()
    assert ([1], []) == (taker.ids, taker.terminals)
    assert isinstance(taker.error, EngineShutdown)
    assert 0 == engine.open_streams


# -- A cancel that has to wait --------------------------------------------------------------------------------------


class AfterFirstToken:
    """A policy as decode workers need it: the engine must have answered once."""

    def __init__(self) -> None:
        self.seen = False

    def ready(self) -> bool:
        return self.seen

    def observe(self, response: GenerateResponse) -> None:
        self.seen = self.seen or response.outputs is not None


async def test_policy_holds_a_cancel_back(aio_loop: object, autojump_clock: object) -> None:
    """A cancel waits until the policy lets it act; then the answer that allowed it is not delivered."""
    async with world(Script(opening=(Wait(1),), stream=(Wait(1), Send(tokens(1)), Wait(100)))) as w:
        session = w.sessions.open(REQUEST, "r", policy=AfterFirstToken())
        taker = w.take(session)
        session.cancel()
        await trio.sleep(1.5)
        assert [] == taker.chunks
        assert w.engine.requests[0].opened
        await trio.sleep(1)
        assert ([], ["cancelled"], (3, 1, 4)) == (taker.ids, taker.terminals, taker.usage)
        assert w.engine.requests[0].released


@pytest.mark.rule("R10.10")
async def test_error_while_a_cancel_is_held_back(aio_loop: object, autojump_clock: object) -> None:
    """An engine that fails while a cancel waits gives the cancelled terminal, and a warning instead of an error."""
    with structlog.testing.capture_logs() as logs:
        async with world(Script(opening=(Wait(1), Fail(RpcError(StatusCode.UNAVAILABLE, "gone"))))) as w:
            session = w.sessions.open(REQUEST, "r", policy=AfterFirstToken())
            taker = w.take(session)
            session.cancel()
            await trio.sleep(2)
            assert (["cancelled"], None) == (taker.terminals, taker.error)
    assert ["engine_failed_after_cancel"] == [entry["event"] for entry in logs if entry["log_level"] == "warning"]


@pytest.mark.rule("R10.12")
async def test_stop_does_not_ask_the_policy(aio_loop: object, autojump_clock: object) -> None:
    """Stopping the worker interrupts a request whose policy still holds cancels back."""
    async with world(Script(opening=(Wait(100),))) as w:
        session = w.sessions.open(REQUEST, "r", policy=AfterFirstToken())
        taker = w.take(session)
        await trio.sleep(1)
        w.sessions.cancel_all()
        await trio.sleep(0.1)
        assert ["cancelled"] == taker.terminals
        assert w.engine.requests[0].released


# -- Leaks ----------------------------------------------------------------------------------------------------------


@pytest.mark.rule("FR-010", "FR-005")
async def test_a_thousand_cancels_leave_nothing(aio_loop: object, autojump_clock: object) -> None:
    """A thousand requests, ended in every way at every stage, leave no task, no stream and no open session."""

    async def aio_tasks() -> int:
        await aio_sleep(0)
        return len(asyncio.all_tasks())

    stream = (Send(tokens(1)), Wait(1), Send(tokens(2)), Wait(1), Send(finish(3, total=3)))
    script = Script(opening=(Wait(1),), stream=stream)
    async with world(script) as w:
        trio_tasks = trio.lowlevel.current_statistics().tasks_living
        asyncio_tasks = await run_aio(aio_tasks)

        async def one(number: int) -> None:
            session = w.open(str(number))
            if number % 3:
                w.take(session)
            await trio.sleep((number % 40) * 0.1)
            if number % 2:
                session.cancel()
            else:
                session.close()

        async with trio.open_nursery() as nursery:
            for number in range(1000):
                nursery.start_soon(one, number)
        for _ in range(2):
            # Those that were cancelled and that nobody takes from have no consumer to wait for.
            w.sessions.cancel_all()
            await trio.sleep(5)
        assert 1000 == sum(w.sessions.statistics().ended.values())
        assert 0 == w.engine.open_streams
        assert trio_tasks == trio.lowlevel.current_statistics().tasks_living
        assert asyncio_tasks == await run_aio(aio_tasks)
