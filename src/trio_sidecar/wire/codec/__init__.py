"""The codec of the wire messages: ``encode(message)`` and ``decode(message_class, data)``.

The messages are betterproto2 dataclasses. Their own codec interprets each class's metadata for each message, which
costs ten times what a token may cost, accepts truncated data, writes both members of a oneof and checks no range. So
this package reads the metadata once per class and writes Python source that does the rest: one function per class and
direction, with tags, defaults and sub-functions filled in. The result is about as fast as upb, the C library behind
google protobuf, once the time to read the fields out is counted, and it keeps plain dataclasses.

How it is put together, from the bottom up:

- ``varint``   integers on the wire; long lists of ids with wide arithmetic instead of a loop
- ``kinds``    the scalar types: wire type, default, range, and the careful way to encode one value
- ``schema``   plans of messages and fields, read from the metadata
- ``source``   a builder of Python source
- ``faults``   what generated code calls when something is not as usual: unknown fields, errors that need a name
- ``decoder``, ``encoder``   the source of the functions; print ``generated_source(SomeMessage)`` to see it
- this module  compiles, and keeps the functions

What is written is what google protobuf writes: fields by number, packed where proto3 packs, unknown fields last; map
entries in ascending order of their keys, where google promises no order. Fields with implicit presence are left out
if they hold the default, and -0.0 does not. What is read is what upb reads: packed or not, the last value wins, a
sub-message that occurs twice is merged, a oneof keeps its last member. A field that the contract does not know, and a
known number with another wire type than its own, is kept and written again. Everything else is refused, with an error
that names message and field; on the way out also every value that the field's type cannot carry.

Functions are compiled when a class is first used (some 20 ms for a whole request), together with those of all classes
it can hold; :func:`prepare` does it ahead of time. They are published only when all of them are complete, so any
thread may call at any time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

import betterproto2

from trio_sidecar.wire.codec.decoder import decoder_names, decoder_source
from trio_sidecar.wire.codec.encoder import encoder_names, encoder_source
from trio_sidecar.wire.codec.errors import CodecError, DecodeError, EncodeError
from trio_sidecar.wire.codec.schema import MessagePlan, plan_message
from trio_sidecar.wire.codec.source import execute

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CodecError", "DecodeError", "EncodeError", "decode", "encode", "generated_source", "prepare"]

MessageT = TypeVar("MessageT", bound=betterproto2.Message)

MAX_DEPTH = 100
"""How many messages may be nested in one another, as in google protobuf."""


class _Functions:
    """The compiled functions by class; filled as classes are first used, and never changed after."""

    def __init__(self) -> None:
        self.encoders: dict[type[Any], Callable[[Any, int], bytes]] = {}
        self.decoders: dict[type[Any], Callable[[bytes, int, int, int, Any], Any]] = {}
        self._names: dict[type[Any], str] = {}
        self._namespace: dict[str, Any] = {**decoder_names(), **encoder_names()}
        self._lock = threading.Lock()

    def compile(self, message_class: type[Any]) -> None:
        """Compile a class and all that it can hold."""
        with self._lock:
            plans = self._missing_plans(message_class)
            for plan in plans:
                self._provide(plan)
            for plan in plans:
                execute(self.source(plan), f"<wire codec of {plan.name}>", self._namespace)
            for plan in plans:
                name = self._names[plan.message_class]
                self.encoders[plan.message_class] = self._namespace[f"encode_{name}"]
                self.decoders[plan.message_class] = self._namespace[f"decode_{name}"]

    def source(self, plan: MessagePlan) -> str:
        """The source of a class's functions."""
        return encoder_source(plan, self._name_of) + "\n\n" + decoder_source(plan, self._name_of)

    def _missing_plans(self, message_class: type[Any]) -> list[MessagePlan]:
        plans: dict[type[Any], MessagePlan] = {}
        waiting = [message_class]
        while waiting:
            at = waiting.pop()
            if at not in plans and at not in self.encoders:
                plans[at] = plan_message(at)
                waiting.extend(plans[at].message_classes())
        return list(plans.values())

    def _provide(self, plan: MessagePlan) -> None:
        """Put what a class's functions refer to into their namespace."""
        name = self._name_of(plan.message_class)
        self._namespace[f"C_{name}"] = plan.message_class
        self._namespace[f"plan_{name}"] = plan
        self._namespace[f"fields_{name}"] = {field.number: field.name for field in plan.fields}
        for field in plan.fields:
            for held in field.entry or (field,):
                if held.kind.name == "enum" and held.target is not None:
                    enum_name = self._name_of(held.target)
                    self._namespace[f"E_{enum_name}"] = held.target
                    self._namespace[f"members_{enum_name}"] = {member.value: member for member in held.target}
                    self._namespace[f"zero_{enum_name}"] = held.target(0)

    def _name_of(self, some_class: type[Any]) -> str:
        """The part of a name that stands for a class: its own name, with a number if another class has it too."""
        if some_class not in self._names:
            taken = set(self._names.values())
            name, count = some_class.__name__, 1
            while name in taken:
                count += 1
                name = f"{some_class.__name__}_{count}"
            self._names[some_class] = name
        return self._names[some_class]


_functions = _Functions()


def encode(message: betterproto2.Message) -> bytes:
    """The bytes of a message.

    Raises:
        EncodeError: A field holds a value that its type cannot carry, or messages are nested too deeply.
        TypeError: Not a message.
    """
    message_class = type(message)
    function = _functions.encoders.get(message_class)
    if function is None:
        _functions.compile(message_class)
        function = _functions.encoders[message_class]
    return function(message, MAX_DEPTH)


def decode(message_class: type[MessageT], data: bytes) -> MessageT:
    """The message that some bytes encode; empty bytes encode an empty message.

    Raises:
        DecodeError: The bytes are not an encoding of the message.
        TypeError: Not a message class.
    """
    function = _functions.decoders.get(message_class)
    if function is None:
        _functions.compile(message_class)
        function = _functions.decoders[message_class]
    if data.__class__ is not bytes:
        data = bytes(data)
    result: MessageT = function(data, 0, len(data), MAX_DEPTH, None)
    return result


def prepare(*message_classes: type[betterproto2.Message]) -> None:
    """Compile ahead of time, so that the first request does not wait for it."""
    for message_class in message_classes:
        if message_class not in _functions.encoders:
            _functions.compile(message_class)


def generated_source(message_class: type[betterproto2.Message]) -> str:
    """The Python source of a class's functions, for reading."""
    prepare(message_class)
    return _functions.source(plan_message(message_class))
