"""A wake-up call with a deadline, for one waiter that mostly sleeps (asyncio-flavoured)."""

from __future__ import annotations

import asyncio

__all__ = ["AioAlarm"]


class AioAlarm:
    """Sleep until a moment on the loop's clock, unless somebody rings before; at most one waiter.

    A ring made while nobody waits is kept for the next wait. One future and one timer per wait make it cheap enough for
    a wait per token.
    """

    __slots__ = ("_rung", "_waiter")

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """End the wait, now or when it begins; from either flavour."""
        self._rung = True
        self._wake()

    async def aio_wait_until(self, moment: float | None) -> None:
        """Return at that moment of :func:`~trio_sidecar.bridge.aio_now`, or at a ring; None waits for the ring."""
        if self._rung:
            self._rung = False
            return
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None if moment is None else loop.call_at(moment, self._wake)
        try:
            await waiter
            self._rung = False
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
