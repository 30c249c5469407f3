"""The two hosts that can carry Trio and asyncio on one thread.

Production: uvloop, with Trio as its guest, because asyncio libraries then run at full speed. Tests: Trio, with
trio-asyncio's loop, because then asyncio's time follows Trio's clock and the autojump clock works. Code above
:func:`run` does not know which one carries it.

Why the code below is shaped as it is:

- The main function runs in a scope of our own, and its outcome is captured inside it. trio-asyncio wraps errors that
  leave its nurseries in groups, and a guest run delivers them through a callback; captured, it is the same.
- trio-asyncio is imported only by the test host: importing it replaces functions of asyncio for the whole process.
- Leftover asyncio tasks are ended while Trio still runs, because their cleanup may need it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import sys
import warnings
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import outcome
import trio

from trio_sidecar.bridge.call import run_aio
from trio_sidecar.bridge.loop import AIO_END_SECONDS, LOOP, aio_end_tasks, log, log_stray_error
from trio_sidecar.bridge.signals import Interrupt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

__all__ = ["Host", "open_aio_loop", "run"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Host(enum.Enum):
    """Which loop is outermost."""

    UVLOOP = "uvloop"
    """uvloop, with Trio as a guest: for production."""

    TRIO = "trio"
    """Trio, with trio-asyncio's loop: for tests."""


def run(
    async_fn: Callable[[*Ts], Awaitable[T]],
    *args: *Ts,
    host: Host = Host.UVLOOP,
    clock: trio.abc.Clock | None = None,
) -> T:
    """Run a Trio function beside an asyncio loop and return its result.

    SIGINT, unless somebody handles it already, cancels the function; when its cleanup is over, KeyboardInterrupt is
    raised. A second SIGINT kills the process. asyncio tasks that are left are cancelled and get five seconds.

    Args:
        async_fn: The main function, called with ``args``.
        args: Its arguments.
        host: Which loop is outermost.
        clock: Trio's clock; a virtual one makes sense only on the test host, where asyncio follows it.

    Raises:
        KeyboardInterrupt: SIGINT came; an error of the function is its cause.
        BaseException: Whatever the function raised, as raised; SystemExit included.
    """
    interrupt = Interrupt()
    carry = _run_guest if host is Host.UVLOOP else _run_trio
    with interrupt.installed():
        result: outcome.Outcome[T] = carry(_main, (async_fn, args, interrupt), clock)
    if interrupt.hit:
        if isinstance(result, outcome.Error) and not isinstance(result.error, KeyboardInterrupt):
            raise KeyboardInterrupt from result.error
        raise KeyboardInterrupt
    return result.unwrap()


async def _main(
    async_fn: Callable[..., Awaitable[T]], args: tuple[Any, ...], interrupt: Interrupt
) -> outcome.Outcome[T]:
    """Run the main function in the interrupt's scope; never raises, so that no host can wrap its error."""
    interrupt.arm()
    try:
        with interrupt.scope:
            return outcome.Value(await async_fn(*args))
        return outcome.Error(KeyboardInterrupt())
    except BaseException as error:  # noqa: BLE001, ASYNC103 - returned; a Cancelled in here is that of a dying host
        return outcome.Error(error)  # noqa: ASYNC104
    finally:
        interrupt.disarm()


async def _end_aio_tasks() -> None:
    """Cancel what is left on the asyncio side; bounded, so the shield is too."""
    with trio.move_on_after(2 * AIO_END_SECONDS, shield=True):
        await run_aio(aio_end_tasks, AIO_END_SECONDS)


def begin_guest(
    loop: asyncio.AbstractEventLoop,
    async_fn: Callable[..., Awaitable[T]],
    args: tuple[Any, ...],
    on_end: Callable[[outcome.Outcome[T]], object],
    *,
    later: Callable[[Callable[[], object]], object],
    clock: Any,
) -> None:
    """Have Trio begin, in the loop's next round, as its guest; what asyncio code leaves behind is ended with it.

    Args:
        loop: The host.
        async_fn: The main function.
        args: Its arguments.
        on_end: Gets its outcome; has to stop the loop.
        later: Makes Trio's next step, called from the loop's thread.
        clock: Trio's clock; None for its own.
    """

    async def guest() -> T:
        LOOP.set(loop)
        try:
            return await async_fn(*args)
        finally:
            await _end_aio_tasks()  # noqa: ASYNC102 - shielded inside

    def start() -> None:
        # Inside the loop, so that Trio finds asyncio's hooks for async generators and passes on to them.
        try:
            trio.lowlevel.start_guest_run(
                guest,
                run_sync_soon_threadsafe=loop.call_soon_threadsafe,
                run_sync_soon_not_threadsafe=later,
                done_callback=on_end,
                host_uses_signal_set_wakeup_fd=True,
                clock=clock,
            )
        except BaseException as error:  # noqa: BLE001, ASYNC103 - raised by the caller
            on_end(outcome.Error(error))

    loop.call_soon(start)


# -- Production host ------------------------------------------------------------------------------------------------


def _run_guest(main: Callable[..., Awaitable[outcome.Outcome[T]]], args: tuple[Any, ...], clock: Any) -> Any:
    import uvloop  # noqa: PLC0415 - only this host needs it

    interrupt: Interrupt = args[-1]
    loop = uvloop.new_event_loop()
    loop.set_exception_handler(log_stray_error)
    ended: outcome.Outcome[outcome.Outcome[T]] | None = None

    def on_end(result: outcome.Outcome[outcome.Outcome[T]]) -> None:
        nonlocal ended
        ended = result
        loop.stop()

    fatal: BaseException | None = None
    try:
        with known_to_trio_asyncio(loop):
            begin_guest(loop, main, args, on_end, later=loop.call_soon, clock=clock)
            while ended is None:
                try:
                    loop.run_forever()
                except BaseException as error:  # noqa: BLE001, ASYNC103 - a SystemExit in a callback: raised later
                    fatal = fatal or error
                    interrupt.scope.cancel()
            _close(loop)
    finally:
        loop.close()
    if fatal is not None:
        return outcome.Error(fatal)
    return ended.unwrap()


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """End the async generators and worker threads that asyncio code left behind, each within a bound."""
    for last in (loop.shutdown_asyncgens, loop.shutdown_default_executor):
        try:
            loop.run_until_complete(asyncio.wait_for(last(), AIO_END_SECONDS))
        except TimeoutError:
            log.error("aio_loop_end_timed_out", step=last.__name__, seconds=AIO_END_SECONDS)


@contextlib.contextmanager
def known_to_trio_asyncio(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Where trio-asyncio is loaded (in tests), tell it the loop: it has replaced ``asyncio.get_running_loop``."""
    module = sys.modules.get("trio_asyncio")
    if module is None:
        yield
        return
    token = module.current_loop.set(loop)
    try:
        yield
    finally:
        module.current_loop.reset(token)


# -- Test host ------------------------------------------------------------------------------------------------------


def _run_trio(main: Callable[..., Awaitable[outcome.Outcome[T]]], args: tuple[Any, ...], clock: Any) -> Any:
    interrupt: Interrupt = args[-1]

    async def outermost() -> outcome.Outcome[T]:
        async with open_aio_loop(on_exit=interrupt.scope.cancel):
            return await main(*args)

    try:
        return trio.run(outermost, clock=clock)
    except BaseExceptionGroup as group:
        return outcome.Error(_only_member(group))


def _only_member(error: BaseException) -> BaseException:
    """What a group holds, if it holds one thing; the nurseries around the loop add several layers."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _import_trio_asyncio() -> Any:
    with warnings.catch_warnings():
        # It subclasses what Python 3.12 deprecates and 3.14 removes; users who make warnings errors must not pay.
        warnings.simplefilter("ignore", DeprecationWarning)
        import trio_asyncio  # noqa: PLC0415 - see the module's docstring
    return trio_asyncio


def _take_any_executor(loop: Any) -> None:
    """Let a loop of trio-asyncio run functions in any thread pool, as uvloop does; libraries bring their own pools."""
    run_in_own = loop.run_in_executor

    def run_in_executor(executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        if executor is not None and type(executor).__name__ != "TrioExecutor":
            return asyncio.wrap_future(executor.submit(func, *args), loop=loop)
        return run_in_own(executor, func, *args)

    loop.run_in_executor = run_in_executor


@asynccontextmanager
async def open_aio_loop(*, on_exit: Callable[[], object] | None = None) -> AsyncIterator[asyncio.AbstractEventLoop]:
    """Open an asyncio loop on the running Trio, whose clock it follows (Trio-flavoured).

    On the way out, asyncio tasks that are left are cancelled and get five seconds.

    Args:
        on_exit: Called when asyncio code raises SystemExit into the loop. It is raised at the end of the block.
    """
    trio_asyncio = _import_trio_asyncio()
    leaving = False

    async def keep_running() -> None:
        # A SystemExit in a callback ends trio-asyncio's loop at once, and whoever waits for asyncio would wait for
        # ever, cleanup included. uvloop can be run again after one, so let this loop run on as well.
        await loop.wait_stopped()
        if not leaving:
            if on_exit is not None:
                on_exit()
            await loop._main_loop()  # noqa: SLF001 - there is no public way, and only tests come here

    async with trio.open_nursery() as nursery:
        async with trio_asyncio.open_loop() as loop:
            nursery.start_soon(keep_running)
            loop.set_exception_handler(log_stray_error)
            _take_any_executor(loop)
            token = LOOP.set(loop)
            try:
                yield loop
            finally:
                await _end_aio_tasks()  # noqa: ASYNC102 - shielded inside
                LOOP.reset(token)
                leaving = True
        nursery.cancel_scope.cancel()
