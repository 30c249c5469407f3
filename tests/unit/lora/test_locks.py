"""Locks around adapters (spec 13.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_sidecar.bridge import AioEvent, run_aio
from trio_sidecar.lora.locks import AdapterLock, LockRegistry

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager


@attrs.define(eq=False)
class Holder:
    """Someone who takes a lock and holds it until told."""

    name: str
    take: Callable[[], AbstractAsyncContextManager[None]]
    log: list[str]
    let_go: AioEvent = attrs.field(factory=AioEvent)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self) -> None:
        with self.scope:
            await run_aio(self._aio_hold)

    async def _aio_hold(self) -> None:
        async with self.take():
            self.log.append(self.name)
            await self.let_go.aio_wait()
        self.log.append(f"{self.name} done")


@attrs.define(eq=False)
class Scene:
    """Holders of one lock, in a nursery."""

    nursery: trio.Nursery
    log: list[str] = attrs.field(factory=list)

    async def enter(self, name: str, take: Callable[[], AbstractAsyncContextManager[None]]) -> Holder:
        holder = Holder(name, take, self.log)
        self.nursery.start_soon(holder.run)
        await settle()
        return holder

    async def leave(self, *holders: Holder) -> None:
        for holder in holders:
            holder.let_go.set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await wait_all_tasks_blocked()


@pytest.mark.rule("R13.34")
async def test_readers_share_and_a_writer_waits_for_all_of_them(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Two readers hold the lock together; a writer gets it after the last one; a reader behind the writer waits."""
    lock = AdapterLock()
    async with trio.open_nursery() as nursery:
        scene = Scene(nursery)
        one, two = await scene.enter("r1", lock.aio_reading), await scene.enter("r2", lock.aio_reading)
        writer = await scene.enter("w", lock.aio_writing)
        late = await scene.enter("r3", lock.aio_reading)
        assert ["r1", "r2"] == scene.log
        await scene.leave(one)
        assert ["r1", "r2", "r1 done"] == scene.log
        await scene.leave(two)
        assert ["w"] == scene.log[4:]
        await scene.leave(writer)
        assert ["w", "w done", "r3"] == scene.log[4:]
        await scene.leave(late)


async def test_writers_exclude_each_other(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The second writer waits for the first."""
    lock = AdapterLock()
    async with trio.open_nursery() as nursery:
        scene = Scene(nursery)
        one, two = await scene.enter("w1", lock.aio_writing), await scene.enter("w2", lock.aio_writing)
        assert ["w1"] == scene.log
        await scene.leave(one)
        assert ["w1", "w1 done", "w2"] == scene.log
        await scene.leave(two)


@pytest.mark.rule("R13.34")
async def test_a_waiting_reader_can_be_cancelled(aio_loop: asyncio.AbstractEventLoop) -> None:
    """It leaves the queue, and the lock goes on to the others."""
    lock = AdapterLock()
    async with trio.open_nursery() as nursery:
        scene = Scene(nursery)
        writer = await scene.enter("w", lock.aio_writing)
        waiting, other = await scene.enter("r1", lock.aio_reading), await scene.enter("r2", lock.aio_reading)
        waiting.scope.cancel()
        await scene.leave(writer)
        assert ["w", "w done", "r2"] == scene.log
        await scene.leave(other)


async def test_a_cancelled_writer_lets_the_readers_behind_it_in(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Readers that only waited because of it join those who hold the lock."""
    lock = AdapterLock()
    async with trio.open_nursery() as nursery:
        scene = Scene(nursery)
        first = await scene.enter("r1", lock.aio_reading)
        writer, second = await scene.enter("w", lock.aio_writing), await scene.enter("r2", lock.aio_reading)
        writer.scope.cancel()
        await settle()
        assert ["r1", "r2"] == scene.log
        await scene.leave(first, second)


@pytest.mark.parametrize("writes", [False, True])
async def test_a_turn_that_meets_a_cancel_is_given_back(
    aio_loop: asyncio.AbstractEventLoop,
    writes: bool,
) -> None:
    """If a waiter is cancelled in the moment it gets the lock, the next one gets it."""
    lock = AdapterLock()
    async with trio.open_nursery() as nursery:
        scene = Scene(nursery)
        writer = await scene.enter("w", lock.aio_writing)
        take = lock.aio_writing if writes else lock.aio_reading
        unlucky, other = await scene.enter("x", take), await scene.enter("w2", lock.aio_writing)
        writer.let_go.set()
        unlucky.scope.cancel()
        await settle()
        # Whether it got the lock for a moment is a race; that the other has it now is not.
        assert "w2" == scene.log[-1]
        await scene.leave(other)


async def test_holders_that_fail_let_go(aio_loop: asyncio.AbstractEventLoop) -> None:
    """An error inside releases the lock, of readers and of writers."""
    lock = AdapterLock()

    async def aio_fail(take: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        async with take():
            raise LookupError

    for take in (lock.aio_writing, lock.aio_reading, lock.aio_writing):
        with pytest.raises(LookupError):
            await run_aio(aio_fail, take)


# -- The registry


async def aio_touch(registry: LockRegistry, name: str) -> None:
    async with registry.aio_reading(name):
        pass


@pytest.mark.rule("R13.36")
async def test_one_name_has_one_lock(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Readers and writers of one name meet; those of another name do not."""
    registry = LockRegistry(lambda name: False)
    async with trio.open_nursery() as nursery:
        scene = Scene(nursery)
        reader = await scene.enter("r", lambda: registry.aio_reading("a"))
        writer = await scene.enter("w", lambda: registry.aio_writing("a"))
        other = await scene.enter("other", lambda: registry.aio_writing("b"))
        assert ["r", "other"] == scene.log
        await scene.leave(reader)
        assert ["r done", "w"] == scene.log[2:]
        await scene.leave(writer, other)


@pytest.mark.rule("R13.36", "R13.37")
async def test_idle_names_are_dropped_when_a_new_one_comes(aio_loop: asyncio.AbstractEventLoop) -> None:
    """An idle entry stays until the next new name, and not longer; a known name drops nothing."""
    registry = LockRegistry(lambda name: False)
    await run_aio(aio_touch, registry, "a")
    await run_aio(aio_touch, registry, "a")
    assert {"a"} == registry.names()
    await run_aio(aio_touch, registry, "b")
    assert {"b"} == registry.names()


@pytest.mark.rule("R13.36", "R13.37")
async def test_published_names_survive_churn(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A published name keeps its entry; once forgotten it goes with the next new name."""
    published = {"a"}
    registry = LockRegistry(published.__contains__)
    for name in ("a", "b", "c"):
        await run_aio(aio_touch, registry, name)
    assert {"a", "c"} == registry.names()
    published.clear()
    await run_aio(aio_touch, registry, "c")
    assert {"a", "c"} == registry.names()
    await run_aio(aio_touch, registry, "d")
    assert {"d"} == registry.names()


@pytest.mark.rule("R13.37")
@pytest.mark.parametrize("kind", ["aio_reading", "aio_writing"])
async def test_a_held_lock_keeps_its_entry(aio_loop: asyncio.AbstractEventLoop, kind: str) -> None:
    """Whoever holds it excludes a writer that comes after new names have come and gone."""
    registry = LockRegistry(lambda name: False)
    async with trio.open_nursery() as nursery:
        scene = Scene(nursery)
        holder = await scene.enter("holder", lambda: getattr(registry, kind)("a"))
        await run_aio(aio_touch, registry, "b")
        writer = await scene.enter("w", lambda: registry.aio_writing("a"))
        assert ["holder"] == scene.log
        await scene.leave(holder)
        assert "w" == scene.log[-1]
        await scene.leave(writer)


@pytest.mark.rule("R13.37")
@pytest.mark.parametrize("kind", ["aio_reading", "aio_writing"])
async def test_a_waiter_keeps_the_entry(aio_loop: asyncio.AbstractEventLoop, kind: str) -> None:
    """A waiter that gets the lock after its holder has left and new names have come excludes later writers."""
    registry = LockRegistry(lambda name: False)
    async with trio.open_nursery() as nursery:
        scene = Scene(nursery)
        first = await scene.enter("first", lambda: registry.aio_writing("a"))
        waiter = await scene.enter("waiter", lambda: getattr(registry, kind)("a"))
        await run_aio(aio_touch, registry, "b")
        await scene.leave(first)
        await run_aio(aio_touch, registry, "c")
        late = await scene.enter("late", lambda: registry.aio_writing("a"))
        assert ["first", "first done", "waiter"] == scene.log
        await scene.leave(waiter)
        assert "late" == scene.log[-1]
        await scene.leave(late)


@pytest.mark.rule("R13.37")
async def test_a_cancelled_waiter_no_longer_keeps_the_entry(aio_loop: asyncio.AbstractEventLoop) -> None:
    """After the last user has gone, by whatever way, the entry goes with the next new name."""
    registry = LockRegistry(lambda name: False)
    async with trio.open_nursery() as nursery:
        scene = Scene(nursery)
        holder = await scene.enter("holder", lambda: registry.aio_writing("a"))
        waiter = await scene.enter("waiter", lambda: registry.aio_reading("a"))
        waiter.scope.cancel()
        await scene.leave(holder)
    await run_aio(aio_touch, registry, "b")
    assert {"b"} == registry.names()
