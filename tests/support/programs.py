"""Checks that tests and scripts call only allowed programs.

Allowed are the programs of requirements/programs.txt, image-programs.txt and arm64-programs.txt, Python, and programs
that the project itself builds or installs. An audit hook sees the calls of this process; calls made by libraries are
ignored. Shell scripts are parsed: `words` finds the words of a script that are commands.

This is a plugin of pytest, which tests/conftest.py registers. It fails a test that called an unlisted program.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

from tests.support.harness import ROOT

LIST: Final = ROOT / "requirements" / "programs.txt"
LISTS: Final = (LIST, *(ROOT / "requirements" / f"{kind}-programs.txt" for kind in ("image", "arm64")))

# Programs that run another command, which follows after their options and this many other words.
WRAPPERS: Final = {"unshare": 0, "nsenter": 0, "setpriv": 0, "xargs": 0, "env": 0, "flock": 1}
SHELLS: Final = ("sh", "bash")
OURS: Final = ("python", "python3", "kvstore", "kvstore-server")

_STANDARD: Final = sysconfig.get_path("stdlib")
_LIBRARIES: Final = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_BUILTIN_NAMES: Final = """
    . : [ [[ alias bg break builtin cd command continue declare echo eval exit export false fg getopts hash jobs kill
    let local mapfile popd printf pushd pwd read readonly return set shift shopt source test times trap true type ulimit
    umask unset wait
"""
_BUILTINS: Final = frozenset(_BUILTIN_NAMES.split())
_BEFORE_A_COMMAND: Final = frozenset(["if", "then", "else", "elif", "while", "until", "do", "!", "{", "exec", "time"])
_KEYWORDS: Final = frozenset(["fi", "done", "esac", "}", "in", "function"])


def listed() -> dict[str, str]:
    """Return the programs in the lists: program -> its package."""
    lines = [line for each in LISTS for line in each.read_text(encoding="utf-8").splitlines()]
    return dict(line.split() for line in lines if line.strip() and not line.startswith("#"))  # type: ignore[misc]


# ---- calls of this process ---------------------------------------------------------------------------------------


def programs_of(command: Sequence[str]) -> Iterator[str]:
    """Yield the programs of a command line: its first word, and the programs that this one runs."""
    if not command:
        return
    yield command[0]
    name = Path(command[0]).name
    rest = list(command[1:])
    if name == "ip" and rest[:2] == ["netns", "exec"]:
        yield from programs_of(rest[3:])
    elif name in SHELLS and "-c" in rest[:-1]:
        yield from words(rest[rest.index("-c") + 1])
    elif name in WRAPPERS:
        while rest and rest[0].startswith("-"):
            if rest.pop(0) == "--":
                break
        yield from programs_of(rest[WRAPPERS[name] :])


def is_allowed(program: str) -> bool:
    """Whether a program may be called: it is listed, belongs to Python, is installed next to Python, or was built by a
    test."""
    path = Path(program)
    if path.name in listed() or path.name in OURS:
        return True
    if path.parent == Path("."):  # a name without a folder: the virtual environment comes first on the PATH
        found = shutil.which(program)
        path = Path(found) if found else path
    ours = [sys.prefix, sys.base_prefix, tempfile.gettempdir(), str(ROOT)]
    return path.is_absolute() and any(path.is_relative_to(folder) for folder in ours)


class Watch:
    """Records forbidden programs that this project's code calls. `take` returns and forgets them."""

    def __init__(self) -> None:
        self._unlisted: list[str] = []
        sys.addaudithook(self._hear)

    def take(self) -> list[str]:
        unlisted, self._unlisted = self._unlisted, []
        return unlisted

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.system":
            command = ["sh", "-c", _text(arguments[0])]
        elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
            given = arguments[1]
            command = [_text(given)] if isinstance(given, (str, bytes)) else [_text(word) for word in given]
            command[:1] = [_text(arguments[0] or command[0])]
        else:
            return
        if not _library_calls():
            self._unlisted += [program for program in programs_of(command) if not is_allowed(program)]


def _library_calls() -> bool:
    """Whether the first caller outside the standard library is an installed package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_LIBRARIES):
            return True
        if not file.startswith((_STANDARD, "<")):
            return False
        frame = frame.f_back
    return True


def _text(word: Any) -> str:
    return word.decode(errors="replace") if isinstance(word, bytes) else str(word)


_watch = pytest.StashKey[Watch]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_watch] = Watch()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    unlisted = item.config.stash[_watch].take()
    if unlisted:
        names = ", ".join(sorted(set(unlisted)))
        pytest.fail(f"the test called {names}, not in {LIST.relative_to(ROOT)}: add the program and its package", False)


# ---- shell scripts -----------------------------------------------------------------------------------------------


def words(script: str) -> Iterator[str]:
    """Yield the words of a shell script that are commands, except variables, builtins and the script's own functions.

    Supports only the parts of the language that this project's scripts use; `case` is not supported.
    """
    functions = set(re.findall(r"^\s*([\w-]+)\(\) *\{", script, re.MULTILINE))
    for text in _without_substitutions(script):
        for word in _commands(text):
            if word not in functions and not word.isdigit() and not re.search(r"[$/=\0]", word):
                yield word


def _without_substitutions(script: str) -> Iterator[str]:
    """Yield the content of each `$(...)`, which is a script itself, and finally the script without any `$(...)`."""
    script = re.sub(r"(^|\s)#.*", r"\1", script, flags=re.MULTILINE).replace("\\\n", " ")
    at = 0
    while (at := script.find("$(", at)) >= 0:
        depth, end = 1, at + 2
        while depth:
            depth += {"(": 1, ")": -1}.get(script[end], 0)
            end += 1
        if not script.startswith("$((", at):  # `$((` is arithmetic
            yield from _without_substitutions(script[at + 2 : end - 1])
        script = f"{script[:at]}\0{script[end:]}"
    yield script


def _commands(script: str) -> Iterator[str]:
    reader = shlex.shlex(_newlines_to_semicolons(script), posix=True, punctuation_chars=True)
    reader.wordchars += "\0$[]{}!@%+,:^\\"
    reader.commenters = ""
    expected, skip_to, skip_one = True, "", False
    wraps = -1  # the number of a wrapper's words that are left before its command
    for token in reader:
        if skip_to:
            skip_to = "" if token == skip_to else skip_to
        elif skip_one and not token.endswith("("):
            skip_one = False
        elif token == "[[":
            expected, skip_to = False, "]]"
        elif token == "((":
            skip_to = "))"
        elif token.endswith("(") or token.startswith((";", "|", "&", "(", ")")):
            expected, wraps, skip_one = True, -1, False
        elif token.startswith(("<", ">")):
            skip_one = True
        elif wraps >= 0 and not token.startswith("-"):
            if wraps == 0:
                yield token
            wraps -= 1
        elif expected and token == "for":
            expected = False
        elif expected and token not in _BEFORE_A_COMMAND and not re.match(r"\w+\+?=", token):
            expected = False
            if token not in _BUILTINS and token not in _KEYWORDS:
                yield token
                wraps = WRAPPERS.get(token, -1)


def _newlines_to_semicolons(script: str) -> str:
    """Replace newlines outside quotes by semicolons; inside quotes, a newline is text."""
    parts = re.split(r"""('[^']*'|"(?:\\.|[^"\\])*")""", script, flags=re.DOTALL)
    return "".join(part if number % 2 else part.replace("\n", " ; ") for number, part in enumerate(parts))
