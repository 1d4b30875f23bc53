"""Replaces a module's `time` by a clock that stands still until a test moves it."""

from __future__ import annotations

from types import ModuleType

import pytest


class StandingClock:
    """The clock. `clock.now += seconds` lets time pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        """module: the module that gets this clock; it may use only `time.monotonic`."""
        self.now = 1000.0
        monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now
