"""The listed deviations from the Rust sidecar as data; ``docs/deviations.md`` is made from the same table."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from support.differential import Difference

TABLE = Path(__file__).parents[2] / "docs/deviations.toml"


@attrs.frozen(slots=True, kw_only=True)
class Sight:
    """How a comparison sees a deviation; see the head of the table."""

    path: str
    ours: str
    rust: str
    when: tuple[str, ...] = ()
    null: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()

    def explains(self, difference: Difference, request: dict[str, Any], role: str) -> bool:
        """Whether it is the reason of a difference."""
        texts = ((self.path, difference.path), (self.ours, difference.ours), (self.rust, difference.rust))
        found = [re.fullmatch(pattern, text, re.DOTALL) for pattern, text in texts]
        if not all(found):
            return False
        names = {name: text for match in found if match for name, text in match.groupdict().items()}
        return (
            (not self.when or any(_dig(request, path) is not None for path in self.when))
            and (not self.null or any(_is_null(request, path, names) for path in self.null))
            and (not self.roles or role in self.roles)
        )


@attrs.frozen(slots=True)
class Deviation:
    """One row that comparisons may meet."""

    id: str
    sights: tuple[Sight, ...]


@attrs.define
class Record:
    """What comparisons have met.

    Attributes:
        cases: How many there were.
        met: Ids of the deviations that explained a difference.
    """

    cases: int = 0
    met: set[str] = attrs.field(factory=set)


def load_deviations() -> list[Deviation]:
    """All rows that a comparison can see."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["deviation"]
    return [
        Deviation(row["id"], tuple(Sight(**{**seen, **_tuples(seen)}) for seen in row["seen"]))
        for row in rows
        if "seen" in row
    ]


def explanation(difference: Difference, request: dict[str, Any], role: str, deviations: list[Deviation]) -> str | None:
    """The id of the deviation that explains a difference; None if none does."""
    for deviation in deviations:
        if any(sight.explains(difference, request, role) for sight in deviation.sights):
            return deviation.id
    return None


def _tuples(seen: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {key: tuple(seen[key]) for key in ("when", "null", "roles") if key in seen}


def _dig(value: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def _is_null(request: dict[str, Any], path: str, names: dict[str, str]) -> bool:
    """Whether a member is there, and is null; its own name may be one that an expression has found."""
    section, _, last = path.rpartition(".")
    members, name = _dig(request, section) or {}, last.format(**names)
    return name in members and members[name] is None
