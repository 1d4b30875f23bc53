"""The loads of one rank, from the store and from the host pool into the KV cache.

A block from the store is copied from the message to a row, and from there to the cache. Ranks with the same slice of
every block may share one host pool. In that case, each of them reads its share of a load (see
``engine/shared_rows.py``). If blocks are in slices, each slice is fetched and placed by a transfer of its own.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.jobs import Rows, Within
from kvstore_client.engine.paged.layout import BlockLayout, rows_of
from kvstore_client.engine.paged.plan import Load
from kvstore_client.engine.paged.rank_load import RankLoad, SliceLoad, StagingRows
from kvstore_client.engine.paged.shared_pool import SharedPool
from kvstore_client.engine.paged.weights import WeightsWatch
from kvstore_client.engine.slices import slice_keys
from kvstore_client.engine.transfer_in import TransferIn

log = logging.getLogger("kvstore_client")

# The most loads in progress whose blocks get no slot of the CPU tier. Further loads wait. Two of these loads are on the
# wire, and two may wait for a slow shard.
STAGED_LOADS = 4
# The same limit for loads that wait until another engine has computed their blocks.
STAGED_WAITING_LOADS = 16
# How long a step without tokens waits for a load to end. Without this wait, such steps would follow each other without
# a pause and take the GIL from the transfers.
IDLE_WAIT_S = 0.0003


class RankLoads:
    """The loads of one rank. Call every method from the model's thread. A failure raises no error; a block whose load
    fails is reported as not loaded. Only two methods wait: `take_loaded`, for up to `IDLE_WAIT_S`, and `close`.

    idle: whether the present step has no tokens.
    """

    def __init__(
        self,
        guard: StoreGuard,
        layout: BlockLayout,
        pool: Rows,
        *,
        shared: SharedPool | None,
        recompute_whole: bool,
        counters: Counters,
        weights: WeightsWatch,
    ) -> None:
        """For `pool`, `shared`, `recompute_whole` and `weights`, see `WorkerHalf`."""
        self.idle = False
        self._newest = -1  # the number of the newest load
        self._void_until = -1  # blocks of loads up to this number must not be used
        self._weights = weights
        self._layout = layout
        self._pool = pool
        self._shared = shared
        self._counters = counters
        self._recompute_whole = recompute_whole
        self._in = TransferIn(guard, counters=counters, slices=layout.slices)
        self._swaps = ThreadPoolExecutor(1, thread_name_prefix="kvstore-swap-in")
        # There are rows for two chunks of each load, so that one chunk can be placed while the next arrives. The rows
        # for ordinary loads are made now, because otherwise a request would wait while pages are locked. If ranks share
        # a pool, most loads use it, so these rows are made when they are needed. The rows for loads that wait are also
        # made when needed, because most engines never wait for other engines.
        self._staged_blocks, self._waited_blocks = 2 * self._in.chunk_blocks, 2 * self._in.waited_chunk_blocks
        self._staging = StagingRows(lambda: layout.pool(self._staged_blocks), STAGED_LOADS, made_now=shared is None)
        self._waiting_staging = StagingRows(
            lambda: layout.pool(self._waited_blocks), STAGED_WAITING_LOADS * layout.slices
        )
        self._lock = threading.Lock()
        self._loading: dict[str, RankLoad] = {}  # loads from the store
        self._ended: list[RankLoad] = []
        self._failed_to_tell: set[int] = set()
        self._failed_requests_to_tell: set[str] = set()
        self._news = threading.Event()

    def load(self, load: Load) -> None:
        """Start a load. In any case, `take_loaded` returns the request in the end. If blocks are missing, either
        `take_failed_block_ids` returns these blocks or `take_failed_requests` returns the request."""
        self._newest = max(self._newest, load.number)
        loading = RankLoad(load, self._layout, self._pool)
        if load.keys:
            loading.slices = [self._slice(loading, slice_index) for slice_index in range(self._layout.slices)]
        try:
            loading.fence = self._layout.fence()
        except Exception:
            log.exception("kvstore: no copy into the KV cache can begin; request %s will be computed", load.request_id)
            self._counters.add("defects")
            for each in loading.slices:
                each.finish()
            self._end(loading)
            return
        if not load.keys:  # it need not wait for loads from the network
            self._swaps.submit(self._loaded, loading)
            return
        within = Within(load.within_s, time.monotonic() + load.latest_s)
        with self._lock:
            self._loading[load.request_id] = loading
        for each in loading.slices:
            loading.jobs.append(
                self._in.submit(
                    self._slice_keys(load.keys, each.slice_index),
                    each.begin,
                    each.slots,
                    within=within,
                    arrived=each.arrived,
                    done=functools.partial(self._slice_loaded, loading, each),
                    waits=load.waits,
                    stripe=each.stripe,
                )
            )

    def _slice(self, loading: RankLoad, slice_index: int) -> SliceLoad:
        """Return the load of one slice, with its rows. These are rows that ranks share, slots, or staging rows."""
        load = loading.load
        stripe = self._shared.stripe(load, slice_index) if self._shared is not None else None
        if stripe is not None:
            return SliceLoad(loading, slice_index, self._pool, stripe.rows, stripe)
        if load.slots is not None:
            return SliceLoad(loading, slice_index, self._pool, rows_of(load.slots, self._layout.slices, slice_index))
        staging, most = (
            (self._waiting_staging, self._waited_blocks) if load.waits else (self._staging, self._staged_blocks)
        )
        return SliceLoad(loading, slice_index, staging, [index % most for index in range(len(load.keys))])

    def avoid(self, void_until: int) -> None:
        """Use no blocks of loads with numbers up to this one."""
        self._void_until = max(self._void_until, void_until)

    def avoid_all(self) -> None:
        """Use no blocks of any load that has begun."""
        self.avoid(self._newest)

    def cancel(self, request_id: str) -> None:
        """End the load of this request soon, because its blocks are no longer needed. The load is still reported."""
        with self._lock:
            loading = self._loading.get(request_id)
        for job in loading.jobs if loading is not None else ():
            self._in.cancel(job)

    def _slice_keys(self, keys: Sequence[bytes], slice_index: int) -> Sequence[bytes]:
        return slice_keys(keys, range(slice_index, slice_index + 1)) if self._layout.slices > 1 else keys

    def _slice_loaded(self, loading: RankLoad, fetched: SliceLoad) -> None:
        started = time.monotonic()
        try:
            fetched.finish()
        except Exception:
            self._failed(loading)
        fetched.seconds += time.monotonic() - started
        if loading.part_ends():
            self._loaded(loading)

    def _failed(self, loading: RankLoad) -> None:
        log.exception("kvstore: loading the blocks of request %s failed", loading.load.request_id)
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
            self._ended.append(loading)
        self._news.set()

    def take_loaded(self) -> set[str]:
        """Return the requests whose loads have ended and whose checks of the weights have a result. Each is returned
        once. Blocks whose check does not agree count as not loaded. In an idle step, wait up to `IDLE_WAIT_S` for a
        load to end."""
        if self.idle:
            self._news.wait(IDLE_WAIT_S)
        self._news.clear()
        self._weights.poll()
        with self._lock:
            ended, self._ended = self._ended, []
        finished: set[str] = set()
        # Failures are reported in the same step as the request. One step later, the request would already run with
        # blocks that were not loaded.
        self._failed_to_tell, self._failed_requests_to_tell = set(), set()
        for each in ended:
            load = each.load
            agrees = False if load.number <= self._void_until else self._weights.mine_agree(load.check)
            if agrees is None:
                with self._lock:
                    self._ended.append(each)
                continue
            finished.add(load.request_id)
            missing = each.missing if agrees else {*load.host_block_ids, *load.block_ids}
            if not self._recompute_whole:
                self._failed_to_tell |= missing
            elif missing:
                self._failed_requests_to_tell.add(load.request_id)
        return finished

    def take_failed_block_ids(self) -> set[int]:
        """Return the cache blocks that could not be loaded, for the requests of the last call of `take_loaded`."""
        failed, self._failed_to_tell = self._failed_to_tell, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Return those requests of the last call of `take_loaded` that must be computed from their beginning."""
        failed, self._failed_requests_to_tell = self._failed_requests_to_tell, set()
        return failed

    def take_pace(self) -> tuple[float, float]:
        """Return the number of blocks that came from the store since the last call, and the time of their transfers in
        seconds."""
        return self._in.take_pace()

    def close(self) -> None:
        """End all loads."""
        self._in.close()
        self._swaps.shutdown(wait=True)
