"""KV-aware routing: a prompt goes where its blocks are, because the engines' events say so."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx2
import pytest

from support.managed import SECONDS, Managed, managed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

BLOCK = 16
AGAIN = 6


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Managed]:
    flags = {"--extra-engine-args": '{"zmq_kv_events_port": 0}', "--block-size": BLOCK}
    with managed(tmp_path, flags=flags, workers=2, frontend="kv_frontend_main.py") as running:
        yield running


def served(service: Managed) -> list[int]:
    """How many requests each engine has seen."""
    return [len(re.findall("mock_request_started", engine.process.log)) for engine in service.engines]


def ask(service: Managed, prompt: list[int]) -> int:
    """Ask once; which engine answered."""
    before = served(service)
    assert httpx2.codes.OK == service.complete(prompt)[0]
    service.frontend.process.wait_until(lambda: sum(served(service)) > sum(before), "a log line", seconds=SECONDS)
    (found,) = [number for number, (old, new) in enumerate(zip(before, served(service), strict=True)) if new > old]
    return found


@pytest.mark.rule("R14.3", "R14.5")
def test_a_prompt_goes_where_its_blocks_are(service: Managed) -> None:
    """Each prompt's repetitions all reach the engine that has its blocks, whichever that is."""
    homes = set()
    for first in range(2, 8):
        prompt = [first] + [20 + first] * (8 * BLOCK)
        home = ask(service, prompt)
        homes.add(home)
        settle(service, prompt, home)
        assert [home] * AGAIN == [ask(service, prompt) for _ in range(AGAIN)]
        if len(homes) == 2:
            return
    assert len(homes) == 2, "every prompt went to one engine, so nothing was shown"


def settle(service: Managed, prompt: list[int], home: int) -> None:
    """Events take a moment to reach the router: wait until it has sent the prompt home once."""
    service.frontend.process.wait_until(lambda: ask(service, prompt) == home, "the prompt went home", seconds=SECONDS)
