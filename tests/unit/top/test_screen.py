"""What is drawn, as plain text."""

from __future__ import annotations

import io

import attrs
import pytest
from rich.console import Console

from trio_sidecar.top.screen import Target, bars, number, screen, seconds
from trio_sidecar.top.view import Latency, Slot, View

WORKER = View(
    model="served-model (0.32.0)",
    engine="away",
    engine_id="life-2",
    recoveries=3,
    in_flight=12,
    ended={"finished": 4.0, "error": 0.25},
    tokens_out=1234.5,
    tokens_in=30.0,
    chunks_per_token=0.5,
    ttft=Latency(0.012, 1.5),
    itl=Latency(0.0004, 0.02),
    slots=(Slot("1", 3, 99), Slot("2", 0, 0)),
    waiting=2,
    reconnects=5,
    loop_lag=Latency(0.0, 0.001),
)


def drawn(*targets: Target, live: bool = False, width: int = 80) -> str:
    """The screen as text."""
    out = io.StringIO()
    Console(file=out, width=width).print(screen(targets, 1.0, live=live))
    return out.getvalue()


def test_a_worker() -> None:
    """All its figures fit into 80 columns, each with its name."""
    target = Target("http://h:1/", WORKER)
    for tokens in (None, 0.0, 50.0, 100.0):
        target.course.tokens.append(tokens)
    text = drawn(target)
    for part in (
        "http://h:1/",
        "engine     away  served-model (0.32.0)",
        "3 recoveries, life life-2",
        "requests   12 in flight",
        "ended      finished 4/s, error 0.25/s",
        "tokens     1,234/s out, 30/s in",
        "▁▅█",
        "TTFT       p50 12 ms, p99 1.5 s",
        "ITL        p50 400 µs, p99 20 ms",
        "merging    0.5 chunks per token",
        "pool       1 of 2 up, 3 streams, 2 waiting",
        "replaced 5",
        "1:3 2:down",
        "loop lag   p50 0 µs, p99 1 ms",
    ):
        assert part in text, text
    assert "draining" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_what_is_long() -> None:
    """A long life and many reasons or connections take no other figure's place, and no name's."""
    reasons = {"finished": 4.0, "engine_shutdown": 0.25, "connection_timeout": 0.5, "cancelled": 1.0}
    slots = tuple(Slot(str(place), 0, 99) for place in range(1, 17))
    target = Target("http://h:1/", attrs.evolve(WORKER, engine_id="life-" + "x" * 60, ended=reasons, slots=slots))
    for _ in range(60):
        target.course.tokens.append(1.0)
    text = drawn(target)
    names = ("engine", "requests", "ended", "tokens", "TTFT", "ITL", "merging", "pool", "loop lag")
    assert all(f"│ {name} " in text for name in names), text
    assert "3 recoveries, life lif" in text
    for part in (*reasons, *(f"{slot.place}:0" for slot in slots)):
        assert part in text, text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_an_engine_and_a_drain() -> None:
    """Rows that an engine does not have are left out."""
    text = drawn(Target("http://h:1/", View(in_flight=7, tokens_out=25, ended={"OK": 2.0}, draining=True)))
    assert "draining   takes no more requests" in text
    assert "tokens     25/s out " in text
    for row in ("TTFT", "pool", "engine", "merging"):
        assert row not in text


def test_targets_that_do_not_answer() -> None:
    """The reason stands in the place of the figures, which may be old; one that was not asked yet waits."""
    text = drawn(Target("http://a:1/", WORKER, failure="cannot connect to a:1: refused"), Target("http://b:1/"))
    assert "cannot connect to a:1: refused" in text
    assert "waiting for a first answer" in text
    assert "TTFT" not in text


def test_keys_are_named_where_there_are_some() -> None:
    """A printed page has none."""
    assert ("q ends" in drawn(live=True), "q ends" in drawn()) == (True, False)


def test_many_connections() -> None:
    """Sixteen are listed."""
    text = drawn(Target("t", View(slots=tuple(Slot(str(place), 0, 9) for place in range(1, 65)))), width=160)
    assert "16:0 …" in text
    assert "64 of 64 up" in text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0, "0"), (0.125, "0.125"), (12.34, "12.3"), (99.0, "99"), (12345.6, "12,346")]
)
def test_numbers(value: float | None, text: str) -> None:
    """Three digits or so."""
    assert text == number(value)
    assert value is None or f"{text}/s" == number(value, "/s")


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.00025, "250 µs"), (0.0015, "1.5 ms"), (0.25, "250 ms"), (2.5, "2.5 s")]
)
def test_seconds(value: float | None, text: str) -> None:
    """In the unit that suits them."""
    assert text == seconds(value)


def test_bars() -> None:
    """The largest is full, nothing is lowest, a gap is a space; all zeros are low, not high."""
    assert "▁▂▅█ █" == bars([0.0, 1.0, 4.0, 8.0, None, 7.9])
    assert "▁▁" == bars([0.0, 0.0])
    assert " " == bars([None])
    assert "" == bars([])
