"""KV-aware routing: a prompt goes where its blocks are, because the engines' events say so."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import TYPE_CHECKING

import httpx2
import pytest

from support import peers
from support.managed import MODEL, SECONDS, Managed, managed, start_engine, start_frontend, start_worker
from support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

BLOCK = 16
AGAIN = 6
PLACES = 2
"""Engines, or ranks of one engine."""

EVENTS = {"--extra-engine-args": '{"zmq_kv_events_port": 0}', "--block-size": BLOCK}


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


def assert_prompts_go_home(service: Managed) -> None:
    """Each prompt's repetitions all go to one place, and not all prompts go to the same."""
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


@pytest.mark.rule("R14.3", "R14.5", "R7.38", "FR-092")
@pytest.mark.parametrize(("engines", "ranks"), [(PLACES, 1), (1, PLACES)], ids=["engines", "ranks"])
def test_a_prompt_goes_where_its_blocks_are(tmp_path: Path, engines: int, ranks: int) -> None:
    """Each prompt's repetitions all reach the engine, or the rank of it, that has its blocks, whichever that is."""
    flags = {**EVENTS, "--data-parallel-size": ranks}
    with managed(tmp_path, flags=flags, workers=engines, frontend="kv_frontend_main.py") as service:
        assert_prompts_go_home(service)


@contextlib.contextmanager
def sharing(directory: Path, *ranges: str) -> Iterator[Managed]:
    """One engine of four ranks, and a worker for each of these ranges of them."""
    discovery = directory / "discovery"
    with contextlib.ExitStack() as cleanup:
        front = start_frontend("kv_frontend_main.py", discovery=discovery, log_dir=directory)
        cleanup.callback(front.process.close, seconds=1)
        engine = start_engine({**EVENTS, "--data-parallel-size": 4}, log_dir=directory)
        cleanup.callback(engine.close)
        workers, ports = [], []
        for ranks in ranges:
            ports.append(free_port())
            logs = directory / ranks
            child = start_worker(
                engine, discovery=discovery, log_dir=logs, port=ports[-1], arguments=["--dp-ranks", ranks]
            )
            cleanup.callback(child.close, seconds=3)
            workers.append(child)
        peers.wait_for_model(front, MODEL, workers)
        service = Managed(
            engines=(engine,), workers=tuple(workers), ports=tuple(ports), frontend=front, discovery=discovery
        )
        for child in workers:
            child.wait_until(lambda: service.instances() == len(ranges), "all workers in discovery", seconds=SECONDS)
        front.process.wait_until(lambda: service.complete([1])[0] == httpx2.codes.OK, "a first answer", seconds=SECONDS)
        yield service


@pytest.mark.rule("R14.3")
def test_workers_share_an_engine_by_ranks(tmp_path: Path) -> None:
    """Of one engine two workers have two ranks each: prompts go home, and a worker that ends takes its ranks along."""
    with sharing(tmp_path, "0-1", "2-3") as service:
        assert_prompts_go_home(service)
        service.frontend.process.wait_until(
            lambda: ask(service, [len(requests(service)) + 100] * (8 * BLOCK)) and len(ranks_of(service)) == 4,
            "a request for each rank",
            seconds=SECONDS,
        )
        service.workers[0].close(seconds=10)
        service.workers[1].wait_until(lambda: service.instances() == 1, "one worker in discovery", seconds=SECONDS)
        late = [ask(service, [number] * (8 * BLOCK)) for number in range(200, 208)]
        assert {2, 3} >= {rank for _, rank in late}


def ranks_of(service: Managed) -> set[int | None]:
    """The ranks that any request has reached."""
    return {rank for _, rank in requests(service)}
