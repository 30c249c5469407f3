"""The scalar types of protobuf: wire type, default, range, and the checked way from a Python value to bytes.

The functions here are the slow and careful way. Generated code calls them for whatever its short cuts do not cover, and
the search for a faulty field uses them to find the culprit; so a rule about values stands in one place only.
"""

from __future__ import annotations

import operator
import struct
from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar.wire.codec.varint import encode_varint, pack_uint32

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FIXED_32", "FIXED_64", "KINDS", "LENGTH", "VARINT", "Kind", "as_list", "type_fault"]

VARINT, FIXED_64, LENGTH, FIXED_32 = 0, 1, 2, 5
"""Wire types; 3 and 4 open and close the groups of old, 6 and 7 do not exist."""


def type_fault(value: object, expected: str) -> TypeError:
    """The error for a value of the wrong type; it shows the type only, since values may be confidential."""
    return TypeError(f"{expected} expected, not {type(value).__name__}")


def as_list(values: Any) -> list[Any]:
    """The values of a repeated field.

    Raises:
        TypeError: Not a list or tuple. A string, for one, would be taken apart into its characters.
    """
    if isinstance(values, list):
        return values
    if isinstance(values, tuple):
        return list(values)
    raise type_fault(values, "list")


def _integer_encoder(low: int, high: int, *, zigzag: bool = False) -> Callable[[Any], bytes]:
    """A function that checks a value's type and range, and gives its varint."""

    def encode_integer(value: Any) -> bytes:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise type_fault(value, "int")
        number = operator.index(value)
        if not low <= number <= high:
            message = f"{number} is not within {low} to {high}"
            raise ValueError(message)
        if zigzag:
            number = number << 1 if number >= 0 else ~(number << 1)
        return encode_varint(number)

    return encode_integer


def _encode_bool(value: Any) -> bytes:
    """One byte; integers are refused, because they are seldom meant."""
    if value is True:
        return b"\x01"
    if value is False:
        return b"\x00"
    raise type_fault(value, "bool")


def _float_encoder(code: str, bits: int) -> Callable[[Any], bytes]:
    """A function that checks a number's type and range, and gives its fixed-size form."""
    pack = struct.Struct("<" + code).pack

    def encode_float(value: Any) -> bytes:
        if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
            raise type_fault(value, "float")
        try:
            return pack(float(value))
        except OverflowError:
            message = f"{value} does not fit into a float of {bits} bits"
            raise ValueError(message) from None

    return encode_float


def _fixed_encoder(code: str, low: int, high: int) -> Callable[[Any], bytes]:
    """A function that checks an integer's type and range, and gives its fixed-size form."""
    check = _integer_encoder(low, high)
    pack = struct.Struct("<" + code).pack

    def encode_fixed(value: Any) -> bytes:
        check(value)
        return pack(operator.index(value))

    return encode_fixed


def _encode_string(value: Any) -> bytes:
    """UTF-8; a lone surrogate has none."""
    if not isinstance(value, str):
        raise type_fault(value, "str")
    try:
        return value.encode()
    except UnicodeEncodeError as fault:
        message = f"the character at index {fault.start} is a lone surrogate, which UTF-8 cannot carry"
        raise ValueError(message) from None


def _encode_bytes(value: Any) -> bytes:
    """The bytes themselves, whatever kind of buffer holds them."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise type_fault(value, "bytes")
    return bytes(value)


def _pack_uint32(values: list[Any]) -> bytes:
    """Many varints; the common case of nothing but ints is checked in C."""
    if set(map(type, values)) == {int}:
        return pack_uint32(values)
    return b"".join(map(KINDS["uint32"].encode, values))


def _pack_bools(values: list[Any]) -> bytes:
    """One byte each."""
    if set(map(type, values)) == {bool}:
        return bytes(values)
    return b"".join(map(_encode_bool, values))


def _pack_floats(values: list[Any]) -> bytes:
    """Four bytes each."""
    if set(map(type, values)) == {float}:
        return struct.pack(f"<{len(values)}f", *values)
    return b"".join(map(KINDS["float"].encode, values))


@attrs.frozen(slots=True)
class Kind:
    """One scalar type, or one of the two that wrap a class: ``enum`` and ``message``.

    Attributes:
        name: As in a .proto file.
        wire_type: How a single value looks on the wire.
        default: Source text of the value that an absent field without presence reads as.
        encode: The checked way from a value to its bytes, without tag and length.
        code: The code of :mod:`struct`, for types of fixed size.
        bits: 32 or 64 for integers in varints, 0 for other types.
        signed: Whether a varint is two's complement.
        zigzag: Whether a varint alternates between positive and negative.
        pack: The way to encode a whole packed list at once, where it differs from one value after the other.
    """

    name: str
    wire_type: int
    default: str
    encode: Callable[[Any], bytes]
    code: str = ""
    bits: int = 0
    signed: bool = False
    zigzag: bool = False
    pack: Callable[[list[Any]], bytes] | None = None

    @property
    def packable(self) -> bool:
        """Whether a repeated field of this type is written as one packed run."""
        return self.wire_type != LENGTH

    @property
    def size(self) -> int:
        """Bytes of one value of fixed size."""
        return 8 if self.wire_type == FIXED_64 else 4


def _varint_kind(name: str, bits: int, *, signed: bool = False, zigzag: bool = False) -> Kind:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed or zigzag else (0, (1 << bits) - 1)
    encode = _integer_encoder(low, high, zigzag=zigzag)
    pack = _pack_uint32 if name == "uint32" else None
    return Kind(name, VARINT, "0", encode, bits=bits, signed=signed, zigzag=zigzag, pack=pack)


def _fixed_kind(name: str, code: str, bits: int, *, signed: bool) -> Kind:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return Kind(name, FIXED_32 if bits == 32 else FIXED_64, "0", _fixed_encoder(code, low, high), code=code)


def _no_encoder(value: Any) -> bytes:
    """Messages are encoded by generated functions."""
    raise type_fault(value, "message")


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        _varint_kind("uint32", 32),
        _varint_kind("uint64", 64),
        _varint_kind("int32", 32, signed=True),
        _varint_kind("int64", 64, signed=True),
        _varint_kind("sint32", 32, zigzag=True),
        _varint_kind("sint64", 64, zigzag=True),
        _varint_kind("enum", 32, signed=True),
        Kind("bool", VARINT, "False", _encode_bool, pack=_pack_bools),
        Kind("float", FIXED_32, "0.0", _float_encoder("f", 32), code="f", pack=_pack_floats),
        Kind("double", FIXED_64, "0.0", _float_encoder("d", 64), code="d"),
        _fixed_kind("fixed32", "I", 32, signed=False),
        _fixed_kind("sfixed32", "i", 32, signed=True),
        _fixed_kind("fixed64", "Q", 64, signed=False),
        _fixed_kind("sfixed64", "q", 64, signed=True),
        Kind("string", LENGTH, "''", _encode_string),
        Kind("bytes", LENGTH, "b''", _encode_bytes),
        Kind("message", LENGTH, "None", _no_encoder),
    )
}
"""Every type by its name in betterproto2's metadata; a map is not one, it is a repeated message of two fields."""
