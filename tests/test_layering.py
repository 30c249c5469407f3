"""The layering that ``trio_sidecar/__init__.py`` writes down is kept; and the checks catch whoever breaks it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.import_graph import Import, cycle, foreign_faults, imports_of, layer_faults, layers_of

ROOT = "trio_sidecar"
SOURCE = Path(__file__).parents[1] / "src" / ROOT
HOMES = {"asyncio": "bridge", "trio_asyncio": "bridge", "uvloop": "bridge", "dynamo": "worker"}
"""The one part that may import a library."""


def read_package() -> tuple[dict[str, str], frozenset[str]]:
    """The sources of all modules by name, and which of them are packages; generated ones are left out."""
    modules, packages = {}, set()
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        if "_generated" in parts:
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts[-1] == "__init__":
            packages.add(name)
        modules[name] = path.read_text(encoding="utf-8")
    return modules, frozenset(packages)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    """All imports of the package."""
    found = imports_of(*read_package())
    assert len(found) > 100
    return found


def written_layers() -> list[list[str]]:
    """The layers as the package's docstring gives them."""
    docstring = ast.get_docstring(ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8")))
    assert docstring is not None
    return layers_of(docstring)


def test_imports_go_strictly_downwards(imports: list[Import]) -> None:
    """No part of the package imports from its own layer or a higher one, and each part has a layer."""
    found = layer_faults(imports, written_layers(), ROOT)
    assert [] == found, "\n".join(found)


def test_every_written_layer_exists() -> None:
    """The docstring names no part that is not there."""
    missing = [part for layer in written_layers() for part in layer if not list(SOURCE.glob(f"{part}*"))]
    assert [] == missing


def test_libraries_stay_in_their_homes(imports: list[Import]) -> None:
    """asyncio, trio-asyncio and uvloop are imported by the bridge only, Dynamo by the worker only."""
    found = foreign_faults(imports, HOMES, ROOT)
    assert [] == found, "\n".join(found)


def test_no_module_is_part_of_an_import_cycle(imports: list[Import]) -> None:
    """Imports between modules, those inside functions included, close no circle."""
    found = cycle(imports, ROOT)
    assert [] == found, " -> ".join(found)


# What follows proves the checks on made-up packages.

LAYERS = [["cli"], ["worker", "server"], ["bridge"], ["errors"]]
CLEAN = {
    "p": "__version__ = '1'",
    "p.cli": "from p import worker, __version__\nfrom p.errors import Oops",
    "p.worker": "from p.worker import dynamo",
    "p.worker.dynamo": "import dynamo.llm\nfrom ..bridge import run",
    "p.server": "from p.bridge import run\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.worker",
    "p.bridge": "import asyncio",
    "p.errors": "import enum",
}
PACKAGES = frozenset({"p", "p.worker"})


def faults(**changes: str) -> list[str]:
    """What all checks find in the clean package after some modules have been replaced."""
    modules = CLEAN | {f"p.{name}".replace("__", "."): source for name, source in changes.items()}
    found = imports_of(modules, PACKAGES)
    circle = cycle(found, "p")
    return [
        *layer_faults(found, LAYERS, "p"),
        *foreign_faults(found, {"asyncio": "bridge", "dynamo": "worker"}, "p"),
        *([" -> ".join(circle)] if circle else []),
    ]


def test_a_clean_package_has_no_faults() -> None:
    """Downward imports, the package's version, sideways types and libraries in their homes are all right."""
    assert [] == faults()


@pytest.mark.parametrize(
    "source",
    [
        "import p.worker",
        "from p import worker",
        "from . import worker",
        "from p.worker import dynamo",
        "from p.worker.dynamo import run",
        "def late():\n    from p import worker",
        "class Lazy:\n    async def late(self):\n        import p.worker.dynamo",
        "import importlib\nimportlib.import_module('p.worker')",
        "try:\n    import p.worker\nexcept ImportError:\n    pass",
        "import typing\nif typing.TYPE_CHECKING:\n    from p.worker import Thing",
    ],
)
def test_a_back_edge_is_found(source: str) -> None:
    """An import that goes up is found in every form: plain, relative, late, dynamic, guarded, for its types only."""
    found = faults(errors=source)
    assert any("worker is not below errors" in fault for fault in found), found


def test_a_sideways_import_is_found() -> None:
    """Two parts of one layer do not import each other, except for types."""
    assert ["p.server:1 imports p.worker: worker is not below server"] == faults(server="import p.worker")


def test_the_package_itself_imports_nothing_of_its_own() -> None:
    """An import in the package's ``__init__`` would run for everyone."""
    modules = CLEAN | {"p": "from p.errors import Oops"}
    found = layer_faults(imports_of(modules, PACKAGES), LAYERS, "p")
    assert ["p:1 imports p.errors: the package itself imports none of its parts"] == found


def test_a_part_without_a_layer_is_found() -> None:
    """A new part must be given its place."""
    assert ["extra is in no layer"] == faults(extra="import p.errors")


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio",
        "import asyncio.events as events",
        "from asyncio import sleep",
        "def late():\n    import asyncio",
        "__import__('asyncio')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncio",
    ],
)
def test_a_library_outside_its_home_is_found(source: str) -> None:
    """Whoever imports asyncio outside the bridge is found in every form; a name that begins alike is no match."""
    assert any("only bridge may" in fault for fault in faults(errors=source))
    assert [] == faults(errors="import asyncio_extras")


def test_dynamo_outside_the_worker_is_found() -> None:
    """Dynamo is found in the command line too."""
    assert ["p.cli:1 imports dynamo.llm: only worker may"] == faults(cli="from dynamo.llm import register_model")


@pytest.mark.parametrize(
    "source", ["from p.worker import run", "def late():\n    from p import worker\n    worker.run()"]
)
def test_a_cycle_is_found(source: str) -> None:
    """Two modules of one part that import each other are found, also if one of them does so late."""
    assert ["p.worker -> p.worker.dynamo -> p.worker"] == faults(worker__dynamo=source) or [
        "p.worker.dynamo -> p.worker -> p.worker.dynamo"
    ] == faults(worker__dynamo=source)


def test_types_close_no_cycle() -> None:
    """An import under TYPE_CHECKING does not run; what its else branch imports does."""
    guard = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.worker import Thing\nelse:\n    {}"
    assert [] == faults(worker__dynamo=guard.format("Thing = object"))
    assert [] != faults(worker__dynamo=guard.format("from p.worker import Thing"))


def test_layers_are_read_from_a_docstring() -> None:
    """The first indented block gives the layers, one a line, parts separated by commas."""
    assert [["a"], ["b", "c"]] == layers_of("Title.\n\nText:\n\n    a\n    b, c\n\nMore.\n\n    code")
