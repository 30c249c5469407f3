"""Marks, tree, JSON and exit code."""

from __future__ import annotations

import pytest

from trio_sidecar.doctor.report import Finding, Report, Section, failed, fine, mask, skipped, warned


@pytest.mark.parametrize(
    ("findings", "code", "verdict"),
    [
        ([fine("DNS", "x")], 0, "all is well"),
        ([fine("DNS", "x"), *skipped(["TCP"], "y")], 0, "all is well"),
        ([warned("proxies", "x"), fine("DNS", "x")], 1, "works, with warnings: proxies"),
        ([warned("proxies", "x"), failed("DNS", "x")], 2, "broken: DNS"),
    ],
)
def test_the_worst_finding_decides(findings: list[Finding], code: int, verdict: str) -> None:
    """Exit code 0, 1 with warnings, 2 if something is broken; the last line names it."""
    report = Report((Section("one", (fine("first", "x"),)), Section("two", tuple(findings))))
    assert (code, verdict) == (report.exit_code, report.verdict)
    assert verdict == report.tree().splitlines()[-1] == report.as_json()["verdict"]
    assert code == report.as_json()["exit_code"]


def test_the_tree_shows_marks_hints_and_times() -> None:
    """One line for each finding, and one for what to do."""
    report = Report((Section("part", (fine("a", "good", seconds=0.0012), failed("b", "bad", "do this"))),))
    assert [
        "part",
        "├─ ✓ a: good (1.2 ms)",
        "└─ ✗ b: bad",
        "       → do this",
        "",
        "broken: b",
    ] == report.tree().splitlines()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:secret@host:1/x", "http://***@host:1/x"),
        ("https://secret@host", "https://***@host"),
        ("a http://u:p@h and nats://t@n:4", "a http://***@h and nats://***@n:4"),
        ("http://u:p@ss@host", "http://***@host"),
        ("http://host/a@b", "http://host/a@b"),
    ],
)
def test_credentials_are_never_shown(text: str, shown: str) -> None:
    """Whatever stands before the host of a URL is left out, in the tree and in the JSON."""
    assert shown == mask(text)
    report = Report((Section("part", (warned("a", text, text),)),))
    assert "secret" not in report.tree()
    assert shown == report.as_json()["sections"][0]["findings"][0]["detail"]
