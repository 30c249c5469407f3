"""One child process: started so that it cannot outlive us, its output read line by line.

``trio.open_process`` is not used, for one reason: it forks in a worker thread. The parent-death signal belongs to the
thread that forked, so the child would be killed as soon as Trio retires that thread.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import attrs
import trio

from trio_sidecar.errors import SidecarError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

PR_SET_PDEATHSIG = 1
TAIL_LINES = 20
MAX_LINE_BYTES = 64 << 10
READ_BYTES = 64 << 10


class PartFailed(SidecarError):
    """A part ended when it should have gone on.

    Attributes:
        name: The part.
        exit_code: Its exit code; minus the signal's number where one killed it.
        tail: The last lines of its output.
    """

    def __init__(self, name: str, exit_code: int, tail: tuple[str, ...]) -> None:
        self.name = name
        self.exit_code = exit_code
        self.tail = tail
        how = f"was killed by {_signal_name(-exit_code)}" if exit_code < 0 else f"exited with code {exit_code}"
        lines = "".join(f"\n  {name}: {line}" for line in tail) or f"\n  {name}: (no output)"
        super().__init__(f"the {name} {how}; its last output was:{lines}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@attrs.frozen(slots=True, kw_only=True)
class Part:
    """What to start.

    Attributes:
        name: For people: ``engine``, ``worker``, ``front end``.
        argv: The command.
        env: Its whole environment.
        stop_secs: How long it may take to end after SIGTERM before it is killed.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stop_secs: float = 5.0


class Child:
    """A running part: leader of its own session, killed by the kernel when we die.

    Attributes:
        part: What was started.
        stopping: Whether its end is expected.
    """

    def __init__(self, part: Part, log_path: Path, on_line: Callable[[str, str], None]) -> None:
        self.part = part
        self.stopping = False
        self._ended = trio.Event()
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._process = _spawn(part)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._log = log_path.open("ab")

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group."""
        return self._process.pid

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of its output."""
        return tuple(self._tail)

    async def watch(self) -> None:
        """Wait for its end and tell those who :meth:`wait`; one task must do this.

        It is not reaped before :meth:`close`, so that its id stays its own until then.
        """
        await trio.lowlevel.wait_readable(self._pidfd)
        self._ended.set()

    async def wait(self) -> None:
        """Wait until it has ended."""
        await self._ended.wait()

    def terminate(self) -> None:
        """Ask it to end; asking again, or too late, does nothing."""
        self.stopping = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill it and whatever it has started, as far as that has not left its process group."""
        self.stopping = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def failure(self) -> PartFailed:
        """The error that says how it ended; only after it has."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None  # noqa: S101 - for mypy; None comes only with WNOHANG
        exited = status.si_code == os.CLD_EXITED
        return PartFailed(self.part.name, status.si_status if exited else -status.si_status, self.tail)

    async def read_output(self) -> None:
        """Read its output to the end, line by line: into the log, the tail, and to whoever listens."""
        assert self._process.stdout is not None  # noqa: S101 - for mypy; _spawn asks for a pipe
        rest = b""
        async with trio.lowlevel.FdStream(os.dup(self._process.stdout.fileno())) as stream:
            self._process.stdout.close()
            while data := await stream.receive_some(READ_BYTES):
                self._log.write(data)
                self._log.flush()
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._take(line)
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self._tail.append(text)
        self._on_line(self.part.name, text)

    def close(self) -> None:
        """Reap it and release the descriptors; it must have ended."""
        self._process.poll()
        self._log.close()
        os.close(self._pidfd)


def _spawn(part: Part) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def die_with_parent() -> None:
        # Between fork and exec, so as little as possible. We may be dead already: then no signal will come.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(  # noqa: S603 - our own command line  # pylint: disable=consider-using-with
        part.argv,
        env=dict(part.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
    )
