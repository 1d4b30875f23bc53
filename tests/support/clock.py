"""A clock that tests set forward, for slow events such as the expiry of blocks in real server processes.

A server gets the clock through environment variables; see moved_clock/sitecustomize.py. The server's code does not know
of it. Waits in the kernel (`epoll`, `sleep`) are not shortened: a check that a server makes every second still takes a
second.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path

from tests.support import forked


class Clock:
    """The clock of processes that are started with `environment`. At first it shows the real time."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._ahead = mmap.mmap(file.fileno(), 8)
        self.environment = forked.clocked(str(path))

    def advance(self, seconds: float) -> None:
        """Let this much time pass at once for all processes with this clock."""
        now = int.from_bytes(self._ahead[:], "little")
        self._ahead[:] = struct.pack("<q", now + round(seconds * 1e9))

    def step_until(self, condition: Callable[[], object], step_s: float, most_s: float, what: str) -> None:
        """Let time pass in steps until `condition()` is true. Processes have a third of a second for each step. Raises
        `AssertionError` after `most_s` seconds of the clock."""
        for _ in range(round(most_s / step_s)):
            self.advance(step_s)
            for _ in range(6):
                if condition():
                    return
                time.sleep(0.05)
        raise AssertionError(f"not within {most_s:g} s: {what}")

    def run_until(self, condition: Callable[[], object], most_s: float, what: str) -> None:
        """Let time pass ten times as fast until `condition()` is true. Raises `AssertionError` after `most_s` seconds
        of the clock."""
        passed = 0.0
        while not condition():
            assert passed < most_s, f"not within {most_s:g} s: {what}"
            time.sleep(0.05)
            self.advance(0.45)
            passed += 0.5
