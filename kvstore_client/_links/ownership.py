"""Locks for a thread whose calls a signal may interrupt (Ctrl-C) at any moment.

A signal handler may raise between `lock.acquire(timeout=...)` and the caller's next step, and when a function that is
to release the lock is entered. Then the lock would be held for ever. So what is owned names its owner, in an attribute:
to give it up is an assignment, which no handler can come before in a `finally` block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

LOOK_S: Final = 0.05  # how often one that waits looks by itself, because an interrupted owner may not wake it


class Ownership:
    """Owned by one object at a time. Thread-safe. The owner gives it up in a `finally`, in this way:

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
        """Make `owner` the owner as soon as nobody else is. -> False: somebody else still is, after `timeout_s`."""
        with self._lock:
            if self.owner is not None and not self._wait(timeout_s):
                return False
            self.owner = owner
            return True

    def wait(self, timeout_s: float, enough: Callable[[], bool]) -> None:
        """Wait until nobody is the owner, or `enough()`, or for `timeout_s`."""
        with self._lock:
            if self.owner is not None and not enough():
                self._wait(timeout_s, enough)

    def wake(self) -> None:
        """Wake those who wait, after the owner has given it up, or has news for them."""
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
                self._freed.wait(min(left, LOOK_S))
            return True
        finally:
            self._waiting -= 1
