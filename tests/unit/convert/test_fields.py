from __future__ import annotations

import math
import time
from typing import Any

import pytest

from trio_sidecar.convert.fields import MAX_UINT32, Section, check_text, describe
from trio_sidecar.errors import InvalidRequest

_FLOAT32_MAX = 3.4028234663852886e38


def section(value: object) -> Section:
    return Section({"field": value}, "part")


@pytest.mark.parametrize("reader", ["flag", "uint32", "int32", "int64", "float32", "text", "texts", "uint32s"])
def test_absent_and_none_are_the_same(reader: str) -> None:
    """A missing key and a None both read as absent."""
    assert getattr(section(None), reader)("field") is None
    assert getattr(section(None), reader)("missing") is None


@pytest.mark.rule("FR-083")
@pytest.mark.parametrize(
    ("reader", "value"),
    [
        ("flag", False),
        ("uint32", 0),
        ("int32", 0),
        ("int64", 0),
        ("float32", 0.0),
        ("text", ""),
        ("texts", []),
        ("uint32s", []),
    ],
)
def test_explicit_empty_values_are_present(reader: str, value: Any) -> None:
    """Zero, false and empty are values, never absence."""
    read = getattr(section(value), reader)("field")
    assert read is not None
    assert value == read


@pytest.mark.rule("E8")
@pytest.mark.parametrize(
    ("reader", "low", "high"),
    [("uint32", 0, 2**32 - 1), ("int32", -(2**31), 2**31 - 1), ("int64", -(2**63), 2**63 - 1)],
)
def test_integer_ranges(reader: str, low: int, high: int) -> None:
    """Both bounds pass; one beyond either is refused with field, range and value."""
    for fits in (low, high):
        assert fits == getattr(section(fits), reader)("field")
    for beyond in (low - 1, high + 1):
        with pytest.raises(InvalidRequest) as caught:
            getattr(section(beyond), reader)("field")
        assert f"InvalidRequest: part.field must be an integer from {low} to {high}, got {beyond}" == str(caught.value)


@pytest.mark.parametrize("value", [True, 1.0, "1", [1], {}])
@pytest.mark.parametrize("reader", ["uint32", "int32", "int64"])
def test_integers_take_no_look_alikes(reader: str, value: object) -> None:
    """True, 1.0 and "1" are not 1."""
    with pytest.raises(InvalidRequest, match=r"part\.field must be an integer"):
        getattr(section(value), reader)("field")


@pytest.mark.rule("E9")
@pytest.mark.parametrize("value", [1, -3, 0.5, _FLOAT32_MAX, -_FLOAT32_MAX, 1e-45, 0, -0.0])
def test_numbers_that_float32_holds(value: float) -> None:
    """Every finite number of the range passes, integers included."""
    assert value == section(value).float32("field")


@pytest.mark.rule("E9")
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 3.5e38, -1e300, 10**400, 1e-50, 2.0**-150],
    ids=lambda value: f"{value:.3g}" if isinstance(value, float) else "huge",
)
def test_numbers_that_float32_does_not_hold(value: float) -> None:
    """NaN, infinities, what overflows and what would become zero are refused."""
    with pytest.raises(InvalidRequest, match=r"part\.field must be a finite number within the range of float32, got"):
        section(value).float32("field")


@pytest.mark.parametrize("value", [True, "0.5", []])
def test_numbers_take_no_look_alikes(value: object) -> None:
    """A boolean or a text is not a number."""
    with pytest.raises(InvalidRequest, match=r"part\.field must be a number, got"):
        section(value).float32("field")


@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_flags_take_no_look_alikes(value: object) -> None:
    """Zero, one and "true" are not booleans."""
    with pytest.raises(InvalidRequest, match=r"part\.field must be a boolean"):
        section(value).flag("field")


@pytest.mark.rule("E9")
def test_lone_surrogates_are_refused() -> None:
    """A text that UTF-8 cannot carry is refused with the position; other text of any script passes."""
    assert "grün 😀" == check_text("grün 😀", "stop")
    with pytest.raises(InvalidRequest, match=r"stop must be valid Unicode, got a lone surrogate at position 2"):
        check_text("ab\ud800", "stop")
    with pytest.raises(InvalidRequest, match=r"part\.field\[1\] must be valid Unicode"):
        section(["ok", "\udfff"]).texts("field")
    with pytest.raises(InvalidRequest, match=r"part\.field must be valid Unicode"):
        section("\ud800").text("field")


@pytest.mark.parametrize(
    ("reader", "value", "named"),
    [
        ("text", 1, "part.field must be a string, got 1"),
        ("texts", "ok", "part.field must be an array, got the text 'ok'"),
        ("texts", ["a", None], "part.field[1] must be a string, got null"),
        ("uint32s", {"a": 1}, "part.field must be an array, got an object"),
        ("uint32s", [1, -1], f"part.field[1] must be an integer from 0 to {MAX_UINT32}, got -1"),
        ("uint32s", [1, 2**32], f"part.field[1] must be an integer from 0 to {MAX_UINT32}, got {2**32}"),
        ("uint32s", [1, True], f"part.field[1] must be an integer from 0 to {MAX_UINT32}, got true"),
        ("uint32s", [0, MAX_UINT32, -1], f"part.field[2] must be an integer from 0 to {MAX_UINT32}, got -1"),
        ("uint32s", [1.0], f"part.field[0] must be an integer from 0 to {MAX_UINT32}, got 1.0"),
        ("section", [], "part.field must be a JSON object, got an array"),
    ],
)
def test_wrong_shapes_name_the_place(reader: str, value: object, named: str) -> None:
    """The message names the member, down to the position, and says what was found."""
    with pytest.raises(InvalidRequest) as caught:
        getattr(section(value), reader)("field")
    assert f"InvalidRequest: {named}" == str(caught.value)


def test_an_array_may_hold_both_bounds() -> None:
    """Zero and the largest uint32 are ids."""
    assert [0, MAX_UINT32] == section([0, MAX_UINT32]).uint32s("field")
    assert [MAX_UINT32] == section([MAX_UINT32]).uint32s("field")


def test_a_long_prompt_is_checked_without_copying_it() -> None:
    """The ids of a long prompt come back as the same list, quickly enough not to hold up other requests."""
    ids = list(range(100_000))
    began = time.perf_counter()
    assert section(ids).uint32s("field") is ids
    assert time.perf_counter() - began < 0.5


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (7, "7"),
        pytest.param(10**5000, "an integer of 16610 bits", id="huge"),
        (math.nan, "nan"),
        ("short", "the text 'short'"),
        ("x" * 61, "a text of 61 characters"),
        ([1], "an array"),
        ({}, "an object"),
        (b"", "a bytes"),
        ("x" * 60, f"the text '{'x' * 60}'"),
        (2**128 - 1, str(2**128 - 1)),
        (-(2**128), "an integer of 129 bits"),
    ],
)
def test_values_are_described_briefly(value: object, expected: str) -> None:
    """No description repeats long texts or the content of containers."""
    assert expected == describe(value)


def test_an_absent_section_is_empty() -> None:
    """A missing object reads like an empty one, and its members go by the path it was given."""
    assert {} == dict(Section({}).section("routing").values)
    assert "routing.priority" == Section({}).section("routing").name("priority")
    assert "top_k" == Section({"sampling_options": {}}).section("sampling_options", path="").name("top_k")
