"""What ``up`` tells its user: one line for each stage, rewritten in place on a terminal, plain elsewhere."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

NAME_WIDTH = 10


class Stage:
    """A stage under way.

    Attributes:
        outcome: What to say when it is done.
    """

    def __init__(self) -> None:
        self.outcome = "ready"


class Report:
    """Writes progress.

    Args:
        stream: Usually stderr, so that an answer on stdout stays clean.
        verbose: Whether the parts' own output is shown too, each line with its part's name.
    """

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        self._stream = stream
        self._verbose = verbose
        # Lines of the parts would be torn by a line that is rewritten in place.
        self._rewrites = stream.isatty() and not verbose

    @contextmanager
    def stage(self, name: str, doing: str) -> Iterator[Stage]:
        """Report a stage: that it runs, and then its outcome with the seconds that it took."""
        start = time.monotonic()
        if self._rewrites:
            self._write(f"  {name:<{NAME_WIDTH}} {doing} …", end="")
        stage = Stage()
        try:
            yield stage
        except BaseException:
            if self._rewrites:
                self._write("\r\x1b[K", end="")
            raise
        if self._rewrites:
            self._write("\r\x1b[K", end="")
        self._write(f"  {name:<{NAME_WIDTH}} {stage.outcome} ({time.monotonic() - start:.1f} s)")

    def say(self, text: str = "") -> None:
        """Write a line."""
        self._write(text)

    def on_line(self, part: str, line: str) -> None:
        """Take a line of a part's output."""
        if self._verbose:
            self._write(f"{part:>{NAME_WIDTH}} | {line}")

    def _write(self, text: str, end: str = "\n") -> None:
        try:
            self._stream.write(text + end)
            self._stream.flush()
        except BrokenPipeError:
            pass  # nobody reads progress any more; that is no reason to stop serving
