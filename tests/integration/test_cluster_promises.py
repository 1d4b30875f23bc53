"""Promises of blocks with copies, also while nodes join, drain and die."""

from __future__ import annotations

import pytest

from kvstore_client import KVStoreClient, Lookup, Namespace
from tests.integration.test_promises import Reading
from tests.support.cluster import Cluster, owned_by
from tests.support.harness import StartServer, blocks_of, make_keys, stays, wait_until

BLOCK_BYTES = 4096
KEYS = make_keys(60)


def put(client: KVStoreClient, keys: list[bytes]) -> None:
    assert client.set(keys, blocks_of(keys, BLOCK_BYTES)).error == 0


def test_blocks_of_several_shards_can_be_promised_and_awaited(start_server: StartServer, namespace: Namespace) -> None:
    server = start_server("--shards", "3")
    with (
        KVStoreClient(server.endpoint, namespace) as producer,
        KVStoreClient(server.endpoint, namespace) as consumer,
        producer.promise(KEYS) as promise,
    ):
        assert promise.mine.all()
        assert consumer.lookup(KEYS) == Lookup(0, len(KEYS))
        assert consumer.promise(KEYS).others.all()
        reading = Reading(consumer, KEYS)
        put(producer, KEYS[:30])
        assert reading.waits
        put(producer, KEYS[30:])
        assert reading.present(5) == [True] * len(KEYS)


def test_a_replica_takes_over_a_dead_nodes_waiters(start_server: StartServer, namespace: Namespace) -> None:
    servers = [start_server(), start_server()]
    endpoints = [server.endpoint for server in servers]
    with (
        KVStoreClient(endpoints, namespace, replicas=2, fail_open=True) as producer,
        KVStoreClient(endpoints, namespace, replicas=2, fail_open=True) as consumer,
        producer.promise(KEYS) as promise,
    ):
        assert promise.mine.all()
        for server in servers:  # both copies of each block are promised
            with KVStoreClient(server.endpoint, namespace) as alone:
                assert alone.lookup(KEYS) == Lookup(0, len(KEYS))
        reading = Reading(consumer, KEYS)
        stays(lambda: reading.waits, 1.5, "for longer than a silent shard is waited for that owes something else")
        servers[0].kill()
        stays(lambda: reading.waits, 0.2, "it waits at the other node")
        put(producer, KEYS)
        assert reading.present(5) == [True] * len(KEYS)


def test_a_client_refused_by_the_first_owner_promises_nothing_elsewhere(
    start_server: StartServer, namespace: Namespace
) -> None:
    endpoints = [start_server().endpoint, start_server().endpoint]
    with (
        KVStoreClient(endpoints, namespace, replicas=2) as first,
        KVStoreClient(endpoints, namespace, replicas=2) as second,
    ):
        one = first.promise(KEYS)
        two = second.promise(KEYS)
        assert two.others.all()
        one.withdraw()
        assert second.lookup(KEYS) == Lookup(0, 0), "it has left a promise that nobody keeps"
        two.withdraw()


@pytest.mark.parametrize("change", ["join", "drain"])
def test_a_promise_survives_a_change_of_owners(cluster: Cluster, namespace: Namespace, change: str) -> None:
    """The blocks are set on the new owners. Clients that wait at the old owners find them on the new ones."""
    if change == "join":
        cluster.start_listed("a", "b")
    else:
        cluster.start_listed("a", "b", "c")
    with cluster.client(namespace) as producer, cluster.client(namespace) as consumer:
        promise = producer.promise(KEYS)
        before = Reading(consumer, KEYS)
        wait_until(lambda: consumer.lookup(KEYS).promised == len(KEYS))
        if change == "join":
            cluster.start_listed("c", state="joining")
        else:
            cluster.register("c", "draining")
        for client in (producer, consumer):
            wait_until(lambda client=client: client.epoch == cluster.membership().epoch)
        promise.renew()
        assert consumer.lookup(KEYS).promised == len(KEYS)
        moved = owned_by(producer, "c", KEYS)
        assert bool(moved) == (change == "join")
        after = Reading(consumer, KEYS)
        put(producer, KEYS)
        promise.withdraw()
        assert before.present(5) == [True] * len(KEYS)
        assert after.present(5) == [True] * len(KEYS)
