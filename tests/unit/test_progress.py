"""What a run of all tests prints about its progress."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import progress
from tests.support.harness import ROOT

TESTS = """
import pytest

@pytest.mark.parametrize("word", ["a b"])
def test_that_fails(word):
    assert word == "another"

def test_that_passes():
    pass
"""


def test_a_failure_is_reported_at_once_with_its_repeat_command(tmp_path: Path) -> None:
    (tmp_path / "test_made_up.py").write_text(TESTS)
    options = ["-p", "tests.support.scheduling", "-p", "tests.support.progress", "-p", "no:cacheprovider"]
    workers = ["-n", "1", "--dist", "loadgroup", f"--rootdir={tmp_path}", "--confcutdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *workers, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    at_once, _, at_the_end = done.stdout.partition("= FAILURES =")
    assert at_the_end, done.stdout + done.stderr
    assert "test_made_up.py::test_that_fails[a b] (call): AssertionError: assert 'a b' == 'another'" in at_once
    assert "  alone: scripts/run.sh full python -m pytest 'test_made_up.py::test_that_fails[a b]'" in at_once


@pytest.mark.parametrize(
    ("done_s", "elapsed_s", "said"),
    [
        (10, 60, "10% of the work in 1.0 min, about 9 min left"),
        (90, 600, "90% of the work in 10.0 min, about 67 s left"),
        (0, 5, "0% of the work in 0.1 min, about 0 s left"),
    ],
)
def test_the_estimate_follows_the_machines_speed(done_s: float, elapsed_s: float, said: str) -> None:
    assert progress.estimate(done_s, 100, elapsed_s) == said


def test_tests_are_weighted_by_folder() -> None:
    slow = {"tests/engine/test_tier.py::test_slow"}
    unit, engine, slow_one = (
        progress.expected_s(f"tests/{nodeid}", slow)
        for nodeid in ("unit/test_a.py::test_b", "engine/test_tier.py::test_b", "engine/test_tier.py::test_slow[a]")
    )
    assert unit < engine < slow_one
