"""A new time to live for blocks in memory, on disk and in all copies, and blocks for which it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client import AsyncKVStoreClient, KVStoreClient, Namespace
from kvstore_client.errors import KVStoreError
from tests.support.clock import Clock
from tests.support.disk import disk_flags, disk_info, open_client, read, wait_until_on, wait_until_written
from tests.support.harness import MakeNamespace, Server, StartServer, blocks_of, make_keys

BLOCK = 64 << 10
KEYS = make_keys(4)
BLOCKS = blocks_of(KEYS, BLOCK)


@pytest.fixture
def own(new_namespace: MakeNamespace) -> Namespace:
    return new_namespace(BLOCK)


@pytest.fixture
def timed(start_server: StartServer, clock: Clock) -> Server:
    return start_server(memory="32MiB", segment="1MiB", **clock.environment)


@pytest.fixture
def client(timed: Server, own: Namespace) -> Iterator[KVStoreClient]:
    with KVStoreClient(timed.endpoint, own) as client:
        yield client


def test_blocks_about_to_expire_get_more_time(client: KVStoreClient, clock: Clock) -> None:
    client.set(KEYS, BLOCKS, ttl_s=30)
    clock.advance(29)
    assert client.expire([*KEYS[:2], *make_keys(1, first=99)]).tolist() == [True, True, False]
    assert client.expire(KEYS[2:3], ttl_s=600).tolist() == [True]
    clock.advance(2)
    assert client.contains(KEYS).tolist() == [True, True, True, False], "the last one was not given more time"
    clock.advance(597)
    assert client.contains(KEYS).tolist() == [True, True, True, False], "it counts from the call on"
    clock.advance(86_400)
    assert client.contains(KEYS).tolist() == [True, True, False, False], "without a time they stay"
    assert client.get(KEYS[:2]).blocks == BLOCKS[:2]


def test_permanent_blocks_can_expire_and_free_their_memory(client: KVStoreClient, clock: Clock) -> None:
    client.set(KEYS, BLOCKS)
    assert client.expire(KEYS, ttl_s=10).all()
    clock.advance(10.5)
    assert not client.contains(KEYS).any()
    clock.run_until(lambda: not any(shard.namespaces for shard in client.info().shards), 30, "their namespace is gone")


def test_no_time_means_the_namespaces_rule(start_server: StartServer, own: Namespace, clock: Clock) -> None:
    server = start_server("--ttl-seconds", "60", **clock.environment)
    with KVStoreClient(server.endpoint, own) as client:
        client.set(KEYS, BLOCKS, ttl_s=5)
        assert client.expire(KEYS).all()
        clock.advance(59)
        assert client.contains(KEYS).all()
        clock.advance(2)
        assert not client.contains(KEYS).any()


def test_an_expired_block_gets_no_more_time(client: KVStoreClient, clock: Clock) -> None:
    client.set(KEYS, BLOCKS, ttl_s=5)
    clock.advance(6)
    assert not client.expire(KEYS).any() and not client.contains(KEYS).any()


def test_transient_blocks_keep_their_time_and_reads(client: KVStoreClient, clock: Clock) -> None:
    client.set(KEYS, BLOCKS, reads=1, ttl_s=30)
    assert not client.expire(KEYS, ttl_s=600).any() and client.contains(KEYS).all()
    clock.advance(31)
    assert not client.contains(KEYS).any()


def test_an_empty_namespace_or_batch_is_no_error(client: KVStoreClient) -> None:
    assert client.expire([]).tolist() == [] and client.expire(KEYS).tolist() == [False] * 4


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), 1e12, "5"])
def test_an_invalid_time_is_refused_by_name(client: KVStoreClient, ttl_s: object) -> None:
    with pytest.raises((ValueError, TypeError), match="ttl_s"):
        client.expire(KEYS, ttl_s=ttl_s)  # type: ignore[arg-type]


def test_all_copies_get_the_new_time(start_server: StartServer, own: Namespace, clock: Clock) -> None:
    servers = [start_server(**clock.environment) for _ in range(3)]
    keys = make_keys(64)
    with KVStoreClient([server.endpoint for server in servers], own, replicas=2) as client:
        client.set(keys, blocks_of(keys, BLOCK), ttl_s=10, deferred=False)
        assert client.expire(keys).all()
        clock.advance(11)
        blocks = [each.blocks for shard in client.info().shards for each in shard.namespaces]
        assert len(blocks) == 3 and sum(blocks) == 2 * len(keys)


def test_without_an_answer_expire_counts_none_or_raises(start_server: StartServer, own: Namespace) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, own, timeout_s=0.5, fail_open=True) as client:
        client.set(KEYS, BLOCKS)
        server.stop()
        assert not client.expire(KEYS).any() and client.stats.unanswered >= len(KEYS)
    with pytest.raises(KVStoreError), KVStoreClient(server.endpoint, own, timeout_s=0.5) as client:
        client.expire(KEYS)


def test_the_asynchronous_client_behaves_the_same(timed: Server, own: Namespace, clock: Clock) -> None:
    async def run() -> None:
        async with AsyncKVStoreClient(timed.endpoint, own) as client:
            await client.set(KEYS, BLOCKS, ttl_s=10)
            assert (await client.expire(KEYS, ttl_s=60)).all()
            clock.advance(50)
            assert (await client.contains(KEYS)).all()

    asyncio.run(run())


def test_the_time_holds_on_disk_and_across_a_restart(
    start_server: StartServer, folder: Path, namespace: Namespace, clock: Clock
) -> None:
    server = start_server(*disk_flags(folder, "256MiB"), memory="64MiB", segment="1MiB", **clock.environment)
    keys = make_keys(100)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        client.set(keys, blocks_of(keys, namespace.block_bytes), ttl_s=60)
        wait_until_written(client)
        assert disk_info(client).blocks == 100
        assert client.expire(keys[:50]).all()
        wait_until_written(client)
    assert server.stop() == 0
    clock.advance(120)
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert client.contains(keys).tolist() == [True] * 50 + [False] * 50
        assert all(read(client, keys[:50], namespace.block_bytes))


def test_blocks_only_on_disk_keep_the_time_until_a_restart(
    start_server: StartServer, folder: Path, namespace: Namespace, clock: Clock
) -> None:
    server = start_server(*disk_flags(folder, "256MiB"), memory="8MiB", segment="1MiB", **clock.environment)
    keys = make_keys(400)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        for first in range(0, 400, 50):
            some = keys[first : first + 50]
            client.set(some, blocks_of(some, namespace.block_bytes), ttl_s=60)
            wait_until_written(client)
        assert client.expire(keys).all()
        wait_until_written(client)
        assert client.delete(keys[:1]) == 1  # returns when the disk's index has received everything
        clock.advance(120)
        assert client.contains(keys[1:]).all() and all(read(client, keys[1:], namespace.block_bytes))
