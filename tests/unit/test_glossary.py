"""docs/glossary.md fits on one screen, its rows are short, and other pages use every term."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.support.harness import ROOT

DOCS = ROOT / "docs"
PAGE = DOCS / "glossary.md"
ROWS = [
    line
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| term ", "| **"))
]
TERMS = [row.split("|")[1].strip() for row in ROWS]


@cache
def pages() -> list[str]:
    """Return the text of all other pages."""
    return [page.read_text(encoding="utf-8").lower() for page in sorted(DOCS.rglob("*.md")) if page != PAGE]


def test_the_glossary_is_short() -> None:
    assert 20 <= len(ROWS) <= 40
    assert len(set(TERMS)) == len(TERMS)
    assert not [row for row in ROWS if len(row) > 160]


@pytest.mark.parametrize("term", TERMS)
def test_a_term_occurs_in_at_least_two_pages(term: str) -> None:
    words = r"\s+".join(map(re.escape, term.lower().split()))
    word = re.compile(rf"\b{words}s?\b")
    assert sum(word.search(text) is not None for text in pages()) >= 2
