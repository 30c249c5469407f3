"""A configuration file: TOML, one table per command, keys named as the flags with underscores.

A file is weaker than variables and flags. Its values are turned into the texts that a flag would hold, so that one set
of parsers and checks serves all three. What keys a table may hold comes from the settings classes.
"""

from __future__ import annotations

import datetime as dt
import difflib
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar.config.fields import Option, OptionSource, parse_bool, parse_text, setting
from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["CONFIG_FLAG", "PRINT_FLAG", "ConfigSettings", "Key", "Kind", "Table", "as_text", "key_of", "read_tables"]

CONFIG_FLAG = "--config"
PRINT_FLAG = "--print-config"
NEAR = 0.6
"""How alike two names must be for one to be suggested, from 0 to 1."""


@attrs.frozen(slots=True, kw_only=True)
class ConfigSettings:
    """Where a command's configuration file is, and whether to show the settings instead of running.

    Attributes:
        config: None reads no file.
        print_config: Write every setting and where it comes from, and start nothing.
    """

    config: str | None = setting(
        Option(
            flag=CONFIG_FLAG,
            env="TRIO_SIDECAR_CONFIG",
            parse=parse_text,
            metavar="PATH",
            help="TOML file with a table for each command; variables and flags win over it.",
            empty_is_unset=True,
        ),
        default=None,
    )
    print_config: bool = setting(
        Option(
            flag=PRINT_FLAG,
            env=None,
            parse=parse_bool,
            switch=True,
            help="Write every setting and where its value comes from, and start nothing.",
        ),
        default=False,
    )


@attrs.frozen(slots=True)
class Kind:
    """What TOML values a key may hold.

    Attributes:
        types: The Python types that ``tomllib`` makes of them.
        allowed: The same for people.
    """

    types: tuple[type, ...]
    allowed: str


TEXT = Kind((str,), "a text")
TEXTS = Kind((list,), "an array of texts")
SWITCH = Kind((bool,), "true or false")
WHOLE = Kind((int,), "a whole number")
NUMBER = Kind((int, float), "a number")
_KINDS = {"bool": SWITCH, "int": WHOLE, "float": NUMBER, "tuple": TEXTS}
_TOML_NAMES = {
    str: "a text",
    bool: "a boolean",
    int: "a whole number",
    float: "a number with a fraction",
    list: "an array",
    dict: "a table",
}


@attrs.frozen(slots=True, kw_only=True)
class Key:
    """One key of a table.

    Attributes:
        name: As in the file.
        flag: The flag that it stands for; None where only a variable does.
        source: The field behind it; None for a flag that belongs to no settings class.
    """

    name: str
    flag: str | None
    source: OptionSource | None

    @property
    def env(self) -> str | None:
        """The variable that wins over it."""
        return self.source.option.env if self.source else None

    @property
    def kind(self) -> Kind:
        """What it may hold; a number that is written in its own way, such as an octal mode, is a text."""
        if self.source is None or self.source.option.show is not None:
            return TEXT
        found = re.match(r"\w+", self.source.annotation)
        return _KINDS.get(found[0], TEXT) if found else TEXT

    @property
    def allowed(self) -> str:
        """What it may hold, for people."""
        choices = self.source.option.choices if self.source else ()
        return f"one of {', '.join(choices)}" if choices and self.kind is TEXT else self.kind.allowed


Table = dict[str, Key]


def key_of(*, flag: str | None, source: OptionSource | None) -> Key:
    """The key of a flag, or of a field that only a variable sets, which goes by the field's name."""
    name = flag.removeprefix("--").replace("-", "_") if flag else source.name if source else ""
    return Key(name=name, flag=flag, source=source)


def read_tables(path: str, tables: Mapping[str, Table], *, source: str) -> dict[str, dict[str, object]]:
    """Read a file and check the names and the types of everything in it, for all commands.

    Args:
        path: The file.
        tables: What each table may hold, by its dotted name.
        source: The flag or the variable that named the file.

    Returns:
        The values by key, by table; a table that the file lacks is empty.

    Raises:
        InvalidConfig: It cannot be read, is no TOML, or holds an unknown name or a value of a wrong type.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = "cannot read" if isinstance(error, OSError) else "is not valid TOML:"
        reason = getattr(error, "strerror", None) or error
        message = f"{what} {path!r}: {reason}" if isinstance(error, OSError) else f"{path!r} {what} {reason}"
        raise InvalidConfig(source, message) from error
    found: dict[str, dict[str, object]] = {name: {} for name in tables}
    _collect(document, "", tables, path, found)
    return found


def _collect(
    given: Mapping[str, object],
    prefix: str,
    tables: Mapping[str, Table],
    path: str,
    found: dict[str, dict[str, object]],
) -> None:
    """Sort the members of a document or a group of tables, such as ``[engine]``, into tables."""
    parts = sorted({name.removeprefix(prefix).partition(".")[0] for name in tables if name.startswith(prefix)})
    for name, value in given.items():
        where = f"{path} [{prefix}{name}]"
        if name not in parts:
            what = "table" if isinstance(value, dict) else "key, outside of every table,"
            allowed = ", ".join(f"[{prefix}{part}]" for part in parts)
            raise InvalidConfig(where, f"unknown {what} {name!r}{_nearest(name, parts)}; tables are {allowed}")
        if not isinstance(value, dict):
            raise InvalidConfig(where, f"{_shown(value)} is {_toml_name(value)}; use a table")
        full = prefix + name
        if full in tables:
            for key, held in value.items():
                _check(held, key, full, tables[full], path)
            found[full] = value
        else:
            _collect(value, f"{full}.", tables, path, found)


def _check(value: object, name: str, table: str, keys: Table, path: str) -> None:
    where = place(path, table, name)
    if name not in keys:
        raise InvalidConfig(
            where, f"unknown key{_nearest(name, keys) or '; --print-config lists those that there are'}"
        )
    key = keys[name]
    texts = not isinstance(value, list) or all(isinstance(part, str) for part in value)
    # To Python true is a number as well.
    if type(value) not in key.kind.types or not texts:
        raise InvalidConfig(where, f"{_shown(value)} is {_toml_name(value)}; use {key.allowed}")


def place(path: str, table: str, name: str) -> str:
    """How messages name a key of a file."""
    return f"{path} [{table}] {name}"


def as_text(value: Any, key: Key) -> str | bool:
    """What a flag would hold for a value that has been checked; a switch is a boolean."""
    if isinstance(value, bool):
        choices = key.source.option.choices if key.source else ()
        if key.source and key.source.option.switch and key.flag:
            return value
        yes, no = choices if len(choices) == len(("yes", "no")) else ("true", "false")
        return yes if value else no
    if isinstance(value, list):
        return ",".join(value)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1, cutoff=NEAR)
    return f" (did you mean {near[0]}?)" if near else ""


def _toml_name(value: object) -> str:
    if isinstance(value, dt.date | dt.time):
        return "a date or a time"
    return _TOML_NAMES.get(type(value), type(value).__name__)


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
