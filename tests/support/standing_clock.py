"""A clock that stands still until a test moves it, in the place of a module's `time`."""

from __future__ import annotations

from types import ModuleType

import pytest


class StandingClock:
    """`clock.now += seconds` lets time pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        """module: what it is the clock of, which uses `time.monotonic` alone."""
        self.now = 1000.0
        monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now
