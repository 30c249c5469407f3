"""``trio-sidecar completion SHELL``: a script that completes commands, flags, choices and paths."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from trio_sidecar.cli.layers import commands_of
from trio_sidecar.errors import MissingExtra

if TYPE_CHECKING:
    from trio_sidecar.cli.flags import Parser

__all__ = ["SHELLS", "completion"]

SHELLS = ("bash", "zsh", "fish")
EXTRA = "completion"


def completion(parser: Parser, shell: str) -> int:
    """Write a completion script to stdout.

    Args:
        parser: The whole command line; it learns choices that it does not judge by itself, so do not parse with it.
        shell: One of :data:`SHELLS`.

    Raises:
        MissingExtra: shtab is not installed.
    """
    if importlib.util.find_spec("shtab") is None:
        raise MissingExtra("this command", EXTRA)  # noqa: EM101
    import shtab  # noqa: PLC0415

    for command in commands_of(parser):
        for action in command.collecting():
            if action.source is not None and action.source.option.choices and not action.source.option.switch:
                action.choices = action.source.option.choices
            elif action.metavar == "PATH":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, shell))
    return 0
