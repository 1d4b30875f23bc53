"""Many calls of a store under way on one thread.

A `Multiplexer` runs calls in steps (see `kvstore_client._calls.exchange`). Its thread waits on the client's
links until any call can go on, or the earliest deadline passes, and then goes on with those that can. A call that waits
costs no thread, only a look at its answers whenever something has arrived. With a server on the host in front of the
store there are two clients, and one thread waits for one client: the second thread is made when a call needs it.

Where a call sends, its thread is busy for as long as the kernel takes the bytes, and for 0.2 s at most where it has to
send the rest of a message that another thread has begun. It waits for nothing else.

What holds at any time, so that every call ends:

* A task is with one driver, in its inbox or among its tasks, until its end is told. It is told exactly once.
* Only the thread of that driver runs the task's generator. A task is handed on between two steps.
* Nothing is put where a thread that has ended would find it: under the driver's lock either it is taken by that thread,
  or the one that puts it is told, and ends the task itself.
* No wake-up is lost: who has news notes it before it wakes. The driver first says that it waits, and then looks for
  news before it sleeps. The client's `wake` is remembered until the next look, whoever reads the links then; if that is
  another thread, it wakes those that wait with it.
* No step waits longer than its deadline, and every call has finitely many steps.
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
from kvstore_client._links.core import Core
from kvstore_client._links.link import Link

Ended: TypeAlias = "Callable[[Any], None]"

AFTER_DEFECT_S: Final = 0.1  # so that a defect does not keep a core busy

log = logging.getLogger("kvstore_client")


class Task:
    """A call under way. ``stopped``: it is to end where it waits; who sets that wakes the multiplexer. After its
    ``ended(None)`` no byte is written to its memory."""

    __slots__ = ("awaited", "ended", "steps", "stopped")

    def __init__(self, steps: Steps[Any], ended: Ended) -> None:
        self.steps = steps
        self.ended = ended
        self.awaited: Awaited | None = None  # None: it has not begun
        self.stopped = False

    @property
    def awaited_shards(self) -> set[Link]:
        """The shards that owe it an answer."""
        awaited = self.awaited
        return {call.link.first for call in awaited.calls if not call.done} if awaited is not None else set()


class Multiplexer:
    """Runs tasks. Thread-safe. Valid in one process only.

    ``plan()`` is called on the first thread, at first and after every `wake`. It may `start` tasks, and returns when to
    call it again at the latest, by `time.monotonic`. It must not raise. A task's ``ended(result)`` is called on one of
    the threads, with None if the call was stopped or has raised; it must be short and must not raise.
    """

    def __init__(self, plan: Callable[[], float]) -> None:
        self._lock = threading.Lock()
        self._drivers = [_Driver(self, "kvstore-transfer-in", plan)]

    def start(self, steps: Steps[Any], ended: Ended) -> Task:
        """Run a call. Never blocks."""
        task = Task(steps, ended)
        self._drivers[0].take(task)
        return task

    def wake(self) -> None:
        """Have ``plan`` called again, and tasks looked at that were stopped. Never blocks."""
        for driver in list(self._drivers):
            driver.wake()

    def hand_on(self, task: Task, core: Core) -> None:
        """A task awaits something of another client than that of the driver that runs it."""
        with self._lock:
            driver = next((each for each in self._drivers if each.core is core), None)
            if driver is None:
                driver = _Driver(self, "kvstore-transfer-in-2", lambda: math.inf)
                driver.core = core
                self._drivers.append(driver)
        driver.take(task)

    def close(self) -> None:
        """Stop all tasks, and wait until their end was told. Later ones end at once."""
        for driver in self._drivers:  # also those that are added meanwhile
            driver.close()


class _Driver:
    """One thread, and the tasks that wait for one client."""

    def __init__(self, owner: Multiplexer, name: str, plan: Callable[[], float]) -> None:
        self.core: Core | None = None  # that of its first task
        self._owner = owner
        self._plan = plan
        self._changed = threading.Condition()
        self._inbox: deque[Task] = deque()
        self._tasks: dict[Task, None] = {}  # that wait; of this thread alone
        self._news = True
        self._reads = False  # whether it waits on the client's links
        self._closed = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self, task: Task) -> None:
        """Run this task. If the thread has ended, the task ends here."""
        with self._changed:
            taken = not self._over
            if taken:
                self._inbox.append(task)
        if taken:
            self.wake()
        else:
            self._end(task)

    def wake(self) -> None:
        """There is news."""
        with self._changed:
            self._news = True
            self._changed.notify()
        core = self.core
        if self._reads and core is not None:
            with contextlib.suppress(OSError):  # the client was closed just now, and wakes all that wait
                core.wake()

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
                        self._news = False  # first: what comes meanwhile is news
                        until = self._plan()
                    if not self._go_on():
                        self._wait(until)
                except Exception:  # a defect of ours: whoever waits for a task must not wait for ever
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
        """Go on with all tasks that can. -> whether there were any."""
        now = time.monotonic()
        closed = self.core is not None and self.core.closed
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
            if awaited.core is None:
                return
            if self.core is None:
                self.core = awaited.core
            elif self.core is not awaited.core:
                del self._tasks[task]
                self._owner.hand_on(task, awaited.core)

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
        if self.core is None or not any(each.core is not None for each in awaited):
            with self._changed:
                if not self._news:
                    left = deadline - time.monotonic()
                    self._changed.wait(max(0.0, left) if left < threading.TIMEOUT_MAX else None)
            return
        self._reads = True  # first: from now on, `wake` wakes the client
        try:
            self.core.wait(self._can_go_on, deadline)
        finally:
            self._reads = False

    def _can_go_on(self) -> bool:
        return self._news or any(task.awaited is not None and task.awaited.ready() for task in self._tasks)
