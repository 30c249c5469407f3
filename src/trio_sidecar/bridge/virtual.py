"""A host for simulations: a whole program of both flavours in virtual time, with no thread and no wait.

As in production, Trio is the guest of an asyncio loop. The loop's clock is a number: when neither side has anything to
do, it jumps to the next timer or deadline of either, so that an hour of silence takes no time at all. Nothing that
happens depends on the machine's speed; with the order of Trio's tasks and of sets fixed too, and a random generator
that is seeded, the same program does the same each time.

Only what the program itself does exists here: a socket, a thread or a process that it waits for is never heard of.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import trio

from trio_sidecar.bridge.host import begin_guest, known_to_trio_asyncio
from trio_sidecar.bridge.loop import log_stray_error

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    import outcome

__all__ = ["NeverEnds", "run_virtual"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_SECS = 1000.0
"""Where the clock begins."""

_QUIET_STEPS = 2
"""Steps of Trio alone that show that it waits: what it hears through its wake-up socket, such as a signal or the end of
the run, is found at the end of a step and told to its tasks in the next one."""


class NeverEnds(Exception):
    """The program waits for something that will never happen, or is busy without end."""


class _VirtualClock(trio.abc.Clock):
    """The loop's time, for Trio."""

    def __init__(self, loop: _VirtualLoop) -> None:
        self._loop = loop

    def start_clock(self) -> None:
        """Nothing to do."""

    def current_time(self) -> float:
        """Now."""
        return self._loop.time()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """No time at all: Trio must not wait by itself, so it is told to look again, and the loop decides when."""
        self._loop.trio_wakes_at = deadline
        return 0.0


class _NoWait(selectors.SelectSelector):
    """Asks the loop what comes next where others would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: _VirtualLoop | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let the loop choose; no file is ever ready."""
        if self.loop is not None:
            self.loop.choose(timeout)
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on a clock of its own.

    Attributes:
        trio_wakes_at: When Trio wants to run next though nothing calls it; minus infinity while it may have to at once.
        rounds_left: How often the loop may still go around.
    """

    def __init__(self, random: random.Random, rounds: int) -> None:
        self._now = START_SECS
        self._random = random
        self._tick: Callable[[], object] | None = None
        self._quiet = 0
        self.trio_wakes_at = -math.inf
        self.rounds_left = rounds
        selector = _NoWait()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        """Now, in virtual seconds."""
        return self._now

    def keep_tick(self, tick: Callable[[], object]) -> None:
        """Take Trio's next step, to be made when the time has come."""
        self._tick = tick

    def choose(self, timeout: float | None) -> None:
        """Decide what runs next, where asyncio would wait that long for files.

        Raises:
            NeverEnds: Nothing can ever run again, or the limit of rounds is reached.
        """
        self.rounds_left -= 1
        if self.rounds_left < 0:
            reason = f"it was still busy after its last round, at {self._now - START_SECS:g} s"
            raise NeverEnds(reason)
        if timeout is None or timeout > 0:
            self._quiet = self._quiet + 1 if self.trio_wakes_at > self._now else 0
            if self._quiet <= _QUIET_STEPS:  # the first look is at what was before the change
                self._step()
                return
            next_at = min(self.trio_wakes_at, math.inf if timeout is None else self._now + timeout)
            if next_at == math.inf:
                reason = f"nothing is left that could happen, at {self._now - START_SECS:g} s"
                raise NeverEnds(reason)
            self._now = next_at
        # Callbacks of asyncio's side may run in this round, after which Trio has to be asked anew when it wants to run.
        # Its turn comes in this round or later, as on a host that is shared.
        self._quiet = 0
        if self._random.random() < 0.5:
            self._step()

    def _step(self) -> None:
        """Give Trio a turn in this round, after the callbacks that are due."""
        if self._tick is not None:
            tick, self._tick = self._tick, None
            self.trio_wakes_at = -math.inf
            self.call_soon(tick)


def run_virtual(
    async_fn: Callable[[*Ts], Awaitable[T]], *args: *Ts, random: random.Random, rounds: int = 1_000_000
) -> T:
    """Run a Trio function beside an asyncio loop, both in virtual time that starts at 1000 s, and return its result.

    asyncio tasks that are left are cancelled and get five (virtual) seconds.

    Args:
        async_fn: The main function, called with ``args``.
        args: Its arguments.
        random: Decides how the two sides take turns.
        rounds: How often the loop may go around, against programs that are busy without end.

    Raises:
        NeverEnds: The program can never end. What it held is lost, and its cleanup does not run.
        BaseException: Whatever the function raised.
    """
    loop = _VirtualLoop(random, rounds)
    loop.set_exception_handler(log_stray_error)
    ended: outcome.Outcome[T] | None = None

    def on_end(result: outcome.Outcome[Any]) -> None:
        nonlocal ended
        ended = result
        loop.stop()

    try:
        with known_to_trio_asyncio(loop):
            begin_guest(loop, async_fn, args, on_end, later=loop.keep_tick, clock=_VirtualClock(loop))
            loop.run_forever()
    finally:
        loop.close()
    assert ended is not None  # noqa: S101 - only its end stops the loop
    return ended.unwrap()
