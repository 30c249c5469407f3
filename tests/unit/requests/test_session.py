"""Sessions on both hosts, in real but short time; the rules themselves are tried in the scenarios."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import trio

from trio_sidecar.bridge import Host, aio_sleep, run, run_aio
from trio_sidecar.convert.request import ConvertedRequest, ModelFacts, convert_request
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.requests.session import EndReason
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import FakeEngine, Script, Send, Wait, finish, tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

REQUEST: dict[str, object] = {"model": "served-model", "token_ids": [11, 22, 33]}


def convert(request: Mapping[str, object], request_id: str) -> ConvertedRequest:
    return convert_request(request, request_id=request_id, model=ModelFacts(served_model_name="served-model"))


def make_sessions() -> Sessions:
    return Sessions(responder=ResponseConverter, merge=merge_chunks)


def test_stream(host: Host) -> None:
    """A request opened from asyncio code streams to its terminal, on either host."""
    engine = FakeEngine(Script(stream=(Send(tokens(1)), Wait(0.01), Send(tokens(2)), Send(finish(3, total=3)))))
    sessions = make_sessions()

    async def aio_face() -> list[int]:
        return [
            i
            for number in range(3)
            async for chunk in sessions.open(REQUEST, str(number)).aio_chunks()
            for i in chunk["token_ids"]
        ]

    async def main() -> list[int]:
        ids = []
        async with sessions.serving(engine, convert):
            ids += await run_aio(aio_face)
        return ids

    assert [1, 2, 3] * 3 == run(main, host=host)
    assert 0 == engine.open_streams


def test_many_ends_leave_nothing(host: Host) -> None:
    """Requests that are cancelled and consumers that go leave no stream, no session and no task, on either host."""
    engine = FakeEngine(Script(opening=(Wait(0.005),), stream=(Send(tokens(1)), Wait(1000))))
    sessions = make_sessions()

    async def aio_one(number: int) -> str:
        session = sessions.open(REQUEST, str(number))
        if number % 4 == 0:
            session.cancel()
        elif number % 4 == 1:
            session.close()
        async for chunk in session.aio_chunks():
            if number % 4 == 2:
                session.cancel()
            elif number % 4 == 3:
                break
            if "finish_reason" in chunk:
                return chunk["finish_reason"]
        return "gone"

    async def aio_face() -> list[str]:
        return await asyncio.gather(*[aio_one(number) for number in range(400)])

    async def aio_tasks() -> int:
        await aio_sleep(0)
        return len(asyncio.all_tasks())

    async def main() -> tuple[list[str], int]:
        ends = []
        with trio.fail_after(10):
            async with sessions.serving(engine, convert):
                ends += await run_aio(aio_face)
                while sessions.statistics().open:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                left = await run_aio(aio_tasks)
        return ends, left

    ends, left = run(main, host=host)
    assert ["cancelled", "gone", "cancelled", "gone"] * 100 == ends
    assert (0, 1) == (engine.open_streams, left)
    assert {EndReason.CANCELLED.value: 200, EndReason.CONSUMER_GONE.value: 200} == sessions.statistics().ended
    assert 400 >= sessions.statistics().peak_open > 1


def test_release_is_prompt(host: Host) -> None:
    """When the consumer goes, the engine is released within half a second of real time, on either host."""
    engine = FakeEngine(Script(stream=(Send(tokens(1)), Wait(1000))))
    sessions = make_sessions()

    async def aio_face() -> None:
        async for _ in sessions.open(REQUEST, "r").aio_chunks():
            break

    async def main() -> None:
        async with sessions.serving(engine, convert):
            await run_aio(aio_face)
            with trio.fail_after(0.5):
                while engine.open_streams:  # noqa: ASYNC110
                    await trio.sleep(0.001)

    run(main, host=host)
