"""Finds out whether the code of some paths has changed since a commit.

A change of a comment, a docstring, a blank line, or the text of an error (`raise`) or log line (`log.`) does not count.
It cannot change a measured time, so these texts may be improved without a new measurement. Every other change of a
Python or Cython file counts, and so does any change of another file.
"""

from __future__ import annotations

import functools
import io
import subprocess
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
CODE: Final = (".py", ".pyx", ".pxi", ".pxd")
LAYOUT: Final = (tokenize.COMMENT, tokenize.NL)
F_STRING_BEGINS: Final = getattr(tokenize, "FSTRING_START", None)  # before Python 3.12, an f-string is one STRING
F_STRING_ENDS: Final = getattr(tokenize, "FSTRING_END", None)


def changed_since(measured: Mapping[str, Any], paths: Sequence[str]) -> bool | None:
    """Return whether the code of any of these paths differs from `measured`, a result of `rig.commit`; None if that is
    unknown."""
    if not paths:
        return None
    before = measured.get("objects")
    if before is None or set(before) != set(paths):
        if git("cat-file", "-e", f"{measured['id']}^{{commit}}") is None:
            return None
        before = objects(paths, measured["id"])
    if git("status", "--porcelain", "--untracked-files=no", "--", *paths):
        return True
    found = [_differ(path, before[path], after) for path, after in objects(paths).items()]
    return True if True in found else None if None in found else False


def objects(paths: Sequence[str], commit: str = "HEAD") -> dict[str, str]:
    """Return git's ids of folders and files in a commit; an id is empty if the path is not in it."""
    return {path: git("rev-parse", "--verify", "--quiet", f"{commit}:{path}") or "" for path in paths}


def git(*arguments: str) -> str | None:
    """Return the output of git; None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def _differ(path: str, before: str, after: str) -> bool | None:
    """Return whether the code differs between two of git's ids of a path; None if this clone lacks one of them."""
    if before == after or not before or not after:
        return before != after
    old, new = _files(path, before), _files(path, after)
    if old is None or new is None:
        return None
    if old.keys() != new.keys():
        return True
    return any(old[name] != new[name] and _code(name, old[name]) != _code(name, new[name]) for name in old)


def _files(path: str, found: str) -> dict[str, str] | None:
    """Return the files of a folder or file with git's id `found`, each with its id; None if this clone lacks it."""
    kind = git("cat-file", "-t", found)
    if kind is None:
        return None
    if kind == "blob":
        return {path: found}
    listed = (git("ls-tree", "-r", "-z", found) or "").split("\0")
    return {line.split("\t", 1)[1]: line.split()[2] for line in listed if line}


@functools.cache
def _code(name: str, found: str) -> tuple[str, ...]:
    """Return the code of a Python or Cython file, or git's id of any other file."""
    text = git("cat-file", "blob", found) if name.endswith(CODE) else None
    if text is None:
        return (found,)
    try:
        return tuple(code_of(text))
    except (tokenize.TokenError, SyntaxError):
        return (found,)


def code_of(text: str) -> Iterator[str]:
    """Yield the tokens of a Python or Cython text that can cost time. Layout is left out, except indentation."""
    begins, says = True, False  # whether the statement has just begun, and whether it raises or logs
    nested = 0  # the number of f-strings of a raise or log statement around the token
    waiting = ""  # a text at the beginning of a statement; it is a docstring if the statement ends after it
    for token in tokenize.generate_tokens(io.StringIO(text + "\n").readline):
        if token.type in LAYOUT:
            continue
        if token.type == tokenize.NEWLINE:
            if not begins and not waiting:
                yield "\n"
            begins, says, waiting = True, False, ""
            continue
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            yield "in" if token.type == tokenize.INDENT else "out"
            continue
        if begins and token.type == tokenize.STRING:
            waiting, begins = waiting + token.string, False
            continue
        if waiting:
            yield waiting
            waiting = ""
        says = says or (begins and token.string in ("raise", "log", "logger"))
        begins = False
        nested += says and token.type == F_STRING_BEGINS
        if not (says and (nested or token.type == tokenize.STRING)):
            yield token.string
        nested -= says and token.type == F_STRING_ENDS
