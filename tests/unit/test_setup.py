"""What a build reports if it cannot compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import ROOT

pytest.importorskip("Cython")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Copy the part of a checkout that the first lines of setup.py need."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(ROOT / "cext" / "policies", tmp_path / "cext" / "policies")
    (tmp_path / "kvstore").mkdir()
    return tmp_path


def test_without_a_compiler_one_line_says_what_to_install(sources: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "bdist_wheel"],
        cwd=sources,
        env={**os.environ, "PATH": str(sources), "CC": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "kvstore needs a C compiler: there is no no-such-compiler; on Debian: apt-get install gcc python3-dev"
    ]


def test_steps_that_compile_nothing_need_no_compiler(sources: Path) -> None:
    """For example, pip asks for the metadata before a build. Here the command fails only because the sources are
    missing."""
    done = subprocess.run(
        [sys.executable, "setup.py", "egg_info"],
        cwd=sources,
        env={**os.environ, "PATH": str(sources), "CC": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "C compiler" not in done.stdout + done.stderr
    assert "_cext.pyx" in done.stdout + done.stderr
