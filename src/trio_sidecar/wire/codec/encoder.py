"""Source of the encoding functions.

``encode_X(message, depth)`` returns the bytes of one message. It takes a short cut for values of exactly the expected
type and leaves every other value to :mod:`~trio_sidecar.wire.codec.kinds`, which converts or refuses it. A refusal does
not know its field; ``encode_fault`` then goes through the fields one by one to name it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from trio_sidecar.wire.codec import faults, varint
from trio_sidecar.wire.codec.errors import EncodeError
from trio_sidecar.wire.codec.kinds import FIXED_32, FIXED_64, KINDS, as_list
from trio_sidecar.wire.codec.schema import FieldPlan, MessagePlan, Presence
from trio_sidecar.wire.codec.source import SourceBuilder

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["encoder_names", "encoder_source"]


def encoder_names() -> dict[str, Any]:
    """What every encoding function may refer to."""
    names: dict[str, Any] = {
        "VARINTS": varint.VARINTS,
        "as_list": as_list,
        "encode_varint": varint.encode_varint,
        "encode_fault": faults.encode_fault,
        "encode_error": EncodeError,
        "EncodeError": EncodeError,
        "StructError": struct.error,
    }
    for kind in KINDS.values():
        names[f"encode_{kind.name}"] = kind.encode
        if kind.pack:
            names[f"pack_{kind.name}"] = kind.pack
    names.update({f"fixed_{code}": struct.Struct("<" + code).pack for code in "fd"})
    return names


class _Encoder:
    """Writes one encoding function."""

    def __init__(self, plan: MessagePlan, name_of: Callable[[type[Any]], str]) -> None:
        self.plan = plan
        self.own = name_of(plan.message_class)
        self.name_of = name_of
        self.out = SourceBuilder()

    def function(self) -> str:
        """The function for a message."""
        out = self.out
        groups = sorted({field.group for field in self.plan.fields if field.rivals and field.group})
        with out.block(f"def encode_{self.own}(message, depth):"):
            with out.block("if depth < 0:"):
                out.line(f"raise encode_error({self.plan.name!r}, None, 'messages are nested too deeply')")
            with out.block("try:"):
                out.line("out = b''", *(f"members_of_{group} = 0" for group in groups))
                for field in self.plan.by_number:
                    out.line(f"value = message.{field.name}")
                    self._field(field)
                for group in groups:
                    with out.block(f"if members_of_{group} > 1:"):
                        reason = "more than one member of the oneof is set"
                        out.line(f"raise encode_error({self.plan.name!r}, {group!r}, {reason!r})")
                out.line("return out + message._unknown_fields if message._unknown_fields else out")
            with out.block("except EncodeError:"):
                out.line("raise")
            with out.block("except (AttributeError, TypeError, ValueError, OverflowError, StructError) as fault:"):
                out.line(f"raise encode_fault(plan_{self.own}, message, fault) from None")
        return out.text()

    def _field(self, field: FieldPlan) -> None:
        """Append the field in ``value`` to ``out``, unless it is absent."""
        if field.presence is Presence.MAP:
            self._map(field)
        elif field.presence is Presence.REPEATED:
            self._repeated(field)
        elif field.presence is Presence.EXPLICIT:
            with self.out.block("if value is not None:"):
                if field.rivals:
                    self.out.line(f"members_of_{field.group} += 1")
                self._value(field, "value", f"out += {field.tag_bytes!r} + ")
        else:
            self._implicit(field)

    def _implicit(self, field: FieldPlan) -> None:
        """A field whose default is left out; the default too must have the right type."""
        out, kind, append = self.out, field.kind, f"out += {field.tag_bytes!r} + "
        if kind.name == "bool":
            with out.block("if value is True:"):
                out.line(append + repr(b"\x01"))
            with out.block("elif value is not False:"):
                out.line("encode_bool(value)")
        elif kind.bits and kind.name != "enum" and not kind.zigzag:
            with out.block("if value.__class__ is int and 0 <= value < 16384:"), out.block("if value:"):
                out.line(append + "VARINTS[value]")
            with out.block("else:"):
                out.line(f"encoded = encode_{kind.name}(value)")
                with out.block("if encoded != b'\\x00':"):
                    out.line(append + "encoded")
        elif kind.name in {"string", "bytes"}:
            with out.block("if value:"):
                self._value(field, "value", append)
            with out.block(f"elif value.__class__ is not {'str' if kind.name == 'string' else 'bytes'}:"):
                out.line(f"encode_{kind.name}(value)")
        else:
            # Floats: only +0.0 is absent, and the type decides what becomes of a tiny number. The bytes tell.
            zero = bytes(kind.size) if kind.wire_type in {FIXED_32, FIXED_64} else b"\x00"
            self._value(field, "value", "encoded = ")
            with out.block(f"if encoded != {zero!r}:"):
                out.line(append + "encoded")

    def _value(self, field: FieldPlan, value: str, append: str) -> None:
        """Hand the bytes of one value, without tag, to what ``append`` starts."""
        out, kind = self.out, field.kind
        if kind.name == "message":
            assert field.target is not None  # noqa: S101 - tells the type checker what such a field always has
            name = self.name_of(field.target)
            with out.block(f"if {value}.__class__ is not C_{name}:"):
                out.line("raise TypeError")
            out.line(f"encoded = encode_{name}({value}, depth - 1)")
            self._sized(append)
        elif kind.name in {"string", "bytes"}:
            type_name, short_cut = ("str", f"{value}.encode()") if kind.name == "string" else ("bytes", value)
            out.line(f"encoded = {short_cut} if {value}.__class__ is {type_name} else encode_{kind.name}({value})")
            self._sized(append)
        elif kind.name in {"float", "double"}:
            out.line(
                f"{append}(fixed_{kind.code}({value}) if {value}.__class__ is float else encode_{kind.name}({value}))"
            )
        elif kind.bits and kind.name != "enum" and not kind.zigzag:
            small = f"{value}.__class__ is int and 0 <= {value} < 16384"
            out.line(f"{append}(VARINTS[{value}] if {small} else encode_{kind.name}({value}))")
        else:
            out.line(f"{append}encode_{kind.name}({value})")

    def _sized(self, append: str) -> None:
        """Hand over ``encoded`` with its length in front."""
        self.out.line(
            "size = len(encoded)",
            f"{append}(VARINTS[size] if size < 16384 else encode_varint(size)) + encoded",
        )

    def _list(self) -> None:
        with self.out.block("if value.__class__ is not list:"):
            self.out.line("value = as_list(value)")

    def _repeated(self, field: FieldPlan) -> None:
        out = self.out
        self._list()
        with out.block("if value:"):
            if field.packed:
                self._packed(field)
                return
            out.line("parts = []")
            with out.block("for item in value:"):
                self._value(field, "item", f"part = {field.tag_bytes!r} + ")
                out.line("parts.append(part)")
            out.line("out += b''.join(parts)")

    def _packed(self, field: FieldPlan) -> None:
        out, kind = self.out, field.kind
        if kind.pack:
            # One value is the usual case while tokens stream.
            with out.block("if len(value) == 1:"):
                out.line("item = value[0]")
                self._value(field, "item", "encoded = ")
            with out.block("else:"):
                out.line(f"encoded = pack_{kind.name}(value)")
        else:
            out.line(f"encoded = b''.join([encode_{kind.name}(item) for item in value])")
        self._sized(f"out += {field.tag_bytes!r} + ")

    def _map(self, field: FieldPlan) -> None:
        """Entries in the order of their keys, so that equal maps have equal bytes; key and value are always there."""
        assert field.entry is not None  # noqa: S101 - as above
        key, value = field.entry
        out = self.out
        with out.block("if value.__class__ is not dict:"):
            out.line("raise TypeError")
        with out.block("if value:"):
            out.line("parts = []")
            with out.block("for key in sorted(value):"):
                out.line("item = value[key]")
                self._value(key, "key", f"entry = {key.tag_bytes!r} + ")
                self._value(value, "item", f"entry += {value.tag_bytes!r} + ")
                out.line("encoded = entry")
                self._sized(f"part = {field.tag_bytes!r} + ")
                out.line("parts.append(part)")
            out.line("out += b''.join(parts)")


def encoder_source(plan: MessagePlan, name_of: Callable[[type[Any]], str]) -> str:
    """Source of the function for one class."""
    return _Encoder(plan, name_of).function()
