"""Transfers between host memory and the store, in the background of an engine.

Out: one thread takes batches from a bounded queue, asks which blocks the store has, and sets the others. When the
queue is full, the oldest unsent blocks are dropped: the newest are the likeliest to be asked for again, and an engine
never waits for its cache. Blocks that are handed over to another engine, which waits for them, go first and are not
dropped.

In: a few threads run one job each. A job fetches its blocks chunk by chunk straight into their rows. While the engine
places a chunk that arrived, a chunk of another job is on the wire.

No copy is made here: blocks go from the caller's rows to the socket, and from the socket to the caller's rows. Whatever
fails, ``done`` is called exactly once for each block on its way out and for each job on its way in, so that the
caller can always release the memory that it holds for a transfer.
"""

from __future__ import annotations

import enum
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore_client.engine.guard import Counters, Store, StoreGuard
from kvstore_client.engine.parts import in_remote

Rows: TypeAlias = "npt.NDArray[np.uint8]"
Block: TypeAlias = "npt.NDArray[np.uint8] | memoryview"

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


class SendOutcome(enum.Enum):
    """What became of a block on its way out."""

    STORED = "stored"
    PRESENT = "present"  # not sent: the store had it already
    DROPPED = "dropped"  # not sent: the queue was full or closed
    FAILED = "failed"  # the store was out of reach or did not take it


class SendAs(NamedTuple):
    """How a block is sent: its priority and time to live in the store, as the client's `set` takes them, and whether
    another engine waits for it."""

    priority: int = 0
    ttl_s: float | None = None
    handed_over: bool = False


class _Waiting(NamedTuple):
    key: bytes
    block: Block
    token: Hashable
    parent: bytes | None  # the key before it in its chain; None: it is the first
    how: SendAs


Done: TypeAlias = Callable[[Sequence[tuple[Hashable, SendOutcome]]], None]


class TransferOut:
    """Sends blocks of one namespace to the store. The caller owns the blocks' memory and must not change it until
    ``done`` has named the block's token. Thread-safe.

    ``limit``: how many blocks may wait in the queue. ``done(results)`` is called from the transfer's thread, or from
    ``put`` and ``close`` for the blocks they drop; it must neither raise nor block.
    """

    def __init__(self, guard: StoreGuard, *, limit: int, counters: Counters, done: Done) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: expected room for at least 1 block")
        self._guard = guard
        self._limit = limit
        self._counters = counters
        self._done = done
        self._batch = max(1, CHUNK_BYTES // guard.block_bytes)
        self._queue: deque[_Waiting] = deque()
        self._first: deque[_Waiting] = deque()  # those that are handed over
        self._changed = threading.Condition()
        self._sending = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-transfer-out", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Blocks in the queue or being sent."""
        return len(self._queue) + len(self._first) + self._sending

    def put(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Block],
        tokens: Sequence[Hashable],
        parents: Sequence[bytes | None],
        how: Sequence[SendAs] | None = None,
    ) -> None:
        """Queue blocks. ``parents[i]``: the key before ``keys[i]`` in its chain, None for a chain's first. Beyond the
        limit, the oldest in the queue are dropped, even if this call put them there, but none that is handed over.
        Never blocks."""
        if how is None:
            how = [SendAs()] * len(keys)
        with self._changed:
            for each in map(_Waiting._make, zip(keys, blocks, tokens, parents, how, strict=True)):
                (self._first if each.how.handed_over else self._queue).append(each)
            surplus = len(self._queue) if self._closed else max(0, self.waiting - self._sending - self._limit)
            dropped = [self._queue.popleft() for _ in range(min(surplus, len(self._queue)))]
            if self._closed:
                dropped += self._first
                self._first.clear()
            self._changed.notify_all()
        self._report(dropped, SendOutcome.DROPPED)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no block is queued or on the wire. -> False if ``timeout_s`` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.waiting, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Send the queued blocks for up to ``timeout_s``, then drop the rest. Waits for a batch on the wire for as
        long as one call may take."""
        self.drain(timeout_s)
        with self._changed:
            self._closed = True
            dropped = [*self._first, *self._queue]
            self._first.clear()
            self._queue.clear()
            self._changed.notify_all()
        self._report(dropped, SendOutcome.DROPPED)
        self._thread.join(self._guard.timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._first or self._closed)
                queue = self._first or self._queue
                if not queue:
                    return
                batch = [queue.popleft() for _ in range(min(self._batch, len(queue)))]
                self._sending = len(batch)
            started = time.monotonic()
            self._send(batch)
            self._counters.add("transfer_out_seconds", time.monotonic() - started)
            with self._changed:
                self._sending = 0
                self._changed.notify_all()

    def _send(self, batch: list[_Waiting]) -> None:
        keys = [each.key for each in batch]
        present = self._guard.call(lambda store: in_remote(store, keys), None)
        if present is None:
            return self._report(batch, SendOutcome.FAILED)
        missing = [each for each, there in zip(batch, present, strict=True) if not there]
        self._report([each for each, there in zip(batch, present, strict=True) if there], SendOutcome.PRESENT)
        if not missing:
            return None
        stored = np.ones(len(missing), dtype=np.bool_)
        if self._guard.call(lambda client: _set(client, missing), len(missing)):  # it does not tell which ones
            keys = [each.key for each in missing]
            stored = self._guard.call(lambda store: in_remote(store, keys), np.zeros(len(missing), dtype=np.bool_))
        self._report([each for each, there in zip(missing, stored, strict=True) if there], SendOutcome.STORED)
        self._report([each for each, there in zip(missing, stored, strict=True) if not there], SendOutcome.FAILED)

    def _report(self, blocks: Sequence[_Waiting], outcome: SendOutcome) -> None:
        if not blocks:
            return
        if outcome is SendOutcome.STORED:
            self._counters.add("transfer_out_blocks", len(blocks))
            self._counters.add("transfer_out_bytes", len(blocks) * self._guard.block_bytes)
        else:
            self._counters.add(_COUNTERS[outcome], len(blocks))
        self._done([(each.token, outcome) for each in blocks])


_COUNTERS: Final = {
    SendOutcome.PRESENT: "present_blocks",
    SendOutcome.DROPPED: "dropped_blocks",
    SendOutcome.FAILED: "unsaved_blocks",
}


def _set(client: Store, blocks: Sequence[_Waiting]) -> int:
    """Set blocks. -> how many the store could not take. A deferred set is acknowledged once the store owns the bytes;
    every lookup sees the blocks from then on."""
    lost = 0
    for how, group in itertools.groupby(blocks, lambda each: each.how):
        some = list(group)
        lost += client.set(
            [each.key for each in some],
            [each.block for each in some],
            deferred=True,
            parent=[each.parent for each in some],
            priority=how.priority,
            ttl_s=how.ttl_s,
        ).error
    return lost


Arrived: TypeAlias = "Callable[[int, npt.NDArray[np.bool_]], bool]"


class TransferIn:
    """Fetches blocks of one namespace. ``threads`` jobs run at a time; other jobs wait for their turn. Thread-safe.

    The rows belong to the caller; a job may write to its rows until its ``done`` is called. ``waits``: jobs wait for
    blocks that were promised, each until its deadline.
    """

    def __init__(self, guard: StoreGuard, *, threads: int, counters: Counters, waits: bool = False) -> None:
        self._guard = guard
        self._counters = counters
        self._waits = waits
        self._missed = "unkept_blocks" if waits else "missed_blocks"
        self.chunk_blocks = max(1, (WAITED_CHUNK_BYTES if waits else CHUNK_BYTES) // guard.block_bytes)
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
    ) -> None:
        """Fetch block ``keys[i]`` into row ``out[slots[i]]``, chunk by chunk. Never blocks. ``out`` may be a function
        that returns the rows when the job's turn has come; each transfer thread can then have rows of its own.

        After each chunk, ``arrived(first, hits)`` is called: ``hits[j]`` says whether block ``first + j`` is in its
        row. It returns whether to fetch the next chunk. ``deadline``, on the clock of ``time.monotonic()``: blocks that
        have not arrived by then are misses; a job that cannot end by then, at the pace at which its blocks arrive, may
        end sooner. ``done()`` is always called, and last. Both are called from a transfer's
        thread; after ``close``, this call itself calls ``done()``.
        """
        with self._idle:
            self._jobs += 1
        try:
            self._threads.submit(self._run, keys, out, slots, deadline, arrived, done)
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
    ) -> None:
        try:
            rows = out() if callable(out) else out
            began = time.monotonic()
            tries = not self._tried and not self._waits
            first, end = 0, 1 if tries else min(self.chunk_blocks, math.ceil(len(keys) * FIRST_CHUNK))
            while first < len(keys):
                share = 1.0 if self._waits else GRACE + (1 - GRACE) * end / len(keys)
                until = began + (deadline - began) * share
                hits = self._fetch(keys[first:end], rows, slots[first:end], until)
                self._tried = self._tried or bool(hits.any())
                if not arrived(first, hits):
                    break
                needed = (time.monotonic() - began) * len(keys) / end
                if tries and hits.all() and needed > HOPELESS * (deadline - began):
                    self._counters.add("missed_blocks", len(keys) - end)
                    break
                tries = False
                first, end = end, min(len(keys), end + self.chunk_blocks)
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

    def _fetch(self, keys: Sequence[bytes], out: Rows, slots: Sequence[int], deadline: float) -> npt.NDArray[np.bool_]:
        started = time.monotonic()
        nothing = np.zeros(len(keys), dtype=np.bool_)
        left = deadline - started
        if left <= 0 or self._closed:
            self._counters.add(self._missed, len(keys))
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
            self._arrived = blocks + arrived, seconds + now - self._fetching_since
            self._fetching_since = now
        self._counters.add("transfer_in_blocks", arrived)
        self._counters.add("transfer_in_bytes", arrived * self._guard.block_bytes)
        self._counters.add("transfer_in_seconds", time.monotonic() - started)
        self._counters.add(self._missed, len(keys) - arrived)
        return hits

    def take_pace(self) -> tuple[int, float]:
        """-> blocks that arrived since the last call, and for how many seconds some were on their way."""
        with self._idle:
            taken, self._arrived = self._arrived, (0, 0.0)
        return taken

    def _count_corrupt(self, total: int) -> None:
        with self._idle:  # another thread may have counted a later total
            news = max(0, total - self._corrupt)
            self._corrupt += news
        self._counters.add("checksum_errors", news)
