"""What is drawn: panels of Rich, one for each target; no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trio_sidecar.top.view import Course, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from trio_sidecar.top.view import Latency, Slot

__all__ = ["Target", "bars", "number", "screen", "seconds"]

BARS = "▁▂▃▄▅▆▇█"
NONE = "-"
STATE_STYLES = {"serving": "green", "away": "bold red", "starting": "yellow", "stopped": "red"}
WIDTH = 38
"""Columns of the figures, so that the courses beside them do not jump."""

SLOTS_SHOWN = 16
"""Connections that are listed one by one."""


@attrs.define(eq=False)
class Target:
    """A target as it is known.

    Attributes:
        url: Where it is asked.
        view: Its last figures; None before the first answer.
        course: Figures over time.
        failure: Why the last question got no answer; empty if it got one.
    """

    url: str
    view: View | None = None
    course: Course = attrs.field(factory=Course)
    failure: str = ""


def number(value: float | None, unit: str = "") -> str:
    """A number in three digits or so."""
    if value is None:
        return NONE
    text = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return f"{text}{unit}"


def seconds(value: float | None) -> str:
    """A time in the unit that suits it."""
    if value is None:
        return NONE
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def bars(values: Iterable[float | None]) -> str:
    """The course of some values as a line of bars, the largest full; a gap is a space."""
    points = list(values)
    top = max((value for value in points if value is not None), default=0.0)
    return "".join(" " if value is None else BARS[_step(value, top)] for value in points)


def _step(value: float, top: float) -> int:
    return min(len(BARS) - 1, int(value / top * len(BARS))) if top > 0 else 0


def screen(targets: Sequence[Target], interval: float, *, live: bool) -> RenderableType:
    """Everything.

    Args:
        targets: From top to bottom.
        interval: Seconds between two samples.
        live: Whether it goes on, and so has keys.
    """
    title = Text(f"trio-sidecar top · every {interval:g} s")
    if live:
        title.append(" · q ends", style="dim")
    return Group(title, *(_panel(target) for target in targets))


def _panel(target: Target) -> Panel:
    now = target.view
    if target.failure or now is None:
        colour = "red" if target.failure else "dim"
        body = Text(target.failure or "waiting for a first answer", style=colour)
        return Panel(body, title=target.url, title_align="left", border_style=colour)
    rows = Table.grid(padding=(0, 2))
    # Only the last column gives way on a narrow terminal: names and figures stay.
    rows.add_column(style="bold", width=9)
    rows.add_column(width=WIDTH)
    rows.add_column(style="cyan")
    for name, figures, more in _rows(now, target.course):
        rows.add_row(name, figures, Text(more, no_wrap=True, overflow="ellipsis"))
    style = "yellow" if now.draining else STATE_STYLES.get(now.engine, "green")
    return Panel(rows, title=target.url, title_align="left", border_style=style.removeprefix("bold "))


def _rows(now: View, course: Course) -> Iterable[tuple[str, RenderableType, str]]:
    if now.engine:
        state = Text(now.engine, style=STATE_STYLES.get(now.engine, ""))
        state.append(f"  {now.model}", style="dim")
        yield "engine", state, f"{number(now.recoveries)} recoveries, life {now.engine_id or 'unknown'}"
    if now.draining:
        yield "draining", Text("takes no more requests", style="yellow"), ""
    yield "requests", f"{number(now.in_flight)} in flight", ""
    yield "ended", ", ".join(f"{reason} {number(grown, '/s')}" for reason, grown in now.ended.items()) or "none", ""
    out, read = f"{number(now.tokens_out, '/s')} out", f"{number(now.tokens_in, '/s')} in"
    yield "tokens", out if now.tokens_in is None else f"{out}, {read}", bars(course.tokens)
    if now.engine:
        yield "TTFT", _latency(now.ttft), bars(course.ttft)
        yield "ITL", _latency(now.itl), bars(course.itl)
        yield "merging", f"{number(now.chunks_per_token)} chunks per token", ""
    if now.slots:
        up = sum(slot.limit > 0 for slot in now.slots)
        streams = sum(slot.streams for slot in now.slots)
        counts = f"{up} of {len(now.slots)} up, {number(streams)} streams, {number(now.waiting)} waiting"
        yield "pool", counts, f"replaced {number(now.reconnects)}"
        yield "", _slots(now.slots), ""
    yield "loop lag", _latency(now.loop_lag), ""


def _latency(value: Latency) -> str:
    return f"p50 {seconds(value.p50)}, p99 {seconds(value.p99)}"


def _slots(slots: Sequence[Slot]) -> Text:
    text = Text()
    for slot in slots[:SLOTS_SHOWN]:
        if not slot.limit:
            text.append(f"{slot.place}:down ", style="red")
        else:
            text.append(f"{slot.place}:{slot.streams:g} ", style="" if slot.streams else "dim")
    if len(slots) > SLOTS_SHOWN:
        text.append("…", style="dim")
    return text
