"""One rank of an engine without a model: the connector's worker half with a real store, and a paged cache.

`Rank.step` calls the worker half as vLLM's model runner does in a step. The test decides what the model computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvstore_client import KVStoreClient
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.paged.layout import BlockLayout
from kvstore_client.engine.paged.plan import RankStore, SavedBlock, Saves, StepPlan, WorkerReport
from kvstore_client.engine.paged.worker import WorkerHalf
from kvstore_client.engine.slices import slice_keys
from tests.gpu.paged_caches import Bytes, PagedCache
from tests.support.harness import make_namespace, wait_until

# Long enough for compute-sanitizer, under which a device takes twenty times as long. No test that passes waits this
# long.
DEADLINE_S = 60.0


class Rank:
    """Collects results: the `loaded` requests, the `failed` blocks, the requests whose copies are complete (`saved`),
    and the worker's `report`."""

    def __init__(
        self,
        endpoint: str,
        cache: PagedCache,
        name: str,
        *,
        slots: int = 64,  # half of the slots may wait to be sent
        timeout_s: float = DEADLINE_S,
        layout_class: type[BlockLayout] = BlockLayout,
        **options: Any,
    ) -> None:
        self.cache = cache
        self.layout = cache.layout(layout_class)
        self.counters = Counters()
        self.guard = StoreGuard(
            endpoint, make_namespace(self.layout.slice_bytes, name), timeout_s=timeout_s, counters=self.counters
        )
        self.worker = WorkerHalf(
            self.guard,
            self.layout,
            store=RankStore(self.guard.namespace, slots, layer_parts=cache.slices),
            timeout_s=timeout_s,
            replica=(0, 1),
            counters=self.counters,
            **options,
        )
        self.loaded: set[str] = set()
        self.failed: set[int] = set()
        self.saved: set[str] = set()
        self.report = WorkerReport()
        self._jobs = itertools.count()

    def saves(self, keys: Sequence[bytes], blocks: Sequence[int], slots: Sequence[int]) -> Saves:
        """Return a job that copies these blocks to these slots, and sends them."""
        return Saves(next(self._jobs), list(map(SavedBlock, keys, slots, blocks)))

    def step(
        self,
        plan: StepPlan | None = None,
        writes: Sequence[tuple[int, torch.Tensor]] = (),
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Run a step. writes: the blocks that the model computes, and their rows from `PagedCache.upload`. Each part is
        written as late as possible, when its last layer is computed. before: called before a part is written."""
        plan = plan or StepPlan(idle=True)
        if plan.reusing:
            self.worker.saves.order_copies()
        self.worker.begin_step(plan)
        for load in plan.loads:
            self.worker.loads.load(load)
        for part, layers in enumerate(self.layout.layers):
            *others, last = sorted(layers)
            for layer in others:
                self.worker.saves.layer_computed(layer)
            before()
            for block, row in writes:
                self.cache.put(block, row, part)
            self.worker.saves.layer_computed(last)
        self.worker.saves.save()
        self.loaded |= self.worker.loads.take_loaded()
        self.saved |= self.worker.saves.take_saved()
        self.failed |= self.worker.loads.take_failed_block_ids()
        if report := self.worker.take_report():
            self.report = self.report.aggregate(report)

    def until(self, condition: Callable[[], Any], deadline_s: float = DEADLINE_S, what: str = "") -> None:
        """Run steps without requests until this condition holds."""
        wait_until(lambda: self.step() or condition(), deadline_s, what)

    def until_loaded(self, *requests: str, deadline_s: float = DEADLINE_S) -> None:
        self.until(lambda: self.loaded >= set(requests), deadline_s, f"{requests} are loaded")

    def until_stored(self, job: Saves) -> None:
        wanted = {(job.job, block.slot) for block in job.copied}
        self.until(lambda: wanted <= set(self.report.stored), what=f"job {job.job} is stored")

    def put_in_store(self, keys: Sequence[bytes], rows: Bytes) -> None:
        """Set blocks as another engine would save them."""
        with KVStoreClient(self.guard._endpoint, self.guard.namespace) as client:
            client.set(self._keys(keys), list(rows.reshape(-1, self.layout.slice_bytes)))

    def in_store(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the blocks from the store, with all their parts; None for a block that lacks a part."""
        with KVStoreClient(self.guard._endpoint, self.guard.namespace, shared_memory=False) as client:
            found = client.get(self._keys(keys)).blocks
        slices = [found[first : first + self.cache.slices] for first in range(0, len(found), self.cache.slices)]
        return [None if None in each else b"".join(map(bytes, each)) for each in slices]  # type: ignore[arg-type]

    def _keys(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return slice_keys(keys, range(self.cache.slices)) if self.cache.slices > 1 else keys

    def check(self, expected: Bytes, but: Sequence[int] = ()) -> None:
        """Check every byte of every block, except those in `but`."""
        found = self.cache.blocks()
        wrong = [
            block
            for block in range(self.cache.num_blocks)
            if block not in but and not np.array_equal(found[block], expected[block])
        ]
        assert not wrong, f"blocks {wrong} hold other bytes"

    def close(self) -> None:
        self.worker.close()
