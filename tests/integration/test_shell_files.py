"""The manual pages and the completion scripts of both commands, processed by groff, bash and zsh."""

from __future__ import annotations

import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.node.config import ServerConfig
from kvstore.node.settings import describe
from tests.support import forked
from tests.support.harness import ROOT, environment

MODULES = {"kvstore": "kvstore_cli", "kvstore-server": "kvstore"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("man")
    command = [sys.executable, str(ROOT / "scripts" / "shell_files.py"), "man", str(folder)]
    subprocess.run(command, env=environment(), check=True)
    return folder


def test_every_command_has_a_page_without_groff_warnings(pages: Path) -> None:
    names = {page.stem for page in pages.iterdir()}
    assert {"kvstore", "kvstore-server", "kvstore-top", "kvstore-cluster-status", "kvstore-plan-search"} <= names
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed: scripts/programs.sh installs it")
    files = sorted(map(str, pages.iterdir()))
    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_servers_page_has_every_setting(pages: Path) -> None:
    text = (pages / "kvstore-server.1").read_text(encoding="utf-8").replace("\\-", "-")
    for each in describe(ServerConfig):
        assert (f"[[{each.name}]]" if each.setting.file_only else f"\\fB{each.flag}") in text, each.name
    assert "--check-config" in text and "KVSTORE_SERVER_CONFIG" in text
    assert "kvstore verify --endpoint" in (pages / "kvstore-verify.1").read_text().replace("\\-", "-")


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """A function that returns bash's completions of a command line, from the function that the command's own script
    defines."""
    programs = tmp_path_factory.mktemp("programs")
    scripts = []
    for name, module in MODULES.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        program.chmod(0o755)
        shown = forked.run(
            module, "--show-completion", "bash", env=environment(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
        )
        scripts.append(shown.stdout)

    def complete(line: str) -> list[str]:
        words = line.split(" ")
        function = f"_{words[0].replace('-', '_')}_completion"
        asked = "\n".join(
            [
                *scripts,
                f"[[ $(complete -p {words[0]}) == *' {function} '* ]]",
                f"COMP_WORDS=({shlex.join(words[:-1])} {shlex.quote(words[-1])})",
                f"COMP_CWORD={len(words) - 1}",
                f"{function} {words[0]}",
                'printf "%s\\n" "${COMPREPLY[@]}"',
            ]
        )
        path = f"{programs}:{environment()['PATH']}"
        script = programs / "asked.sh"
        script.write_text(asked, encoding="utf-8")
        done = subprocess.run(
            ["bash", "-e", str(script)], env=environment(PATH=path), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout.split()

    return complete


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("kvstore to", ["top"]),
        ("kvstore cluster st", ["status"]),
        ("kvstore-server --check", ["--check-config"]),
        ("kvstore-server --log-format ", ["text", "json"]),
    ],
)
def test_bash_completes_commands_options_and_values(
    complete: Callable[[str], list[str]], line: str, completions: list[str]
) -> None:
    assert complete(line) == completions


def test_zsh_completes_at_the_first_tab(tmp_path: Path) -> None:
    """At the first tab, zsh loads the file as a function and expects completions from it."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed: scripts/programs.sh installs it")
    script = runpy.run_path(str(ROOT / "scripts" / "shell_files.py"))["completion"]("kvstore", "zsh")
    (tmp_path / "_kvstore").write_text(script, encoding="utf-8")
    program = tmp_path / "kvstore"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvstore_cli "$@"\n')
    program.chmod(0o755)
    asked = """
        fpath=($1 $fpath); autoload -U _kvstore
        compdef() { :; }
        _arguments() { print -r -- "$@"; }
        words=(kvstore to); CURRENT=2
        _kvstore
    """
    path = f"{tmp_path}:{environment()['PATH']}"
    command = ["zsh", "-f", "-c", asked, "zsh", str(tmp_path)]
    done = subprocess.run(command, env=environment(PATH=path), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.startswith('*: :(("top":')
