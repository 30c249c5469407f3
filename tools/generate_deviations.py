"""Write the tables of docs/deviations.md from docs/deviations.toml.

``generate_deviations.py --write`` does; without the flag it only says whether they agree.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
TABLE, PAGE = DOCS / "deviations.toml", DOCS / "deviations.md"
VIEWS = ("client", "operator", "engine", "router")
HEAD = ["| | Rust sidecar 1.6.1 | our worker | why |", "|---|---|---|---|"]


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table; the rules that a row touches stand after its reason."""
    lines = []
    for row in rows:
        rules = f" ({', '.join(row['rules'])})" if row.get("rules") else ""
        lines.append(f"| {row['what']} | {row['rust']} | {row['ours']} | {row['why']}{rules} |")
    return "\n".join([*HEAD, *lines])


def updated(text: str, rows: list[dict[str, Any]]) -> str:
    """The page with every table between ``<!-- deviations: VIEW -->`` and ``<!-- /deviations -->`` made anew."""

    def fill(found: re.Match[str]) -> str:
        chosen = [row for row in rows if row["view"] == found[1]]
        return f"<!-- deviations: {found[1]} -->\n\n{table(chosen)}\n\n<!-- /deviations -->"

    return re.sub(r"<!-- deviations: (\w+) -->.*?<!-- /deviations -->", fill, text, flags=re.DOTALL)


def main() -> int:
    """Compare or write; 1 if the page does not agree, or a row is in no table of it."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["deviation"]
    lost = [row["id"] for row in rows if row["view"] not in VIEWS]
    text = PAGE.read_text(encoding="utf-8")
    stale = updated(text, rows) != text
    if stale and "--write" in sys.argv[1:]:
        PAGE.write_text(updated(text, rows), encoding="utf-8")
    messages = [f"{name}: no such view" for name in lost]
    messages += [f"{PAGE.name} does not agree with {TABLE.name}"] if stale else []
    print("\n".join(messages) or "the deviations agree")  # noqa: T201
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
