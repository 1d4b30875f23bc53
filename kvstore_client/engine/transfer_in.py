"""Fetches blocks from the store into host memory, in the background of an engine.

Two threads serve any number of jobs. One runs the calls of all jobs (`multiplexer`). The other, the placing thread,
passes arrived blocks to the engine. If a server on the host is in front of the store, there is a third thread for its
calls. A job fetches its blocks chunk by chunk, directly into their rows. While the engine places one chunk, chunks of
other jobs are on the wire.

Jobs begin in the order in which they came, and two run at a time, so that many jobs do not slow each other down. A job
whose chunk is on the wire for long is not counted, because it waits for a slow shard that other jobs may not need.
While there is a slow job, at most two running jobs may need the same shard. A job that waits for promised blocks begins
at once.

Every job ends. Its time limit starts when the job begins; a job that has not begun ends after the timeout of one call
to the store. A job is always in one of four states (see `State`). Each state except the last ends by the job's time
limit, by the call's deadline, or when `arrived` returns. The placing thread calls `done` once, after the last byte has
come.

This module makes no copies: blocks go from the socket directly to the caller's rows.
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
from kvstore_client.engine.jobs import Arrived, FetchJob, Hits, Rows, State, Within
from kvstore_client.engine.multiplexer import Multiplexer
from kvstore_client.engine.shared_rows import Stripe
from kvstore_client.engine.store import Store

# The payload of one round trip. It is large enough for full wire speed, and small enough that one chunk is placed while
# the next is on the wire.
LOAD_CHUNK_BYTES: Final = 16 << 20
# Promised blocks are placed as they come, and more of these jobs have rows at once, so their chunks are smaller. On a
# slow link, a chunk shrinks to the size that arrives in WAITED_CHUNK_S, because the store starts to send a chunk only
# when it has all of the chunk. The smallest size is LEAST_WAITED times WAITED_CHUNK_BYTES.
WAITED_CHUNK_BYTES: Final = 8 << 20
WAITED_CHUNK_S: Final = 0.05
LEAST_WAITED: Final = 1 / 4
# The number of jobs that run at a time, each with a chunk on the wire. More jobs would only slow each other down. A job
# whose chunk is on the wire for longer than SLOW_CHUNK_S is not counted. While there is a slow job, at most
# JOBS_AT_A_TIME running jobs may need the same shard.
JOBS_AT_A_TIME: Final = 2
SLOW_CHUNK_S: Final = 0.1
# The first chunk of a job is the fraction FIRST_CHUNK of the job, or one block if the store has never sent a block.
# After the fraction GRACE of its time limit, a job that is behind schedule is dropped, so that a slow store is noticed
# soon. If a job began before the store had sent any block, its first chunks are small, and their time is mostly the
# round trip. So if this job would need more than HOPELESS times its time limit at the present rate, each further chunk
# has as many blocks as all chunks before it. The job ends if it would still need that long after TRIED_S.
FIRST_CHUNK: Final = 1 / 8
GRACE: Final = 0.1
TRIED_S: Final = 0.05
HOPELESS: Final = 2.0
# A job that waits for promised blocks reserves some of its time for receiving them when the wait ends. The reserve is
# REPLY_RESERVE_S plus the fraction REPLY_RESERVE_SHARE of the time left, but at most the timeout of one call to the
# store.
REPLY_RESERVE_S: Final = 0.1
REPLY_RESERVE_SHARE: Final = 0.1

log = logging.getLogger("kvstore_client")


class TransferIn:
    """Fetches blocks of one namespace. Thread-safe. It must not be used in a child process after a fork.

    The rows belong to the caller. A job may write to its rows until its `done` is called.

    * `guard`: The guard through which the store is called.
    * `counters`: The counters of blocks. They count whole blocks, even if blocks have slices.
    * `slices`: The number of slices of a block. If it is more than 1, slices are fetched instead of blocks, mostly with
      a job for each slice.
    """

    def __init__(self, guard: StoreGuard, *, counters: Counters, slices: int = 1) -> None:
        self._guard = guard
        self._counters = counters
        self._slices = slices
        self.chunk_blocks = max(1, LOAD_CHUNK_BYTES // slices // guard.block_bytes)
        self.waited_chunk_blocks = max(1, WAITED_CHUNK_BYTES // slices // guard.block_bytes)
        self._changed = threading.Condition()
        self._jobs: dict[FetchJob, None] = {}  # in the order in which they came
        self._closed = False
        self._multiplexer: Multiplexer | None = None  # made by the first job: some ranks never load
        self._to_place: SimpleQueue[tuple[FetchJob, Hits | None] | None] = SimpleQueue()
        self._placing: threading.Thread | None = None
        self._tried = False  # whether a block has ever come
        self._corrupt = 0  # checksum errors of the client that were counted already
        self._fetching = 0  # the number of chunks on their way
        self._fetching_since = 0.0
        self._arrived = (0, 0.0)  # since `take_pace`: blocks, and seconds with a chunk on its way

    @property
    def waiting(self) -> int:
        """The number of jobs that are queued or running."""
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
    ) -> FetchJob:
        """Fetch block `keys[i]` into row `out[slots[i]]`, chunk by chunk. Never blocks.

        The placing thread calls `arrived` and `done`. After `close`, `submit` itself calls `done`.

        * `keys`: The keys of the blocks, as bytes.
        * `out`: Either the rows, or a function that is called when the job can begin and returns them. If the function
          returns None, it is called again when another job has ended.
        * `slots`: The row for each key.
        * `within`: The time limit. Blocks that have not arrived by then are misses. A job may end earlier if its blocks
          arrive too slowly to meet the limit.
        * `arrived`: Called as `arrived(first, hits)` after each chunk; `hits[j]` says whether block `first + j` is in
          its row. It returns whether to fetch the next chunk.
        * `done`: Called without arguments when the job has ended. It is always called, exactly once, and after the last
          `arrived`.
        * `waits`: Whether to wait for promised blocks. If so, the time limit starts now.
        * `stripe`: This rank's share of a load that several ranks read into the same rows. None if this rank reads all
          blocks itself.
        """
        job = FetchJob(keys, out, slots, within, waits, arrived, done, stripe)
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

    def cancel(self, job: FetchJob) -> None:
        """End a job soon, whatever its state is. Never blocks. `done` is still called, after everything else.

        * `job`: The job that `submit` returned.
        """
        job.stopped = True
        if (task := job.task) is not None:
            task.stopped = True
        self._wake()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is left. Return False if that took longer than `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self) -> None:
        """End all jobs, and wait until they have ended. Blocks that have not arrived are misses."""
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
        """Return two numbers for the time since the last call: the blocks that arrived, and the seconds during which a
        chunk was on its way. Blocks that other ranks fetched at the same time are included. Jobs that waited for
        promised blocks are left out."""
        with self._changed:
            (arrived, seconds), self._arrived = self._arrived, (0, 0.0)
        return arrived / self._slices, seconds

    def _wake(self) -> None:
        if self._multiplexer is not None:
            self._multiplexer.wake()

    # ---- on the thread that runs all calls -----------------------------------------------------------------------

    def _plan(self) -> float:
        """Request the next chunk of each job that may run. Return the time at which to check again."""
        now = time.monotonic()
        with self._changed:
            jobs = list(self._jobs)
        look_again, fresh, held_up = math.inf, list[FetchJob](), Counter[Link]()
        for job in jobs:
            if not job.began or job.waits or job.state is State.OVER:
                continue
            task = job.task
            if job.state is State.ON_THE_WIRE and task is not None and now - job.sent_at >= SLOW_CHUNK_S:
                held_up.update(task.awaited_shards or self._shards_of(job))
            else:
                fresh.append(job)
            look_again = min(look_again, now + SLOW_CHUNK_S)
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
                    look_again = min(look_again, now + SLOW_CHUNK_S)
                else:
                    look_again = min(look_again, ends_at)
            except Exception as error:  # an error in the caller's `out`, or a defect of ours; other jobs continue
                self._guard.failed(error)
                self._to_placer(job)
        return look_again

    def _give_up(self, job: FetchJob) -> None:
        """End a job whose time is over. All blocks that are left are misses."""
        job.first, job.end = job.end, len(job.keys)
        missing = job.end - job.first
        self._counters.add(job.missed, missing / self._slices)
        self._to_placer(job, np.zeros(missing, dtype=np.bool_))

    def _may_begin(self, job: FetchJob, turns: int, held_up: Counter[Link]) -> bool:
        if turns >= JOBS_AT_A_TIME:
            return False
        return not held_up or all(held_up[shard] < JOBS_AT_A_TIME for shard in self._shards_of(job))

    def _shards_of(self, job: FetchJob) -> Set[Link]:
        if not job.shards:
            job.shards = self._guard.first_shards(job.keys)
        return job.shards

    def _has_rows(self, job: FetchJob) -> bool:
        if job.rows is None:
            job.rows = job.out() if callable(job.out) else job.out
        return job.rows is not None

    def _next_chunk(self, job: FetchJob) -> tuple[int, int]:
        most = self.waited_chunk_blocks if job.waits else self.chunk_blocks
        if job.waits and job.end:
            paced = max(most * LEAST_WAITED, (job.end - job.first) * WAITED_CHUNK_S / max(job.took_s, 1e-6))
            most = min(most, math.ceil(paced))
        if job.stripe is not None:
            most = job.stripe.most(most)
        if job.end:
            return job.end, min(len(job.keys), job.end + (min(most, job.end) if job.tries else most))
        return 0, 1 if not (self._tried or job.waits) else min(most, math.ceil(len(job.keys) * FIRST_CHUNK))

    def _send(self, job: FetchJob, now: float) -> None:
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
        if job.stopped:  # `cancel` was called before there was a task
            task.stopped = True

    def _fetch(self, job: FetchJob, blocks: Sequence[int], until: float) -> Steps[Hits]:
        keys, slots, out = [job.keys[block] for block in blocks], [job.slots[block] for block in blocks], job.rows
        ranks = 1 if job.stripe is None else job.stripe.ranks
        started = time.monotonic()
        nothing = np.zeros(len(keys), dtype=np.bool_)
        left = until - started
        if left <= 0:
            self._counters.add(job.missed, len(keys) / self._slices)
            return nothing
        timeout_s = min(left, self._guard.timeout_s)
        if job.waits:
            timeout_s = min(timeout_s, REPLY_RESERVE_S + REPLY_RESERVE_SHARE * left)
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
        self._counters.add("transfer_in_blocks", arrived / self._slices)
        self._counters.add("transfer_in_bytes", arrived * self._guard.block_bytes)
        self._counters.add("transfer_in_seconds", time.monotonic() - started)
        self._counters.add(job.missed, (len(keys) - arrived) / self._slices)
        return hits

    def _came(self, job: FetchJob, hits: Hits | None) -> None:
        """Note that the chunk of a job has ended. The thread of the job's task calls this."""
        job.task = None
        job.took_s = time.monotonic() - job.sent_at
        self._tried = self._tried or bool(hits is not None and hits.any())
        self._to_placer(job, hits)

    def _to_placer(self, job: FetchJob, hits: Hits | None = None) -> None:
        """Pass a job's chunk to the placing thread. `hits`: which blocks came. If it is None, the job ends without
        another call of `arrived`."""
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

    def _placed(self, job: FetchJob, hits: Hits) -> bool:
        """Report a chunk to the caller. Return whether to fetch the next chunk."""
        if not job.arrived(job.first, hits) or job.end == len(job.keys):
            return False
        time_s = job.within.begin(job.began) - job.began
        passed_s = time.monotonic() - job.began
        needed_s = passed_s * len(job.keys) / max(1, job.end)
        if job.tries and hits.all() and needed_s > HOPELESS * time_s:
            if passed_s < TRIED_S:  # a round trip takes time even for few blocks
                return True
            self._counters.add("missed_blocks", (len(job.keys) - job.end) / self._slices)
            return False
        job.tries = False
        return True

    def _finish(self, job: FetchJob) -> None:
        job.state, job.rows = State.OVER, None
        try:
            job.done()
        except Exception:  # a defect; the other jobs continue
            log.exception("kvstore: the end of a load failed; please report it")
            self._counters.add("defects")
        with self._changed:
            del self._jobs[job]
            self._changed.notify_all()
