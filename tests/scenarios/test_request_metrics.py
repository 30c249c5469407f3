"""What is counted of requests, in virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from support.conversion import convert
from support.samples import minimal_request
from trio_sidecar.bridge import run_aio
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.errors import EngineShutdown, InvalidRequest, Overloaded, RpcError, StatusCode
from trio_sidecar.metrics.families import END_REASONS
from trio_sidecar.requests.limits import SilenceLimits
from trio_sidecar.requests.session import EndReason
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Gate, Script, Send, Wait, finish, tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from trio_sidecar.requests.session import Session
    from trio_sidecar.testing.fake_engine import Step

LOST = RpcError(StatusCode.UNAVAILABLE, "lost")


def new_sessions(**options: Any) -> Sessions:
    """Sessions that nobody serves yet."""
    return Sessions(responder=ResponseConverter, merge=merge_chunks, **options)


@asynccontextmanager
async def serving(script: Script, **options: Any) -> AsyncIterator[Sessions]:
    """Sessions over an engine that plays a script."""

    def converted(request: Mapping[str, object], _: str) -> Any:
        return convert(dict(request))

    sessions = new_sessions(**options)
    async with sessions.serving(FakeEngine(script), converted):
        yield sessions


async def drain(session: Session) -> None:
    """Take everything."""

    async def aio_take() -> None:
        async for _ in session.aio_chunks():
            pass

    await run_aio(aio_take)
    await trio.testing.wait_all_tasks_blocked()


def test_the_reasons_are_those_of_sessions() -> None:
    """The table of metrics knows every way a request can end."""
    assert {reason.value for reason in EndReason} == set(END_REASONS)


async def test_times_and_tokens(aio_loop: object, autojump_clock: object) -> None:
    """Accepted at 0, first message at 1, first token at 2, another at 2.5, two more at 4.5 with the end."""
    first: list[Step] = [Wait(0.5), Send(tokens()), Wait(1), Send(tokens(7))]
    last: list[Step] = [Wait(2), Send(finish(1, 2, total=4))]
    script = Script(opening=[Wait(0.5)], stream=[*first, Wait(0.5), Send(tokens(8)), *last])
    async with serving(script, coalesce=False) as sessions:
        await drain(sessions.open(minimal_request(), "r"))
        meter = sessions.meter
    assert (1, 3, 4, 3) == (meter.accepted, meter.prompt_tokens, meter.output_tokens, meter.chunks)
    times = [meter.first_response, meter.first_token, meter.inter_token, meter.duration]
    assert [1, 1, 3, 1] == [sum(histogram.counts) for histogram in times]
    assert [1.0, 2.0, 2.5, 4.5] == [pytest.approx(histogram.sum, abs=0.01) for histogram in times]
    assert {"finished": 1} == {reason: count for reason, count in meter.ended.items() if count}


@pytest.mark.parametrize(
    ("reason", "script"),
    [
        ("finished", Script(stream=[Send(finish(1))])),
        ("error", Script(stream=[Fail(LOST)])),
        ("error", Script(opening=[Fail(LOST)])),
        ("timeout", Script(stream=[Gate()])),
    ],
)
async def test_ends_of_the_engines_making(
    aio_loop: object, autojump_clock: object, reason: str, script: Script
) -> None:
    """Each end counts once, under its reason."""
    async with serving(script, silence=SilenceLimits(first_response_secs=3.0)) as sessions:
        session = sessions.open(minimal_request(), "r")
        if reason == "finished":
            await drain(session)
        else:
            with pytest.raises(Exception, match=r"lost|no first response"):
                await drain(session)
            await trio.testing.wait_all_tasks_blocked()
        assert {reason: 1} == {name: count for name, count in sessions.meter.ended.items() if count}


@pytest.mark.parametrize(("reason", "act"), [("cancelled", "cancel"), ("consumer_gone", "close")])
async def test_ends_of_the_clients_making(aio_loop: object, autojump_clock: object, reason: str, act: str) -> None:
    """A cancel and a client that goes away."""
    async with serving(Script(stream=[Gate()])) as sessions:
        session = sessions.open(minimal_request(), "r")
        await trio.sleep(1)
        getattr(session, act)()
        await drain(session)
        assert {reason: 1} == {name: count for name, count in sessions.meter.ended.items() if count}
        assert 1.0 == pytest.approx(sessions.meter.duration.sum, abs=0.01)


async def test_refusals(aio_loop: object, autojump_clock: object) -> None:
    """Each has its reason, and none is accepted."""
    early = new_sessions()
    with pytest.raises(EngineShutdown):
        early.open(minimal_request(), "r")
    assert 1 == early.meter.refused["unavailable"]
    async with serving(Script(stream=[Gate()]), max_open=1) as sessions:
        with pytest.raises(InvalidRequest):
            sessions.open({"token_ids": []}, "r")
        session = sessions.open(minimal_request(), "r")
        with pytest.raises(Overloaded):
            sessions.open(minimal_request(), "s")
        sessions.suspend("away")
        with pytest.raises(EngineShutdown):
            sessions.open(minimal_request(), "t")
        session.cancel()
        await drain(session)
        refused = {"invalid": 1, "overloaded": 1, "unavailable": 1, "internal": 0}
        assert (1, refused) == (sessions.meter.accepted, sessions.meter.refused)
