"""Sends blocks from host memory to the store, in the background of an engine.

One thread takes batches from a bounded queue, asks the store which of the blocks it has, and sets the others.

Each batch costs two requests, even if it is small, and requests use the engine's cores. So a block waits for others,
until `GATHER_BYTES` are queued but at most for `SEND_GATHER_S`. Other engines do not need a block sooner than that,
unless it is handed over to them.

When the queue is full, the blocks at the end of the oldest prompt are dropped. The newest prompts are the most likely
to be needed again, and a lookup finds only the blocks before a prompt's first gap. An engine never waits until the
queue has room.

Blocks that are handed over to another engine are sent first and are not dropped, because that engine waits for them. A
batch is limited to the bytes that the link carries in `BATCH_S` at the rate of the previous batch. So blocks that are
handed over do not wait long for a batch of other blocks.

This module makes no copies: blocks go from the caller's rows directly to the socket. Even after a failure, `done` is
called exactly once for each block, so that the caller can always release the block's memory.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.slices import PartialBlocks, slice_keys
from kvstore_client.engine.store import Store
from kvstore_client.engine.waiting_blocks import WaitingBlocks

Block: TypeAlias = "npt.NDArray[np.uint8] | memoryview"

# The largest payload of one round trip. It is enough for full wire speed.
SEND_CHUNK_BYTES: Final = 32 << 20
# The longest time that a block waits for others before it is sent, while fewer than GATHER_BYTES are queued.
SEND_GATHER_S: Final = 0.01
GATHER_BYTES: Final = 8 << 20
# The longest time that a batch should take. Batches of LEAST_BATCH_BYTES may take longer, because each batch waits for
# its replies, which take long from a distant store.
BATCH_S: Final = 0.5
LEAST_BATCH_BYTES: Final = 2 << 20
# How long the store keeps a slice if the other slices of its block do not come, because the engine that sends them is
# gone.
SLICE_TTL_S: Final = 30.0
# The limit of blocks that are partially stored at once, as a multiple of the queue limit.
PARTIAL_SHARE: Final = 2


class SendOutcome(enum.Enum):
    """The result of sending a block."""

    STORED = "stored"
    PRESENT = "present"  # not sent, because the store had it already
    DROPPED = "dropped"  # not sent, because the queue was full or closed
    FAILED = "failed"  # the store was out of reach or refused it


class SendAs(NamedTuple):
    """How a block is sent.

    * `priority`: Its priority in eviction, 0 to 3, as in `KVStoreClient.set`.
    * `ttl_s`: How long the store keeps it, in seconds. By default, the store's rule for the namespace applies.
    * `handed_over`: Whether another engine waits for it.
    """

    priority: int = 0
    ttl_s: float | None = None
    handed_over: bool = False


class BlockOut(NamedTuple):
    """A block to send.

    * `key`: Its key in the store.
    * `block`: Its bytes.
    * `token`: A value by which the caller identifies it in the results.
    * `parent`: The key of the block before it in its chain; None for the first block.
    * `how`: How it is sent.
    * `generation`: The `StoreGuard.generation` in which it was computed. If the store is at another generation, the
      block is not sent. If it is None, the block is sent in any case.
    """

    key: bytes
    block: Block
    token: Hashable
    parent: bytes | None = None
    how: SendAs = SendAs()
    generation: int | None = None


Done: TypeAlias = Callable[[Sequence[tuple[Hashable, SendOutcome]]], None]


class TransferOut:
    """Sends blocks of one namespace to the store. Thread-safe.

    The caller owns the blocks' memory and must not change it until `done` has named the block's token.

    * `guard`: The guard through which the store is called.
    * `limit`: The number of blocks that may wait in the queue; at least 1.
    * `counters`: The counters of blocks. They count whole blocks, even if blocks have slices.
    * `done`: Called with a list of `(token, outcome)` pairs. The transfer's own thread calls it; `put`, `discard` and
      `close` also call it for blocks that they drop. It must neither raise nor block.
    * `slices`: The number of slices of a block. If it is more than 1, slices are put instead of blocks, and the last
      byte of a key is the slice's number. The store keeps each slice only for `SLICE_TTL_S` at first. When it has all
      slices of a block, they get the time to live that was given to `put`. So slices of an incomplete block soon
      expire.
    """

    def __init__(self, guard: StoreGuard, *, limit: int, counters: Counters, done: Done, slices: int = 1) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: expected room for at least 1 block")
        self._guard = guard
        self._limit = limit
        self._slices = slices
        self._partial = PartialBlocks(slices, most=PARTIAL_SHARE * limit)
        self._counters = counters
        self._done = done
        self.chunk_blocks = max(1, SEND_CHUNK_BYTES // guard.block_bytes)
        # If the queue is small, blocks are sent before it is full, so that none have to be dropped.
        self._enough = max(1, min(self.chunk_blocks, limit // 2, GATHER_BYTES // guard.block_bytes))
        self._least_batch = min(self.chunk_blocks, max(1, LEAST_BATCH_BYTES // guard.block_bytes))
        self._batch_blocks = self._least_batch  # limit of the next batch; only the thread uses it
        self._queue: WaitingBlocks[BlockOut] = WaitingBlocks(remember=limit)
        self._first: deque[BlockOut] = deque()  # blocks that are handed over
        self._gathering_since = 0.0  # when the queue was last empty before a `put`
        self._lock = threading.Lock()
        # Two conditions, so that a `put` wakes the thread only when there is something to do.
        self._work = threading.Condition(self._lock)
        self._batch_ended = threading.Condition(self._lock)
        self._sending = 0
        self._hurried = 0  # the number of callers that are in `drain`
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-transfer-out", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of blocks in the queue or being sent."""
        return len(self._queue) + len(self._first) + self._sending

    def put(self, blocks: Iterable[BlockOut]) -> None:
        """Queue blocks. Each block must come after the block before it in its chain. Never blocks.

        If the queue is over its limit, blocks at the ends of the oldest chains are dropped, even if this call put them
        there. Blocks that are handed over are not dropped because of the limit. After a block is dropped, blocks that
        follow it in its chain are dropped too, until the queue has been empty.
        """
        dropped: list[BlockOut] = []
        with self._lock:
            first = not self._queue
            for each in blocks:
                if each.how.handed_over:
                    self._first.append(each)
                    self._queue.went(each.key)
                elif not self._queue.add(each):
                    dropped.append(each)
            if first:
                self._gathering_since = time.monotonic()
            surplus = len(self._queue) if self._closed else max(0, self.waiting - self._sending - self._limit)
            dropped += self._queue.cut(surplus)
            if self._closed:
                dropped += self._first
                self._first.clear()
            if first or self._is_enough():
                self._work.notify()
        self._report(dropped, SendOutcome.DROPPED)

    def discard(self, unwanted: Callable[[Hashable], bool]) -> None:
        """Drop the queued blocks for whose tokens `unwanted` returns True. Blocks on the wire are still sent. Never
        blocks."""
        dropped: list[BlockOut] = []
        with self._lock:
            dropped += [each for each in self._first if unwanted(each.token)]
            self._first = deque(each for each in self._first if not unwanted(each.token))
            dropped += self._queue.remove(unwanted)
            if dropped:
                self._batch_ended.notify_all()
        self._report(dropped, SendOutcome.DROPPED)

    def drain(self, timeout_s: float) -> bool:
        """Send the queued blocks at once, and wait until no block is queued or on the wire. Return False if that takes
        longer than `timeout_s` seconds."""
        with self._lock:
            self._hurried += 1
            self._work.notify()
            try:
                return self._batch_ended.wait_for(lambda: not self.waiting, timeout_s)
            finally:
                self._hurried -= 1

    def close(self, timeout_s: float) -> None:
        """Send queued blocks for up to `timeout_s` seconds, then drop the rest. If a batch is on the wire, wait for it
        for up to the timeout of one call."""
        self.drain(timeout_s)
        with self._lock:
            self._closed = True
            dropped = [*self._first, *self._queue.take(len(self._queue))]
            self._first.clear()
            self._work.notify()
            self._batch_ended.notify_all()
        self._report(dropped, SendOutcome.DROPPED)
        self._thread.join(self._guard.timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._queue or self._first or self._closed)
                self._work.wait_for(self._is_enough, self._gathering_since + SEND_GATHER_S - time.monotonic())
                if self._first:
                    batch = [self._first.popleft() for _ in range(min(self._batch_blocks, len(self._first)))]
                else:
                    batch = self._queue.take(self._batch_blocks)
                if not batch and not self._closed:  # its blocks were discarded
                    continue
                if not batch:
                    return
                self._sending = len(batch)
            started = time.monotonic()
            sent = self._send(batch)
            seconds = time.monotonic() - started
            self._counters.add("transfer_out_seconds", seconds)
            if seconds > BATCH_S:
                self._batch_blocks = max(self._least_batch, int(sent * BATCH_S / seconds))
            elif sent == self._batch_blocks:
                self._batch_blocks = min(self.chunk_blocks, 2 * sent)
            with self._lock:
                self._sending = 0
                self._batch_ended.notify_all()

    def _is_enough(self) -> bool:
        """Return whether to send queued blocks now."""
        return bool(self._first) or len(self._queue) >= self._enough or self._hurried > 0 or self._closed

    def _send(self, batch: list[BlockOut]) -> int:
        """Send a batch. Return the number of blocks that were sent."""
        keys = [each.key for each in batch]
        present = self._guard.call(lambda store: store.in_remote(keys), None)
        if present is None:
            self._report(batch, SendOutcome.FAILED)
            return 0
        current = self._guard.generation  # it is known, because the store has just answered
        wanted = [each.generation in (None, current) for each in batch]
        self._report([each for each, is_wanted in zip(batch, wanted, strict=True) if not is_wanted], SendOutcome.FAILED)
        there = [each for each, is_there in zip(batch, present & wanted, strict=True) if is_there]
        missing = [each for each, is_there in zip(batch, ~present & wanted, strict=True) if is_there]
        stored: list[BlockOut] = []
        most_s = SLICE_TTL_S if self._slices > 1 else math.inf
        if missing:
            lost = self._guard.call(lambda client: _set(client, missing, most_s), len(missing))
            stored = self._in_store(missing) if lost else missing  # the result does not say which blocks were lost
        failed = {each.key for each in missing} - {each.key for each in stored}
        if self._slices > 1:
            failed |= self._complete(there, stored)
        for some, outcome in ((there, SendOutcome.PRESENT), (missing, SendOutcome.STORED)):
            self._report([each for each in some if each.key not in failed], outcome)
            self._report([each for each in some if each.key in failed], SendOutcome.FAILED)
        return len(missing)

    def _in_store(self, blocks: Sequence[BlockOut]) -> list[BlockOut]:
        keys = [each.key for each in blocks]
        present = self._guard.call(lambda store: store.in_remote(keys), np.zeros(len(keys), dtype=np.bool_))
        return [each for each, is_there in zip(blocks, present, strict=True) if is_there]

    def _complete(self, there: Sequence[BlockOut], stored: Sequence[BlockOut]) -> set[bytes]:
        """Extend the time to live of blocks whose slices are all in the store now. If one of these blocks has meanwhile
        lost a slice, return the keys of its slices in this batch."""
        whole = self._partial.add([each.key for each in there], [each.key for each in stored])
        keys_by_ttl: dict[float | None, list[bytes]] = {}
        for each in (*there, *stored):
            if each.key[:-1] in whole:
                whole.discard(each.key[:-1])
                keys_by_ttl.setdefault(each.how.ttl_s, []).extend(slice_keys([each.key[:-1]], range(self._slices)))
        lost: set[bytes] = set()
        for ttl_s, keys in keys_by_ttl.items():
            kept = self._guard.call(functools.partial(_expire, keys, ttl_s), np.zeros(len(keys), dtype=np.bool_))
            lost.update(key[:-1] for key, is_kept in zip(keys, kept, strict=True) if not is_kept)
        return {each.key for each in (*there, *stored) if each.key[:-1] in lost}

    def _report(self, blocks: Sequence[BlockOut], outcome: SendOutcome) -> None:
        if not blocks:
            return
        if outcome is SendOutcome.STORED:
            self._counters.add("transfer_out_blocks", len(blocks) / self._slices)
            self._counters.add("transfer_out_bytes", len(blocks) * self._guard.block_bytes)
        else:
            self._counters.add(_OUTCOME_COUNTERS[outcome], len(blocks) / self._slices)
        self._done([(each.token, outcome) for each in blocks])


_OUTCOME_COUNTERS: Final = {
    SendOutcome.PRESENT: "present_blocks",
    SendOutcome.DROPPED: "dropped_blocks",
    SendOutcome.FAILED: "unsaved_blocks",
}


def _expire(keys: Sequence[bytes], ttl_s: float | None, store: Store) -> npt.NDArray[np.bool_]:
    return store.expire(keys, ttl_s=ttl_s)


def _set(client: Store, blocks: Sequence[BlockOut], most_s: float) -> int:
    """Set blocks with a time to live of at most `most_s` seconds. Return how many could not be stored. A deferred set
    is acknowledged as soon as the store owns the bytes, and every lookup finds the blocks from then on."""
    lost = 0
    for (how, generation), group in itertools.groupby(blocks, lambda each: (each.how, each.generation)):
        some = list(group)
        lost += client.set(
            [each.key for each in some],
            [each.block for each in some],
            deferred=True,
            parent=[each.parent for each in some],
            priority=how.priority,
            ttl_s=how.ttl_s if math.isinf(most_s) else min(most_s, how.ttl_s or most_s),
            generation=generation,
        ).error
    return lost
