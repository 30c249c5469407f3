"""The page of the public API and the tutorials' code, against the source."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[3]
LINES = 40


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """The script that writes the pages."""
    spec = importlib.util.spec_from_file_location("generate_api", ROOT / "tools/generate_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_agree_with_the_source(generator: ModuleType) -> None:
    """`tools/generate_api.py --write` makes it so."""
    for path, text in generator.wanted().items():
        assert text == path.read_text(encoding="utf-8"), path.name


def test_every_public_name_is_there_and_described(generator: ModuleType) -> None:
    """What the page lists can be imported, and each name has a sentence."""
    for module in generator.PUBLIC:
        imported = importlib.import_module(module)
        names = generator.public_names(generator.ast.parse(generator.module_path(module).read_text(encoding="utf-8")))
        assert names, module
        for name in names:
            assert hasattr(imported, name), f"{module}.{name}"
            assert generator.describe(module, name)[1], f"{module}.{name} has no sentence"


def test_the_engine_has_as_few_lines_as_its_page_says() -> None:
    """Forty lines, without the empty ones."""
    source = (ROOT / "docs/tutorials/own_engine.py").read_text(encoding="utf-8")

    assert LINES >= sum(bool(line.strip()) for line in source.splitlines())
