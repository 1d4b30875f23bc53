"""Runs many calls to a store at the same time on one thread.

A `Multiplexer` runs calls in steps (see `kvstore_client._calls.exchange`). Its thread waits on the client's links until
a call can continue or the earliest deadline passes. Then it runs the next step of each call that can continue. A
waiting call needs no thread. Its answers are checked whenever something has arrived. If a server on the host is
in front of the store, there are two clients. A thread can wait for only one client, so a second thread is started when
a call needs it.

While a call sends, its thread is busy until the kernel has taken the bytes. If the thread has to send the rest of a
message that another thread has begun, that takes 0.2 s at most. The thread waits for nothing else.

These rules hold at any time, so that every call ends:

* A task is with exactly one driver, either in the driver's inbox or among its tasks, until the task's end is reported.
  The end is reported exactly once.
* Only the thread of that driver runs the task's generator. A task moves to another driver only between two steps.
* No task is left with a thread that has ended. Under the driver's lock, either the thread takes the task, or the caller
  learns that the thread has ended and ends the task itself.
* No wake-up is lost. A thread with news sets the driver's flag before it wakes the driver. The driver first says that
  it waits, and then checks the flag before it sleeps. The client remembers a `wake` until its links are read next. If
  another thread reads the links, that thread wakes all others that wait for them.
* No step waits longer than its deadline, and every call has a finite number of steps.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from kvstore_client._calls.exchange import Awaited, Steps
from kvstore_client._links.link import Link
from kvstore_client._links.link_pool import LinkPool

Ended: TypeAlias = "Callable[[Any], None]"

AFTER_DEFECT_S: Final = 0.1  # a pause after a defect, so that it does not keep a core busy

log = logging.getLogger("kvstore_client")


class Task:
    """A call in progress. To end it at its next wait, set `stopped` and then wake the multiplexer. After its
    `ended(None)`, nothing writes to the call's memory."""

    __slots__ = ("awaited", "ended", "steps", "stopped")

    def __init__(self, steps: Steps[Any], ended: Ended) -> None:
        self.steps = steps
        self.ended = ended
        self.awaited: Awaited | None = None  # None: it has not begun
        self.stopped = False

    @property
    def awaited_shards(self) -> set[Link]:
        """The shards whose answers the call still waits for."""
        awaited = self.awaited
        return {call.link.first for call in awaited.calls if not call.done} if awaited is not None else set()


class Multiplexer:
    """Runs tasks. Thread-safe. It must not be used in a child process after a fork.

    `plan()` is called on the first thread, at the start and after every `wake`. It may `start` tasks. It returns the
    time by which to call it again, on the clock of `time.monotonic`. It must not raise. A task's `ended(result)` is
    called on one of the threads; `result` is None if the call was stopped or has raised. `ended` must be short and must
    not raise.
    """

    def __init__(self, plan: Callable[[], float]) -> None:
        self._lock = threading.Lock()
        self._drivers = [_Driver(self, "kvstore-transfer-in", plan)]

    def start(self, steps: Steps[Any], ended: Ended) -> Task:
        """Start to run a call. Never blocks."""
        task = Task(steps, ended)
        self._drivers[0].take(task)
        return task

    def wake(self) -> None:
        """Have the threads call `plan` again and end stopped tasks. Never blocks."""
        for driver in list(self._drivers):
            driver.wake()

    def hand_on(self, task: Task, pool: LinkPool) -> None:
        """Move a task to the driver of `pool`, because the task waits for a different client than its present
        driver."""
        with self._lock:
            driver = next((each for each in self._drivers if each.pool is pool), None)
            if driver is None:
                driver = _Driver(self, "kvstore-transfer-in-2", lambda: math.inf)
                driver.pool = pool
                self._drivers.append(driver)
        driver.take(task)

    def close(self) -> None:
        """Stop all tasks, and wait until their ends have been reported. Tasks that are started later end at once."""
        for driver in self._drivers:  # also drivers that are added meanwhile
            driver.close()


class _Driver:
    """One thread, with the tasks that wait for one client."""

    def __init__(self, owner: Multiplexer, name: str, plan: Callable[[], float]) -> None:
        self.pool: LinkPool | None = None  # the pool of its first task
        self._owner = owner
        self._plan = plan
        self._changed = threading.Condition()
        self._inbox: deque[Task] = deque()
        self._tasks: dict[Task, None] = {}  # the tasks that wait; used by this thread only
        self._news = True
        self._reads = False  # whether it waits on the client's links
        self._closed = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self, task: Task) -> None:
        """Run this task. If the thread has ended, end the task at once."""
        with self._changed:
            taken = not self._over
            if taken:
                self._inbox.append(task)
        if taken:
            self.wake()
        else:
            self._end(task)

    def wake(self) -> None:
        """Wake the thread, because there is news."""
        with self._changed:
            self._news = True
            self._changed.notify()
        pool = self.pool
        if self._reads and pool is not None:
            with contextlib.suppress(OSError):  # the client was closed just now, which wakes all threads that wait
                pool.wake()

    def close(self) -> None:
        self._closed = True
        self.wake()
        self._thread.join()

    # ---- its thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        until = 0.0
        try:
            while not self._closed:
                try:
                    if self._news or time.monotonic() >= until:
                        self._news = False  # before `plan`, so that news that comes meanwhile is not lost
                        until = self._plan()
                    if not self._go_on():
                        self._wait(until)
                except Exception:  # a defect of ours; a caller that waits for a task must not wait forever
                    log.exception("kvstore: an error in the thread that loads blocks; please report it")
                    time.sleep(AFTER_DEFECT_S)
                    self._news = True
        finally:
            with self._changed:
                self._over = True
                left = [*self._tasks, *self._inbox]
            for task in left:
                self._end(task)

    def _go_on(self) -> bool:
        """Run the next step of each task that can continue. Return whether there was any."""
        now = time.monotonic()
        closed = self.pool is not None and self.pool.closed
        some: list[tuple[Task, bool]] = []
        for task in self._tasks:
            awaited = task.awaited
            assert awaited is not None
            ready = awaited.ready()
            if ready or task.stopped or closed or now >= awaited.deadline:
                some.append((task, ready))
        while self._inbox:
            task = self._inbox.popleft()
            self._tasks[task] = None
            if task.awaited is None:
                some.append((task, False))
        for task, ready in some:
            self._step(task, ready)
        return bool(some)

    def _step(self, task: Task, ready: bool) -> None:
        try:
            if task.stopped:
                self._end(task)
                return
            awaited = next(task.steps) if task.awaited is None else task.steps.send(ready)
        except StopIteration as end:
            self._end(task, end.value)
        except Exception:  # a defect of ours
            log.exception("kvstore: loading blocks failed; please report it")
            self._end(task)
        else:
            task.awaited = awaited
            if awaited.pool is None:
                return
            if self.pool is None:
                self.pool = awaited.pool
            elif self.pool is not awaited.pool:
                del self._tasks[task]
                self._owner.hand_on(task, awaited.pool)

    def _end(self, task: Task, result: Any = None) -> None:
        self._tasks.pop(task, None)
        try:
            task.steps.close()
        except Exception:  # a defect of ours
            log.exception("kvstore: ending a load failed; please report it")
        task.ended(result)

    def _wait(self, until: float) -> None:
        awaited = [task.awaited for task in self._tasks if task.awaited is not None]
        deadline = min([until, *(each.deadline for each in awaited)])
        if self.pool is None or not any(each.pool is not None for each in awaited):
            with self._changed:
                if not self._news:
                    left = deadline - time.monotonic()
                    self._changed.wait(max(0.0, left) if left < threading.TIMEOUT_MAX else None)
            return
        self._reads = True  # before the wait, because `wake` wakes the client only if this is set
        try:
            self.pool.wait(self._can_go_on, deadline)
        finally:
            self._reads = False

    def _can_go_on(self) -> bool:
        return self._news or any(task.awaited is not None and task.awaited.ready() for task in self._tasks)
