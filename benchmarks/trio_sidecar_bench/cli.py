"""``trio-sidecar bench``."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trio_sidecar_bench import bench, report
from trio_sidecar_bench.contenders import CONTENDERS, DEFAULT
from trio_sidecar_bench.loads import LOADS, QUICK
from trio_sidecar_bench.processes import ChildFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main"]

PARTS = ("loads", "startup", "memory")
STARTED = ("ours", "rust")
PACKAGES = ("trio-sidecar", "ai-dynamo-runtime", "trio", "uvloop", "grpclib", "h2", "betterproto2")


def _names(known: Sequence[str], what: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                reason = f"{what} {name!r} is unknown; there are {', '.join(known)}"
                raise argparse.ArgumentTypeError(reason)
        return names

    return parse


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    result = argparse.ArgumentParser(
        prog="trio-sidecar bench",
        description="Measure this worker beside others, on this machine, with the same loads, in turn.",
        epilog="Contenders: " + "; ".join(f"{name}: {one.text}" for name, one in CONTENDERS.items()) + ".",
    )
    result.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, 3 rounds of 2 s")
    result.add_argument("--parts", type=_names(PARTS, "part"), default=["loads"], help="loads, startup, memory")
    result.add_argument(
        "--contenders", type=_names(DEFAULT, "contender"), default=list(DEFAULT), help="comma-separated"
    )
    result.add_argument("--loads", type=_names(tuple(LOADS), "load"), help=f"of {', '.join(LOADS)}")
    result.add_argument("--rounds", type=int, help="windows per load and contender; ratios are medians over them (5)")
    result.add_argument("--seconds", type=float, help="length of a window (4)")
    result.add_argument("--warmup", type=float, default=1.0, help="seconds of load before each window (1)")
    result.add_argument("--json", type=Path, metavar="PATH", help="write all figures")
    result.add_argument("--plot", type=Path, metavar="PATH", help="write a PNG; needs the extra 'bench'")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    arguments = parser().parse_args(argv)
    if arguments.plot is not None and not _can_plot():
        return 2
    loads = arguments.loads or (list(QUICK) if arguments.quick else list(LOADS))
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    seconds = arguments.seconds or (2.0 if arguments.quick else 4.0)
    results: dict[str, Any] = {"conditions": _conditions(rounds, seconds, arguments.warmup)}
    try:
        if "loads" in arguments.parts:
            measured = bench.measure_loads(
                arguments.contenders, loads, rounds=rounds, seconds=seconds, warmup=arguments.warmup, tell=_tell
            )
            results["loads"] = measured
            _show(report.load_tables(measured))
            _show(report.server_line(measured))
        starters = [name for name in arguments.contenders if name in STARTED]
        if "startup" in arguments.parts and starters:
            results["startup"] = bench.measure_start_up(starters, (1, 8, 64), rounds=rounds, tell=_tell)
            _show(report.start_up_table(results["startup"]))
        if "memory" in arguments.parts and starters:
            results["memory"] = bench.measure_memory(starters, tell=_tell)
            _show(report.memory_table(results["memory"]))
    except ChildFailed as error:
        print(f"trio-sidecar bench: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
    _show(json.dumps(results["conditions"]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    if arguments.plot is not None and "loads" in results:
        report.plot(results["loads"], arguments.plot)
    return 0


def _conditions(rounds: int, seconds: float, warmup: float) -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "rounds": rounds,
        "seconds": seconds,
        "warmup": warmup,
        "versions": versions,
        **bench.machine(),
    }


def _can_plot() -> bool:
    if importlib.util.find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install 'trio-sidecar[bench]'", file=sys.stderr)  # noqa: T201
        return False
    return True


def _tell(text: str) -> None:
    """Progress, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)  # noqa: T201


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)  # noqa: T201
    print(f"{text}\n", flush=True)  # noqa: T201
