"""Blocks on their way from the store to host memory, in the background of an engine.

A few threads run one job each. A job fetches its blocks chunk by chunk straight into their rows. While the engine
places a chunk that arrived, a chunk of another job is on the wire.

No copy is made here: blocks go from the socket to the caller's rows. Whatever fails, ``done`` is called exactly once
for each job, so that the caller can always release its memory.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore_client.engine.guard import Counters, Store, StoreGuard
from kvstore_client.engine.shared_rows import Stripe

Rows: TypeAlias = "npt.NDArray[np.uint8]"

# Payload of one round trip: large enough for full wire speed, small enough that placing one chunk overlaps the next.
CHUNK_BYTES: Final = 32 << 20
# Where blocks are waited for, they are placed as they come, and more jobs have rows of their own.
WAITED_CHUNK_BYTES: Final = 8 << 20
# The first chunk of a job is such a part of it, and after this part of its time a job must be as far as it should be:
# so a store that is too slow is found out soon. Before any block has come from a store, the first chunk is one block,
# and the job ends if it would take so many times its time.
FIRST_CHUNK: Final = 1 / 8
GRACE: Final = 0.1
HOPELESS: Final = 2.0

Arrived: TypeAlias = "Callable[[int, npt.NDArray[np.bool_]], bool]"


class TransferIn:
    """Fetches blocks of one namespace. ``threads`` jobs run at a time; other jobs wait for their turn. Thread-safe.

    The rows belong to the caller; a job may write to its rows until its ``done`` is called. ``waits``: jobs wait for
    blocks that were promised, each until its deadline. ``parts``: what is fetched are parts, of which a block has so
    many, mostly by as many jobs; counters count whole blocks.
    """

    def __init__(
        self, guard: StoreGuard, *, threads: int, counters: Counters, waits: bool = False, parts: int = 1
    ) -> None:
        self._guard = guard
        self._counters = counters
        self._waits = waits
        self._parts = parts
        self._missed = "unkept_blocks" if waits else "missed_blocks"
        self.chunk_blocks = max(1, (WAITED_CHUNK_BYTES if waits else CHUNK_BYTES) // parts // guard.block_bytes)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-transfer-in")
        self._idle = threading.Condition()
        self._jobs = 0
        self._closed = False
        self._tried = False  # whether a block has ever come
        self._corrupt = 0  # the client's checksum errors that are in the counter already
        self._fetching = 0  # chunks on their way
        self._fetching_since = 0.0
        self._arrived = (0, 0.0)  # blocks, and for how long there was a chunk on its way, since `take_pace`

    @property
    def waiting(self) -> int:
        """Jobs that are queued or running."""
        return self._jobs

    def submit(
        self,
        keys: Sequence[bytes],
        out: Rows | Callable[[], Rows],
        slots: Sequence[int],
        *,
        deadline: float,
        arrived: Arrived,
        done: Callable[[], None],
        stripe: Stripe | None = None,
    ) -> None:
        """Fetch block ``keys[i]`` into row ``out[slots[i]]``, chunk by chunk. Never blocks. ``out`` may be a function
        that returns the rows when the job's turn has come; each transfer thread can then have rows of its own.

        After each chunk, ``arrived(first, hits)`` is called: ``hits[j]`` says whether block ``first + j`` is in its
        row. It returns whether to fetch the next chunk. ``deadline``, on the clock of ``time.monotonic()``: blocks that
        have not arrived by then are misses; a job that cannot end by then, at the pace at which its blocks arrive, may
        end sooner. ``done()`` is always called, and last. Both are called from a transfer's
        thread; after ``close``, this call itself calls ``done()``. ``stripe``: other ranks fetch the same blocks into
        the same rows; this one reads its share from the store.
        """
        with self._idle:
            self._jobs += 1
        try:
            self._threads.submit(self._run, keys, out, slots, deadline, arrived, done, stripe)
        except RuntimeError:  # shut down
            self._finish(done)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is left. -> False if ``timeout_s`` passed first."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._jobs, timeout_s)

    def close(self) -> None:
        """End all jobs, and wait for that. A chunk on the wire ends by its deadline; all later blocks are misses."""
        self._closed = True
        self._threads.shutdown(wait=True)

    def _run(
        self,
        keys: Sequence[bytes],
        out: Rows | Callable[[], Rows],
        slots: Sequence[int],
        deadline: float,
        arrived: Arrived,
        done: Callable[[], None],
        stripe: Stripe | None,
    ) -> None:
        try:
            rows = out() if callable(out) else out
            began = time.monotonic()
            tries = not self._tried and not self._waits
            chunk = self.chunk_blocks if stripe is None else stripe.most(self.chunk_blocks)
            first, end = 0, 1 if tries else min(chunk, math.ceil(len(keys) * FIRST_CHUNK))
            while first < len(keys):
                share = 1.0 if self._waits else GRACE + (1 - GRACE) * end / len(keys)
                until = began + (deadline - began) * share
                if stripe is None:
                    hits = self._fetch(keys[first:end], rows, slots[first:end], until)
                else:
                    read = functools.partial(self._fetch_some, keys, rows, slots, until, stripe.ranks)
                    hits = stripe.fetch(first, end, until, read)
                self._tried = self._tried or bool(hits.any())
                if not arrived(first, hits):
                    break
                needed = (time.monotonic() - began) * len(keys) / end
                if tries and hits.all() and needed > HOPELESS * (deadline - began):
                    self._counters.add("missed_blocks", (len(keys) - end) / self._parts)
                    break
                tries = False
                first, end = end, min(len(keys), end + chunk)
        except Exception as error:
            self._guard.failed(error)
        finally:
            self._finish(done)

    def _finish(self, done: Callable[[], None]) -> None:
        try:
            done()
        finally:
            with self._idle:
                self._jobs -= 1
                self._idle.notify_all()

    def _fetch_some(
        self,
        keys: Sequence[bytes],
        out: Rows,
        slots: Sequence[int],
        deadline: float,
        ranks: int,
        blocks: Sequence[int],
    ) -> npt.NDArray[np.bool_]:
        """Fetch blocks of these numbers, while so many ``ranks`` fetch as many others."""
        some = [keys[block] for block in blocks], out, [slots[block] for block in blocks]
        return self._fetch(*some, deadline, beside=ranks)

    def _fetch(
        self, keys: Sequence[bytes], out: Rows, slots: Sequence[int], deadline: float, beside: int = 1
    ) -> npt.NDArray[np.bool_]:
        started = time.monotonic()
        nothing = np.zeros(len(keys), dtype=np.bool_)
        left = deadline - started
        if left <= 0 or self._closed:
            self._counters.add(self._missed, len(keys) / self._parts)
            return nothing
        timeout_s = min(left, self._guard.timeout_s)
        wait_s = left - timeout_s if self._waits else 0.0

        def get(client: Store) -> npt.NDArray[np.bool_]:
            hits = client.get_into(keys, out, slots, wait_s=wait_s, timeout_s=timeout_s)
            self._count_corrupt(client.stats.checksum_errors)
            return hits

        with self._idle:
            self._fetching += 1
            if self._fetching == 1:
                self._fetching_since = started
        hits = self._guard.call(get, nothing)
        arrived = int(hits.sum())
        with self._idle:
            self._fetching -= 1
            now = time.monotonic()
            blocks, seconds = self._arrived
            self._arrived = blocks + arrived * beside, seconds + now - self._fetching_since
            self._fetching_since = now
        self._counters.add("transfer_in_blocks", arrived / self._parts)
        self._counters.add("transfer_in_bytes", arrived * self._guard.block_bytes)
        self._counters.add("transfer_in_seconds", time.monotonic() - started)
        self._counters.add(self._missed, (len(keys) - arrived) / self._parts)
        return hits

    def take_pace(self) -> tuple[float, float]:
        """-> blocks that arrived since the last call, with those that other ranks fetched at the same time, and for how
        many seconds some were on their way."""
        with self._idle:
            (arrived, seconds), self._arrived = self._arrived, (0, 0.0)
        return arrived / self._parts, seconds

    def _count_corrupt(self, total: int) -> None:
        with self._idle:  # another thread may have counted a later total
            news = max(0, total - self._corrupt)
            self._corrupt += news
        self._counters.add("checksum_errors", news)
