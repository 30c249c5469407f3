"""``python -m soak [--minutes N] [--json PATH] [--seed N]``, with ``tests`` on the path; ``nox -s soak`` runs it."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from soak.load import LANES, Load
from soak.service import MODEL, Soaked, open_soaked
from soak.verdict import Quiet, Sample, as_json, compare, table
from support.openai import open_client

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_sidecar.testing.proxy import Proxy

ROUNDS = 10
ENGINE_ROUNDS = 4
"""In the first of them engines die; later ones live long enough to be compared with themselves."""

SAMPLE_SECONDS = 1.0
STALL_SECONDS = 4.0
MIN_REQUESTS_PER_MINUTE = 60
"""Less would prove nothing."""


@attrs.define(eq=False)
class Soak:
    """One run."""

    service: Soaked
    load: Load
    seconds: float
    random: random.Random
    samples: list[Sample] = attrs.field(factory=list)
    quiet: list[Quiet] = attrs.field(factory=list)
    faults: list[str] = attrs.field(factory=list)
    _began: float = 0.0
    _resting: bool = False

    async def run(self) -> None:
        """Load and rest in turn; a fault in each round."""
        self._began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(LANES):
                nursery.start_soon(self.load.lane)
            nursery.start_soon(self._watch)
            for number in range(ROUNDS):
                ends = self._began + self.seconds * (number + 1) / ROUNDS
                self._resting = False
                self.load.begin()
                await trio.sleep(max(0.0, ends - trio.current_time()) / 4)
                await self._fault(number)
                await trio.sleep_until(ends)
                await self.load.pause()
                self._resting = True
                self.quiet += await self.service.at_rest(trio.current_time() - self._began, self.load.requests)
                print(f"round {number + 1} of {ROUNDS}: {self.faults[-1]}; {dict(self.load.ended)}", flush=True)  # noqa: T201
            nursery.cancel_scope.cancel()

    async def _fault(self, number: int) -> None:
        """What happens in this round: first engines die, and later on, when memory is compared, only connections."""
        if number < ENGINE_ROUNDS and number % 2 == 0:
            self.faults.append("the engine was killed and replaced")
            self.load.excuse(until_secs=STALL_SECONDS)
            # Not in a thread: a child dies with the thread that started it.
            self.service.restart_engine()
            self.load.excuse(until_secs=STALL_SECONDS)
            return
        name = self.random.choice(["cut", "stall", "half_open"])
        self.faults.append(f"connections: {name}")
        self.load.excuse(until_secs=STALL_SECONDS)

        def fault(proxy: Proxy) -> None:
            getattr(proxy, name)()

        self.service.proxy.do(fault)
        await trio.sleep(STALL_SECONDS)
        self.service.proxy.heal()
        self.load.excuse(until_secs=0.0)

    async def _watch(self) -> None:
        while True:
            await trio.sleep(SAMPLE_SECONDS)
            if not self._resting:
                self.samples += self.service.sample(trio.current_time() - self._began)


async def soak(service: Soaked, seconds: float, seed: int) -> Soak:
    """Run it."""
    numbers = random.Random(seed)
    async with open_client(service.url, MODEL, [400]) as client:
        run = Soak(service, Load(client, numbers), seconds, numbers)
        await run.run()
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and judge; returns 1 if something grows or an answer was wrong."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args(arguments)
    print(f"{options.minutes:g} minutes, seed {options.seed}", flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory(prefix="soak-") as directory, open_soaked(Path(directory)) as service:
        run = trio.run(soak, service, options.minutes * 60, options.seed)
    rows = compare(run.samples, run.quiet, run.samples[-1].at)
    judged = [row for row in rows if row.process != "frontend"]
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = as_json(run.samples, run.quiet, rows)
        report |= {"minutes": options.minutes, "seed": options.seed, "ended": run.load.ended, "wrong": run.load.wrong}
        options.json.write_text(json.dumps(report | {"faults": run.faults}, indent=1))
    problems = [f"{row.process}: {row.what} grows" for row in judged if not row.flat]
    problems += run.load.wrong
    if run.load.requests < MIN_REQUESTS_PER_MINUTE * options.minutes:
        problems.append(f"only {run.load.requests} requests")
    print(table(rows))  # noqa: T201
    print(f"{run.load.requests} requests: {dict(run.load.ended)}")  # noqa: T201
    for problem in problems[:20]:
        print(f"PROBLEM: {problem}")  # noqa: T201
    print("flat" if not problems else f"{len(problems)} problems")  # noqa: T201
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
