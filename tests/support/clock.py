"""A clock that tests set forward, for what takes its time: blocks that expire, in real server processes.

The clock reaches a server as variables of its environment, see moved_clock/sitecustomize.py; nothing in the product
knows of it. Waiting in the kernel (`epoll`, `sleep`) is not shortened: what a server looks at every second, it does.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.harness import environment

_FOLDER = Path(__file__).parent / "moved_clock"


class Clock:
    """The time of the processes that are started with `environment`. It starts as the real one."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._ahead = mmap.mmap(file.fileno(), 8)
        path_list = os.pathsep.join([str(_FOLDER), environment()["PYTHONPATH"]])
        self.environment = {"KVSTORE_TESTS_CLOCK": str(path), "PYTHONPATH": path_list}

    def advance(self, seconds: float) -> None:
        """So much time passes at once, in all those processes."""
        now = int.from_bytes(self._ahead[:], "little")
        self._ahead[:] = struct.pack("<q", now + round(seconds * 1e9))

    def run_until(self, condition: Callable[[], object], most_s: float, what: str) -> None:
        """Let time pass, ten times as fast as it does, until `condition()` is true. Raises `AssertionError` after
        `most_s` seconds of it."""
        passed = 0.0
        while not condition():
            assert passed < most_s, f"not within {most_s:g} s: {what}"
            time.sleep(0.05)
            self.advance(0.45)
            passed += 0.5
