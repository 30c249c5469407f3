"""Rules about the source that no linter of ours checks: documentation, and the size of files and functions."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[1] / "src" / "trio_sidecar"
LONGEST_FILE = 400
LONGEST_FUNCTION = 60

LONG_FILES: dict[str, str] = {}
"""Files that may be longer, each with the reason why splitting would hurt the reader."""

LONG_FUNCTIONS: dict[str, str] = {}
"""Functions that may be longer, as ``file:qualified name``, each with the reason."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> dict[str, str]:
    """Every module of ours by its path; generated ones are left out."""
    return {
        str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8")
        for path in sorted(SOURCE.rglob("*.py"))
        if "_generated" not in path.parts
    }


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Classes and functions with their qualified names, those inside functions included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield prefix + child.name, child
            yield from definitions(child, f"{prefix}{child.name}.")
        else:
            yield from definitions(child, prefix)


def undocumented(source: str) -> list[str]:
    """The module itself, and its public classes, functions and methods that have no docstring."""
    tree = ast.parse(source)
    missing = [] if not tree.body or ast.get_docstring(tree) else ["the module"]
    functions = {name for name, node in definitions(tree) if not isinstance(node, ast.ClassDef)}
    for name, node in definitions(tree):
        parents = [".".join(name.split(".")[:depth]) for depth in range(1, len(name.split(".")))]
        private = any(part.startswith("_") for part in name.split("."))
        nested = any(parent in functions for parent in parents)
        if not private and not nested and not ast.get_docstring(node):
            missing.append(name)
    return missing


def code_lines(source: str, node: Definition) -> int:
    """Lines of a function that hold code: neither docstring, nor comment, nor blank."""
    assert node.end_lineno is not None
    text = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]) + "\n"
    skipped = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
    }  # fmt: skip
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    first = node.body[0]
    if ast.get_docstring(node) is not None and first.end_lineno is not None:
        lines -= set(range(first.lineno - node.lineno + 1, first.end_lineno - node.lineno + 2))
    return len(lines)


def test_everything_public_is_documented() -> None:
    """Every module, public class, function and method has a docstring."""
    missing = {path: names for path, source in sources().items() if (names := undocumented(source))}
    assert {} == missing


def test_files_are_short() -> None:
    """Files stay short; the exceptions are those listed, and each of them is still needed."""
    long = {path for path, source in sources().items() if len(source.splitlines()) > LONGEST_FILE}
    assert set(LONG_FILES) == long


def test_functions_are_short() -> None:
    """Functions stay short; the exceptions are those listed, and each of them is still needed."""
    long = {
        f"{path}:{name}"
        for path, source in sources().items()
        for name, node in definitions(ast.parse(source))
        if not isinstance(node, ast.ClassDef) and code_lines(source, node) > LONGEST_FUNCTION
    }
    assert set(LONG_FUNCTIONS) == long


SAMPLE = '''"""Module."""

class Documented:
    """Class."""

    def method(self):
        pass

    def _private(self):
        def nested():
            pass

async def function(
    argument,
):
    """Docs
    of two lines."""
    # a comment

    text = """
    three lines
    """
    return text
'''


def test_missing_docstrings_are_found() -> None:
    """A method without one is found; private and nested functions need none; an empty module needs none."""
    assert ["Documented.method"] == undocumented(SAMPLE)
    assert ["the module"] == undocumented("import os\n")
    assert [] == undocumented("")


def test_code_lines_are_counted() -> None:
    """Docstring, comments and blank lines do not count, the lines of other texts do."""
    nodes = dict(definitions(ast.parse(SAMPLE)))
    function = nodes["function"]
    assert isinstance(function, ast.AsyncFunctionDef)
    assert 7 == code_lines(SAMPLE, function)
