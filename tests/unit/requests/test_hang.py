"""When an engine is suspected to hang, and what it is asked then; in virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from support.conversion import convert
from support.samples import minimal_request
from trio_sidecar.bridge import run_aio
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.errors import ConnectionTimeoutError, EngineShutdown, RpcError, StatusCode
from trio_sidecar.requests.hang import HangCheck
from trio_sidecar.requests.limits import SilenceLimits
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Script, Send, Wait, finish, tokens
from trio_sidecar.wire import GenerateRequest, KvCacheParameters, StoppingCriteria, TokenIds

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    Loop = asyncio.AbstractEventLoop
    Lines = list[dict[str, Any]]

SILENT_SECS = 20.0
WHOLE = Script(stream=[Send(finish(1))])


@attrs.define(eq=False)
class Scene:
    """A check, with its engine and sessions."""

    check: HangCheck
    engine: FakeEngine
    sessions: Sessions

    async def take(self) -> None:
        """Make a request and take all of it."""
        session = self.sessions.open(minimal_request(), "r")
        while await run_aio(session.aio_next) is not None:
            pass


@asynccontextmanager
async def scene(script: Script, **more: Any) -> AsyncIterator[Scene]:
    engine = FakeEngine(script)
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks, **more)
    check = HangCheck(aio_generate=engine.aio_generate, sessions=sessions, model="served", silent_secs=SILENT_SECS)
    async with sessions.serving(engine, lambda request, _: convert(dict(request))):
        yield Scene(check, engine, sessions)


# -- Suspicion


async def test_nobody_waits_so_nobody_suspects(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Neither before the first request nor long after it."""
    async with scene(WHOLE) as s:
        assert not s.check.suspects()
        await s.take()
        await trio.sleep(1000)
        assert not s.check.suspects()


@pytest.mark.rule("FR-017")
async def test_a_wait_that_is_too_long_is_suspicious(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """From its own beginning on; not if another request has heard from the engine meanwhile, or somebody else has."""
    async with scene(Script(opening=[Wait(10_000)])) as s:
        s.sessions.open(minimal_request(), "1")
        await trio.sleep(19.9)
        assert not s.check.suspects()
        s.sessions.open(minimal_request(), "2")
        await trio.sleep(0.2)
        assert s.check.suspects()
        s.engine.script = Script(stream=[Send(tokens(1)), Wait(10_000)])
        s.sessions.open(minimal_request(), "3")
        await trio.sleep(19.9)
        assert not s.check.suspects()
        await trio.sleep(0.2)
        assert s.check.suspects()
        s.sessions.note_heard()
        await trio.sleep(19.9)
        assert not s.check.suspects()
        await trio.sleep(0.2)
        assert s.check.suspects()


@pytest.mark.rule("FR-017")
async def test_a_limit_that_was_reached_is_suspicious(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Though nobody waits any more; until somebody hears from the engine."""
    async with scene(
        Script(opening=[Wait(10_000)]), silence=SilenceLimits(first_response_secs=1.0, idle_secs=1.0)
    ) as s:
        with pytest.raises(ConnectionTimeoutError):
            await s.take()
        assert s.check.suspects()
        s.engine.script = WHOLE
        await s.take()
        assert not s.check.suspects()


# -- The question


async def test_one_token_is_asked_for(autojump_clock: MockClock, aio_loop: Loop, logs: Lines) -> None:
    """Greedy, and of a prompt that no cache knows; an answer in time clears the engine."""
    async with scene(Script(stream=[Wait(19.9), Send(finish(1)), Wait(10_000)])) as s:
        s.sessions.open(minimal_request(), "r")
        assert await s.check.answers()
        assert not s.check.suspects()
        request = s.engine.requests[0].request
        name = request.request_id
        assert name.startswith("trio-sidecar-probe-")
        assert 16 == len(name.removeprefix("trio-sidecar-probe-"))
        assert (
            GenerateRequest(
                request_id=name,
                model="served",
                token_ids=TokenIds(ids=[0]),
                temperature=0.0,
                stopping=StoppingCriteria(max_new_tokens=1, min_new_tokens=1, ignore_eos=True),
                kv=KvCacheParameters(cache_salt=name),
            )
            == request
        )
        assert ({}, True) == (s.engine.requests[0].metadata, s.engine.requests[0].released)
        assert [{"event": "engine_probed", "log_level": "info", "silent_secs": 20.0}] == logs


async def test_an_engine_that_does_not_answer(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Is left after the same time, and stays suspected."""
    async with scene(Script(stream=[Wait(10_000)])) as s:
        s.sessions.open(minimal_request(), "r")
        started_at = trio.current_time()
        assert not await s.check.answers()
        assert pytest.approx(20.0, abs=0.01) == trio.current_time() - started_at
        assert s.check.suspects()


async def test_a_refusal_is_an_answer(autojump_clock: MockClock, aio_loop: Loop, logs: Lines) -> None:
    """It is noted, because nobody else will read it."""
    async with scene(Script(opening=[Fail(RpcError(StatusCode.INVALID_ARGUMENT, "no", rpc="GenerateStream"))])) as s:
        assert await s.check.answers()
    assert [
        {"event": "engine_probed", "log_level": "info", "silent_secs": 20.0},
        {
            "event": "engine_refused_probe",
            "log_level": "warning",
            "reason": "GenerateStream: no (InvalidArgument)",
        },
    ] == logs


@pytest.mark.parametrize("status", [StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.DEADLINE_EXCEEDED])
async def test_an_engine_that_cannot_be_asked(autojump_clock: MockClock, aio_loop: Loop, status: StatusCode) -> None:
    """Is somebody else's to deal with."""
    fault = RpcError(status, "gone")
    async with scene(Script(opening=[Fail(fault)])) as s:
        with pytest.raises(RpcError) as caught:
            await s.check.answers()
        assert fault is caught.value


# -- A block that fails


@pytest.mark.rule("FR-018")
async def test_an_engine_that_is_gone_ends_requests_with_an_error(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Those that are open, and those that still come."""
    with pytest.RaisesGroup(LookupError):
        async with scene(Script(opening=[Wait(10_000)])) as s:
            session = s.sessions.open(minimal_request(), "r")
            await trio.sleep(1)
            reason = "gone"
            raise LookupError(reason)
    with pytest.raises(EngineShutdown) as caught:
        await run_aio(session.aio_next)
    assert "the engine is gone, and the worker ends" == str(caught.value)
    with pytest.raises(EngineShutdown) as late:
        s.sessions.open(minimal_request(), "late")
    assert "the engine is gone, and the worker ends" == str(late.value)
