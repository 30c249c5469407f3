"""Clients that go away in mid-stream: the engine's side must be closed soon, and nothing may be left behind."""

from __future__ import annotations

import json
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from support.stack import OUR_PAIRS, Stack, eventually, pair_name

if TYPE_CHECKING:
    from support.openai import OpenAi

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

CLOSE_SECONDS = 0.5
STORM = 1000
STORM_AT_ONCE = 25
WARM_UP = 100
QUIET_SECONDS = 1
LONG = {"max_tokens": 900, "ignore_eos": True}


async def leave_after(client: OpenAi, events: int) -> str:
    """Read so many events of a long answer, then close the connection.

    Returns:
        The request's id, as the worker and the engine know it.
    """
    first = await client.leave_after("/v1/completions", LONG, events=events)
    return str(first["id"]).removeprefix("cmpl-")


@pytest.mark.rule("R10.1", "R10.20")
async def test_client_that_goes_away(pair: Stack) -> None:
    """The engine drops the request within half a second of the client's leaving."""
    async with pair.client() as client:
        for events in (1, 3, 10):
            request = await leave_after(client, events)
            left = time.time()
            dropped = await eventually(partial(pair.backend.dropped_at, request), "the engine has dropped it")
            assert dropped - left < CLOSE_SECONDS
    await eventually(lambda: pair.backend.open_requests() == 0, "no request open in the engine")


@pytest.mark.rule("R10.3")
async def test_neighbours_of_a_client_that_goes_away(pair: Stack) -> None:
    """One client's leaving does not touch another's answer."""
    texts: list[str] = []

    async def stay(client: OpenAi) -> None:
        texts.append((await client.stream_complete(max_tokens=60, ignore_eos=True)).text)

    async with pair.client() as client, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(stay, client)
        for _ in range(8):
            await leave_after(client, 2)
    assert [pair.backend.reply.text(60)] * 4 == texts


async def storm(pair: Stack, count: int) -> None:
    """That many clients, a few at once, each of which leaves in mid-stream."""
    slots = trio.CapacityLimiter(STORM_AT_ONCE)

    async def one(client: OpenAi, number: int) -> None:
        async with slots:
            await leave_after(client, 1 + number % 3)

    async with pair.client() as client, trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, client, number)
    await eventually(lambda: pair.backend.open_requests() == 0, "no request open in the engine")


async def holdings(pair: Stack) -> dict[str, int]:
    """What our worker holds, from the snapshot that it logs at SIGUSR1."""
    (worker,) = pair.workers
    marker = '"event": "worker_snapshot"'
    before = worker.log.count(marker)
    worker.send(signal.SIGUSR1)
    await eventually(lambda: worker.log.count(marker) > before, "the snapshot is logged")
    snapshot = json.loads([line for line in worker.log.splitlines() if marker in line][-1])
    names = ("trio_tasks", "aio_tasks", "open_files")
    return {name: snapshot[name] for name in names} | {"requests": snapshot["requests"]["open"]}


@pytest.mark.parametrize("pair", OUR_PAIRS, indirect=True, ids=pair_name)
async def test_thousand_cancels_leave_nothing(pair: Stack) -> None:
    """After a thousand of them, the worker holds the requests, tasks and file descriptors that it held before."""
    await storm(pair, WARM_UP)
    before = await settled(pair)
    await storm(pair, STORM)
    assert before == await settled(pair)
    assert 0 == before["requests"]
    async with pair.client() as client:
        answer = await client.complete(max_tokens=5)
    assert pair.backend.reply.text(5) == answer.text


async def settled(pair: Stack) -> dict[str, int]:
    """What our worker holds once that does not change any more."""
    last: dict[str, int] = {}
    with trio.fail_after(30):
        while last != (now := await holdings(pair)):
            last = now
            await trio.sleep(QUIET_SECONDS)
    return last
