"""One child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from support.stand_ins import IGNORES_SIGTERM, SLEEP, Lines, python
from trio_sidecar.up.child import TAIL_LINES, Child, Part, PartFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@asynccontextmanager
async def running(directory: Path, program: str, lines: Lines | None = None) -> AsyncIterator[Child]:
    """A child that is watched and read, and killed at the end."""
    part = Part(name="engine", argv=python(program), env=dict(os.environ))
    child = Child(part, directory / "engine.log", lines or Lines())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child.watch)
        nursery.start_soon(child.read_output)
        try:
            yield child
        finally:
            child.kill_group()
    child.close()


async def ended(directory: Path, program: str, lines: Lines | None = None) -> PartFailed:
    """How a program ended."""
    async with running(directory, program, lines) as child:
        await child.wait()
        await trio.sleep(0.05)  # the last output may come a moment later
        return child.failure()


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until_gone(pid: int) -> None:
    with trio.fail_after(5):
        while alive(pid):  # noqa: ASYNC110 - another process's doing
            await trio.sleep(0.01)


async def until_heard(lines: Lines) -> None:
    with trio.fail_after(5):
        while not lines.lines:  # noqa: ASYNC110 - another process's doing
            await trio.sleep(0.01)


async def test_failure_says_exit_code_and_last_output(tmp_path: Path) -> None:
    """The error has the name, the code and the last lines of both streams."""
    failure = await ended(tmp_path, "import sys; print('one', flush=True); print('two', file=sys.stderr); sys.exit(3)")

    assert ("engine", 3, ("one", "two")) == (failure.name, failure.exit_code, failure.tail)
    assert "the engine exited with code 3; its last output was:\n  engine: one\n  engine: two" == str(failure)


async def test_failure_names_the_signal(tmp_path: Path) -> None:
    """A process that was killed says by what."""
    failure = await ended(tmp_path, "import os; os.kill(os.getpid(), 9)")

    assert -signal.SIGKILL == failure.exit_code
    assert "the engine was killed by SIGKILL; its last output was:\n  engine: (no output)" == str(failure)


async def test_output_goes_line_by_line_to_log_tail_and_listener(tmp_path: Path) -> None:
    """All output is logged, the listener gets each line, the tail keeps the last; an unfinished line counts."""
    lines = Lines()
    program = "import sys; sys.stdout.write('\\n'.join(map(str, range(100))) + '\\r\\n\\xff end')"
    failure = await ended(tmp_path, program, lines)

    assert [*map(str, range(100)), "ÿ end"] == [line for _part, line in lines.lines]
    assert TAIL_LINES == len(failure.tail)
    assert (tmp_path / "engine.log").read_bytes().endswith("99\r\nÿ end".encode())


async def test_a_line_without_end_does_not_fill_memory(tmp_path: Path) -> None:
    """Output without newlines is cut into lines."""
    lines = Lines()
    await ended(tmp_path, "print('x' * 1_000_000)", lines)

    assert 1 < len(lines.lines)
    assert 1_000_000 == sum(len(line) for _part, line in lines.lines)


async def test_terminate_asks_and_kill_ends(tmp_path: Path) -> None:
    """SIGTERM may be ignored, SIGKILL not; both do no harm when it is too late."""
    lines = Lines()
    async with running(tmp_path, IGNORES_SIGTERM, lines) as child:
        await until_heard(lines)
        child.terminate()
        with trio.move_on_after(0.2) as patience:
            await child.wait()
        child.kill_group()
        await child.wait()
        child.terminate()
        child.kill_group()

        assert patience.cancelled_caught
        assert -signal.SIGKILL == child.failure().exit_code
        assert child.stopping


async def test_kill_reaches_grandchildren(tmp_path: Path) -> None:
    """What a part has started in its group goes with it."""
    start = f"p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])"
    program = f"import subprocess, sys; {start}; print(p.pid, flush=True); p.wait()"
    lines = Lines()
    async with running(tmp_path, program, lines) as child:
        await until_heard(lines)
        assert alive(int(lines.lines[0][1]))
        child.kill_group()
        await child.wait()

    await until_gone(int(lines.lines[0][1]))


async def test_child_has_a_session_of_its_own(tmp_path: Path) -> None:
    """Ctrl-C at the terminal reaches us alone, so that we can end the parts in order."""
    async with running(tmp_path, SLEEP) as child:
        assert child.pid == os.getsid(child.pid)
        assert child.pid == os.getpgid(child.pid)


@pytest.mark.rule("FR-023")
def test_child_dies_with_us(tmp_path: Path) -> None:
    """Even if we are killed, no child stays."""
    program = f"""
import os, sys, time
from pathlib import Path
from trio_sidecar.up.child import Child, Part
part = Part(name="x", argv=(sys.executable, "-c", {SLEEP!r}), env=dict(os.environ))
child = Child(part, Path({str(tmp_path / "log")!r}), print)
print(child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    limit = time.monotonic() + 5
    while alive(pid) and time.monotonic() < limit:
        time.sleep(0.01)

    assert not alive(pid)


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    """The error is the system's own and names the file."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Child(Part(name="x", argv=("/nowhere/x",), env={}), tmp_path / "log", Lines())
