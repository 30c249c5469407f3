"""Plays many schedules, on several processes, and shows the first that fails."""

# ruff: noqa: T201 - a command

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING

from simulation.bugs import BUGS
from simulation.schedule import make_schedule
from simulation.world import run_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulation.world import Result

__all__ = ["main"]

CHUNK = 25
TRACE_LINES = 200


def plant(bug: str | None) -> None:
    """Plant a known bug in this process."""
    if bug is not None:
        BUGS[bug]()


def play(first: int, count: int) -> Result | None:
    """Play seeds one after another; the first result with a fault, or None."""
    for seed in range(first, first + count):
        result = run_seed(seed)
        if result.faults:
            return result
    return None


def _play_all(first: int, count: int, processes: int, bug: str | None) -> Result | None:
    chunks = [(at, min(CHUNK, first + count - at)) for at in range(first, first + count, CHUNK)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=plant, initargs=(bug,)) as pool:
        runs = [pool.submit(play, *chunk) for chunk in chunks]
        for run in as_completed(runs):
            if (result := run.result()) is not None:
                # One failure is enough. Asked to end, the others would first play all that waits for them.
                for process in multiprocessing.active_children():
                    process.kill()
                return result
    return None


def _show(result: Result, *, whole: bool) -> None:
    print(make_schedule(result.seed))
    print()
    lines = result.trace if whole else result.trace[-TRACE_LINES:]
    print(*lines, sep="\n")
    print()
    for fault in result.faults:
        print("FAULT:", fault)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code: 1 if an invariant did not hold."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, metavar="N", help="how many schedules to play")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--first", type=int, metavar="N", help="the first seed; by default a new one each time")
    parser.add_argument("--seed", type=int, metavar="N", help="play this one again, and show all that happens")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant a known bug")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        plant(options.bug)
        result = run_seed(options.seed)
        _show(result, whole=True)
        print(f"seed {result.seed}: {len(result.faults)} faults, trace {result.digest}")
        return int(bool(result.faults))
    first = secrets.randbelow(10**9) if options.first is None else options.first
    started_at = time.monotonic()
    if options.processes == 1:
        plant(options.bug)
        failed = play(first, options.schedules)
    else:
        failed = _play_all(first, options.schedules, options.processes, options.bug)
    if failed is None:
        took = time.monotonic() - started_at
        print(f"{options.schedules} schedules from seed {first} on: all invariants held ({took:.0f} s)")
        return 0
    _show(failed, whole=False)
    planted = f" --bug {options.bug}" if options.bug else ""
    print(f"seed {failed.seed} failed, the {failed.seed - first + 1}th. To see it again, as it was:", file=sys.stderr)
    print(f"    nox -s simulation -- --seed {failed.seed}{planted}", file=sys.stderr)
    return 1
