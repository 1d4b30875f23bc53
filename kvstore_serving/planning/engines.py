"""The engines of the simulator that do one phase, each a process of SimPy.

* A *prefill engine* takes prompts first come, first served, several at once while they are together no more than the
  tokens from which on a prefill is bound by computing. With a pipeline, the next batch enters when the first stage is
  free; a short batch waits behind a long one in every stage, as it does in an engine.
* A *decode engine* reserves memory for all of a request, prompt and answer, before it fetches its blocks: what does not
  fit stays where it is (pull). Whatever has come joins at the next step. With a pipeline of n stages there are n
  batches, each in another stage; one does not wait for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import simpy

from kvstore_serving.planning.engine import BatchedEngine, Engine, Steps
from kvstore_serving.planning.jobs import Job
from kvstore_serving.planning.placement import Shape
from kvstore_serving.planning.profile import Profile


class PrefillEngine(Engine):
    """`done`: called with each job whose first token is there. Its memory holds the job's tokens until `release`."""

    def __init__(
        self,
        env: simpy.Environment,
        profile: Profile,
        shape: Shape,
        done: Callable[[PrefillEngine, Job], None],
        batch_tokens: int | None = None,
    ) -> None:
        """batch_tokens: the most tokens of several prompts at once; None: from the profile; 1: one prompt at a time."""
        super().__init__(env, profile, shape)
        self._contention = profile.contention.prefill
        self.most = self.degree.prefill.saturating_tokens if batch_tokens is None else batch_tokens
        self._queue: deque[Job] = deque()
        self._running: dict[Job, None] = {}  # a set would not keep their order
        self._free_s = [0.0] * shape.pp
        self._done = done
        env.process(self._run())

    def add(self, job: Job) -> None:
        """Queue a job, whose tokens `expect` has announced."""
        self._queue.append(job)
        self.wake()

    def expect(self, job: Job) -> None:
        """A job will come when what the store has of it is there."""
        self.pending += job.context - job.hits

    def release(self, job: Job) -> None:
        """The job's blocks are no longer needed here."""
        self.used -= job.context
        self.wake()

    def _lose(self) -> list[Job]:
        lost = [*self._running, *self._queue]
        self._running.clear()
        self._queue.clear()
        self._free_s = [self.env.now] * self.pp
        return lost

    def _look(self) -> None:
        self.wake()

    def _batch(self) -> list[Job]:
        """Take the next jobs from the queue. Empty: nothing waits, or the memory is full."""
        batch: list[Job] = []
        tokens = 0
        while self._queue and not self.down:
            job = self._queue[0]
            new = job.context - job.hits
            if batch and tokens + new > self.most:
                break
            # A prompt beyond all memory would never go: it is computed alone, as an engine recomputes in pieces.
            if self.used + job.context > self.capacity and self.used:
                break
            self._reserve(job.context)
            tokens += new
            batch.append(self._queue.popleft())
        return batch

    def _run(self) -> Steps:
        env, times = self.env, self.degree.prefill
        while True:
            batch = self._batch()
            if not batch:
                yield self._sleep()
                continue
            tokens = squares = 0.0
            for job in batch:
                job.begun_s = env.now
                tokens += job.context - job.hits
                squares += float(job.context) ** 2 - float(job.hits) ** 2
            stage_s = times.of(tokens, squares) / self.pp + self.stages_s / self.pp
            self._running.update(dict.fromkeys(batch))
            epoch = self.epoch
            took = yield from self.work(stage_s, self._contention)
            if self.epoch != epoch:
                continue
            self.busy_s += took
            free, end = self._free_s, env.now
            for stage in range(1, self.pp):
                end = free[stage] = max(end, free[stage]) + took
            self.after(end - env.now, lambda batch=batch: self._finish(batch))  # type: ignore[misc]

    def _finish(self, batch: list[Job]) -> None:
        for job in batch:
            self._running.pop(job, None)
            self.pending -= job.context - job.hits
            job.prefilled(self.env.now)
            self.used += 1
            self._done(self, job)


class DecodeEngine(BatchedEngine):
    """`fetch`: called with a job for which there is memory; `arrived` is called when its blocks are there. `done`:
    called with each job that has its last token."""

    def __init__(
        self,
        env: simpy.Environment,
        profile: Profile,
        shape: Shape,
        fetch: Callable[[DecodeEngine, Job], None],
        done: Callable[[Job], None],
        max_batch: int,
    ) -> None:
        """max_batch: the most requests at once."""
        super().__init__(env, profile, shape, done, max_batch)
        self._contention = profile.contention.decode
        self._fetching: dict[Job, None] = {}
        self._fetch = fetch
        for number in range(shape.pp):
            env.process(self._run(number))

    def add(self, job: Job) -> None:
        """A job whose prefill is done."""
        self.pending += job.context + job.left
        self._waiting.append(job)
        self._look()

    def give_up(self, job: Job) -> None:
        """The blocks of a job will not come."""
        self._fetching.pop(job, None)
        self.used -= job.context + job.left
        self.pending -= job.context + job.left
        self._requests -= 1

    def arrived(self, job: Job) -> None:
        """All blocks of a job are here."""
        self._fetching.pop(job, None)
        number = min(range(len(self._lanes)), key=lambda each: self._lanes[each].load)
        self._lanes[number].ready.append(job)
        self._rouse(number)

    def _lose(self) -> list[Job]:
        lost = [*self._waiting, *self._fetching, *(job for lane in self._lanes for job in lane.empty())]
        self._waiting.clear()
        self._fetching.clear()
        self._requests = 0
        return lost

    def _look(self) -> None:
        for job in self._begin():
            self._fetching[job] = None
            self._fetch(self, job)

    def _run(self, number: int) -> Steps:
        lane = self._lanes[number]
        while True:
            lane.join()
            if not lane.ends:
                yield self._idle(number)
                continue
            epoch = self.epoch
            took = yield from self.work(self.step_s(len(lane.ends), lane.context), self._contention)
            if self.epoch != epoch:
                continue
            self.busy_s += took / len(self._lanes)
            for job in lane.advance():
                self.pending -= job.context
                self._end(job)
            self._look()
