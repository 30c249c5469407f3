"""Write docs/support-matrix.md: every rule of docs/rules.toml, and the tests that are marked with its number.

``generate_support_matrix.py --write`` does; without the flag it only checks. Either way it fails if a rule has neither
a test nor a reason, if it has both, or if a mark names a rule that does not exist. It reads the tests and does not
import them, so it needs nothing but Python.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
RULES, PAGE = ROOT / "docs/rules.toml", ROOT / "docs/support-matrix.md"
RULE = re.compile(r"R\d+\.\d+")
LESSON = re.compile(r"FR-\d{3}")
CASES = ("case", "answer", "extra", "legacy", "hydrating", "pictures", "prepared")
"""What makes a directed comparison in tests/support/directed_*.py; their arguments include the rules' numbers."""
DIRECTED = "tests/differential/test_directed.py"
HEAD = """# Support matrix

Which test holds which rule. Made from [rules.toml](rules.toml) and from the marks of the tests by
`tools/generate_support_matrix.py --write`; the lint session fails if it is stale, or if a rule has neither test nor
reason. `differential` means that both our worker and the Rust sidecar are put to the test, and do the same, but for
what [deviations.md](deviations.md) lists.
"""
LESSONS = """## Lessons from the field

Tests that also hold a lesson from a fault that was reported of a similar system.
"""

Covered = dict[str, dict[str, set[str]]]


def covered() -> Covered:
    """By number: the tests, by file."""
    found: Covered = defaultdict(lambda: defaultdict(set))
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(ROOT).as_posix()
        if path.name.startswith("test_"):
            everywhere = [number for node in tree.body if _is_pytestmark(node) for number in _marks(node)]
            for test in _tests(tree):
                numbers = [*everywhere, *(number for decorator in test.decorator_list for number in _marks(decorator))]
                for number in numbers:
                    found[number][name].add(test.name)
        elif path.name.startswith("directed_"):
            for number in _directed(tree):
                found[number][DIRECTED].add("test_both_do_the_same")
    return found


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(x, ast.Name) and x.id == "pytestmark" for x in node.targets)


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def _marks(tree: ast.AST) -> Iterator[str]:
    """The numbers of every ``mark.rule(…)`` below a node, also those of single parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "rule":
            yield from _texts(node)


def _directed(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CASES:
            yield from (text for text in _texts(node) if RULE.fullmatch(text))
        elif isinstance(node, ast.Tuple):  # rules of cases that a loop makes
            texts = [item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            yield from (text for text in texts if RULE.fullmatch(text))


def _texts(call: ast.Call) -> list[str]:
    return [item.value for item in call.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def faults(rules: dict[str, str], reasons: dict[str, str], found: Covered) -> list[str]:
    """What is wrong with the rules and the marks."""
    lines = []
    for number, says in rules.items():
        if number not in found and number not in reasons:
            lines.append(f"{number} has neither a test nor a reason in {RULES.name}: {says}")
        if number in found and number in reasons:
            lines.append(f"{number} has tests, so it needs no reason in {RULES.name}")
    lines += [f"{number} has a reason but is no rule" for number in reasons if number not in rules]
    for number, files in sorted(found.items()):
        if RULE.fullmatch(number) and number not in rules:
            lines.append(f"{', '.join(sorted(files))}: there is no rule {number}")
    return lines


def page(text: dict[str, dict[str, str]], found: Covered) -> str:
    """The whole page."""
    rules, reasons = text["rules"], text["untested"]
    parts = [HEAD]
    for section, title in text["sections"].items():
        lines = [f"## {section} · {title}", "", "| rule | what it says | held by |", "|---|---|---|"]
        for number, says in rules.items():
            if number.startswith(f"R{section}."):
                held = _held(found[number]) if number in found else f"not tested: {reasons.get(number, '?')}"
                lines.append(f"| {number} | {says} | {held} |")
        parts.append("\n".join(lines) + "\n")
    lessons = sorted(number for number in found if LESSON.fullmatch(number))
    rows = [f"| {number} | {_held(found[number])} |" for number in lessons]
    parts += [LESSONS, "\n".join(["| lesson | held by |", "|---|---|", *rows]) + "\n"]
    return "\n".join(parts)


def _held(files: dict[str, set[str]]) -> str:
    """The tests, file by file; the directed comparisons by one word."""
    shown = []
    for name, tests in sorted(files.items()):
        if name == DIRECTED:
            shown.append(f"[differential](../{DIRECTED})")
        else:
            shown.append(
                f"[{name.removeprefix('tests/')}](../{name}): {', '.join(f'`{test}`' for test in sorted(tests))}"
            )
    return "<br>".join(shown)


def main() -> int:
    """Check, or write; 1 if something is wrong."""
    text = tomllib.loads(RULES.read_text(encoding="utf-8"))
    found = covered()
    wrong = faults(text["rules"], text["untested"], found)
    new = page(text, found)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(new, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != new:
        wrong.append(f"{PAGE.name} is stale: run {Path(__file__).name} --write")
    print("\n".join(wrong) or f"{len(text['rules'])} rules, each with a test or a reason")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
