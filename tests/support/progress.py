"""Prints the progress of a run of all tests, its remaining time, and each failure as soon as it happens.

A failure is printed with the command that repeats the test alone; its full text comes at the end, as usual. The
estimate of the time weighs tests by folder, because an engine test takes much longer than a unit test, and adapts to
the machine's speed so far.

This is a plugin of pytest, which tests/conftest.py registers. It acts in the process that distributes tests (`--dist
loadgroup`), so a test that is run alone prints pytest's usual output.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import Final

import pytest
from xdist.workermanage import WorkerController

from tests.support.scheduling import name_of, slow_tests

EVERY_S: Final = 30.0
# The approximate seconds that a test takes a worker, for each folder, and the additional seconds for tests in
# tests/slow.txt.
SECONDS: Final = {"unit": 0.1, "integration": 0.9, "upgrade": 2.0, "engine": 2.5, "attack": 3.0, "chaos": 10.0}
SLOW_S: Final = 6.0


def expected_s(nodeid: str, slow: set[str]) -> float:
    """Return the approximate seconds that a test takes."""
    folder = nodeid.split("/")[1] if nodeid.startswith("tests/") else ""
    return SECONDS.get(folder, 1.0) + (SLOW_S if name_of(nodeid) in slow else 0.0)


def repeat_command(nodeid: str) -> str:
    """Return the command that runs one test alone."""
    return f"scripts/run.sh full python -m pytest {shlex.quote(nodeid)}"


def estimate(done_s: float, all_s: float, elapsed_s: float) -> str:
    """How far a run is: tests with `done_s` of `all_s` expected seconds took `elapsed_s`."""
    left_s = max(0.0, elapsed_s * (all_s - done_s) / done_s) if done_s else 0.0
    left = f"about {left_s / 60:.0f} min left" if left_s >= 90 else f"about {left_s:.0f} s left"
    return f"{done_s / all_s:.0%} of the work in {elapsed_s / 60:.1f} min, {left}" if all_s else ""


class Progress:
    """The progress of one run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._weights: dict[str, float] = {}
        self._all_s = self._done_s = 0.0
        self._tests = self._failed = 0
        self._began = self._said = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: WorkerController, ids: Sequence[str]) -> None:
        if not self._weights:
            slow = slow_tests()
            self._weights = {nodeid: expected_s(nodeid, slow) for nodeid in ids}
            self._all_s = sum(self._weights.values())
            self._began = self._said = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed += 1
            message = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr or ""))
            lines = message.strip().splitlines() or [""]
            self._say(f"{report.outcome.upper()} {report.nodeid} ({report.when}): {lines[0][:200]}")
            self._say(f"  alone: {repeat_command(report.nodeid)}")
        if report.when != "teardown":
            return
        self._tests += 1
        self._done_s += self._weights.get(report.nodeid, 0.0)
        now = time.monotonic()
        if now - self._said >= EVERY_S:
            self._said = now
            failed = f", {self._failed} failed" if self._failed else ""
            tests = f"{self._tests} of {len(self._weights)} tests{failed}"
            self._say(f"{tests}, {estimate(self._done_s, self._all_s, now - self._began)}")

    def _say(self, line: str) -> None:
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", None) == "loadgroup" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))
