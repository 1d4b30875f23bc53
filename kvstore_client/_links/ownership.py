"""Locks for a thread whose calls may be interrupted by a signal (Ctrl-C) at any moment.

A signal handler may raise between `lock.acquire(timeout=...)` and the caller's next step, or at the entry of the
function that is to release the lock. The lock would then be held for ever. So an `Ownership` has an attribute that
names its owner. The owner gives it up by an assignment, and in a `finally` block, no handler can run before the
assignment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

OWNER_POLL_S: Final = 0.05  # how often waiting threads check the owner, because an interrupted owner may not wake them


class Ownership:
    """A lock that is owned by one object at a time. Thread-safe. The owner gives it up in a `finally` block:

    try:
        if ownership.take(me, timeout_s):
            ...
    finally:
        if ownership.owner is me:
            ownership.owner = None
            ownership.wake()
    """

    __slots__ = ("_freed", "_lock", "_waiting", "owner")

    def __init__(self) -> None:
        self.owner: object = None
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._waiting = 0

    def take(self, owner: object, timeout_s: float) -> bool:
        """Make `owner` the owner when there is no other. Return False if there still is another after `timeout_s`."""
        with self._lock:
            if self.owner is not None and not self._wait(timeout_s):
                return False
            self.owner = owner
            return True

    def wait(self, timeout_s: float, enough: Callable[[], bool]) -> None:
        """Wait until there is no owner or `enough()` is true, but at most for `timeout_s`."""
        with self._lock:
            if self.owner is not None and not enough():
                self._wait(timeout_s, enough)

    def wake(self) -> None:
        """Wake the threads that wait. Call this after giving the ownership up, or after other progress."""
        if self._waiting:
            with self._lock:
                self._freed.notify_all()

    def _wait(self, timeout_s: float, enough: Callable[[], bool] | None = None) -> bool:
        deadline = time.monotonic() + timeout_s
        self._waiting += 1
        try:
            while self.owner is not None:
                left = deadline - time.monotonic()
                if left <= 0 or (enough is not None and enough()):
                    return False
                self._freed.wait(min(left, OWNER_POLL_S))
            return True
        finally:
            self._waiting -= 1
