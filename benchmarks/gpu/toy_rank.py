"""A rank of an engine without an engine: the worker's half of the connector on a paged cache, driven by hand."""

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
    """For a server on this host as if it were on another one."""

    def _open(self, endpoint: str | Sequence[str], options: ClientOptions) -> ClientStore:
        return ClientStore(
            endpoint, self.namespace, timeout_s=self.timeout_s, fail_open=True, shared_memory=False, **options.keywords
        )


class ToyRank:
    """Saves and loads as an engine asks for them. One thread: the model's. Raises RuntimeError when blocks do not get
    where they should."""

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
        """slots: of the host pool; half of them may wait to be sent. timeout_s: of each transfer. guard: how it reaches
        the store."""
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
        """How blocks come from the store, as the client's statistics say."""
        return self._guard.call(lambda client: str(client.stats.path), "none")

    def save(self, keys: Sequence[bytes], block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Start to copy blocks to slots, behind what the stream has to do, and to send them from there."""
        saves = Saves(next(self._numbers), list(map(SavedBlock, keys, slots, block_ids)))
        self._worker.begin_step(StepPlan(saves=saves))
        self._worker.saves.save()
        self._count()

    def _count(self) -> None:
        if (report := self._worker.take_report()) is not None:
            self._released += sum(report.released.values())
            self._stored += sum(report.stored.values())

    def settle(self, blocks: int) -> None:
        """Wait until the store has all blocks saved since the last call: their number is `blocks`."""
        deadline = time.monotonic() + self._timeout_s
        while self._released < blocks:
            if time.monotonic() > deadline:
                raise RuntimeError(f"after {self._timeout_s:.0f} s {self._released} of {blocks} blocks were sent")
            time.sleep(0.001)
            self._count()
        lost, self._released, self._stored = self._released - self._stored, 0, 0
        if lost:
            raise RuntimeError(f"{lost} of {blocks} blocks did not get into the store")

    def load(self, **what: Any) -> None:
        """Load blocks, and wait as an engine does, in steps without tokens. `what`: fields of `Load`."""
        load = Load(f"request {next(self._numbers)}", within_s=self._timeout_s, latest_s=self._timeout_s, **what)
        self._worker.begin_step(StepPlan(loads=[load], idle=True))
        self._worker.loads.load(load)
        deadline = time.monotonic() + 2 * self._timeout_s
        while load.request_id not in self._worker.loads.take_loaded():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{load.request_id} is still being loaded after {2 * self._timeout_s:.0f} s")
        if failed := self._worker.loads.take_failed_block_ids():
            raise RuntimeError(f"{len(failed)} blocks did not come")

    def close(self) -> None:
        self._worker.close()
