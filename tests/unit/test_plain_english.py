"""The program that searches for hard sentences finds them in each kind of file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from scripts import plain_english

LONG = " ".join(["word"] * 31) + "."


def kinds(found: list[plain_english.Finding]) -> list[tuple[str, str, int]]:
    return [(each.where, each.kind, each.line) for each in found]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    monkeypatch.setattr(plain_english, "RECORD", tmp_path / "record.json")
    (tmp_path / "kvstore_client").mkdir()
    return tmp_path


def test_docstrings_comments_and_messages_are_checked(tree: Path) -> None:
    path = tree / "kvstore_client" / "client.py"
    path.write_text(
        f'"""Who reads this."""\n# So many\n# blocks wait.\nclass Client:\n    """A client.\n\n    {LONG}\n    """\n'
        'def call():\n    raise ValueError(f"{1} of nobody")\nsize = 3  # such a size; `so long` is code\n'
    )
    found = kinds(list(plain_english.of_python(path, "kvstore_client")))
    assert sorted(found) == [
        (plain_english.ERRORS, "vague", 10),
        ("kvstore_client", "vague", 1),
        ("kvstore_client", "vague", 2),
        ("kvstore_client", "vague", 11),
        (plain_english.API, "long", 7),
    ]


def test_pages_are_checked_without_their_code(tree: Path) -> None:
    path = tree / "page.md"
    path.write_text(
        f"# Who\n\nPlain words, with `so many` of code.\n\n```\nwho\n```\n\n* {LONG}\n\n| a | {'x' * 121} |\n"
        "| b | so long |\n"
    )
    found = kinds(list(plain_english.of_page(path, "docs")))
    assert sorted(found) == [("docs", "long", 9), ("docs", "vague", 12), ("docs", "wide", 11)]


def test_cython_files_are_checked(tree: Path) -> None:
    path = tree / "kvstore_client" / "fast.pxi"
    c_code = 'cdef extern from *:\n    """\n    /* who */\n    """\n'
    path.write_text(c_code + 'cdef int f():\n    """Such a part."""\n    # so often\n    # it is read\n    return 1\n')
    found = kinds(list(plain_english.of_cython(path, "cext")))
    assert found == [("cext", "vague", 6), ("cext", "vague", 7)]


def test_a_sentence_of_thirty_words_is_not_too_long(tree: Path) -> None:
    text = "Word " + LONG.removeprefix("word word ")
    assert not list(plain_english.in_prose(text, "docs", "page.md", 1))


def test_a_count_may_only_fall() -> None:
    counts = {"docs": Counter(vague=3, long=1), "README.md": Counter(vague=1)}
    assert plain_english.compare(counts, {"docs": {"vague": 3, "long": 2}, "README.md": {"vague": 5}}) == [
        "README.md: 1 vague; at most 0 are allowed"
    ]
    assert len(plain_english.compare(counts, {})) == 3


def test_a_higher_count_is_recorded_only_on_request(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_english, "FOLDERS", ("kvstore_client",))
    (tree / "kvstore_client" / "a.py").write_text('"""Nobody."""\n')
    plain_english.RECORD.write_text('{"kvstore_client": {"vague": 0}}')
    assert plain_english.main([]) == 1
    assert plain_english.main(["--write"]) == 0
    assert json.loads(plain_english.RECORD.read_text()) == {"kvstore_client": {"vague": 0}}
    assert plain_english.main(["--write", "--raise"]) == 0 and plain_english.main([]) == 0
