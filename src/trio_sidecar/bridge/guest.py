"""Trio as a guest whose sleep is the host loop's, on private parts of Trio; nothing else touches those.

Trio's own guest mode waits for its events in a helper thread: each time Trio has nothing to do a job is handed to that
thread, and each time it has, the thread is woken through a socket and hands back. Trio wakes a few times per request
here, and those hand-overs were 40 % of what a short request cost. On Linux Trio's events come out of an epoll
descriptor, which the loop can watch like any other: no thread, and a wake-up from asyncio code is one callback.

The tick below is Trio's own ``GuestState.guest_tick``, step for step, with another way to sleep. Where Trio is of a
version that was not tested, or does not look as expected, :func:`start` leaves everything to Trio.
"""

from __future__ import annotations

import importlib.metadata
import select
import weakref
from typing import TYPE_CHECKING, Any

import outcome
import sniffio
import trio

from trio_sidecar.bridge.loop import log

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

__all__ = ["start", "unsupported"]

TRIO_VERSIONS = ("0.31", "0.32", "0.33", "0.34", "0.35")

MAX_SLEEP_SECONDS = 86_400.0
"""Longer sleeps, Trio's "no deadline" among them, need no timer: it is asked again when anything happens."""

ROUNDING_SECONDS = 0.0005
"""uvloop rounds to milliseconds; rounded down, a sleep would end too early and Trio would go round in circles."""

_library = sniffio.thread_local


def unsupported() -> str | None:
    """Why the helper thread has to stay; None if it need not."""
    installed = importlib.metadata.version("trio")
    if ".".join(installed.split(".")[:2]) not in TRIO_VERSIONS:
        return f"trio {installed} is installed, tested are {', '.join(TRIO_VERSIONS)}"
    return None if hasattr(select, "epoll") else "this system has no epoll"


def start(
    loop: asyncio.AbstractEventLoop,
    async_fn: Callable[[], Awaitable[Any]],
    done: Callable[[outcome.Outcome[Any]], object],
    *,
    clock: trio.abc.Clock | None = None,
    threadless: bool | None = None,
) -> None:
    """Start a guest run on the running loop.

    Args:
        loop: The host.
        async_fn: Trio's main function.
        done: Gets its outcome.
        clock: Trio's clock.
        threadless: Force or forbid sleeping without a thread; by default it is used where it was tested.
    """
    if threadless is None:
        reason = unsupported()
        if reason is not None:
            log.warning("guest_needs_thread", reason=reason, effect="more CPU and latency per request")
        threadless = reason is None
    trio.lowlevel.start_guest_run(
        async_fn,
        run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        run_sync_soon_not_threadsafe=_Sleeper(loop).soon if threadless else loop.call_soon,
        done_callback=done,
        host_uses_signal_set_wakeup_fd=True,
        clock=clock,
    )


class _Sleeper:
    """Ticks one guest run."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._state: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._fd = -1

    def soon(self, tick: Callable[[], object]) -> None:
        """What Trio calls, once, to have its first tick scheduled; from here on it is ours."""
        self._state = tick.__self__  # type: ignore[attr-defined]
        manager = self._state.runner.io_manager
        self._fd = manager._epoll.fileno()  # noqa: SLF001
        # Trio's runner must not hold what holds the run, or it would not notice that its host is gone.
        manager.__class__ = _manager_class(type(manager), weakref.ref(self))
        self._loop.add_reader(self._fd, self._on_events)
        self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        state = self._state
        before, _library.name = _library.name, "trio"
        try:
            timeout = state.unrolled_run_next_send.send(state.unrolled_run_gen)
        except StopIteration:
            state.done_callback(state.runner.main_task_outcome)
            return
        except trio.TrioInternalError as error:
            self.stop()
            state.done_callback(outcome.Error(error))
            return
        finally:
            _library.name = before
        events = outcome.capture(state.runner.io_manager.get_events, 0)
        if timeout <= 0 or isinstance(events, outcome.Error) or events.value:
            state.unrolled_run_next_send = events
            state.runner.guest_tick_scheduled = True
            self._loop.call_soon(self._tick)
            return
        state.runner.guest_tick_scheduled = False
        if timeout < MAX_SLEEP_SECONDS:
            self._timer = self._loop.call_later(timeout + ROUNDING_SECONDS, self._on_events)

    def _on_events(self) -> None:
        """Trio's descriptors have events, or its next deadline has come."""
        runner = self._state.runner
        if not runner.guest_tick_scheduled:
            runner.guest_tick_scheduled = True
            self._end_sleep(outcome.capture(runner.io_manager.get_events, 0))

    def wake(self) -> None:
        """Trio wants a tick while it sleeps; it has noted that itself."""
        self._loop.call_soon(self._on_wake)

    def _on_wake(self) -> None:
        events = outcome.capture(self._state.runner.io_manager.get_events, 0)
        self._end_sleep(events if isinstance(events, outcome.Error) or events.value else outcome.Value(_Woken()))

    def _end_sleep(self, events: outcome.Outcome[Any]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._state.unrolled_run_next_send = events
        self._tick()

    def stop(self) -> None:
        """The run is over: its descriptor is about to be closed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._fd = -1


class _Woken(list[Any]):
    """No events, and yet no timeout: Trio takes what is false for one, and might think that nothing is going on."""

    def __bool__(self) -> bool:
        return True


def _manager_class(base: type[Any], sleeper: weakref.ref[_Sleeper]) -> type[Any]:
    """Trio's I/O manager, which wakes Trio through the loop instead of a socket, and tells when it closes."""

    class LoopManager(base):  # type: ignore[misc]
        __slots__ = ()

        def force_wakeup(self) -> None:
            if (awake := sleeper()) is not None:
                awake.wake()

        def close(self) -> None:
            if (awake := sleeper()) is not None:
                awake.stop()
            super().close()

    return LoopManager
