"""`make gpu-test` where there is no device says what it lacks, and makes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import ROOT, environment


def run(python: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "gpu_test.sh")],
        check=False,
        env=environment(PYTHON=python, KVSTORE_CACHE=str(cache)),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("has_torch", [False, True])
def test_an_interpreter_without_a_device_is_refused(tmp_path: Path, has_torch: bool) -> None:
    folder, cache = tmp_path / "bin", tmp_path / "cache"
    folder.mkdir()
    python = folder / "python"
    torch = "cuda = type('', (), {'is_available': staticmethod(lambda: False)})\n__version__ = '2.99'\n"
    (folder / "torch.py").write_text(torch if has_torch else "raise ImportError('no torch here')\n")
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = run(str(python), cache)
    assert done.returncode == 2
    reason = "its torch 2.99 finds no CUDA device" if has_torch else "it cannot import torch (no torch here)"
    assert reason in done.stderr
    assert str(python) in done.stderr and "make gpu-test PYTHON=" in done.stderr
    assert not cache.exists()


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run(str(tmp_path / "python"), tmp_path / "cache")
    assert done.returncode == 2 and f"there is no {tmp_path / 'python'}" in done.stderr
