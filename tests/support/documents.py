"""Finds the code blocks of README.md, CONTRIBUTING.md and docs/, and runs them as a reader would.

`shell` and `python` blocks are commands to run; blocks of any other language are text. If a block cannot run in a test,
a comment right above it says why: ``<!-- not run here: needs a GPU -->``.
"""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.harness import ROOT, environment

DOCUMENTS: Final = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST_CLUSTER: Final = ROOT / "docs" / "first-cluster.md"  # starts servers, so a test of its own runs it
LANGUAGES: Final = {"shell", "python"}
_FENCE: Final = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_REASON: Final = re.compile(r"<!-- not run here: ((?:(?!-->).)+?) -->\s*\Z", re.DOTALL)
# Matches commands that a reader would paste into a shell. A block with matching text must have the language `shell`.
_PROGRAMS: Final = r"kvstore|kvstore-server|pip|make|vllm|docker|kubectl|python|scripts/\S+"
_COMMAND: Final = re.compile(rf"^\$?\s*({_PROGRAMS}) [\w'./-]", re.MULTILINE)
RUN_S: Final = 120.0


@dataclass(frozen=True)
class Block:
    """One fenced block. `line`: the line of its opening fence in the file."""

    file: Path
    line: int
    language: str
    text: str
    reason: str  # the reason why the block is not run; empty if it is run

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in LANGUAGES and not self.reason

    @property
    def looks_like_commands(self) -> bool:
        return bool(_COMMAND.search(self.text))


def blocks_of(file: Path) -> list[Block]:
    text = file.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        reason = _REASON.search(text[: fence.start()])
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(file, line, fence[1], fence[2], " ".join(reason[1].split()) if reason else ""))
    return found


class Reader:
    """Runs the blocks of one document in order, in a folder of its own.

    `places`: text of the document, such as a port or a folder that the test may not use -> its replacement.
    """

    def __init__(self, folder: Path, endpoint: str, places: Mapping[str, str]) -> None:
        self._folder = folder
        self._places = dict(places)
        programs = folder / "bin"
        programs.mkdir()
        # A server starts normally, but its shards are forks.
        for name, module in (("kvstore", "kvstore_cli"), ("kvstore-server", "tests.support.forked kvstore --")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        inherited = environment()
        path = f"{programs}:{inherited['PATH']}"
        self._environment = environment(PATH=path, KVSTORE_ENDPOINT=endpoint, COLUMNS="80")

    def run(self, block: Block) -> None:
        """Run a block. Raises `AssertionError` with its output if it fails."""
        text = block.text
        for said, here in self._places.items():
            text = text.replace(said, here)
        if block.language == "python":
            command = [sys.executable, "-W", "error", "-c", text]
        else:
            command = ["bash", "-e", "-u", "-o", "pipefail", "-c", text]
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert done.returncode == 0, f"{block} ended with {done.returncode}:\n{text}\n---- printed:\n{done.stdout}"
