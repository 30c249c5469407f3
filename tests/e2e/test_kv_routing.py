"""KV-aware routing: a prompt goes where its blocks are, because the engines' events say so."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import httpx2
import pytest

from support.managed import SECONDS, Managed, managed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

BLOCK = 16
AGAIN = 6
PLACES = 2
"""Engines, or ranks of one engine."""


def requests(service: Managed) -> list[tuple[int, int | None]]:
    """Which engine and rank each request has reached, engine by engine."""
    return [
        (number, json.loads(line)["dp_rank"])
        for number, engine in enumerate(service.engines)
        for line in engine.process.log.splitlines()
        if "mock_request_started" in line
    ]


def ask(service: Managed, prompt: list[int]) -> tuple[int, int | None]:
    """Ask once; where the request went."""
    before = requests(service)
    assert httpx2.codes.OK == service.complete(prompt)[0]
    service.frontend.process.wait_until(lambda: len(requests(service)) > len(before), "a log line", seconds=SECONDS)
    ((place, _),) = (Counter(requests(service)) - Counter(before)).items()
    return place


@pytest.mark.rule("R14.3", "R14.5", "R7.38", "FR-092")
@pytest.mark.parametrize(("engines", "ranks"), [(PLACES, 1), (1, PLACES)], ids=["engines", "ranks"])
def test_a_prompt_goes_where_its_blocks_are(tmp_path: Path, engines: int, ranks: int) -> None:
    """Each prompt's repetitions all reach the engine, or the rank of it, that has its blocks, whichever that is."""
    flags = {
        "--extra-engine-args": '{"zmq_kv_events_port": 0}',
        "--block-size": BLOCK,
        "--data-parallel-size": ranks,
    }
    with managed(tmp_path, flags=flags, workers=engines, frontend="kv_frontend_main.py") as service:
        homes = set()
        for first in range(2, 12):
            prompt = [first] + [20 + first] * (8 * BLOCK)
            home = ask(service, prompt)
            homes.add(home)
            # Events take a moment to reach the router.
            service.frontend.process.wait_until(
                lambda prompt=prompt, home=home: ask(service, prompt) == home,  # type: ignore[misc]
                "the prompt went home",
                seconds=SECONDS,
            )
            assert [home] * AGAIN == [ask(service, prompt) for _ in range(AGAIN)]
            if len(homes) == PLACES:
                break
        assert PLACES == len(homes), "every prompt went to one place, so nothing was shown"
