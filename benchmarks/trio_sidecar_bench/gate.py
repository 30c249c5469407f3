"""The regression gate, ``python -m trio_sidecar_bench.gate``: ratios of CPU time with generous bounds, in a minute.

It compares our path from socket to chunk with the naive one, in turn in one process, so that a slow or busy machine
slows both; and it takes the best window of each, because a neighbour on the machine can only make one worse. A bound is
about 1.6 times what was measured when it was set (``docs/performance.md``): noise stays below, twice the cost does not.
It is raised or lowered with a reason, in the commit that changes the path.
"""

from __future__ import annotations

import sys

import attrs

from trio_sidecar.config import LogLevel, LogSettings
from trio_sidecar.lifecycle import settle_collector
from trio_sidecar.observe.logging import configure_logging
from trio_sidecar_bench.hot_path import measure, open_server
from trio_sidecar_bench.loads import LOADS

ROUNDS = 5
SECONDS = 0.5
BASELINE = "naive"


@attrs.frozen(slots=True)
class Bound:
    """The most that a path's CPU per token may be of the naive path's.

    Attributes:
        load: Under which load.
        path: Which path.
        ratio: The bound.
    """

    load: str
    path: str
    ratio: float


BOUNDS = (
    Bound("flood", "ours", 0.27),
    Bound("flood", "ours-off", 0.36),
    Bound("short", "ours", 0.95),
)


def main() -> int:
    """Measure; returns 1 if a bound is broken."""
    configure_logging(LogSettings(level=LogLevel.WARNING))
    settle_collector()
    broken = False
    with open_server() as endpoint:
        for load in dict.fromkeys(bound.load for bound in BOUNDS):
            bounds = [bound for bound in BOUNDS if bound.load == load]
            costs: dict[str, list[float]] = {path: [] for path in (BASELINE, *(bound.path for bound in bounds))}
            for _ in range(ROUNDS):
                for path, windows in costs.items():
                    windows.append(measure(path, endpoint, LOADS[load], SECONDS).us_per_token)
            for bound in bounds:
                ratio = min(costs[bound.path]) / min(costs[BASELINE])
                verdict = "ok" if ratio <= bound.ratio else "TOO SLOW"
                broken |= ratio > bound.ratio
                print(  # noqa: T201
                    f"{load:8} {bound.path:9} {ratio:.3f} of the naive path's CPU per token, at most {bound.ratio}: "
                    f"{verdict}",
                    flush=True,
                )
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
