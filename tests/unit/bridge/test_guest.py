"""Trio as a guest without a helper thread does what Trio's own guest mode does, with fewer hands."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import socket
import threading
import time
from typing import Any

import pytest
import structlog
import trio

from trio_sidecar.bridge import Host, aio_sleep, guest, run, run_aio
from trio_sidecar.bridge.loop import current_loop

MODES = ["threadless", "thread"]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to sleep; the second as with a Trio that was not tested."""
    chosen: str = request.param
    if chosen == "thread":
        monkeypatch.setattr(guest, "unsupported", lambda: "it is to be tested")
    return chosen


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread is not threading.main_thread()}


async def _wake_often() -> set[str]:
    """Sleep on both sides in turn, and see which threads there are meanwhile."""
    seen: set[str] = set()
    for _ in range(20):
        await trio.sleep(0.002)
        await run_aio(aio_sleep, 0.001)
        seen |= _threads()
    return seen


def test_sleeps_without_a_thread() -> None:
    """While Trio sleeps and wakes there is no helper thread; Trio's own mode has one."""
    before = _threads()
    assert run(_wake_often, host=Host.UVLOOP) - before == set()


def test_deadlines_are_kept(mode: str) -> None:
    """Deadlines come neither early nor much late, also one that a later change brings forward."""

    async def main() -> list[float]:
        took = []
        for seconds in (0.0, 0.0004, 0.003, 0.05):
            start = trio.current_time()
            await trio.sleep(seconds)
            took.append(trio.current_time() - start - seconds)
        start = trio.current_time()
        with trio.CancelScope(deadline=start + 60) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_bring_forward, scope, start + 0.02)
                await trio.sleep_forever()
        took.append(trio.current_time() - start - 0.02)
        return took

    late = run(main, host=Host.UVLOOP)
    assert min(late) >= 0.0
    assert max(late) < 1.0


async def _bring_forward(scope: trio.CancelScope, deadline: float) -> None:  # noqa: ASYNC124 - for start_soon
    scope.deadline = deadline


def test_trio_sockets_work(mode: str) -> None:
    """Trio's own I/O wakes it: what one task sends, another receives, while nothing else happens."""

    async def main() -> bytes:
        left, right = socket.socketpair()
        with trio.socket.from_stdlib_socket(left) as one, trio.socket.from_stdlib_socket(right) as other:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_echo, other)
                for _ in range(5):
                    await one.send(b"ping")
                    with trio.fail_after(5):
                        answer = await one.recv(100)
        return answer

    assert run(main, host=Host.UVLOOP) == b"ping"


async def _echo(sock: Any) -> None:
    for _ in range(5):
        await sock.send(await sock.recv(100))


def test_threads_wake_trio(mode: str) -> None:
    """A worker thread's result, and a callback from another thread, wake a sleeping Trio."""

    async def main() -> tuple[str, bool]:
        result = await trio.to_thread.run_sync(_slowly)
        called = trio.Event()
        token = trio.lowlevel.current_trio_token()
        timer = threading.Timer(0.01, lambda: token.run_sync_soon(called.set))
        timer.start()
        with trio.fail_after(5):
            await called.wait()
        return result, called.is_set()

    assert run(main, host=Host.UVLOOP) == ("done", True)


def _slowly() -> str:
    time.sleep(0.01)
    return "done"


def test_all_blocked_is_not_seen_too_early(mode: str) -> None:
    """A change of a deadline wakes Trio, but does not make it think that a cushion of idleness has passed."""

    async def main() -> float:
        loop = current_loop()
        with trio.CancelScope(deadline=trio.current_time() + 60) as scope:
            for step in range(1, 5):
                # Brought forward from outside, it wakes Trio and makes no task runnable.
                loop.call_later(step / 100, setattr, scope, "deadline", trio.current_time() + 60 - step)
            start = trio.current_time()
            await trio.testing.wait_all_tasks_blocked(cushion=0.06)
            took = trio.current_time() - start
        return took

    assert run(main, host=Host.UVLOOP) >= 0.05


def test_nothing_is_left(mode: str) -> None:
    """Runs leave no descriptors, and no runs."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    run(_wake_often, host=Host.UVLOOP)
    before = descriptors()
    for _ in range(3):
        run(_wake_often, host=Host.UVLOOP)
    gc.collect()
    assert before == descriptors()
    assert not [thing for thing in gc.get_objects() if type(thing).__name__ == "_Sleeper"]


def test_main_function_may_fail_at_once(mode: str) -> None:
    """An error before the first sleep comes out as it was raised."""

    async def main() -> None:  # noqa: ASYNC124 - it fails before it could
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(main, host=Host.UVLOOP)


@pytest.mark.parametrize(
    ("version", "reason"), [("0.35.1", None), ("0.99.0", "trio 0.99.0 is installed, tested are 0.31")]
)
def test_unknown_trio_keeps_its_thread(version: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a Trio that was not tested the public way is taken, and a warning says so."""
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with structlog.testing.capture_logs() as logs:
        assert run(_wake_often, host=Host.UVLOOP) is not None
    warned = [entry["reason"] for entry in logs if entry["event"] == "guest_needs_thread"]
    assert [] == warned if reason is None else warned[0].startswith(reason)
