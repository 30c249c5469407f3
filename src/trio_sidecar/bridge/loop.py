"""The asyncio loop of the running Trio: where it is kept, what it does with stray errors, how its tasks end."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import structlog
import trio

__all__ = ["AIO_END_SECONDS", "LOOP", "aio_end_tasks", "count_aio_tasks", "current_loop", "log_stray_error"]

AIO_END_SECONDS = 5.0
"""How long the asyncio tasks that are left at the end may take to clean up, in seconds."""

LOOP: trio.lowlevel.RunVar[asyncio.AbstractEventLoop] = trio.lowlevel.RunVar("trio_sidecar.aio_loop")
"""The loop beside this Trio run. A run variable, not a context variable: Trio tasks that are started from asyncio
callbacks inherit the callback's context, which knows nothing of ours."""

log = structlog.get_logger("trio_sidecar.bridge")


def current_loop() -> asyncio.AbstractEventLoop:
    """The asyncio loop beside the running Trio.

    Raises:
        RuntimeError: Trio was not started by :func:`trio_sidecar.bridge.run`, and no loop was opened on it.
    """
    try:
        return LOOP.get()
    except LookupError:
        reason = "this Trio run has no asyncio loop: start it with trio_sidecar.bridge.run, or use open_aio_loop"
        raise RuntimeError(reason) from None


def log_stray_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # noqa: ARG001
    """Log an error that no asyncio task retrieved, and carry on.

    trio-asyncio's own handler would end the loop, and with it every request, because of one forgotten future.
    """
    if sys.is_finalizing():
        return  # found by the last garbage collection, when logging no longer works
    error = context.get("exception")
    log.error("aio_stray_error", reason=context.get("message", "no message"), exc_info=error)


def count_aio_tasks() -> int:
    """How many asyncio tasks the loop beside the running Trio has."""
    return len(asyncio.all_tasks(current_loop()))


async def aio_end_tasks(seconds: float) -> None:
    """Cancel every other asyncio task of this loop and wait for all to end, at most that many seconds.

    A task that ignores its cancellation is abandoned and named in the log: one stubborn library must not keep a
    process alive.
    """
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    deadline = loop.time() + seconds
    while tasks := asyncio.all_tasks() - {me}:
        for task in tasks:
            task.cancel()
        done, pending = await asyncio.wait(tasks, timeout=max(0.0, deadline - loop.time()))
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("aio_task_failed_at_end", task=task.get_name(), exc_info=error)
        if loop.time() >= deadline:
            for task in pending:
                log.error("aio_task_abandoned", task=task.get_name(), seconds=seconds)
                _forget(task)
            return


def _forget(task: asyncio.Task[Any]) -> None:
    """Take a task out of asyncio's books, so that nobody waits for it and its end goes unreported."""
    asyncio._unregister_task(task)  # noqa: SLF001 - documented for third-party task classes
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - as asyncio.gather does
