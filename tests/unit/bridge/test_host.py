"""Both hosts behave the same; what concerns the whole process is tried in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, NoReturn

import pytest
import structlog
import trio

from trio_sidecar.bridge import Host, open_signals, run, run_aio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROLOGUE = """
import asyncio, os, signal, sys, trio
from trio_sidecar.bridge import *
from trio_sidecar.bridge import loop as bridge_loop
host = Host[sys.argv[1]]
say = lambda *words: print(*words, flush=True)
"""


class Child:
    """A Python process that runs a script on one host, with warnings as errors."""

    def __init__(self, host: Host, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "error", "-c", PROLOGUE + textwrap.dedent(script), host.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, line: str) -> None:
        """Read up to a line."""
        assert self.process.stdout is not None
        for got in self.process.stdout:
            if got.strip() == line:
                return
        raise AssertionError(f"no {line!r}; stderr: {self.process.communicate()[1]}")

    def end(self) -> tuple[int, list[str], str]:
        """Wait for its end: exit code, remaining lines, stderr."""
        try:
            out, err = self.process.communicate(timeout=15)
        finally:
            self.process.kill()
        return self.process.returncode, out.split("\n")[:-1], err


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("sys.exit(3)", 3),
        ("raise SystemExit", 0),
        ("await run_aio(aio_exit)", 4),
    ],
)
def test_exit_code(host: Host, statement: str, code: int) -> None:
    """SystemExit decides the process's exit code, wherever it is raised."""
    child = Child(
        host,
        f"""
        async def aio_exit():
            sys.exit(4)
        async def main():
            {statement}
        run(main, host=host)
        """,
    )
    assert (code, [], "") == child.end()


@pytest.mark.parametrize("where", ["call_soon(sys.exit, 6)", "create_task(aio_exit())"])
def test_system_exit_in_the_loop(host: Host, where: str) -> None:
    """A SystemExit that asyncio code raises into the loop cancels Trio, lets it clean up, and then counts."""
    child = Child(
        host,
        f"""
        async def aio_exit():
            await asyncio.sleep(0.01)
            sys.exit(6)
        async def aio_wait():
            keep.append(asyncio.get_running_loop().{where})
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.01)
                say("asyncio cleaned up")
        keep = []
        async def main():
            try:
                await run_aio(aio_wait)
            finally:
                with trio.move_on_after(1, shield=True):
                    await trio.sleep(0.05)
                    say("trio cleaned up")
        run(main, host=host)
        """,
    )
    assert (6, ["asyncio cleaned up", "trio cleaned up"], "") == child.end()


def test_sigint_cancels_and_raises(host: Host) -> None:
    """SIGINT cancels the main task, shielded cleanup completes, and KeyboardInterrupt is raised from run."""
    child = Child(
        host,
        """
        async def aio_wait():
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.05)
                say("asyncio cleaned up")
        async def main():
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run_aio, aio_wait)
                    await trio.sleep(0.05)
                    say("ready")
            finally:
                with trio.move_on_after(1, shield=True):
                    await trio.sleep(0.05)
                    say("trio cleaned up")
        try:
            run(main, host=host)
        except KeyboardInterrupt as error:
            say("interrupted", error.__cause__)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        """,
    )
    child.wait_for("ready")
    child.process.send_signal(signal.SIGINT)
    assert (0, ["asyncio cleaned up", "trio cleaned up", "interrupted None"], "") == child.end()


def test_sigint_with_failing_cleanup(host: Host) -> None:
    """An error that cleanup raises after SIGINT is the cause of the KeyboardInterrupt."""
    child = Child(
        host,
        """
        async def main():
            say("ready")
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("cleanup failed")
        try:
            run(main, host=host)
        except KeyboardInterrupt as error:
            say(repr(error.__cause__))
        """,
    )
    child.wait_for("ready")
    child.process.send_signal(signal.SIGINT)
    assert (0, ["ValueError('cleanup failed')"], "") == child.end()


def test_sigint_while_busy_in_asyncio(host: Host) -> None:
    """SIGINT does not interrupt asyncio code at a random point; it acts when the code next waits."""
    child = Child(
        host,
        """
        import time
        async def aio_busy():
            say("ready")
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                pass
            say("finished work")
            await asyncio.sleep(1000)
        try:
            run(run_aio, aio_busy, host=host)
        except KeyboardInterrupt:
            say("interrupted")
        """,
    )
    child.wait_for("ready")
    child.process.send_signal(signal.SIGINT)
    assert (0, ["finished work", "interrupted"]) == child.end()[:2]  # asyncio's debug mode complains of the busy task


def test_second_sigint_kills(host: Host) -> None:
    """A second SIGINT ends a process whose cleanup takes too long."""
    child = Child(
        host,
        """
        async def main():
            say("ready")
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    say("cleaning")
                    await trio.sleep(1000)
        run(main, host=host)
        """,
    )
    child.wait_for("ready")
    child.process.send_signal(signal.SIGINT)
    child.wait_for("cleaning")
    child.process.send_signal(signal.SIGINT)
    assert -signal.SIGINT == child.end()[0]


def test_sigterm_reaches_trio(host: Host) -> None:
    """open_signals hands signals to Trio, lets code end normally, and restores the handler; repeats do no harm."""
    child = Child(
        host,
        """
        async def main():
            with open_signals(signal.SIGTERM, signal.SIGINT) as signals:
                say("ready")
                async for signum in signals:
                    say("got", signal.Signals(signum).name)
                    if signum == signal.SIGINT:
                        break
                os.kill(os.getpid(), signal.SIGTERM)  # a repeat that nobody takes
                await trio.sleep(0.05)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            return 7
        sys.exit(run(main, host=host))
        """,
    )
    child.wait_for("ready")
    child.process.send_signal(signal.SIGTERM)
    child.wait_for("got SIGTERM")
    child.process.send_signal(signal.SIGINT)
    assert (7, ["got SIGINT"], "") == child.end()


def test_untaken_signal_is_raised_again(host: Host) -> None:
    """A signal that arrived and that nobody took has its usual effect when the receiver closes."""
    child = Child(
        host,
        """
        async def main():
            with open_signals(signal.SIGTERM):
                os.kill(os.getpid(), signal.SIGTERM)
                await trio.sleep(0.05)
            say("not reached")
        run(main, host=host)
        """,
    )
    assert (-signal.SIGTERM, [], "") == child.end()


def test_leftover_tasks_are_ended(host: Host) -> None:
    """Tasks of asyncio left at the end are cancelled and may clean up; async generators are closed."""
    child = Child(
        host,
        """
        async def aio_numbers():
            try:
                while True:
                    yield 1
            finally:
                await asyncio.sleep(0.01)
                say("generator closed")
        async def aio_background():
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.01)
                say("task cleaned up")
        keep = []
        async def aio_start():
            keep.append(asyncio.get_running_loop().create_task(aio_background()))
            keep.append(aio_numbers())
            await anext(keep[-1])
        run(run_aio, aio_start, host=host)
        """,
    )
    assert (0, ["task cleaned up", "generator closed"], "") == child.end()


def test_stubborn_task_is_abandoned(host: Host) -> None:
    """A task that ignores its cancellation is named in the log and does not keep the process alive."""
    child = Child(
        host,
        """
        from trio_sidecar.bridge import host as bridge_host
        bridge_host.AIO_END_SECONDS = 0.1
        async def aio_stubborn():
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    pass
        async def aio_start():
            keep.append(asyncio.get_running_loop().create_task(aio_stubborn(), name="mule"))
            await asyncio.sleep(0)
        keep = []
        run(run_aio, aio_start, host=host)
        say("ended")
        """,
    )
    code, out, err = child.end()
    assert (0, "") == (code, err)
    assert "ended" == out[-1]
    assert any("aio_task_abandoned" in line and "mule" in line for line in out)


def test_error_of_a_leftover_task_is_logged(host: Host) -> None:
    """What a background task raised and nobody retrieved goes to the log and does not end the loop."""

    async def aio_fail() -> NoReturn:
        await asyncio.sleep(0)
        raise ValueError("nobody waits for me")

    async def aio_start() -> None:
        asyncio.get_running_loop().create_task(aio_fail())
        await asyncio.sleep(0.02)

    async def main() -> str:
        await run_aio(aio_start)
        gc.collect()  # the error is noticed when the task is collected
        await run_aio(asyncio.sleep, 0.01)
        return "still running"

    with structlog.testing.capture_logs() as logs:
        assert "still running" == run(main, host=host)
    assert ["aio_stray_error"] == [entry["event"] for entry in logs]
    assert "nobody waits for me" == str(logs[0]["exc_info"])


def test_error_is_not_wrapped(host: Host) -> None:
    """An error of the main function is raised as it was raised, a group only if it was one."""
    error = KeyError("plain")

    async def main(error: Exception) -> NoReturn:
        await trio.lowlevel.checkpoint()
        raise error

    with pytest.raises(KeyError) as caught:
        run(main, error, host=host)
    assert error is caught.value
    group = ExceptionGroup("several", [ValueError("a")])
    with pytest.RaisesGroup(ValueError) as caught_group:
        run(main, group, host=host)
    assert group is caught_group.value


def test_async_generators_of_trio(host: Host) -> None:
    """A generator that Trio code abandons is closed by Trio, not by asyncio."""
    closed: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        await trio.lowlevel.checkpoint()
        try:
            yield 1
        finally:
            closed.append("trio" if trio.lowlevel.current_task() is not None else "asyncio")

    async def main() -> None:
        keep.append(numbers())
        await anext(keep[0])

    keep: list[AsyncIterator[int]] = []
    run(main, host=host)
    assert ["trio"] == closed


def test_hosts_can_follow_each_other(host: Host) -> None:
    """Runs leave nothing behind that disturbs the next one, on whichever host."""

    async def main() -> int:
        return await run_aio(asyncio.sleep, 0.0, 1)

    assert [1, 1, 1] == [run(main, host=each) for each in (host, Host.TRIO, Host.UVLOOP)]


def test_not_in_the_main_thread(host: Host) -> None:
    """A run in another thread works, without signals; asking for them there is an error."""
    results: list[object] = []

    async def main() -> str:
        with pytest.raises(ValueError, match="main thread"), open_signals(signal.SIGTERM):
            pass
        return await run_aio(asyncio.sleep, 0.0, "worked")

    async def outer() -> None:
        results.append(await trio.to_thread.run_sync(lambda: run(main, host=host)))

    trio.run(outer)
    assert ["worked"] == results


async def test_open_signals_needs_a_signal() -> None:
    """Naming no signal is an error."""
    await trio.lowlevel.checkpoint()
    with pytest.raises(ValueError, match="at least one"), open_signals():
        pass
