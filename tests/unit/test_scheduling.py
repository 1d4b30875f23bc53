"""Tests that measure time run last, and not too many of them at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.harness import ROOT
from tests.support.scheduling import EXCLUSIVE_WORKERS

WORKERS = EXCLUSIVE_WORKERS + 1
OTHERS = """
import pytest, time
from pathlib import Path

@pytest.mark.parametrize("number", range(6))
def test_other(number):
    with Path({log!r}).open("a") as log:
        print("begins", "other", file=log, flush=True)
        time.sleep(0.05)
        print("ends", "other", file=log, flush=True)
"""
EXCLUSIVE = OTHERS.replace("other", "exclusive").replace("@", "pytestmark = pytest.mark.exclusive\n\n@", 1)


def test_exclusive_tests_run_last_and_few_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for folder in ("chaos", "integration", "unit"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        for number in range(2):
            (tmp_path / f"tests/{folder}/test_other_{folder}_{number}.py").write_text(OTHERS.format(log=str(log)))
            exclusive = tmp_path / f"tests/{folder}/test_exclusive_{folder}_{number}.py"
            exclusive.write_text(EXCLUSIVE.format(log=str(log)))
    options = ["-p", "tests.support.scheduling", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-n", str(WORKERS), "--dist", "loadgroup", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "72 passed" in done.stdout, done.stdout + done.stderr
    began = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("begins")]
    late = began[began.index("exclusive") :].count("other")
    assert late <= EXCLUSIVE_WORKERS, f"{late} others after the first exclusive one: each worker may keep one"
    running = most = 0
    for line in log.read_text().splitlines():
        running += {"begins exclusive": 1, "ends exclusive": -1}.get(line, 0)
        most = max(most, running)
    assert most <= EXCLUSIVE_WORKERS
