"""What was found: marks, a tree for people, JSON for programs, and an exit code."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Finding", "Mark", "Report", "Section", "failed", "fine", "mask", "skipped", "warned"]

_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")
EXIT_OK, EXIT_WARNINGS, EXIT_BROKEN = 0, 1, 2


class Mark(enum.Enum):
    """How a check ended; in the order of severity."""

    FINE = "ok"
    SKIPPED = "skipped"
    WARNED = "warning"
    FAILED = "failed"

    @property
    def sign(self) -> str:
        """What a terminal shows."""
        return {"ok": "✓", "skipped": "·", "warning": "!", "failed": "✗"}[self.value]


@attrs.frozen(slots=True, kw_only=True)
class Finding:
    """The end of one check.

    Attributes:
        name: The layer or the thing that was looked at.
        detail: What was seen, in one line.
        hint: What to do about it; empty if there is nothing to do.
        seconds: How long it took, where that says something.
    """

    name: str
    mark: Mark
    detail: str
    hint: str = ""
    seconds: float | None = None


@attrs.frozen(slots=True)
class Section:
    """Checks that belong together, in the order in which one builds on the other."""

    title: str
    findings: tuple[Finding, ...]


@attrs.frozen(slots=True)
class Report:
    """All sections."""

    sections: tuple[Section, ...]

    @property
    def exit_code(self) -> int:
        """0 if all is well, 1 if it works with warnings, 2 if something is broken."""
        marks = {finding.mark for section in self.sections for finding in section.findings}
        if Mark.FAILED in marks:
            return EXIT_BROKEN
        return EXIT_WARNINGS if Mark.WARNED in marks else EXIT_OK

    def tree(self) -> str:
        """For people; no credentials."""
        lines = []
        for section in self.sections:
            lines.append(section.title)
            last = len(section.findings) - 1
            for index, finding in enumerate(section.findings):
                corner, bar = ("└─", "  ") if index == last else ("├─", "│ ")
                seconds = "" if finding.seconds is None else f" ({finding.seconds * 1000:.1f} ms)"
                lines.append(f"{corner} {finding.mark.sign} {finding.name}: {finding.detail}{seconds}")
                if finding.hint:
                    lines.append(f"{bar}     → {finding.hint}")
            lines.append("")
        return mask("\n".join([*lines, self.verdict]))

    @property
    def verdict(self) -> str:
        """The whole in one line."""
        found = [finding for section in self.sections for finding in section.findings]
        broken = [finding.name for finding in found if finding.mark is Mark.FAILED]
        if broken:
            return f"broken: {', '.join(broken)}"
        warned = [finding.name for finding in found if finding.mark is Mark.WARNED]
        return f"works, with warnings: {', '.join(warned)}" if warned else "all is well"

    def as_json(self) -> dict[str, Any]:
        """For programs; no credentials."""
        return {
            "verdict": mask(self.verdict),
            "exit_code": self.exit_code,
            "sections": [
                {
                    "title": section.title,
                    "findings": [
                        {
                            "name": finding.name,
                            "mark": finding.mark.value,
                            "detail": mask(finding.detail),
                            "hint": mask(finding.hint),
                            "seconds": finding.seconds,
                        }
                        for finding in section.findings
                    ],
                }
                for section in self.sections
            ],
        }


def mask(text: str) -> str:
    """The text with the credentials of URLs replaced."""
    return _CREDENTIALS.sub("***@", text)


def fine(name: str, detail: str, *, seconds: float | None = None) -> Finding:
    """All is well."""
    return Finding(name=name, mark=Mark.FINE, detail=detail, seconds=seconds)


def warned(name: str, detail: str, hint: str = "", *, seconds: float | None = None) -> Finding:
    """It works, but."""
    return Finding(name=name, mark=Mark.WARNED, detail=detail, hint=hint, seconds=seconds)


def failed(name: str, detail: str, hint: str = "", *, seconds: float | None = None) -> Finding:
    """It is broken."""
    return Finding(name=name, mark=Mark.FAILED, detail=detail, hint=hint, seconds=seconds)


def skipped(names: Iterable[str], why: str) -> list[Finding]:
    """Checks that could not be made."""
    return [Finding(name=name, mark=Mark.SKIPPED, detail=why) for name in names]
