"""Thread pools that wait for the disk, so that the shard's loop never does.

A job is a function that may block. While it blocks it must not hold the GIL. After the job has returned, its completion
runs on the loop. The jobs of one pool start in the order in which they were submitted.
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
    """The completions of finished jobs of all pools. The loop polls `fileno` and calls `run`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._finished: deque[Callable[[], None]] = deque()

    def fileno(self) -> int:
        """An eventfd that is readable when a completion waits for `run`."""
        return self._fd

    def add(self, call: Callable[[], None]) -> None:
        """Let the loop run `call`. Any thread may call this."""
        self._finished.append(call)
        os.eventfd_write(self._fd, 1)

    def run(self) -> None:
        """Run all waiting completions. Only the loop's thread calls this."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return
        for _ in range(len(self._finished)):
            self._finished.popleft()()


class IoThreads:
    """A fixed number of threads that take jobs in the order in which they were submitted."""

    def __init__(self, name: str, threads: int, completions: Completions) -> None:
        self._completions = completions
        self._began: dict[int, float] = {}  # by thread: when its present job began
        self._jobs: SimpleQueue[Callable[[], Callable[[], None]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvstore-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T], done: Callable[[T | OSError], None]) -> None:
        """Run `work` on a thread, and then `done` on the loop, with the result of `work` or the `OSError` that it
        raised."""

        def job() -> Callable[[], None]:
            try:
                result: T | OSError = work()
            except OSError as error:
                result = error
            except Exception:  # a bug must turn the disk tier off, not end the thread and leak the slots of its job
                log.exception("disk: internal error")
                result = OSError(errno.EIO, "internal error, see the log")
            return lambda: done(result)

        self._jobs.put(job)

    def stalled(self, now: float, limit_s: float) -> bool:
        """Return whether a job has been running for longer than `limit_s` seconds. `now`: monotonic seconds."""
        return any(now - began > limit_s for began in list(self._began.values()))

    def close(self) -> None:
        """End the threads. Blocks until all jobs have run and the threads have ended."""
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
