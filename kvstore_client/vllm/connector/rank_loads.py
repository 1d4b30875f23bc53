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
from kvstore_client.engine.parts import part_keys
from kvstore_client.engine.transfer_in import TransferIn
from kvstore_client.vllm.connector.layout import BlockLayout, rows_of
from kvstore_client.vllm.connector.plan import Load
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
    ) -> None:
        """pool, shared, recompute_whole: see `WorkerHalf`."""
        self.idle = False
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
        self._finished: set[str] = set()
        self._failed_block_ids: set[int] = set()
        self._failed_to_tell: set[int] = set()
        self._failed_requests: set[str] = set()
        self._failed_requests_to_tell: set[str] = set()
        self._news = threading.Event()

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
            return PartLoad(loading, part, self._pool, rows_of(load.slots, self._layout.parts, part))
        staging, most = (
            (self._waiting_staging, self._waited_blocks) if load.waits else (self._staging, self._staged_blocks)
        )
        return PartLoad(loading, part, staging, [index % most for index in range(len(load.keys))])

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
        if self.idle:
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

    def take_pace(self) -> tuple[float, float]:
        """-> blocks that came from the store since the last call, and in how many seconds of transfers."""
        return self._in.take_pace()

    def close(self) -> None:
        """End all loads."""
        self._in.close()
        self._swaps.shutdown(wait=True)
