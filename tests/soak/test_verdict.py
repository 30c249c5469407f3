"""The soak's judgement, on made-up measurements."""

from __future__ import annotations

import random

import pytest

from soak.verdict import Quiet, Sample, compare, table

SECONDS = 100.0
MIB = 1 << 20


def samples(growth_per_second: float = 0.0, *, threads: float = 0.0, files: float = 0.0) -> list[Sample]:
    """A process that warms up for a third of the time, and then grows, with noise."""
    numbers = random.Random(1)
    return [
        Sample(
            at=float(at),
            process="worker",
            rss_bytes=int(100 * MIB + min(at, 33) * MIB + growth_per_second * at + numbers.gauss(0, MIB)),
            open_files=int(50 + files * at + numbers.randrange(5)),
            threads=int(16 + threads * at),
        )
        for at in range(int(SECONDS) + 1)
    ]


def rests(*, files: float = 0.0, trio: float = 0.0, aio: float = 0.0, objects: float = 0.0) -> list[Quiet]:
    """A process at rest every ten seconds, after 20 requests a second; growth is per second, or per request."""
    return [
        Quiet(
            at=float(at),
            process="worker",
            requests=20 * at,
            trio_tasks=int(12 + trio * at),
            aio_tasks=int(1 + aio * at),
            open_files=int(50 + files * at),
            objects=int(1000 + objects * 20 * at),
        )
        for at in range(10, int(SECONDS) + 1, 10)
    ]


def growing(measured: list[Sample], quiet: list[Quiet]) -> list[str]:
    """What grows."""
    return [row.what for row in compare(measured, quiet, SECONDS) if not row.flat]


def test_a_service_that_is_flat() -> None:
    """Warm-up and noise are no growth."""
    assert [] == growing(samples(), rests())


def test_memory_that_grows() -> None:
    """A steady growth after the warm-up is found; one of a few KiB a second is below what so short a run can tell."""
    assert ["memory, KiB"] == growing(samples(0.2 * MIB), rests())
    assert [] == growing(samples(0.01 * MIB), rests())


@pytest.mark.parametrize(
    ("grows", "what"),
    [
        ({"files": 0.1}, "descriptors at rest"),
        ({"trio": 0.1}, "Trio tasks at rest"),
        ({"aio": 0.1}, "asyncio tasks at rest"),
        ({"objects": 3.0}, "objects at rest"),
    ],
)
def test_what_stays_at_rest(grows: dict[str, float], what: str) -> None:
    """One descriptor or task more every ten seconds is found, and a few objects for each request."""
    assert [what] == growing(samples(), rests(**grows))


def test_what_grows_under_load() -> None:
    """Threads and descriptors that become more under the same load are found."""
    assert ["threads"] == growing(samples(threads=0.1), rests())
    assert ["descriptors under load"] == growing(samples(files=1.0), rests())


def test_too_little_to_judge() -> None:
    """A process that was not looked at in a window is an error, and not flat."""
    with pytest.raises(ValueError, match="no samples from 83% to 100%"):
        compare(samples()[:80], rests(), SECONDS)
    with pytest.raises(ValueError, match="at rest 1 times"):
        compare(samples(), rests()[:5], SECONDS)


def test_the_table_says_what_grows() -> None:
    """One line per comparison, with both values, the growth and what is allowed."""
    text = table(compare(samples(), rests(files=1.0), SECONDS))
    (line,) = (line for line in text.splitlines() if "descriptors at rest" in line)
    assert ["worker", "descriptors", "at", "rest", "100", "150", "+50", "2", "GROWS"] == line.split()
