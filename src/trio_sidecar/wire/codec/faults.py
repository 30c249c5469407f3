"""What generated code calls when something is not as usual: unknown fields, and errors that need a name."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from trio_sidecar.wire.codec.errors import DecodeError, EncodeError
from trio_sidecar.wire.codec.kinds import FIXED_32, FIXED_64, LENGTH, VARINT, as_list, type_fault
from trio_sidecar.wire.codec.schema import FieldPlan, MessagePlan, Presence
from trio_sidecar.wire.codec.varint import TagError, read_size, read_tag, read_varint

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["decode_error", "decode_fault", "encode_fault", "keep_unknown", "skip_field"]

_GROUP_START, _GROUP_END = 3, 4


def keep_unknown(unknown: bytes | bytearray, data: bytes, start: int, stop: int) -> bytearray:
    """Add one unknown field to those kept; a bytearray, since a hostile message may hold millions."""
    kept = unknown if isinstance(unknown, bytearray) else bytearray(unknown)
    kept += data[start:stop]
    return kept


def skip_field(data: bytes, at: int, tag: int, end: int, depth: int) -> int:
    """The position after the value of an unknown field, or of a known one with another wire type than its own.

    Raises:
        IndexError: The data ends inside the value.
        ValueError: The tag does not start a field, or a group is not closed as it was opened.
    """
    number, wire_type = tag >> 3, tag & 7
    if number == 0:
        raise ValueError("0 is not a field number")  # noqa: EM101
    if wire_type == VARINT:
        at = read_varint(data, at)[1]
    elif wire_type == FIXED_64:
        at += 8
    elif wire_type == FIXED_32:
        at += 4
    elif wire_type == LENGTH:
        size, at = read_size(data, at)
        at += size
    elif wire_type == _GROUP_START:
        at = _skip_group(data, at, number, end, depth)
    else:
        message = "a group ends that was not open" if wire_type == _GROUP_END else f"{wire_type} is not a wire type"
        raise ValueError(message)
    if at > end:
        raise IndexError
    return at


def _skip_group(data: bytes, at: int, number: int, end: int, depth: int) -> int:
    """The position after a group, whose start has been read."""
    if depth <= 0:
        raise ValueError("groups are nested too deeply")  # noqa: EM101
    while at < end:
        tag, at = read_tag(data, at)
        if tag & 7 == _GROUP_END:
            if tag >> 3 != number:
                raise ValueError("a group ends that was not open")  # noqa: EM101
            return at
        at = skip_field(data, at, tag, end, depth - 1)
    raise IndexError


def decode_error(message: str, reason: str) -> DecodeError:
    """The error for a message as a whole."""
    return DecodeError(message, None, reason)


def decode_fault(message: str, fields: Mapping[int, str], tag: int, fault: Exception) -> DecodeError:
    """The error for what failed after a tag had been read; an error that is named already stays as it is."""
    if isinstance(fault, DecodeError):
        return fault
    field = None if isinstance(fault, TagError) else fields.get(tag >> 3)
    if isinstance(fault, UnicodeDecodeError):
        return DecodeError(message, field, f"byte {fault.start} of the text is not UTF-8")
    if isinstance(fault, (IndexError, struct.error)):
        return DecodeError(message, field, "the data ends inside a value")
    return DecodeError(message, field, str(fault))


def encode_fault(plan: MessagePlan, message: Any, fault: Exception) -> EncodeError:
    """Find the field that an encoding function failed on."""
    for field in plan.by_number:
        try:
            _check_field(field, getattr(message, field.name))
        except EncodeError as named:
            return EncodeError(plan.name, field.name + (named.field or ""), named.reason)
        except (AttributeError, TypeError, ValueError) as reason:
            return EncodeError(plan.name, field.name, str(reason))
    return EncodeError(plan.name, None, str(fault) or type(fault).__name__)


def _check_field(field: FieldPlan, value: Any) -> None:
    """Raise what is wrong with a field's value, if anything is."""
    if field.presence is Presence.EXPLICIT and value is None:
        return
    if field.presence is Presence.MAP:
        _check_map(field, value)
    elif field.presence is Presence.REPEATED:
        for index, item in enumerate(as_list(value)):
            _check_value(field, item, f"[{index}]")
    else:
        _check_value(field, value, "")


def _check_map(field: FieldPlan, value: Any) -> None:
    if not isinstance(value, dict):
        raise type_fault(value, "dict")
    assert field.entry is not None  # noqa: S101 - tells the type checker what a map field always has
    key_plan, value_plan = field.entry
    for key, item in value.items():
        _check_value(key_plan, key, " key")
        _check_value(value_plan, item, " value")


def _check_value(field: FieldPlan, value: Any, place: str) -> None:
    """Check one value; ``place`` says where in the field it stands."""
    try:
        if field.kind.name != "message":
            field.kind.encode(value)
        elif field.target is not None and type(value) is not field.target:
            raise type_fault(value, field.target.__name__)
    except (TypeError, ValueError) as fault:
        raise EncodeError(field.name, place, str(fault)) from None
