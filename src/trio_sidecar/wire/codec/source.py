"""A builder of Python source: indentation, blocks, and the names that the source refers to."""

from __future__ import annotations

import contextlib
import linecache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SourceBuilder", "execute"]


class SourceBuilder:
    """Collects the lines of one function."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def line(self, *lines: str) -> None:
        """Add lines at the present depth."""
        self._lines.extend("    " * self._depth + line for line in lines)

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Add a head such as ``while at < end:`` and indent what is added inside."""
        self.line(head)
        self._depth += 1
        before = len(self._lines)
        yield
        if len(self._lines) == before:
            self.line("pass")
        self._depth -= 1

    def text(self) -> str:
        """The source so far."""
        return "\n".join(self._lines) + "\n"


def execute(source: str, filename: str, namespace: dict[str, Any]) -> None:
    """Run source that defines functions; tracebacks and debuggers will find its lines."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)  # noqa: S102 - made from our own generated classes, never from input
