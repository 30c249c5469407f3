"""argparse, derived from the settings classes.

The parser only collects texts; what they mean is decided where the settings are made, so that flags and variables share
one set of checks and one style of message.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from trio_sidecar.config import options_of
from trio_sidecar.config.fields import show_default
from trio_sidecar.errors import SidecarError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import attrs

    from trio_sidecar.config import OptionSource

FLAGS = "flags"


class UsageError(SidecarError):
    """The command line cannot be understood."""

    def __init__(self, command: str, reason: str) -> None:
        self.command = command
        self.reason = reason
        super().__init__(f"{command}: {reason}")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of exiting, and knows what was probably meant.

    Attributes:
        offered: The fields behind its flags, by flag; None for a flag that belongs to no settings class.
        variables: The fields that only a variable can set.
    """

    def __init__(self, **rest: Any) -> None:
        self.offered: dict[str, OptionSource | None] = {}
        self.variables: list[OptionSource] = []
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **rest)

    def collecting(self) -> list[Collect]:
        """The actions behind the flags."""
        return [action for action in self._actions if isinstance(action, Collect)]

    def error(self, message: str) -> NoReturn:
        """Raise the message in our own words, with a suggestion where a command is misspelt.

        Raises:
            UsageError: Always.
        """
        if found := re.match(r"argument \S+: invalid choice: '(.*)' \(choose from (.*)\)", message):
            names = re.findall(r"[\w-]+", found[2])
            message = f"unknown command {found[1]!r}{suggestion(found[1], names)}; commands are {', '.join(names)}"
        elif found := re.match(r"argument (--\S+): expected one argument", message):
            message = f"{found[1]} needs a value"
        elif found := re.match(r"argument (--\S+): ignored explicit argument", message):
            message = f"{found[1]} takes no value"
        raise UsageError(self.prog, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help; argparse's own method would keep to itself that it could not."""
        (file or sys.stderr).write(message)

    def refuse_rest(self, rest: Sequence[str]) -> None:
        """Refuse what nobody has asked for; a flag's value is not repeated.

        Raises:
            UsageError: There is something.
        """
        if not rest:
            return
        first = next((part for part in rest if part.startswith("-")), None)
        if first is None:
            raise UsageError(self.prog, f"unexpected argument {rest[0]!r}")
        name = first.partition("=")[0]
        raise UsageError(self.prog, f"unknown flag {name}{suggestion(name, self._option_string_actions)}")


def suggestion(word: str, known: Iterable[str]) -> str:
    """``(did you mean …?)`` if something known is near, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def add_options(parser: Parser, *classes: type[attrs.AttrsInstance], skip: Collection[str] = ()) -> None:
    """Offer the flags of settings classes, each class in a group of its own if there are several.

    Args:
        parser: Gets the flags.
        classes: The settings classes.
        skip: Flags that the command does not offer.
    """
    for cls in classes:
        for source in options_of(cls):
            if source.option.flag is None:
                parser.variables.append(source)
            elif source.option.flag not in skip and not _has(parser, source.option.flag):
                _add(parser, source)


def add_plain(parser: Parser, flag: str, *, metavar: str, text: str) -> None:
    """Offer a flag that belongs to no settings class."""
    parser.add_argument(flag, action=Collect, dest=FLAGS, metavar=metavar, help=text, default=argparse.SUPPRESS)
    parser.offered[flag] = None


def _has(parser: argparse.ArgumentParser, flag: str) -> bool:
    return flag in parser._option_string_actions  # noqa: SLF001 - argparse offers no question for this


def _add(parser: Parser, source: OptionSource) -> None:
    option = source.option
    flag = option.flag or ""
    notes = [f"env: {option.env}"] if option.env else []
    if source.required:
        notes.append("required")
    elif not option.switch and (default := show_default(source)):
        notes.append(f"default: {default}")
    text = f"{option.help} [{'; '.join(notes)}]" if notes else option.help
    metavar = option.metavar or ("{" + ",".join(option.choices) + "}" if option.choices else "TEXT")
    added = parser.add_argument(
        flag,
        action=Collect,
        nargs=0 if option.switch else None,
        dest=FLAGS,
        metavar=None if option.switch else metavar,
        help=text.replace("%", "%%"),
        default=argparse.SUPPRESS,
    )
    parser.offered[flag] = source
    if isinstance(added, Collect):
        added.source = source


class Collect(argparse.Action):
    """Collects flags into one mapping; a flag given twice is an error, as it is for the Rust tool.

    Attributes:
        source: The field behind the flag; None if it belongs to no settings class.
    """

    source: OptionSource | None = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        """Add a flag to those that were given."""
        collected: dict[str, str | bool] = getattr(namespace, FLAGS, None) or {}
        flag = self.option_strings[0]
        if flag in collected:
            parser.error(f"{flag} is given twice")
        setattr(namespace, FLAGS, collected | {flag: True if self.nargs == 0 else values})


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)
