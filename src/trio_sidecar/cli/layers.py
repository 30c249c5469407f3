"""The configuration file under flags and variables, for every command alike.

What a table may hold is read off the command's parser, so a flag that is added to a command is a key of its table.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import attrs

from trio_sidecar.config.fields import given_variable
from trio_sidecar.config.file import CONFIG_FLAG, PRINT_FLAG, ConfigSettings, as_text, key_of, place, read_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trio_sidecar.cli.flags import Parser
    from trio_sidecar.config.file import Table

__all__ = ["Layered", "commands_of", "layered", "table_name", "table_of"]

OWN = (CONFIG_FLAG, PRINT_FLAG)
"""Flags that say what to do with the file, and are no keys of it."""


@attrs.frozen(slots=True, kw_only=True)
class Layered:
    """What a command is run with.

    Attributes:
        flags: Of the command line, and below them what the file says.
        environ: The environment; below it what the file says where there is no flag.
        places: Where in the file a value comes from, by flag, or by variable where there is no flag.
        table: The keys of the command's table.
        shown: Whether to show the settings instead of running.
    """

    flags: Mapping[str, str | bool]
    environ: Mapping[str, str]
    places: Mapping[str, str]
    table: Table
    shown: bool


def layered(root: Parser, command: Parser, flags: Mapping[str, str | bool], environ: Mapping[str, str]) -> Layered:
    """Read the file that a flag or the variable names, if one does, and put it below flags and variables.

    Args:
        root: The whole command line, for the tables of all commands.
        command: The command's own parser.
        flags: What the command line gave.
        environ: The environment.

    Raises:
        InvalidConfig: The file cannot be read, or something in it is not allowed, in whichever table.
    """
    table = table_of(command)
    flags = dict(flags)
    shown = bool(flags.pop(PRINT_FLAG, False))
    path, source = flags.pop(CONFIG_FLAG, None), CONFIG_FLAG
    option = attrs.fields(ConfigSettings).config.metadata["trio_sidecar.option"]
    if path is None and (path := given_variable(option, environ)) is not None:
        source = option.env
    if not table or not isinstance(path, str):
        return Layered(flags=flags, environ=environ, places={}, table=table, shown=shown)
    tables = {table_name(each): table_of(each) for each in commands_of(root) if table_of(each)}
    own = table_name(command)
    places: dict[str, str] = {}
    below: dict[str, str] = {}
    for name, value in read_tables(path, tables, source=source)[own].items():
        key = table[name]
        if key.flag in flags or (key.source and given_variable(key.source.option, environ) is not None):
            continue
        text = as_text(value, key)
        if key.flag:
            flags[key.flag] = text
        elif key.env:
            below[key.env] = str(text)
        places[key.flag or key.env or ""] = place(path, own, name)
    return Layered(
        flags=flags, environ={**environ, **below} if below else environ, places=places, table=table, shown=shown
    )


def commands_of(parser: Parser) -> Iterator[Parser]:
    """The parsers of all commands that have none below them."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    for action in below:
        for each in action.choices.values():
            yield from commands_of(each)
    if not below:
        yield parser


def table_name(command: Parser) -> str:
    """The table of a command: its words without the program's name, joined by dots."""
    return ".".join(command.prog.split()[1:])


def table_of(command: Parser) -> Table:
    """What a command's table may hold."""
    keys = [key_of(flag=flag, source=source) for flag, source in command.offered.items() if flag not in OWN]
    keys += [key_of(flag=None, source=source) for source in command.variables]
    return {key.name: key for key in keys}
