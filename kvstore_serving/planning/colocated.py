"""An engine of the simulator that does both phases, prefill and decode.

With chunked prefill, a step computes all requests that decode, and as many tokens of prompts as the rest of its budget
allows. Without chunked prefill, a step is either a prefill or a decoding step, and prefills come first. With a pipeline
of n stages there are n batches, each in a different stage, and a batch does not wait for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import simpy

from kvstore_serving.planning.engine import BatchedEngine, Steps
from kvstore_serving.planning.jobs import SimulatedRequest
from kvstore_serving.planning.placement import Shape
from kvstore_serving.planning.profile import Profile


class ColocatedEngine(BatchedEngine):
    """Does both phases.

    done: called with each job that has its last token
    chunk_tokens: the budget of a step in tokens; 0 if prompts are not computed in chunks
    """

    def __init__(
        self,
        env: simpy.Environment,
        profile: Profile,
        shape: Shape,
        done: Callable[[SimulatedRequest], None],
        max_batch: int,
        chunk_tokens: int,
    ) -> None:
        super().__init__(env, profile, shape, done, max_batch)
        self._contention = profile.contention
        self._chunk = chunk_tokens
        self._prefilling: list[deque[tuple[SimulatedRequest, int]]] = [
            deque() for _ in range(shape.pp)
        ]  # for each batch: its jobs, and how many of their tokens are computed
        self._completing: list[list[SimulatedRequest]] = [
            [] for _ in range(shape.pp)
        ]  # for each batch: the jobs whose last prompt tokens are computed in the present step
        for number in range(shape.pp):
            env.process(self._run(number))

    def expect(self, job: SimulatedRequest) -> None:
        """Announce a job, which is added when its blocks from the store have arrived."""
        self.pending += job.context - job.hits + job.left

    def add(self, job: SimulatedRequest) -> None:
        """Queue a job that `expect` has announced."""
        self._waiting.append(job)
        self._look()

    def _lose(self) -> list[SimulatedRequest]:
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

    def _chunks(self, number: int, decoding: int) -> tuple[list[SimulatedRequest], float, float]:
        """Take the next tokens of prompts. Returns the jobs whose prompts are then complete, the number of tokens
        taken, and the increase of the sum of squared lengths."""
        queue = self._prefilling[number]
        complete: list[SimulatedRequest] = []
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
                # Both are one launch, so the fixed cost is paid once.
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
