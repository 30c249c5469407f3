"""The import graph of a package, drawn from its source, and the rules that it must keep.

Every import counts, at module level or inside a function; ``importlib.import_module`` and ``__import__`` with a literal
name count too. What is imported under ``if TYPE_CHECKING:`` does not run, so it cannot close a cycle and may go
sideways within a layer, but it must not go up: a lower layer that speaks of a higher one's types is not lower.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

DYNAMIC_IMPORTS = {"import_module", "__import__"}


@attrs.frozen
class Import:
    """One import statement."""

    importer: str
    target: str
    line: int
    typing_only: bool

    def __str__(self) -> str:
        """The import as a fault shows it."""
        return f"{self.importer}:{self.line} imports {self.target}"


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _statements(node: ast.AST, typing_only: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below, with whether it stands under ``if TYPE_CHECKING:``."""
    for child in ast.iter_child_nodes(node):
        yield child, typing_only
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for statement in child.body:
                yield statement, True
                yield from _statements(statement, True)
            for statement in child.orelse:
                yield statement, typing_only
                yield from _statements(statement, typing_only)
        else:
            yield from _statements(child, typing_only)


def _base(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    """The absolute name of what a ``from`` statement imports from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parents = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _targets(node: ast.AST, module: str, is_package: bool, modules: Mapping[str, str]) -> list[str]:
    """The absolute names of the modules that a node imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = _base(module, is_package, node)
        names = [f"{base}.{alias.name}" for alias in node.names]
        return list(dict.fromkeys(name if name in modules else base for name in names))
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in DYNAMIC_IMPORTS and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def imports_of(modules: Mapping[str, str], packages: frozenset[str]) -> list[Import]:
    """All imports of some modules, given as sources by absolute name; ``packages`` are those in an ``__init__.py``."""
    found = []
    for module, source in modules.items():
        for node, typing_only in _statements(ast.parse(source)):
            for target in _targets(node, module, module in packages, modules):
                found.append(Import(module, target, getattr(node, "lineno", 0), typing_only))  # noqa: PERF401
    return found


def layers_of(docstring: str) -> list[list[str]]:
    """The layers in a docstring, top first: the first indented block, one layer a line."""
    lines = docstring.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("    "))
    layers = []
    for line in lines[start:]:
        if not line.startswith("    "):
            break
        layers.append([name.strip() for name in line.split(",")])
    return layers


def part_of(module: str, root: str) -> str:
    """The layered part that a module belongs to: the name below the root; ``__main__`` is part of the command line."""
    name = module.removeprefix(root).lstrip(".").split(".")[0]
    return "cli" if name == "__main__" else name


def _inside(module: str, root: str) -> bool:
    return module == root or module.startswith(f"{root}.")


def layer_faults(imports: Sequence[Import], layers: Sequence[Sequence[str]], root: str) -> list[str]:
    """Imports that do not go strictly downwards, and parts that have no layer."""
    height = {part: len(layers) - index for index, layer in enumerate(layers) for part in layer}
    parts = {part_of(item.importer, root) for item in imports if item.importer != root}
    faults = [f"{part} is in no layer" for part in sorted(parts - height.keys())]
    for item in imports:
        if not _inside(item.target, root):
            continue
        if item.target == root:
            continue  # the version, which is above nothing
        above, below = part_of(item.importer, root), part_of(item.target, root)
        if item.importer == root:
            faults.append(f"{item}: the package itself imports none of its parts")
        elif above != below and above in height:
            allowed = height[above] - (0 if item.typing_only else 1)
            if height.get(below, 0) > allowed:
                faults.append(f"{item}: {below} is not below {above}")
    return faults


def foreign_faults(imports: Sequence[Import], homes: Mapping[str, str], root: str) -> list[str]:
    """Imports of a library outside the part that is its home, for their types too."""
    return [
        f"{item}: only {homes[library]} may"
        for item in imports
        if (library := item.target.split(".")[0]) in homes and part_of(item.importer, root) != homes[library]
    ]


def cycle(imports: Sequence[Import], root: str) -> list[str]:
    """The modules of one cycle of imports that run, or nothing."""
    graph: dict[str, set[str]] = {}
    for item in imports:
        if not item.typing_only and _inside(item.target, root) and item.target != item.importer:
            graph.setdefault(item.importer, set()).add(item.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as found:
        return list(reversed(found.args[1]))
    return []
