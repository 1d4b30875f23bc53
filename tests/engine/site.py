"""A store and engines for a module whose tests can share engines, because all need the same options."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Engine, prompt
from tests.support.harness import Server


class Site:
    """Starts an engine when a test first requests it. An engine that a test has killed is restarted for the next test.

    Tests that share a site must use different prompts: no two may have the same first block.
    """

    def __init__(self, folder: Path, model: Path, options: dict[str, Any], **arguments: Any) -> None:
        """options: the connector's options. arguments: other arguments for all engines."""
        self._folder, self._model, self._options, self._arguments = folder, model, options, arguments
        self._engines: dict[int, Engine] = {}
        self._traces: dict[int, Path] = {}
        self._starts = itertools.count()
        self.server = Server(folder / "server.log", "--memory", "256MiB", "--segment", "4MiB")

    def engine(self, number: int) -> Engine:
        """Return the engine with this number. It has answered a first request."""
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
        """The trace file of the engine with this number, since its last start."""
        return self._traces[number]

    def used_by(self, request: pytest.FixtureRequest) -> Iterator[Site]:
        """Use the site in a test's fixture. If the test fails, the next test gets new engines, because the old ones may
        stay busy for long."""
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
