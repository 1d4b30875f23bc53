"""The connector's half beside the model: it moves blocks between the KV cache, the host pool and the store.

Threads: the engine calls everything here from the model's thread, which never waits for the network. Copies out of the
cache are ordered behind the model's work and end before the engine may reuse the blocks: the scheduler's half keeps
the blocks of finished requests, and `handle_preemptions` waits for the few copies under way. Transfers run on threads
of their own. A transfer touches only blocks and slots that were given to it, until it reports its end.

Copies of a block, load from the store: message -> row -> cache; save: cache -> row -> socket.

Ranks with the same part of every block may have one host pool: then the rank that sends a block copies it out of the
cache, and each reads its share of a load. See ``engine/shared_rows.py``.

A block may be in parts of some layers each. Each part is copied and sent when its last layer is computed, and each is
fetched and placed by a transfer of its own. A row of the pool is a part, and a slot has as many rows as there are
parts.

Over 400 lines because loads and saves use the same pool, and end in the same report.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.jobs import Within
from kvstore_client.engine.parts import part_keys
from kvstore_client.engine.transfer_in import TransferIn
from kvstore_client.engine.transfer_out import CHUNK_BYTES, SendAs, SendOutcome, TransferOut
from kvstore_client.vllm.connector.host_copies import HostCopy
from kvstore_client.vllm.connector.layout import BlockLayout, Copy
from kvstore_client.vllm.connector.ordered_copies import OrderedCopies
from kvstore_client.vllm.connector.plan import Load, RankStore, Saves, StepPlan, WorkerReport
from kvstore_client.vllm.connector.rank_load import PartLoad, RankLoad, Staging
from kvstore_client.vllm.connector.shared_pool import SharedPool

logger = logging.getLogger(f"vllm.{__name__}")

# Loads at a time whose blocks get no slot of the CPU tier; others wait for their turn. Two are on the wire, and two may
# wait for a slow shard.
STAGED_LOADS = 4
# The same, of those that wait for blocks that another engine computes.
STAGED_WAITING_LOADS = 16
# How long a step without tokens waits for the end of a transfer. Without this wait, such steps would spin and take the
# GIL from the transfers.
IDLE_WAIT_S = 0.0003


_IN_STORE = (SendOutcome.STORED, SendOutcome.PRESENT)


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
        shared: SharedPool | None = None,
    ) -> None:
        """store: what the scheduler's half is told of this rank. timeout_s: how long `close` may send on. replica: the
        index of this rank among the ranks with the same part of every block, and their number; one of them sends each
        block. store_on_host: a server on this host is to copy blocks out of the host pool by itself. recompute_whole: a
        request of which a block is missing is told, not the block. shared: the host pool, if these ranks have one in
        common; None: it is made."""
        self._guard = guard
        self._layout = layout
        self._timeout_s = timeout_s
        self._replica, self._replicas = replica
        self._counters = counters
        slots = store.slots
        parts = layout.parts
        self._shared = shared
        self._pool = layout.pool(slots * parts, shared=store_on_host) if shared is None else shared.rows.pool
        self._in = TransferIn(guard, counters=counters, parts=parts)
        # At most half the slots may be on their way to the store, of all ranks that send from them together, including
        # the chunk on the wire. So there is always room for the blocks of the next steps; they displace the oldest
        # blocks in the queue.
        rows, chunk_blocks = slots * parts, max(1, CHUNK_BYTES // guard.block_bytes)
        limit = (rows // 2 - min(chunk_blocks, rows // 4)) // self._replicas
        self._out = TransferOut(guard, limit=max(1, limit), counters=counters, done=self._sent, parts=parts)
        self._swaps = ThreadPoolExecutor(1, thread_name_prefix="kvstore-swap-in")
        # Two chunks for each load, so that one can be placed while the next arrives. Made now: to lock pages takes time
        # that a request would wait for. Most engines never wait for blocks of others, and most loads of ranks that
        # share a pool go there.
        self._staged_blocks, self._waited_blocks = 2 * self._in.chunk_blocks, 2 * self._in.waited_chunk_blocks
        self._staging = Staging(lambda: layout.pool(self._staged_blocks), STAGED_LOADS, made_now=shared is None)
        self._waiting_staging = Staging(lambda: layout.pool(self._waited_blocks), STAGED_WAITING_LOADS * parts)
        # Guards the copies and what is told of them: a copy by a thread is sent from there, as no step may follow.
        self._settling = threading.RLock()
        self._copying: deque[OrderedCopies] = deque()
        self._copied_job = -1
        self._held: dict[str, int] = {}
        self._report = WorkerReport([store])
        self._released: deque[tuple[tuple[int, int], bool]] = deque()  # job and slot; whether the store has the block
        # By job and slot: how many parts are on their way, and whether the store has the others.
        self._parts_left: dict[tuple[int, int], tuple[int, bool]] = {}
        self._saves: Saves | None = None  # of the current step
        self._to_compute: list[set[str]] = []  # by part, the layers that its blocks wait for
        self._copied_parts = 0  # of the job that is being copied
        self._lock = threading.Lock()
        self._loading: dict[str, RankLoad] = {}  # from the store
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
        return -(-self._out.waiting // self._layout.parts)

    # Into the cache.

    def load(self, load: Load) -> None:
        """Start a load. Whatever happens, `take_loaded` names the request in the end, and `take_failed_block_ids` its
        missing blocks, or `take_failed_requests` itself."""
        loading = RankLoad(load, self._layout, self._pool)
        if load.keys:
            loading.parts = [self._part(loading, part) for part in range(self._layout.parts)]
        try:
            loading.fence = self._layout.fence()
        except Exception:
            logger.exception(
                "kvstore: no copy into the KV cache can be started; request %s is computed", load.request_id
            )
            self._counters.add("defects")
            for each in loading.parts:
                each.finish()
            self._end(loading)
            return
        if not load.keys:  # not behind loads that wait for the network
            self._swaps.submit(self._loaded, loading)
            return
        within = Within(load.within_s, time.monotonic() + load.latest_s)
        with self._lock:
            self._loading[load.request_id] = loading
        for each in loading.parts:
            loading.jobs.append(
                self._in.submit(
                    self._part_keys(load.keys, each.part),
                    each.begin,
                    each.slots,
                    within=within,
                    arrived=each.arrived,
                    done=functools.partial(self._part_loaded, loading, each),
                    waits=load.waits,
                    stripe=each.stripe,
                )
            )

    def _part(self, loading: RankLoad, part: int) -> PartLoad:
        """What is to be fetched, and where it goes: rows that ranks have in common, slots, or rows of its own."""
        load = loading.load
        stripe = self._shared.stripe(load, part) if self._shared is not None else None
        if stripe is not None:
            return PartLoad(loading, part, self._pool, stripe.rows, stripe)
        if load.slots is not None:
            return PartLoad(loading, part, self._pool, self._rows_of(load.slots, part))
        staging, most = (
            (self._waiting_staging, self._waited_blocks) if load.waits else (self._staging, self._staged_blocks)
        )
        return PartLoad(loading, part, staging, [index % most for index in range(len(load.keys))])

    def _cancel(self, request_id: str) -> None:
        """Nobody needs this request's blocks any more: end its load soon. It is reported as ever."""
        with self._lock:
            loading = self._loading.get(request_id)
        for job in loading.jobs if loading is not None else ():
            self._in.cancel(job)

    def _rows_of(self, slots: Sequence[int], part: int) -> list[int]:
        """The rows of the host pool where this part of the blocks in these slots is."""
        return [slot * self._layout.parts + part for slot in slots]

    def _part_keys(self, keys: Sequence[bytes], part: int) -> Sequence[bytes]:
        return part_keys(keys, range(part, part + 1)) if self._layout.parts > 1 else keys

    def _part_loaded(self, loading: RankLoad, part: PartLoad) -> None:
        started = time.monotonic()
        try:
            part.finish()
        except Exception:
            self._failed(loading)
        part.seconds += time.monotonic() - started
        if loading.part_ends():
            self._loaded(loading)

    def _failed(self, loading: RankLoad) -> None:
        logger.exception("kvstore: loading the blocks of request %s failed", loading.load.request_id)
        self._counters.add("defects")

    def _loaded(self, loading: RankLoad) -> None:
        started = time.monotonic()
        try:
            loading.finish()
        except Exception:
            self._failed(loading)
        self._counters.add("swap_in_blocks", loading.placed)
        self._counters.add("swap_in_bytes", loading.placed * self._layout.block_bytes)
        self._counters.add("swap_in_seconds", loading.seconds + time.monotonic() - started)
        self._end(loading)

    def _end(self, loading: RankLoad) -> None:
        with self._lock:
            self._loading.pop(loading.load.request_id, None)
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
        for request_id in plan.cancelled:
            self._cancel(request_id)
        self._held.update(plan.held)
        self._saves = plan.saves
        self._to_compute = [set(layers) for layers in self._layout.layers] if plan.saves else []

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
        if self._shared is not None:  # the rank that sends a block copies it, into the slot of all
            mine = [index for index, key in enumerate(saves.keys) if self._is_mine(key)]
            block_ids, slots = [block_ids[index] for index in mine], [slots[index] for index in mine]
        try:
            copy = self._layout.swap_out(block_ids, self._pool, self._rows_of(slots, part), part)
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

    def take_report(self) -> WorkerReport | None:
        """The report to the scheduler's half: what ended since the last call; None if nothing did."""
        with self._settling:
            self._settle_copies()
            while self._released:
                token, is_stored = self._released.popleft()
                self._report.released[token] += 1
                if is_stored:
                    self._report.stored[token] += 1
            self._report.arrived_blocks, self._report.arriving_seconds = self._in.take_pace()
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
                [self._pool[row] for row in self._rows_of([slots[index] for index in sent], part)],
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

    def close(self) -> None:
        """Send the blocks that wait, for at most as long as a transfer may take; then end the transfers."""
        self._each_copy(lambda copy: copy.wait())
        self._settle_copies()
        self._out.close(self._timeout_s)
        self._in.close()
        self._guard.close()
        self._swaps.shutdown(wait=True)
