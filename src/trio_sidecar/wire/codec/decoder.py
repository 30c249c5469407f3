"""Source of the decoding functions.

``decode_X(data, at, end, depth, into)`` reads one message from ``data[at:end]``. Each field lives in a local variable
while the loop over tags runs, and the object is made at the end, in one step. ``into`` is an earlier message whose
fields the new bytes continue: protobuf merges a sub-message that occurs twice. A map has ``decode_X_f_entry(data, at,
end, depth)``, which returns key and value.

A field may say that it is longer than what is left. Nothing checks each step for that: a read beyond the data raises
IndexError or struct.error, and a read beyond the message, but within the data around it, leaves ``at > end``.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from trio_sidecar.wire.codec import faults, varint
from trio_sidecar.wire.codec.kinds import FIXED_32, FIXED_64, LENGTH, VARINT, Kind
from trio_sidecar.wire.codec.schema import FieldPlan, MessagePlan, Presence
from trio_sidecar.wire.codec.source import SourceBuilder

if TYPE_CHECKING:
    from collections.abc import Callable

    import betterproto2

__all__ = ["decoder_names", "decoder_source", "entry_decoder_source"]

_FIXED_CODES = "fdIiQq"


def decoder_names() -> dict[str, Any]:
    """What every decoding function may refer to."""
    names: dict[str, Any] = {
        "new": object.__new__,
        "read_size": varint.read_size,
        "read_tag": varint.read_tag,
        "read_varint": varint.read_varint,
        "unpack_uint32": varint.unpack_uint32,
        "decode_error": faults.decode_error,
        "decode_fault": faults.decode_fault,
        "keep_unknown": faults.keep_unknown,
        "skip_field": faults.skip_field,
        "unpack_from": struct.unpack_from,
        "StructError": struct.error,
    }
    names.update({f"unpack_{code}": struct.Struct("<" + code).unpack_from for code in _FIXED_CODES})
    return names


class _Decoder:
    """Writes one decoding function; ``name_of`` gives the part of a name that stands for a class."""

    def __init__(self, plan: MessagePlan, name_of: Callable[[type[Any]], str]) -> None:
        self.plan = plan
        self.own = name_of(plan.message_class)
        self.name_of = name_of
        self.out = SourceBuilder()

    def message_function(self) -> str:
        """The function for a message."""
        out, fields = self.out, self.plan.fields
        with out.block(f"def decode_{self.own}(data, at, end, depth, into):"):
            self._check_depth()
            with out.block("if into is None:"):
                for field in fields:
                    out.line(f"f_{field.name} = {self._absent(field)}")
                out.line("unknown = b''")
            with out.block("else:"):
                for field in fields:
                    out.line(f"f_{field.name} = into.{field.name}")
                out.line("unknown = into._unknown_fields")
            self._loop(fields, f"fields_{self.own}", ("unknown = keep_unknown(unknown, data, start, at)",))
            out.line(f"message = new(C_{self.own})")
            items = "".join(f"{field.name!r}: f_{field.name}, " for field in fields)
            out.line(f"message.__dict__ = {{{items}'_unknown_fields': unknown}}")
            out.line("return message")
        return out.text()

    def entry_function(self, map_field: FieldPlan) -> str:
        """The function for one entry of a map; unknown fields of an entry have no place to be kept in."""
        out = self.out
        assert map_field.entry is not None  # noqa: S101 - tells the type checker what a map field always has
        key, value = map_field.entry
        with out.block(f"def decode_{self.own}_{map_field.name}_entry(data, at, end, depth):"):
            self._check_depth()
            out.line(f"f_key = {self._absent(key)}", f"f_value = {self._absent(value)}")
            names = {part.number: f"{map_field.name} {part.name}" for part in (key, value)}
            self._loop((key, value), repr(names), ())
            if value.target is not None and value.kind.name == "message":
                with out.block("if f_value is None:"):
                    out.line(f"f_value = decode_{self.name_of(value.target)}(b'', 0, 0, depth, None)")
            out.line("return f_key, f_value")
        return out.text()

    def _check_depth(self) -> None:
        with self.out.block("if depth < 0:"):
            self.out.line(f"raise decode_error({self.plan.name!r}, 'messages are nested too deeply')")

    def _absent(self, field: FieldPlan) -> str:
        if field.presence is Presence.IMPLICIT and field.kind.name == "enum" and field.target is not None:
            return f"zero_{self.name_of(field.target)}"
        return {
            Presence.IMPLICIT: field.kind.default,
            Presence.EXPLICIT: "None",
            Presence.REPEATED: "[]",
            Presence.MAP: "{}",
        }[field.presence]

    def _loop(self, fields: tuple[FieldPlan, ...], names: str, keep_unknown: tuple[str, ...]) -> None:
        """The loop over tags, and what turns its failures into errors; ``names`` gives a field's name by its number."""
        out = self.out
        out.line("tag = 0")
        with out.block("try:"):
            with out.block("while at < end:"):
                out.line("start = at", "tag = data[at]", "at += 1")
                with out.block("if tag > 127:"):
                    out.line("tag, at = read_tag(data, start)")
                branch = "if"
                for field in fields:
                    for tag, body in self._branches(field):
                        with out.block(f"{branch} tag == {tag}:"):
                            body(field)
                        branch = "elif"
                with out.block("else:" if fields else "if True:"):
                    out.line("at = skip_field(data, at, tag, end, depth)", *keep_unknown)
            with out.block("if at > end:"):
                out.line("raise IndexError")
        with out.block("except (IndexError, ValueError, StructError) as fault:"):
            out.line(f"raise decode_fault({self.plan.name!r}, {names}, tag, fault) from None")

    def _branches(self, field: FieldPlan) -> list[tuple[int, Callable[[FieldPlan], None]]]:
        """The tags under which a field may come, packed or not, and who writes the code for each."""
        if field.presence is Presence.MAP:
            return [(field.tag(), self._map_entry)]
        if field.kind.name == "message":
            return [(field.tag(), self._message)]
        single: dict[int, Callable[[FieldPlan], None]]
        single = {VARINT: self._varint, FIXED_32: self._fixed, FIXED_64: self._fixed, LENGTH: self._text}
        branches: list[tuple[int, Callable[[FieldPlan], None]]] = [(field.tag(), single[field.kind.wire_type])]
        if field.packed:
            branches.insert(0, (field.tag(LENGTH), self._packed))
        return branches

    def _store(self, field: FieldPlan, value: str) -> None:
        """Put a value in its place; the last member of a oneof wins."""
        if field.presence is Presence.REPEATED:
            self.out.line(f"f_{field.name}.append({value})")
            return
        self.out.line(f"f_{field.name} = {value}")
        self._clear_rivals(field)

    def _clear_rivals(self, field: FieldPlan) -> None:
        if field.rivals:
            self.out.line(" = ".join(f"f_{rival}" for rival in field.rivals) + " = None")

    def _varint(self, field: FieldPlan) -> None:
        out = self.out
        out.line("value = data[at]", "at += 1")
        with out.block("if value > 127:"):
            out.line("value, at = read_varint(data, at - 1)")
            cut = _cut_varint(field.kind)
            if cut:
                out.line(f"value = {cut}")
        self._store(field, self._varint_value(field))

    def _varint_value(self, field: FieldPlan) -> str:
        """The value of the field, given a varint that has been cut to the type's width."""
        if field.kind.name == "bool":
            return "value != 0"
        if field.kind.zigzag:
            return "value >> 1 ^ -(value & 1)"
        if field.kind.name == "enum" and field.target is not None:
            enum_name = self.name_of(field.target)
            # A value that this version of the contract does not know is kept, as an unnamed member.
            return f"members_{enum_name}[value] if value in members_{enum_name} else E_{enum_name}(value)"
        return "value"

    def _fixed(self, field: FieldPlan) -> None:
        self._store(field, f"unpack_{field.kind.code}(data, at)[0]")
        self.out.line(f"at += {field.kind.size}")

    def _length(self) -> None:
        """Read a length, and leave the position where the value ends in ``stop``."""
        out = self.out
        out.line("size = data[at]", "at += 1")
        with out.block("if size > 127:"):
            out.line("size, at = read_size(data, at - 1)")
        out.line("stop = at + size")
        with out.block("if stop > end:"):
            out.line("raise IndexError")

    def _text(self, field: FieldPlan) -> None:
        self._length()
        self._store(field, "str(data[at:stop], 'utf-8')" if field.kind.name == "string" else "data[at:stop]")
        self.out.line("at = stop")

    def _packed(self, field: FieldPlan) -> None:
        out = self.out
        self._length()
        if field.kind.code:
            with out.block(f"if size % {field.kind.size}:"):
                out.line("raise IndexError")
            count = f"(size // {field.kind.size})"
            out.line(f"f_{field.name} += unpack_from('<%d{field.kind.code}' % {count}, data, at)")
        elif field.kind.name == "uint32":
            # One value is the usual case while tokens stream, and most ids of a vocabulary take three bytes.
            with out.block("if size == 3 and data[at] > 127 < data[at + 1] and data[at + 2] < 128:"):
                value = "data[at] + (data[at + 1] << 7) + (data[at + 2] << 14) - 0x4080"
                out.line(f"f_{field.name}.append({value})")
            with out.block("elif size == 1 and data[at] < 128:"):
                out.line(f"f_{field.name}.append(data[at])")
            with out.block("else:"):
                out.line(f"f_{field.name} += unpack_uint32(data[at:stop])")
        else:
            with out.block("while at < stop:"):
                self._varint(field)
            with out.block("if at > stop:"):
                out.line("raise IndexError")
        out.line("at = stop")

    def _message(self, field: FieldPlan) -> None:
        assert field.target is not None  # noqa: S101 - as above
        decode = f"decode_{self.name_of(field.target)}(data, at, stop, depth - 1, "
        self._length()
        if field.presence is Presence.REPEATED:
            self.out.line(f"f_{field.name}.append({decode}None))")
        else:
            self.out.line(f"f_{field.name} = {decode}f_{field.name})")
            self._clear_rivals(field)
        self.out.line("at = stop")

    def _map_entry(self, field: FieldPlan) -> None:
        self._length()
        self.out.line(
            f"key, value = decode_{self.own}_{field.name}_entry(data, at, stop, depth - 1)",
            f"f_{field.name}[key] = value",
            "at = stop",
        )


def _cut_varint(kind: Kind) -> str:
    """Source that cuts a varint of 64 bits to the type's width and gives it its sign; empty where nothing is to do."""
    if kind.signed:
        sign = 1 << kind.bits - 1
        return f"(value & {2 * sign - 1:#x} ^ {sign:#x}) - {sign:#x}"
    return "value & 0xFFFFFFFF" if kind.bits == 32 else ""


def decoder_source(plan: MessagePlan, name_of: Callable[[type[betterproto2.Message]], str]) -> str:
    """Source of the functions for one class: its maps' entries first, then the message."""
    entries = [entry_decoder_source(plan, field, name_of) for field in plan.fields if field.entry]
    return "\n\n".join([*entries, _Decoder(plan, name_of).message_function()])


def entry_decoder_source(plan: MessagePlan, field: FieldPlan, name_of: Callable[[type[Any]], str]) -> str:
    """Source of the function for one map's entries."""
    return _Decoder(plan, name_of).entry_function(field)
