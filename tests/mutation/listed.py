"""Make each fault of ``listed.toml`` in a copy of the package, and see that a test notices: ``listed.py [NAME…]``.

Exit code 1 if one survives, or can no longer be made because the code has changed: then ``listed.toml`` is to follow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = "trio_sidecar"
FAILED, PASSED = 1, 0  # exit codes of pytest; all others mean that the tests did not run
SECONDS = 60

Mutant = dict[str, Any]


def pytest(source: Path, tests: list[str]) -> tuple[int | None, str]:
    """Run tests against the package in a directory; None is a test that did not end."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def mutate(text: str, edits: list[tuple[str, str]]) -> str:
    """The text with all edits made.

    Raises:
        ValueError: What is to be replaced does not stand there exactly once.
    """
    for old, new in edits:
        if text.count(old) != 1:
            reason = f"stands there {text.count(old)} times, expected once: {old!r}"
            raise ValueError(reason)
        text = text.replace(old, new)
    return text


def try_one(mutant: Mutant, source: Path) -> str:
    """Why the fault was not noticed; empty if it was."""
    path = source / PACKAGE / mutant["file"]
    sound = path.read_text(encoding="utf-8")
    try:
        path.write_text(mutate(sound, mutant["edits"]), encoding="utf-8")
        code, output = pytest(source, mutant["tests"])
    except ValueError as error:
        return str(error)
    finally:
        path.write_text(sound, encoding="utf-8")
    if code == PASSED:
        return f"survives {', '.join(mutant['tests'])}"
    return "" if code in (FAILED, None) else f"its tests could not be run:\n{output}"


def main() -> int:
    """Try all, or those whose names are given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a fault; by default all")
    names = parser.parse_args().names
    listed: list[Mutant] = tomllib.loads((Path(__file__).parent / "listed.toml").read_text())["mutant"]
    if unknown := set(names) - {mutant["name"] for mutant in listed}:
        parser.error(f"there is no fault {min(unknown)!r} in listed.toml")
    chosen = [mutant for mutant in listed if not names or mutant["name"] in names]
    with tempfile.TemporaryDirectory() as directory:
        sources: SimpleQueue[Path] = SimpleQueue()
        copies = [Path(directory) / str(number) for number in range(2)]
        for copy in copies:
            shutil.copytree(ROOT / "src" / PACKAGE, copy / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
            sources.put(copy)
        tests = sorted({test for mutant in chosen for test in mutant["tests"]})
        code, output = pytest(copies[0], tests)
        if code != PASSED:
            sys.stdout.write(f"the tests fail without any fault:\n{output}\n")
            return 1

        def run(mutant: Mutant) -> tuple[Mutant, str]:
            source = sources.get()
            try:
                return mutant, try_one(mutant, source)
            finally:
                sources.put(source)

        with ThreadPoolExecutor(len(copies)) as pool:
            results = list(pool.map(run, chosen))
    for mutant, reason in results:
        sys.stdout.write(f"{'NOT ' if reason else ''}noticed: {mutant['name']}{f' - {reason}' if reason else ''}\n")
    unnoticed = sum(bool(reason) for _, reason in results)
    sys.stdout.write(f"{len(results) - unnoticed} of {len(results)} faults are noticed\n")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
