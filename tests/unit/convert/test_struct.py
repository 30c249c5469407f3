from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trio_sidecar.convert.struct import MAX_NESTING, json_from_struct, struct_from_json
from trio_sidecar.errors import ErrorKind, InvalidRequest, ProtocolError
from trio_sidecar.wire import ListValue, NullValue, Struct, Value

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 2**53

_text = st.text(st.characters(codec="utf-8"), max_size=6)
_scalars = (
    st.none() | st.booleans() | st.integers(-LIMIT, LIMIT) | st.floats(allow_nan=False, allow_infinity=False) | _text
)
_json = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=4),
    max_leaves=20,
)
_objects = st.dictionaries(_text, _json, max_size=5)


def nested_lists(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def round_trip(value: dict[str, Any]) -> dict[str, Any]:
    return json_from_struct(struct_from_json(value, label="kv_transfer_params"), label="kv_transfer_params")


def same_json(left: object, right: object) -> bool:
    """Equal with True and 1 told apart, 42.0 and 42 not."""
    match left, right:
        case bool(), _:
            return left is right
        case _, bool():
            return False
        case dict(), dict():
            return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
        case list(), list():
            return len(left) == len(right) and all(map(same_json, left, right))
    return left == right


@pytest.mark.rule("R9.2")
def test_round_trip_is_exact() -> None:
    """Every kind of JSON value comes back as it went in, integers as integers."""
    value = {"string": "value", "bool": True, "number": 42, "null": None, "list": [1, "two", False, {"nested": 3.5}]}
    back = round_trip(value)
    assert value == back
    assert repr(value) == repr(back)


@pytest.mark.rule("R9.11")
def test_mixed_example_decodes() -> None:
    """The example that two protobuf libraries agreed on decodes here too."""
    value = {"dp_rank": 0, "ttft_ms": 12.5, "tags": ["a", None]}
    assert repr(value) == repr(round_trip(value))


# A loaded machine is no reason to fail.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_objects)
def test_any_object_survives_the_round_trip(value: dict[str, Any]) -> None:
    """Whatever JSON object the codec accepts comes back equal."""
    assert same_json(value, round_trip(value))


@pytest.mark.rule("R9.1", "R7.32")
@pytest.mark.parametrize("value", [[1, 2], None, "text", 1, True])
def test_top_level_must_be_an_object(value: object) -> None:
    """Anything but an object is refused with the payload's name."""
    with pytest.raises(InvalidRequest, match=r"kv_transfer_params must be a JSON object, got") as caught:
        struct_from_json(value, label="kv_transfer_params")
    assert ErrorKind.INVALID_ARGUMENT is caught.value.kind


@pytest.mark.rule("R9.3")
@pytest.mark.parametrize("number", [-LIMIT, -1, 0, 1, LIMIT])
def test_integers_up_to_two_to_the_53_are_exact(number: int) -> None:
    """Both ends of the exact range are accepted, at any depth, and stay integers."""
    value = {"nested": [number, {"fraction": -3.25}]}
    assert repr(value) == repr(round_trip(value))


@pytest.mark.rule("R9.4", "R9.5", "R9.10")
@pytest.mark.parametrize(
    "number", [-(2**63), -LIMIT - 1, LIMIT + 1, LIMIT + 2, 2**63 - 1, 2**64 - 1], ids=lambda number: f"{number}"
)
@pytest.mark.parametrize("label", ["kv_transfer_params", "ec_transfer_params"])
def test_larger_integers_are_refused(number: int, label: str) -> None:
    """An integer beyond the exact range is refused even where its double is exact; payload and number are named."""
    with pytest.raises(InvalidRequest) as caught:
        struct_from_json({"a": [{"b": number}]}, label=label)
    allowed = "allowed are integers from -9007199254740992 to 9007199254740992"
    assert f"{label} holds {number}, which cannot be represented exactly; {allowed}" == caught.value.reason


def test_an_enormous_integer_is_refused_without_printing_it() -> None:
    """An integer too long for Python to print still gives the error for integers."""
    with pytest.raises(InvalidRequest, match="cannot be represented exactly"):
        struct_from_json({"a": 10**5000}, label="kv_transfer_params")


@pytest.mark.rule("R9.6")
@pytest.mark.parametrize("number", [1e300, -1e300, 1e16, 5e-324])
def test_floats_pass_unchecked(number: float) -> None:
    """The range check is for integers; a float of any size passes."""
    assert {"a": number} == round_trip({"a": number})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_non_finite_floats_are_refused_on_the_way_out(number: float) -> None:
    """NaN and the infinities are not JSON."""
    with pytest.raises(InvalidRequest, match=r"kv_transfer_params holds .*finite"):
        struct_from_json({"a": [number]}, label="kv_transfer_params")


@pytest.mark.rule("R9.7")
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("depth", [0, 1])
def test_non_finite_numbers_are_refused_on_the_way_in(number: float, depth: int) -> None:
    """A peer that sends NaN or an infinity, at any depth, broke the protocol."""
    value = Value(number_value=number)
    if depth:
        value = Value(list_value=ListValue(values=[Value(struct_value=Struct(fields={"x": value}))]))
    with pytest.raises(ProtocolError, match="ec_transfer_params holds NaN or infinity"):
        json_from_struct(Struct(fields={"a": value}), label="ec_transfer_params")


@pytest.mark.rule("R9.8", "FR-074", "E7")
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (5600.0, "5600"),
        (float(LIMIT), str(LIMIT)),
        (float(-LIMIT), str(-LIMIT)),
        (float(LIMIT + 2), "9007199254740994.0"),
        (0.5, "0.5"),
        (1e300, "1e+300"),
    ],
)
def test_whole_doubles_become_integers(number: float, expected: str) -> None:
    """A whole double in the exact range is an integer, so that a port is 5600 and never 5600.0."""
    back = json_from_struct(Struct(fields={"a": Value(number_value=number)}), label="kv_transfer_params")
    assert expected == repr(back["a"])


@pytest.mark.rule("R9.2")
def test_null_is_said_in_so_many_words() -> None:
    """A null is sent as one: a value that says nothing is for receivers to guess."""
    assert Struct(fields={"a": Value(null_value=NullValue.NULL_VALUE)}) == struct_from_json({"a": None}, label="x")


@pytest.mark.rule("R9.9")
def test_a_value_without_kind_is_null() -> None:
    """A value that says nothing is null."""
    assert {"a": None} == json_from_struct(Struct(fields={"a": Value()}), label="kv_transfer_params")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({1: 2}, "kv_transfer_params must have string keys only, got 1$"),
        ({"a": {1, 2}}, "kv_transfer_params holds a set; allowed are JSON values"),
        ({"a": b"x"}, "kv_transfer_params holds a bytes; allowed are JSON values"),
        ({"a": "\ud800"}, "a text in kv_transfer_params must be valid Unicode, got a lone surrogate"),
        ({"\ud800": 1}, "a key of kv_transfer_params must be valid Unicode, got a lone surrogate"),
    ],
)
def test_what_json_cannot_carry_is_refused(value: object, named: str) -> None:
    """Keys, types and texts that would break the encoding are refused by name."""
    with pytest.raises(InvalidRequest, match=named):
        struct_from_json(value, label="kv_transfer_params")


def nested_objects(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize("nested", [nested_lists, nested_objects])
def test_nesting_is_limited_on_the_way_out(nested: Callable[[int], Any]) -> None:
    """The deepest allowed nesting passes, one level more is refused, whether lists or objects are in one another."""
    struct_from_json({"a": nested(MAX_NESTING - 1)}, label="kv_transfer_params")
    said = f"kv_transfer_params is nested too deeply; allowed are {MAX_NESTING} levels"
    with pytest.raises(InvalidRequest, match=said):
        struct_from_json({"a": nested(MAX_NESTING)}, label="kv_transfer_params")


def received(wrap: str, levels: int) -> Struct:
    """A Struct of that many levels, itself included; all below it are lists, or all objects."""
    value = Value(number_value=1.0)
    for _ in range(levels - 1):
        if wrap == "list":
            value = Value(list_value=ListValue(values=[value]))
        else:
            value = Value(struct_value=Struct(fields={"a": value}))
    return Struct(fields={"a": value})


@pytest.mark.parametrize("wrap", ["list", "struct"])
def test_nesting_is_limited_on_the_way_in(wrap: str) -> None:
    """A hundred levels are read; more are a protocol error, not a stack overflow."""
    json_from_struct(received(wrap, 100), label="kv_transfer_params")
    for levels in (101, 5000):
        with pytest.raises(ProtocolError, match="kv_transfer_params is nested more than 100 levels deep"):
            json_from_struct(received(wrap, levels), label="kv_transfer_params")
