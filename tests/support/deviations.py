"""The list of what differs between our vLLM server and vllm-rs: the tables of ``docs/deviations.md`` that say so."""

from __future__ import annotations

import functools
import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs/deviations.md"
SECTION = "## Where our vLLM server differs from `vllm-rs`"


@functools.cache
def known() -> frozenset[str]:
    """Names in the first column."""
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text.partition(SECTION)[2].partition("\n## ")[0]
    return frozenset(re.findall(r"^\| `([a-z0-9-]+)` \|", section, re.MULTILINE))


def deviation(name: str) -> str:
    """Say that what a test asserts next is in the list; a difference that is not fails the test.

    Returns:
        The name.
    """
    assert name in known(), f"docs/deviations.md does not list {name!r}"
    return name
