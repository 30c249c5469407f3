"""Random messages of our classes, a comparison with google's, and google's bytes with sorted maps."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

from trio_sidecar.wire.codec.schema import FieldPlan, Presence, plan_message
from trio_sidecar.wire.codec.varint import encode_varint

TEXTS = ("", "a", "token", "größer", "\u3053\u3093", "\U0001f600", "\x00", "line\nline", "x" * 200)
FLOATS = (0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 2.0**-149, 3.4028234663852886e38)


def _unsigned(bits: int) -> int:
    edges = (0, 1, 127, 128, 16383, 16384, (1 << bits) - 1, 1 << bits - 1)
    return random.choice((random.choice(edges), random.getrandbits(random.randint(1, bits))))


def _signed(bits: int) -> int:
    return _unsigned(bits) - (1 << bits - 1) if random.random() < 0.3 else _unsigned(bits - 1)


def _scalar(field: FieldPlan) -> Any:
    name = field.kind.name
    if name == "enum":
        assert field.target is not None
        return field.target(random.choice((0, 1, 2, 3, 9, -1, 300)))
    if name == "bool":
        return random.random() < 0.5
    if name == "float":
        return random.choice((random.choice(FLOATS), struct.unpack("<f", struct.pack("<f", random.gauss(0, 9)))[0]))
    if name == "double":
        return random.choice((random.choice(FLOATS), random.gauss(0, 1e9)))
    if name == "string":
        return random.choice(TEXTS)
    if name == "bytes":
        return random.randbytes(random.choice((0, 1, 5, 200)))
    return _signed(field.kind.bits) if field.kind.signed else _unsigned(field.kind.bits)


def _value(field: FieldPlan, levels: int) -> Any:
    if field.kind.name != "message":
        return _scalar(field)
    assert field.target is not None
    return random_message(field.target, levels - 1)


def _sizes(levels: int) -> int:
    return random.choice((0, 0, 1, 2, 3, 40 if levels > 3 else 2))


def random_message(message_class: type[Any], levels: int = 5) -> Any:
    """A message with random fields, nested so many levels at most; few members of a oneof are set, never two."""
    message = message_class()
    taken: set[str] = set()
    for field in random.sample(plan_message(message_class).fields, k=len(plan_message(message_class).fields)):
        if random.random() < 0.4 or (field.group in taken):
            continue
        if levels <= 0 and field.kind.name == "message":
            continue
        if field.presence is Presence.MAP:
            assert field.entry is not None
            key, value = field.entry
            setattr(message, field.name, {_value(key, 0): _value(value, levels) for _ in range(_sizes(0))})
        elif field.presence is Presence.REPEATED:
            setattr(message, field.name, [_value(field, levels) for _ in range(_sizes(levels))])
        else:
            setattr(message, field.name, _value(field, levels))
            if field.group is not None:
                taken.add(field.group)
    return message


def holds_map(message_class: type[Any], seen: frozenset[type[Any]] = frozenset()) -> bool:
    """Whether a message of the class may hold a map, however deep."""
    plan = plan_message(message_class)
    return any(field.presence is Presence.MAP for field in plan.fields) or any(
        holds_map(held, seen | {message_class}) for held in plan.message_classes() if held not in seen
    )


def _same_scalar(ours: Any, google: Any) -> bool:
    if isinstance(google, float):
        return isinstance(ours, float) and struct.pack("<d", ours) == struct.pack("<d", google)
    return type(google)(ours) == google and isinstance(ours, type(google))


def differences(ours: Any, google: Any, path: str = "") -> list[str]:
    """The paths of all fields in which two messages differ, presence included."""
    found: list[str] = []
    names = {descriptor.number: descriptor.name for descriptor in google.DESCRIPTOR.fields}
    for field in plan_message(type(ours)).fields:
        mine, theirs = getattr(ours, field.name), getattr(google, names[field.number])
        where = f"{path}.{field.name}"
        if field.presence is Presence.MAP:
            assert field.entry is not None
            if set(mine) != set(theirs):
                found.append(where)
                continue
            pairs = [(mine[key], theirs[key]) for key in mine]
            nested = field.entry[1].kind.name == "message"
        elif field.presence is Presence.REPEATED:
            if len(mine) != len(theirs):
                found.append(where)
                continue
            pairs, nested = list(zip(mine, theirs, strict=True)), field.kind.name == "message"
        else:
            if field.presence is Presence.EXPLICIT and (mine is not None) != google.HasField(names[field.number]):
                found.append(where)
                continue
            pairs, nested = [] if mine is None else [(mine, theirs)], field.kind.name == "message"
        for one, other in pairs:
            if nested:
                found += differences(one, other, where)
            elif not _same_scalar(one, other):
                found.append(where)
    return found


def _sized(number: int, data: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


def google_bytes(message: Any) -> bytes:
    """What google writes for a message, with the entries of every map in ascending order of their keys.

    Google promises no order for maps; "deterministic" means a different one in each of its implementations. So each
    entry, and each message that may hold a map, is written by google on its own, and the pieces are put together here.
    """
    parts = []
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            alone = type(message)()
            if hasattr(value, "append"):
                getattr(alone, descriptor.name).extend(value)
            else:
                setattr(alone, descriptor.name, value)
            parts.append(alone.SerializeToString())
        elif descriptor.message_type.GetOptions().map_entry:
            parts += [_entry_bytes(message, descriptor, key) for key in sorted(value)]
        elif hasattr(value, "add"):
            parts += [_sized(descriptor.number, google_bytes(item)) for item in value]
        else:
            parts.append(_sized(descriptor.number, google_bytes(value)))
    rest = type(message)()
    rest.CopyFrom(message)
    for descriptor, _ in message.ListFields():
        rest.ClearField(descriptor.name)
    return b"".join([*parts, rest.SerializeToString()])


def _entry_bytes(message: Any, descriptor: Any, key: Any) -> bytes:
    """One entry of a map."""
    alone = type(message)()
    value = getattr(message, descriptor.name)[key]
    if not hasattr(value, "ListFields"):
        getattr(alone, descriptor.name)[key] = value
        return bytes(alone.SerializeToString())
    return _sized(descriptor.number, _sized(1, key.encode()) + _sized(2, google_bytes(value)))
