"""What the README and the reference say, against what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trio_sidecar.cli.main import build_parser

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """The script that writes the tables."""
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "tools/generate_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_agree_with_the_settings(generator: ModuleType) -> None:
    """Every table is what the settings classes say; `tools/generate_reference.py --write` makes it so."""
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")

    assert "| `--grpc-endpoint` |" in text
    assert generator.updated(text) == text


def test_errors_agree_with_the_classes(generator: ModuleType) -> None:
    """The tables of errors and statuses are what the classes say."""
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")

    assert "| `Overloaded` |" in text
    assert "| `UNAVAILABLE` | `CannotConnect` |" in text
    assert generator.updated(text) == text


def test_every_command_is_in_the_readme() -> None:
    """The commands that exist are the commands that are described."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    help_text = build_parser().format_help()

    for command in ("worker", "frontend", "up", "engine", "bench"):
        assert f"\n    {command} " in help_text
        assert f"| `trio-sidecar {command}" in readme
