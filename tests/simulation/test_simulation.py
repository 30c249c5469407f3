"""The simulation itself: a seed means one run, and known bugs are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.bugs import BUGS

TESTS = Path(__file__).parents[1]
MOST_SCHEDULES = 1000


def simulate(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: a bug that is planted stays, and one that hangs leaves Trio broken."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "simulation", *arguments]
    return subprocess.run(command, env=environment, cwd=TESTS, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("bug", sorted(BUGS))
@pytest.mark.timeout(300)
def test_a_planted_bug_is_found(bug: str) -> None:
    """Each known bug is found within a thousand schedules, whatever the first seed, and what is printed repeats it."""
    found = simulate("--bug", bug, "--schedules", str(MOST_SCHEDULES), "--processes", "1")
    assert found.returncode == 1, found.stdout[-2000:] + found.stderr[-2000:]
    assert "FAULT" in found.stdout, found.stderr
    command = found.stderr.strip().splitlines()[-1].split(" -- ")[1]
    again = simulate(*command.split())
    first_fault, same_fault = (
        next(line for line in run.stdout.splitlines() if line.startswith("FAULT")) for run in (found, again)
    )
    assert first_fault == same_fault


@pytest.mark.timeout(300)
def test_a_failure_ends_all_processes() -> None:
    """The first fault is shown and ends the command, however many schedules still wait."""
    found = simulate("--bug", "end_delivered_twice", "--schedules", "1000000")
    assert found.returncode == 1, found.stdout[-2000:] + found.stderr[-2000:]
    assert "To see it again" in found.stderr


@pytest.mark.parametrize("seed", [3, 17, 602])
@pytest.mark.timeout(300)
def test_a_seed_means_one_run(seed: int) -> None:
    """Two processes with different hashes and addresses see the same, to the microsecond."""
    one, other = (simulate("--seed", str(seed), hash_seed=hashes) for hashes in ("1", "2"))
    assert 0 == one.returncode, one.stdout[-2000:] + one.stderr[-2000:]
    assert one.stdout == other.stdout
    assert "trace" in one.stdout.splitlines()[-1]
