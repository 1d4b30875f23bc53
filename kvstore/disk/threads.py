"""The threads that wait for the disk, so that the shard's loop never does.

A job is a function that may block, and releases the GIL where it does. When it has returned, its completion runs on
the loop. Jobs of one pool begin in the order in which they were given.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class Completions:
    """What came back from all pools: the loop polls `fileno` and calls `run`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._finished: deque[Callable[[], None]] = deque()

    def fileno(self) -> int:
        """Readable when there is something to `run`."""
        return self._fd

    def add(self, call: Callable[[], None]) -> None:
        """From any thread: run this on the loop."""
        self._finished.append(call)
        os.eventfd_write(self._fd, 1)

    def run(self) -> None:
        """On the loop: do what follows the jobs that have ended."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return
        for _ in range(len(self._finished)):
            self._finished.popleft()()


class Pool:
    """Threads that take jobs in order."""

    def __init__(self, name: str, threads: int, completions: Completions) -> None:
        self._completions = completions
        self._began: dict[int, float] = {}  # by thread: when its job began
        self._jobs: SimpleQueue[Callable[[], Callable[[], None]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvstore-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T], done: Callable[[T | OSError], None]) -> None:
        """`work` runs on a thread; `done`, on the loop, is given its result or the OSError it raised."""

        def job() -> Callable[[], None]:
            try:
                result: T | OSError = work()
            except OSError as error:
                result = error
            except Exception:  # a defect of ours must cost the disk tier, not a thread and what it held
                log.exception("disk: internal error")
                result = OSError(errno.EIO, "internal error, see the log")
            return lambda: done(result)

        self._jobs.put(job)

    def stalled(self, now: float, limit_s: float) -> bool:
        """A job has been under way for longer than that."""
        return any(now - began > limit_s for began in list(self._began.values()))

    def close(self) -> None:
        """Blocking: all jobs are done, the threads gone."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        thread = threading.get_ident()
        while (job := self._jobs.get()) is not None:
            self._began[thread] = time.monotonic()
            done = job()
            del self._began[thread]
            self._completions.add(done)
