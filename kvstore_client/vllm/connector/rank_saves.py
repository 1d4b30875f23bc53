"""The saves of one rank: out of the KV cache into the host pool, and from there to the store.

Copies of a block: cache -> row -> socket. A copy out of the cache is ordered behind the model's work and ends before
the engine may reuse the block: the scheduler's half keeps the blocks of finished requests, and `order_copies` waits for
the few copies under way. Ranks with the same part of every block may have one host pool: then the rank that sends a
block copies it. Of blocks in parts, each part is copied and sent when its last layer is computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import cast

from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.jobs import Rows
from kvstore_client.engine.transfer_out import CHUNK_BYTES, SendAs, SendOutcome, TransferOut
from kvstore_client.vllm.connector.host_copies import HostCopy
from kvstore_client.vllm.connector.layout import BlockLayout, Copy, rows_of
from kvstore_client.vllm.connector.ordered_copies import OrderedCopies
from kvstore_client.vllm.connector.plan import RankStore, Saves, WorkerReport

logger = logging.getLogger(f"vllm.{__name__}")

_IN_STORE = (SendOutcome.STORED, SendOutcome.PRESENT)


class RankSaves:
    """Call every method from the model's thread. A failure does not raise: a block whose save fails is not saved."""

    def __init__(
        self,
        guard: StoreGuard,
        layout: BlockLayout,
        pool: Rows,
        *,
        store: RankStore,
        replica: tuple[int, int],
        pool_is_shared: bool,
        counters: Counters,
    ) -> None:
        """pool, store, replica: see `WorkerHalf`."""
        self._layout = layout
        self._pool = pool
        self._replica, self._replicas = replica
        self._pool_is_shared = pool_is_shared
        self._counters = counters
        # At most half the slots may be on their way to the store, of all ranks that send from them together, including
        # the chunk on the wire. So there is always room for the blocks of the next steps; they displace the oldest
        # blocks in the queue.
        rows, chunk_blocks = store.slots * layout.parts, max(1, CHUNK_BYTES // guard.block_bytes)
        limit = (rows // 2 - min(chunk_blocks, rows // 4)) // self._replicas
        self._out = TransferOut(guard, limit=max(1, limit), counters=counters, done=self._sent, parts=layout.parts)
        # Guards the copies and what is told of them: a copy by a thread is sent from there, as no step may follow.
        self._settling = threading.RLock()
        self._copying: deque[OrderedCopies] = deque()
        self._copied_job = -1
        self._copied_parts = 0  # of the job that is being copied
        self._held: dict[str, int] = {}
        self._report = WorkerReport([store])
        self._released: deque[tuple[tuple[int, int], bool]] = deque()  # job and slot; whether the store has the block
        # By job and slot: how many parts are on their way, and whether the store has the others.
        self._parts_left: dict[tuple[int, int], tuple[int, bool]] = {}
        self._lock = threading.Lock()
        self._saves: Saves | None = None  # of the current step
        self._to_compute: list[set[str]] = []  # by part, the layers that its blocks wait for

    @property
    def waiting_blocks(self) -> int:
        """Blocks on their way to the store."""
        return -(-self._out.waiting // self._layout.parts)

    def begin(self, saves: Saves | None, held: Mapping[str, int]) -> None:
        """A step begins. held: finished requests whose blocks the engine keeps, each until which job is copied."""
        self._held.update(held)
        self._saves = saves
        self._to_compute = [set(layers) for layers in self._layout.layers] if saves else []

    def layer_computed(self, layer: str) -> None:
        """The model's work on this layer is queued: with the last layer of a part, start to copy and send it. Of a
        block that is not in parts, nothing can be sent yet."""
        if self._layout.parts == 1 or self._saves is None:
            return
        for part, layers in enumerate(self._to_compute):
            if layer in layers:
                layers.discard(layer)
                if not layers:
                    self._copy(self._saves, part)
        self._settle_copies()

    def order_copies(self) -> None:
        """Have the model wait for all copies out of the cache: it is about to write to blocks that were others'."""
        self._each_copy(lambda copy: copy.order())

    def _each_copy(self, call: Callable[[Copy], None]) -> None:
        with self._settling:
            under_way = list(self._copying)
        for copying in under_way:  # not under the lock, which a thread takes that has made a copy
            try:
                if (copy := copying.copy) is not None:
                    call(copy)
            except Exception:
                copying.failed()
                self._counters.add("defects")

    def save(self) -> None:
        """Start the copies of the step's blocks that have not begun, ordered behind the model's work on them, and send
        the blocks that are in their slots already."""
        saves, to_compute = self._saves, self._to_compute
        self._saves, self._to_compute = None, []
        if saves is None:
            return
        for part, layers in enumerate(to_compute):
            if layers:
                self._copy(saves, part)
        for part in range(self._layout.parts):
            self._send(saves.job, part, saves.send_keys, saves.send_slots, saves.send_parents, saves.send_how)

    def _copy(self, saves: Saves, part: int) -> None:
        if not saves.slots:
            return
        copy: Copy | None = None
        started = time.monotonic()
        block_ids, slots = saves.block_ids, saves.slots
        if self._pool_is_shared:  # the rank that sends a block copies it, into the slot of all
            mine = [index for index, key in enumerate(saves.keys) if self._is_mine(key)]
            block_ids, slots = [block_ids[index] for index in mine], [slots[index] for index in mine]
        try:
            copy = self._layout.swap_out(block_ids, self._pool, rows_of(slots, self._layout.parts, part), part)
        except Exception:
            logger.exception("kvstore: copying %d blocks out of the cache failed", len(slots))
        with self._settling:
            self._copying.append(OrderedCopies(saves, part, len(slots), copy, started))
        if isinstance(copy, HostCopy):
            copy.then(self._settle_copies)

    def take_saved(self) -> set[str]:
        """The finished requests, since the last call, whose blocks have been copied: the engine may reuse them."""
        self._settle_copies()
        copied_job = self._copied_job
        saved = {request_id for request_id, job in self._held.items() if job <= copied_job}
        for request_id in saved:
            del self._held[request_id]
        return saved

    def take_report(self, arrived: tuple[float, float]) -> WorkerReport | None:
        """The report to the scheduler's half, with the loads' pace: what ended since the last call; None if nothing
        did."""
        with self._settling:
            self._settle_copies()
            while self._released:
                token, is_stored = self._released.popleft()
                self._report.released[token] += 1
                if is_stored:
                    self._report.stored[token] += 1
            self._report.arrived_blocks, self._report.arriving_seconds = arrived
            if not self._report:
                return None
            report, self._report = self._report, WorkerReport()
            return report

    def _settle_copies(self) -> None:
        with self._settling:
            while self._copying and self._copying[0].ended():
                self._settle(self._copying.popleft())

    def _settle(self, copied: OrderedCopies) -> None:
        saves = copied.saves
        self._copied_parts = (self._copied_parts + 1) % self._layout.parts
        if not self._copied_parts:  # all parts of a job, which follow each other
            self._copied_job = saves.job
            self._report.copied[saves.job] += 1
        if copied.copy is None:
            self._report.broken.add(saves.job)
            self._release([((saves.job, slot), False) for slot in saves.slots])
            return
        self._counters.add("swap_out_blocks", copied.blocks / self._layout.parts)
        self._counters.add("swap_out_bytes", copied.blocks * self._layout.part_bytes)
        self._counters.add("swap_out_seconds", time.monotonic() - copied.started)
        self._send(saves.job, copied.part, saves.keys, saves.slots, saves.parents, saves.how)

    def _send(
        self,
        job: int,
        part: int,
        keys: Sequence[bytes],
        slots: Sequence[int],
        parents: Sequence[bytes | None],
        how: Sequence[SendAs],
    ) -> None:
        """Queue this part of the blocks that this rank sends, and release it for those that another rank sends."""
        sent: Sequence[int] = range(len(keys))
        if self._replicas > 1:
            mine = [self._is_mine(key) for key in keys]
            self._release([((job, slot), False) for slot, is_mine in zip(slots, mine, strict=True) if not is_mine])
            sent = [index for index, is_mine in enumerate(mine) if is_mine]
        if sent:
            suffix = bytes([part]) if self._layout.parts > 1 else b""
            self._out.put(
                [keys[index] + suffix for index in sent],
                [self._pool[row] for row in rows_of([slots[index] for index in sent], self._layout.parts, part)],
                [(job, slots[index]) for index in sent],
                [None if (parent := parents[index]) is None else parent + suffix for index in sent],
                [how[index] for index in sent],
            )

    def _is_mine(self, key: bytes) -> bool:
        return int.from_bytes(key[:4], "big") % self._replicas == self._replica

    def _sent(self, results: Sequence[tuple[Hashable, SendOutcome]]) -> None:
        self._release([(cast("tuple[int, int]", token), outcome in _IN_STORE) for token, outcome in results])

    def _release(self, results: Sequence[tuple[tuple[int, int], bool]]) -> None:
        """A part of each of these slots is not read any more; whether the store has it. With the last part, the slot is
        released."""
        parts = self._layout.parts
        if parts == 1:
            self._released.extend(results)
            return
        with self._lock:
            for token, is_stored in results:
                left, all_stored = self._parts_left.get(token, (parts, True))
                if left > 1:
                    self._parts_left[token] = left - 1, all_stored and is_stored
                else:
                    self._parts_left.pop(token, None)
                    self._released.append((token, all_stored and is_stored))

    def close(self, timeout_s: float) -> None:
        """Send the blocks that wait, for so long at most."""
        self._each_copy(lambda copy: copy.wait())
        self._settle_copies()
        self._out.close(timeout_s)
