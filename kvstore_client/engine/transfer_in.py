"""Blocks on their way from the store to host memory, in the background of an engine.

Any number of jobs, two threads: one has the calls of all jobs under way (`multiplexer`), the other one places what
arrived. With a server on the host in front of the store there is a third. A job fetches its blocks chunk by chunk
straight into their rows. While the engine places a chunk that arrived, chunks of other jobs are on the wire.

Jobs come to their turn in the order in which they came, two at a time, so that many jobs do not all take from each
other. While a chunk is on the wire for long, its job does not count: it waits for a slow shard, which others may not
need. While there is such a one, two jobs at most have their turn that need the same shard. A job that waits for
blocks that were promised has its turn at once.

Every job ends: by its time, which begins with its turn; or, if its turn has not come, after as long as a call of the
store may take. It is always in one of four states (see `State`), each with an end: its time, the call's deadline, the
return of ``arrived``. ``done`` is called by the thread that places, once, after the last byte has come.

No copy is made here: blocks go from the socket to the caller's rows.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from queue import SimpleQueue
from typing import Final

import numpy as np

from kvstore_client._calls.exchange import Steps
from kvstore_client._links.link import Link
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.jobs import Arrived, Hits, Job, Rows, State, Within
from kvstore_client.engine.multiplexer import Multiplexer
from kvstore_client.engine.shared_rows import Stripe
from kvstore_client.engine.store import Store

# Payload of one round trip: large enough for full wire speed, small enough that placing one chunk overlaps the next.
CHUNK_BYTES: Final = 16 << 20
# Where blocks are waited for, they are placed as they come, and more jobs have rows of their own. Over a slow link a
# chunk is smaller, down to a part of that: about what comes in such a time, as a chunk begins to come when all of it is
# in the store.
WAITED_CHUNK_BYTES: Final = 8 << 20
WAITED_CHUNK_S: Final = 0.05
LEAST_WAITED: Final = 1 / 4
# Jobs that have their turn at a time, each with a chunk on the wire: more would only take from each other. One whose
# chunk is on the wire for longer than `SLOW_S` does not count; so many of those may wait for one shard.
AT_A_TIME: Final = 2
SLOW_S: Final = 0.1
# The first chunk of a job is such a part of it, and after this part of its time a job must be as far as it should be:
# so a store that is too slow is found out soon. Before any block has come from a store, the first chunk is one block.
# While the job would take so many times its time at this pace, further chunks double what has come, as of a few blocks
# most of the time is round trips; after `TRIED_S` it ends.
FIRST_CHUNK: Final = 1 / 8
GRACE: Final = 0.1
TRIED_S: Final = 0.05
HOPELESS: Final = 2.0
# Of the time that a job may wait for promised blocks, so much is kept for what comes when the wait ends: at least, and
# as a share; but no more than a call of the store may take.
ANSWER_S: Final = 0.1
ANSWER_SHARE: Final = 0.1

log = logging.getLogger("kvstore_client")


class TransferIn:
    """Fetches blocks of one namespace. Thread-safe. Valid in one process only.

    The rows belong to the caller; a job may write to its rows until its ``done`` is called. ``parts``: what is fetched
    are parts, of which a block has so many, mostly by as many jobs; counters count whole blocks.
    """

    def __init__(self, guard: StoreGuard, *, counters: Counters, parts: int = 1) -> None:
        self._guard = guard
        self._counters = counters
        self._parts = parts
        self.chunk_blocks = max(1, CHUNK_BYTES // parts // guard.block_bytes)
        self.waited_chunk_blocks = max(1, WAITED_CHUNK_BYTES // parts // guard.block_bytes)
        self._changed = threading.Condition()
        self._jobs: dict[Job, None] = {}  # in the order in which they came
        self._closed = False
        self._multiplexer: Multiplexer | None = None  # most ranks of some engines never load
        self._to_place: SimpleQueue[tuple[Job, Hits | None] | None] = SimpleQueue()
        self._placing: threading.Thread | None = None
        self._tried = False  # whether a block has ever come
        self._corrupt = 0  # the client's checksum errors that are in the counter already
        self._fetching = 0  # chunks on their way
        self._fetching_since = 0.0
        self._arrived = (0, 0.0)  # blocks, and for how long there was a chunk on its way, since `take_pace`

    @property
    def waiting(self) -> int:
        """Jobs that are queued or running."""
        return len(self._jobs)

    def submit(
        self,
        keys: Sequence[bytes],
        out: Rows | Callable[[], Rows | None],
        slots: Sequence[int],
        *,
        within: Within,
        arrived: Arrived,
        done: Callable[[], None],
        waits: bool = False,
        stripe: Stripe | None = None,
    ) -> Job:
        """Fetch block ``keys[i]`` into row ``out[slots[i]]``, chunk by chunk. Never blocks. ``out`` may be a function
        that returns the rows when the job's turn has come; None: there are none, it is asked again when another job
        has ended.

        After each chunk, ``arrived(first, hits)`` is called: ``hits[j]`` says whether block ``first + j`` is in its
        row. It returns whether to fetch the next chunk. ``within``: blocks that have not arrived by then are misses; a
        job that cannot end by then, at the pace at which its blocks arrive, may end sooner. ``waits``: blocks that were
        promised are waited for; the time begins now. ``stripe``: other ranks fetch the same blocks into the same rows;
        this one reads its share from the store. ``done()`` is always called, and last. Both are called from the
        thread that places; after ``close``, this call itself calls ``done()``.
        """
        job = Job(keys, out, slots, within, waits, arrived, done, stripe)
        if waits:
            within.begin(job.asked_at)
        with self._changed:
            closed = self._closed
            if not closed:
                self._jobs[job] = None
                if self._multiplexer is None:
                    self._placing = threading.Thread(target=self._place, name="kvstore-place", daemon=True)
                    self._placing.start()
                    self._multiplexer = Multiplexer(self._plan)
        if closed:
            job.state = State.OVER
            done()
        else:
            self._wake()
        return job

    def cancel(self, job: Job) -> None:
        """End a job soon, wherever it is. Never blocks; ``done`` is called as ever."""
        job.stopped = True
        if (task := job.task) is not None:
            task.stopped = True
        self._wake()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is left. -> False if ``timeout_s`` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self) -> None:
        """End all jobs, and wait for that. Blocks that have not come are misses."""
        with self._changed:
            self._closed = True
            multiplexer, placing = self._multiplexer, self._placing
        if multiplexer is None or placing is None:
            return
        multiplexer.close()
        with self._changed:
            for job in self._jobs:
                if job.state is State.QUEUED:
                    self._to_placer(job)
        self._to_place.put(None)
        placing.join()

    def take_pace(self) -> tuple[float, float]:
        """-> blocks that arrived since the last call, with those that other ranks fetched at the same time, and for how
        many seconds some were on their way. Without jobs that waited for promised blocks."""
        with self._changed:
            (arrived, seconds), self._arrived = self._arrived, (0, 0.0)
        return arrived / self._parts, seconds

    def _wake(self) -> None:
        if self._multiplexer is not None:
            self._multiplexer.wake()

    # ---- on the thread that has all calls under way --------------------------------------------------------------

    def _plan(self) -> float:
        """Send the chunks whose turn it is. -> when to look again."""
        now = time.monotonic()
        with self._changed:
            jobs = list(self._jobs)
        look_again, fresh, held_up = math.inf, list[Job](), Counter[Link]()
        for job in jobs:
            if not job.began or job.waits or job.state is State.OVER:
                continue
            task = job.task
            if job.state is State.ON_THE_WIRE and task is not None and now - job.sent_at >= SLOW_S:
                held_up.update(task.awaited_shards or self._shards_of(job))
            else:
                fresh.append(job)
            look_again = min(look_again, now + SLOW_S)
        for job in fresh if held_up else ():
            held_up.update(self._shards_of(job))
        turns = len(fresh)
        for job in jobs:
            if job.state is not State.QUEUED:
                continue
            deadline = job.within.deadline
            ends_at = min(job.asked_at + self._guard.timeout_s, job.within.latest) if deadline is None else deadline
            try:
                if job.stopped or not job.keys:
                    self._to_placer(job)
                elif now >= ends_at:
                    self._give_up(job)
                elif job.began or ((job.waits or self._may_begin(job, turns, held_up)) and self._has_rows(job)):
                    if not (job.began or job.waits):
                        turns += 1
                        held_up.update(self._shards_of(job) if held_up else ())
                    self._send(job, now)
                    look_again = min(look_again, now + SLOW_S)
                else:
                    look_again = min(look_again, ends_at)
            except Exception as error:  # the caller's ``out``, or a defect of ours: the others go on
                self._guard.failed(error)
                self._to_placer(job)
        return look_again

    def _give_up(self, job: Job) -> None:
        """Its time is over: all that is left is missing."""
        job.first, job.end = job.end, len(job.keys)
        missing = job.end - job.first
        self._counters.add(job.missed, missing / self._parts)
        self._to_placer(job, np.zeros(missing, dtype=np.bool_))

    def _may_begin(self, job: Job, turns: int, held_up: Counter[Link]) -> bool:
        if turns >= AT_A_TIME:
            return False
        return not held_up or all(held_up[shard] < AT_A_TIME for shard in self._shards_of(job))

    def _shards_of(self, job: Job) -> Set[Link]:
        if not job.shards:
            job.shards = self._guard.first_shards(job.keys)
        return job.shards

    def _has_rows(self, job: Job) -> bool:
        if job.rows is None:
            job.rows = job.out() if callable(job.out) else job.out
        return job.rows is not None

    def _next_chunk(self, job: Job) -> tuple[int, int]:
        most = self.waited_chunk_blocks if job.waits else self.chunk_blocks
        if job.waits and job.end:
            paced = max(most * LEAST_WAITED, (job.end - job.first) * WAITED_CHUNK_S / max(job.took_s, 1e-6))
            most = min(most, math.ceil(paced))
        if job.stripe is not None:
            most = job.stripe.most(most)
        if job.end:
            return job.end, min(len(job.keys), job.end + (min(most, job.end) if job.tries else most))
        return 0, 1 if not (self._tried or job.waits) else min(most, math.ceil(len(job.keys) * FIRST_CHUNK))

    def _send(self, job: Job, now: float) -> None:
        if not job.began:
            job.began = now
            job.tries = not (self._tried or job.waits)
        deadline = job.within.begin(now)
        job.first, job.end = self._next_chunk(job)
        share = 1.0 if job.waits else GRACE + (1 - GRACE) * job.end / len(job.keys)
        job.state, job.sent_at = State.ON_THE_WIRE, now
        assert self._multiplexer is not None
        until = job.began + (deadline - job.began) * share
        blocks = range(job.first, job.end)
        if job.stripe is None:
            steps = self._fetch(job, blocks, until)
        else:
            steps = job.stripe.steps(blocks, until, lambda mine: self._fetch(job, mine, until))
        job.task = task = self._multiplexer.start(steps, lambda hits: self._came(job, hits))
        if job.stopped:  # before it had a task
            task.stopped = True

    def _fetch(self, job: Job, blocks: Sequence[int], until: float) -> Steps[Hits]:
        keys, slots, out = [job.keys[block] for block in blocks], [job.slots[block] for block in blocks], job.rows
        ranks = 1 if job.stripe is None else job.stripe.ranks
        started = time.monotonic()
        nothing = np.zeros(len(keys), dtype=np.bool_)
        left = until - started
        if left <= 0:
            self._counters.add(job.missed, len(keys) / self._parts)
            return nothing
        timeout_s = min(left, self._guard.timeout_s)
        if job.waits:
            timeout_s = min(timeout_s, ANSWER_S + ANSWER_SHARE * left)
        wait_s = left - timeout_s if job.waits else 0.0

        def get(client: Store) -> Steps[Hits]:
            assert out is not None
            hits = yield from client.get_into_steps(keys, out, slots, wait_s=wait_s, timeout_s=timeout_s)
            self._count_corrupt(client.stats.checksum_errors)
            return hits

        hits = nothing
        self._count_fetching(not job.waits, started, 0)
        try:
            hits = yield from self._guard.steps(get, nothing)
        finally:
            arrived = int(hits.sum())
            self._count_fetching(-(not job.waits), time.monotonic(), 0 if job.waits else arrived * ranks)
        self._counters.add("transfer_in_blocks", arrived / self._parts)
        self._counters.add("transfer_in_bytes", arrived * self._guard.block_bytes)
        self._counters.add("transfer_in_seconds", time.monotonic() - started)
        self._counters.add(job.missed, (len(keys) - arrived) / self._parts)
        return hits

    def _came(self, job: Job, hits: Hits | None) -> None:
        """Its chunk has ended. On the thread of its task."""
        job.task = None
        job.took_s = time.monotonic() - job.sent_at
        self._tried = self._tried or bool(hits is not None and hits.any())
        self._to_placer(job, hits)

    def _to_placer(self, job: Job, hits: Hits | None = None) -> None:
        """Have what came of a job placed. None: there is nothing more to be told of it."""
        job.state = State.PLACING
        self._to_place.put((job, hits))
        self._wake()

    def _count_fetching(self, more: int, now: float, arrived: int) -> None:
        with self._changed:
            blocks, seconds = self._arrived
            on_their_way = now - self._fetching_since if self._fetching else 0.0
            self._arrived = blocks + arrived, seconds + on_their_way
            self._fetching += more
            self._fetching_since = now

    def _count_corrupt(self, total: int) -> None:
        with self._changed:
            news = max(0, total - self._corrupt)
            self._corrupt += news
        self._counters.add("checksum_errors", news)

    # ---- on the thread that places -------------------------------------------------------------------------------

    def _place(self) -> None:
        while (item := self._to_place.get()) is not None:
            job, hits = item
            goes_on = False
            try:
                goes_on = hits is not None and not job.stopped and self._placed(job, hits)
            except Exception as error:
                self._guard.failed(error)
            with self._changed:
                goes_on = goes_on and not self._closed
                if goes_on:
                    job.state = State.QUEUED
            if not goes_on:
                self._finish(job)
            self._wake()

    def _placed(self, job: Job, hits: Hits) -> bool:
        """Tell of a chunk. -> whether to fetch the next one."""
        if not job.arrived(job.first, hits) or job.end == len(job.keys):
            return False
        time_s = job.within.begin(job.began) - job.began
        passed_s = time.monotonic() - job.began
        needed_s = passed_s * len(job.keys) / max(1, job.end)
        if job.tries and hits.all() and needed_s > HOPELESS * time_s:
            if passed_s < TRIED_S:  # a round trip takes its time, however few blocks it brings
                return True
            self._counters.add("missed_blocks", (len(job.keys) - job.end) / self._parts)
            return False
        job.tries = False
        return True

    def _finish(self, job: Job) -> None:
        job.state, job.rows = State.OVER, None
        try:
            job.done()
        except Exception:  # a defect: the other jobs go on
            log.exception("kvstore: the end of a load failed; please report it")
            self._counters.add("defects")
        with self._changed:
            del self._jobs[job]
            self._changed.notify_all()
