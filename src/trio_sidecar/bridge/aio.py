"""asyncio primitives for packages that must not import asyncio; all are asyncio-flavoured.

Their time is the loop's, which on the test host is Trio's virtual clock.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = [
    "AioCancelled",
    "AioEvent",
    "AioInterrupted",
    "AioLock",
    "AioSignal",
    "AioTaskGroup",
    "aio_checkpoint",
    "aio_in_thread",
    "aio_now",
    "aio_shielded",
    "aio_sleep",
    "aio_timeout",
    "aio_unless",
]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

AioCancelled = asyncio.CancelledError
"""What a cancelled asyncio task sees; catch it only to clean up, then raise it again."""

AioLock = asyncio.Lock
"""Mutual exclusion between asyncio tasks: ``async with lock``."""

AioTaskGroup = asyncio.TaskGroup
"""asyncio's nursery: ``async with AioTaskGroup() as group: group.create_task(aio_fn())``."""


class AioEvent:
    """A flag that any number of asyncio tasks can wait for; set and clear it from either flavour."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Raise the flag and wake everyone who waits."""
        self._event.set()

    def clear(self) -> None:
        """Lower the flag."""
        self._event.clear()

    def is_set(self) -> bool:
        """Whether the flag is up."""
        return self._event.is_set()

    async def aio_wait(self) -> None:
        """Wait until the flag is up."""
        await self._event.wait()


class AioSignal:
    """A wake-up call with at most one waiter, which uses it up; cheaper than :class:`AioEvent`.

    A call made while nobody waits is kept for the next wait; several such calls count as one. So check the state that
    the signal stands for in a loop around the wait. Call it from either flavour.
    """

    __slots__ = ("_called", "_waiter")

    def __init__(self) -> None:
        self._called = False
        self._waiter: asyncio.Future[None] | None = None

    def call(self) -> None:
        """Wake the waiter, now or when it comes."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._called = True
        else:
            waiter.set_result(None)

    async def aio_wait(self) -> None:
        """Wait for a call.

        Raises:
            RuntimeError: Another task waits already.
        """
        if self._called:
            self._called = False
            return
        if self._waiter is not None:
            reason = "another task waits for this signal already"
            raise RuntimeError(reason)
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        except asyncio.CancelledError:
            # A call that met the cancel is kept for the next wait.
            self._called = self._called or (waiter.done() and not waiter.cancelled())
            raise
        finally:
            self._waiter = None


async def aio_checkpoint() -> None:
    """Let other tasks run once, and notice a cancellation."""
    await asyncio.sleep(0)


async def aio_sleep(seconds: float) -> None:
    """Sleep."""
    await asyncio.sleep(seconds)


def aio_now() -> float:
    """The loop's time in seconds; only differences mean anything."""
    return asyncio.get_running_loop().time()


def aio_timeout(seconds: float | None) -> asyncio.Timeout:
    """An async context manager that ends its block with TimeoutError when time runs out; None is no limit."""
    return asyncio.timeout(seconds)


async def aio_shielded(seconds: float, aio_fn: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """Run cleanup to its end even if this task is cancelled meanwhile, but not longer than that many seconds.

    Raises:
        TimeoutError: Time ran out; the cleanup was cancelled.
        CancelledError: This task was cancelled; the cleanup has ended all the same.
    """

    async def aio_main() -> T:
        return await aio_fn(*args)

    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    task = loop.create_task(aio_main())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task}, timeout=max(0.0, deadline - loop.time()))
        except asyncio.CancelledError as error:  # noqa: ASYNC103 - raised below, when the cleanup has ended
            cancelled = error
        if not task.done() and loop.time() >= deadline:
            task.cancel()
            await asyncio.wait({task}, timeout=0.0)
            if cancelled is None:
                reason = f"cleanup did not end within {seconds:g} s"
                raise TimeoutError(reason)
            break
    if cancelled is not None:
        if task.done() and not task.cancelled():
            task.exception()  # retrieved: the cancel says more
        raise cancelled
    return task.result()


class AioInterrupted(Exception):
    """What :func:`aio_unless` was to watch for has happened."""


async def aio_unless(event: AioEvent, aio_fn: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """Run one asyncio function, unless an event comes first, or has come already; then the function is cancelled.

    Raises:
        AioInterrupted: The event came first.
    """

    async def aio_main() -> T:
        return await aio_fn(*args)

    if event.is_set():
        raise AioInterrupted
    loop = asyncio.get_running_loop()
    task, watcher = loop.create_task(aio_main()), loop.create_task(event.aio_wait())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise AioInterrupted
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()


async def aio_in_thread(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run a blocking function in a worker thread of the loop; a cancel stops the waiting, not the function."""
    return await asyncio.get_running_loop().run_in_executor(None, fn, *args)
