"""Blocks on their way from host memory to the store, in the background of an engine.

One thread takes batches from a bounded queue, asks which blocks the store has, and sets the others. A batch costs two
requests however small it is, which the engine's cores pay for. So blocks wait for others, for `GATHER_S` at most, until
`GATHER_BYTES` are there; nobody waits for them so soon, or they are handed over. When the queue is
full, blocks of the oldest prompt are dropped, from its end: the newest prompts are the likeliest to be asked for again,
of a prompt only what is before the first gap is found, and an engine never waits for its cache. Blocks that are handed
over to another engine, which waits for them, go first and are not dropped. So that they need not wait long for a batch
of others, a batch is as large as the link carries in `BATCH_S`, by the batch before it.

No copy is made here: blocks go from the caller's rows to the socket. Whatever fails, ``done`` is called exactly once
for each block, so that the caller can always release its memory.
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
from kvstore_client.engine.parts import PartialBlocks, part_keys
from kvstore_client.engine.store import Store
from kvstore_client.engine.waiting_blocks import WaitingBlocks

Block: TypeAlias = "npt.NDArray[np.uint8] | memoryview"

# Payload of one round trip, at most: enough for full wire speed.
CHUNK_BYTES: Final = 32 << 20
# So long a block waits for others at most before it is sent, while there are fewer bytes than that.
GATHER_S: Final = 0.01
GATHER_BYTES: Final = 8 << 20
# So long a batch takes, but for small ones: each waits for its replies, which a distant store sends late.
BATCH_S: Final = 0.5
LEAST_BATCH_BYTES: Final = 2 << 20
# So long a part of a block is kept whose other parts do not come, because the engine that sends them is gone.
PART_TTL_S: Final = 30.0
# So many blocks, as many as may wait to be sent, may be in the store in part.
PARTIAL_SHARE: Final = 2


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


class BlockOut(NamedTuple):
    """A block on its way out. ``block``: its bytes. ``token``: what names it in the results. ``parent``: the key before
    it in its chain; None: it is the first. ``generation``: the `StoreGuard.generation` in which it was made: at another
    one it is not sent; None: it is sent whatever that is."""

    key: bytes
    block: Block
    token: Hashable
    parent: bytes | None = None
    how: SendAs = SendAs()
    generation: int | None = None


Done: TypeAlias = Callable[[Sequence[tuple[Hashable, SendOutcome]]], None]


class TransferOut:
    """Sends blocks of one namespace to the store. The caller owns the blocks' memory and must not change it until
    ``done`` has named the block's token. Thread-safe.

    ``limit``: how many blocks may wait in the queue. ``done(results)`` is called from the transfer's thread, or from
    ``put`` and ``close`` for the blocks they drop; it must neither raise nor block.

    ``parts``, more than 1: what is put are parts, of which a block has so many; the last byte of a key is the number of
    the part. Each is set to live for `PART_TTL_S`, and when the store has all of a block, they get the time to live
    that they were put with. So nothing is left of a block that does not become complete. Counters count whole blocks.
    """

    def __init__(self, guard: StoreGuard, *, limit: int, counters: Counters, done: Done, parts: int = 1) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: expected room for at least 1 block")
        self._guard = guard
        self._limit = limit
        self._parts = parts
        self._partial = PartialBlocks(parts, most=PARTIAL_SHARE * limit)
        self._counters = counters
        self._done = done
        self.chunk_blocks = max(1, CHUNK_BYTES // guard.block_bytes)
        # With little room, blocks do not wait until others are dropped for them.
        self._enough = max(1, min(self.chunk_blocks, limit // 2, GATHER_BYTES // guard.block_bytes))
        self._least_batch = min(self.chunk_blocks, max(1, LEAST_BATCH_BYTES // guard.block_bytes))
        self._batch_blocks = self._least_batch  # of the next one at most; used by the thread only
        self._queue: WaitingBlocks[BlockOut] = WaitingBlocks(remember=limit)
        self._first: deque[BlockOut] = deque()  # those that are handed over
        self._gathering_since = 0.0  # when the oldest block of the queue came, at the latest
        self._lock = threading.Lock()
        # Two, so that a `put` wakes the thread only when there is something to do.
        self._work = threading.Condition(self._lock)
        self._batch_ended = threading.Condition(self._lock)
        self._sending = 0
        self._hurried = 0  # callers of `drain`
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-transfer-out", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Blocks in the queue or being sent."""
        return len(self._queue) + len(self._first) + self._sending

    def put(self, blocks: Iterable[BlockOut]) -> None:
        """Queue blocks, each after the one before it in its chain. Beyond the limit, those at the ends of the oldest
        chains are dropped, even if this call put them there, but none that is handed over. While blocks wait, what
        follows a block that was dropped is dropped, too. Never blocks."""
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
        """Drop the queued blocks whose tokens are unwanted. What is on the wire is not held up. Never blocks."""
        dropped: list[BlockOut] = []
        with self._lock:
            dropped += [each for each in self._first if unwanted(each.token)]
            self._first = deque(each for each in self._first if not unwanted(each.token))
            dropped += self._queue.remove(unwanted)
            if dropped:
                self._batch_ended.notify_all()
        self._report(dropped, SendOutcome.DROPPED)

    def drain(self, timeout_s: float) -> bool:
        """Send at once what is queued, and wait until no block is queued or on the wire. -> False if ``timeout_s``
        passed first."""
        with self._lock:
            self._hurried += 1
            self._work.notify()
            try:
                return self._batch_ended.wait_for(lambda: not self.waiting, timeout_s)
            finally:
                self._hurried -= 1

    def close(self, timeout_s: float) -> None:
        """Send the queued blocks for up to ``timeout_s``, then drop the rest. Waits for a batch on the wire for as
        long as one call may take."""
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
                self._work.wait_for(self._is_enough, self._gathering_since + GATHER_S - time.monotonic())
                if self._first:
                    batch = [self._first.popleft() for _ in range(min(self._batch_blocks, len(self._first)))]
                else:
                    batch = self._queue.take(self._batch_blocks)
                if not batch and not self._closed:  # it was discarded
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
        """Whether to send now what is queued."""
        return bool(self._first) or len(self._queue) >= self._enough or self._hurried > 0 or self._closed

    def _send(self, batch: list[BlockOut]) -> int:
        """-> how many blocks were on the wire."""
        keys = [each.key for each in batch]
        present = self._guard.call(lambda store: store.in_remote(keys), None)
        if present is None:
            self._report(batch, SendOutcome.FAILED)
            return 0
        current = self._guard.generation  # the store has just said
        wanted = [each.generation in (None, current) for each in batch]
        self._report([each for each, is_wanted in zip(batch, wanted, strict=True) if not is_wanted], SendOutcome.FAILED)
        there = [each for each, is_there in zip(batch, present & wanted, strict=True) if is_there]
        missing = [each for each, is_there in zip(batch, ~present & wanted, strict=True) if is_there]
        stored: list[BlockOut] = []
        most_s = PART_TTL_S if self._parts > 1 else math.inf
        if missing:
            lost = self._guard.call(lambda client: _set(client, missing, most_s), len(missing))
            stored = self._in_store(missing) if lost else missing  # it does not tell which ones
        failed = {each.key for each in missing} - {each.key for each in stored}
        if self._parts > 1:
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
        """Have blocks live on of which the store has all parts now. -> the keys of these parts, if the block's
        others are not there any more."""
        whole = self._partial.add([each.key for each in there], [each.key for each in stored])
        keys_by_ttl: dict[float | None, list[bytes]] = {}
        for each in (*there, *stored):
            if each.key[:-1] in whole:
                whole.discard(each.key[:-1])
                keys_by_ttl.setdefault(each.how.ttl_s, []).extend(part_keys([each.key[:-1]], range(self._parts)))
        lost: set[bytes] = set()
        for ttl_s, keys in keys_by_ttl.items():
            kept = self._guard.call(functools.partial(_expire, keys, ttl_s), np.zeros(len(keys), dtype=np.bool_))
            lost.update(key[:-1] for key, is_kept in zip(keys, kept, strict=True) if not is_kept)
        return {each.key for each in (*there, *stored) if each.key[:-1] in lost}

    def _report(self, blocks: Sequence[BlockOut], outcome: SendOutcome) -> None:
        if not blocks:
            return
        if outcome is SendOutcome.STORED:
            self._counters.add("transfer_out_blocks", len(blocks) / self._parts)
            self._counters.add("transfer_out_bytes", len(blocks) * self._guard.block_bytes)
        else:
            self._counters.add(_COUNTERS[outcome], len(blocks) / self._parts)
        self._done([(each.token, outcome) for each in blocks])


_COUNTERS: Final = {
    SendOutcome.PRESENT: "present_blocks",
    SendOutcome.DROPPED: "dropped_blocks",
    SendOutcome.FAILED: "unsaved_blocks",
}


def _expire(keys: Sequence[bytes], ttl_s: float | None, store: Store) -> npt.NDArray[np.bool_]:
    return store.expire(keys, ttl_s=ttl_s)


def _set(client: Store, blocks: Sequence[BlockOut], most_s: float) -> int:
    """Set blocks, to live for so long at most. -> how many the store could not take. A deferred set is acknowledged
    once the store owns the bytes; every lookup sees the blocks from then on."""
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
