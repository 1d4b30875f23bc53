"""The engines of the simulator that do one phase. Each is a process of SimPy.

* A *prefill engine* takes prompts in the order in which they come. It takes several at once if they have fewer tokens
  together than are needed to saturate the GPU. With a pipeline, the next batch enters when the first stage is free. A
  short batch waits behind a long one in every stage, as it does in a real engine.
* A *decode engine* reserves memory for a request's whole prompt and answer before it fetches the blocks. The blocks of
  a request that does not fit stay where they are, because decode engines pull blocks. A request joins at the next step
  after its blocks have arrived. With a pipeline of n stages there are n batches, each in a different stage, and a batch
  does not wait for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import simpy

from kvstore_serving.planning.engine import BatchedEngine, SimulatedEngine, Steps
from kvstore_serving.planning.jobs import SimulatedRequest
from kvstore_serving.planning.placement import Shape
from kvstore_serving.planning.profile import Profile


class PrefillEngine(SimulatedEngine):
    """Does prefills. `done`: called with each job when its first token is computed. The job's tokens stay in the
    engine's memory until `release`."""

    def __init__(
        self,
        env: simpy.Environment,
        profile: Profile,
        shape: Shape,
        done: Callable[[PrefillEngine, SimulatedRequest], None],
        batch_tokens: int | None = None,
    ) -> None:
        """batch_tokens: the most tokens of several prompts that are computed at once; 1 means one prompt at a time, and
        None takes the number from the profile"""
        super().__init__(env, profile, shape)
        self._contention = profile.contention.prefill
        self.most = self.degree.prefill.saturating_tokens if batch_tokens is None else batch_tokens
        self._queue: deque[SimulatedRequest] = deque()
        self._running: dict[SimulatedRequest, None] = {}  # not a set, because the order matters
        self._free_s = [0.0] * shape.pp
        self._done = done
        env.process(self._run())

    def add(self, job: SimulatedRequest) -> None:
        """Queue a job that `expect` has announced."""
        self._queue.append(job)
        self.wake()

    def expect(self, job: SimulatedRequest) -> None:
        """Announce a job, which is added when its blocks from the store have arrived."""
        self.pending += job.context - job.hits

    def release(self, job: SimulatedRequest) -> None:
        """Free the memory of the job's blocks, which are no longer needed here."""
        self.used -= job.context
        self.wake()

    def _lose(self) -> list[SimulatedRequest]:
        lost = [*self._running, *self._queue]
        self._running.clear()
        self._queue.clear()
        self._free_s = [self.env.now] * self.pp
        return lost

    def _look(self) -> None:
        self.wake()

    def _batch(self) -> list[SimulatedRequest]:
        """Take the next jobs from the queue. Returns no jobs if none waits or the memory is full."""
        batch: list[SimulatedRequest] = []
        tokens = 0
        while self._queue and not self.down:
            job = self._queue[0]
            new = job.context - job.hits
            if batch and tokens + new > self.most:
                break
            # A prompt that is larger than all memory would never start, so it is computed alone. A real engine would
            # recompute it in pieces.
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

    def _finish(self, batch: list[SimulatedRequest]) -> None:
        for job in batch:
            self._running.pop(job, None)
            self.pending -= job.context - job.hits
            job.prefilled(self.env.now)
            self.used += 1
            self._done(self, job)


class DecodeEngine(BatchedEngine):
    """Decodes.

    fetch: called with each job for which there is memory; it calls `arrived` when the job's blocks have come
    done: called with each job that has its last token
    """

    def __init__(
        self,
        env: simpy.Environment,
        profile: Profile,
        shape: Shape,
        fetch: Callable[[DecodeEngine, SimulatedRequest], None],
        done: Callable[[SimulatedRequest], None],
        max_batch: int,
    ) -> None:
        """max_batch: the most requests that the engine decodes at once"""
        super().__init__(env, profile, shape, done, max_batch)
        self._contention = profile.contention.decode
        self._fetching: dict[SimulatedRequest, None] = {}
        self._fetch = fetch
        for number in range(shape.pp):
            env.process(self._run(number))

    def add(self, job: SimulatedRequest) -> None:
        """Queue a job whose prompt is computed."""
        self.pending += job.context + job.left
        self._waiting.append(job)
        self._look()

    def give_up(self, job: SimulatedRequest) -> None:
        """Give up a job whose blocks will not come."""
        self._fetching.pop(job, None)
        self.used -= job.context + job.left
        self.pending -= job.context + job.left
        self._requests -= 1

    def arrived(self, job: SimulatedRequest) -> None:
        """Note that all blocks of a job have arrived."""
        self._fetching.pop(job, None)
        lanes = self._lanes
        number = min(range(len(lanes)), key=lambda each: lanes[each].load) if len(lanes) > 1 else 0
        self._lanes[number].ready.append(job)
        self._rouse(number)

    def _lose(self) -> list[SimulatedRequest]:
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
            if self._waiting:
                self._look()
