"""How a service is asked to end, and what happens then.

Outer rings outlive inner ones, so a shutdown is nesting plus one deadline. From the inside out:

- the acceptor (a registration with Dynamo, a listener) withdraws, and for a grace period goes on taking what is already
  on its way;
- the handlers (:class:`trio_sidecar.requests.sessions.Sessions`, the server's calls) have the drain budget;
- the engine (:mod:`trio_sidecar.worker.life`, the server's caller) goes last;
- the host, outside of everything, is left when all that is over.

All of it starts with one :class:`StopRequest`.
"""

from __future__ import annotations

import gc
import signal
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import trio

from trio_sidecar.bridge import count_aio_tasks, open_signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from trio_sidecar.bridge import SignalReceiver

__all__ = ["StopRequest", "log_snapshots", "open_stop_signals", "settle_collector"]

OPEN_FILES = Path("/proc/self/fd")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

COLLECTOR_THRESHOLDS = (50_000, 20, 20)
"""How many more containers were made than freed before the garbage collector looks at the youngest generation, and how
many such looks before it goes on to the next. Python's default of 700 is two requests' worth."""

log = structlog.get_logger("trio_sidecar.lifecycle")


def settle_collector() -> None:
    """Make the garbage collector cheap, for a process that serves and has started up.

    A token stream makes and frees thousands of containers a second, hardly any of them in cycles, and by default the
    collector walks through all that are alive each time 700 more were made: half of the CPU time per token in a flood
    (``docs/performance.md``). Cycles are still found, later; what is alive now is not looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


async def log_snapshots(logger: Any, event: str, holdings: Callable[[], Mapping[str, object]]) -> None:
    """Log what the process holds, for each SIGUSR1, until cancelled (in the main thread).

    It is the first thing to look at when something may leak: what the caller counts, tasks of both flavours, open file
    descriptors (None where there is no ``/proc``), and containers that are alive after a garbage collection, without
    those from before :func:`settle_collector`.

    Args:
        logger: Gets one line each time.
        event: The line's event.
        holdings: What else to say.
    """
    with open_signals(signal.SIGUSR1) as asked:
        async for _ in asked:
            gc.collect()
            logger.info(
                event,
                **holdings(),
                trio_tasks=trio.lowlevel.current_statistics().tasks_living,
                aio_tasks=count_aio_tasks(),
                open_files=_open_files(),
                objects=len(gc.get_objects()),
            )


def _open_files() -> int | None:
    return sum(1 for _ in OPEN_FILES.iterdir()) if OPEN_FILES.is_dir() else None


class StopRequest:
    """The wish that this service end: made once and never forgotten, whatever the service is doing (FR-051)."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._scopes: set[trio.CancelScope] = set()
        self.reason = ""

    def __repr__(self) -> str:
        """Says whether it was made, and why."""
        return f"<StopRequest {self.reason or 'not requested'}>"

    @property
    def requested(self) -> bool:
        """Whether it has been made."""
        return self._event.is_set()

    def request(self, reason: str) -> bool:
        """Ask the service to end; a second request changes nothing (FR-050).

        Returns:
            Whether this was the first.
        """
        if self.requested:
            return False
        self.reason = reason
        self._event.set()
        for scope in self._scopes:
            scope.cancel()
        return True

    async def wait(self) -> None:
        """Wait until it is made."""
        await self._event.wait()

    @contextmanager
    def cancelling(self) -> Iterator[trio.CancelScope]:
        """Cancel the block when the stop is requested, or at once if it was; until :meth:`spare` is called.

        Start-up runs in one: whatever it waits for, a stop ends it.
        """
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            if self.requested:
                scope.cancel()
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def spare(self, scope: trio.CancelScope) -> None:
        """From now on, do not cancel that scope of :meth:`cancelling`: what it guards ends in its own way."""
        self._scopes.discard(scope)


@asynccontextmanager
async def open_stop_signals(*, process_ends_after: bool = False) -> AsyncIterator[StopRequest]:
    """Turn the first SIGTERM or SIGINT into a stop request; later ones are logged and change nothing.

    The handlers stay in place for the whole block. In a Dynamo worker that matters: Dynamo's runtime adds its own
    handlers behind ours when it starts, and replacing a handler later would cut it off.

    Args:
        process_ends_after: Ignore both signals after the block, if a stop was requested: what is left of the process's
            life is short, and a signal that comes again must not turn a clean exit into a killed one.
    """
    stop = StopRequest()
    if process_ends_after:
        earlier = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
        for signum in STOP_SIGNALS:  # what open_signals puts back at its end
            signal.signal(signum, signal.SIG_IGN)
    with open_signals(*STOP_SIGNALS) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_signals, signals, stop)
            try:
                yield stop
            finally:
                nursery.cancel_scope.cancel()
    if process_ends_after and not stop.requested:
        for signum, handler in earlier.items():
            signal.signal(signum, handler)


async def _watch_signals(signals: SignalReceiver, stop: StopRequest) -> None:
    async for signum in signals:
        name = signal.Signals(signum).name
        if stop.request(name):
            log.info("stop_requested", reason=name)
        else:
            log.info("stop_already_requested", reason=name, first=stop.reason)
