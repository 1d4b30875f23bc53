"""Calls of the client other than set and get: prefixes in one round trip, times to live, purges, requests to all
shards."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import wire
from kvstore_client import AsyncKVStoreClient, ConnectionLost, KVStoreClient, Namespace, Timeout
from tests.support.clock import Clock
from tests.support.cluster import Cluster
from tests.support.disk import disk_flags, disk_info, open_client, wait_until_on, wait_until_written
from tests.support.harness import (
    PROTOCOL,
    MakeNamespace,
    RawClient,
    StartServer,
    block_of,
    blocks_of,
    make_keys,
    namespace_info,
    pack,
    shard_info,
    wait_until,
)

BLOCK_BYTES = 4096
MiB = 1 << 20
KEYS = make_keys(100)
PURGE, PURGE_REPLY, ERROR = 14, 76, 127


def room(count: int = len(KEYS)) -> np.ndarray:
    return np.zeros((count, BLOCK_BYTES), dtype=np.uint8)


# ---- prefixes ------------------------------------------------------------------------------------------------------


def test_a_prefix_is_loaded_in_one_request(start_server: StartServer, namespace: Namespace) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, namespace) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        client.delete(KEYS[60:61])
        before, out = shard_info(client), room()
        assert client.load_prefix(KEYS, out) == 60
        after = shard_info(client)
        assert (after.gets - before.gets, after.lookups - before.lookups) == (1, 0)
        assert [row.tobytes() for row in out[:60]] == blocks_of(KEYS[:60], BLOCK_BYTES)
        assert not out[60:].any()  # blocks behind the gap were not even sent
        assert (client.stats.hits, client.stats.misses) == (60, 40)
        assert namespace_info(client).hits == 60


@pytest.mark.parametrize("there", [0, 1, 99, 100])
def test_a_prefix_ends_at_the_chains_end(start_server: StartServer, namespace: Namespace, there: int) -> None:
    with KVStoreClient(start_server().endpoint, namespace) as client:
        client.set(KEYS[:there], blocks_of(KEYS[:there], BLOCK_BYTES))
        assert client.load_prefix(iter(KEYS), room()) == there
        assert client.load_prefix([], room(0)) == 0
        with pytest.raises(ValueError, match="out: 99 rows for 100 keys: expected a row for each key"):
            client.load_prefix(KEYS, room(99))


def test_a_prefix_is_not_evicted_while_it_is_sent(start_server: StartServer, namespace: Namespace) -> None:
    with KVStoreClient(start_server().endpoint, namespace) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        client.load_prefix(KEYS[:40], room())
        assert namespace_info(client).pinned == 40


def test_over_several_nodes_a_prefix_ends_at_the_first_gap(start_server: StartServer, namespace: Namespace) -> None:
    servers = [start_server("--shards", "2"), start_server()]
    with KVStoreClient([server.endpoint for server in servers], namespace) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        for gap in (90, 37, 5):
            client.delete([KEYS[gap]])
            out = room()
            assert client.load_prefix(KEYS, out) == gap
            assert [row.tobytes() for row in out[:gap]] == blocks_of(KEYS[:gap], BLOCK_BYTES)
        assert sum(shard.lookups for shard in client.info().shards) == 0


def test_a_prefix_survives_a_node_if_it_has_a_replica(start_server: StartServer, namespace: Namespace) -> None:
    servers = [start_server(), start_server()]
    endpoints = [server.endpoint for server in servers]
    with KVStoreClient(endpoints, namespace, replicas=2, timeout_s=5) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES), deferred=False)
        servers[0].kill()
        out = room()
        assert client.load_prefix(KEYS, out) == 100
        assert [row.tobytes() for row in out] == blocks_of(KEYS, BLOCK_BYTES)
        servers[1].kill()
        with pytest.raises(ConnectionLost):
            client.load_prefix(KEYS, room())
    with KVStoreClient(endpoints, namespace, fail_open=True, timeout_s=2) as client:
        assert client.load_prefix(KEYS, room()) == 0


def test_a_prefix_comes_from_disk(start_server: StartServer, namespace: Namespace, tmp_path: Path) -> None:
    server = start_server(*disk_flags(tmp_path / "disk", "64MiB"), memory="8MiB", segment="1MiB")
    with open_client(server, namespace) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        wait_until_written(client)
    server.stop()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        client.delete([KEYS[80]])
        out = room()
        assert client.load_prefix(KEYS, out) == 80
        assert [row.tobytes() for row in out[:80]] == blocks_of(KEYS[:80], BLOCK_BYTES)


# ---- time to live --------------------------------------------------------------------------------------------------


def test_a_set_can_give_its_blocks_a_time_to_live(
    start_server: StartServer, namespace: Namespace, clock: Clock
) -> None:
    short, long, ruled = KEYS[:10], KEYS[10:20], KEYS[20:30]
    server = start_server("--ttl-seconds", "3600", **clock.environment)
    with KVStoreClient(server.endpoint, namespace) as client:
        client.set(short, blocks_of(short, BLOCK_BYTES), ttl_s=600)
        client.set(long, blocks_of(long, BLOCK_BYTES), ttl_s=7200.5)
        client.set(ruled, blocks_of(ruled, BLOCK_BYTES))
        clock.advance(590)
        assert client.contains(KEYS[:30]).all()
        clock.advance(11)
        assert not client.contains(short).any() and client.contains(KEYS[10:30]).all()
        clock.advance(3000)
        assert not client.contains(ruled).any() and client.contains(long).all()
        clock.advance(3599)
        assert client.contains(long).all()
        clock.advance(2)
        assert not client.contains(long).any()


def test_an_own_time_to_live_overrides_the_rule(start_server: StartServer, namespace: Namespace, clock: Clock) -> None:
    server = start_server("--ttl-seconds", "60", **clock.environment)
    with KVStoreClient(server.endpoint, namespace) as client:
        client.set(KEYS[:10], blocks_of(KEYS[:10], BLOCK_BYTES))
        client.set(KEYS[10:20], blocks_of(KEYS[10:20], BLOCK_BYTES), ttl_s=600)
        clock.advance(61)
        assert not client.contains(KEYS[:10]).any() and client.contains(KEYS[10:20]).all()


def test_a_time_to_live_survives_a_restart(
    start_server: StartServer, namespace: Namespace, tmp_path: Path, clock: Clock
) -> None:
    server = start_server(*disk_flags(tmp_path / "disk", "64MiB"), memory="8MiB", segment="1MiB", **clock.environment)
    with open_client(server, namespace) as client:
        client.set(KEYS[:10], blocks_of(KEYS[:10], BLOCK_BYTES), ttl_s=60)
        client.set(KEYS[10:20], blocks_of(KEYS[10:20], BLOCK_BYTES))
        wait_until_written(client)
    server.stop()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        clock.advance(30)
        assert client.contains(KEYS[:20]).all()
        clock.advance(31.5)  # the disk counts whole seconds
        assert not client.contains(KEYS[:10]).any() and client.contains(KEYS[10:20]).all()


# ---- emptying ------------------------------------------------------------------------------------------------------


def test_a_purge_empties_one_namespace_and_no_other(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--shards", "2")
    mine, other = new_namespace(BLOCK_BYTES), new_namespace(BLOCK_BYTES, rank=1, world=2)
    with KVStoreClient(server.endpoint, mine) as client, KVStoreClient(server.endpoint, other) as others:
        keys = make_keys(10_000)  # enough for a purge in several steps
        client.set(keys, np.zeros((len(keys), BLOCK_BYTES), dtype=np.uint8))
        others.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        assert client.purge() == len(keys)
        assert not client.contains(keys).any() and client.purge() == 0
        assert others.contains(KEYS).all()
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        assert client.get(KEYS).blocks == blocks_of(KEYS, BLOCK_BYTES)
        assert client.purge(all_namespaces=True) == 200
        assert not client.contains(KEYS).any() and not others.contains(KEYS).any()


def test_purged_blocks_do_not_come_back_from_disk(
    start_server: StartServer, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    server = start_server(*disk_flags(tmp_path / "disk", "64MiB"), memory="8MiB", segment="1MiB")
    mine, other = new_namespace(BLOCK_BYTES), new_namespace(BLOCK_BYTES, rank=1, world=2)
    keys = make_keys(5000)  # more than memory holds
    with open_client(server, mine) as client, open_client(server, other) as others:
        for at in range(0, len(keys), 500):
            client.set(keys[at : at + 500], np.ones((500, BLOCK_BYTES), dtype=np.uint8))
            wait_until_written(client)
        others.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        wait_until_written(others)
        assert disk_info(client).blocks == 5100
        assert client.purge(timeout_s=60) == 5000
        assert disk_info(client).blocks == 100
    server.kill()  # at once: an acknowledged purge must survive
    server.start()
    with open_client(server, mine) as client, open_client(server, other) as others:
        wait_until_on(client)
        assert not client.contains(keys).any()
        assert others.get(KEYS).blocks == blocks_of(KEYS, BLOCK_BYTES)


def test_a_purge_frees_the_memory_of_blocks_that_have_expired(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    """Expired blocks take memory until the sweep reaches them, which checks a few thousand slots at a time."""
    server = start_server(memory="64MiB")
    keys = make_keys(100_000)
    with KVStoreClient(server.endpoint, new_namespace(64)) as client:
        client.set(keys, np.zeros((len(keys), 64), dtype=np.uint8), ttl_s=0.13)
        wait_until(lambda: not client.contains(keys[-1:]).any(), what="they expire")
        assert client.purge() == 0, "nobody could read them any more"
        assert namespace_info(client).blocks == 0


def test_a_purge_delays_no_other_request(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server(memory="256MiB")
    many, keys = new_namespace(64), make_keys(400_000)
    with KVStoreClient(server.endpoint, many) as client, KVStoreClient(server.endpoint, many) as other:
        client.set(keys, np.zeros((len(keys), 64), dtype=np.uint8))
        purging = threading.Thread(target=client.purge)
        purging.start()
        slowest = 0.0
        while purging.is_alive():
            slowest = max(slowest, other.ping())
        purging.join()
        assert slowest < 0.25 and not other.contains(keys[:1000]).any()


def test_a_purge_without_a_namespace_means_all_or_is_refused(start_server: StartServer, namespace: Namespace) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, namespace) as client, RawClient(server) as raw:
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        raw.hello(b"", PROTOCOL)
        assert raw.ask(pack(PURGE, 5, 1000))[:3] == [ERROR, 5, wire.ErrorCode.NO_NAMESPACE]
        assert raw.ask(pack(PURGE, 6, 1000, True))[:3] == [PURGE_REPLY, 6, 100]
        assert not client.contains(KEYS).any()


def test_readers_during_a_purge_get_right_bytes_or_miss(start_server: StartServer, namespace: Namespace) -> None:
    with KVStoreClient(start_server().endpoint, namespace) as client:
        for _ in range(20):
            client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
            purging = threading.Thread(target=client.purge)
            purging.start()
            for position, block in client.stream_get(KEYS):
                assert block == block_of(KEYS[position], BLOCK_BYTES)
            purging.join()
            assert not client.contains(KEYS).any()


def test_a_purge_of_an_unreachable_server_is_an_error(start_server: StartServer, namespace: Namespace) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, namespace) as client, server.stopped(), pytest.raises(Timeout):
        client.purge(timeout_s=0.5)


# ---- what the store says of itself ---------------------------------------------------------------------------------


def test_free_blocks_are_those_no_namespace_has(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server(memory="16MiB", segment="1MiB")
    mine, other = new_namespace(BLOCK_BYTES), new_namespace(BLOCK_BYTES, rank=1, world=2)
    with KVStoreClient(server.endpoint, mine) as client, KVStoreClient(server.endpoint, other) as others:
        assert client.info().free_blocks == client.info().total_blocks == 4096
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))
        assert client.info().free_blocks == 4096 - 100
        keys = make_keys(8000, first=1000)
        others.set(keys, np.zeros((len(keys), BLOCK_BYTES), dtype=np.uint8))
        info = client.info()
        assert info.total_blocks == 4096 and info.free_blocks <= 256  # at most the rest of its own segment
        others.purge()
        assert client.info().free_blocks == 4096 - client.info().full_blocks


def test_shards_are_listed_including_those_that_do_not_answer(start_server: StartServer, namespace: Namespace) -> None:
    up, down = start_server("--shards", "2"), start_server()
    with KVStoreClient([up.endpoint, down.endpoint], namespace) as client:
        assert [shard.error for shard in client.shards()] == ["", "", ""]
        down.kill()
        first, second, third = client.shards(timeout_s=2)
        assert first.info is not None and second.info is not None and third.info is None
        assert (third.endpoint, third.state, third.takes_sets) == (down.endpoint, "listed", True)
        assert "Connection refused" in third.error or "closed" in third.error
        assert {first.node, second.node} == {up.endpoint.removeprefix("tcp://")} and first.name == first.info.name
        assert (client.epoch, client.directory_error) == (0, "")
        with pytest.raises(ConnectionLost):
            client.info()


def test_a_key_is_located_where_its_block_is(start_server: StartServer, namespace: Namespace) -> None:
    servers = [start_server(), start_server()]
    with KVStoreClient([server.endpoint for server in servers], namespace, replicas=2) as client:
        client.set(KEYS[:1], blocks_of(KEYS[:1], BLOCK_BYTES), deferred=False)
        owner, replica = client.locate(KEYS[0])
        assert (owner.role, owner.present, replica.role, replica.present) == ("owner", True, "replica", True)
        assert {owner.endpoint, replica.endpoint} == {server.endpoint for server in servers}
        (only,) = client.locate(KEYS[0], replicas=1, ask=False)
        assert (only.shard, only.present) == (owner.shard, None)
        with pytest.raises(ValueError, match="replicas=4: expected 1 to 3"):
            client.locate(KEYS[0], replicas=4)


def test_a_cluster_client_reports_states_and_epoch(cluster: Cluster, namespace: Namespace) -> None:
    cluster.start_listed("a", "b")
    cluster.register("a", "serving", zone="x")
    with KVStoreClient(cluster.url, namespace) as client:
        wait_until(lambda: {(shard.node, shard.zone) for shard in client.shards()} == {("a", "x"), ("b", "")})
        assert {shard.state for shard in client.shards()} == {"serving"}
        cluster.register("b", "draining")
        wait_until(lambda: {(shard.node, shard.takes_sets) for shard in client.shards()} == {("a", True), ("b", False)})
        assert client.epoch > 0 and client.directory_error == ""


def test_an_unreachable_directory_costs_a_fail_open_client_one_second(namespace: Namespace) -> None:
    started = time.monotonic()
    with KVStoreClient("etcd://127.0.0.1:1/none", namespace, fail_open=True) as client:
        assert client.get(KEYS).hit == 0 and client.load_prefix(KEYS, room()) == 0
        assert time.monotonic() - started < 4
        assert client.shards() == [] and client.directory_error


def test_a_key_before_a_chain_may_be_any_buffer_that_a_key_may_be(
    start_server: StartServer, namespace: Namespace
) -> None:
    rows = np.frombuffer(b"".join(KEYS), dtype=np.uint8).reshape(len(KEYS), -1)
    with KVStoreClient(start_server().endpoint, namespace) as client:
        for number, parent in enumerate((bytearray(KEYS[0]), memoryview(KEYS[0]), rows[0], [*rows[:2]])):
            some = KEYS[1:3] if number == 3 else KEYS[1 + 2 * number : 3 + 2 * number]
            assert client.set(some, room(2), parent=parent).error == 0


def test_a_closed_asynchronous_client_answers_as_a_closed_one(start_server: StartServer, namespace: Namespace) -> None:
    endpoint = start_server().endpoint

    async def use() -> None:
        async with AsyncKVStoreClient(endpoint, namespace, fail_open=True) as client:
            assert client.namespace == namespace and client.fail_open and client.replicas == 1
            await client.close()
            assert (await client.get(KEYS[:2])).hit == 0
        await client.close()
        strict = AsyncKVStoreClient(endpoint, namespace)
        await strict.connect()
        await strict.close()
        with pytest.raises(ConnectionLost, match="this client is closed"):
            await strict.get(KEYS[:2])
        unused = AsyncKVStoreClient(endpoint, namespace)
        await unused.close()
        with pytest.raises(ConnectionLost, match="this client is closed"):
            await unused.get(KEYS[:2])

    asyncio.run(use())


# ---- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "part"),
    [
        (lambda c: c.get(KEYS, timeout_s="5"), TypeError, "timeout_s='5' is of type str: expected more than 0"),
        (lambda c: c.ping(timeout_s=0), ValueError, "timeout_s=0: expected more than 0"),
        (lambda c: c.contains(KEYS, timeout_s=float("nan")), ValueError, "timeout_s=nan"),
        (lambda c: c.contains(KEYS, pin_s=100), ValueError, "pin_s=100: expected 0 or more, at most 60"),
        (lambda c: c.match_prefix(KEYS, pin_s=-1), ValueError, "pin_s=-1"),
        (lambda c: c.set(KEYS[:1], [bytes(BLOCK_BYTES)], priority=9), ValueError, "priority=9: expected 0 to 3"),
        (lambda c: c.set(KEYS[:1], [bytes(BLOCK_BYTES)], priority="1"), TypeError, "priority='1' is of type str"),
        (lambda c: c.set(KEYS[:1], [bytes(BLOCK_BYTES)], ttl_s=0), ValueError, "ttl_s=0: expected more than 0"),
        (lambda c: c.set(KEYS[:1], [bytes(BLOCK_BYTES)], ttl_s=1e10), ValueError, "ttl_s=10000000000.0"),
        (
            lambda c: c.set(KEYS[:2], [bytes(BLOCK_BYTES)]),
            ValueError,
            "2 keys and 1 blocks: expected as many blocks as keys",
        ),
        (lambda c: c.get_into(KEYS[:1], room(2), [1.5]), TypeError, "slots: 'float'"),
        (
            lambda c: c.get_into(KEYS[:2], list(room(2))),
            TypeError,
            f"expected one array, CPU tensor or buffer of (n, {BLOCK_BYTES})",
        ),
        (lambda c: c.set(KEYS[:1], room(1), parent="x"), TypeError, "parent='x' is of type str: expected a key"),
        (lambda c: c.set(KEYS[:1], room(1), parent=5), TypeError, "parent=5 is of type int: expected a key"),
        (lambda c: c.set(KEYS[:1], room(1), force=1), TypeError, "force=1 is of type int: expected True or False"),
        (lambda c: c.contains(KEYS, refresh="no"), TypeError, "refresh='no' is of type str: expected True or False"),
        (lambda c: c.purge_shards(model="other*"), ValueError, "model='other*' and all_namespaces=False"),
        (lambda c: c.purge_shards(id_prefix="ff"), ValueError, "id_prefix='ff' and all_namespaces=False"),
        (lambda c: c.config_set("log-level", 1), TypeError, "value=1 is of type int: expected a string"),
        (pickle.dumps, TypeError, "a KVStoreClient cannot be pickled or copied: make one in each process"),
        (copy.deepcopy, TypeError, "a KVStoreClient cannot be pickled or copied: make one in each process"),
        (lambda c: c.set(KEYS, blocks_of(KEYS, BLOCK_BYTES), True), TypeError, "positional"),
        (lambda c: c.contains(KEYS, True), TypeError, "positional"),
    ],
)
def test_an_invalid_argument_is_named(
    start_server: StartServer,
    namespace: Namespace,
    call: Callable[[Any], object],
    error: type[Exception],
    part: str,
) -> None:
    with KVStoreClient(start_server().endpoint, namespace, fail_open=True) as client:
        with pytest.raises(error) as caught:
            call(client)
        assert part in str(caught.value)


def test_every_call_takes_keys_from_any_iterable(start_server: StartServer, namespace: Namespace) -> None:
    with KVStoreClient(start_server().endpoint, namespace) as client:
        client.set((key for key in KEYS), blocks_of(KEYS, BLOCK_BYTES))
        assert client.contains(dict.fromkeys(KEYS)).all() and client.match_prefix(tuple(KEYS)) == 100
        assert client.get(iter(KEYS)).hit == 100 and client.get_into(iter(KEYS), room(), iter(range(100))).all()
        assert len(list(client.stream_get(iter(KEYS)))) == 100 and client.delete(iter(KEYS)) == 100


def test_the_asynchronous_client_has_every_call(start_server: StartServer, namespace: Namespace) -> None:
    server = start_server()

    async def run() -> None:
        async with AsyncKVStoreClient(server.endpoint, namespace) as client:
            await client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES), ttl_s=600)
            await client.sync(timeout_s=5)
            assert await client.load_prefix(KEYS, room()) == 100
            assert [shard.error for shard in await client.shards()] == [""]
            assert [place.present for place in await client.locate(KEYS[0])] == [True]
            assert await client.purge() == 100 and (await client.get(KEYS, timeout_s=5)).hit == 0
            assert (client.epoch, client.directory_error) == (0, "")

    asyncio.run(run())


def test_a_cancelled_stream_ends_at_once(start_server: StartServer, namespace: Namespace) -> None:
    """While a shard hangs, a thread waits in the stream. The cancelled task does not wait for that thread."""
    server = start_server()

    async def run() -> None:
        async with AsyncKVStoreClient(server.endpoint, namespace, timeout_s=2) as client:
            await client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES))

            async def read() -> None:
                async for _ in client.stream_get(KEYS):
                    pass

            with server.stopped():
                task = asyncio.ensure_future(read())
                await asyncio.sleep(0.2)
                began = time.monotonic()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert time.monotonic() - began < 1
            assert (await client.get(KEYS, timeout_s=10)).hit == 100

    asyncio.run(run())
