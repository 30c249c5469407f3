"""Real processes for tests: bounded waits, captured output, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

POLL_SECONDS = 0.02
TAIL_CHARACTERS = 6000

# The child is killed when the test process dies, however it dies: PR_SET_PDEATHSIG (1) survives exec. A launcher sets
# it, because a preexec_fn would fork this process with all its threads, and gRPC's do not survive that.
LAUNCHER = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


class ChildFailed(AssertionError):
    """A process did not do what the test waited for; carries the end of its output."""

    def __init__(self, child: Child, what: str) -> None:
        super().__init__(
            f"{child.name} (pid {child.pid}) {what}\n--- {child.log_path} ---\n{child.log[-TAIL_CHARACTERS:]}"
        )


def free_port() -> int:
    """A port that nobody listens on, below the range from which the kernel takes ports for outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Child:
    """One process in a process group of its own; both output streams go to one file."""

    def __init__(self, name: str, argv: Sequence[str | Path], *, env: Mapping[str, str], log_dir: Path) -> None:
        self.name = name
        log_dir.mkdir(parents=True, exist_ok=True)
        self.log_path = log_dir / f"{name}.log"
        with self.log_path.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", LAUNCHER, *(str(part) for part in argv)],
                env=dict(env),
                cwd=log_dir,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started_at = time.monotonic()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """All that it has printed so far, without terminal colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log_path.read_text(errors="replace"))

    @property
    def open_files(self) -> int:
        """How many file descriptors it holds."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208

    def wait_until(self, condition: Callable[[], bool], what: str, *, seconds: float) -> None:
        """Poll until the condition holds.

        Raises:
            ChildFailed: The process ended first, or the time ran out.
        """
        limit = time.monotonic() + seconds
        while not condition():
            if not self.running and not condition():
                raise ChildFailed(self, f"ended with {self._process.returncode} before: {what}")
            if time.monotonic() > limit:
                raise ChildFailed(self, f"did not reach within {seconds} s: {what}")
            time.sleep(POLL_SECONDS)

    def wait_for_line(self, pattern: str, *, seconds: float = 30) -> re.Match[str]:
        """Wait for output that matches the pattern; see :meth:`wait_until`."""
        compiled = re.compile(pattern, re.MULTILINE)
        self.wait_until(lambda: compiled.search(self.log) is not None, f"output like {pattern!r}", seconds=seconds)
        match = compiled.search(self.log)
        assert match is not None
        return match

    def wait_for_port(self, port: int, *, seconds: float = 30) -> None:
        """Wait until something accepts connections on the port; see :meth:`wait_until`."""
        self.wait_until(lambda: accepts(port), f"listening on port {port}", seconds=seconds)

    def wait(self, *, seconds: float) -> int:
        """Wait for the process to end.

        Returns:
            Its exit code; negative for a signal.

        Raises:
            ChildFailed: It is still running after that time.
        """
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ChildFailed(self, f"still running after {seconds} s") from None

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the process alone, not to its group."""
        self._process.send_signal(signum)

    def close(self, *, seconds: float = 10) -> None:
        """Ask it to end, and after that time kill its whole group."""
        if self.running:
            self.send(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def accepts(port: int) -> bool:
    """Whether a TCP connection to the port on the loopback address can be made."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
