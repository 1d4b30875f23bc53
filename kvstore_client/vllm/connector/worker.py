"""The connector's half beside the model: it moves blocks between the KV cache, the host pool and the store.

Threads: the engine calls everything here from the model's thread, which never waits for the network. Copies out of the
cache are ordered behind the model's work and end before the engine may reuse the blocks: the scheduler's half keeps
the blocks of finished requests, and `handle_preemptions` waits for the few copies under way. Transfers run on threads
of their own. A transfer touches only blocks and slots that were given to it, until it reports its end.

Copies of a block, load from the store: message -> row -> cache; save: cache -> row -> socket.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.transfer import Rows, SendAs, SendOutcome, TransferIn, TransferOut
from kvstore_client.vllm.connector.device import Fence
from kvstore_client.vllm.connector.layout import BlockLayout, Copy
from kvstore_client.vllm.connector.plan import Load, RankStore, Saves, StepPlan, WorkerReport

logger = logging.getLogger(f"vllm.{__name__}")

# Requests that load at the same time: while one places the blocks that arrived, the other receives.
LOADING_THREADS = 2
# Requests that wait at the same time for blocks that another engine computes.
WAITING_THREADS = 16
# How long a step without tokens waits for the end of a transfer. Without this wait, such steps would spin and take the
# GIL from the transfers.
IDLE_WAIT_S = 0.0003


_IN_STORE = (SendOutcome.STORED, SendOutcome.PRESENT)


class OrderedCopies(NamedTuple):
    """A job whose copies out of the cache are under way."""

    saves: Saves
    copy: Copy | None  # None: it could not be started
    started: float


class WorkerHalf:
    """The transfers of one rank. Call every method from the model's thread. A failure does not raise: a block whose
    load fails is reported as not loaded, and one whose save fails is not saved.

    It owns the host pool, and closes the guard; the scheduler's half assigns the pool's slots. Only `take_loaded` (for
    `IDLE_WAIT_S`) and `close` wait.
    """

    def __init__(
        self,
        guard: StoreGuard,
        layout: BlockLayout,
        *,
        store: RankStore,
        timeout_s: float,
        replica: tuple[int, int],
        counters: Counters,
        store_on_host: bool = False,
        recompute_whole: bool = False,
    ) -> None:
        """store: what the scheduler's half is told of this rank. timeout_s: how long `close` may send on. replica: the
        index of this rank among the ranks with the same part of every block, and their number; one of them sends each
        block. store_on_host: a server on this host is to copy blocks out of the host pool by itself. recompute_whole: a
        request of which a block is missing is told, not the block."""
        self._guard = guard
        self._layout = layout
        self._timeout_s = timeout_s
        self._replica, self._replicas = replica
        self._counters = counters
        slots = store.slots
        self._pool = layout.pool(slots, shared=store_on_host)
        self._in = TransferIn(guard, threads=LOADING_THREADS, counters=counters)
        self._waiting_in = TransferIn(guard, threads=WAITING_THREADS, counters=counters, waits=True)
        # At most half the slots may be on their way to the store, including the chunk on the wire. So there is always
        # room for the blocks of the next steps; they displace the oldest blocks in the queue.
        limit = slots // 2 - min(self._in.chunk_blocks, slots // 4)
        self._out = TransferOut(guard, limit=max(1, limit), counters=counters, done=self._sent)
        self._swaps = ThreadPoolExecutor(1, thread_name_prefix="kvstore-swap-in")
        # Two chunks for each transfer thread, so that one can be placed while the next arrives. Made now: to lock pages
        # takes time that a request would wait for.
        self._rows: SimpleQueue[Rows] = SimpleQueue()
        for _ in range(LOADING_THREADS):
            self._rows.put(layout.pool(2 * self._in.chunk_blocks))
        self._staging = threading.local()
        self._copying: deque[OrderedCopies] = deque()
        self._copied_job = -1
        self._held: dict[str, int] = {}
        self._report = WorkerReport([store])
        self._released: deque[tuple[tuple[int, int], bool]] = deque()  # job and slot; whether the store has the block
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed_block_ids: set[int] = set()
        self._failed_to_tell: set[int] = set()
        self._recompute_whole = recompute_whole
        self._failed_requests: set[str] = set()
        self._failed_requests_to_tell: set[str] = set()
        self._news = threading.Event()
        self._idle = False

    @property
    def waiting_blocks(self) -> int:
        """Blocks on their way to the store."""
        return self._out.waiting

    # Into the cache.

    def load(self, load: Load) -> None:
        """Start a load. Whatever happens, `take_loaded` names the request in the end, and `take_failed_block_ids` its
        missing blocks, or `take_failed_requests` itself."""
        transfer = self._waiting_in if load.waits else self._in
        if load.slots is not None:
            loading = RankLoad(load, self._layout, self._pool, lambda: self._pool, load.slots)
        else:
            places = [index % (2 * transfer.chunk_blocks) for index in range(len(load.keys))]
            loading = RankLoad(
                load, self._layout, self._pool, self._waiting_rows if load.waits else self._staging_rows, places
            )
        try:
            loading.fence = self._layout.fence()
        except Exception:
            logger.exception(
                "kvstore: no copy into the KV cache can be started; request %s is computed", load.request_id
            )
            self._counters.add("defects")
            self._end(loading)
            return
        if not load.keys:  # not behind loads that wait for the network
            self._swaps.submit(self._loaded, loading)
            return
        transfer.submit(
            load.keys,
            loading.rows,
            loading.slots,
            deadline=time.monotonic() + load.within_s,
            arrived=loading.arrived,
            done=lambda: self._loaded(loading),
        )

    def _staging_rows(self) -> Rows:
        """The rows of the calling transfer thread."""
        rows: Rows | None = getattr(self._staging, "rows", None)
        if rows is None:
            rows = self._staging.rows = self._rows.get()
        return rows

    def _waiting_rows(self) -> Rows:
        """The same, made when it is first needed: most engines need none."""
        rows: Rows | None = getattr(self._staging, "rows", None)
        if rows is None:
            rows = self._staging.rows = self._layout.pool(2 * self._waiting_in.chunk_blocks)
        return rows

    def _loaded(self, loading: RankLoad) -> None:
        started = time.monotonic()
        try:
            loading.finish()
        except Exception:
            logger.exception("kvstore: loading the blocks of request %s failed", loading.load.request_id)
            self._counters.add("defects")
        self._counters.add("swap_in_blocks", loading.placed)
        self._counters.add("swap_in_bytes", loading.placed * self._layout.block_bytes)
        self._counters.add("swap_in_seconds", loading.seconds + time.monotonic() - started)
        self._end(loading)

    def _end(self, loading: RankLoad) -> None:
        with self._lock:
            self._finished.add(loading.load.request_id)
            if not self._recompute_whole:
                self._failed_block_ids |= loading.missing
            elif loading.missing:
                self._failed_requests.add(loading.load.request_id)
        self._news.set()

    def take_loaded(self) -> set[str]:
        """The requests whose loads ended since the last call. In an idle step, waits up to `IDLE_WAIT_S` for one."""
        if self._idle:
            self._news.wait(IDLE_WAIT_S)
        self._news.clear()
        with self._lock:
            finished, self._finished = self._finished, set()
            # What failed is told in the same step as the request: told a step later, the request would run on blocks
            # that are not there.
            self._failed_to_tell, self._failed_block_ids = self._failed_block_ids, set()
            self._failed_requests_to_tell, self._failed_requests = self._failed_requests, set()
        return finished

    def take_failed_block_ids(self) -> set[int]:
        """The cache blocks that could not be loaded, of the requests that `take_loaded` named last."""
        failed, self._failed_to_tell = self._failed_to_tell, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """The requests to be computed from their beginning, of those that `take_loaded` named last."""
        failed, self._failed_requests_to_tell = self._failed_requests_to_tell, set()
        return failed

    # Out of the cache.

    def begin_step(self, plan: StepPlan) -> None:
        """Take in the step's plan."""
        self._idle = plan.idle
        self._held.update(plan.held)

    def order_copies(self) -> None:
        """Have the model wait for all copies out of the cache: it is about to write to blocks that were others'."""
        for index, copying in enumerate(self._copying):
            if copying.copy is None:
                continue
            try:
                copying.copy.order()
            except Exception:  # the device's: what it copied cannot be trusted, so it is not saved
                logger.exception("kvstore: copying %d blocks out of the cache failed", len(copying.saves.slots))
                self._counters.add("defects")
                self._copying[index] = copying._replace(copy=None)

    def save(self, saves: Saves) -> None:
        """Start the copies, ordered behind the model's work on the blocks, and send the blocks that are in their slots
        already."""
        copy: Copy | None = None
        started = time.monotonic()
        if saves.slots:
            try:
                copy = self._layout.swap_out(saves.block_ids, self._pool, saves.slots)
            except Exception:
                logger.exception("kvstore: copying %d blocks out of the cache failed", len(saves.slots))
            self._copying.append(OrderedCopies(saves, copy, started))
        self._send(saves.job, saves.send_keys, saves.send_slots, saves.send_parents, saves.send_how)

    def take_saved(self) -> set[str]:
        """The finished requests, since the last call, whose blocks have been copied: the engine may reuse them."""
        self._settle_copies()
        saved = {request_id for request_id, job in self._held.items() if job <= self._copied_job}
        for request_id in saved:
            del self._held[request_id]
        return saved

    def take_report(self) -> WorkerReport | None:
        """The report to the scheduler's half: what ended since the last call; None if nothing did."""
        self._settle_copies()
        while self._released:
            token, is_stored = self._released.popleft()
            self._report.released[token] += 1
            if is_stored:
                self._report.stored[token] += 1
        self._report.arrived_blocks, self._report.arriving_seconds = self._in.take_pace()
        report, self._report = self._report, WorkerReport()
        return report or None

    def _settle_copies(self) -> None:
        while self._copying:
            saves, copy, started = self._copying[0]
            try:
                if copy is not None and not copy.done():
                    return
            except Exception:
                logger.exception("kvstore: copying %d blocks out of the cache failed", len(saves.slots))
                copy = None
            self._copying.popleft()
            self._copied_job = saves.job
            self._report.copied[saves.job] += 1
            if copy is None:
                self._report.broken.add(saves.job)
                self._released.extend(((saves.job, slot), False) for slot in saves.slots)
                continue
            self._counters.add("swap_out_blocks", len(saves.slots))
            self._counters.add("swap_out_bytes", len(saves.slots) * self._layout.block_bytes)
            self._counters.add("swap_out_seconds", time.monotonic() - started)
            self._send(saves.job, saves.keys, saves.slots, saves.parents, saves.how)

    def _send(
        self,
        job: int,
        keys: Sequence[bytes],
        slots: Sequence[int],
        parents: Sequence[bytes | None],
        how: Sequence[SendAs],
    ) -> None:
        """Queue the blocks that this rank sends, and release the slots of those that another rank sends."""
        mine = [self._is_mine(key) for key in keys]
        self._released.extend(((job, slot), False) for slot, is_mine in zip(slots, mine, strict=True) if not is_mine)
        sent = [index for index, is_mine in enumerate(mine) if is_mine]
        if sent:
            self._out.put(
                [keys[index] for index in sent],
                [self._pool[slots[index]] for index in sent],
                [(job, slots[index]) for index in sent],
                [parents[index] for index in sent],
                [how[index] for index in sent],
            )

    def _is_mine(self, key: bytes) -> bool:
        return int.from_bytes(key[:4], "big") % self._replicas == self._replica

    def _sent(self, results: Sequence[tuple[Hashable, SendOutcome]]) -> None:
        self._released.extend((cast("tuple[int, int]", token), outcome in _IN_STORE) for token, outcome in results)

    def close(self) -> None:
        """Send the blocks that wait, for at most as long as a transfer may take; then end the transfers."""
        self._settle_copies()
        self._out.close(self._timeout_s)
        self._guard.close()  # or loads would wait on for promised blocks
        self._in.close()
        self._waiting_in.close()
        self._swaps.shutdown(wait=True)


class RankLoad:
    """The blocks of one request's load, on this rank. Used by one transfer thread."""

    def __init__(
        self, load: Load, layout: BlockLayout, pool: Rows, rows: Callable[[], Rows], slots: Sequence[int]
    ) -> None:
        """rows, slots: where the store's blocks arrive; ``rows()`` returns the same rows to each call of one thread."""
        self.load = load
        self.rows = rows
        self.slots = slots
        self.fence: Fence | None = None  # what its copies wait for
        self.placed = 0
        self.seconds = 0.0  # spent placing blocks
        self.missing = {*load.host_block_ids, *load.block_ids}  # cache blocks that are not loaded yet
        self._layout = layout
        self._pool = pool
        self._copies: deque[tuple[Copy, Sequence[int]]] = deque()

    def arrived(self, first: int, hits: npt.NDArray[np.bool_]) -> bool:
        """Start to place the leading run of a chunk. Blocks after a gap are of no use, since the engine computes from
        the first missing block on."""
        started = time.monotonic()
        run = len(hits) if hits.all() else int(hits.argmin())
        while len(self._copies) > 1:  # the next chunk is written to the rows of the chunk before the last
            self._settle()
        self._place(self.rows(), self.slots[first : first + run], self.load.block_ids[first : first + run])
        self.seconds += time.monotonic() - started
        return run == len(hits)

    def finish(self) -> None:
        """Place the blocks of the host pool and wait for all copies. After that, ``missing`` is final."""
        try:
            self._place(self._pool, self.load.host_slots, self.load.host_block_ids)
        finally:
            while self._copies:
                self._settle()

    def _place(self, rows: Rows, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        if block_ids:
            self._copies.append((self._layout.swap_in(rows, slots, block_ids, self.fence), block_ids))

    def _settle(self) -> None:
        copy, block_ids = self._copies.popleft()
        copy.wait()
        self.placed += len(block_ids)
        self.missing.difference_update(block_ids)
