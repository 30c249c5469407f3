"""Variable-length integers: tables, single values, and long lists.

A varint carries seven bits per byte, lowest first; the top bit says that another byte follows. Single values below
2**14 come from a table. Long lists of ids are the one place where a loop over values is too slow (a prompt of 100,000
ids would block the event loop for 20 ms and more), so they are handled as one huge Python integer, which shifts and
masks at the speed of C: every id sits in a *lane* of four bytes, and each operation works on all lanes at once.

Encoding spreads the four groups of seven bits of each lane over its four bytes, sets the top bit of each byte that
has a non-zero byte after it in its lane, and deletes all zero bytes. What remains is the encoding, because the varint
of a value other than zero contains no zero byte. The value zero is written as four bytes 0x80 first. Nothing else
gives four bytes with their top bit set in a row, so these can be found and replaced at the end.

Decoding builds *planes*: plane k holds byte k of every varint, at the position where the varint starts, and zero bytes
elsewhere. The start positions always keep their top bit, so deleting the zero bytes leaves exactly one byte per id in
every plane. The planes are interleaved into lanes, and the groups of seven bits are pushed together again.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

__all__ = [
    "VARINTS",
    "TagError",
    "encode_varint",
    "pack_uint32",
    "read_size",
    "read_tag",
    "read_varint",
    "unpack_uint32",
]

_MASK_64 = (1 << 64) - 1
_LONG_LIST = 512
"""From about this many bytes or values on, the lanes beat a loop."""

_PART = 4096
"""How many values are encoded at once: few enough for the nearer caches, since many passes go over them."""

_LANE_LIMIT = 1 << 28
"""A lane has room for four groups of seven bits."""


_TOO_LONG = "a varint has more than ten bytes"


class TagError(ValueError):
    """There is no whole tag where one should be."""


def encode_varint(value: int) -> bytes:
    """The varint of any value of 64 bits; negative ones as two's complement, which takes ten bytes."""
    value &= _MASK_64
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


VARINTS: tuple[bytes, ...] = tuple(
    bytes((value,)) if value < 128 else bytes((value & 127 | 128, value >> 7)) for value in range(1 << 14)
)
"""The varints of 0 to 16,383."""

_OPEN_PAIRS: tuple[bytes, ...] = tuple(bytes((value & 127 | 128, value >> 7 | 128)) for value in range(1 << 14))
"""The lowest fourteen bits of a longer varint."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read one varint.

    Returns:
        The value (64 bits, unsigned) and the position after it.

    Raises:
        IndexError: The data ends inside the varint.
        ValueError: It is longer than ten bytes.
    """
    first = data[at]
    if first < 128:
        return first, at + 1
    second = data[at + 1]
    if second < 128:
        return first + (second << 7) - 0x80, at + 2
    third = data[at + 2]
    if third < 128:
        return first + (second << 7) + (third << 14) - 0x4080, at + 3
    value = first + (second << 7) + (third << 14) - 0x204080
    for index in range(3, 10):
        byte = data[at + index]
        value += (byte & 127) << 7 * index
        if byte < 128:
            return value & _MASK_64, at + index + 1
    raise ValueError(_TOO_LONG)


def read_tag(data: bytes, at: int) -> tuple[int, int]:
    """Read a tag: field number and wire type, in 32 bits and five bytes at most.

    Returns:
        The tag and the position after it.

    Raises:
        TagError: The data ends inside the tag, or the tag is too large.
    """
    try:
        tag, after = read_varint(data, at)
    except (IndexError, ValueError):
        raise TagError("the data ends inside a tag, or a tag is too long") from None  # noqa: EM101
    if after - at > 5 or tag >= 1 << 32:
        raise TagError("a tag is too large")  # noqa: EM101
    return tag, after


def read_size(data: bytes, at: int) -> tuple[int, int]:
    """Read a length, which is below 2**31 and has five bytes at most; errors as :func:`read_varint`."""
    size, after = read_varint(data, at)
    if after - at > 5 or size >= 1 << 31:
        raise ValueError("a length is too large")  # noqa: EM101
    return size, after


def pack_uint32(values: Sequence[int]) -> bytes:
    """The varints of many values, one after the other.

    Raises:
        TypeError: A value is not an integer.
        OverflowError: A value does not fit into 32 bits without sign.
    """
    lanes = array("I", values)
    if len(lanes) < _LONG_LIST:
        return _pack_one_by_one(values)
    return b"".join([_pack_part(lanes[at : at + _PART]) for at in range(0, len(lanes), _PART)])


def _pack_part(lanes: array[int]) -> bytes:
    """The varints of as many values as are packed at once."""
    masks = _FULL_PART if len(lanes) == _PART else _Masks.of(len(lanes))
    packed = int.from_bytes(_little_endian(lanes).tobytes(), "little")
    if packed & masks.too_large:
        return _pack_one_by_one(lanes)
    return _pack_lanes(packed, masks)


@attrs.frozen(slots=True)
class _Masks:
    """What encoding needs in every lane; making it takes a third of the time of encoding."""

    count: int
    too_large: int
    low_group: int
    every_group: int
    every_top_bit: int
    low_three_top_bits: int
    low_two_top_bits: int
    low_top_bit: int

    @classmethod
    def of(cls, count: int) -> Self:
        """For so many lanes."""
        lanes = (0xF0000000, 0x7F, 0x7F7F7F7F, 0x80808080, 0x808080, 0x8080, 0x80)
        return cls(count, *(_every_lane(lane, count) for lane in lanes))


def _pack_lanes(packed: int, masks: _Masks) -> bytes:
    """The varints of values below 2**28, given as lanes."""
    low_group, low_top_bit, size = masks.low_group, masks.low_top_bit, 4 * masks.count
    groups = (
        packed & low_group
        | packed << 1 & low_group << 8
        | packed << 2 & low_group << 16
        | packed << 3 & low_group << 24
    )
    # Adding 127 to a group of seven bits sets the top bit of its byte unless the group is zero.
    used = (groups + masks.every_group) & masks.every_top_bit
    continued = used >> 8 & masks.low_three_top_bits
    continued |= continued >> 8 & masks.low_two_top_bits | continued >> 16 & low_top_bit
    zeros = ((used | continued) & low_top_bit) ^ low_top_bit
    if not zeros:
        return (groups | continued).to_bytes(size, "little").translate(None, b"\x00")
    marked = groups | continued | zeros | zeros << 8 | zeros << 16 | zeros << 24
    encoded = marked.to_bytes(size, "little").translate(None, b"\x00")
    return encoded.replace(b"\x80\x80\x80\x80", b"\x00")


def _pack_one_by_one(values: Sequence[int]) -> bytes:
    """The varints of few values, or of values that do not fit into lanes."""
    return b"".join(
        [
            VARINTS[value]
            if value < 0x4000
            else _OPEN_PAIRS[value & 0x3FFF] + VARINTS[value >> 14]
            if value < _LANE_LIMIT
            else encode_varint(value)
            for value in values
        ]
    )


def unpack_uint32(data: bytes) -> list[int]:
    """Read varints until the data ends, each cut to 32 bits.

    Raises:
        ValueError: The data ends inside a varint, or one is longer than ten bytes.
    """
    if not data:
        return []
    if data[-1] > 127:
        raise ValueError("a packed list ends inside a value")  # noqa: EM101
    if len(data) < _LONG_LIST:
        return _unpack_one_by_one(data)
    planes = _planes(data)
    if planes is None:
        return _unpack_one_by_one(data)
    count = len(planes[0])
    lanes = bytearray(4 * count)
    for index, plane in enumerate(planes):
        lanes[index::4] = plane
    groups = int.from_bytes(lanes, "little")
    low_group = _every_lane(0x7F, count)
    packed = (
        groups & low_group
        | groups >> 1 & low_group << 7
        | groups >> 2 & low_group << 14
        | groups >> 3 & low_group << 21
    )
    return _values(packed, count)


def _planes(data: bytes) -> list[bytes] | None:
    """For each k byte k of every varint, an empty group where a varint is shorter; None if one has five bytes."""
    size = len(data)
    every_top_bit = int.from_bytes(b"\x80" * size, "little")
    stream = int.from_bytes(data, "little")
    continued = stream & every_top_bit
    starts = ((continued ^ every_top_bit) << 8 | 0x80) & every_top_bit
    planes: list[bytes] = []
    reaching = starts  # the starts of varints that have a byte k
    while reaching:
        if len(planes) == 4:
            return None
        whole_bytes = (reaching << 1) - (reaching >> 7)
        planes.append((stream & whole_bytes | starts).to_bytes(size, "little").translate(None, b"\x00"))
        reaching &= continued
        stream >>= 8
        continued >>= 8
    return planes


def _unpack_one_by_one(data: bytes) -> list[int]:
    """Read few varints, or long ones; the last byte is known to end one."""
    values: list[int] = []
    append = values.append
    following = iter(data)
    for first in following:
        if first < 128:
            append(first)
            continue
        second = next(following)
        if second < 128:
            append(first + (second << 7) - 0x80)
            continue
        third = next(following)
        if third < 128:
            append(first + (second << 7) + (third << 14) - 0x4080)
            continue
        append(_finish_varint(first + (second << 7) + (third << 14) - 0x204080, following) & 0xFFFFFFFF)
    return values


def _finish_varint(value: int, following: Iterator[int]) -> int:
    """Add the bytes after the third to the value of the first three."""
    for index in range(3, 10):
        byte = next(following)
        value += (byte & 127) << 7 * index
        if byte < 128:
            return value
    raise ValueError(_TOO_LONG)


def _every_lane(value: int, count: int) -> int:
    """The same 32 bits in each of so many lanes."""
    return int.from_bytes(value.to_bytes(4, "little") * count, "little")


def _values(packed: int, count: int) -> list[int]:
    """One integer as the values of its lanes."""
    lanes = array("I", packed.to_bytes(4 * count, "little"))
    return _little_endian(lanes).tolist()


def _little_endian(lanes: array[int]) -> array[int]:
    """The same lanes, lowest byte first, whatever this machine's order is."""
    if sys.byteorder == "little":
        return lanes
    swapped = lanes[:]
    swapped.byteswap()
    return swapped


_FULL_PART = _Masks.of(_PART)
