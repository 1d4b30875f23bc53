"""How pytest-xdist shares the tests out: a file is one worker's, and what measures time runs last, alone.

A module's tests share its fixtures, so a file is not divided. All engine tests are one worker's, because they share
engines and because two engines at once need more cores than a small machine has. Tests marked `exclusive` measure time
or throughput: they wait until every worker but one has ended.

This is a plugin of pytest, which tests/conftest.py registers; it does something under `--dist loadgroup` alone. The
process that schedules does not collect, so workers tell it which tests are exclusive: all write the same file.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

EXCLUSIVE: Final = "exclusive"
ENGINES: Final = "engines"
ROOMS: Final = ("engine", "chaos", "integration", "unit")  # those before take longer a file: they start first
SLOW: Final = Path(__file__).parents[1] / "slow.txt"
_LIST: Final = "exclusive_tests"  # the name, in a worker's input, of the file


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
    items.sort(key=_by_duration)
    slow = slow_tests()
    for item in items:
        if name_of(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)
    path = getattr(config, "workerinput", {}).get(_LIST)
    if path:
        Path(path).write_text("\n".join(item.nodeid for item in items if item.get_closest_marker("exclusive")))


def slow_tests() -> set[str]:
    """The names of tests/slow.txt."""
    return {line for line in SLOW.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")}


def name_of(nodeid: str) -> str:
    """FILE::FUNCTION or FILE::CLASS of a test, whatever its parameters."""
    return "::".join(re.sub(r"\[.*", "", nodeid).split("::")[:2])


def _by_duration(item: pytest.Item) -> int:
    return next((number for number, room in enumerate(ROOMS) if f"/tests/{room}/" in item.path.as_posix()), 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return FilesThenExclusive(config, log) if _path in config.stash else None


class FilesThenExclusive(LoadFileScheduling):
    """Units of work are files, all the engines, and all the exclusive tests. Those are given out when one worker is
    left."""

    _exclusive: frozenset[str] = frozenset()

    def _split_scope(self, nodeid: str) -> str:
        if nodeid in self._exclusive:
            return EXCLUSIVE
        return ENGINES if nodeid.startswith("tests/engine/") else super()._split_scope(nodeid)

    def schedule(self) -> None:
        if self.collection is None:  # the first time
            self._exclusive = frozenset(Path(self.config.stash[_path]).read_text().splitlines())
            self.config.option.loadscopereorder = False  # the tests are in the order in which files shall start
        super().schedule()
        self._go_on()

    def _assign_work_unit(self, node: WorkerController) -> None:
        if EXCLUSIVE in self.workqueue:
            self.workqueue.move_to_end(EXCLUSIVE)
        if not self._only_exclusive_left():
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if self._only_exclusive_left():
            self._go_on()
        else:
            super()._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        crashed = super().remove_node(node)
        self._go_on()
        return crashed

    def _only_exclusive_left(self) -> bool:
        return list(self.workqueue) == [EXCLUSIVE]

    def _go_on(self) -> None:
        """Where only the exclusive tests are left: let all workers but one finish, then give them to that one."""
        if not self._only_exclusive_left():
            return
        staying = [node for node in self.nodes if not node.shutting_down]
        for node in staying[1:]:
            node.shutdown()
        if staying and self.nodes == staying[:1]:
            super()._assign_work_unit(staying[0])
            staying[0].shutdown()  # after these tests
