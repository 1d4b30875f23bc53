"""Clients with a block secret: which of them share blocks, and that MACs stay with their blocks everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import AsyncKVStoreClient, KVStoreClient, Namespace
from kvstore_client.engine.client_store import ClientOptions
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.memory import host_memory
from tests.support.cluster import Cluster, nodes_of, owned_by
from tests.support.disk import (
    KiB,
    disk_flags,
    disk_info,
    fill,
    flip,
    read,
    segment_files,
    wait_until_durable,
    wait_until_on,
    wait_until_written,
)
from tests.support.harness import MakeNamespace, Server, StartServer, block_of, blocks_of, make_keys, wait_until

SECRET = "the secret of the tenant"
BLOCK = 4096
KEYS = make_keys(40)
BLOCKS = blocks_of(KEYS, BLOCK)


def open_client(server: Server, namespace: Namespace, secret: str | bytes | None = SECRET) -> KVStoreClient:
    return KVStoreClient(server.endpoint, namespace, block_secret=secret)


@pytest.fixture
def client(server: Server, new_namespace: MakeNamespace) -> Iterator[KVStoreClient]:
    with open_client(server, new_namespace(BLOCK)) as client:
        yield client


# ---- who shares blocks -----------------------------------------------------------------------------------------------


def test_clients_with_one_secret_share_blocks_and_others_miss(server: Server, new_namespace: MakeNamespace) -> None:
    namespace = new_namespace(BLOCK)
    with open_client(server, namespace) as one, open_client(server, namespace, SECRET.encode()) as two:
        assert one.set(KEYS, BLOCKS).created == len(KEYS)
        assert list(two.get(KEYS).blocks) == BLOCKS
        assert two.stats.checksum_errors == 0
        for other in (None, "the secret of another"):
            with open_client(server, namespace, other) as stranger:
                assert stranger.get(KEYS).hit == 0
                assert stranger.stats.checksum_errors == 0  # the other client does not even see the blocks
                assert stranger.set(KEYS, blocks_of(KEYS, BLOCK, 1)).created == len(KEYS)
        assert list(one.get(KEYS).blocks) == BLOCKS


def test_without_the_secret_blocks_can_be_found_and_removed_but_not_read(server: Server, client: KVStoreClient) -> None:
    client.set(KEYS, BLOCKS)
    with open_client(server, client.namespace, None) as operator:
        assert operator.contains(KEYS).all()
        for call in (
            lambda: operator.get(KEYS),
            lambda: operator.set(KEYS, BLOCKS),
            lambda: list(operator.stream_get(KEYS)),
        ):
            with pytest.raises(ValueError, match="expected their secret, as block_secret, KVSTORE_BLOCK_SECRET"):
                call()
        assert operator.purge() == len(KEYS)
    assert not client.contains(KEYS).any()


def test_environment_and_engine_can_provide_the_secret(
    server: Server, client: KVStoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.set(KEYS, BLOCKS)
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    plain = Namespace(model=client.namespace.model, dtype="uint8", block_tokens=16, block_bytes=BLOCK)
    options = ClientOptions(block_secret=SECRET)
    guard = StoreGuard(server.endpoint, plain, options, timeout_s=10, counters=Counters())
    assert guard.namespace == client.namespace
    assert guard.call(lambda store: store.get(KEYS).hit, 0) == len(KEYS)
    guard.close()
    monkeypatch.setenv("KVSTORE_BLOCK_SECRET_FILE", str(file))
    with open_client(server, plain, None) as other:
        assert other.get(KEYS).hit == len(KEYS)

    async def read_all() -> int:
        async with AsyncKVStoreClient(server.endpoint, plain) as asynchronous:
            return (await asynchronous.get(KEYS)).hit

    assert asyncio.run(read_all()) == len(KEYS)


# ---- every way in and out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 100, 4096, 917_504])
def test_blocks_of_any_size_are_read_in_every_way(
    server: Server, new_namespace: MakeNamespace, block_bytes: int
) -> None:
    keys = make_keys(8, key_bytes=20)
    rows = np.frombuffer(b"".join(blocks_of(keys, block_bytes)), dtype=np.uint8).reshape(len(keys), block_bytes)
    with open_client(server, new_namespace(block_bytes)) as client:
        shared = host_memory(*rows.shape)
        shared[:] = rows
        for source in (rows, list(rows), shared):
            client.delete(keys)
            assert client.set(keys, source).created == len(keys)
            out = np.zeros((10, block_bytes), dtype=np.uint8)
            assert client.get_into(keys, out, slots=range(9, 1, -1)).all()
            assert (out[:1:-1] == rows).all()
            assert client.load_prefix(keys, out) == len(keys)
            assert (out[:8] == rows).all()
            assert [bytes(block) for block in client.get(keys).blocks] == [row.tobytes() for row in rows]
            assert {at: bytes(block) for at, block in client.stream_get(keys)} == dict(enumerate(map(bytes, rows)))
            with client.borrow(keys) as borrowed:
                assert [bytes(block) for block in borrowed] == [row.tobytes() for row in rows]
                del borrowed
        assert client.stats.checksum_errors == 0


def test_several_connections_and_waiting_for_promises_work(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server, namespace = start_server("--shards", "2", memory="128MiB"), new_namespace(256 * KiB)
    keys, out = make_keys(64), np.zeros((64, 256 * KiB), dtype=np.uint8)
    blocks = blocks_of(keys, 256 * KiB)
    with (
        KVStoreClient(server.endpoint, namespace, block_secret=SECRET, connections=3) as client,
        open_client(server, namespace) as producer,
    ):
        client.contains(keys)  # to connect to all shards
        wait_until(lambda: all(lane.sock for link in client._pool.links for lane in link.lanes))
        with producer.promise(keys):
            producer.set(keys, blocks)
            assert client.get_into(keys, out, wait_s=5).all()
        assert [row.tobytes() for row in out] == blocks


# ---- disk ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1000, 64 * KiB])  # written through the page cache, and with direct I/O
def test_macs_stay_with_their_blocks_on_disk(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace, block_bytes: int
) -> None:
    """A namespace with MACs and one without are on the same disk. The server itself finds damaged blocks in the one
    with MACs."""
    server, keys = start_server(*disk_flags(folder)), make_keys(100)
    namespace, plain = new_namespace(block_bytes), new_namespace(block_bytes)
    with open_client(server, namespace) as client, open_client(server, plain, None) as other:
        fill(client, keys, block_bytes)
        fill(other, keys, block_bytes, version=1)
        wait_until_durable(client)
    server.kill()
    damaged = 0
    for file in segment_files(folder):
        data = file.read_bytes()
        for key in keys[:10]:
            if (at := data.find(block_of(key, block_bytes))) >= 0:
                flip(file, at + block_bytes // 2, 4)
                damaged += 1
    assert damaged == 10
    server.restart()
    with open_client(server, namespace) as client, open_client(server, plain, None) as other:
        assert wait_until_on(client).recovered_blocks >= 2 * len(keys)
        assert read(client, keys, block_bytes) == [False] * 10 + [True] * 90
        assert all(read(other, keys, block_bytes, version=1))
        assert disk_info(client).corrupt_blocks == 10
        assert client.stats.checksum_errors == 0  # the damage never reached the client
        fill(client, keys[:10], block_bytes)
        wait_until_written(client)
        assert all(read(client, keys, block_bytes))


# ---- a cluster -------------------------------------------------------------------------------------------------------


def test_copies_keep_their_macs(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    """Blocks keep their MACs on replicas, and when a reader repairs a replica."""
    cluster.start_listed("a", "b")
    namespace = new_namespace(BLOCK)
    with cluster.client(namespace, block_secret=SECRET, replicas=2) as client:
        assert client.set(KEYS, BLOCKS, deferred=False).copies == 2
        with cluster.alone("a", client.namespace) as a:
            a.delete(KEYS)

        def found_elsewhere() -> int:
            assert list(client.get(KEYS).blocks) == BLOCKS
            return client.stats.found_elsewhere

        found = wait_until(found_elsewhere, what="node a is asked: not while it is the slower one")
        wait_until(lambda: client.stats.repaired == found, what="what was found elsewhere is set again")
        with KVStoreClient(cluster.nodes["a"].endpoint, namespace, block_secret=SECRET) as a:
            present = a.contains(KEYS)
            assert present.sum() == found
            for block, expected, there in zip(a.get(KEYS).blocks, BLOCKS, present, strict=True):
                assert block == (expected if there else None)
        assert client.stats.checksum_errors == 0


def test_a_leaving_node_hands_over_blocks_with_their_macs(cluster: Cluster, new_namespace: MakeNamespace) -> None:
    namespace = new_namespace(BLOCK)
    cluster.start("a")
    leaving = cluster.start("b", drain_seconds=20)
    cluster.wait_for_members("a", "b")
    with cluster.client(namespace, block_secret=SECRET) as client:
        wait_until(lambda: nodes_of(client) == {"a", "b"})
        assert client.set(KEYS, BLOCKS).created == len(KEYS)
        assert owned_by(client, "b", KEYS)
        assert leaving.stop() == 0
        wait_until(lambda: nodes_of(client) == {"a"})
        assert list(client.get(KEYS).blocks) == BLOCKS
        assert client.stats.checksum_errors == 0
