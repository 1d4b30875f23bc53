"""The saves of one rank, from the KV cache into the host pool and from there to the store.

A block is copied from the cache to a row, and from there to a socket. A copy out of the cache begins after the model's
work on the block, and ends before the engine may reuse the block. To make sure of this, the scheduler's half keeps the
blocks of finished requests, and `order_copies` waits for the few copies in progress. Ranks with the same slice of every
block may share one host pool. In that case, the rank that sends a block also copies it. If blocks are in slices, each
slice is copied and sent when its last layer is computed.

A copied block waits until all ranks have found that their weights have not changed since it was computed. If the
weights of a rank have changed, the block is not sent.
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
from kvstore_client.engine.transfer_out import SEND_CHUNK_BYTES, BlockOut, SendOutcome, TransferOut

log = logging.getLogger("kvstore_client")

_IN_STORE = (SendOutcome.STORED, SendOutcome.PRESENT)


class _Slice(NamedTuple):
    """One slice of some blocks of a job. It is sent when the check with the number `check` agrees."""

    check: int
    job: int
    slice_index: int
    blocks: Sequence[SavedBlock]
    generation: int | None  # of this rank's namespace when the blocks were computed


@dataclass
class OrderedCopies:
    """The copies of one slice of a job's blocks out of the cache, until the slice is sent."""

    saves: Saves
    slice_index: int
    blocks: int  # the number of blocks that this rank copies
    copy: Copy | None  # None if it failed or could not be started
    started: float

    def ended(self) -> bool:
        try:
            return self.copy is None or self.copy.done()
        except Exception:
            self.failed()
            return True

    def failed(self) -> None:
        """Log the error that is being handled, and give up the copied bytes, which cannot be trusted."""
        log.exception("kvstore: copying %d blocks out of the cache failed", len(self.saves.copied))
        self.copy = None


class RankSaves:
    """The saves of one rank. Call every method from the model's thread. A failure raises no error; a block whose save
    fails is just not saved."""

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
        """For `pool`, `store`, `replica` and `weights`, see `WorkerHalf`."""
        self._layout = layout
        self._weights = weights
        self._namespace = guard.namespace.id
        self._pool = pool
        self._replica, self._replicas = replica
        self._pool_is_shared = pool_is_shared
        self._counters = counters
        # At most half the slots may be on their way to the store. This includes the chunk on the wire, and is a limit
        # for all ranks that send from the same pool together. So there is always room for the blocks of the next steps.
        # If necessary, queued blocks are dropped to make this room.
        rows, chunk_blocks = store.slots * layout.slices, max(1, SEND_CHUNK_BYTES // guard.block_bytes)
        limit = (rows // 2 - min(chunk_blocks, rows // 4)) // self._replicas
        self._out = TransferOut(guard, limit=max(1, limit), counters=counters, done=self._sent, slices=layout.slices)
        # Protects the copies and their reports. When a thread has made a copy, that thread also sends it, because there
        # may be no further step.
        self._settling = threading.RLock()
        self._copying: deque[OrderedCopies] = deque()
        self._unchecked: deque[_Slice] = deque()
        self._void_below = 0
        self._copied_job = -1
        self._copied_slices = 0  # copied slices of the present job
        self._held: dict[str, int] = {}
        self._report = WorkerReport([store])
        self.unsent = Unsent()
        self._released: deque[tuple[tuple[int, int], bool]] = deque()  # (job, slot), and whether it is stored
        # For each job and slot: how many slices are on their way, and whether the store has all the others.
        self._slices_left: dict[tuple[int, int], tuple[int, bool]] = {}
        self._lock = threading.Lock()
        self._saves: Saves | None = None  # the saves of the current step
        self._to_compute: list[set[str]] = []  # for each slice, the layers that are not computed yet

    def avoid(self, void_below: int) -> None:
        """Do not send blocks of jobs with numbers below this one."""
        if void_below > self._void_below:
            with self._settling:
                self._void_below = void_below
            self._out.discard(lambda token: cast("tuple[int, int]", token)[0] < void_below)

    def begin(self, saves: Saves | None, held: Mapping[str, int]) -> None:
        """Note that a step begins. `saves`: the blocks to save. `held`: for each finished request, the number of a job.
        The engine keeps the request's blocks until the copies of all jobs up to that number are made."""
        self._send_checked()
        self._held.update(held)
        self._saves = saves
        if saves is not None:
            self.unsent.add(saves.job, len(saves.copied) + len(saves.sent))
        self._to_compute = [set(layers) for layers in self._layout.layers] if saves else []

    def layer_computed(self, layer: str) -> None:
        """Note that the model's work on this layer is queued. If it is the last layer of a slice, start to copy and
        send the slice. If blocks have no slices, this does nothing."""
        if self._layout.slices == 1 or self._saves is None:
            return
        for slice_index, layers in enumerate(self._to_compute):
            if layer in layers:
                layers.discard(layer)
                if not layers:
                    self._copy(self._saves, slice_index)
        self._settle_copies()

    def order_copies(self) -> None:
        """Make the model wait for all copies out of the cache, because it is about to write to blocks that belonged to
        other requests."""
        self._each_copy(lambda copy: copy.order())

    def _each_copy(self, call: Callable[[Copy], None]) -> None:
        with self._settling:
            under_way = list(self._copying)
        for copying in under_way:  # without the lock, because the thread that makes a copy takes it
            try:
                if (copy := copying.copy) is not None:
                    call(copy)
            except Exception:
                copying.failed()
                self._counters.add("defects")

    def save(self) -> None:
        """Start the copies of the step's blocks that have not begun yet. They wait for the model's work on these
        blocks. Also send the blocks that are in their slots already."""
        saves, to_compute = self._saves, self._to_compute
        self._saves, self._to_compute = None, []
        if saves is None:
            return
        for slice_index, layers in enumerate(to_compute):
            if layers:
                self._copy(saves, slice_index)
        for slice_index in range(self._layout.slices):
            self._send(self._slice(saves, slice_index, saves.sent))

    def _copy(self, saves: Saves, slice_index: int) -> None:
        blocks = saves.copied
        if not blocks:
            return
        copy: Copy | None = None
        started = time.monotonic()
        if self._pool_is_shared:  # the rank that sends a block also copies it, into the shared slot
            blocks = [block for block in blocks if self._is_mine(block.key)]
        slots = [block.slot for block in blocks]
        block_ids = [block.block_id for block in blocks if block.block_id is not None]
        try:
            copy = self._layout.swap_out(
                block_ids, self._pool, rows_of(slots, self._layout.slices, slice_index), slice_index
            )
        except DetachedError:
            log.info("kvstore: the engine went to sleep before %d blocks were copied out of the cache", len(slots))
        except Exception:
            log.exception("kvstore: copying %d blocks out of the cache failed", len(slots))
        with self._settling:
            self._copying.append(OrderedCopies(saves, slice_index, len(slots), copy, started))
        if isinstance(copy, HostCopy):
            copy.then(self._settle_copies)

    def take_saved(self) -> set[str]:
        """Return the finished requests whose blocks have been copied since the last call, so that the engine may reuse
        these blocks."""
        self._settle_copies()
        copied_job = self._copied_job
        saved = {request_id for request_id, job in self._held.items() if job <= copied_job}
        for request_id in saved:
            del self._held[request_id]
        return saved

    def take_report(self, arrived: tuple[float, float]) -> WorkerReport | None:
        """Return the report for the scheduler's half about the time since the last call, or None if there is nothing to
        report. `arrived`: the result of `RankLoads.take_pace`."""
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
        """Send the waiting blocks whose checks agree now, and drop those whose checks do not."""
        with self._settling:
            for _ in range(len(self._unchecked)):
                self._send(self._unchecked.popleft())

    def _settle(self, copied: OrderedCopies) -> None:
        saves = copied.saves
        self._copied_slices = (self._copied_slices + 1) % self._layout.slices
        if not self._copied_slices:  # that was the last slice of the job
            self._copied_job = saves.job
            self._report.copied[saves.job] += 1
        if copied.copy is None:
            self._report.broken.add(saves.job)
            self._release([((saves.job, block.slot), False) for block in saves.copied])
            return
        self._counters.add("swap_out_blocks", copied.blocks / self._layout.slices)
        self._counters.add("swap_out_bytes", copied.blocks * self._layout.slice_bytes)
        self._counters.add("swap_out_seconds", time.monotonic() - copied.started)
        self._send(self._slice(saves, copied.slice_index, saves.copied))

    def _slice(self, saves: Saves, slice_index: int, blocks: Sequence[SavedBlock]) -> _Slice:
        return _Slice(saves.check, saves.job, slice_index, blocks, saves.generations.get(self._namespace))

    def _send(self, each: _Slice) -> None:
        """Queue this slice of the blocks that this rank sends, as soon as its check agrees. Release the slice of blocks
        that another rank sends."""
        _, job, slice_index, blocks, generation = each
        with self._settling:
            agrees = self._weights.all_agree(each.check) if job >= self._void_below else False
            if agrees is None:
                self._unchecked.append(each)
                return
        if not agrees:
            self._counters.add("dropped_blocks", len(blocks) / self._layout.slices)
            self._release([((job, block.slot), False) for block in blocks])
            return
        if self._replicas > 1:
            self._release([((job, block.slot), False) for block in blocks if not self._is_mine(block.key)])
            blocks = [block for block in blocks if self._is_mine(block.key)]
        if blocks:
            suffix = bytes([slice_index]) if self._layout.slices > 1 else b""
            rows = rows_of([block.slot for block in blocks], self._layout.slices, slice_index)
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
        """Note that one slice of each of these slots is not read any more. Each result says whether the store has that
        slice. A slot is released with its last slice."""
        slices = self._layout.slices
        if slices > 1:
            results = self._whole(results, slices)
        self.unsent.ended(results)
        self._released.extend(results)

    def _whole(
        self, results: Sequence[tuple[tuple[int, int], bool]], slices: int
    ) -> list[tuple[tuple[int, int], bool]]:
        """Return the slots that are not read any more. For each one, say whether the store has all its slices."""
        whole = []
        with self._lock:
            for token, is_stored in results:
                left, all_stored = self._slices_left.get(token, (slices, True))
                if left > 1:
                    self._slices_left[token] = left - 1, all_stored and is_stored
                else:
                    self._slices_left.pop(token, None)
                    whole.append((token, all_stored and is_stored))
        return whole

    def close(self, timeout_s: float) -> AtEnd:
        """Send the waiting blocks, until `timeout_s` after the engine computed for the last time. Return how many of
        them were sent, and how many were lost."""
        timeout_s -= self.unsent.engine_ends()
        self._each_copy(lambda copy: copy.wait())
        self._settle_copies()
        with self._settling:
            dropped = sum(len(each.blocks) for each in self._unchecked)
            self._unchecked.clear()
        self._counters.add("dropped_blocks", dropped / self._layout.slices)
        self._out.close(max(0.0, timeout_s))
        return self.unsent.at_end()
