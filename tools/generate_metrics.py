"""Write the tables of metric families into docs/metrics.md.

``generate_metrics.py --write`` does; without the flag it only says whether they agree with the table in the code.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trio_sidecar.metrics import ENGINE_FAMILIES, WORKER_FAMILIES

if TYPE_CHECKING:
    from trio_sidecar.metrics import Family

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
TABLES = {"worker": WORKER_FAMILIES, "engine": ENGINE_FAMILIES}


def table(families: tuple[Family, ...]) -> str:
    """A Markdown table."""
    rows = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for family in families:
        labels = "; ".join(
            f"`{name}`" + (f": {', '.join(f'`{value}`' for value in values)}" if values else "")
            for name, values in family.labels.items()
        )
        rows.append(f"| `{family.exposed}` | {family.kind.value} | {labels} | {family.help} |")
    return "\n".join(rows)


def updated(text: str) -> str:
    """The page with every table between ``<!-- families: NAME -->`` and ``<!-- /families -->`` made anew."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- families: {found[1]} -->\n\n{table(TABLES[found[1]])}\n\n<!-- /families -->"

    return re.sub(r"<!-- families: (\w+) -->.*?<!-- /families -->", fill, text, flags=re.DOTALL)


def main() -> int:
    """Compare or write; 1 if the page does not agree."""
    text = PAGE.read_text(encoding="utf-8")
    if updated(text) == text:
        print("the metrics agree")  # noqa: T201
        return 0
    if "--write" in sys.argv[1:]:
        PAGE.write_text(updated(text), encoding="utf-8")
    print(f"docs/{PAGE.name} does not agree with the families")  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main())
