"""The generic part of the settings: options, their parsers, and where a value comes from.

An :class:`Option` sits in a field's metadata. :func:`resolve` makes a settings object from flags, variables and
defaults, in that order of precedence; :func:`options_of` lists what a command line has to offer.
"""

from __future__ import annotations

import enum
import math
import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs

from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)
S = TypeVar("S", bound="attrs.AttrsInstance")

OPTION_KEY = "trio_sidecar.option"
MAX_DIGITS = 40  # Python refuses to convert thousands; no setting needs more than these.
CLOCK_RANGE_SECS = int(threading.TIMEOUT_MAX)
"""The longest duration that Python's clocks can express, in seconds: about 292 years (R2.9)."""


@attrs.frozen(slots=True, kw_only=True)
class Option:
    """How a field can be set from outside.

    Attributes:
        flag: The flag with its dashes; None where only the environment may set it.
        env: The variable; None where only the command line may set it.
        parse: Text and source's name to value; raises InvalidConfig.
        help: One sentence for ``--help`` and the reference table.
        metavar: What ``--help`` calls the value.
        choices: The allowed texts, if they can be listed.
        switch: Whether the flag takes no value and means true.
        empty_is_unset: Whether an empty variable counts as absent; where it does not, it is an error, because an empty
            number or choice is more likely a mistake than a wish.
        check: Checks a value that came from anywhere; gets the value and the source's name; raises InvalidConfig.
        show: Writes a default as one would type it, where ``str`` does not.
        absent: What Dynamo takes where we pass nothing on; shown as the default.
        secret: Whether ``--print-config`` must not show the value.
    """

    flag: str | None
    env: str | None
    parse: Callable[[str, str], Any]
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    switch: bool = False
    empty_is_unset: bool = False
    check: Callable[[Any, str], None] | None = None
    show: Callable[[Any], str] | None = None
    absent: str = ""
    secret: bool = False


@attrs.frozen(slots=True, kw_only=True)
class OptionSource:
    """One field of one settings class that can be set from outside.

    Attributes:
        name: The field.
        option: Its option.
        default: Its default; :data:`attrs.NOTHING` where it is required.
        annotation: Its type, as the class spells it; decides what a file may hold for it.
    """

    name: str
    option: Option
    default: Any
    annotation: str = "str"

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is attrs.NOTHING

    @property
    def label(self) -> str:
        """The name for messages about a missing value."""
        return self.option.flag or self.option.env or self.name


def options_of(cls: type[attrs.AttrsInstance]) -> Iterator[OptionSource]:
    """The fields of a settings class that can be set from outside, in order; nested settings classes are entered."""
    for field in attrs.fields(cls):
        nested = field.metadata.get("nested")
        option = field.metadata.get(OPTION_KEY)
        if nested is not None:
            yield from options_of(nested)
        elif option is not None:
            default = _plain_default(field.default)
            kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
            yield OptionSource(name=field.name, option=option, default=default, annotation=kind)


def resolve(
    cls: type[S],
    *,
    flags: Mapping[str, str | bool],
    environ: Mapping[str, str],
    fallback: Mapping[str, object] | None = None,
) -> S:
    """Make a settings object: a flag wins over a variable, a variable over the fallback, that over the default.

    Args:
        cls: The settings class.
        flags: What the command line gave, by flag with its dashes.
        environ: The environment.
        fallback: Values, by field, from a source that is weaker than flags and variables, such as a file.

    Raises:
        InvalidConfig: A value is not allowed, or a required one is missing; names the flag or the variable.
    """
    values: dict[str, object] = {}
    for field in attrs.fields(cls):
        nested = field.metadata.get("nested")
        if nested is not None:
            values[field.name] = resolve(nested, flags=flags, environ=environ, fallback=fallback)
            continue
        option = field.metadata.get(OPTION_KEY)
        found = _from_outside(option, flags, environ) if option is not None else None
        if found is not None:
            values[field.name] = found.value
        elif fallback is not None and field.name in fallback:
            values[field.name] = fallback[field.name]
        elif field.default is attrs.NOTHING:
            label = OptionSource(name=field.name, option=option, default=field.default).label
            also = f" (or set {option.env})" if option.flag and option.env else ""
            raise InvalidConfig(label, f"is required{also}: {option.help}")
    return cls(**values)


@attrs.frozen(slots=True)
class _Found:
    value: object


def _from_outside(option: Option, flags: Mapping[str, str | bool], environ: Mapping[str, str]) -> _Found | None:
    given = flags.get(option.flag) if option.flag else None
    if isinstance(given, bool):
        return _Found(given)
    if given is not None and option.flag:
        return _Found(checked(option, given, option.flag))
    text = given_variable(option, environ)
    return None if text is None else _Found(checked(option, text, option.env or ""))


def given_variable(option: Option, environ: Mapping[str, str]) -> str | None:
    """What an option's variable holds; None if it is absent or counts as such."""
    text = environ.get(option.env) if option.env else None
    return None if option.empty_is_unset and not text else text


def checked(option: Option, text: str, source: str) -> object:
    """The value; checked here too, so that a message names the variable if the value came from there.

    Raises:
        InvalidConfig: It is not allowed; named by ``source``.
    """
    if option.metavar != "PATH":  # file names may be any bytes, texts go into messages
        _check_decoded(text, source)
    value = option.parse(text, source)
    if option.check is not None:
        option.check(value, source)
    return value


def _check_decoded(text: str, source: str) -> None:
    """Refuse bytes that Python could not decode and smuggled in, before they fail somewhere as a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        raise InvalidConfig(source, f"is not text in this locale's encoding, {encoding}") from None


def show_default(source: OptionSource) -> str:
    """A default as one would write it; empty where there is none."""
    value = source.default
    if source.required or value is None or value == "":
        return source.option.absent
    if isinstance(value, bool) and source.option.choices == ("on", "off"):
        return "on" if value else "off"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else (source.option.show or str)(value)


def _plain_default(default: Any) -> Any:
    return default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]


def setting(
    option: Option,
    *,
    default: Any = attrs.NOTHING,
    check: Callable[[Any, str], None] | None = None,
    converter: Any = None,
) -> Any:
    """An attrs field with an option; ``check`` sees every value, whoever makes the object."""
    option = attrs.evolve(option, check=check)
    name = option.flag or option.env or "setting"

    def validate(_instance: object, _attribute: object, value: object) -> None:
        if check is not None:
            check(value, name)

    return attrs.field(default=default, validator=validate, converter=converter, metadata={OPTION_KEY: option})


def nested(cls: type[attrs.AttrsInstance], *, default: Any = attrs.NOTHING) -> Any:
    """An attrs field that holds another settings class, whose options join those of the outer one."""
    return attrs.field(default=default, validator=attrs.validators.instance_of(cls), metadata={"nested": cls})


def parse_text(text: str, _source: str) -> str:
    """The text itself."""
    return text


def parse_bool(text: str, source: str) -> bool:
    """``true`` or ``false``, as the Rust tools read it."""
    return parse_choice(text, source, {"true": True, "false": False})


def parse_on_off(text: str, source: str) -> bool:
    """``on`` or ``off``."""
    return parse_choice(text, source, {"on": True, "off": False})


def parse_choice(text: str, source: str, choices: Mapping[str, T]) -> T:
    """The value that a text stands for.

    Raises:
        InvalidConfig: The text is none of the choices.
    """
    if text not in choices:
        raise InvalidConfig(source, f"{text!r} is not allowed; use {', '.join(choices)}")
    return choices[text]


def enum_option(cls: type[E], **rest: Any) -> Option:
    """An option whose texts are the values of an enum."""
    choices = {str(member.value): member for member in cls}

    def parse(text: str, source: str) -> E:
        return parse_choice(text, source, choices)

    return Option(parse=parse, choices=tuple(choices), **rest)


def whole_number(least: int, most: int) -> Callable[[str, str], int]:
    """A parser of whole decimal numbers within a range, both ends allowed."""

    def parse(text: str, source: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS):
            raise InvalidConfig(source, f"{_shown(text)} is not a whole number from {least} to {most}")
        return check_range(int(text), source, least, most)

    return parse


def whole_seconds(text: str, source: str) -> float:
    """A whole number of seconds, at least 1 (R2.3); whether the clock can express it is the field's check (R2.9)."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS):
        raise InvalidConfig(source, f"{_shown(text)} is not a whole number of seconds")
    if int(text) < 1:
        raise InvalidConfig(source, f"{int(text)} is not allowed; use at least 1 second")
    return float(text)


def duration(text: str, source: str) -> float:
    """A number of seconds, fractions allowed, at least 0."""
    return _decimal(text, source)


def decimal(text: str, source: str) -> float:
    """A finite decimal number."""
    return _decimal(text, source)


def _decimal(text: str, source: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise InvalidConfig(source, f"{_shown(text)} is not a number") from None
    if not math.isfinite(number):
        raise InvalidConfig(source, f"{_shown(text)} is not a finite number")
    return number


def check_range(value: int, source: str, least: int, most: int) -> int:
    """The value, if it lies within the range, both ends allowed.

    Raises:
        InvalidConfig: It does not, or it is not a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidConfig(source, f"{value!r} is not a whole number from {least} to {most}")
    if not least <= value <= most:
        raise InvalidConfig(source, f"{value} is not allowed; use a whole number from {least} to {most}")
    return value


def check_duration(value: float, source: str, *, zero: bool = False) -> None:
    """Check a number of seconds.

    Raises:
        InvalidConfig: It is negative, not finite, zero where that is not allowed, or beyond the clock's range (R2.9).
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise InvalidConfig(source, f"{value!r} is not a number of seconds")
    if value < 0 or (value == 0 and not zero):
        raise InvalidConfig(source, f"{value:g} is not allowed; use {'0 or more' if zero else 'more than 0'} seconds")
    if value > CLOCK_RANGE_SECS:
        raise InvalidConfig(
            source, f"{value:.10g} seconds exceed the supported monotonic clock range ({CLOCK_RANGE_SECS} s)"
        )


def check_at_least_zero(value: float, source: str) -> None:
    """Check a number that may not be negative.

    Raises:
        InvalidConfig: It is negative or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise InvalidConfig(source, f"{value!r} is not allowed; use a number of at least 0")


def check_not_empty(value: object, source: str) -> None:
    """Check a text that must say something.

    Raises:
        InvalidConfig: It is empty, blank or no text.
    """
    if not isinstance(value, str) or not value.strip():
        raise InvalidConfig(source, "must not be empty")


def none_if_empty(value: object) -> str | None:
    """None for an empty text, else the text."""
    return cast("str | None", value or None)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
