"""What a message class looks like, read from the metadata of its dataclass fields."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

import attrs
import betterproto2

from trio_sidecar.wire.codec.kinds import KINDS, LENGTH, Kind
from trio_sidecar.wire.codec.varint import encode_varint

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FieldPlan", "MessagePlan", "Presence", "plan_message"]


class Presence(enum.Enum):
    """How a field says that it is absent."""

    IMPLICIT = "holds the default value"
    EXPLICIT = "is None"
    REPEATED = "is an empty list"
    MAP = "is an empty dict"


@attrs.frozen(slots=True, kw_only=True)
class FieldPlan:
    """One field.

    Attributes:
        name: The attribute of the message.
        number: The field number.
        kind: The type of one value.
        presence: How absence shows.
        target: The message or enum class, where the kind is one of these.
        group: The oneof that the field belongs to.
        rivals: The other members of that oneof.
        entry: Key and value of a map.
    """

    name: str
    number: int
    kind: Kind
    presence: Presence
    target: type[Any] | None = None
    group: str | None = None
    rivals: tuple[str, ...] = ()
    entry: tuple[FieldPlan, FieldPlan] | None = None

    @property
    def packed(self) -> bool:
        """Whether the field is written as one packed run."""
        return self.presence is Presence.REPEATED and self.kind.packable

    def tag(self, wire_type: int | None = None) -> int:
        """The number that precedes a value on the wire."""
        return self.number << 3 | (self.kind.wire_type if wire_type is None else wire_type)

    @property
    def tag_bytes(self) -> bytes:
        """The tag with which the field is written."""
        return encode_varint(self.tag(LENGTH if self.packed else None))


@attrs.frozen(slots=True, kw_only=True)
class MessagePlan:
    """One message class with its fields, in the order of the dataclass."""

    message_class: type[betterproto2.Message]
    fields: tuple[FieldPlan, ...]

    @property
    def name(self) -> str:
        """The name that errors show."""
        return self.message_class.__name__

    @property
    def by_number(self) -> list[FieldPlan]:
        """The fields in the order in which they are written."""
        return sorted(self.fields, key=lambda field: field.number)

    def message_classes(self) -> Iterator[type[betterproto2.Message]]:
        """The message classes that the fields hold."""
        for field in self.fields:
            for held in field.entry or (field,):
                if held.kind.name == "message" and held.target is not None:
                    yield held.target


def plan_message(message_class: Any) -> MessagePlan:
    """Read the plan of a class.

    Raises:
        TypeError: Not a generated message class, or one with wrapped well-known types, which the contract does not use.
    """
    if not (isinstance(message_class, type) and issubclass(message_class, betterproto2.Message)):
        message = f"a generated message class is needed, not {message_class!r}"
        raise TypeError(message)
    any_class: Any = message_class  # the type of betterproto2's class property confuses type checkers
    metadata: betterproto2.ProtoClassMetadata = any_class._betterproto  # noqa: SLF001
    members: dict[str, list[str]] = {}
    for name, field in metadata.meta_by_field_name.items():
        if field.group:
            members.setdefault(field.group, []).append(name)
    return MessagePlan(
        message_class=message_class,
        fields=tuple(_plan_field(item.name, metadata, members) for item in dataclasses.fields(any_class)),
    )


def _plan_field(name: str, metadata: betterproto2.ProtoClassMetadata, members: dict[str, list[str]]) -> FieldPlan:
    field = metadata.meta_by_field_name[name]
    if field.unwrap is not None:
        message = f"field {name!r} holds a wrapped well-known type, which this codec does not know"
        raise TypeError(message)
    if field.map_meta is not None:
        key, value = field.map_meta
        entry = (
            FieldPlan(name="key", number=1, kind=KINDS[key.proto_type], presence=Presence.IMPLICIT),
            FieldPlan(
                name="value",
                number=2,
                kind=KINDS[value.proto_type],
                presence=Presence.EXPLICIT if value.proto_type == "message" else Presence.IMPLICIT,
                target=metadata.cls_by_field[f"{name}.value"] if value.proto_type in {"message", "enum"} else None,
            ),
        )
        return FieldPlan(name=name, number=field.number, kind=KINDS["message"], presence=Presence.MAP, entry=entry)
    kind = KINDS[field.proto_type]
    return FieldPlan(
        name=name,
        number=field.number,
        kind=kind,
        presence=_presence(field),
        target=metadata.cls_by_field[name] if kind.name in {"message", "enum"} else None,
        group=field.group,
        rivals=tuple(rival for rival in members.get(field.group or "", ()) if rival != name),
    )


def _presence(field: betterproto2.FieldMetadata) -> Presence:
    if field.repeated:
        return Presence.REPEATED
    if field.optional or field.group or field.proto_type == betterproto2.TYPE_MESSAGE:
        return Presence.EXPLICIT
    return Presence.IMPLICIT
