"""Every program that tests, benchmarks, examples and scripts call is in requirements/programs.txt."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.harness import ROOT, environment
from tests.support.programs import LISTS, is_allowed, listed, programs_of, words

SCRIPTS = [*sorted(ROOT.glob("scripts/*.sh")), ROOT / ".ci" / "run", *sorted(ROOT.glob("docker/*.sh"))]


def recipes() -> str:
    """Return the commands of the Makefile, as a shell reads them."""
    lines = re.findall(r"^\t[@-]?(.*(?:\\\n.*)*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return re.sub(r"\$\(\w+\)", "", "\n".join(lines)).replace("$$", "$")


def calls(file: Path) -> Iterator[list[str]]:
    """Yield the command lines in a Python file: lists that begin with a text and are passed to subprocess or assigned
    to a name that ends in `command`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        given: ast.expr | None = None
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).startswith("subprocess."):
            given = node.args[0]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("command"):
            given = node.value
        if isinstance(given, ast.List) and given.elts and isinstance(given.elts[0], ast.Constant):
            yield [each.value if isinstance(each, ast.Constant) else "" for each in given.elts]


def test_scripts_call_only_listed_programs() -> None:
    called = {word: file.name for file in SCRIPTS for word in words(file.read_text(encoding="utf-8"))}
    called |= dict.fromkeys(words(recipes()), "Makefile")
    assert {"awk", "flock", "mktemp"} <= set(called), "the scripts are not read"
    unlisted = {word: file for word, file in called.items() if not is_allowed(word)}
    assert not unlisted, f"not in requirements/programs.txt: {unlisted}"


def test_python_files_call_only_listed_programs() -> None:
    folders = (
        "benchmarks",
        "examples",
        "kvstore",
        "kvstore_cli",
        "kvstore_client",
        "kvstore_serving",
        "scripts",
        "tests",
    )
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if file.name != Path(__file__).name]
    unlisted = {
        program: str(file.relative_to(ROOT))
        for file in files
        for command in calls(file)
        for program in programs_of(command)
        if program and not is_allowed(program)
    }
    assert not unlisted, f"not in requirements/programs.txt: {unlisted}"


def test_each_program_is_listed_once_with_a_package() -> None:
    lines = [line.split() for each in LISTS for line in each.read_text(encoding="utf-8").splitlines()]
    given = [line for line in lines if line and not line[0].startswith("#")]
    assert all(len(line) == 2 for line in given) and len(given) == len(listed())


@pytest.mark.parametrize(
    ("command", "programs"),
    [
        (["ip", "link"], ["ip"]),
        (["ip", "netns", "exec", "a", "madeup", "x"], ["ip", "madeup"]),
        (["nsenter", "--target=1", "--net", "unshare", "--user", "setpriv", "--x", "--", "madeup"], 4),
        (["unshare", "--mount", "sh", "-c", "set -e\nmadeup x && exec other"], ["unshare", "sh", "madeup", "other"]),
    ],
)
def test_a_command_within_a_command_is_found(command: list[str], programs: list[str] | int) -> None:
    found = list(programs_of(command))
    assert found == programs if isinstance(programs, list) else (len(found), found[-1]) == (programs, "madeup")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("a=1 one two | three; four && five || ! six # seven", ["one", "three", "four", "five", "six"]),
        ("if one; then two; else three; fi\nfour() { five; }\nfour", ["one", "two", "three", "five"]),
        ('echo "$(one two)" "three"\n', ["one"]),
        ("one 2> >(two -v) >/dev/null <three", ["one", "two"]),
        ("for x in one two; do three; done", ["three"]),
        (
            "x=$(one | two)\nflock lock three\nfind . -print0 | xargs -0 four",
            ["one", "two", "flock", "three", "find", "xargs", "four"],
        ),
        ("[[ one == two ]] || ((three > 4)) || five 'six; seven'", ["five"]),
    ],
)
def test_a_scripts_commands_are_found(script: str, found: list[str]) -> None:
    assert sorted(words(script)) == sorted(found)


def test_a_test_that_calls_an_unlisted_program_fails(tmp_path: Path) -> None:
    """Run two tests in a new pytest process with the plugin that also checks this test."""
    file = tmp_path / "test_two.py"
    file.write_text(
        "import contextlib, subprocess\n"
        "def test_made_up():\n"
        "    with contextlib.suppress(FileNotFoundError):\n"
        "        subprocess.run(['made-up-program', '--version'])\n"
        "def test_listed():\n"
        "    subprocess.run(['id', '-u'], check=True)\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.support.programs",
        "-p",
        "no:cacheprovider",
        str(file),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and "the test called made-up-program, not in" in done.stdout, done.stdout
    assert "2 passed, 1 error" in done.stdout, done.stdout
