"""The saves of one rank: out of the KV cache into the host pool, and from there to the store.

Copies of a block: cache -> row -> socket. A copy out of the cache is ordered behind the model's work and ends before
the engine may reuse the block: the scheduler's half keeps the blocks of finished requests, and `order_copies` waits for
the few copies under way. Ranks with the same part of every block may have one host pool: then the rank that sends a
block copies it. Of blocks in parts, each part is copied and sent when its last layer is computed.

A block that is copied waits until all ranks have found their weights unchanged since it was computed. If they have not,
it is not sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.jobs import Rows
from kvstore_client.engine.paged.host_copies import HostCopy
from kvstore_client.engine.paged.layout import BlockLayout, Copy, DetachedError, rows_of
from kvstore_client.engine.paged.plan import RankStore, SavedBlock, Saves, WorkerReport
from kvstore_client.engine.paged.unsent import AtEnd, Unsent
from kvstore_client.engine.paged.weights import WeightsWatch
from kvstore_client.engine.transfer_out import CHUNK_BYTES, BlockOut, SendOutcome, TransferOut

log = logging.getLogger("kvstore_client")

_IN_STORE = (SendOutcome.STORED, SendOutcome.PRESENT)


class _Part(NamedTuple):
    """A part of some of a job's blocks, to be sent when check `check` agrees."""

    check: int
    job: int
    part: int
    blocks: Sequence[SavedBlock]
    generation: int | None  # of this rank's namespace, when they were made


@dataclass
class OrderedCopies:
    """A job of which one part of the blocks is being copied out of the cache, until its blocks are sent."""

    saves: Saves
    part: int
    blocks: int  # that this rank copies
    copy: Copy | None  # None: it failed, or could not be started
    started: float

    def ended(self) -> bool:
        try:
            return self.copy is None or self.copy.done()
        except Exception:
            self.failed()
            return True

    def failed(self) -> None:
        """Called where its error is caught: what it copied cannot be trusted."""
        log.exception("kvstore: copying %d blocks out of the cache failed", len(self.saves.copied))
        self.copy = None


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
        weights: WeightsWatch,
    ) -> None:
        """pool, store, replica, weights: see `WorkerHalf`."""
        self._layout = layout
        self._weights = weights
        self._namespace = guard.namespace.id
        self._pool = pool
        self._replica, self._replicas = replica
        self._pool_is_shared = pool_is_shared
        self._counters = counters
        # At most half the slots may be on their way to the store, of all ranks that send from them together, including
        # the chunk on the wire. So there is always room for the blocks of the next steps; they displace others
        # in the queue.
        rows, chunk_blocks = store.slots * layout.parts, max(1, CHUNK_BYTES // guard.block_bytes)
        limit = (rows // 2 - min(chunk_blocks, rows // 4)) // self._replicas
        self._out = TransferOut(guard, limit=max(1, limit), counters=counters, done=self._sent, parts=layout.parts)
        # Guards the copies and what is told of them: a copy by a thread is sent from there, as no step may follow.
        self._settling = threading.RLock()
        self._copying: deque[OrderedCopies] = deque()
        self._unchecked: deque[_Part] = deque()
        self._void_below = 0
        self._copied_job = -1
        self._copied_parts = 0  # of the job that is being copied
        self._held: dict[str, int] = {}
        self._report = WorkerReport([store])
        self.unsent = Unsent()
        self._released: deque[tuple[tuple[int, int], bool]] = deque()  # job and slot; whether the store has the block
        # By job and slot: how many parts are on their way, and whether the store has the others.
        self._parts_left: dict[tuple[int, int], tuple[int, bool]] = {}
        self._lock = threading.Lock()
        self._saves: Saves | None = None  # of the current step
        self._to_compute: list[set[str]] = []  # by part, the layers that its blocks wait for

    def avoid(self, void_below: int) -> None:
        """What jobs below this number copy is not to be sent any more."""
        if void_below > self._void_below:
            with self._settling:
                self._void_below = void_below
            self._out.discard(lambda token: cast("tuple[int, int]", token)[0] < void_below)

    def begin(self, saves: Saves | None, held: Mapping[str, int]) -> None:
        """A step begins. held: finished requests whose blocks the engine keeps, each until which job is copied."""
        self._send_checked()
        self._held.update(held)
        self._saves = saves
        if saves is not None:
            self.unsent.add(saves.job, len(saves.copied) + len(saves.sent))
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
            self._send(self._part(saves, part, saves.sent))

    def _copy(self, saves: Saves, part: int) -> None:
        blocks = saves.copied
        if not blocks:
            return
        copy: Copy | None = None
        started = time.monotonic()
        if self._pool_is_shared:  # the rank that sends a block copies it, into the slot of all
            blocks = [block for block in blocks if self._is_mine(block.key)]
        slots = [block.slot for block in blocks]
        block_ids = [block.block_id for block in blocks if block.block_id is not None]
        try:
            copy = self._layout.swap_out(block_ids, self._pool, rows_of(slots, self._layout.parts, part), part)
        except DetachedError:
            log.info("kvstore: the engine went to sleep before %d blocks were copied out of the cache", len(slots))
        except Exception:
            log.exception("kvstore: copying %d blocks out of the cache failed", len(slots))
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
            self._send_checked()

    def _send_checked(self) -> None:
        """Send what waits for checks that have agreed since, and give up what they did not agree on."""
        with self._settling:
            for _ in range(len(self._unchecked)):
                self._send(self._unchecked.popleft())

    def _settle(self, copied: OrderedCopies) -> None:
        saves = copied.saves
        self._copied_parts = (self._copied_parts + 1) % self._layout.parts
        if not self._copied_parts:  # all parts of a job, which follow each other
            self._copied_job = saves.job
            self._report.copied[saves.job] += 1
        if copied.copy is None:
            self._report.broken.add(saves.job)
            self._release([((saves.job, block.slot), False) for block in saves.copied])
            return
        self._counters.add("swap_out_blocks", copied.blocks / self._layout.parts)
        self._counters.add("swap_out_bytes", copied.blocks * self._layout.part_bytes)
        self._counters.add("swap_out_seconds", time.monotonic() - copied.started)
        self._send(self._part(saves, copied.part, saves.copied))

    def _part(self, saves: Saves, part: int, blocks: Sequence[SavedBlock]) -> _Part:
        return _Part(saves.check, saves.job, part, blocks, saves.generations.get(self._namespace))

    def _send(self, each: _Part) -> None:
        """Queue this part of the blocks that this rank sends, once it may be sent, and release it for those that
        another rank sends."""
        _, job, part, blocks, generation = each
        with self._settling:
            agrees = self._weights.all_agree(each.check) if job >= self._void_below else False
            if agrees is None:
                self._unchecked.append(each)
                return
        if not agrees:
            self._counters.add("dropped_blocks", len(blocks) / self._layout.parts)
            self._release([((job, block.slot), False) for block in blocks])
            return
        if self._replicas > 1:
            self._release([((job, block.slot), False) for block in blocks if not self._is_mine(block.key)])
            blocks = [block for block in blocks if self._is_mine(block.key)]
        if blocks:
            suffix = bytes([part]) if self._layout.parts > 1 else b""
            rows = rows_of([block.slot for block in blocks], self._layout.parts, part)
            self._out.put(
                BlockOut(
                    key + suffix,
                    self._pool[row],
                    (job, slot),
                    None if parent is None else parent + suffix,
                    how,
                    generation,
                )
                for (key, slot, _, parent, how), row in zip(blocks, rows, strict=True)
            )

    def _is_mine(self, key: bytes) -> bool:
        return int.from_bytes(key[:4], "big") % self._replicas == self._replica

    def _sent(self, results: Sequence[tuple[Hashable, SendOutcome]]) -> None:
        self._release([(cast("tuple[int, int]", token), outcome in _IN_STORE) for token, outcome in results])

    def _release(self, results: Sequence[tuple[tuple[int, int], bool]]) -> None:
        """A part of each of these slots is not read any more; whether the store has it. With the last part, the slot is
        released."""
        parts = self._layout.parts
        if parts > 1:
            results = self._whole(results, parts)
        self.unsent.ended(results)
        self._released.extend(results)

    def _whole(self, results: Sequence[tuple[tuple[int, int], bool]], parts: int) -> list[tuple[tuple[int, int], bool]]:
        """-> the slots of which this was the last part; whether the store has all parts."""
        whole = []
        with self._lock:
            for token, is_stored in results:
                left, all_stored = self._parts_left.get(token, (parts, True))
                if left > 1:
                    self._parts_left[token] = left - 1, all_stored and is_stored
                else:
                    self._parts_left.pop(token, None)
                    whole.append((token, all_stored and is_stored))
        return whole

    def close(self, timeout_s: float) -> AtEnd:
        """Send the blocks that wait, until so long after the engine computed its last. -> what became of them."""
        timeout_s -= self.unsent.engine_ends()
        self._each_copy(lambda copy: copy.wait())
        self._settle_copies()
        with self._settling:
            dropped = sum(len(each.blocks) for each in self._unchecked)
            self._unchecked.clear()
        self._counters.add("dropped_blocks", dropped / self._layout.parts)
        self._out.close(max(0.0, timeout_s))
        return self.unsent.at_end()
