"""A failing device does not stop the engine; blocks that the device did not copy are not saved."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_client import KVStoreClient
from tests.engine.test_kv_layout import BLOCKS, caches
from tests.support.harness import Server, make_keys, make_namespace, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from kvstore_client.engine.guard import Counters, StoreGuard
    from kvstore_client.engine.paged import layout as layout_module
    from kvstore_client.engine.paged.device import PINNED_PIECE_BYTES, lock_in_pieces
    from kvstore_client.engine.paged.layout import BlockLayout, Copy, Rows
    from kvstore_client.engine.paged.plan import RankStore, SavedBlock, Saves, StepPlan
    from kvstore_client.engine.paged.worker import WorkerHalf


class LostDevice:
    """A copy that fails when it is waited for, as with CUDA."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    order = wait


class FailingLayout(BlockLayout):
    """A layout whose first copy out of the cache fails."""

    copies = 0

    def swap_out(self, block_ids: Sequence[int], pool: Rows, slots: Sequence[int], part: int = 0) -> Copy:
        copy = super().swap_out(block_ids, pool, slots, part)
        self.copies += 1
        return LostDevice() if self.copies == 1 else copy


@pytest.fixture
def guard(server: Server) -> Iterator[StoreGuard]:
    namespace = make_namespace(BlockLayout(caches("LBHNC"), BLOCKS).block_bytes, "lost-device")
    guard = StoreGuard(server.endpoint, namespace, timeout_s=5, counters=Counters())
    yield guard
    guard.close()


def test_a_preemption_continues_after_a_failed_copy(guard: StoreGuard) -> None:
    counters = Counters()
    layout = FailingLayout(caches("LBHNC"), BLOCKS)
    worker = WorkerHalf(
        guard, layout, store=RankStore(guard.namespace, 16), timeout_s=5, replica=(0, 1), counters=counters
    )
    keys = make_keys(2)
    for job, key in enumerate(keys):
        saves = Saves(job, [SavedBlock(key, job, job)])
        worker.begin_step(StepPlan(saves=saves))
        worker.saves.save()
    worker.saves.order_copies()
    report = worker.take_report()
    assert report is not None and report.broken == {0} and report.copied == {0: 1, 1: 1}
    assert counters.take()["defects"] == 1
    assert worker.saves._out.drain(10)
    present = guard.call(lambda client: client.contains(keys).tolist(), None)
    assert present == [False, True], "only what was copied is saved"
    worker.close()


class SlowHost(BlockLayout):
    """A layout whose copying thread waits for a signal and fails to copy block 3."""

    def __init__(self) -> None:
        super().__init__(caches("LBHNC"), BLOCKS)
        self.may_copy = threading.Event()

    def _gather(self, block_ids: npt.NDArray[np.int64], *arguments: Any) -> None:
        assert self.may_copy.wait(10)
        if 3 in block_ids:
            raise MemoryError
        super()._gather(block_ids, *arguments)


@pytest.mark.parametrize("ends", ["order_copies", "close"])
def test_host_copies_precede_block_reuse_and_the_end(
    guard: StoreGuard, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Blocks may be reused, and the engine may end, only after their copies. A failed copy costs only its own block."""
    monkeypatch.setattr(layout_module, "AT_ONCE_BYTES", 0)
    counters, layout = Counters(), SlowHost()
    worker = WorkerHalf(
        guard, layout, store=RankStore(guard.namespace, 16), timeout_s=5, replica=(0, 1), counters=counters
    )
    keys = make_keys(3)
    for job, (key, block_id) in enumerate(zip(keys, (1, 3, 2), strict=True)):
        saves = Saves(job, [SavedBlock(key, job, block_id)])
        worker.begin_step(StepPlan(saves=saves, held={f"request {job}": job}))
        worker.saves.save()
    assert worker.saves.take_saved() == set(), "the engine must keep the blocks"
    with ThreadPoolExecutor(1) as model:
        ending = model.submit(worker.close if ends == "close" else worker.saves.order_copies)
        with pytest.raises(TimeoutError):
            ending.result(0.05)
        layout.may_copy.set()
        ending.result(10)
    assert worker.saves.take_saved() == {"request 0", "request 1", "request 2"}
    report = worker.take_report()
    assert report is not None and report.broken == {1} and report.copied == {0: 1, 1: 1, 2: 1}
    worker.close()
    with KVStoreClient(guard._endpoint, guard.namespace) as client:
        assert client.contains(keys).tolist() == [True, False, True]
        expected = BlockLayout(caches("LBHNC"), BLOCKS)
        rows = expected.pool(2)
        expected.swap_out([1, 2], rows, [0, 1])
        assert [bytes(client.get([keys[place]]).blocks[0] or b"") for place in (0, 2)] == [bytes(row) for row in rows]


def test_blocks_copied_by_the_host_are_sent_without_a_further_step(
    guard: StoreGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "AT_ONCE_BYTES", 0)
    layout = SlowHost()
    worker = WorkerHalf(
        guard, layout, store=RankStore(guard.namespace, 16), timeout_s=5, replica=(0, 1), counters=Counters()
    )
    [key] = make_keys(1, first=700)
    worker.begin_step(StepPlan(saves=Saves(0, [SavedBlock(key, 0, 1)])))
    worker.saves.save()
    layout.may_copy.set()
    wait_until(lambda: guard.call(lambda client: client.contains([key]).tolist(), [False]) == [True])
    worker.close()


class Locks:
    """A driver that can lock at most `most` bytes."""

    def __init__(self, most: int) -> None:
        self.left = most
        self.locked: dict[int, int] = {}

    def register(self, address: int, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        self.locked[address] = size
        return True

    def unregister(self, address: int) -> None:
        self.left += self.locked.pop(address)


@pytest.mark.parametrize("row_bytes", [4096, 917504, 5 * 12345])
def test_memory_is_locked_in_accepted_pieces_without_splitting_rows(row_bytes: int) -> None:
    address = 1 << 40
    size = (3 * PINNED_PIECE_BYTES // row_bytes + 1) * row_bytes
    locks = Locks(size)
    assert lock_in_pieces(address, size, row_bytes, locks.register, locks.unregister) == list(locks.locked)
    assert sum(locks.locked.values()) == size and max(locks.locked.values()) <= PINNED_PIECE_BYTES
    starts = list(locks.locked)
    assert len(starts) >= 4 and starts[0] == address
    assert all((start - address) % row_bytes == 0 and start % 4096 == 0 for start in starts)


def test_memory_that_cannot_be_locked_is_refused_and_nothing_stays_locked() -> None:
    locks = Locks(2 * PINNED_PIECE_BYTES)
    with pytest.raises(ValueError, match=r"does not page-lock 48\.0 GiB.*after 32\.0 GiB. Lower cpu_bytes.*ulimit -l"):
        lock_in_pieces(0, 3 * PINNED_PIECE_BYTES, 4096, locks.register, locks.unregister)
    assert not locks.locked
