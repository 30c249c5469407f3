"""SIGTERM to a worker that is serving: what it has accepted ends, nothing new comes to it, and it exits cleanly."""

from __future__ import annotations

import contextlib
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from support import peers
from support.backends import Backend, mock_backend
from support.openai import OpenAi, open_client
from support.stack import WorkerKind, eventually, stack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.processes import Child

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

TOKENS_PER_SECOND = 100
SHORT_TOKENS = 40
LONG_TOKENS = 400
CLIENTS = 8
GRACE_SECONDS = 1
EXIT_SECONDS = 30


@attrs.frozen(slots=True, kw_only=True)
class Duo:
    """Two workers with an engine each that says something of its own, behind one front end."""

    backends: tuple[Backend, Backend]
    workers: tuple[Child, Child]
    frontend: peers.Frontend


@attrs.frozen(slots=True)
class Served:
    """One finished request.

    Attributes:
        started: When it was sent, in Trio time.
        worker: Which worker answered; None if the text is neither's.
    """

    started: float
    worker: int | None


@pytest.fixture
def duo(tmp_path: Path) -> Iterator[Duo]:
    """Start them."""
    discovery = tmp_path / "discovery"
    with contextlib.ExitStack() as cleanup:
        frontend = peers.start_frontend(discovery=discovery, log_dir=tmp_path / "frontend")
        cleanup.callback(frontend.process.close, seconds=1)
        backends, workers = [], []
        for number in (1, 2):
            directory = tmp_path / f"side-{number}"
            backend = cleanup.enter_context(mock_backend(directory, tokens_per_second=TOKENS_PER_SECOND, seed=number))
            worker = peers.start_worker(
                backend.engine.endpoint,
                discovery=discovery,
                log_dir=directory,
                arguments=(f"--withdraw-grace-secs={GRACE_SECONDS}", "--drain-secs=20"),
            )
            cleanup.callback(worker.close, seconds=1)
            backends.append(backend)
            workers.append(worker)
        peers.wait_for_model(frontend, backends[0].model, workers)
        yield Duo(backends=(backends[0], backends[1]), workers=(workers[0], workers[1]), frontend=frontend)


async def serve_once(duo: Duo, client: OpenAi, tokens: int) -> Served:
    """One whole request, and who answered it."""
    started = trio.current_time()
    answer = await client.stream_complete(max_tokens=tokens, ignore_eos=True)
    assert ["length"] == answer.finish_reasons
    whose = [number for number, one in enumerate(duo.backends) if one.reply.text(tokens) == answer.text]
    return Served(started, whose[0] if whose else None)


async def serve_until_both_known(duo: Duo, client: OpenAi) -> None:
    """Ask until both workers have answered: the front end learns of each by itself."""
    seen: set[int | None] = set()
    with trio.fail_after(20):
        while seen < {0, 1}:
            seen.add((await serve_once(duo, client, 3)).worker)


def running(duo: Duo, number: int) -> bool:
    """Whether so many requests are running on both engines together."""
    return sum(one.open_requests() for one in duo.backends) == number


async def load(duo: Duo, client: OpenAi, done: list[Served]) -> None:
    """One client after another; runs until it is cancelled."""
    while True:
        with trio.CancelScope(shield=True):
            done.append(await serve_once(duo, client, SHORT_TOKENS))
        await trio.lowlevel.checkpoint()


@pytest.mark.rule("R11.7", "R11.13")
async def test_sigterm_under_load(duo: Duo) -> None:
    """The front end turns to the other worker at once; nothing is cut; the worker exits with 0."""
    leaving, staying = duo.workers
    short: list[Served] = []
    long: list[Served] = []

    async def one_long(client: OpenAi) -> None:
        long.append(await serve_once(duo, client, LONG_TOKENS))

    async with open_client(duo.frontend.url, duo.backends[0].model, duo.backends[0].prompt) as client:
        await serve_until_both_known(duo, client)
        async with trio.open_nursery() as nursery, trio.open_nursery() as patient:
            for number in range(1, 5):  # with nothing else going on, the front end deals them out in turn
                patient.start_soon(one_long, client)
                await eventually(partial(running, duo, number), "the long request is running")
            for _ in range(CLIENTS):
                nursery.start_soon(load, duo, client, short)
            await trio.sleep(1)
            leaving.send(signal.SIGTERM)
            told = trio.current_time()
            code = await trio.to_thread.run_sync(lambda: leaving.wait(seconds=EXIT_SECONDS), abandon_on_cancel=True)
            assert leaving.running is False
            gone = trio.current_time()
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
    assert 0 == code
    assert 0 == len([one for one in (*short, *long) if one.worker is None])
    assert {0, 1} == {one.worker for one in long}
    assert gone - told >= GRACE_SECONDS
    late = [one for one in short if one.started > told + GRACE_SECONDS]
    assert CLIENTS <= len(late)
    assert {1} == {one.worker for one in late}
    assert staying.running


@pytest.mark.rule("R11.3")
async def test_drain_budget(tmp_path: Path) -> None:
    """What outlives the drain budget is cut, client and engine are told, and the worker still exits with 0."""
    arguments = ("--withdraw-grace-secs=0", "--drain-secs=1")
    with (
        mock_backend(tmp_path / "engine", tokens_per_second=TOKENS_PER_SECOND) as backend,
        stack(backend, WorkerKind.OURS, tmp_path, arguments=arguments) as service,
    ):
        (worker,) = service.workers
        endings: list[str] = []
        async with service.client() as client, trio.open_nursery() as nursery:

            async def endless() -> None:
                body = {"model": client.model, "prompt": client.prompt, "stream": True}
                body |= {"max_tokens": 900, "ignore_eos": True}
                endings.append((await client.http.post(f"{client.url}/v1/completions", json=body)).text)

            nursery.start_soon(endless)
            await eventually(lambda: backend.open_requests() == 1, "the request is running")
            worker.send(signal.SIGTERM)
            told = time.monotonic()
            code = await trio.to_thread.run_sync(lambda: worker.wait(seconds=EXIT_SECONDS), abandon_on_cancel=True)
            took = time.monotonic() - told
        assert 0 == code
        assert 1 <= took < 6
        assert '"length"' not in endings[0]
        await eventually(lambda: backend.open_requests() == 0, "the engine has dropped it")
