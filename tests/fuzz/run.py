"""Fuzz targets one after another: ``run.py DIRECTORY [TARGET…] [--seconds 60]``; exit code 1 if an input failed."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from fuzz.targets import TARGETS


def main() -> int:
    """Run each target in a process of its own, and say where inputs that failed are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="for what was learned and what failed")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"one of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"unknown target {min(unknown)!r}; there are {', '.join(TARGETS)}")
    failed = []
    for target in arguments.targets or TARGETS:
        found = arguments.directory / "found" / target
        found.mkdir(parents=True, exist_ok=True)
        corpus = arguments.directory / "corpus" / target
        command = [sys.executable, "-m", "fuzz.fuzz_main", target, str(corpus)]
        command += [f"-artifact_prefix={found}/", f"-max_total_time={arguments.seconds}"]
        sys.stdout.write(f"{target}: {arguments.seconds} s\n")
        sys.stdout.flush()
        if subprocess.run(command, check=False).returncode:
            failed.append(f"{target}: see {found}")
    sys.stdout.write(("\n".join(failed) or "no input failed") + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
