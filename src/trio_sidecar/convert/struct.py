"""JSON objects to and from ``google.protobuf.Struct`` (spec 9).

A Struct keeps every number as a double. An integer is therefore accepted only up to the magnitude where doubles still
hold every integer, and comes back as an integer; the distinction between 42 and 42.0 is not kept.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from trio_sidecar.convert.fields import check_text, describe
from trio_sidecar.errors import InvalidRequest, ProtocolError
from trio_sidecar.wire import ListValue, NullValue, Struct, Value

__all__ = ["MAX_EXACT_INTEGER", "MAX_NESTING", "Json", "json_from_struct", "struct_from_json"]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_EXACT_INTEGER = 2**53
"""Largest magnitude up to which a double tells every integer from its neighbours."""

MAX_NESTING = 30
"""Objects and lists inside one another, the top level included.

Each level costs up to three nested messages, and receivers refuse more than a hundred.
"""


def struct_from_json(value: object, *, label: str) -> Struct:
    """The Struct of a JSON object (R9.1 to R9.6).

    Args:
        value: A JSON value as Python objects; must be a dict with string keys.
        label: Name of the payload, for messages.

    Raises:
        InvalidRequest: The value is not an object, or holds something that a Struct cannot carry exactly.
    """
    if not isinstance(value, dict):
        reason = f"{label} must be a JSON object, got {describe(value)}"
        raise InvalidRequest(reason)
    return _struct(value, label, 1)


def _struct(value: dict[object, object], label: str, depth: int) -> Struct:
    fields: dict[str, Value] = {}
    for key, member in value.items():
        if not isinstance(key, str):
            reason = f"{label} must have string keys only, got {describe(key)}"
            raise InvalidRequest(reason)
        fields[check_text(key, f"a key of {label}")] = _value(member, label, depth)
    return Struct(fields=fields)


def _value(value: object, label: str, depth: int) -> Value:
    match value:
        case None:
            return Value(null_value=NullValue.NULL_VALUE)
        case bool():
            return Value(bool_value=value)
        case int() | float():
            return Value(number_value=_double(value, label))
        case str():
            return Value(string_value=check_text(value, f"a text in {label}"))
        case dict():
            return Value(struct_value=_struct(value, label, _deeper(label, depth)))
        case list():
            inner = _deeper(label, depth)
            return Value(list_value=ListValue(values=[_value(item, label, inner) for item in value]))
        case _:
            reason = f"{label} holds a {type(value).__name__}; allowed are JSON values"
            raise InvalidRequest(reason)


def _double(value: float, label: str) -> float:
    if isinstance(value, int) and abs(value) > MAX_EXACT_INTEGER:
        allowed = f"integers from -{MAX_EXACT_INTEGER} to {MAX_EXACT_INTEGER}"
        reason = f"{label} holds {describe(value)}, which cannot be represented exactly; allowed are {allowed}"
        raise InvalidRequest(reason)
    if not math.isfinite(value):
        reason = f"{label} holds {value}; allowed are finite numbers"
        raise InvalidRequest(reason)
    return float(value)


def _deeper(label: str, depth: int) -> int:
    if depth >= MAX_NESTING:
        reason = f"{label} is nested too deeply; allowed are {MAX_NESTING} levels"
        raise InvalidRequest(reason)
    return depth + 1


def json_from_struct(struct: Struct, *, label: str) -> dict[str, Json]:
    """The JSON object that a Struct holds (R9.7 to R9.9).

    Raises:
        ProtocolError: A number is NaN or infinite, or the nesting is deeper than any receiver could have read.
    """
    return _object(struct, label, 1)


# The wire allows a little more nesting than we send, so that a peer's payload is not refused for our own margin.
_MAX_RECEIVED_NESTING = 100


def _object(struct: Struct, label: str, depth: int) -> dict[str, Json]:
    if depth > _MAX_RECEIVED_NESTING:
        reason = f"{label} is nested more than {_MAX_RECEIVED_NESTING} levels deep"
        raise ProtocolError(reason)
    return {key: _json(value, label, depth) for key, value in struct.fields.items()}


def _json(value: Value, label: str, depth: int) -> Json:
    if value.number_value is not None:
        return _number(value.number_value, label)
    if value.string_value is not None:
        return value.string_value
    if value.bool_value is not None:
        return value.bool_value
    if value.struct_value is not None:
        return _object(value.struct_value, label, depth + 1)
    if value.list_value is not None:
        if depth >= _MAX_RECEIVED_NESTING:
            reason = f"{label} is nested more than {_MAX_RECEIVED_NESTING} levels deep"
            raise ProtocolError(reason)
        return [_json(item, label, depth + 1) for item in value.list_value.values]
    return None


def _number(number: float, label: str) -> int | float:
    if not math.isfinite(number):
        reason = f"{label} holds NaN or infinity"
        raise ProtocolError(reason)
    if number.is_integer() and abs(number) <= MAX_EXACT_INTEGER:
        return int(number)
    return number
