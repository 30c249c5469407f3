"""The worker's two host loops: the same service, seen from outside, on either."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from support.backends import mock_backend
from support.stack import Stack, WorkerKind, eventually, stack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]


@pytest.fixture(params=["uvloop", "trio"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    """Engine, worker on one host loop, front end."""
    arguments = (f"--host-loop={request.param}", "--withdraw-grace-secs=0.5")
    with (
        mock_backend(tmp_path / "engine", tokens_per_second=100) as backend,
        stack(backend, WorkerKind.OURS, tmp_path, arguments=arguments) as running,
    ):
        yield running


async def test_whole_life(service: Stack) -> None:
    """Answers, streams, refusals, many at once, a client that leaves, and a clean end on SIGTERM."""
    backend = service.backend
    (worker,) = service.workers
    texts: dict[int, str] = {}
    async with service.client() as client:
        assert backend.chat_reply.text(10) == (await client.chat(max_tokens=10)).text
        assert backend.reply.text(10) == (await client.stream_complete(max_tokens=10)).text
        refused = await client.chat(n=2)
        assert 400 == refused.status
        assert "n must be 1" in refused.error

        async def one(seed: int) -> None:
            answer = await client.stream_complete(max_tokens=20, seed=seed, temperature=0.5, ignore_eos=True)
            texts[seed] = answer.text

        async with trio.open_nursery() as nursery:
            for seed in range(1, 65):
                nursery.start_soon(one, seed)
        assert {seed: backend.reply_to(backend.prompt, seed=seed).text(20) for seed in range(1, 65)} == texts

        first = await client.leave_after("/v1/completions", {"max_tokens": 900, "ignore_eos": True}, events=3)
        request = str(first["id"]).removeprefix("cmpl-")
        await eventually(partial(backend.dropped_at, request), "the engine has dropped it", seconds=2)
    worker.send(signal.SIGTERM)
    assert 0 == await trio.to_thread.run_sync(lambda: worker.wait(seconds=20), abandon_on_cancel=True)
    assert "Traceback" not in worker.log
