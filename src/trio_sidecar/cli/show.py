"""``--print-config``: every setting of a command, and where it comes from, as a table that a file may hold."""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING

from trio_sidecar.config.fields import checked, given_variable, show_default
from trio_sidecar.config.file import SWITCH, TEXT, TEXTS

if TYPE_CHECKING:
    from trio_sidecar.cli.layers import Layered
    from trio_sidecar.config.file import Key

__all__ = ["shown"]

MASKED = '"***"'
DELETE = 0x7F


def shown(table: str, layers: Layered) -> str:
    """The settings as TOML with comments; settings without a value are comments altogether.

    Raises:
        InvalidConfig: A value is not allowed; those that only contradict each other are found when the command runs.
    """
    lines = [_line(key, layers) for key in layers.table.values()]
    width = max((len(line) for line, _origin in lines if len(line) <= 60), default=0)
    return "\n".join([f"[{table}]", *(f"{line:<{width}}  # {origin}" for line, origin in lines)])


def _line(key: Key, layers: Layered) -> tuple[str, str]:
    """A setting, and where it comes from."""
    text, origin = _given(key, layers)
    if text is None:
        return _unset(key)
    return f"{key.name} = {_toml(text, key, origin)}", layers.places.get(key.flag or key.env or "", origin)


def _given(key: Key, layers: Layered) -> tuple[str | bool | None, str]:
    name = key.flag or key.env or ""
    if key.flag is not None and key.flag in layers.flags:
        return layers.flags[key.flag], layers.places.get(name, f"flag {key.flag}")
    variable = given_variable(key.source.option, layers.environ) if key.source else None
    return variable, layers.places.get(name, f"variable {key.env}")


def _unset(key: Key) -> tuple[str, str]:
    source = key.source
    if source is None or source.required:
        return f"# {key.name} =", "not set" if source is None else "required, not set"
    default = show_default(source)
    if source.default is None or source.default == "":
        return f"# {key.name} = {_quoted(default)}" if default else f"# {key.name} =", "default"
    value = default if key.kind not in (TEXT, TEXTS, SWITCH) else _toml(default, key, "")
    return f"{key.name} = {value}", "default"


def _toml(text: str | bool, key: Key, origin: str) -> str:
    """A value as the file would hold it."""
    source = key.source
    if isinstance(text, bool):
        return str(text).lower()
    if source is None:
        return _quoted(text)
    # The names in messages are those that would be there if the command ran.
    value = checked(source.option, text, origin.removeprefix("flag ").removeprefix("variable ")) if origin else text
    if source.option.secret:
        return MASKED
    return _written(value, text, key)


def _written(value: object, text: str, key: Key) -> str:
    if key.kind is TEXTS:
        return "[" + ", ".join(_quoted(part.strip()) for part in text.split(",")) + "]"
    if key.kind is SWITCH:
        return str(value in (True, "true", "on")).lower()
    if key.kind is TEXT:
        return _quoted(value.value if isinstance(value, enum.Enum) else text)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _quoted(text: str) -> str:
    """A TOML text; passwords in URLs are masked."""
    from trio_sidecar.doctor.report import mask  # noqa: PLC0415 - it brings Trio, and nobody else here needs that

    plain = mask(text).encode("utf-8", "replace").decode()
    return json.dumps(plain, ensure_ascii=False).replace(chr(DELETE), "\\u007f")
