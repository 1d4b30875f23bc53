"""The loads of one rank: from the store and from the host pool, into the KV cache.

Copies of a block from the store: message -> row -> cache. Ranks with the same part of every block may have one host
pool: then each reads its share of a load, see ``engine/shared_rows.py``. Of blocks in parts, each part is fetched and
placed by a transfer of its own.
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
from kvstore_client.engine.paged.rank_load import PartLoad, RankLoad, Staging
from kvstore_client.engine.paged.shared_pool import SharedPool
from kvstore_client.engine.paged.weights import WeightsWatch
from kvstore_client.engine.parts import part_keys
from kvstore_client.engine.transfer_in import TransferIn

log = logging.getLogger("kvstore_client")

# Loads at a time whose blocks get no slot of the CPU tier; others wait for their turn. Two are on the wire, and two may
# wait for a slow shard.
STAGED_LOADS = 4
# The same, of those that wait for blocks that another engine computes.
STAGED_WAITING_LOADS = 16
# How long a step without tokens waits for the end of a transfer. Without this wait, such steps would spin and take the
# GIL from the transfers.
IDLE_WAIT_S = 0.0003


class RankLoads:
    """Call every method from the model's thread. A failure does not raise: a block whose load fails is reported as not
    loaded. Only `take_loaded` (for `IDLE_WAIT_S`) and `close` wait.

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
        """pool, shared, recompute_whole, weights: see `WorkerHalf`."""
        self.idle = False
        self._newest = -1  # the highest number of a load
        self._void_until = -1  # what loads up to this number bring is not to be used
        self._weights = weights
        self._layout = layout
        self._pool = pool
        self._shared = shared
        self._counters = counters
        self._recompute_whole = recompute_whole
        self._in = TransferIn(guard, counters=counters, parts=layout.parts)
        self._swaps = ThreadPoolExecutor(1, thread_name_prefix="kvstore-swap-in")
        # Two chunks for each load, so that one can be placed while the next arrives. Made now: to lock pages takes time
        # that a request would wait for. Most engines never wait for blocks of others, and most loads of ranks that
        # share a pool go there.
        self._staged_blocks, self._waited_blocks = 2 * self._in.chunk_blocks, 2 * self._in.waited_chunk_blocks
        self._staging = Staging(lambda: layout.pool(self._staged_blocks), STAGED_LOADS, made_now=shared is None)
        self._waiting_staging = Staging(lambda: layout.pool(self._waited_blocks), STAGED_WAITING_LOADS * layout.parts)
        self._lock = threading.Lock()
        self._loading: dict[str, RankLoad] = {}  # from the store
        self._ended: list[RankLoad] = []
        self._failed_to_tell: set[int] = set()
        self._failed_requests_to_tell: set[str] = set()
        self._news = threading.Event()

    def load(self, load: Load) -> None:
        """Start a load. Whatever happens, `take_loaded` names the request in the end, and `take_failed_block_ids` its
        missing blocks, or `take_failed_requests` itself."""
        self._newest = max(self._newest, load.number)
        loading = RankLoad(load, self._layout, self._pool)
        if load.keys:
            loading.parts = [self._part(loading, part) for part in range(self._layout.parts)]
        try:
            loading.fence = self._layout.fence()
        except Exception:
            log.exception("kvstore: no copy into the KV cache can be started; request %s is computed", load.request_id)
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
            return PartLoad(loading, part, self._pool, rows_of(load.slots, self._layout.parts, part))
        staging, most = (
            (self._waiting_staging, self._waited_blocks) if load.waits else (self._staging, self._staged_blocks)
        )
        return PartLoad(loading, part, staging, [index % most for index in range(len(load.keys))])

    def avoid(self, void_until: int) -> None:
        """What loads up to this number bring is not to be used."""
        self._void_until = max(self._void_until, void_until)

    def avoid_all(self) -> None:
        """Nor what any load brings that has begun."""
        self.avoid(self._newest)

    def cancel(self, request_id: str) -> None:
        """Nobody needs this request's blocks any more: end its load soon. It is reported as ever."""
        with self._lock:
            loading = self._loading.get(request_id)
        for job in loading.jobs if loading is not None else ():
            self._in.cancel(job)

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
        """The requests whose loads ended since the last call, and whose checks of the weights have. What a check did
        not agree on is not loaded. In an idle step, waits up to `IDLE_WAIT_S` for one."""
        if self.idle:
            self._news.wait(IDLE_WAIT_S)
        self._news.clear()
        self._weights.poll()
        with self._lock:
            ended, self._ended = self._ended, []
        finished: set[str] = set()
        # What failed is told in the same step as the request: told a step later, the request would run on blocks that
        # are not there.
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
        """The cache blocks that could not be loaded, of the requests that `take_loaded` named last."""
        failed, self._failed_to_tell = self._failed_to_tell, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """The requests to be computed from their beginning, of those that `take_loaded` named last."""
        failed, self._failed_requests_to_tell = self._failed_requests_to_tell, set()
        return failed

    def take_pace(self) -> tuple[float, float]:
        """-> blocks that came from the store since the last call, and in how many seconds of transfers."""
        return self._in.take_pace()

    def close(self) -> None:
        """End all loads."""
        self._in.close()
        self._swaps.shutdown(wait=True)
