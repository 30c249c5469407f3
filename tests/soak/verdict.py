"""What was measured, and whether it grew: by medians of windows after the warm-up, not by single values."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

KIB = 1024

EARLY = (0.50, 0.67)
LATE = (0.83, 1.0)
"""The windows whose medians are compared, as parts of the whole time; what is before them is warm-up."""

RSS_BYTES = 3 << 20
RSS_PART = 0.03
"""By how much the resident memory of a process may grow from one window to the other: the larger of the two."""

COUNT_LIMIT = 2
"""By how many the threads, tasks and descriptors of a process may grow; pools of others' may be in another state."""

OBJECTS = 200
OBJECTS_PER_REQUEST = 0.2
"""By how many containers a process may grow: so many, and so many for each request."""


@attrs.frozen(slots=True, kw_only=True)
class Sample:
    """What the kernel says about a process under load.

    Attributes:
        at: When, in seconds since the load began.
        process: Whose.
        rss_bytes: Resident memory.
        open_files: File descriptors.
        threads: Threads.
    """

    at: float
    process: str
    rss_bytes: int
    open_files: int
    threads: int


@attrs.frozen(slots=True, kw_only=True)
class Quiet:
    """What a process holds while nobody asks for anything.

    Attributes:
        at: When, in seconds since the load began.
        process: Whose.
        requests: How many requests there have been.
        trio_tasks: Trio's tasks.
        aio_tasks: asyncio's tasks.
        open_files: File descriptors.
        objects: Containers, after a garbage collection.
    """

    at: float
    process: str
    requests: int
    trio_tasks: int
    aio_tasks: int
    open_files: int
    objects: int


@attrs.frozen(slots=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        process: Whose.
        what: What is compared.
        early: Its value in the first window.
        late: Its value in the last one.
        limit: The most that it may have grown by.
    """

    process: str
    what: str
    early: float
    late: float
    limit: float

    @property
    def flat(self) -> bool:
        """Whether it has not grown by more."""
        return self.late - self.early <= self.limit

    def cells(self) -> tuple[str, ...]:
        """Its line in a table."""
        growth = self.late - self.early
        verdict = "ok" if self.flat else "GROWS"
        numbers = (f"{self.early:,.0f}", f"{self.late:,.0f}", f"{growth:+,.0f}", f"{self.limit:,.0f}")
        return (self.process, self.what, *numbers, verdict)


HEAD = ("process", "what", "early", "late", "growth", "allowed", "")


def compare(samples: Sequence[Sample], quiet: Sequence[Quiet], seconds: float) -> list[Row]:
    """Compare the windows of each process.

    Args:
        samples: Under load.
        quiet: Without load.
        seconds: How long it took.

    Raises:
        ValueError: A window is empty.
    """
    rows: list[Row] = []
    for process in dict.fromkeys(sample.process for sample in samples):
        of_process = [sample for sample in samples if sample.process == process]
        rows += _under_load(process, of_process, seconds)
    for process in dict.fromkeys(point.process for point in quiet):
        points = [point for point in quiet if point.process == process and point.at >= EARLY[0] * seconds]
        rows += _at_rest(process, points)
    return rows


def _under_load(process: str, samples: Sequence[Sample], seconds: float) -> list[Row]:
    def medians(name: str) -> tuple[float, float]:
        values = []
        for begin, end in (EARLY, LATE):
            window = [getattr(one, name) for one in samples if begin * seconds <= one.at <= end * seconds]
            if not window:
                reason = f"{process} has no samples from {begin:.0%} to {end:.0%} of the time"
                raise ValueError(reason)
            values.append(statistics.median(window))
        return values[0], values[1]

    early, late = medians("rss_bytes")
    limit = max(RSS_BYTES, RSS_PART * early)
    rows = [Row(process=process, what="memory, KiB", early=early / KIB, late=late / KIB, limit=limit / KIB)]
    for name, what in (("threads", "threads"), ("open_files", "descriptors under load")):
        early, late = medians(name)
        # Under load each request has descriptors of its own in Dynamo's runtime: their number follows the load.
        slack = COUNT_LIMIT if name == "threads" else max(COUNT_LIMIT, 0.2 * early)
        rows.append(Row(process=process, what=what, early=early, late=late, limit=slack))
    return rows


def _at_rest(process: str, points: Sequence[Quiet]) -> list[Row]:
    """Between the first and the last rest of the second half, when nothing but what stays is there."""
    if len(points) < 2:
        reason = f"{process} was at rest {len(points)} times in the second half; two are needed"
        raise ValueError(reason)
    first, last = points[0], points[-1]
    rows = [
        Row(process=process, what=what, early=getattr(first, name), late=getattr(last, name), limit=COUNT_LIMIT)
        for name, what in (
            ("open_files", "descriptors at rest"),
            ("trio_tasks", "Trio tasks at rest"),
            ("aio_tasks", "asyncio tasks at rest"),
        )
    ]
    allowed = OBJECTS + OBJECTS_PER_REQUEST * (last.requests - first.requests)
    rows.append(Row(process=process, what="objects at rest", early=first.objects, late=last.objects, limit=allowed))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def as_json(samples: Sequence[Sample], quiet: Sequence[Quiet], rows: Sequence[Row]) -> dict[str, Any]:
    """All of it."""
    return {
        "rows": [attrs.asdict(row) | {"flat": row.flat} for row in rows],
        "samples": [attrs.asdict(sample) for sample in samples],
        "quiet": [attrs.asdict(point) for point in quiet],
    }
