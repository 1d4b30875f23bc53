"""A store and engines that the tests of a module share, where all of them want engines with the same options."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Engine, prompt
from tests.support.harness import Server


class Site:
    """Its engines start when a test first takes them, and one that a test has killed starts again for the next.

    What a test asks is its own: the first block of each of its prompts is in no prompt of another test of this site.
    """

    def __init__(self, folder: Path, model: Path, options: dict[str, Any], **arguments: Any) -> None:
        """options: of the connector. arguments: of all engines."""
        self._folder, self._model, self._options, self._arguments = folder, model, options, arguments
        self._engines: dict[int, Engine] = {}
        self._traces: dict[int, Path] = {}
        self._starts = itertools.count()
        self.server = Server(folder / "server.log", "--memory", "256MiB", "--segment", "4MiB")

    def engine(self, number: int) -> Engine:
        """Engine 0, 1, ..., which has answered a first request."""
        if number not in self._engines or not self._engines[number].running:
            name = f"{next(self._starts)}-engine{number}"
            trace = self._traces[number] = self._folder / f"{name}.json"
            connector = {"endpoint": self.server.endpoint, "always_load": True, "trace_file": str(trace)}
            connector |= self._options
            log = self._folder / f"{name}.log"
            self._engines[number] = Engine(self._model, log, connector=connector, **self._arguments)
            self._engines[number].generate(prompt(99, 40))
        return self._engines[number]

    def trace(self, number: int) -> Path:
        """The trace file of that engine as it runs now."""
        return self._traces[number]

    def used_by(self, request: pytest.FixtureRequest) -> Iterator[Site]:
        """For the fixture of one test. If that fails, the next one gets new engines: these may be busy for long."""
        failed = request.session.testsfailed
        yield self
        if request.session.testsfailed > failed:
            self.stop_engines()

    def stop_engines(self) -> None:
        for engine in self._engines.values():
            engine.stop()
        self._engines.clear()

    def stop(self) -> None:
        self.stop_engines()
        self.server.kill()
