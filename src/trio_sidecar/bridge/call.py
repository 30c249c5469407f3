"""Crossings between the flavours.

Trio → asyncio is :func:`run_aio`. asyncio → Trio should be synchronous calls (``nursery.start_soon``, ``Event.set``,
``scope.cancel``), which both hosts allow from asyncio callbacks; :func:`aio_run_trio` is for the few places where
asyncio code must wait for Trio code. A crossing costs tens of microseconds: a few per request are fine, one per
token is not.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import outcome
import trio

from trio_sidecar.bridge.loop import current_loop, log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import NoReturn

__all__ = ["AioTaskCancelled", "aio_run_trio", "run_aio", "run_aio_limited"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class AioTaskCancelled(RuntimeError):
    """The asyncio side was cancelled by asyncio code, not by us.

    asyncio's ``CancelledError`` is no Exception; let loose in Trio code it would pass every handler and end the run.
    """

    def __init__(self) -> None:
        super().__init__("asyncio code cancelled the task that Trio was waiting for")


async def run_aio(aio_fn: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """Run one asyncio function to its end, as a task on the loop beside this Trio (Trio-flavoured).

    The task gets a copy of the caller's context. If Trio cancels, the task is cancelled once, and the call returns only
    when the task has ended, cleanup included: give cleanup its own time limit. A result or an error that wins the race
    against a cancel is returned or raised, so it is never lost; Trio's next checkpoint then raises ``Cancelled``.

    Raises:
        AioTaskCancelled: The function ended with asyncio's ``CancelledError`` though Trio had not cancelled.
        BaseException: Whatever the function raised, with its traceback; also SystemExit, which never reaches the loop.
    """
    return await _run(aio_fn, args, cleanup_seconds=None)


async def run_aio_limited(cleanup_seconds: float, aio_fn: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """Like :func:`run_aio`, for functions whose cleanup is somebody else's code and might hang (Trio-flavoured).

    Args:
        cleanup_seconds: How long after a cancel the task may take to end; then, and each time that much later, it is
            cancelled again, which ends whatever its cleanup waits for, and the log tells.
        aio_fn: The function.
        args: Its arguments.
    """
    return await _run(aio_fn, args, cleanup_seconds)


class _Canceller:
    """Cancels an asyncio task, and again after each time of that many seconds in which it did not end.

    An object and not two closures that call each other: those would be a cycle around all that the function holds, a
    whole request with its prompt, until the garbage collector comes by.
    """

    __slots__ = ("_function", "_loop", "_seconds", "_timer", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop, function: str, seconds: float | None) -> None:
        self.task: asyncio.Task[None] | None = None
        self._loop = loop
        self._function = function
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Cancel now."""
        if self.task is None:
            return
        self.task.cancel()
        if self._seconds is not None:
            self._timer = self._loop.call_later(self._seconds, self._again)

    def _again(self) -> None:
        log.warning("aio_cleanup_too_slow", function=self._function, seconds=self._seconds)
        self.cancel()

    def stop(self) -> None:
        """The task has ended."""
        self.task = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _run(aio_fn: Callable[[*Ts], Awaitable[T]], args: tuple[*Ts], cleanup_seconds: float | None) -> T:
    trio_task = trio.lowlevel.current_task()
    loop = current_loop()
    canceller = _Canceller(loop, getattr(aio_fn, "__qualname__", "?"), cleanup_seconds)
    cancel_trio: Callable[[], NoReturn] | None = None

    # Captured by aio_main, not by the asyncio task: a task that is cancelled in its last step forgets its result, one
    # that raises SystemExit raises it into the loop too, and none tells a CancelledError of its own from a cancel.
    result: outcome.Outcome[T] = outcome.Error(asyncio.CancelledError())  # if cancelled before its first step

    async def aio_main() -> None:
        nonlocal result
        result = await outcome.acapture(aio_fn, *args)

    def on_done(task: asyncio.Task[None]) -> None:  # noqa: ARG001
        canceller.stop()
        trio.lowlevel.reschedule(trio_task)

    def abort(raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        nonlocal cancel_trio
        cancel_trio = raise_cancel
        canceller.cancel()
        return trio.lowlevel.Abort.FAILED

    canceller.task = loop.create_task(aio_main())
    canceller.task.add_done_callback(on_done)
    await trio.lowlevel.wait_task_rescheduled(abort)
    if isinstance(result, outcome.Error) and isinstance(result.error, asyncio.CancelledError):
        if cancel_trio is None:
            raise AioTaskCancelled from result.error
        try:
            cancel_trio()
        except trio.Cancelled as cancelled:
            cancelled.__cause__ = result.error  # the longer traceback says where asyncio was
            raise
    try:
        return result.unwrap()
    finally:
        del result  # or an error, through its traceback, would keep itself alive


async def aio_run_trio(nursery: trio.Nursery, async_fn: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """Run one Trio function in a nursery and wait for it (asyncio-flavoured).

    If the asyncio task is cancelled, so is the Trio function, and the call returns only when that has ended. A Trio
    function that fails raises here, not in the nursery.

    Raises:
        AioTaskCancelled: The nursery was cancelled under the function.
        RuntimeError: The nursery is closed.
    """
    ended: asyncio.Future[outcome.Outcome[T]] = asyncio.get_running_loop().create_future()
    scope = trio.CancelScope()

    async def trio_main() -> None:
        result: outcome.Outcome[T] = outcome.Error(AioTaskCancelled())
        try:
            with scope:
                result = outcome.Value(await async_fn(*args))
        except Exception as error:  # noqa: BLE001 - handed to the asyncio side
            result = outcome.Error(error)
        finally:
            if not ended.done():
                ended.set_result(result)

    nursery.start_soon(trio_main, name=async_fn)
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError as error:  # noqa: ASYNC103 - raised below, when Trio's side has ended
            cancelled = error
            scope.cancel()
    result = ended.result()
    if cancelled is not None and isinstance(result, outcome.Error) and isinstance(result.error, AioTaskCancelled):
        raise cancelled
    return result.unwrap()
