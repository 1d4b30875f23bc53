"""Makes pytest-xdist distribute the tests file by file, and run tests that measure time last and nearly alone.

A module's tests share its fixtures, so one worker runs a whole file. Half of the workers run all engine tests, because
these tests share engines, and there are not enough cores for more engines at once. These workers begin with engine
tests as soon as the unit tests are done, while the others run integration tests. Without engine tests left, they help
the others, but the others never run engine tests.

Tests marked `exclusive` measure time or throughput: they wait until all others have ended. Then three workers run them,
also file by file. The clusters of tests/chaos come first, because they take longest and wait most of the time.

This is a plugin of pytest, which tests/conftest.py registers. It acts only under `--dist loadgroup`. The scheduling
process does not collect tests, so the workers write the names of exclusive tests to a file.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

EXCLUSIVE: Final = "exclusive "  # the beginning of the names of their units
EXCLUSIVE_WORKERS: Final = 3
LONGEST_FIRST: Final = ("chaos", "attack", "integration", "unit")  # folders of exclusive tests
ENGINE_TESTS: Final = "tests/engine/"
# The tests of these files share a store, two engines and a proxy, so one worker runs all of them.
FLEET: Final = "tests/engine/ with a fleet"
OF_A_FLEET: Final = frozenset(
    f"{ENGINE_TESTS}test_{name}.py"
    for name in (
        "proxy",
        "proxy_faults",
        "proxy_kill",
        "tracing",
        "transparent",
        "transparent_http",
        "transparent_client",
        "split_answers",
        "leaving",
    )
)
ROOMS: Final = ("unit", "integration", "engine", "attack", "chaos")  # quick tests come first, to report mistakes early
SLOW_WEIGHT: Final = 8  # a test of tests/slow.txt counts as this many others
SLOW: Final = Path(__file__).parents[1] / "slow.txt"
_LIST: Final = "exclusive_tests"  # the key for the file of exclusive tests in a worker's input


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: is in tests/slow.txt, so `make check` leaves it out")
    config.addinivalue_line("markers", "exclusive: measures time or throughput, so it runs while no other test does")
    if config.getoption("dist", None) == "loadgroup":
        file, path = tempfile.mkstemp(prefix="exclusive-tests-")
        os.close(file)
        config.stash[_path] = path


def pytest_unconfigure(config: pytest.Config) -> None:
    if _path in config.stash:
        os.unlink(config.stash[_path])


_path = pytest.StashKey[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    if _path in node.config.stash:
        node.workerinput[_LIST] = node.config.stash[_path]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = slow_tests()
    weights: Counter[Path] = Counter()
    for item in items:
        weights[item.path] += SLOW_WEIGHT if name_of(item.nodeid) in slow else 1
    # In each folder, the longest files start first, so that none of them is still running alone at the end.
    items.sort(key=lambda item: (_room(item), -weights[item.path], item.path.as_posix()))
    for item in items:
        if name_of(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)
    path = getattr(config, "workerinput", {}).get(_LIST)
    if path:
        Path(path).write_text("\n".join(item.nodeid for item in items if item.get_closest_marker("exclusive")))


def slow_tests() -> set[str]:
    """Return the names of the tests in tests/slow.txt."""
    return {line for line in SLOW.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")}


def name_of(nodeid: str) -> str:
    """Return FILE::FUNCTION or FILE::CLASS of a test, without its parameters."""
    return "::".join(re.sub(r"\[.*", "", nodeid).split("::")[:2])


def _exclusive_unit(nodeid: str) -> str:
    """Return the unit of an exclusive test: its file. Tests with one copy and with two copies are separate units,
    because they share no cluster."""
    copies = next((name for name in ("one-copy", "two-copies") if name in nodeid), "")
    return f"{EXCLUSIVE}{nodeid.split('::', maxsplit=1)[0]} {copies}"


def _exclusive_order(unit: str) -> int:
    starts = [f"{EXCLUSIVE}tests/{folder}/" for folder in LONGEST_FIRST]
    return next((number for number, start in enumerate(starts) if unit.startswith(start)), len(starts))


def _engine_workers_order(unit: str) -> int:
    """Return the priority of a unit for workers that run engine tests. Units with the same priority keep their
    order."""
    return 0 if unit.startswith("tests/unit/") else 1 if unit.startswith(ENGINE_TESTS) else 2


def _room(item: pytest.Item) -> int:
    return next((number for number, room in enumerate(ROOMS) if f"/tests/{room}/" in item.path.as_posix()), len(ROOMS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return FilesThenExclusive(config, log) if _path in config.stash else None


class FilesThenExclusive(LoadFileScheduling):
    """The units of work are single files, the engine tests with a fleet, and the exclusive tests of a file. Exclusive
    tests are assigned after all others have ended."""

    _exclusive: frozenset[str] = frozenset()
    _alone = False  # only exclusive tests are left, and they begin

    def _split_scope(self, nodeid: str) -> str:
        if nodeid in self._exclusive:
            return _exclusive_unit(nodeid)
        file = super()._split_scope(nodeid)
        return FLEET if file in OF_A_FLEET else file

    def schedule(self) -> None:
        if self.collection is None:  # the first time
            self._exclusive = frozenset(Path(self.config.stash[_path]).read_text().splitlines())
            self.config.option.loadscopereorder = False  # the tests are already in the order in which files must start
        super().schedule()
        self._go_on()

    def _assign_work_unit(self, node: WorkerController) -> None:
        unit = self._next_unit(node)
        if unit is not None:
            self.workqueue.move_to_end(unit, last=False)
            super()._assign_work_unit(node)

    def _next_unit(self, node: WorkerController) -> str | None:
        """Return a worker's next unit, or None if all remaining units are for other workers or for later."""
        if self._alone:
            return min(self.workqueue, key=_exclusive_order)
        units = [unit for unit in self.workqueue if not unit.startswith(EXCLUSIVE)]
        if node in self.nodes[-max(1, len(self.nodes) // 2) :]:
            return min(units, key=_engine_workers_order, default=None)
        return next((unit for unit in units if not unit.startswith(ENGINE_TESTS)), None)

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        self._go_on()

    def remove_node(self, node: WorkerController) -> str | None:
        crashed = super().remove_node(node)
        self._go_on()
        return crashed

    def _go_on(self) -> None:
        """If only exclusive tests are left, shut down all workers but a few, and then give those their first files."""
        if self._alone or not self.workqueue or not all(unit.startswith(EXCLUSIVE) for unit in self.workqueue):
            return
        staying = [node for node in self.nodes if not node.shutting_down]
        for node in staying[EXCLUSIVE_WORKERS:]:
            node.shutdown()
        staying = staying[:EXCLUSIVE_WORKERS]
        # A worker keeps its last test until it gets another one or the end, so each may have one test left.
        if self.nodes != staying or any(self._pending_of(self.assigned_work[node]) > 1 for node in staying):
            return
        self._alone = True
        for node in staying:
            self._reschedule(node)
