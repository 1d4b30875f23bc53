"""The client in a cluster: real servers and a real etcd. The tests write the members' records themselves, so that each
state lasts as long as a test needs."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore.cluster.members import Member
from kvstore.wire import ShardAddress
from kvstore_client import ConnectionLost, KVStoreClient, Namespace
from tests.support.cluster import Cluster, nodes_of, owned_by
from tests.support.harness import (
    MakeNamespace,
    RawClient,
    StartServer,
    blocks_of,
    make_keys,
    set_frames,
    sums_of,
    wait_until,
)

BLOCK_BYTES = 4096
COUNT = 200
KEYS = make_keys(COUNT)
BLOCKS = blocks_of(KEYS, BLOCK_BYTES)


def holders(cluster: Cluster, namespace: Namespace) -> dict[str, np.ndarray]:
    """Return which of `KEYS` each node has."""
    found = {}
    for node in cluster.nodes:
        with cluster.alone(node, namespace) as client:
            found[node] = client.contains(KEYS)
    return found


def stores_and_reads(client: KVStoreClient, first: int = 0) -> None:
    keys = make_keys(64, first=first)
    blocks = blocks_of(keys, BLOCK_BYTES)
    assert client.set(keys, blocks).error == 0
    client.sync()
    assert list(client.get(keys).blocks) == blocks


def test_a_cluster_works_as_one_store(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a", "b", "c", shards=2)
    with cluster.client(namespace) as client:
        result = client.set(KEYS, BLOCKS, deferred=False)
        assert (result.created, result.error) == (COUNT, 0)
        assert client.contains(KEYS).all()
        assert client.match_prefix(KEYS) == COUNT
        assert list(client.get(KEYS).blocks) == BLOCKS
        assert {at: bytes(block) for at, block in client.stream_get(KEYS)} == dict(enumerate(BLOCKS))
        assert client.set(KEYS, BLOCKS).existed == COUNT
        assert len(client.info().shards) == 6
        assert all(5 < there.sum() < COUNT - 5 for there in holders(cluster, namespace).values())
        assert client.delete(KEYS) == COUNT
        assert not client.contains(KEYS).any()


def test_a_cluster_without_nodes_cannot_be_used(cluster: Cluster, namespace: Namespace) -> None:
    with pytest.raises(ConnectionLost, match="no node is registered"):
        cluster.client(namespace, timeout_s=1.0)
    with cluster.client(namespace, timeout_s=1.0, fail_open=True) as client:
        assert client.set(KEYS, BLOCKS).error == COUNT
        assert not client.contains(KEYS).any()
        assert client.get(KEYS).hit == 0
        assert client.delete(KEYS) == 0
        cluster.start_listed("late")
        wait_until(lambda: nodes_of(client) == {"late"})
        stores_and_reads(client)


def test_a_cluster_with_an_unreachable_etcd_is_named(namespace: Namespace) -> None:
    with pytest.raises(ConnectionLost, match=r"etcd://127\.0\.0\.1:1/lost"):
        KVStoreClient("etcd://127.0.0.1:1/lost", namespace, timeout_s=1.0)


def test_a_node_list_that_contains_a_cluster_is_refused(namespace: Namespace) -> None:
    with pytest.raises(ValueError, match="expected tcp://HOST:PORT"):
        KVStoreClient(["tcp://127.0.0.1:1", "etcd://127.0.0.1:1/name"], namespace)


def test_an_address_with_another_shard_is_not_used(
    cluster: Cluster, start_server: StartServer, namespace: Namespace
) -> None:
    cluster.start_listed("a")
    other = start_server()
    member = Member(node="b", state="serving", shards=[ShardAddress("old/0", other.host, other.port, 64e6)])
    cluster.put(member)
    with cluster.client(namespace, fail_open=True, timeout_s=2.0) as client:
        wait_until(lambda: nodes_of(client) == {"a", "b"})
        result = client.set(KEYS, BLOCKS)
        assert 0 < result.error < COUNT
    with KVStoreClient(other.endpoint, namespace) as alone:
        assert not alone.contains(KEYS).any(), "blocks went to a shard that is not the one meant"


def test_a_client_has_one_connection_per_shard(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a", "b", shards=2)
    with cluster.client(namespace) as client, ThreadPoolExecutor(8) as threads:
        for _ in threads.map(lambda _: stores_and_reads(client), range(16)):
            pass
        assert [shard.connections for shard in client.info().shards] == [1, 1, 1, 1]


# ---- change ------------------------------------------------------------------------------------------------------


def test_reads_fill_a_joining_node(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a", "b")
    with cluster.client(namespace) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        cluster.start_listed("c", state="joining")
        wait_until(lambda: nodes_of(client) == {"a", "b", "c"})
        assert client.contains(KEYS).all(), "what the new node does not have yet is where it was"
        assert client.match_prefix(KEYS) == COUNT
        assert list(client.get(KEYS).blocks) == BLOCKS
        moved = client.stats.found_elsewhere
        wait_until(lambda: holders(cluster, namespace)["c"].sum() > COUNT / 5, what="the new node fills")
        wait_until(lambda: client.stats.repaired == holders(cluster, namespace)["c"].sum())
        assert moved >= client.stats.repaired
        before = client.stats.found_elsewhere
        assert client.get(KEYS).hit == COUNT
        assert client.stats.found_elsewhere == before, "each block is read from the old owner once"
        cluster.register("c", "serving")
        wait_until(lambda: client._pool.view._old is None)
        assert client.get(KEYS).hit == COUNT, "and stays after the grace period"


def test_streams_fill_a_joining_node(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a")
    with cluster.client(namespace) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        cluster.start_listed("b", state="joining")
        wait_until(lambda: nodes_of(client) == {"a", "b"})
        assert {at: bytes(block) for at, block in client.stream_get(KEYS)} == dict(enumerate(BLOCKS))
        wait_until(lambda: holders(cluster, namespace)["b"].sum() > COUNT / 3, what="the new node fills")


def test_blocks_with_unchecked_checksums_are_not_repaired(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a")
    with cluster.client(namespace, checksum=False) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        cluster.start_listed("b", state="joining")
        wait_until(lambda: nodes_of(client) == {"a", "b"})
        assert client.get(KEYS).hit == COUNT
        wait_until(lambda: not client._repairs._running)
        assert not holders(cluster, namespace)["b"].any()


def test_blocks_set_during_a_join_go_to_the_new_owner(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a")
    cluster.start_listed("b", state="joining")
    with cluster.client(namespace) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        there = holders(cluster, namespace)
        assert (there["a"] ^ there["b"]).all()
        assert client.delete(KEYS) == COUNT


def test_a_draining_node_is_read_from_but_not_set_on(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a", "b")
    with cluster.client(namespace) as client:
        client.set(KEYS[:100], BLOCKS[:100], deferred=False)
        kept = holders(cluster, namespace)["b"]
        cluster.register("b", "draining")
        wait_until(lambda: client._pool.view._old is not None)
        client.set(KEYS[100:], BLOCKS[100:], deferred=False)
        assert (holders(cluster, namespace)["b"] == kept).all(), "nothing new is set on it"
        assert client.get(KEYS).hit == COUNT, "what it has is still found"
        wait_until(
            lambda: holders(cluster, namespace)["a"].sum() == COUNT, what="what was read is set on its next owner"
        )
        cluster.withdraw("b")
        wait_until(lambda: nodes_of(client) == {"a"})
        cluster.nodes["b"].stop()
        assert client.get(KEYS).hit == COUNT


def test_a_view_change_drops_no_request(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a", "b")
    with cluster.client(namespace, timeout_s=5.0) as client:
        wait_until(lambda: nodes_of(client) == {"a", "b"})
        client.set(KEYS, BLOCKS, deferred=False)
        end = time.monotonic() + 4.0
        states = [("b", "draining"), ("b", "serving"), ("b", "joining"), ("b", "serving")]
        while time.monotonic() < end:
            node, state = states[int(time.monotonic() * 5) % len(states)]
            cluster.register(node, state)  # type: ignore[arg-type]
            for _ in range(5):
                assert client.get(KEYS).hit == COUNT
                assert client.set(KEYS, BLOCKS, deferred=False).error == 0
        assert client.stats.failures == 0


def test_a_forked_child_follows_the_cluster_itself(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a")
    with cluster.client(namespace) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                assert client.get(KEYS).hit == COUNT
                os.write(write_end, b"1")
                wait_until(lambda: nodes_of(client) == {"a", "b"})
                stores_and_reads(client, first=1000)
                os.write(write_end, b"2")
            finally:
                os._exit(0)
        os.close(write_end)
        assert os.read(read_end, 1) == b"1"
        cluster.start_listed("b")
        assert os.read(read_end, 1) == b"2"
        os.waitpid(child, 0)
        os.close(read_end)


# ---- replicas ----------------------------------------------------------------------------------------------------


def test_each_block_is_on_the_requested_number_of_nodes(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a", "b", "c", "d", shards=2)
    with cluster.client(namespace, replicas=3) as client:
        assert client.set(KEYS, BLOCKS, deferred=False).created == COUNT
        assert (sum(there.astype(int) for there in holders(cluster, namespace).values()) == 3).all()
        assert client.set(KEYS, BLOCKS, deferred=False).existed == COUNT
        assert client.set(KEYS, BLOCKS, force=True).forced == COUNT
        assert client.delete(KEYS + KEYS[:3]) == COUNT
        assert not any(there.any() for there in holders(cluster, namespace).values())


def test_replicas_are_in_different_zones(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a1", "a2", "b1", "b2")
    for node in cluster.nodes:
        cluster.register(node, "serving", zone=node[0])
    with cluster.client(namespace, replicas=2) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        there = holders(cluster, namespace)
        assert (there["a1"] ^ there["a2"]).all()
        assert (there["b1"] ^ there["b2"]).all()


def test_with_too_few_nodes_every_node_has_a_replica(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a", shards=3)
    with cluster.client(namespace, replicas=2) as client:
        assert client.set(KEYS, BLOCKS, deferred=False).created == COUNT
        assert client.get(KEYS).hit == COUNT


@pytest.mark.exclusive
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_with_a_replica_a_dead_node_costs_no_hit_or_deadline(cluster: Cluster, namespace: Namespace, how: str) -> None:
    cluster.start_listed("a", "b", "c")
    with cluster.client(namespace, replicas=2, timeout_s=2.0) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        victim = cluster.nodes["a"]
        if how == "kill":
            victim.kill()
        else:
            victim.signal(19)
            for shard in victim.shards():
                shard.suspend()
        try:
            out = np.zeros((COUNT, BLOCK_BYTES), dtype=np.uint8)
            for call in (
                lambda: client.contains(KEYS).all(),
                lambda: client.get(KEYS).hit == COUNT,
                lambda: client.get_into(KEYS, out).all(),
                lambda: len(list(client.stream_get(KEYS))) == COUNT,
                lambda: client.match_prefix(KEYS) == COUNT,
                lambda: client.set(KEYS, BLOCKS).error == 0,
            ):
                started = time.monotonic()
                assert call()
                assert time.monotonic() - started < 2.2
            assert (out == np.frombuffer(b"".join(BLOCKS), dtype=np.uint8).reshape(COUNT, BLOCK_BYTES)).all()
            missing = make_keys(100, first=5000)
            with pytest.raises(Exception, match=str(victim.port)):
                client.set(missing, blocks_of(missing, BLOCK_BYTES), deferred=False)  # a replica does not answer
        finally:
            if how == "stop":
                victim.signal(18)
                for shard in victim.shards():
                    shard.resume()


def test_a_replica_that_lost_its_blocks_gets_them_back(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a", "b")
    with cluster.client(namespace, replicas=2) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        with cluster.alone("a", namespace) as alone:
            assert alone.delete(KEYS) == COUNT
        wait_until(
            lambda: list(client.get(KEYS).blocks) == BLOCKS and holders(cluster, namespace)["a"].all(),
            30,
            "what a second replica had is set on the first",
        )
        # The shard has a block before the client counts the reply.
        wait_until(lambda: client.stats.repaired == COUNT, what="the client counts what it set again")


def test_every_replica_serves_reads(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a", "b")
    with cluster.client(namespace, replicas=2) as client:
        client.set(KEYS, BLOCKS, deferred=False)

        def hits(node: str) -> int:
            with cluster.alone(node, namespace) as alone:
                return sum(each.hits for each in alone.info().shards[0].namespaces if each.id == namespace.id)

        def read() -> bool:
            assert client.get(KEYS[:1]).hit == 1
            return hits("a") > 0 and hits("b") > 0

        wait_until(read, what="both have sent the block")


def test_blocks_of_a_joining_node_are_found_after_the_next_join(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a")
    cluster.start_listed("b", state="joining")
    with cluster.client(namespace) as client:
        wait_until(lambda: nodes_of(client) == {"a", "b"})
        client.set(KEYS, BLOCKS, deferred=False)
        assert holders(cluster, namespace)["b"].any(), "blocks that no old owner has"
        cluster.start_listed("c", state="joining")
        wait_until(lambda: nodes_of(client) == {"a", "b", "c"})
        assert client.contains(KEYS).all()
        assert client.get(KEYS).hit == COUNT


def test_a_block_with_wrong_bytes_is_read_from_another_replica(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a", "b")
    with cluster.client(namespace, replicas=2) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        for node in ("a", "b"):
            some = owned_by(client, node, KEYS)[:20]
            with cluster.alone(node, namespace) as alone:
                alone.delete(some)
            with RawClient(cluster.nodes[node]) as raw:
                raw.hello(namespace.canonical())
                wrong = [bytes(BLOCK_BYTES)] * len(some)
                raw.ask(*set_frames(3, some, wrong, sums_of([b"\1" * BLOCK_BYTES]) * len(some)))
        wait_until(lambda: list(client.get(KEYS).blocks) == BLOCKS and client.stats.checksum_errors >= 40)
        assert client.stats.checksum_errors == 40, "each is dropped when it is found"
        assert {at: bytes(block) for at, block in client.stream_get(KEYS)} == dict(enumerate(BLOCKS))


def test_a_list_of_nodes_supports_replicas(start_server: StartServer, namespace: Namespace) -> None:
    servers = [start_server(), start_server(), start_server()]
    with KVStoreClient([server.endpoint for server in servers], namespace, replicas=2, timeout_s=3.0) as client:
        assert client.set(KEYS, BLOCKS, deferred=False).created == COUNT
        servers[1].kill()
        assert client.get(KEYS).hit == COUNT
        client.sync()


# ---- silence -----------------------------------------------------------------------------------------------------


@pytest.mark.exclusive
def test_a_vanished_shard_is_noticed_within_3_s(start_server: StartServer, namespace: Namespace) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, namespace, timeout_s=30.0) as client:
        client.set(KEYS, BLOCKS)
        with server.stopped():
            started = time.monotonic()
            with pytest.raises(Exception, match="silent"):
                client.get(KEYS)
            assert time.monotonic() - started < 3.0
        wait_until(lambda: not any(shard.error for shard in client.shards()))
        assert client.get(KEYS).hit == COUNT


@pytest.mark.exclusive
def test_a_slow_shard_does_not_delay_the_fast_ones(start_server: StartServer, namespace: Namespace) -> None:
    fast, slow = start_server(), start_server()
    with KVStoreClient([fast.endpoint, slow.endpoint], namespace, timeout_s=1.0, fail_open=True) as client:
        client.set(KEYS, BLOCKS, deferred=False)
        with slow.stopped():
            started = time.monotonic()
            hit = client.get(KEYS).hit
            assert time.monotonic() - started < 1.2
            assert 0.2 * COUNT < hit < 0.8 * COUNT
            result = client.set(KEYS, BLOCKS)
            assert time.monotonic() - started < 2.4
            assert result.existed == hit


def test_a_set_reports_its_copies_and_can_require_them(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    """Two copies are wanted, but the client knows only one node at first."""
    server = start_server()
    namespace, keys = new_namespace(64), make_keys(10)
    blocks = blocks_of(keys, 64)
    with KVStoreClient(server.endpoint, namespace, replicas=2) as client:
        result = client.set(keys[:5], blocks[:5], deferred=False)
        assert (result.created, result.error, result.copies) == (5, 0, 1)
    with KVStoreClient(server.endpoint, namespace, replicas=2, min_copies=2) as client:
        result = client.set(keys, blocks)
        assert (result.error, result.copies) == (10, 1)
    other = start_server()
    with KVStoreClient([server.endpoint, other.endpoint], namespace, replicas=2, min_copies=2) as client:
        result = client.set(keys, blocks)
        assert (result.error, result.copies) == (0, 2)
    with pytest.raises(ValueError, match="min_copies=3: expected 1 to 2"):
        KVStoreClient(server.endpoint, namespace, replicas=2, min_copies=3)
