"""Child processes: started with what they need and no more, measured from outside, ended with us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Child", "ChildFailed", "cpu_seconds", "dynamo_environment", "rss_kib"]

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")
POLL_SECONDS = 0.005
TAIL_CHARACTERS = 3000
LAUNCHER = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


def cpu_seconds(pid: int) -> float:
    """CPU time of a process with all its threads, to the nanosecond (Linux)."""
    return time.clock_gettime((~pid << 3) | 2)  # the kernel's CPUCLOCK_SCHED of that process


def rss_kib(pid: int) -> int:
    """Resident memory of a process, in KiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KIB


def dynamo_environment(discovery: Path) -> dict[str, str]:
    """An environment for processes that find each other through a directory, without etcd or NATS."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ} | {
        "PYTHONUNBUFFERED": "1",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(discovery),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_SYSTEM_PORT": "-1",
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
    }


class ChildFailed(RuntimeError):
    """A process ended, or was too slow; carries the end of its log."""


class Child:
    """One process; its standard error goes to a file, and with ``piped`` its lines can be read and written."""

    def __init__(
        self, name: str, argv: Sequence[str], *, env: Mapping[str, str], log_dir: Path, piped: bool = False
    ) -> None:
        self.name = name
        self.log_path = log_dir / f"{name}.log"
        with self.log_path.open("ab") as sink:
            self._process = subprocess.Popen(  # noqa: S603 - our own commands
                [sys.executable, "-I", "-S", "-c", LAUNCHER, sys.executable, *argv],
                env=dict(env),
                cwd=log_dir,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else sink,
                stderr=sink,
                text=True,
                start_new_session=True,
            )
        self.started_at = time.monotonic()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def failed(self, what: str) -> ChildFailed:
        """The error that says what it did not do."""
        tail = self.log_path.read_text(errors="replace")[-TAIL_CHARACTERS:]
        reason = f"{self.name} {what} (exit code {self._process.poll()})\n--- {self.log_path}\n{tail}"
        return ChildFailed(reason)

    def wait_until(self, condition: Callable[[], bool], what: str, *, seconds: float) -> float:
        """Poll until the condition holds.

        Returns:
            Seconds since the process was started.

        Raises:
            ChildFailed: It ended first, or time ran out.
        """
        limit = time.monotonic() + seconds
        while not condition():
            if self._process.poll() is not None or time.monotonic() > limit:
                missing = f"did not get to this point: {what}"
                raise self.failed(missing)
            time.sleep(POLL_SECONDS)
        return time.monotonic() - self.started_at

    def read(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None  # noqa: S101 - piped
        line = self._process.stdout.readline()
        if not line:
            what = "ended"
            raise self.failed(what)
        return line

    def ask(self, line: str) -> str:
        """Write a line, read a line."""
        assert self._process.stdin is not None  # noqa: S101 - piped
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self, *, seconds: float = 5) -> None:
        """Ask it to end; kill its group after that time."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
