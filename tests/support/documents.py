"""The code blocks of README.md and docs/: found, told apart, and run as a reader would run them.

A block's language says what it is: `shell` and `python` are commands to be run, anything else is text to look at. A
block that cannot run in a test says why, in a comment right above it: ``<!-- not run here: needs a GPU -->``.
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
LANGUAGES: Final = {"shell", "python"}
_FENCE: Final = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_REASON: Final = re.compile(r"<!-- not run here: (.+?) -->\s*\Z", re.DOTALL)
# Text that a reader would paste into a shell: such a block must say that it is `shell`.
_PROGRAMS: Final = r"kvstore|kvstore-server|pip|make|vllm|docker|kubectl|python|scripts/\S+"
_COMMAND: Final = re.compile(rf"^\$?\s*({_PROGRAMS}) [\w'./-]", re.MULTILINE)
RUN_S: Final = 120.0


@dataclass(frozen=True)
class Block:
    """One fenced block. `line`: of its fence in the file."""

    file: Path
    line: int
    language: str
    text: str
    reason: str  # why it is not run; empty: it is

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

    `places`: what the document says, and what stands for it here (a port, a folder that the test may not use).
    """

    def __init__(self, folder: Path, endpoint: str, places: Mapping[str, str]) -> None:
        self._folder = folder
        self._places = dict(places)
        programs = folder / "bin"
        programs.mkdir()
        for name, module in (("kvstore", "kvstore_cli"), ("kvstore-server", "kvstore")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        inherited = environment()
        path = f"{programs}:{inherited['PATH']}"
        self._environment = environment(PATH=path, KVSTORE_ENDPOINT=endpoint, COLUMNS="80")

    def run(self, block: Block) -> None:
        """Run a block; raises `AssertionError` with what it printed when it fails."""
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
