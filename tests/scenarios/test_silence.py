"""An engine that is silent for too long, and a worker that has enough to do."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from support.conversion import convert
from support.samples import minimal_request
from trio_sidecar.bridge import run_aio
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.errors import ConnectionTimeoutError, ErrorKind, Overloaded, SidecarError
from trio_sidecar.requests.contract import CancelAtOnce
from trio_sidecar.requests.limits import SilenceLimits
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import FakeEngine, Gate, Script, Send, Wait, finish, tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from trio_sidecar.requests.session import Session

LIMITS = SilenceLimits(first_response_secs=10.0, idle_secs=4.0)


@asynccontextmanager
async def serving(script: Script, **options: Any) -> AsyncIterator[tuple[FakeEngine, Sessions]]:
    """Sessions over an engine that plays a script."""
    engine = FakeEngine(script)
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks, **{"silence": LIMITS, **options})

    def converted(request: Mapping[str, object], _: str) -> Any:
        return convert(dict(request))

    async with sessions.serving(engine, converted):
        yield engine, sessions
    assert 0 == engine.open_streams


async def take_all(session: Session, pause: float = 0.0) -> tuple[list[int], SidecarError | None, float]:
    """The tokens, the error that ended them, and how long it took; with a pause before each further chunk."""
    ids: list[int] = []
    begun = trio.current_time()
    try:
        while (chunk := await run_aio(session.aio_next)) is not None:
            ids += chunk["token_ids"]
            await trio.sleep(pause)
    except SidecarError as error:
        return ids, error, trio.current_time() - begun
    return ids, None, trio.current_time() - begun


@pytest.mark.rule("FR-017", "FR-022")
@pytest.mark.parametrize("before", ["opening", "stream"])
async def test_no_first_response(aio_loop: object, autojump_clock: object, before: str) -> None:
    """An engine that takes a request, or not even that, and says nothing fails it with a typed error at the limit."""
    script = Script(**{before: [Gate()]})
    async with serving(script) as (engine, sessions):
        ids, error, took = await take_all(sessions.open(minimal_request(), "r"))
        assert isinstance(error, ConnectionTimeoutError)
        assert ErrorKind.CONNECTION_TIMEOUT is error.kind
        assert "GenerateStream: the engine has sent no first response for 10 s" == str(error)
        assert [] == ids
        assert 10.0 == pytest.approx(took, abs=0.01)
        await trio.testing.wait_all_tasks_blocked()
        assert engine.requests[0].released
        assert {"timeout": 1} == sessions.statistics().ended


async def test_silence_between_messages(aio_loop: object, autojump_clock: object) -> None:
    """What arrived is delivered, then the error comes; messages that come in time postpone it."""
    script = Script(stream=[Wait(9.5), Send(tokens(1)), Wait(3.5), Send(tokens(2)), Wait(3.5), Send(tokens(3)), Gate()])
    async with serving(script) as (engine, sessions):
        ids, error, took = await take_all(sessions.open(minimal_request(), "r"))
        assert [1, 2, 3] == ids
        assert "GenerateStream: the engine has sent no further message for 4 s" == str(error)
        assert 16.5 + 4 == pytest.approx(took, abs=0.01)
        await trio.testing.wait_all_tasks_blocked()
        assert engine.requests[0].released


async def test_a_client_that_does_not_read_is_no_silence_of_the_engine(
    aio_loop: object, autojump_clock: object
) -> None:
    """The engine is not asked for more while the buffer is full, so nothing can be held against it."""
    from trio_sidecar.requests.buffer import BufferLimit  # noqa: PLC0415

    steps = [Send(tokens(each)) for each in range(1, 6)]
    script = Script(stream=[*steps, Send(finish(6, total=6))])
    async with serving(script, coalesce=False, limit=BufferLimit(max_chunks=1)) as (_, sessions):
        ids, error, took = await take_all(sessions.open(minimal_request(), "r"), pause=20.0)
    assert ([1, 2, 3, 4, 5, 6], None) == (ids, error)
    assert took > 100


@pytest.mark.parametrize("limits", [SilenceLimits(), SilenceLimits(first_response_secs=5.0)])
async def test_no_limit(aio_loop: object, autojump_clock: object, limits: SilenceLimits) -> None:
    """0 waits for as long as the engine wants."""
    script = Script(stream=[Send(tokens(1)), Wait(1e6), Send(finish(2, total=2))])
    async with serving(script, silence=limits) as (_, sessions):
        ids, error, _ = await take_all(sessions.open(minimal_request(), "r"))
    assert ([1, 2], None) == (ids, error)


async def test_a_cancel_that_waits_for_a_silent_engine(aio_loop: object, autojump_clock: object) -> None:
    """Who has cancelled and waits for the engine's first token gets the cancelled terminal, not an error."""

    class Later(CancelAtOnce):
        """A cancel that may never act by itself."""

        def ready(self) -> bool:
            """Not yet."""
            return False

    async with serving(Script(stream=[Gate()])) as (engine, sessions):
        session = sessions.open(minimal_request(), "r", policy=Later())
        session.cancel()
        chunk = await run_aio(session.aio_next)
        assert chunk is not None
        assert "cancelled" == chunk["finish_reason"]
        assert None is await run_aio(session.aio_next)
        await trio.testing.wait_all_tasks_blocked()
        assert engine.requests[0].released


async def test_too_many_requests_are_refused_until_one_has_ended(aio_loop: object, autojump_clock: object) -> None:
    """One more than allowed is refused with the limit and the flag; when one ends, the next is taken."""
    gate = Gate()
    async with serving(Script(stream=[gate, Send(finish(1, total=1))]), max_open=2) as (engine, sessions):
        open_ = [sessions.open(minimal_request(), f"r{each}") for each in range(2)]
        with pytest.raises(Overloaded, match=r"2 requests open, as many as --max-inflight-requests allows") as caught:
            sessions.open(minimal_request(), "r2")
        assert (ErrorKind.CANNOT_CONNECT, True) == (caught.value.kind, caught.value.retryable)
        await trio.testing.wait_all_tasks_blocked()
        assert 2 == len(engine.requests)
        gate.open()
        for session in open_:
            assert [1] == (await take_all(session))[0]
        await trio.testing.wait_all_tasks_blocked()
        assert [1] == (await take_all(sessions.open(minimal_request(), "r3")))[0]
        assert (1, 2) == (sessions.statistics().refused, sessions.statistics().peak_open)
