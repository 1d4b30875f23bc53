"""Transient blocks never reach a disk or another shard: not by an eviction, a stop, a move, a repair or a replica."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvstore.moving.mover import Mover
from kvstore.moving.planning import plan_joining, plan_leaving
from kvstore_client import KVStoreClient, Namespace
from tests.support.cluster import member_of
from tests.support.disk import disk_flags, disk_info, wait_until_on, wait_until_written
from tests.support.harness import MakeNamespace, StartServer, blocks_of, make_keys, make_namespace, namespace_info

BLOCK = 64 << 10


@pytest.fixture
def own(new_namespace: MakeNamespace) -> Namespace:
    return new_namespace(BLOCK)


@pytest.mark.parametrize("write", ["all", "reused", "evicted"])
def test_transient_blocks_never_reach_the_disk(
    start_server: StartServer, folder: Path, own: Namespace, write: str
) -> None:
    flags = disk_flags(folder, write=write)
    server = start_server(*flags, memory="16MiB", segment="1MiB")
    ordinary, keys = make_keys(300), make_keys(30, first=1000)
    with KVStoreClient(server.endpoint, own, timeout_s=20) as client:
        wait_until_on(client)
        assert client.set(keys, blocks_of(keys, BLOCK), reads=100, ttl_s=3600).created == 30
        for at in range(0, 300, 50):  # more than memory holds
            assert client.set(ordinary[at : at + 50], blocks_of(ordinary[at : at + 50], BLOCK)).created == 50
            wait_until_written(client)
            assert client.get(keys).hit == 30
            # A disk that is behind skips evicted blocks; on a busy machine, these may include blocks that were just
            # set.
            assert client.get(ordinary[at : at + 50]).hit == 50 or write == "evicted"
        wait_until_written(client)
        assert client.contains(keys).all()
        written = disk_info(client).blocks
        assert namespace_info(client).disk_blocks == written <= 300
    server.stop()
    server.restart()
    with KVStoreClient(server.endpoint, own, timeout_s=20) as client:
        wait_until_on(client)
        assert not client.contains(keys).any() and client.get(keys).hit == 0
        assert disk_info(client).blocks <= 300
        if write == "all":
            assert client.contains(ordinary).all()


def test_a_transient_block_that_becomes_ordinary_reaches_the_disk(
    start_server: StartServer, folder: Path, own: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="16MiB", segment="1MiB")
    keys = make_keys(4)
    with KVStoreClient(server.endpoint, own, timeout_s=20) as client:
        wait_until_on(client)
        client.set(keys, blocks_of(keys, BLOCK), reads=1)
        assert client.set(keys[:2], blocks_of(keys[:2], BLOCK)).created == 2
        wait_until_written(client)
    server.stop()
    server.restart()
    with KVStoreClient(server.endpoint, own, timeout_s=20) as client:
        wait_until_on(client)
        assert client.contains(keys).tolist() == [True, True, False, False]
        assert client.set(keys[:2], blocks_of(keys[:2], BLOCK), reads=1).existed == 2, "they are there, if on disk only"


@pytest.mark.parametrize("joins", [True, False], ids=["joins", "leaves"])
def test_neither_a_join_nor_a_drain_moves_them(start_server: StartServer, own: Namespace, joins: bool) -> None:
    sender, other = start_server(memory="64MiB"), start_server(memory="64MiB")
    ordinary, keys = make_keys(100), make_keys(30, first=1000)
    with (
        KVStoreClient(sender.endpoint, own) as client,
        KVStoreClient(other.endpoint, own) as receiver,
    ):
        client.set(ordinary, blocks_of(ordinary, BLOCK))
        client.set(keys, blocks_of(keys, BLOCK), reads=1)
        members = [member_of(server) for server in (sender, other)]
        if joins:
            plan = plan_joining({members[1].node}, members)
        else:
            plan = plan_leaving(members[0].node, [msgspec.structs.replace(members[0], state="draining"), members[1]])
        report = Mover(members[0].shards, members[0].node, plan, lambda report: None).run(time.monotonic() + 10)
        assert report.failed == 0 and report.moved == receiver.contains(ordinary).sum() > 0
        assert not receiver.contains(keys).any()
        assert client.get(keys).hit == 30, "the mover has read none of them"


def test_with_replicas_there_is_one_copy_and_reads_make_no_more(start_server: StartServer) -> None:
    namespace = make_namespace(BLOCK, "transient-replicas")
    servers = [start_server(memory="64MiB") for _ in range(2)]
    keys = make_keys(40)
    endpoints = [server.endpoint for server in servers]

    def counts() -> list[int]:
        found = []
        for server in servers:
            with KVStoreClient(server.endpoint, namespace) as alone:
                found.append(int(alone.contains(keys).sum()))
        return found

    with KVStoreClient(endpoints, namespace, replicas=2, min_copies=2) as client:
        result = client.set(keys, blocks_of(keys, BLOCK), reads=3, deferred=False)
        assert (result.created, result.copies, result.error) == (40, 1, 0)
        assert sum(counts()) == 40 and min(counts()) > 0
        rows = np.zeros((40, BLOCK), dtype=np.uint8)
        for left in (40, 40, 0):
            assert client.get_into(keys, rows).all()
            assert sum(counts()) == left
        assert not client.get_into(keys, rows).any()
        assert client.stats.repaired == 0


def test_with_replicas_the_copy_is_on_any_available_node(start_server: StartServer) -> None:
    namespace = make_namespace(BLOCK, "transient-reachable")
    servers = [start_server(memory="64MiB") for _ in range(2)]
    keys = make_keys(20)
    with KVStoreClient([server.endpoint for server in servers], namespace, replicas=2, timeout_s=5) as client:
        servers[0].kill()
        assert client.set(keys, blocks_of(keys, BLOCK), reads=1).created == 20
        assert client.get(keys).blocks == blocks_of(keys, BLOCK)
        assert client.get(keys).hit == 0
