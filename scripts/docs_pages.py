"""mkdocs hook: README.md, CHANGELOG.md and CONTRIBUTING.md become pages, and links to files outside docs/ become plain
text.

The three files stay at the top of the repository, and the site shows the same text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from files of the repository's root."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_LINK.sub(_from_root, text)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links to files outside the site, such as tests, with their names."""

    def plain(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[2]))
        return link[0] if "://" in link[2] or target.startswith("docs/") else f"`{target}`"

    return _LINK.sub(plain, markdown)


def _from_root(link: re.Match[str]) -> str:
    text, target = link[1], link[2]
    for page, source in PAGES.items():
        if target == source:
            return f"[{text}]({page})"
    if target.startswith("docs/"):
        return f"[{text}]({target.removeprefix('docs/')})"
    return link[0] if "://" in target or target.startswith("#") else f"`{target}`"
