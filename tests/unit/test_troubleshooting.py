"""docs/troubleshooting.md has a row for each alert and each warning in the log, and quotes log lines as in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.support.deployment import alerts
from tests.support.harness import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("kvstore", "kvstore_client", "kvstore_serving", "kvstore_cli")
GAP = "\0"  # a part of a message that is filled in later
# %-formats of logging, and `{}` in messages that are filled in later.
FORMAT = re.compile(r"%[-+0-9.]*[sdrgfx]|%\([a-z_]+\)s")
LEVELS = ("warning", "error", "critical")  # `exception` is a bug of ours: one row says what to do with a traceback
# Lines without a row: their text is another message that has a row, or a count that follows a line with a row.
WITHOUT_ROW = (
    "%s",  # an error that has a row of its own
    "kvstore: %s",  # `explain_mismatch`: it names both namespaces and what differs
    "client %s: %s",  # a frame that is no ZMTP
    "request %s: %s",  # an engine failed: the line names it and says how
    "kvstore: closing the client failed: %r",
    "kvstore: %r was counted but is not a known metric, so it is not exported",  # a bug that another test finds
)


def rows(section: str) -> Iterator[list[str]]:
    """Return the cells of each row of the tables below a heading."""
    text = PAGE.read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n## {section}\n")
    assert found, f"{PAGE.name} has no section {section!r}"
    for line in rest.partition("\n## ")[0].splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| you see", "| alert")):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def quoted() -> list[str]:
    """Return the messages that the first cells quote, in the sections about messages of the code."""
    sections = re.findall(r"^## (Log lines .+|The page .+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(sections) >= 8, "the search itself works"
    return [text for section in sections for row in rows(section) for text in re.findall(r"`([^`]+)`", row[0])]


def text_of(node: ast.expr) -> str | None:
    """Return a string of the code, with `GAP` for the parts that are filled in later, or None if the expression is no
    string."""
    if isinstance(node, ast.Constant):
        return FORMAT.sub(GAP, node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else GAP
            for part in node.values
        )
    return None


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every file of the shipped packages."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def strings() -> set[str]:
    """Return every string in the shipped packages."""
    nodes = (node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.expr))
    return {text for text in map(text_of, nodes) if text}


def logged() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each log line above `info` in the code."""
    for file, tree in trees().items():
        if not file.startswith(("kvstore/", "kvstore_client/", "kvstore_serving/proxy/")):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LEVELS
                and "log" in ast.unparse(node.func.value).lower()
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                yield f"{file}:{node.lineno}", str(node.args[0].value)


def matches(quote: str, text: str) -> bool:
    """Whether the pieces of a quote, which `…` separates, occur in this order in a text of the code."""
    pieces = quote.split("…")
    if max(pieces, key=len) not in text:
        return False
    return re.search(".*".join(map(re.escape, pieces)), text, re.DOTALL) is not None


def test_every_alert_has_a_row() -> None:
    named = {name for row in rows("Alerts") for name in re.findall(r"`(KVStore\w+)`", row[0])}
    assert named == {rule["alert"] for rule in alerts()}


def test_each_quoted_line_is_written_by_the_code() -> None:
    code = strings()
    for quote in quoted():
        assert len(quote.replace("…", "").strip()) >= 8, f"{quote!r} would match anything"
        assert any(matches(quote, text) for text in code), f"nothing in the code writes {quote!r}"


def test_each_logged_warning_and_error_has_a_row() -> None:
    lines = list(logged())
    assert len(lines) > 100, "the search itself works"
    quotes = quoted()
    missing = [
        f"{where}: {text}"
        for where, text in lines
        if text not in WITHOUT_ROW and not any(matches(quote, FORMAT.sub(GAP, text)) for quote in quotes)
    ]
    assert not missing, "\n".join(missing)


def test_no_cell_is_long() -> None:
    for section in re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        for row in rows(section):
            for cell in row:
                shown = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", cell)
                assert len(shown) <= 120, f"{len(shown)} characters: {shown}"
