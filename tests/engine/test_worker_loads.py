"""Concurrent loads of one rank."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from typing import Any

import pytest

from kvstore_client import KVStoreClient
from tests.engine.test_kv_layout import BLOCKS, caches, swapped_out, to_bytes
from tests.support.harness import Server, blocks_of, make_keys, make_namespace, namespace_info, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    import torch

    from kvstore_client.engine import transfer_in
    from kvstore_client.engine.guard import Counters, StoreGuard
    from kvstore_client.engine.paged.layout import BlockLayout, DetachedError
    from kvstore_client.engine.paged.plan import Load, RankStore, SavedBlock, Saves, StepPlan
    from kvstore_client.engine.paged.rank_loads import STAGED_LOADS, STAGED_WAITING_LOADS
    from kvstore_client.engine.paged.worker import WorkerHalf
    from tests.engine.late_layout import LateLayout


def test_host_memory_blocks_do_not_wait_for_the_network(server: Server) -> None:
    layout = BlockLayout(caches("LBHNC"), BLOCKS)
    counters = Counters()
    guard = StoreGuard(
        server.endpoint, make_namespace(layout.block_bytes, "worker-loads"), timeout_s=5, counters=counters
    )
    worker = WorkerHalf(
        guard, layout, store=RankStore(guard.namespace, 16), timeout_s=5, replica=(0, 1), counters=counters
    )
    keys = make_keys(1 + 2 * STAGED_LOADS)
    worker.begin_step(StepPlan(saves=Saves(0, [SavedBlock(keys[0], 3, 0)])))
    worker.saves.save()
    worker.saves.order_copies()
    loaded: set[str] = set()
    with server.stopped():
        for number, key in enumerate(keys[1:]):  # more blocks than rows at a time
            worker.loads.load(Load(f"network {number}", keys=[key], block_ids=[4], within_s=4.0))
        worker.loads.load(Load("host", host_slots=[3], host_block_ids=[2]))
        wait_until(lambda: loaded.update(worker.loads.take_loaded()) or "host" in loaded, 1.0)
        assert loaded == {"host"} and not worker.loads.take_failed_block_ids()
    assert (swapped_out(layout, 2) == swapped_out(layout, 0)).all()
    wait_until(lambda: loaded.update(worker.loads.take_loaded()) or len(loaded) == len(keys))
    worker.close()
    guard.close()


def bytes_of(tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(map(to_bytes, tensors.values()))


def test_a_withdrawn_cache_is_not_touched_and_earlier_loads_are_missing(server: Server) -> None:
    tensors = caches("LBHNC")
    layout = BlockLayout(tensors, BLOCKS)
    counters = Counters()
    namespace = make_namespace(layout.block_bytes, "taken-away")
    guard = StoreGuard(server.endpoint, namespace, timeout_s=5, counters=counters)
    worker = WorkerHalf(
        guard, layout, store=RankStore(guard.namespace, 16), timeout_s=5, replica=(0, 1), counters=counters
    )
    keys = make_keys(3)
    worker.begin_step(StepPlan(saves=Saves(0, [SavedBlock(keys[0], 3, 0), SavedBlock(keys[1], 4, 1)])))
    worker.saves.save()
    worker.saves.order_copies()
    with KVStoreClient(server.endpoint, namespace) as client:
        wait_until(lambda: worker.take_report() and client.contains(keys[:2]).all(), what="the store has them")
    loaded: set[str] = set()

    def lost(name: str) -> set[int]:
        wait_until(lambda: loaded.update(worker.loads.take_loaded()) or name in loaded, what=f"{name} ends")
        return worker.loads.take_failed_block_ids()

    first = bytes_of(tensors)
    worker.loads.load(Load("placed", number=1, host_slots=[3], host_block_ids=[2]))
    wait_until(lambda: bytes_of(tensors) != first, what="it is placed")
    with server.stopped():
        worker.loads.load(Load("under way", number=2, keys=keys[1:2], block_ids=[4], within_s=4.0))
        before = bytes_of(tensors)
        worker.detach()
    assert lost("placed") == {2}
    assert lost("under way") == {4}
    worker.loads.load(Load("host", number=3, host_slots=[3], host_block_ids=[4]))
    assert lost("host") == {4}
    worker.begin_step(StepPlan(saves=Saves(1, [SavedBlock(key, 5, 5) for key in keys[2:]])))
    worker.saves.save()
    report = worker.take_report()
    assert report is not None and report.broken == {1}
    assert bytes_of(tensors) == before, "the cache was touched"
    worker.attach()
    worker.loads.load(Load("store", number=4, keys=keys[1:2], block_ids=[4], within_s=4.0))
    assert lost("store") == set()
    assert (swapped_out(layout, 4) == swapped_out(layout, 1)).all()
    assert "defects" not in counters.take()
    worker.close()
    guard.close()


def test_a_cache_is_withdrawn_after_started_copies_are_complete() -> None:
    tensors = caches("LBHNC")
    layout = BlockLayout(tensors, BLOCKS)
    rows = layout.pool(2)
    ended = threading.Event()

    def copy() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            rows[:] = number % 251
            with contextlib.suppress(DetachedError):
                layout.swap_in(rows, [0, 1], [2, 3])

    threads = [threading.Thread(target=copy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        layout.detach()
        before = bytes_of(tensors)
        time.sleep(0.001)
        assert bytes_of(tensors) == before
        layout.attach()
    ended.set()
    for thread in threads:
        thread.join()


def test_many_loads_share_threads_and_end_with_their_requests(server: Server) -> None:
    """The loads wait for blocks that another engine has promised and never sets."""
    layout = BlockLayout(caches("LBHNC"), BLOCKS)
    counters = Counters()
    namespace = make_namespace(layout.block_bytes, "worker-waits")
    guard = StoreGuard(server.endpoint, namespace, timeout_s=5, counters=counters)
    worker = WorkerHalf(
        guard, layout, store=RankStore(guard.namespace, 64), timeout_s=5, replica=(0, 1), counters=counters
    )
    keys = make_keys(STAGED_WAITING_LOADS + 8)
    before = set(threading.enumerate())
    with KVStoreClient(server.endpoint, namespace) as producer, producer.promise(keys):
        for number, key in enumerate(keys):
            how = {"slots": [number]} if number < 40 else {}
            worker.loads.load(Load(str(number), keys=[key], block_ids=[4], within_s=60.0, waits=True, **how))
        wait_until(lambda: namespace_info(producer).awaited == len(keys), what="all wait at a time")
        assert len(set(threading.enumerate()) - before) == 2
        worker.begin_step(StepPlan(cancelled=["3", "5", "no such request"]))
        loaded: set[str] = set()
        wait_until(lambda: loaded.update(worker.loads.take_loaded()) or len(loaded) == 2)
        assert loaded == {"3", "5"} and worker.loads.take_failed_block_ids() == {4}
        wait_until(lambda: namespace_info(producer).awaited == len(keys) - 2, what="the store was told")
        worker.begin_step(StepPlan(cancelled=list(map(str, range(len(keys))))))
        wait_until(lambda: loaded.update(worker.loads.take_loaded()) or len(loaded) == len(keys))
    assert not counters.take().get("defects")
    worker.close()
    guard.close()


def test_rows_are_reused_only_after_their_last_copy(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of many chunks uses two rows alternately. On a device, a copy may be made long after it was started."""
    tensor = torch.zeros((40, 1, 16, 64))
    layout = LateLayout({"layers.0": tensor}, 40)
    monkeypatch.setattr(transfer_in, "LOAD_CHUNK_BYTES", 3 * layout.block_bytes)
    counters = Counters()
    guard = StoreGuard(server.endpoint, make_namespace(layout.block_bytes, "late"), timeout_s=5, counters=counters)
    worker = WorkerHalf(
        guard, layout, store=RankStore(guard.namespace, 16), timeout_s=5, replica=(0, 1), counters=counters
    )
    keys = make_keys(40)
    blocks = blocks_of(keys, layout.block_bytes)
    guard.call(lambda client: client.set(keys, blocks, deferred=False), None)
    worker.loads.load(Load("it", keys=keys, block_ids=list(range(40)), within_s=20.0))
    wait_until(worker.loads.take_loaded)
    assert not worker.loads.take_failed_block_ids()
    assert tensor.numpy().tobytes() == b"".join(blocks)
    worker.close()
    guard.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"keys": make_keys(8), "block_ids": [4]}, "1 block_ids and 8 keys"),
        ({"host_slots": [1], "host_block_ids": [4, 5]}, "2 host_block_ids and 1 host_slots"),
    ],
)
def test_a_load_names_one_cache_block_for_each_key(fields: dict[str, Any], said: str) -> None:
    from kvstore_client.engine.paged.plan import Load

    with pytest.raises(ValueError, match=f"request it has {said}; expected one of"):
        Load("it", **fields)
