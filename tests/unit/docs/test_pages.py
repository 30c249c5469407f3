"""What the pages of the documentation name, against what there is."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from trio_sidecar.cli.main import build_parser

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "tests/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*\w")
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")

OTHERS = {
    "tools/": {"--write"},
    "nox sessions": {"--again", "--examples", "--full", "--minutes"},
    "trio-sidecar bench": {"--parts", "--plot", "--quick"},
    "pytest": {"--hypothesis-seed"},
    "pip": {"--extra-index-url", "--no-deps"},
    "prefixes": {"--keepalive", "--ssl"},
    "vLLM": {
        "--distributed-executor-backend",
        "--dtype",
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        "--lora-modules",
        "--otlp-traces-endpoint",
        "--structured-outputs-config",
        "--tensor-parallel-size",
    },
}
"""Flags that are no setting of a command of ours, by whose they are."""


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """Every long flag of a parser and of its commands."""
    found: set[str] = set()
    for action in parser._actions:
        found.update(name for name in action.option_strings if name.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= flags(command)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_flags_exist(page: Path) -> None:
    """A flag that a page names is one of ours, or listed above."""
    known = flags(build_parser()).union(*OTHERS.values())

    assert "--grpc-endpoint" in known
    assert set() == set(FLAG.findall(page.read_text(encoding="utf-8"))) - known


def test_flags_of_others_are_named_somewhere() -> None:
    """The list of others' flags holds nothing that no page names."""
    named = {flag for page in PAGES for flag in FLAG.findall(page.read_text(encoding="utf-8"))}

    assert set() == set().union(*OTHERS.values()) - named


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """A file that a page links to is there; `nox -s docs` looks at the places inside pages."""
    links = [path for path, _ in LINK.findall(page.read_text(encoding="utf-8")) if path]

    assert [] == [path for path in links if not (page.parent / path).exists()]


def test_the_readme_is_short() -> None:
    """Who reads it wants to try the thing."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 500


def test_every_page_is_in_the_site() -> None:
    """The site's navigation has every page under `docs`."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]

    assert [] == [page for page in pages if f": {page}\n" not in f"{navigation}\n"]
