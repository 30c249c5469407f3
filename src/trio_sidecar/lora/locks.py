"""Locks around adapters (spec 13.8); asyncio-flavoured, because requests and lifecycle calls are.

A request holds its adapter's lock for reading from admission until the engine has accepted it; whoever loads or unloads
the adapter holds it for writing. So an unload waits for the requests that are under way to the engine, though not for
their tokens, and a request that comes later finds the adapter either there or gone.
"""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs

from trio_sidecar.bridge import AioEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["AdapterLock", "LockRegistry"]


@attrs.define(eq=False)
class _Waiter:
    """Someone in the queue."""

    writes: bool
    turn: AioEvent = attrs.field(factory=AioEvent)


class AdapterLock:
    """Many readers or one writer, first come first served: a reader behind a waiting writer waits too.

    The lock passes directly from one to the next, so that nobody can overtake.
    """

    __slots__ = ("_queue", "_readers", "_writing")

    def __init__(self) -> None:
        self._readers = 0
        self._writing = False
        self._queue: deque[_Waiter] = deque()

    @asynccontextmanager
    async def aio_reading(self) -> AsyncIterator[None]:
        """Hold it for reading."""
        await self._aio_acquire(_Waiter(writes=False))
        try:
            yield
        finally:
            self._release(writes=False)

    @asynccontextmanager
    async def aio_writing(self) -> AsyncIterator[None]:
        """Hold it for writing."""
        await self._aio_acquire(_Waiter(writes=True))
        try:
            yield
        finally:
            self._release(writes=True)

    async def _aio_acquire(self, waiter: _Waiter) -> None:
        self._queue.append(waiter)
        self._pass_on()
        try:
            await waiter.turn.aio_wait()
        except BaseException:
            # A turn that met the cancel has to be given back, an unused place in the queue to be left.
            if waiter.turn.is_set():
                self._release(writes=waiter.writes)
            else:
                self._queue.remove(waiter)
                self._pass_on()
            raise

    def _release(self, *, writes: bool) -> None:
        if writes:
            self._writing = False
        else:
            self._readers -= 1
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the lock to those at the head of the queue that can have it now."""
        while self._queue:
            first = self._queue[0]
            if self._writing or (first.writes and self._readers):
                return
            self._queue.popleft()
            if first.writes:
                self._writing = True
            else:
                self._readers += 1
            first.turn.set()


@attrs.define(eq=False)
class _Entry:
    lock: AdapterLock = attrs.field(factory=AdapterLock)
    users: int = 0


class LockRegistry:
    """One lock per adapter name, for as long as somebody needs it (R13.36, R13.37).

    Clients choose the names, so the registry would grow without end if it kept them all. Making an entry for a new name
    drops every entry that belongs to no published adapter and that nobody holds or waits for.

    Args:
        is_published: Whether an adapter of that name is in discovery.
    """

    def __init__(self, is_published: Callable[[str], bool]) -> None:
        self._is_published = is_published
        self._entries: dict[str, _Entry] = {}

    def names(self) -> frozenset[str]:
        """The names that have an entry."""
        return frozenset(self._entries)

    @asynccontextmanager
    async def aio_reading(self, name: str) -> AsyncIterator[None]:
        """Hold an adapter's lock for reading."""
        entry = self._entry(name)
        entry.users += 1  # counts those who wait, too
        try:
            async with entry.lock.aio_reading():
                yield
        finally:
            entry.users -= 1

    @asynccontextmanager
    async def aio_writing(self, name: str) -> AsyncIterator[None]:
        """Hold an adapter's lock for writing."""
        entry = self._entry(name)
        entry.users += 1
        try:
            async with entry.lock.aio_writing():
                yield
        finally:
            entry.users -= 1

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            self._entries = {
                other: kept for other, kept in self._entries.items() if kept.users or self._is_published(other)
            }
            entry = self._entries[name] = _Entry()
        return entry
