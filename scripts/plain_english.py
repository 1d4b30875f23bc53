"""Finds some kinds of sentences that are hard to read, and checks that there are no more of them than before.

    python scripts/plain_english.py              compare with scripts/plain_english.json; status 1 if a count is higher
    python scripts/plain_english.py --write      record the counts; only lower ones, unless --raise is given
    python scripts/plain_english.py --show PATH  every finding in a file or folder

Three things are counted for each folder: *vague* (words of `VAGUE`, and `who` for a process), *long* (sentences of over
30 words) and *wide* (table cells of over 120 characters). Docstrings, comments, error messages, log lines and Markdown
are searched. Error messages and log lines, the docstrings of the public API, and README.md must have none.
CONTRIBUTING.md says how to write instead.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
RECORD: Final = ROOT / "scripts" / "plain_english.json"
FOLDERS: Final = (
    "kvstore",
    "kvstore_client",
    "kvstore_serving",
    "kvstore_cli",
    "cext",
    "benchmarks",
    "scripts",
    "tests",
)
PAGES: Final = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "tests")
WORDS: Final = 30
CELL: Final = 120
# "this many", "up to" and "this fraction" are clearer than these words.
VAGUE: Final = re.compile(
    r"\b(so (many|much|long|often|few|far as)|such an?\b(?! as)|who|whom|whoever|nobody|somebody|anybody"
    r"|in vain|as ever|under way|hear of|heard of)\b",
    re.IGNORECASE,
)
# The manual shows the docstrings of these files.
PUBLIC: Final = (
    *(f"kvstore_client/{name}.py" for name in ("client", "aio", "results", "errors", "keys", "promises", "memory")),
    *(
        f"kvstore_client/engine/{name}.py"
        for name in ("store", "guard", "lookup", "transfer_out", "transfer_in", "jobs")
    ),
)
ERRORS: Final = "errors and log lines"
API: Final = "public docstrings"
NONE: Final = (ERRORS, API, "README.md")  # these must have no findings
LOGS: Final = {"debug", "info", "warning", "error", "exception", "critical"}
FAILS: Final = {"fail", "refuse", "problem", "Misfit", "BadParameter", "UsageError"}


class Finding(NamedTuple):
    """One thing to repair. `where`: the folder, or one of `NONE`."""

    where: str
    kind: str
    file: str
    line: int
    text: str


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences of plain text, each with the number of the line in which it begins, from 0. Code counts as a
    word."""
    text = re.sub(r"``[^`]+``|`[^`]+`", lambda code: "x" + "\n" * code[0].count("\n"), text)
    line = 0
    for block in re.split(r"(\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.|\w[\w ,`.]*: )))", text):
        at = line
        for sentence in re.split(r"(?<=[.!?])[\s)\"*]+(?=[A-Z`\"(\[x*])", block):
            if sentence.strip():
                yield at + len(re.match(r"\n*", sentence)[0]), " ".join(sentence.split())  # type: ignore[index]
            at += sentence.count("\n")
        line += block.count("\n")


def in_prose(text: str, where: str, file: str, first: int) -> Iterator[Finding]:
    for offset, sentence in sentences(text):
        line = first + offset
        for match in VAGUE.finditer(sentence):
            yield Finding(where, "vague", file, line, f"{match[0]}: {sentence[:110]}")
        if len(words := re.findall(r"[\w'/-]*[A-Za-z][\w'/-]*", sentence)) > WORDS:
            yield Finding(where, "long", file, line, f"{len(words)} words: {sentence[:90]} …")


def of_python(path: Path, where: str) -> Iterator[Finding]:
    file, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                literal = node.body[0].value  # type: ignore[attr-defined]
                private = isinstance(node, ast.Module) or node.name.startswith("_")
                place = API if file in PUBLIC and not private else where
                yield from in_prose(literal.value, place, file, literal.lineno)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from in_message(node.exc, file)
        elif isinstance(node, ast.Call) and (
            (isinstance(node.func, ast.Attribute) and node.func.attr in LOGS)
            or (isinstance(node.func, ast.Name) and node.func.id in FAILS)
        ):
            yield from in_message(node, file)
    yield from of_comments(source, where, file)


def in_message(call: ast.Call, file: str) -> Iterator[Finding]:
    """Yield the findings in those strings of a call that a user reads."""
    if file.startswith(("tests/", "benchmarks/", "scripts/")):
        return
    for argument in call.args:
        pieces = []
        for node in ast.walk(argument):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces.append(node.value)
        if pieces and any(" " in piece.strip() for piece in pieces):
            yield from in_prose(" x ".join(pieces), ERRORS, file, call.lineno)


def of_comments(source: str, where: str, file: str) -> Iterator[Finding]:
    """Yield the findings in comments. Comments on neighbouring lines are one text."""
    text, first, last = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(type:|noqa|ruff:|pragma|mypy:|!|-{3})", token.string):
            continue
        line, alone = token.start[0], not token.line[: token.start[1]].strip()
        if text and alone and line == last + 1:
            text += "\n" + token.string.lstrip("# ")
        else:
            yield from in_prose(text, where, file, first)
            text, first = token.string.lstrip("# "), line
        last = line if alone else -1
    yield from in_prose(text, where, file, first)


def of_cython(path: Path, where: str) -> Iterator[Finding]:
    """Yield the findings in comments and docstrings, which are found by their marks.

    The C code of ``cdef extern`` blocks is also between the marks of a docstring, and is left out.
    """
    file, text, first = str(path.relative_to(ROOT)), "", 0
    inside = False
    source = re.sub(
        r'(cdef extern from \*[^\n]*:\n\s*""")(.*?)(""")',
        lambda block: block[1] + "\n" * block[2].count("\n") + block[3],
        path.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    for number, line in enumerate(source.splitlines(), start=1):
        stripped = line.strip()
        comment = stripped.startswith("#") and not inside
        if comment or inside or stripped.startswith('"""'):
            if not text:
                first = number
            text += ("\n" if text else "") + stripped.strip("#").replace('"""', "")
            if not comment and stripped.count('"""') == 1:
                inside = not inside
            if comment or inside:
                continue
        yield from in_prose(text, where, file, first)
        text = ""
    yield from in_prose(text, where, file, first)


def of_page(path: Path, where: str) -> Iterator[Finding]:
    """Yield the findings in prose and tables of a Markdown page, without code blocks."""
    file, lines = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8").splitlines()
    kept, code = [], False
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith(("```", "~~~")):
            code = not code
        prose = "" if code or line.lstrip().startswith(("```", "~~~", "<", "#", "|", "![")) else line
        kept.append(re.sub(r"\]\([^)]*\)", "]", prose))
        if line.startswith("|") and not code:
            for cell in re.split(r"(?<!\\)\|", line.strip("| ")):
                shown = re.sub(r"\]\([^)]*\)", "]", cell.strip())
                if len(shown) > CELL:
                    yield Finding(where, "wide", file, number, f"{len(shown)} characters: {shown[:80]} …")
                for match in VAGUE.finditer(re.sub(r"`[^`]*`", "x", shown)):
                    yield Finding(where, "vague", file, number, f"{match[0]}: {shown[:110]}")
    yield from in_prose("\n".join(kept), where, file, 1)


def folder_of(path: Path) -> str:
    """Return the folder for which a file's findings are counted, with at most two levels. For a file at the top, return
    its name."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:-1][:2]) or parts[0]


def findings() -> Iterator[Finding]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from of_python(path, folder_of(path))
    for path in sorted((ROOT / "cext").rglob("*.px[id]")):
        yield from of_cython(path, folder_of(path))
    for name in PAGES:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*.md")):
            yield from of_page(path, folder_of(path))


def compare(counts: dict[str, Counter[str]], recorded: dict[str, dict[str, int]]) -> list[str]:
    """Return a sentence for each count that is higher than the recorded one."""
    worse = []
    for where, found in sorted(counts.items()):
        for kind, number in sorted(found.items()):
            most = 0 if where in NONE else recorded.get(where, {}).get(kind, 0)
            if number > most:
                worse.append(f"{where}: {number} {kind}; at most {most} are allowed")
    return worse


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", metavar="PATH", help="print the findings in this file or folder, or of this kind")
    parser.add_argument("--write", action="store_true", help="record the counts that are lower")
    parser.add_argument("--raise", dest="higher", action="store_true", help="with --write: record higher ones as well")
    given = parser.parse_args(argv)
    found = list(findings())
    if given.show:
        for each in found:
            if each.file.startswith(given.show.rstrip("/")) or given.show in (each.where, each.kind):
                print(f"{each.file}:{each.line}: {each.kind}: {each.text}")
        return 0
    counts: dict[str, Counter[str]] = {}
    for each in found:
        counts.setdefault(each.where, Counter())[each.kind] += 1
    recorded = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    worse = compare(counts, recorded)
    if given.write:
        kept = {
            where: {
                kind: number if given.higher else min(number, recorded.get(where, {}).get(kind, number))
                for kind, number in sorted(kinds.items())
            }
            for where, kinds in sorted(counts.items())
            if where not in NONE
        }
        RECORD.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        return 0
    for line in worse:
        print(line)
    if worse:
        print("`python scripts/plain_english.py --show FOLDER` lists them; CONTRIBUTING.md says how to write instead.")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
