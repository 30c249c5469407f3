"""run_aio and aio_run_trio, on the test host and where it matters on both."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import traceback
import weakref
from typing import TYPE_CHECKING, NoReturn

import pytest
import trio

from trio_sidecar.bridge import AioTaskCancelled, Host, aio_run_trio, aio_sleep, run, run_aio, run_aio_limited

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


async def aio_double(x: int) -> int:
    await asyncio.sleep(0.01)
    return 2 * x


class Recorder:
    """Asyncio code that notes how it ended."""

    def __init__(self, cleanup: float = 0.0) -> None:
        self.cleanup = cleanup
        self.events: list[str] = []

    async def aio_touch(self) -> None:
        await asyncio.sleep(0.001)
        self.events.append("touched")

    async def aio_wait(self) -> None:
        self.events.append("started")
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self.events.append("cancelled")
            await asyncio.sleep(self.cleanup)  # noqa: ASYNC102
            self.events.append("cleaned up")
            raise


def test_result(host: Host) -> None:
    """The result of the asyncio function comes back."""

    async def main() -> int:
        return await run_aio(aio_double, 21)

    assert 42 == run(main, host=host)


def test_error_keeps_traceback(host: Host) -> None:
    """An error keeps its identity and the frames of the asyncio function."""
    error = ValueError("from asyncio")

    async def aio_fail() -> NoReturn:
        await asyncio.sleep(0)
        raise error

    async def main() -> None:
        await run_aio(aio_fail)

    with pytest.raises(ValueError, match="from asyncio") as caught:
        run(main, host=host)
    assert error is caught.value
    assert "aio_fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_cancel_waits_for_cleanup(host: Host) -> None:
    """A Trio cancel cancels the task, waits for its cleanup, and is reported as a Trio cancel."""
    recorder = Recorder(cleanup=0.05)

    async def main() -> bool:
        with trio.move_on_after(0.02) as scope:
            await run_aio(recorder.aio_wait)
        assert ["started", "cancelled", "cleaned up"] == recorder.events
        return scope.cancelled_caught

    assert run(main, host=host)


def test_cancelled_before_start(host: Host) -> None:
    """In a cancelled scope the function is never called, and no unawaited coroutine is left."""
    recorder = Recorder()

    async def main() -> bool:
        with trio.CancelScope() as scope:
            scope.cancel()
            await run_aio(recorder.aio_wait)
        return scope.cancelled_caught

    assert run(main, host=host)
    assert [] == recorder.events


def test_result_that_races_with_cancel(host: Host) -> None:
    """A result that is ready when Trio cancels is returned, not lost; the cancel acts at the next checkpoint."""

    async def main() -> tuple[str, bool]:
        got = ""
        with trio.CancelScope() as scope:

            async def aio_answer() -> str:  # noqa: ASYNC124 - its first step must be its last
                scope.cancel()
                return "answer"

            got = await run_aio(aio_answer)
            await trio.lowlevel.checkpoint()
            got = "the cancel was lost"
        return got, scope.cancelled_caught

    assert ("answer", True) == run(main, host=host)


def test_error_during_cancel(host: Host) -> None:
    """An error that cleanup raises is raised, not hidden by the cancel."""

    async def aio_fail_in_cleanup() -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            raise ValueError("cleanup failed") from None  # noqa: ASYNC104

    async def main() -> None:
        with trio.move_on_after(0.01):
            await run_aio(aio_fail_in_cleanup)

    with pytest.raises(ValueError, match="cleanup failed"):
        run(main, host=host)


def test_foreign_cancel_is_no_trio_cancel(host: Host) -> None:
    """A CancelledError that asyncio code caused itself becomes an ordinary error in Trio."""

    async def aio_raise() -> None:
        await asyncio.sleep(0)
        raise asyncio.CancelledError("mine")

    async def aio_cancel_me() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1000)

    async def main(aio_fn: Callable[[], Awaitable[None]]) -> None:
        await run_aio(aio_fn)

    for aio_fn in (aio_raise, aio_cancel_me):
        with pytest.raises(AioTaskCancelled) as caught:
            run(main, aio_fn, host=host)
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)


def test_system_exit_stays_in_the_call(host: Host) -> None:
    """A SystemExit is raised where Trio waits for it, and does not stop the loop."""

    async def aio_exit() -> None:
        await asyncio.sleep(0)
        raise SystemExit(7)

    async def main() -> tuple[object, int]:
        code: object = None
        try:
            await run_aio(aio_exit)
        except SystemExit as error:
            code = error.code
        return code, await run_aio(aio_double, 1)

    assert (7, 2) == run(main, host=host)


def test_context_goes_in_and_stays_in(host: Host) -> None:
    """The function sees the caller's context variables; what it sets stays with it."""

    async def aio_look() -> str:
        await asyncio.sleep(0)
        seen = variable.get()
        variable.set("inner")
        return seen

    async def main() -> tuple[str, str]:
        variable.set("outer")
        return await run_aio(aio_look), variable.get()

    assert ("outer", "outer") == run(main, host=host)


async def test_outside_a_host() -> None:
    """Without a loop beside Trio the error says how to get one, and the function is not called."""
    with pytest.raises(RuntimeError, match="open_aio_loop"):
        await run_aio(aio_double, 1)


async def test_virtual_time(aio_loop: object, autojump_clock: object) -> None:
    """On the test host an hour of asyncio's time passes at once."""
    start = trio.current_time()
    await run_aio(aio_sleep, 3600.0)
    assert pytest.approx(3600.0) == trio.current_time() - start


def test_many_cancels_leave_no_task(host: Host) -> None:
    """A thousand cancelled calls leave no asyncio task behind."""

    async def main() -> int:
        recorder = Recorder()
        async with trio.open_nursery() as nursery:
            for _ in range(1000):
                nursery.start_soon(run_aio, recorder.aio_wait)
            with trio.fail_after(10):
                while len(recorder.events) < 1000:  # noqa: ASYNC110
                    await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        assert 1000 == recorder.events.count("cleaned up")

        async def aio_count() -> int:
            await asyncio.sleep(0)
            return len(asyncio.all_tasks())

        return await run_aio(aio_count)

    assert 1 == run(main, host=host)


async def test_limited_cleanup(aio_loop: object, autojump_clock: object) -> None:
    """Cleanup within its limit completes; cleanup that outlives it is cancelled, however often that takes."""
    quick, slow = Recorder(cleanup=4.0), Recorder(cleanup=1000.0)
    stubborn: list[float] = []

    async def aio_stubborn() -> None:
        while len(stubborn) < 3:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:  # noqa: ASYNC103
                stubborn.append(trio.current_time() - start)

    async with trio.open_nursery() as nursery:
        start = trio.current_time()
        for aio_fn in (quick.aio_wait, slow.aio_wait, aio_stubborn):
            nursery.start_soon(run_aio_limited, 5.0, aio_fn)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert ["started", "cancelled", "cleaned up"] == quick.events
    assert ["started", "cancelled"] == slow.events
    assert pytest.approx([1.0, 6.0, 11.0]) == stubborn
    assert pytest.approx(11.0) == trio.current_time() - start


# -- asyncio to Trio


async def trio_double(x: int) -> int:
    await trio.sleep(0.01)
    return 2 * x


def test_aio_run_trio_result(host: Host) -> None:
    """Asyncio code gets the result of a Trio function."""

    async def main() -> int:
        results = []
        async with trio.open_nursery() as nursery:
            results.append(await run_aio(aio_run_trio, nursery, trio_double, 21))
        return results[0]

    assert 42 == run(main, host=host)


def test_aio_run_trio_error(host: Host) -> None:
    """An error of the Trio function is raised on the asyncio side and leaves the nursery alone."""

    async def trio_fail() -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("from trio")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            with pytest.raises(ValueError, match="from trio"):
                await run_aio(aio_run_trio, nursery, trio_fail)
            await trio.sleep(0.01)

    run(main, host=host)


def test_aio_run_trio_cancel(host: Host) -> None:
    """Cancelling the asyncio side cancels the Trio function and waits for its cleanup."""
    events: list[str] = []

    async def trio_wait() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(1, shield=True):
                await trio.sleep(0.02)
                events.append("cleaned up")

    async def main() -> bool:
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0.02) as scope:
                await run_aio(aio_run_trio, nursery, trio_wait)
            events.append("returned")
        return scope.cancelled_caught

    assert run(main, host=host)
    assert ["cleaned up", "returned"] == events


def test_aio_run_trio_nursery_cancelled(host: Host) -> None:
    """If the nursery is cancelled under the function, the asyncio side gets an error and does not hang."""

    async def main() -> str:
        got = "nothing"

        async def wait_outside() -> None:
            nonlocal got
            try:
                await run_aio(aio_run_trio, inner, trio.sleep_forever)
            except AioTaskCancelled:
                got = "told"

        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            outer.start_soon(wait_outside)
            await trio.sleep(0.02)
            inner.cancel_scope.cancel()
        return got

    assert "told" == run(main, host=host)


@pytest.mark.parametrize("cleanup_seconds", [None, 5.0])
def test_no_cycle_is_left(cleanup_seconds: float | None) -> None:
    """What a call held is freed when it returns, without the garbage collector: a prompt may be megabytes."""

    async def main() -> bool:
        holder = Recorder()
        seen = weakref.ref(holder)
        if cleanup_seconds is None:
            await run_aio(holder.aio_touch)
        else:
            await run_aio_limited(cleanup_seconds, holder.aio_touch)
        del holder
        await trio.sleep(0.01)  # asyncio lets go of the task in its own time
        return seen() is None

    gc.collect()
    gc.disable()
    try:
        assert run(main, host=Host.UVLOOP)
    finally:
        gc.enable()
