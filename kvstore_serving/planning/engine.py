"""The common parts of all engines of the simulator, and a batch of requests that decode."""

from __future__ import annotations

import abc
import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, TypeAlias

import simpy

from kvstore_serving.planning.jobs import SimulatedRequest
from kvstore_serving.planning.placement import Shape
from kvstore_serving.planning.profile import Profile

Steps: TypeAlias = Generator[simpy.Event, Any, None]
# The interval at which an engine checks whether its neighbours work.
NEIGHBOUR_POLL_S: Final = 0.005


class SimulatedEngine(abc.ABC):
    """The common part of all engines.

    busy_s: the time for which the engine's first stage worked
    epoch: the number of the engine's failures; work that began in an earlier epoch is void
    neighbours: the other engines on the same nodes
    working: the number of the pipeline's batches that are being computed
    """

    def __init__(self, env: simpy.Environment, profile: Profile, shape: Shape) -> None:
        self.env = env
        self.degree = profile.degree(shape.tp)
        self.pp = shape.pp
        self.stages_s = profile.stage_s * shape.pp
        self.capacity = self.degree.kv_tokens[shape.pp]
        self.used = 0  # reserved tokens
        self.pending = 0  # tokens that the engine must still compute
        self.peak = 0
        self.busy_s = 0.0
        self.down = False
        self.epoch = 0
        self.neighbours: list[SimulatedEngine] = []
        self.working = 0
        self._wake: simpy.Event | None = None
        self._pieces = [
            (times.from_batch, times.fixed_s, times.per_context_token_s, times.per_request_s)
            for times in reversed(self.degree.decode)
        ]

    def wake(self) -> None:
        """Wake the process that waits for work."""
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def fail(self) -> list[SimulatedRequest]:
        """Fail, and lose all jobs. Returns the jobs, which must be done by other engines."""
        self.epoch += 1
        self.down = True
        self.used = self.pending = 0
        return self._lose()

    def recover(self) -> None:
        """Work again after a failure."""
        self.down = False
        self._look()

    @abc.abstractmethod
    def _lose(self) -> list[SimulatedRequest]:
        """Forget all jobs, and return them."""

    @abc.abstractmethod
    def _look(self) -> None:
        """Begin all jobs that can begin now."""

    def _sleep(self) -> simpy.Event:
        self._wake = self.env.event()
        return self._wake

    def _reserve(self, tokens: int) -> None:
        self.used += tokens
        self.peak = max(self.peak, self.used)

    def step_s(self, requests: int, context: float) -> float:
        """Return the seconds that a decoding step takes through all stages."""
        for start, fixed, per_token, per_request in self._pieces:
            if requests >= start:
                return fixed + per_token * context + per_request * requests + self.stages_s
        raise AssertionError("the times of decoding have no entry for a batch of 1")

    def work(self, seconds: float, contention: float) -> Generator[simpy.Event, Any, float]:
        """Do work that takes `seconds` alone, and `contention` times as long while a neighbour works. Returns the time
        that it took."""
        began = self.env.now
        self.working += 1
        if contention == 1.0 or not self.neighbours:
            yield self.env.timeout(seconds)
        else:
            while seconds > 0:
                part = min(seconds, NEIGHBOUR_POLL_S)
                beside = any(each.working and not each.down for each in self.neighbours)
                yield self.env.timeout(part * contention if beside else part)
                seconds -= part
        self.working -= 1
        return self.env.now - began

    def after(self, delay_s: float, then: Callable[[], None]) -> None:
        """Call `then` after this delay, unless the engine fails before that."""
        epoch = self.epoch

        def due(_: simpy.Event) -> None:
            if self.epoch == epoch:
                then()

        timer = self.env.timeout(max(0.0, delay_s))
        timer.callbacks.append(due)


class Lane:
    """A batch of requests that decode. An engine has one for each stage of its pipeline."""

    def __init__(self) -> None:
        self.ready: list[SimulatedRequest] = []  # the jobs that join at the next step
        self.ends: list[tuple[int, int, SimulatedRequest]] = []  # a heap, by each job's last step
        self.step = 0
        self.context = 0.0
        self.joined = 0

    @property
    def load(self) -> int:
        return len(self.ends) + len(self.ready)

    def join(self) -> None:
        if not self.ready:
            return
        for job in self.ready:
            self.joined += 1
            heapq.heappush(self.ends, (self.step + job.left, self.joined, job))
            self.context += job.context
        self.ready.clear()

    def advance(self) -> list[SimulatedRequest]:
        """Simulate one decoding step. Returns the jobs that are then finished."""
        self.step += 1
        self.context += len(self.ends)
        ended = []
        while self.ends and self.ends[0][0] <= self.step:
            job = heapq.heappop(self.ends)[2]
            job.context += job.left
            job.left = 0
            self.context -= job.context
            ended.append(job)
        return ended

    def empty(self) -> list[SimulatedRequest]:
        """Give up all jobs, and return them. Each job keeps the tokens that were generated so far."""
        for end, _, job in self.ends:
            had = job.left - (end - self.step)
            job.left -= had
            job.context += had
        lost = [*(job for _, _, job in self.ends), *self.ready]
        self.ends.clear()
        self.ready.clear()
        self.context = 0.0
        return lost


class BatchedEngine(SimulatedEngine):
    """An engine that decodes. It has one batch for each stage. Before it begins a job, it reserves memory for the whole
    job, which is the prompt and the answer. `_done`: called with each job that has its last token."""

    def __init__(
        self,
        env: simpy.Environment,
        profile: Profile,
        shape: Shape,
        done: Callable[[SimulatedRequest], None],
        max_batch: int,
    ) -> None:
        """max_batch: the most requests that the engine decodes at once"""
        super().__init__(env, profile, shape)
        self._most, self._requests = max_batch, 0
        self._waiting: deque[SimulatedRequest] = deque()
        self._done = done
        self._lanes = [Lane() for _ in range(shape.pp)]
        self._wakes: list[simpy.Event | None] = [None] * shape.pp  # one for each lane that has nothing to do

    def _begin(self) -> Iterator[SimulatedRequest]:
        """Yield the jobs for which there is memory, in the order in which they came. A job that is larger than all
        memory begins when it is alone."""
        while self._waiting and self._requests < self._most and not self.down:
            job = self._waiting[0]
            tokens = job.context + job.left
            if self.used + tokens > self.capacity and self.used:
                return
            self._waiting.popleft()
            self._reserve(tokens)
            self._requests += 1
            yield job

    def _end(self, job: SimulatedRequest) -> None:
        """Note that a job has all its tokens."""
        self.used -= job.context
        self._requests -= 1
        job.last_s = self.env.now
        self._done(job)

    def _idle(self, number: int) -> simpy.Event:
        """Return the event for which a lane without work waits."""
        self._wakes[number] = wake = self.env.event()
        return wake

    def _rouse(self, number: int) -> bool:
        """Wake a lane. Returns whether the lane was without work."""
        wake = self._wakes[number]
        if wake is None or wake.triggered:
            return False
        wake.succeed()
        return True
