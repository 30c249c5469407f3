"""The live view's life: one task asks each target, one draws, one listens to the keyboard (Trio-flavoured)."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import tty
from typing import TYPE_CHECKING

import trio
from rich.console import Console
from rich.live import Live

from trio_sidecar.top.scrape import ScrapeFailed, scrape
from trio_sidecar.top.screen import Target, screen
from trio_sidecar.top.view import view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

    from trio_sidecar.config import TopSettings
    from trio_sidecar.endpoint import HttpEndpoint
    from trio_sidecar.top.scrape import Sample

__all__ = ["run_once", "run_top"]

QUIT = (b"q", b"Q", b"\x1b")


async def watch(target: Target, endpoint: HttpEndpoint, interval: float) -> None:
    """Ask one target again and again, on its own clock; a slow one delays no other."""
    before: Sample | None = None
    while True:
        asked_at = trio.current_time()
        before = await ask(target, endpoint, before, interval)
        await trio.sleep_until(asked_at + interval)


async def ask(target: Target, endpoint: HttpEndpoint, before: Sample | None, limit: float) -> Sample | None:
    """Ask once; the new sample, or the one before if there is no answer."""
    try:
        now = await scrape(endpoint, max(limit, 1.0))
    except ScrapeFailed as error:
        target.failure = str(error)
        target.course.add(None)
        return before
    target.failure = ""
    target.view = view(before, now)
    target.course.add(target.view)
    return now


async def run_top(settings: TopSettings, endpoints: Sequence[HttpEndpoint], *, out: TextIO, keys: TextIO) -> None:
    """Draw until q, Escape, Ctrl-C or SIGTERM; in the main thread."""
    targets = [Target(str(endpoint)) for endpoint in endpoints]
    console = Console(file=out)
    with raw_keys(keys), Live(console=console, screen=True, auto_refresh=False) as live:
        async with trio.open_nursery() as nursery:
            for target, endpoint in zip(targets, endpoints, strict=True):
                nursery.start_soon(watch, target, endpoint, settings.interval_secs)
            nursery.start_soon(draw, live, targets, settings.interval_secs)
            nursery.start_soon(cancel_at_key, keys, nursery.cancel_scope)
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                await anext(aiter(signals))
            nursery.cancel_scope.cancel()


async def draw(live: Live, targets: Sequence[Target], interval: float) -> None:
    """Draw what is known, twice per sample, so that an answer is seen soon after it came."""
    while True:
        live.update(screen(targets, interval, live=True), refresh=True)
        await trio.sleep(interval / 2)


async def run_once(settings: TopSettings, endpoints: Sequence[HttpEndpoint], *, out: TextIO) -> int:
    """Ask each target twice, one interval apart, and print what is found.

    Returns:
        The exit code: 1 if a target did not answer.
    """
    targets = [Target(str(endpoint)) for endpoint in endpoints]

    async def twice(target: Target, endpoint: HttpEndpoint) -> None:
        first = await ask(target, endpoint, None, settings.interval_secs)
        await trio.sleep(settings.interval_secs)
        await ask(target, endpoint, first, settings.interval_secs)

    async with trio.open_nursery() as nursery:
        for target, endpoint in zip(targets, endpoints, strict=True):
            nursery.start_soon(twice, target, endpoint)
    Console(file=out).print(screen(targets, settings.interval_secs, live=False))
    return int(any(target.failure for target in targets))


async def cancel_at_key(keys: TextIO, scope: trio.CancelScope) -> None:
    """Cancel the scope at a key that ends the view; where there is no keyboard, only a signal does."""
    if not keys.isatty():
        return
    while True:
        await trio.lowlevel.wait_readable(keys.fileno())
        pressed = os.read(keys.fileno(), 16)
        if pressed in QUIT:
            scope.cancel()
        if not pressed:
            return


@contextlib.contextmanager
def raw_keys(keys: TextIO) -> Iterator[None]:
    """Let keys arrive one by one and unseen, if this is a terminal, and put it back afterwards."""
    if not keys.isatty():
        yield
        return
    before = termios.tcgetattr(keys.fileno())
    tty.setcbreak(keys.fileno())
    try:
        yield
    finally:
        termios.tcsetattr(keys.fileno(), termios.TCSADRAIN, before)
