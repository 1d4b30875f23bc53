"""An engine of the simulator that does both phases.

With chunked prefill, a step has all requests that decode, and as many tokens of prompts as its budget leaves. Without,
a step is either a prefill or a step of decoding, prefills first. With a pipeline of n stages there are n batches, each
in another stage; one does not wait for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import simpy

from kvstore_serving.planning.engine import BatchedEngine, Steps
from kvstore_serving.planning.jobs import Job
from kvstore_serving.planning.placement import Shape
from kvstore_serving.planning.profile import Profile


class ColocatedEngine(BatchedEngine):
    """`done`: called with each job that has its last token. `chunk_tokens`: the budget of a step; 0: no chunks."""

    def __init__(
        self,
        env: simpy.Environment,
        profile: Profile,
        shape: Shape,
        done: Callable[[Job], None],
        max_batch: int,
        chunk_tokens: int,
    ) -> None:
        super().__init__(env, profile, shape, done, max_batch)
        self._contention = profile.contention
        self._chunk = chunk_tokens
        self._prefilling: list[deque[tuple[Job, int]]] = [deque() for _ in range(shape.pp)]  # with tokens there are
        self._completing: list[list[Job]] = [[] for _ in range(shape.pp)]  # whose last tokens the present step computes
        for number in range(shape.pp):
            env.process(self._run(number))

    def expect(self, job: Job) -> None:
        """A job will come when what the store has of it is there."""
        self.pending += job.context - job.hits + job.left

    def add(self, job: Job) -> None:
        """Queue a job, whose tokens `expect` has announced."""
        self._waiting.append(job)
        self._look()

    def _lose(self) -> list[Job]:
        begun = [job for queue in self._prefilling for job, _ in queue]
        begun += [job for completing in self._completing for job in completing]
        self._completing = [[] for _ in range(self.pp)]
        lost = [*self._waiting, *begun, *(job for lane in self._lanes for job in lane.empty())]
        self._waiting.clear()
        for queue in self._prefilling:
            queue.clear()
        self._requests = 0
        return lost

    def _admit(self, number: int) -> None:
        for job in self._begin():
            job.begun_s = self.env.now
            self._prefilling[number].append((job, job.hits))

    def _chunks(self, number: int, decoding: int) -> tuple[list[Job], float, float]:
        """Take the next tokens of prompts. -> jobs whose prompts are then complete, tokens, how much squares grow."""
        queue = self._prefilling[number]
        complete: list[Job] = []
        tokens = squares = 0.0
        left = float(self._chunk - decoding) if self._chunk else float(self.degree.prefill.saturating_tokens)
        while True:
            if not queue:
                self._admit(number)
            if not queue or left <= 0:
                break
            job, there = queue[0]
            new = job.context - there
            if self._chunk:
                new = min(new, int(left))
            elif complete and new > left:
                break
            tokens += new
            left -= new
            squares += float(there + new) ** 2 - float(there) ** 2
            if there + new == job.context:
                complete.append(job)
                queue.popleft()
            else:
                queue[0] = (job, there + new)
        return complete, tokens, squares

    def _run(self, number: int) -> Steps:
        env, lane, prefill = self.env, self._lanes[number], self.degree.prefill
        while True:
            decoding = len(lane.ends)
            complete, tokens, squares = self._chunks(number, decoding) if not self.down else ([], 0.0, 0.0)
            decodes = decoding and (self._chunk or not tokens)
            if not decodes and not tokens:
                yield self._idle(number)
                continue
            took = self.step_s(decoding, lane.context) if decodes else self.stages_s
            if tokens:
                alone = prefill.of(tokens, squares)
                # One launch for both: the fixed cost is paid once.
                took += alone - (min(prefill.fixed_s, self._fixed(decoding)) if decodes else 0.0)
            epoch, self._completing[number] = self.epoch, complete
            took = yield from self.work(took, self._contention.prefill if tokens else self._contention.decode)
            if self.epoch != epoch:
                continue
            self._completing[number] = []
            self.busy_s += took / len(self._lanes)
            if decodes:
                self.pending -= decoding
                for job in lane.advance():
                    self._end(job)
            self.pending -= int(tokens)
            for job in complete:
                job.prefilled(env.now)
                self.pending -= 1
                if job.left:
                    lane.ready.append(job)
                else:
                    self._end(job)
            lane.join()

    def _look(self) -> None:
        for number in range(len(self._lanes)):
            if self._rouse(number):
                return

    def _fixed(self, requests: int) -> float:
        return next(fixed for start, fixed, _, _ in self._pieces if requests >= start)
