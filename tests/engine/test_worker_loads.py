"""Loads of one rank, beside each other."""

from __future__ import annotations

import threading
import warnings

import pytest

from kvstore_client import KVStoreClient
from kvstore_client.engine.transfer_out import SendAs
from tests.engine.test_kv_layout import BLOCKS, caches, swapped_out
from tests.support.harness import Server, blocks_of, make_keys, make_namespace, namespace_info, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    import torch

    from kvstore_client.engine import transfer_in
    from kvstore_client.engine.guard import Counters, StoreGuard
    from kvstore_client.vllm.connector.layout import BlockLayout
    from kvstore_client.vllm.connector.plan import Load, RankStore, Saves, StepPlan
    from kvstore_client.vllm.connector.rank_loads import STAGED_LOADS, STAGED_WAITING_LOADS
    from kvstore_client.vllm.connector.worker import WorkerHalf
    from tests.engine.late_layout import LateLayout


def test_blocks_in_host_memory_do_not_wait_for_the_network(server: Server) -> None:
    layout = BlockLayout(caches("LBHNC"), BLOCKS)
    counters = Counters()
    guard = StoreGuard(
        server.endpoint, make_namespace(layout.block_bytes, "worker-loads"), timeout_s=5, counters=counters
    )
    worker = WorkerHalf(
        guard, layout, store=RankStore(guard.namespace, 16), timeout_s=5, replica=(0, 1), counters=counters
    )
    keys = make_keys(1 + 2 * STAGED_LOADS)
    worker.begin_step(StepPlan(saves=Saves(0, keys[:1], [None], block_ids=[0], slots=[3], how=[SendAs()])))
    worker.saves.save()
    worker.saves.order_copies()
    loaded: set[str] = set()
    with server.stopped():
        for number, key in enumerate(keys[1:]):  # more than have rows at a time
            worker.loads.load(Load(f"network {number}", keys=[key], block_ids=[4], within_s=4.0))
        worker.loads.load(Load("host", host_slots=[3], host_block_ids=[2]))
        wait_until(lambda: loaded.update(worker.loads.take_loaded()) or "host" in loaded, 1.0)
        assert loaded == {"host"} and not worker.loads.take_failed_block_ids()
    assert (swapped_out(layout, 2) == swapped_out(layout, 0)).all()
    wait_until(lambda: loaded.update(worker.loads.take_loaded()) or len(loaded) == len(keys), 10)
    worker.close()
    guard.close()


def test_many_loads_take_no_thread_each_and_end_when_their_requests_do(server: Server) -> None:
    """Loads that wait for blocks of another engine, which never come."""
    layout = BlockLayout(caches("LBHNC"), BLOCKS)
    counters = Counters()
    namespace = make_namespace(layout.block_bytes, "worker-waits")
    guard = StoreGuard(server.endpoint, namespace, timeout_s=5, counters=counters)
    worker = WorkerHalf(
        guard, layout, store=RankStore(guard.namespace, 64), timeout_s=5, replica=(0, 1), counters=counters
    )
    keys = make_keys(STAGED_WAITING_LOADS + 8)
    threads = threading.active_count()
    with KVStoreClient(server.endpoint, namespace) as producer, producer.promise(keys):
        for number, key in enumerate(keys):
            how = {"slots": [number]} if number < 40 else {}
            worker.loads.load(Load(str(number), keys=[key], block_ids=[4], within_s=60.0, waits=True, **how))
        wait_until(lambda: namespace_info(producer).awaited == len(keys), what="all wait at a time")
        assert threading.active_count() == threads + 2
        worker.begin_step(StepPlan(cancelled=["3", "5", "no such request"]))
        loaded: set[str] = set()
        wait_until(lambda: loaded.update(worker.loads.take_loaded()) or len(loaded) == 2, 5.0)
        assert loaded == {"3", "5"} and worker.loads.take_failed_block_ids() == {4}
        wait_until(lambda: namespace_info(producer).awaited == len(keys) - 2, what="the store was told")
        worker.begin_step(StepPlan(cancelled=list(map(str, range(len(keys))))))
        wait_until(lambda: loaded.update(worker.loads.take_loaded()) or len(loaded) == len(keys), 5.0)
    assert not counters.take().get("defects")
    worker.close()
    guard.close()


def test_rows_are_received_into_when_their_last_copy_is_made(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of many chunks, through rows of two. On a device a copy may be made long after it was started."""
    tensor = torch.zeros((40, 1, 16, 64))
    layout = LateLayout({"layers.0": tensor}, 40)
    monkeypatch.setattr(transfer_in, "CHUNK_BYTES", 3 * layout.block_bytes)
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
