"""Typed readers for the untyped dict that Dynamo hands over.

Every reader treats an absent key and None alike, accepts no look-alikes (True is not 1, 1.0 is not 1), and refuses what
the wire could not carry; the error names the field, the value and what is allowed. Whether a temperature of 9 makes
sense is for the engine to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import attrs

from trio_sidecar.errors import InvalidRequest

__all__ = ["MAX_INT32", "MAX_UINT32", "MAX_UINT64", "MIN_INT32", "Section", "check_text", "describe"]

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1
MAX_INT32 = 2**31 - 1
MIN_INT32 = -(2**31)
_MAX_INT64 = 2**63 - 1

_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
# Half of the smallest float32: anything nearer to zero would turn into zero, which often means "default" on the wire.
_MIN_FLOAT32 = 2.0**-150

_SHOWN_CHARS = 60
_SHOWN_BITS = 128


def describe(value: object) -> str:  # noqa: PLR0911 - one per JSON type
    """A value as an error message may show it: short, and without the content of texts and containers."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            # Python refuses to print integers of more than some thousand digits.
            return str(value) if value.bit_length() <= _SHOWN_BITS else f"an integer of {value.bit_length()} bits"
        case float():
            return repr(value)
        case str():
            return f"the text {value!r}" if len(value) <= _SHOWN_CHARS else f"a text of {len(value)} characters"
        case list():
            return "an array"
        case Mapping():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


def check_text(text: str, name: str) -> str:
    """The same text, if UTF-8 can carry it.

    Raises:
        InvalidRequest: It holds a lone surrogate.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            reason = f"{name} must be valid Unicode, got a lone surrogate at position {error.start}"
            raise InvalidRequest(reason) from None
    return text


@attrs.frozen
class Section:
    """One object of the request, with the path that messages give to its members.

    Attributes:
        values: The object itself.
        path: Dotted name of the object; empty where members go by their own names.
    """

    values: Mapping[str, object]
    path: str = ""

    def name(self, key: str) -> str:
        """How messages call a member."""
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> object:
        """The raw value; None if absent."""
        return self.values.get(key)

    def refuse(self, key: str, allowed: str) -> InvalidRequest:
        """The error for a member whose value is not what is allowed."""
        return InvalidRequest(f"{self.name(key)} must be {allowed}, got {describe(self.values.get(key))}")

    def section(self, key: str, *, path: str | None = None) -> Section:
        """A nested object; an empty one if absent."""
        value = self.values.get(key)
        if value is None:
            value = {}
        elif not isinstance(value, Mapping):
            raise self.refuse(key, "a JSON object")
        return Section(value, self.name(key) if path is None else path)

    def flag(self, key: str) -> bool | None:
        """A boolean."""
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.refuse(key, "a boolean")

    def integer(self, key: str, low: int, high: int) -> int | None:
        """A whole number within bounds, both included."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is int and low <= value <= high:
            return value
        raise self.refuse(key, f"an integer from {low} to {high}")

    def uint32(self, key: str) -> int | None:
        """A whole number that fits uint32."""
        return self.integer(key, 0, MAX_UINT32)

    def int32(self, key: str) -> int | None:
        """A whole number that fits int32."""
        return self.integer(key, MIN_INT32, MAX_INT32)

    def int64(self, key: str) -> int | None:
        """A whole number that fits int64."""
        return self.integer(key, -_MAX_INT64 - 1, _MAX_INT64)

    def float32(self, key: str) -> float | None:
        """A finite number that float32 can hold; one that it would round to zero is refused as well."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "a number")
        if value == 0 or _MIN_FLOAT32 < abs(value) <= _MAX_FLOAT32:
            return float(value)
        raise self.refuse(key, "a finite number within the range of float32")

    def text(self, key: str) -> str | None:
        """A text that UTF-8 can carry."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str):
            return check_text(value, self.name(key))
        raise self.refuse(key, "a string")

    def texts(self, key: str) -> list[str] | None:
        """An array of texts."""
        values = self._array(key)
        if values is None:
            return None
        texts: list[str] = []
        for position, text in enumerate(values):
            where = f"{self.name(key)}[{position}]"
            if not isinstance(text, str):
                reason = f"{where} must be a string, got {describe(text)}"
                raise InvalidRequest(reason)
            texts.append(check_text(text, where))
        return texts

    def uint32s(self, key: str) -> list[int] | None:
        """An array of whole numbers that fit uint32; made for arrays of a hundred thousand."""
        values = self._array(key)
        if not values:
            return None if values is None else []
        numbers = cast("list[int]", values)
        if set(map(type, values)) != {int} or min(numbers) < 0 or max(numbers) > MAX_UINT32:
            wrong = (at for at, value in enumerate(numbers) if type(value) is not int or not 0 <= value <= MAX_UINT32)
            position = next(wrong)
            where = f"{self.name(key)}[{position}]"
            reason = f"{where} must be an integer from 0 to {MAX_UINT32}, got {describe(values[position])}"
            raise InvalidRequest(reason)
        return numbers

    def _array(self, key: str) -> list[object] | None:
        value = self.values.get(key)
        if value is None or isinstance(value, list):
            return value
        raise self.refuse(key, "an array")
