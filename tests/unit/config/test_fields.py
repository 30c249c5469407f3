"""Options: where a value comes from, and what its texts may be."""

from __future__ import annotations

import enum
import math

import attrs
import pytest

from trio_sidecar.config import CLOCK_RANGE_SECS, Option, options_of, resolve
from trio_sidecar.config.fields import (
    check_duration,
    check_range,
    decimal,
    enum_option,
    nested,
    parse_bool,
    parse_on_off,
    parse_text,
    setting,
    show_default,
    whole_number,
    whole_seconds,
)
from trio_sidecar.errors import InvalidConfig


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


def check_short(value: str, source: str) -> None:
    if len(value) > 3:
        raise InvalidConfig(source, "is too long")


@attrs.frozen(slots=True, kw_only=True)
class Inner:
    name: str = setting(Option(flag="--name", env="X_NAME", parse=parse_text, help="Name."), check=check_short)


@attrs.frozen(slots=True, kw_only=True)
class Outer:
    inner: Inner = nested(Inner)
    count: int = setting(Option(flag="--count", env="X_COUNT", parse=whole_number(1, 9), help="Count."), default=3)
    color: Color = setting(enum_option(Color, flag="--color", env="X_COLOR", help="Color."), default=Color.RED)
    note: str | None = setting(
        Option(flag="--note", env="X_NOTE", parse=parse_text, help="Note.", empty_is_unset=True), default=None
    )
    on: bool = setting(Option(flag="--on", env="X_ON", parse=parse_bool, help="On.", switch=True), default=False)
    only_env: str = setting(Option(flag=None, env="X_ONLY", parse=parse_text, help="Only."), default="")
    tags: list[str] = attrs.field(factory=list)


def outer(flags: dict[str, str | bool] | None = None, env: dict[str, str] | None = None, **fallback: object) -> Outer:
    return resolve(Outer, flags={"--name": "abc"} | (flags or {}), environ=env or {}, fallback=fallback)


def test_flag_wins_over_variable_over_fallback_over_default() -> None:
    """Each source is weaker than the one before."""
    env = {"X_COUNT": "5"}

    assert 3 == outer().count
    assert 4 == outer(count=4).count
    assert 5 == outer(env=env, count=4).count
    assert 6 == outer({"--count": "6"}, env, count=4).count


def test_a_bad_variable_does_not_matter_when_the_flag_is_given() -> None:
    """A value that is not used is not judged."""
    assert 6 == outer({"--count": "6"}, {"X_COUNT": "junk"}).count


def test_nested_settings_join() -> None:
    """The options of an inner class are those of the outer one."""
    assert Inner(name="abc") == outer().inner
    assert ["name", "count", "color", "note", "on", "only_env"] == [source.name for source in options_of(Outer)]


def test_a_switch_is_true_by_its_presence() -> None:
    """A switch needs no value on the command line, and a word in the environment."""
    assert (True, True, False) == (outer({"--on": True}).on, outer(env={"X_ON": "true"}).on, outer().on)


def test_missing_required_value_names_flag_and_variable() -> None:
    """Whoever has forgotten it learns both ways to give it."""
    with pytest.raises(InvalidConfig, match=r"--name: is required \(or set X_NAME\)"):
        resolve(Outer, flags={}, environ={})


@pytest.mark.parametrize(
    ("flags", "env", "setting_name"),
    [
        ({"--count": "10"}, {}, "--count"),
        ({}, {"X_COUNT": "10"}, "X_COUNT"),
        ({"--name": "long"}, {}, "--name"),
        ({}, {"X_COLOR": "green"}, "X_COLOR"),
        ({}, {"X_COUNT": ""}, "X_COUNT"),
        ({}, {"X_ON": "1"}, "X_ON"),
    ],
)
def test_errors_name_where_the_value_came_from(
    flags: dict[str, str | bool], env: dict[str, str], setting_name: str
) -> None:
    """A bad flag is called by the flag, a bad variable by the variable, an empty one included."""
    with pytest.raises(InvalidConfig) as caught:
        outer(flags, env)

    assert setting_name == caught.value.setting


def test_a_check_on_a_variable_names_the_variable() -> None:
    """Also checks of the class, not only those of the parser, know the source."""
    with pytest.raises(InvalidConfig) as caught:
        resolve(Outer, flags={}, environ={"X_NAME": "long"})

    assert "X_NAME" == caught.value.setting


def test_classes_check_values_that_code_passes() -> None:
    """A settings object cannot exist with a bad value, whoever makes it."""
    with pytest.raises(InvalidConfig, match="--name: is too long"):
        Inner(name="long")


def test_empty_optional_text_is_unset() -> None:
    """An empty variable of an optional text means that there is none."""
    assert None is outer(env={"X_NOTE": ""}).note


def test_settings_are_frozen() -> None:
    """Settings cannot change after they were checked."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        outer().count = 4  # type: ignore[misc]


@pytest.mark.parametrize("text", ["", "x", "1.5", "+1", " 1", "1_0", "٣", "9" * 5000, "0", "10", "-1"])
def test_whole_number_takes_digits_in_range_only(text: str) -> None:
    """What is no plain decimal number within the range is refused, naming the range."""
    with pytest.raises(InvalidConfig, match="from 1 to 9"):
        whole_number(1, 9)(text, "--count")


def test_whole_number_range_includes_its_ends() -> None:
    """Both ends are allowed, and leading zeros do no harm."""
    assert (1, 9, 7, -3) == (
        whole_number(1, 9)("1", "s"),
        whole_number(1, 9)("9", "s"),
        whole_number(1, 9)("007", "s"),
        whole_number(-5, 5)("-3", "s"),
    )


@pytest.mark.rule("R2.3")
@pytest.mark.parametrize("text", ["0", "1.5", "-1", "", "1e3", "inf", "nan", "1s"])
def test_whole_seconds_refuses_zero_and_fractions(text: str) -> None:
    """Seconds of the transport are whole and at least 1, as for the Rust tool."""
    with pytest.raises(InvalidConfig, match="--secs"):
        whole_seconds(text, "--secs")


@pytest.mark.rule("R2.9")
def test_durations_end_at_the_clock_range() -> None:
    """The longest duration is the clock's; one second more is refused by name."""
    check_duration(CLOCK_RANGE_SECS, "--secs")
    with pytest.raises(InvalidConfig, match="monotonic clock range"):
        check_duration(CLOCK_RANGE_SECS + 1, "--secs")


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "1"])
def test_durations_are_finite_numbers_of_at_least_zero(value: float) -> None:
    """Nothing else is a duration, a boolean included."""
    with pytest.raises(InvalidConfig):
        check_duration(value, "--secs", zero=True)


def test_zero_duration_is_refused_unless_allowed() -> None:
    """Whether zero means something is the setting's choice."""
    check_duration(0, "--secs", zero=True)
    with pytest.raises(InvalidConfig, match="more than 0"):
        check_duration(0, "--secs")


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "-inf", "1,5"])
def test_decimal_takes_finite_numbers_only(text: str) -> None:
    """A number is finite."""
    with pytest.raises(InvalidConfig, match="number"):
        decimal(text, "--x")


@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_range_check_takes_whole_numbers_only(value: int) -> None:
    """A boolean or a fraction is no whole number."""
    with pytest.raises(InvalidConfig, match="whole number"):
        check_range(value, "--x", 0, 9)


def test_long_values_are_shortened_in_messages() -> None:
    """A message stays readable whatever the value was."""
    with pytest.raises(InvalidConfig) as caught:
        decimal("x" * 10_000, "--x")

    assert 120 > len(str(caught.value))


@pytest.mark.parametrize("parse", [parse_bool, parse_on_off])
@pytest.mark.parametrize("text", ["yes", "1", "TRUE", "On", "", "0"])
def test_booleans_are_read_as_the_rust_tool_reads_them(parse: object, text: str) -> None:
    """Only the two words count, in lower case, and the message lists them."""
    assert callable(parse)
    with pytest.raises(InvalidConfig, match=r"use (true, false|on, off)"):
        parse(text, "--x")


def test_defaults_are_shown_as_one_would_write_them() -> None:
    """Help and reference show values in the syntax of the command line."""
    shown = {source.name: show_default(source) for source in options_of(Outer)}

    assert {"name": "", "count": "3", "color": "red", "note": "", "on": "false", "only_env": ""} == shown
