"""The pages of docs/architecture name every file of the packages once, and no file that does not exist."""

from __future__ import annotations

import re
from collections import defaultdict

from tests.support.harness import ROOT

PACKAGES = ("kvstore", "kvstore_client", "kvstore_serving", "kvstore_cli")
PAGES = ROOT / "docs" / "architecture"
OVERVIEW = ROOT / "docs" / "architecture.md"
WRITTEN_BY_SETUP = {"kvstore/_policies.py", "cext/policies/all.pxi"}  # not in the repository
MOST_CHARACTERS = 120  # the longest table cell: anything longer is a paragraph
HEAD = re.compile(r"\| `([\w/]+/)` \|")  # a table of files begins with the name of the files' folder
ROW = re.compile(r"\| `([\w.]+)` \|")
PATH = re.compile(r"`((?:kvstore|kvstore_\w+|cext|tests)/[\w/.*]+)`")
TEST = re.compile(r"`((?:unit|integration|engine|attack|chaos|upgrade|gpu|containers)/[\w/.*]*)`")


def files() -> set[str]:
    """Return the paths that a page must name: the packages' modules except `__init__.py`, and the extensions'
    sources."""
    python = {file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if file.name != "__init__.py"}
    compiled = {file for ending in ("pxi", "pyx", "h") for file in (ROOT / "cext").rglob(f"*.{ending}")}
    return {str(file.relative_to(ROOT)) for file in python | compiled} - WRITTEN_BY_SETUP


def named() -> dict[str, list[str]]:
    """Return the files in the pages' tables, each with the pages that name it."""
    found: dict[str, list[str]] = defaultdict(list)
    for page in sorted(PAGES.glob("*.md")):
        folder = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            if head := HEAD.match(line):
                folder = head[1]
            elif not line.startswith("|"):
                folder = ""
            elif folder and (row := ROW.match(line)):
                found[folder + row[1]].append(page.name)
    return found


def test_each_file_is_on_exactly_one_page() -> None:
    pages = named()
    assert len(pages) > 300, "this test finds the tables"
    missing, gone = files() - pages.keys(), pages.keys() - files()
    assert not missing, f"in no table of docs/architecture: {sorted(missing)}"
    assert not gone, f"in a table of docs/architecture, and not in the tree: {sorted(gone)}"
    twice = {file: on for file, on in pages.items() if len(on) > 1}
    assert not twice, f"in more than one table: {twice}"


def test_pages_name_no_path_that_is_missing() -> None:
    gone = [
        f"{page.name}: {path}"
        for page in (OVERVIEW, *sorted(PAGES.glob("*.md")))
        for text in [page.read_text(encoding="utf-8")]
        for path in (*PATH.findall(text), *(f"tests/{path}" for path in TEST.findall(text)))
        if not any(ROOT.glob(path.rstrip("/")))
    ]
    assert not gone, "\n".join(gone)


def test_table_cells_are_short_enough_to_read() -> None:
    long = [
        f"{page.name}: {cell.strip()}"
        for page in (OVERVIEW, *sorted(PAGES.glob("*.md")))
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
        for cell in line.split("|")
        if len(cell.strip()) > MOST_CHARACTERS
    ]
    assert not long, f"cells of more than {MOST_CHARACTERS} characters: {long}"


def test_the_overview_links_each_page() -> None:
    linked = set(re.findall(r"\]\(architecture/([\w.-]+)\)", OVERVIEW.read_text(encoding="utf-8")))
    assert linked == {page.name for page in PAGES.glob("*.md")}


def test_each_test_file_is_in_the_list_of_tests() -> None:
    tests = ROOT / "tests"
    listed: set[str] = set()
    for line in (tests / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and (tests / cells[1]).is_dir() and cells[1]:
            for name in cells[2].split(", "):
                found = {str(file.relative_to(tests)) for file in tests.glob(f"{cells[1]}/test_{name}.py")}
                assert found, f"tests/README.md names {cells[1]}/test_{name}.py, which is not there"
                listed |= found
    there = {str(file.relative_to(tests)) for file in tests.glob("*/test_*.py")}
    assert there <= listed, f"not in tests/README.md: {sorted(there - listed)}"
