"""Several children in one nursery: if one ends early, the work stops; when the work stops, all end, in order."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from trio_sidecar.up.child import Child, Part, PartFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

KILL_SECONDS = 2.0
OUTPUT_SECONDS = 1.0


class Supervisor:
    """The children of one run.

    Attributes:
        children: In the order of their start.
    """

    def __init__(self, nursery: trio.Nursery, log_dir: Path, on_line: Callable[[str, str], None]) -> None:
        self.children: list[Child] = []
        self.failure: PartFailed | None = None
        self.scope = trio.CancelScope()
        self._nursery = nursery
        self._log_dir = log_dir
        self._on_line = on_line
        self._hurry = trio.Event()

    def start(self, part: Part) -> Child:
        """Start a part; from now on its end ends the work, and the end of the work ends it.

        Raises:
            OSError: The command cannot be started.
        """
        child = Child(part, self._log_dir / f"{part.name.replace(' ', '-')}.log", self._on_line)
        self.children.append(child)
        self._nursery.start_soon(self._watch, child)
        return child

    async def _watch(self, child: Child) -> None:
        # Shielded, because the output must be read while the children end; stop_all sees to it that this is bounded.
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child.read_output)
                await child.watch()
                # Its own children may hold the pipe open for as long as they like.
                nursery.cancel_scope.deadline = trio.current_time() + OUTPUT_SECONDS
        if not child.stopping and self.failure is None:
            self.failure = child.failure()
            self.scope.cancel()

    def hurry(self) -> None:
        """Kill what has not ended yet, instead of waiting for it."""
        self._hurry.set()

    async def stop_all(self, order: Sequence[str]) -> None:
        """End the children by name in that order, each within its bound; must be called shielded."""
        for child in self.children:
            child.stopping = True
        ordered = sorted(
            self.children, key=lambda child: order.index(child.part.name) if child.part.name in order else 0
        )
        for child in ordered:
            await self._stop(child)
            child.close()

    async def _stop(self, child: Child) -> None:
        child.terminate()
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + child.part.stop_secs
            nursery.start_soon(self._cancel_on_hurry, nursery.cancel_scope)
            await child.wait()
            nursery.cancel_scope.cancel()
        # The leader may have left children of its own; after SIGKILL the kernel needs no more than a moment.
        child.kill_group()
        with trio.move_on_after(KILL_SECONDS):
            await child.wait()

    async def _cancel_on_hurry(self, scope: trio.CancelScope) -> None:
        await self._hurry.wait()
        scope.cancel()


@asynccontextmanager
async def open_supervisor(
    log_dir: Path, *, stop_order: Sequence[str], on_line: Callable[[str, str], None]
) -> AsyncIterator[Supervisor]:
    """Supervise children for the length of a block.

    Args:
        log_dir: Gets one log file for each child.
        stop_order: Names of parts, in the order in which they are to end.
        on_line: Called with the part's name and each line of its output.

    Raises:
        PartFailed: A child ended before the block did; the block was cancelled.
    """
    async with trio.open_nursery() as nursery:
        supervisor = Supervisor(nursery, log_dir, on_line)
        try:
            with supervisor.scope:
                yield supervisor
        finally:
            with trio.CancelScope(shield=True):
                await supervisor.stop_all(stop_order)
    if supervisor.failure is not None:
        raise supervisor.failure from None  # the cancellation that it caused is no cause of it
