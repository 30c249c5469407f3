"""A KV-aware router forgets the blocks of an engine that was replaced, and learns those of the engine after it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from support.managed import SECONDS, Managed, managed, start_engine

if TYPE_CHECKING:
    from pathlib import Path

    from support.peers import Engine
    from support.processes import Child

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

BLOCK = 16
TIMES = 8


def flags(port: int) -> dict[str, object]:
    """An engine whose events are at that port; 0 is any."""
    return {"--extra-engine-args": f'{{"zmq_kv_events_port": {port}}}', "--block-size": BLOCK}


class Router:
    """Two engines behind a router, of which one will be replaced.

    Attributes:
        engines: Those that run now.
    """

    def __init__(self, service: Managed) -> None:
        self._service = service
        self.engines: list[Engine] = list(service.engines)

    def ask(self, prompt: list[int]) -> int:
        """Ask once; which engine the request went to."""
        before = self._counts()
        status, answer = self._service.complete(prompt)
        assert 200 == status, answer
        self._service.frontend.process.wait_until(lambda: self._counts() != before, "a log line", seconds=SECONDS)
        return next(number for number in (0, 1) if self._counts()[number] != before[number])

    def settle(self, prompt: list[int]) -> int:
        """Ask until the repetitions go where the first went; where that is."""
        at = self.ask(prompt)
        self._service.frontend.process.wait_until(
            lambda: [at] * TIMES == [self.ask(prompt) for _ in range(TIMES)], "the prompt went home", seconds=SECONDS
        )
        return at

    def _counts(self) -> list[int]:
        return [engine.process.log.count("mock_request_started") for engine in self.engines]


def prompt(first: int, blocks: int = 8) -> list[int]:
    """A prompt all its own; one of fewer blocks is the beginning of that of more."""
    return [first] + [20 + first] * (blocks * BLOCK)


def events_port(worker: Child) -> int:
    """Where the worker hears its engine's KV events."""
    return int(worker.wait_for_line(r'"endpoint": "tcp://127\.0\.0\.1:(\d+)"')[1])


@pytest.mark.rule("R15.6", "R14.5")
@pytest.mark.parametrize("moved", [True, False], ids=["other-port", "same-port"])
def test_a_router_forgets_a_replaced_engine(tmp_path: Path, moved: bool) -> None:
    """After kill -9, with a new engine at the address, its events elsewhere or not, only new blocks count."""
    with managed(tmp_path, flags=flags(0), workers=2, frontend="kv_frontend_main.py") as service:
        router, worker = Router(service), service.workers[0]
        events = 0 if moved else events_port(worker)
        old = next(first for first in range(2, 30) if router.settle(prompt(first)) == 0)
        os.kill(router.engines[0].process.pid, signal.SIGKILL)
        router.engines[0].process.close(seconds=1)
        service.frontend.process.wait_until(lambda: service.instances() == 1, "it has withdrawn", seconds=SECONDS)
        # The other engine gets the first half: more than the new engine has, and less than the old one had.
        service.frontend.process.wait_until(
            lambda: service.complete(prompt(old, 4))[0] == 200, "an answer of the other engine", seconds=SECONDS
        )
        router.engines[0] = start_engine(flags(events), log_dir=tmp_path / "again", port=service.engines[0].port)
        try:
            service.frontend.process.wait_until(lambda: service.instances() == 2, "it is back", seconds=SECONDS)
            fresh = iter(range(40, 80))
            assert 0 == next(home for first in fresh if (home := router.settle(prompt(first))) == 0)
            assert 1 == router.ask(prompt(old))
        finally:
            router.engines[0].close()
