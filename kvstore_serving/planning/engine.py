"""What the engines of the simulator have in common, and a batch that decodes."""

from __future__ import annotations

import abc
import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, TypeAlias

import simpy

from kvstore_serving.planning.jobs import Job
from kvstore_serving.planning.placement import Shape
from kvstore_serving.planning.profile import Profile

Steps: TypeAlias = Generator[simpy.Event, Any, None]
# How often an engine looks whether its neighbours work.
LOOK_S: Final = 0.005


class Engine(abc.ABC):
    """What all engines have. `busy_s`: time in which its first stage worked. `epoch`: it counts the failures: what an
    earlier one began is of no account. `neighbours`: the other engines of its nodes. `working`: how many of its
    pipeline's batches are being computed."""

    def __init__(self, env: simpy.Environment, profile: Profile, shape: Shape) -> None:
        self.env = env
        self.degree = profile.degree(shape.tp)
        self.pp = shape.pp
        self.stages_s = profile.stage_s * shape.pp
        self.capacity = self.degree.kv_tokens[shape.pp]
        self.used = 0  # tokens that are reserved
        self.pending = 0  # tokens that it has yet to work on
        self.peak = 0
        self.busy_s = 0.0
        self.down = False
        self.epoch = 0
        self.neighbours: list[Engine] = []
        self.working = 0
        self._wake: simpy.Event | None = None
        self._pieces = [
            (times.from_batch, times.fixed_s, times.per_context_token_s, times.per_request_s)
            for times in reversed(self.degree.decode)
        ]

    def wake(self) -> None:
        """Have the process look again."""
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def fail(self) -> list[Job]:
        """Lose everything. -> the jobs that are to be done elsewhere."""
        self.epoch += 1
        self.down = True
        self.used = self.pending = 0
        return self._lose()

    def recover(self) -> None:
        """Work again."""
        self.down = False
        self._look()

    @abc.abstractmethod
    def _lose(self) -> list[Job]:
        """Forget all jobs. -> they."""

    @abc.abstractmethod
    def _look(self) -> None:
        """Begin what can be begun."""

    def _sleep(self) -> simpy.Event:
        self._wake = self.env.event()
        return self._wake

    def _reserve(self, tokens: int) -> None:
        self.used += tokens
        self.peak = max(self.peak, self.used)

    def step_s(self, requests: int, context: float) -> float:
        """A step of decoding, through all stages."""
        for start, fixed, per_token, per_request in self._pieces:
            if requests >= start:
                return fixed + per_token * context + per_request * requests + self.stages_s
        raise AssertionError("the first piece is for batches of 1")

    def work(self, seconds: float, contention: float) -> Generator[simpy.Event, Any, float]:
        """Compute for so long, and for `contention` times as long while a neighbour works. -> how long it took."""
        began = self.env.now
        self.working += 1
        if contention == 1.0 or not self.neighbours:
            yield self.env.timeout(seconds)
        else:
            while seconds > 0:
                part = min(seconds, LOOK_S)
                beside = any(each.working and not each.down for each in self.neighbours)
                yield self.env.timeout(part * contention if beside else part)
                seconds -= part
        self.working -= 1
        return self.env.now - began

    def after(self, delay_s: float, then: Callable[[], None]) -> None:
        """Call `then` after so long, unless the engine fails before."""
        epoch = self.epoch

        def due(_: simpy.Event) -> None:
            if self.epoch == epoch:
                then()

        timer = self.env.timeout(max(0.0, delay_s))
        timer.callbacks.append(due)


class Lane:
    """A batch that decodes: one of as many as there are stages."""

    def __init__(self) -> None:
        self.ready: list[Job] = []  # join at the next step
        self.ends: list[tuple[int, int, Job]] = []  # by the step after which a job has all its tokens
        self.step = 0
        self.context = 0.0
        self.joined = 0

    @property
    def load(self) -> int:
        return len(self.ends) + len(self.ready)

    def join(self) -> None:
        for job in self.ready:
            self.joined += 1
            heapq.heappush(self.ends, (self.step + job.left, self.joined, job))
            self.context += job.context
        self.ready.clear()

    def advance(self) -> list[Job]:
        """One token for each. -> those that have all of theirs."""
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

    def empty(self) -> list[Job]:
        """Give up all jobs, with what they have so far."""
        for end, _, job in self.ends:
            had = job.left - (end - self.step)
            job.left -= had
            job.context += had
        lost = [*(job for _, _, job in self.ends), *self.ready]
        self.ends.clear()
        self.ready.clear()
        self.context = 0.0
        return lost


class BatchedEngine(Engine):
    """An engine that decodes, in as many batches as it has stages. It reserves memory for all of a job, prompt and
    answer, before it begins it. `_done`: called with each job that has its last token."""

    def __init__(
        self, env: simpy.Environment, profile: Profile, shape: Shape, done: Callable[[Job], None], max_batch: int
    ) -> None:
        """max_batch: the most requests at once."""
        super().__init__(env, profile, shape)
        self._most, self._requests = max_batch, 0
        self._waiting: deque[Job] = deque()
        self._done = done
        self._lanes = [Lane() for _ in range(shape.pp)]
        self._wakes: list[simpy.Event | None] = [None] * shape.pp  # of lanes with nothing to do

    def _begin(self) -> Iterator[Job]:
        """The jobs for which there is memory, the longest waiting first. One that is larger than all memory is begun
        alone."""
        while self._waiting and self._requests < self._most and not self.down:
            job = self._waiting[0]
            tokens = job.context + job.left
            if self.used + tokens > self.capacity and self.used:
                return
            self._waiting.popleft()
            self._reserve(tokens)
            self._requests += 1
            yield job

    def _end(self, job: Job) -> None:
        """A job has its last token."""
        self.used -= job.context
        self._requests -= 1
        job.last_s = self.env.now
        self._done(job)

    def _idle(self, number: int) -> simpy.Event:
        """What a lane with nothing to do waits for."""
        self._wakes[number] = wake = self.env.event()
        return wake

    def _rouse(self, number: int) -> bool:
        """-> whether the lane had nothing to do; now it looks again."""
        wake = self._wakes[number]
        if wake is None or wake.triggered:
            return False
        wake.succeed()
        return True
