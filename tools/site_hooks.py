"""What MkDocs is told beyond ``mkdocs.yml``: links to files of the repository that are no pages.

In a checkout they lead to the file; in the site they are plain text. MkDocs stops at one that leads nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent.parent / "docs"
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, /, *, page: Page, **_: object) -> str:
    """MkDocs calls it for each page."""
    directory = (DOCS / page.file.src_uri).parent

    def rewrite(found: re.Match[str]) -> str:
        target = (directory / found[2]).resolve()
        is_page = target.is_relative_to(DOCS) and target.suffix == ".md"
        return found[1] if target.exists() and not is_page else found[0]

    return LINK.sub(rewrite, markdown)
