"""Figures as a table, as JSON and as a plot."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from trio_sidecar_bench.loads import LOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    Figures = Mapping[str, Any]
    Rounds = Sequence[Figures]

__all__ = ["load_tables", "memory_table", "plot", "ratios", "server_line", "start_up_table"]

SERVER_LIMIT = 0.5
"""Share of one core beyond which the server might hold the others up."""


def us_per_token(figures: Figures) -> float:
    """CPU of the worker per token, in microseconds."""
    return float(figures["cpu"]["worker"] / max(1, figures["tokens"]) * 1e6)


def us_per_request(figures: Figures) -> float:
    """CPU of the worker per request that ended, in microseconds."""
    return float(figures["cpu"]["worker"] / max(1, figures["ended"]) * 1e6)


def tokens_per_second(figures: Figures) -> float:
    """What came out."""
    return float(figures["tokens"] / figures["seconds"])


def _milliseconds(name: str, percentile: str) -> Callable[[Figures], float | None]:
    def read(figures: Figures) -> float | None:
        value = figures[name].get(percentile)
        return None if value is None else float(value) / 1000

    return read


COLUMNS: dict[str, Callable[[Figures], float | None]] = {
    "tokens/s": tokens_per_second,
    "µs/token": us_per_token,
    "µs/request": lambda figures: us_per_request(figures) if figures["ended"] else None,
    "chunks/token": lambda figures: figures["chunks"] / max(1, figures["tokens"]),
    "TTFT p50": _milliseconds("ttft_us", "p50"),
    "TTFT p99": _milliseconds("ttft_us", "p99"),
    "delay p50": _milliseconds("delay_us", "p50"),
    "delay p99": _milliseconds("delay_us", "p99"),
    "ITL+ p99": _milliseconds("gap_added_us", "p99"),
    "RSS MiB": lambda figures: figures["rss_kib"] / 1024,
    "server": lambda figures: figures["cpu"]["server"] / figures["seconds"],
    "client": lambda figures: figures["cpu"]["loadgen"] / figures["seconds"],
    "errors": lambda figures: float(figures["errors"]),
}
UNSTAMPED = ("delay p50", "delay p99", "ITL+ p99")
"""Columns that need the server's stamps, which the mock engine's tokens do not carry."""


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratios(ours: Rounds, other: Rounds, figure: Callable[[Figures], float]) -> list[float]:
    """Ours over the other's, round by round."""
    return [figure(mine) / max(1e-9, figure(his)) for mine, his in zip(ours, other, strict=False)]


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}".rstrip("0").rstrip(".")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def load_tables(results: Mapping[str, Mapping[str, Rounds]]) -> str:
    """One table per load: medians over the rounds, and ours against the others round by round."""
    parts = []
    for load_name, by_contender in results.items():
        load = LOADS[load_name]
        measured = {name: rounds for name, rounds in by_contender.items() if rounds}
        against = [name for name in ("rust", "floor", "naive") if name in measured]
        head = [load_name, *COLUMNS, *(f"CPU/{name}" for name in against)]
        rows = []
        for name, rounds in measured.items():
            cells = [
                None
                if column in UNSTAMPED and name.startswith("inproc")
                else _median(read(figures) for figures in rounds)
                for column, read in COLUMNS.items()
            ]
            compared = [_median(ratios(rounds, measured[other], us_per_token)) for other in against]
            rows.append([name, *(_cell(cell) for cell in cells), *(_cell(ratio) for ratio in compared)])
        offered = f", {load.offered} tokens/s offered" if load.offered else ""
        parts.append(f"{load.streams} streams, {load.tokens} tokens each{offered}\n{_table(head, rows)}")
    return "\n\n".join(parts)


def server_line(results: Mapping[str, Mapping[str, Rounds]]) -> str:
    """Whether the server was ever what limited the others."""
    shares = [
        (figures["cpu"]["server"] / figures["seconds"], figures["cpu"]["worker"] / figures["seconds"], load, name)
        for load, by_contender in results.items()
        for name, rounds in by_contender.items()
        for figures in rounds
        if name != "floor" and not name.startswith("inproc")
    ]
    if not shares:
        return "server: not used"
    share, _, load, name = max(shares)
    verdict = "never the bottleneck" if share < SERVER_LIMIT else "BUSY: distrust the figures of that load"
    return f"server: at most {share:.0%} of one core ({load} on {name}); {verdict}"


def start_up_table(results: Mapping[str, Mapping[int, Sequence[float]]]) -> str:
    """Seconds to ready, and against one connection."""
    counts = next(iter(results.values())).keys()
    rows = []
    for name, by_count in results.items():
        medians = {count: statistics.median(values) for count, values in by_count.items()}
        first = next(iter(medians.values()))
        rows.append([name, *(f"{value:.2f}" for value in medians.values()), f"{medians[max(counts)] / first:.2f}"])
    return _table(["start-up, s", *(f"{count} conn." for count in counts), "most/first"], rows)


def memory_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Resident memory."""
    rows = [
        [
            name,
            *(f"{figures[key] / 1024:.1f}" for key in ("idle", "before", "after")),
            f"{figures['requests']:.0f}",
            f"{figures['per_stream']:.1f}",
            f"{figures['per_stream_again']:.1f}",
        ]
        for name, figures in results.items()
    ]
    return _table(["memory", "idle MiB", "before MiB", "after MiB", "requests", "KiB/stream", "KiB/stream again"], rows)


def plot(results: Mapping[str, Mapping[str, Rounds]], path: Path) -> None:
    """Latency and CPU against load, one line per contender.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    loads = sorted(
        (
            LOADS[name]
            for name in results
            if LOADS[name].offered and not LOADS[name].lockstep and LOADS[name].name[0].isdigit()
        ),
        key=lambda load: load.offered,
    )
    names = list(dict.fromkeys(name for load in loads for name, rounds in results[load.name].items() if rounds))
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    panels = figure.subplots(1, 3)
    titles = {
        "added delay per token, p50 (ms)": _milliseconds("delay_us", "p50"),
        "added delay per token, p99 (ms)": _milliseconds("delay_us", "p99"),
        "worker CPU per token (µs)": us_per_token,
    }
    for panel, (title, read) in zip(panels, titles.items(), strict=True):
        for name in names:
            points = [
                (load.offered, value)
                for load in loads
                if (value := _median(read(figures) for figures in results[load.name][name])) is not None
            ]
            panel.plot([at for at, _ in points], [value for _, value in points], marker="o", label=name)
        panel.set(title=title, xlabel="tokens/s offered", xscale="log", yscale="log")
        panel.grid(visible=True, alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=120)
