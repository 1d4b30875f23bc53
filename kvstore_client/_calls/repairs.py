"""Repairs: if a block's owner lacks it and another shard has it, the client sets it on the owner, in the background.

In this way, a new node gets its share of the blocks from their old owners, and a replica that lost a block gets it
again. No caller waits for a repair. A block is copied when it is found, because the reader may reuse its own memory.
The copies wait in a queue of bounded size. A block that does not fit is repaired when it is found the next time. Only
blocks whose checksum was verified are repaired, because wrong bytes would otherwise get a new, matching checksum.

The thread for repairs exists only while there is something to repair. Thread-safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvstore import wire
from kvstore.wire.attributes import Attributes
from kvstore_client._calls.batches import milliseconds, set_message
from kvstore_client._calls.exchange import Exchange, outcome
from kvstore_client._links.buffers import BlockSource
from kvstore_client._links.call import Call, Message
from kvstore_client._links.link import Link
from kvstore_client.errors import KVStoreError
from kvstore_client.keys import KeyArray

if TYPE_CHECKING:
    from kvstore_client._links.block_mac import BlockMac, SecretMissing

MAX_QUEUED_BYTES: Final = 64 << 20
REPAIR_BATCH_BYTES: Final = 4 << 20  # small, so that repairs do not occupy a connection for long

log = logging.getLogger("kvstore_client")


class _Repair(NamedTuple):
    link: Link
    key: bytes
    block: bytes
    attributes: Attributes  # one entry
    generation: int  # the namespace's generation before the block was read


class Repairs:
    """The repairs of one client. Thread-safe."""

    def __init__(
        self, exchange: Exchange, block_bytes: int, enabled: bool, mac: BlockMac | SecretMissing | None
    ) -> None:
        self._exchange = exchange
        self._mac = mac
        self._block_bytes = block_bytes
        self._enabled = enabled
        self.reset()

    def reset(self) -> None:
        """Forget everything. This is also called in a child process, where the thread does not exist."""
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._queue: deque[_Repair] = deque()
        self._under_way: Sequence[_Repair] = ()
        self._running = False

    def put(
        self, link: Link, keys: KeyArray, blocks: Iterable[memoryview], attributes: Attributes, generation: int
    ) -> None:
        """Queue copies of `blocks`, with the attributes of each block, for setting them on the shard of `link`. Never
        blocks. `generation`: the namespace's generation before the blocks were read."""
        if not self._enabled or link.broken is not None:
            return
        room = MAX_QUEUED_BYTES // self._block_bytes
        for number, block in enumerate(blocks):
            if len(self._queue) + len(self._under_way) >= room:
                self._exchange.pool.stats.repairs_dropped += len(keys) - number
                return
            repair = _Repair(link, keys[number].tobytes(), bytes(block), attributes[number : number + 1], generation)
            with self._lock:
                self._queue.append(repair)
                if not self._running:
                    try:
                        threading.Thread(target=self._run, name="kvstore-repair", daemon=True).start()
                    except RuntimeError as error:  # the system has no more threads, or the process is ending
                        log.warning("%d blocks are not repaired: %s", len(self._queue), error)
                        self._queue.clear()
                        return
                    self._running = True

    def cancel(self, keys: KeyArray, timeout_s: float) -> None:
        """Do not repair these blocks, because they are about to be deleted or replaced. If a repair of one of them is
        in progress, wait up to `timeout_s` for it."""
        if not self._running:
            return
        names = {key.tobytes() for key in keys}
        with self._idle:
            self._queue = deque(repair for repair in self._queue if repair.key not in names)
            self._idle.wait_for(lambda: not any(repair.key in names for repair in self._under_way), timeout_s)

    def cancel_all(self, timeout_s: float) -> None:
        """Drop all repairs, because all blocks will be removed. Wait up to `timeout_s` for repairs in progress."""
        with self._idle:
            self._queue.clear()
            self._idle.wait_for(lambda: not self._under_way, timeout_s)

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._repair(batch)
            except KVStoreError as error:  # the next reader that finds the blocks repairs them
                log.info("%d blocks were not repaired on %s: %s", len(batch), batch[0].link, error)
            except Exception:  # a defect must not end all repairs
                log.exception("%d blocks were not repaired on %s", len(batch), batch[0].link)

    def _next_batch(self) -> list[_Repair]:
        """Return the next blocks for one shard. If the list is empty, the thread must end."""
        batch: list[_Repair] = []
        per_batch = max(1, min(wire.MAX_FRAME_BLOCKS, REPAIR_BATCH_BYTES // self._block_bytes))
        with self._lock:
            if self._exchange.pool.closed:
                self._queue.clear()
            while self._queue and len(batch) < per_batch and (not batch or _go_together(self._queue[0], batch[0])):
                batch.append(self._queue.popleft())
            self._under_way = batch
            self._running = bool(batch)
            self._idle.notify_all()
        return batch

    def _repair(self, batch: Sequence[_Repair]) -> None:
        pool = self._exchange.pool
        keys = np.frombuffer(b"".join(repair.key for repair in batch), dtype=np.uint8).reshape(len(batch), -1)
        source = BlockSource([repair.block for repair in batch], self._block_bytes)
        attributes = np.concatenate([repair.attributes for repair in batch]).tobytes()
        macs = self._mac.batch(keys) if self._mac is not None else None

        def message(call: Call) -> Message:
            request = wire.Set(
                call.id,
                milliseconds(pool.timeout_s),
                len(keys),
                keys.shape[1],
                attributes=attributes,
                generation=batch[0].generation,
            )
            return set_message(request, keys, call.positions, source, macs)

        call = Call(batch[0].link, pool.next_id(), np.arange(len(keys)), message)
        self._exchange.run([call], time.monotonic() + pool.timeout_s)
        reply = outcome(call, wire.SetReply, fail_open=False)
        pool.stats.repaired += reply.created if reply is not None else 0


def _go_together(one: _Repair, other: _Repair) -> bool:
    return one.link is other.link and one.generation == other.generation
