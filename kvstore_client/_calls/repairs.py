"""Repairs: a block that its owner lacked and another shard had is set on its owner, in the background.

So a node that joined fills from the nodes that had its share, a replica that lost a block gets it again, and no caller
waits for that. A block is copied when it is found, since the reader may reuse its own memory. The copies wait in a
queue of bounded size; a block that does not fit is repaired when it is found the next time. Only blocks whose checksum
was verified are repaired: otherwise wrong bytes would get a new, matching checksum.

A thread lives while there is something to repair. Thread-safe.
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
BATCH_BYTES: Final = 4 << 20  # small, so that repairs do not hold up a connection for long

log = logging.getLogger("kvstore_client")


class _Repair(NamedTuple):
    link: Link
    key: bytes
    block: bytes
    attributes: Attributes  # one entry
    generation: int  # of the namespace, before the block was read


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
        """Forget everything. Also called in a child process, where the thread does not exist."""
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._queue: deque[_Repair] = deque()
        self._under_way: Sequence[_Repair] = ()
        self._running = False

    def put(
        self, link: Link, keys: KeyArray, blocks: Iterable[memoryview], attributes: Attributes, generation: int
    ) -> None:
        """Queue copies of `blocks`, with what goes with each of them, to be set on `link`'s shard. Never blocks.
        generation: of the namespace, before they were read."""
        if not self._enabled or link.broken is not None:
            return
        room = MAX_QUEUED_BYTES // self._block_bytes
        for number, block in enumerate(blocks):
            if len(self._queue) + len(self._under_way) >= room:
                self._exchange.core.stats.repairs_dropped += len(keys) - number
                return
            repair = _Repair(link, keys[number].tobytes(), bytes(block), attributes[number : number + 1], generation)
            with self._lock:
                self._queue.append(repair)
                if not self._running:
                    try:
                        threading.Thread(target=self._run, name="kvstore-repair", daemon=True).start()
                    except RuntimeError as error:  # the system has no more threads, or the process ends
                        log.warning("%d blocks are not repaired: %s", len(self._queue), error)
                        self._queue.clear()
                        return
                    self._running = True

    def cancel(self, keys: KeyArray, timeout_s: float) -> None:
        """Do not set these blocks again: they are about to be deleted or replaced. Waits up to `timeout_s` for a repair
        of them that is under way."""
        if not self._running:
            return
        names = {key.tobytes() for key in keys}
        with self._idle:
            self._queue = deque(repair for repair in self._queue if repair.key not in names)
            self._idle.wait_for(lambda: not any(repair.key in names for repair in self._under_way), timeout_s)

    def cancel_all(self, timeout_s: float) -> None:
        """Set no block again: all are about to be removed. Waits up to `timeout_s` for repairs that are under way."""
        with self._idle:
            self._queue.clear()
            self._idle.wait_for(lambda: not self._under_way, timeout_s)

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._repair(batch)
            except KVStoreError as error:  # the next reader that finds the blocks repairs them
                log.info("%d blocks were not repaired on %s: %s", len(batch), batch[0].link, error)
            except Exception:  # a defect of ours must not end all repairs
                log.exception("%d blocks were not repaired on %s", len(batch), batch[0].link)

    def _next_batch(self) -> list[_Repair]:
        """The next blocks for one shard. Empty: the thread must end."""
        batch: list[_Repair] = []
        per_batch = max(1, min(wire.MAX_FRAME_BLOCKS, BATCH_BYTES // self._block_bytes))
        with self._lock:
            if self._exchange.core.closed:
                self._queue.clear()
            while self._queue and len(batch) < per_batch and (not batch or _go_together(self._queue[0], batch[0])):
                batch.append(self._queue.popleft())
            self._under_way = batch
            self._running = bool(batch)
            self._idle.notify_all()
        return batch

    def _repair(self, batch: Sequence[_Repair]) -> None:
        core = self._exchange.core
        keys = np.frombuffer(b"".join(repair.key for repair in batch), dtype=np.uint8).reshape(len(batch), -1)
        source = BlockSource([repair.block for repair in batch], self._block_bytes)
        attributes = np.concatenate([repair.attributes for repair in batch]).tobytes()
        macs = self._mac.batch(keys) if self._mac is not None else None

        def message(call: Call) -> Message:
            request = wire.Set(
                call.id,
                milliseconds(core.timeout_s),
                len(keys),
                keys.shape[1],
                attributes=attributes,
                generation=batch[0].generation,
            )
            return set_message(request, keys, call.positions, source, macs)

        call = Call(batch[0].link, core.next_id(), np.arange(len(keys)), message)
        self._exchange.run([call], time.monotonic() + core.timeout_s)
        reply = outcome(call, wire.SetReply, fail_open=False)
        core.stats.repaired += reply.created if reply is not None else 0


def _go_together(one: _Repair, other: _Repair) -> bool:
    return one.link is other.link and one.generation == other.generation
