"""The list of deviations from vllm-rs, against the tests that assert them."""

from __future__ import annotations

import re
from pathlib import Path

from support.deviations import known

PARITY = Path(__file__).parents[2] / "parity"
UNASSERTED = {"structured-backend"}
"""Why the tests choose a backend."""


def test_every_deviation_is_asserted_and_listed() -> None:
    """Each line's name is used by a test, and tests use no other."""
    source = "\n".join(path.read_text() for path in PARITY.glob("test_*.py"))
    used = set(re.findall(r'deviation\("([a-z0-9-]+)"\)', source)) | set(
        re.findall(r'\n        \("([a-z-]+)", \{', source)
    )
    assert known() - UNASSERTED == used
