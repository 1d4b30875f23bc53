"""An empty namespace disappears without a request: from `info`, the metrics, memory and the disk's index.

The shard's counters still include those of the namespace.
"""

from __future__ import annotations

from pathlib import Path
from urllib.request import urlopen

from kvstore_client import KVStoreClient, Namespace
from tests.support.clock import Clock
from tests.support.disk import disk_flags, disk_info, fill, open_client, wait_until_on, wait_until_written
from tests.support.harness import MakeNamespace, Server, StartServer, blocks_of, make_keys, shard_info

BLOCK = 16 << 10
GONE_S = 30.0  # the longest wait, in seconds of the servers' clock; 5 s are enough


def rows(client: KVStoreClient) -> set[str]:
    """Return the ids of the namespaces that INFO lists."""
    return {namespace.id for namespace in shard_info(client).namespaces}


def put(server: Server, namespace: Namespace, count: int) -> list[bytes]:
    keys = make_keys(count)
    with KVStoreClient(server.endpoint, namespace) as client:
        assert client.set(keys, blocks_of(keys, namespace.block_bytes)).created == count
        assert client.get(keys).hit == count
    return keys


def delete(server: Server, namespace: Namespace, keys: list[bytes]) -> None:
    with KVStoreClient(server.endpoint, namespace) as client:
        assert client.delete(keys) == len(keys)


def test_deleted_namespaces_leave_info_and_metrics_but_shard_counters_stay(
    start_server: StartServer, new_namespace: MakeNamespace, clock: Clock
) -> None:
    server = start_server("--http", "127.0.0.1:0", memory="64MiB", segment="1MiB", **clock.environment)
    kept, *short = (new_namespace(BLOCK) for _ in range(30))
    put(server, kept, 3)
    for namespace in short:
        delete(server, namespace, put(server, namespace, 3))
    with KVStoreClient(server.endpoint, kept) as client:
        clock.run_until(lambda: rows(client) == {kept.id}, GONE_S, "INFO lists only the namespace that has blocks")
        info = shard_info(client)
        assert (info.created, info.hits, info.misses, info.evicted) == (90, 90, 0, 0)
        assert info.memory_used_bytes == info.segment_bytes, "their segments are free"
        assert client.contains(make_keys(3)).all()
    with urlopen(f"{server.http_url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert kept.id in text and not any(namespace.id in text for namespace in short)
    assert 'kvstore_shard_created_blocks_total{shard="0"} 90.0' in text
    assert put(server, short[0], 2), "it may come back"


def test_a_namespace_whose_blocks_expired_disappears(
    start_server: StartServer, new_namespace: MakeNamespace, clock: Clock
) -> None:
    server = start_server("--ttl-seconds", "600", **clock.environment)
    namespace = new_namespace(BLOCK)
    put(server, namespace, 3)
    with KVStoreClient(server.endpoint, namespace) as client:
        assert rows(client) == {namespace.id}
        clock.advance(601)
        clock.run_until(lambda: not rows(client), GONE_S, "its row is gone")


def test_a_namespace_stays_while_it_has_disk_blocks_then_leaves_that_index(
    start_server: StartServer, new_namespace: MakeNamespace, tmp_path: Path, clock: Clock
) -> None:
    flags = disk_flags(tmp_path / "disk", "64MiB")
    server = start_server(*flags, memory="2MiB", segment="1MiB", **clock.environment)
    evicted, deleted, other = (new_namespace(BLOCK) for _ in range(3))
    keys = make_keys(300)
    for namespace in (deleted, evicted, other):  # each fills the memory more than once
        with open_client(server, namespace) as client:
            fill(client, keys, BLOCK)
            wait_until_written(client)
    with open_client(server, deleted) as client:
        assert client.delete(keys) == 300
        left = {evicted.id, other.id}
        clock.run_until(lambda: rows(client) == left, GONE_S, "what was deleted from both tiers is gone")
        before = disk_info(client)
    assert server.stop() == 0
    server.restart()
    with open_client(server, evicted) as client:
        recovered = wait_until_on(client)
        assert recovered.recovered_blocks == before.blocks == 600 and not recovered.lost_blocks
        assert rows(client) == {evicted.id, other.id}
        assert client.contains(keys).all()
