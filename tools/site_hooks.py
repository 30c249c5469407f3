"""What MkDocs is told beyond ``mkdocs.yml``: links to files of the repository that are no pages.

In a checkout they lead to the file; in the site they are plain text. One that leads nowhere stops the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OTHER_PAGES = ("README.md", "CHANGELOG.md", "tests/README.md")
"""Not in the site, but read in a checkout."""

LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, /, *, page: Page, **_: object) -> str:
    """MkDocs calls it for each page."""
    directory = (DOCS / page.file.src_uri).parent

    def rewrite(found: re.Match[str]) -> str:
        target = checked(directory, found[2], page.file.src_uri)
        return found[0] if target.is_relative_to(DOCS) and target.suffix == ".md" else found[1]

    return LINK.sub(rewrite, markdown)


def on_post_build(**_: object) -> None:
    """MkDocs calls it at the end."""
    for name in OTHER_PAGES:
        for found in LINK.finditer((ROOT / name).read_text(encoding="utf-8")):
            checked((ROOT / name).parent, found[2], name)


def checked(directory: Path, link: str, page: str) -> Path:
    """Where a link leads.

    Raises:
        PluginError: Nowhere.
    """
    target = (directory / link).resolve()
    if not target.exists():
        reason = f"{page}: the link to {link!r} leads nowhere"
        raise PluginError(reason)
    return target
