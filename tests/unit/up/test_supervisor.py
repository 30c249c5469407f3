"""Several children: whose end ends what, and in which order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import trio

from support.stand_ins import IGNORES_SIGTERM, SLEEP, Lines, python
from trio_sidecar.errors import cause_chain
from trio_sidecar.up.child import Part, PartFailed
from trio_sidecar.up.supervisor import Supervisor, open_supervisor

if TYPE_CHECKING:
    from pathlib import Path

ORDER = ("worker", "front end", "engine")
# Says when it is asked to end, and goes. Not with print: a signal that interrupts a print makes the next one fail.
SAYS_BYE = f"""
import os, signal, sys
def bye(*_):
    os.write(1, b'bye\\n')
    sys.exit(0)
signal.signal(signal.SIGTERM, bye)
os.write(1, b'hello\\n')
{SLEEP}
"""


def part(name: str, program: str, stop_secs: float = 5.0) -> Part:
    return Part(name=name, argv=python(program), env=dict(os.environ), stop_secs=stop_secs)


def gone(supervisor: Supervisor) -> bool:
    """Whether every child has been reaped."""
    for child in supervisor.children:
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)
    return True


async def failure_of(directory: Path, *parts: Part) -> PartFailed:
    """The error that ends a block that would wait for ever; everything has ended with it."""
    with pytest.raises(PartFailed) as caught:
        await _run_for_ever(directory, parts)
    return caught.value


async def _run_for_ever(directory: Path, parts: tuple[Part, ...]) -> None:
    supervisor: Supervisor | None = None
    try:
        async with open_supervisor(directory, stop_order=ORDER, on_line=Lines()) as supervisor:
            for each in parts:
                supervisor.start(each)
            await trio.sleep_forever()
    finally:
        assert supervisor is not None
        assert gone(supervisor)


async def until(lines: Lines, text: str, count: int = 1) -> None:
    with trio.fail_after(10):
        while sum(line == text for _part, line in lines.lines) < count:  # noqa: ASYNC110 - another process's doing
            await trio.sleep(0.01)


async def test_children_end_in_order(tmp_path: Path) -> None:
    """When the block ends, each child is asked to end after the one before has ended."""
    lines = Lines()
    async with open_supervisor(tmp_path, stop_order=ORDER, on_line=lines) as supervisor:
        for name in ("engine", "front end", "worker"):
            supervisor.start(part(name, SAYS_BYE))
        await until(lines, "hello", 3)

    assert [(name, "bye") for name in ORDER] == lines.lines[3:]
    assert gone(supervisor)
    for name in ("engine.log", "front-end.log", "worker.log"):
        assert "hello\nbye\n" == await (trio.Path(tmp_path) / name).read_text()


async def test_a_child_that_ends_early_ends_the_block(tmp_path: Path) -> None:
    """The block is cancelled, the other children end, and the error says whose fault it was."""
    late = "import time; time.sleep(0.2); print('why'); raise SystemExit(7)"
    failure = await failure_of(tmp_path, part("engine", SLEEP), part("worker", late))

    assert "the worker exited with code 7; its last output was:\n  worker: why" == cause_chain(failure)


async def test_an_end_with_code_0_is_a_failure_too(tmp_path: Path) -> None:
    """A part has no business ending by itself."""
    assert 0 == (await failure_of(tmp_path, part("engine", "pass"))).exit_code


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """After its time is up, not before, and the others still end in order."""
    lines = Lines()
    start = 0.0
    async with open_supervisor(tmp_path, stop_order=ORDER, on_line=lines) as supervisor:
        supervisor.start(part("engine", SAYS_BYE))
        supervisor.start(part("worker", IGNORES_SIGTERM, stop_secs=0.3))
        await until(lines, "deaf")
        await until(lines, "hello")
        start = trio.current_time()

    assert 0.3 <= trio.current_time() - start < 5
    assert ("engine", "bye") == lines.lines[-1]
    assert gone(supervisor)


async def test_hurry_does_not_wait(tmp_path: Path) -> None:
    """Asked to hurry, it kills at once what has not ended."""
    lines = Lines()
    with trio.fail_after(10):
        async with open_supervisor(tmp_path, stop_order=ORDER, on_line=lines) as supervisor:
            supervisor.start(part("worker", IGNORES_SIGTERM, stop_secs=60))
            await until(lines, "deaf")
            supervisor.hurry()

    assert gone(supervisor)


async def test_cancellation_from_outside_ends_the_children(tmp_path: Path) -> None:
    """A cancelled block stops its children as a finished one does."""
    lines = Lines()
    with trio.move_on_after(0.5) as scope:
        async with open_supervisor(tmp_path, stop_order=ORDER, on_line=lines) as supervisor:
            supervisor.start(part("engine", SAYS_BYE))
            await trio.sleep_forever()

    assert scope.cancelled_caught
    assert gone(supervisor)
    assert ("engine", "bye") == lines.lines[-1]


async def test_an_error_in_the_block_ends_the_children_and_stays(tmp_path: Path) -> None:
    """The error is the block's own; that the children were killed for it is no news."""
    with pytest.RaisesGroup(ZeroDivisionError):
        async with open_supervisor(tmp_path, stop_order=ORDER, on_line=Lines()) as supervisor:
            supervisor.start(part("engine", SLEEP))
            raise ZeroDivisionError

    assert gone(supervisor)


async def test_a_grandchild_that_holds_the_output_open_does_not_block(tmp_path: Path) -> None:
    """A part that has ended is over, whoever else still holds its pipe."""
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); sys.exit(5)"
    with trio.fail_after(10):
        failure = await failure_of(tmp_path, part("engine", program))

    assert 5 == failure.exit_code


async def test_much_output_while_stopping_does_not_block(tmp_path: Path) -> None:
    """A child that writes more than a pipe holds before it ends can end, also after a cancel."""
    program = SAYS_BYE.replace("os.write(1, b'bye\\n')", "[os.write(1, b'x\\n' * 1000) for _ in range(100)]")
    assert program != SAYS_BYE
    lines = Lines()
    with trio.CancelScope() as scope:
        async with open_supervisor(tmp_path, stop_order=ORDER, on_line=lines) as supervisor:
            supervisor.start(part("engine", program))
            await until(lines, "hello")
            scope.cancel()

    assert ["hello"] + ["x"] * 100_000 == [line for _part, line in lines.lines]
    assert gone(supervisor)
