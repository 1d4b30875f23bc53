"""The host pool of an engine whose server is on the same host: the server itself copies blocks out of that pool."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.engine.test_kv_layout import BLOCKS, caches, swapped_out
from tests.support.harness import StartServer, make_keys, make_namespace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from kvstore_client.engine.guard import Counters, StoreGuard
    from kvstore_client.engine.paged.layout import BlockLayout
    from kvstore_client.engine.paged.plan import RankStore, SavedBlock, Saves, StepPlan
    from kvstore_client.engine.paged.worker import WorkerHalf
    from kvstore_client.vllm.shared.store_options import StoreOptions


def test_the_server_copies_saved_blocks_once_from_the_pool(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--unix-socket", str(tmp_path / "s"))
    counters = Counters()
    layout = BlockLayout(caches("LBHNC"), BLOCKS)
    namespace = make_namespace(layout.block_bytes, "shared-pool")
    guard = StoreGuard(server.endpoint, namespace, timeout_s=5, counters=counters)
    worker = WorkerHalf(
        guard,
        layout,
        store=RankStore(guard.namespace, 16),
        timeout_s=5,
        replica=(0, 1),
        counters=counters,
        store_on_host=True,
    )
    keys = make_keys(4)
    saves = Saves(0, list(map(SavedBlock, keys, [5, 1, 8, 3], [0, 1, 2, 3], [None, *keys[:3]])))
    worker.begin_step(StepPlan(saves=saves))
    worker.saves.save()
    worker.saves.order_copies()
    worker.take_report()
    assert worker.saves._out.drain(10)
    blocks = guard.call(lambda client: client.get(keys).blocks, None)
    assert blocks is not None and b"".join(map(bytes, blocks)) == swapped_out(layout, 0, 1, 2, 3).tobytes()
    staging = guard.call(lambda client: client._pool.links[0].staging, None)
    assert staging is not None and staging.ring is None and len(staging.shared) == 1
    worker.close()


@pytest.mark.parametrize(
    ("endpoint", "local", "on_host"),
    [
        ("tcp://127.0.0.1:7070", "", True),
        ("localhost:7070", "", True),
        ("[::1]:7070", "", True),
        ("tcp://store-1:7070", "", False),
        (["localhost:7070", "store-1:7070"], "", False),
        ("etcd://127.0.0.1:2379/fleet", "", False),
        ("etcd://10.0.0.1:2379/fleet", "localhost:7070", True),
    ],
)
def test_a_store_with_a_local_address_is_on_the_host(endpoint: str | list[str], local: str, on_host: bool) -> None:
    assert StoreOptions(endpoint=endpoint, local=local).store_on_host == on_host
