"""How much CPU time each step of a program takes: what the loop runs before it can do anything else.

In production Trio is a guest of uvloop, which cannot be looked into. Here it is the guest of asyncio's own loop: the
same callbacks, steps of tasks and turns of Trio, each of which is timed. CPU time of the thread, since the time on the
wall says more about the machine's other work.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import attrs

from trio_sidecar.bridge.host import begin_guest, known_to_trio_asyncio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import outcome


@attrs.frozen(slots=True, order=True)
class Step:
    """One step.

    Attributes:
        seconds: CPU time.
        what: The task or the function.
    """

    seconds: float
    what: str


def run_measured(async_fn: Callable[[list[Step]], Awaitable[None]]) -> list[Step]:
    """Run a Trio function beside asyncio's own loop.

    Args:
        async_fn: Gets the list in which steps are collected; clearing it forgets those so far.

    Returns:
        The steps, the longest first.

    Raises:
        BaseException: Whatever the function raised.
    """
    steps: list[Step] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        callback = getattr(handle, "_callback", None)  # None once it is cancelled
        start = time.thread_time()
        run(handle)
        steps.append(Step(time.thread_time() - start, name_of(callback)))

    loop = asyncio.SelectorEventLoop()
    ended: outcome.Outcome[Any] | None = None

    def on_end(result: outcome.Outcome[Any]) -> None:
        nonlocal ended
        ended = result
        loop.stop()

    try:
        with known_to_trio_asyncio(loop), mock.patch.object(asyncio.Handle, "_run", timed):
            begin_guest(loop, async_fn, (steps,), on_end, later=loop.call_soon, clock=None)
            loop.run_forever()
    finally:
        loop.close()
    assert ended is not None
    ended.unwrap()
    return sorted(steps, reverse=True)


def name_of(callback: Any) -> str:
    """What a callback is: a task's coroutine, or the function."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"task {getattr(owner.get_coro(), '__qualname__', owner)}"
    return str(getattr(callback, "__qualname__", callback))
