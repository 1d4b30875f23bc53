"""A rank without an engine: calls the worker's half of the connector, on a paged cache, as an engine would."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvstore_client import Namespace
from kvstore_client.engine.client_store import ClientOptions, ClientStore
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.jobs import Rows
from kvstore_client.engine.paged.layout import BlockLayout
from kvstore_client.engine.paged.plan import Load, RankStore, SavedBlock, Saves, StepPlan
from kvstore_client.engine.paged.worker import WorkerHalf


class TcpGuard(StoreGuard):
    """Reaches a server on this host as if it were on another host."""

    def _open(self, endpoint: str | Sequence[str], options: ClientOptions) -> ClientStore:
        return ClientStore(
            endpoint, self.namespace, timeout_s=self.timeout_s, fail_open=True, shared_memory=False, **options.keywords
        )


class ToyRank:
    """Saves and loads blocks as an engine would request it. Only the model's thread may use it. Raises RuntimeError if
    blocks do not reach the store or the cache."""

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        endpoint: str,
        namespace: Namespace,
        slots: int,
        *,
        timeout_s: float,
        guard: type[StoreGuard] = StoreGuard,
    ) -> None:
        """slots: the number of slots in the host pool; half of them may wait to be sent. timeout_s: the deadline of
        each transfer. guard: the class through which it reaches the store."""
        [blocks] = {len(cache) for cache in kv_caches.values()}
        counters = Counters()
        self._guard = guard(endpoint, namespace, timeout_s=timeout_s, counters=counters)
        self._worker = WorkerHalf(
            self._guard,
            BlockLayout(kv_caches, blocks),
            store=RankStore(namespace, slots),
            timeout_s=timeout_s,
            replica=(0, 1),
            counters=counters,
            store_on_host=True,
        )
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._released = self._stored = 0

    @property
    def pool(self) -> Rows:
        """The slots, (slots, block_bytes)."""
        return self._worker.saves._pool

    @property
    def path(self) -> str:
        """The transport by which blocks come from the store, according to the client's statistics."""
        return self._guard.call(lambda client: str(client.stats.path), "none")

    def save(self, keys: Sequence[bytes], block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Start to copy blocks to slots, after the work queued on the stream, and to send them from there."""
        saves = Saves(next(self._numbers), list(map(SavedBlock, keys, slots, block_ids)))
        self._worker.begin_step(StepPlan(saves=saves))
        self._worker.saves.save()
        self._count()

    def _count(self) -> None:
        if (report := self._worker.take_report()) is not None:
            self._released += sum(report.released.values())
            self._stored += sum(report.stored.values())

    def settle(self, blocks: int) -> None:
        """Wait until the store has all blocks saved since the last call. There are `blocks` of them."""
        deadline = time.monotonic() + self._timeout_s
        while self._released < blocks:
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {self._released} of {blocks} blocks were sent within {self._timeout_s:.0f} s")
            time.sleep(0.001)
            self._count()
        lost, self._released, self._stored = self._released - self._stored, 0, 0
        if lost:
            raise RuntimeError(f"{lost} of {blocks} blocks did not reach the store")

    def load(self, **what: Any) -> None:
        """Load blocks, and wait as an engine does, in steps without tokens. `what`: the fields of `Load`."""
        load = Load(f"request {next(self._numbers)}", within_s=self._timeout_s, latest_s=self._timeout_s, **what)
        self._worker.begin_step(StepPlan(loads=[load], idle=True))
        self._worker.loads.load(load)
        deadline = time.monotonic() + 2 * self._timeout_s
        while load.request_id not in self._worker.loads.take_loaded():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{load.request_id} is still being loaded after {2 * self._timeout_s:.0f} s")
        if failed := self._worker.loads.take_failed_block_ids():
            raise RuntimeError(f"{len(failed)} blocks could not be loaded")

    def close(self) -> None:
        self._worker.close()
