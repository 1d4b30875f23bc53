"""Tests that measure time run last and few at a time; some workers run the engine tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.harness import ROOT
from tests.support.scheduling import EXCLUSIVE_WORKERS

WORKERS = EXCLUSIVE_WORKERS + 1
TESTS = """
import os, pytest, time
from pathlib import Path

{mark}
@pytest.mark.parametrize("number", range(6))
def test_it(number):
    worker = os.environ["PYTEST_XDIST_WORKER"]
    with Path({log!r}).open("a") as log:
        print("begins", {kind!r}, worker, file=log, flush=True)
        time.sleep(0.05)
        print("ends", {kind!r}, worker, file=log, flush=True)
"""


def run(folder: Path, kinds: dict[str, list[str]]) -> list[list[str]]:
    """Run two test files of each kind in each of its folders. Return which tests began and ended, and on which
    workers."""
    log, files = folder / "log", 0
    for kind, rooms in kinds.items():
        mark = "pytestmark = pytest.mark.exclusive" if kind == "exclusive" else ""
        for room in rooms:
            (folder / "tests" / room).mkdir(parents=True, exist_ok=True)
            for number in range(2):
                file = folder / f"tests/{room}/test_{kind}_{room}_{number}.py"
                file.write_text(TESTS.format(mark=mark, kind=kind, log=str(log)))
                files += 1
    options = ["-p", "tests.support.scheduling", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-n", str(WORKERS), "--dist", "loadgroup", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{6 * files} passed" in done.stdout, done.stdout + done.stderr
    return [line.split() for line in log.read_text().splitlines()]


def test_exclusive_tests_run_last_and_few_at_a_time(tmp_path: Path) -> None:
    rooms = ["chaos", "integration", "unit"]
    log = run(tmp_path, {"other": rooms, "exclusive": rooms})
    began = [kind for what, kind, _ in log if what == "begins"]
    late = began[began.index("exclusive") :].count("other")
    assert late <= EXCLUSIVE_WORKERS, f"{late} others after the first exclusive one: each worker may keep one"
    running = most = 0
    for what, kind, _ in log:
        running += {"begins": 1, "ends": -1}[what] * (kind == "exclusive")
        most = max(most, running)
    assert most <= EXCLUSIVE_WORKERS


def test_half_of_the_workers_run_the_engine_tests(tmp_path: Path) -> None:
    log = run(tmp_path, {"unit": ["unit"], "engine": ["engine"], "integration": ["integration", "chaos"]})
    workers = {kind: {worker for _, ran, worker in log if ran == kind} for kind in ("unit", "engine", "integration")}
    assert len(workers["engine"]) == WORKERS // 2
    assert workers["integration"] - workers["engine"], "others have begun with these"
    began = [kind for what, kind, _ in log if what == "begins"]
    assert began.index("engine") < len(began) - 1 - began[::-1].index("integration")
