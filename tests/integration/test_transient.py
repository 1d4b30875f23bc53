"""Transient blocks: each is dropped when it was read so often as its setter said, or when its time is over; it never
reaches a disk or another shard, and takes no memory beyond its limit."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvstore.moving.mover import Mover
from kvstore.moving.planning import plan_joining, plan_leaving
from kvstore_client import AsyncKVStoreClient, KVStoreClient, Namespace
from tests.support.clock import Clock
from tests.support.cluster import member_of
from tests.support.disk import disk_flags, disk_info, wait_until_on, wait_until_written
from tests.support.harness import (
    CANCEL,
    CREDIT,
    ERROR,
    GET,
    PART,
    SET,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    environment,
    make_keys,
    make_namespace,
    namespace_info,
    pack,
    shard_info,
    sums_of,
    wait_until,
)

BLOCK = 64 << 10
SEGMENT = 1 << 20
PER_SEGMENT = SEGMENT // BLOCK


@pytest.fixture
def local(start_server: StartServer, tmp_path: Path) -> Server:
    """A server of 32 segments, of which four may have transient blocks, for clients on its host and others."""
    return start_server("--unix-socket", str(tmp_path / "kv.sock"), memory="32MiB", segment="1MiB")


@pytest.fixture
def own(new_namespace: MakeNamespace) -> Namespace:
    return new_namespace(BLOCK)


@pytest.fixture(params=[True, False], ids=["shared memory", "tcp"])
def client(request: pytest.FixtureRequest, local: Server, own: Namespace) -> Iterator[KVStoreClient]:
    with KVStoreClient(local.endpoint, own, shared_memory=request.param) as client:
        yield client


def assert_nothing_left(client: KVStoreClient) -> None:
    """Every counter of the shard is back to what it was before there was any block."""
    client.info()
    info, shard = namespace_info(client), shard_info(client)
    assert (info.blocks, info.writing, info.transient_blocks) == (0, 0, 0)
    assert (shard.lent_blocks, shard.lent_bytes) == (0, 0)
    # All slots can be used again.
    room = shard.transient_limit_bytes // BLOCK
    keys = make_keys(room, first=1 << 20)
    assert client.set(keys, blocks_of(keys, BLOCK), reads=1).created == room
    assert client.delete(keys) == room


def test_after_its_last_read_a_block_is_gone_at_once(client: KVStoreClient) -> None:
    keys = make_keys(8)
    blocks = blocks_of(keys, BLOCK)
    result = client.set(keys, blocks, reads=4)
    assert (result.created, result.copies, result.error) == (8, 1, 0)
    rows = np.zeros((8, BLOCK), dtype=np.uint8)
    for read in (
        lambda: client.get(keys).blocks,
        lambda: client.get_into(keys, rows).all() and [row.tobytes() for row in rows],
        lambda: [bytes(block) for _, block in sorted(client.stream_get(keys))],
    ):
        assert client.contains(keys, refresh=True, pin_s=1).all() and client.match_prefix(keys) == 8
        assert client.lookup(keys).present == 8
        assert namespace_info(client).transient_blocks == 8
        assert read() == blocks
    with client.borrow(keys) as borrowed:
        assert [bytes(block or b"") for block in borrowed] == blocks
    assert not client.contains(keys).any()
    assert client.get(keys).hit == 0 and client.match_prefix(keys) == 0
    assert_nothing_left(client)


def test_load_prefix_counts_as_a_read(client: KVStoreClient) -> None:
    keys = make_keys(5)
    client.set(keys[:4], blocks_of(keys[:4], BLOCK), reads=1)
    rows = np.zeros((5, BLOCK), dtype=np.uint8)
    assert client.load_prefix(keys, rows) == 4
    assert [row.tobytes() for row in rows[:4]] == blocks_of(keys[:4], BLOCK)
    assert client.load_prefix(keys, rows) == 0
    assert_nothing_left(client)


def test_each_block_has_a_count_of_its_own(client: KVStoreClient) -> None:
    keys = make_keys(6)
    client.set(keys, blocks_of(keys, BLOCK), reads=2)
    client.get(keys[:3])
    client.get([*keys[2:5], keys[4]])  # a key that is named twice is read once
    assert client.contains(keys).tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("reads", [1, 3, 20])
def test_concurrent_readers_get_it_as_often_as_was_said(local: Server, own: Namespace, reads: int) -> None:
    readers, keys = 12, make_keys(40)
    blocks = blocks_of(keys, BLOCK)

    def read(number: int) -> list[int]:
        got = []
        with KVStoreClient(local.endpoint, own, shared_memory=bool(number % 2), timeout_s=20) as client:
            for at in range(0, len(keys), 8):
                found = client.get(keys[at : at + 8]).blocks
                for row, block in enumerate(found, start=at):
                    assert block is None or block == blocks[row]
                got += [block is not None for block in found]
        return got

    with KVStoreClient(local.endpoint, own) as setter, ThreadPoolExecutor(readers) as threads:
        assert setter.set(keys, blocks, reads=reads).created == len(keys)
        times = np.sum(list(threads.map(read, range(readers))), axis=0)
        # While as many reads are under way as are left others miss; all of these succeed.
        assert (times == min(reads, readers)).all(), times
        assert setter.contains(keys).all() == (reads > readers)
        setter.delete(keys)
        assert_nothing_left(setter)


def test_a_reader_that_cancels_has_read_what_was_sent(local: Server, own: Namespace) -> None:
    keys = make_keys(PER_SEGMENT)
    with KVStoreClient(local.endpoint, own, shared_memory=False) as client, RawClient(local) as raw:
        client.set(keys, blocks_of(keys, BLOCK), reads=1)
        raw.hello(own.canonical())
        raw.send(pack(GET, 2, 10_000, len(keys), 16, BLOCK), b"".join(keys))  # with credit for one block
        assert raw.reply()[0][0] == PART
        raw.send(pack(CANCEL, 2))
        raw.hello(own.canonical())  # its reply comes when the cancelling is done
        found = client.get(keys)
        assert found.hit == len(keys) - 1 and found.blocks[0] is None
        assert_nothing_left(client)


def test_a_reader_that_is_lost_has_read_what_was_sent(start_server: StartServer, own: Namespace) -> None:
    server = start_server("--transient-memory", "50%")
    keys = make_keys(400)  # more than the kernel takes for a reader that reads nothing
    with KVStoreClient(server.endpoint, own, timeout_s=20) as client:
        assert client.set(keys, blocks_of(keys, BLOCK), reads=1).created == len(keys)
        before = shard_info(client).bytes_out
        with RawClient(server, receive_buffer=4096) as raw:
            raw.hello(own.canonical())
            raw.send(pack(GET, 3, 10_000, len(keys), 16), b"".join(keys))
            wait_until(lambda: shard_info(client).streams)
        wait_until(lambda: not shard_info(client).streams)
        left = int(client.contains(keys).sum())
        assert 0 < left <= len(keys)
        assert (len(keys) - left) * BLOCK <= shard_info(client).bytes_out - before, "it counts what the kernel took"
        found = client.get(keys)
        assert found.hit == left
        wrong = [
            block
            for key, block in zip(keys, found.blocks, strict=True)
            if block not in (None, *blocks_of([key], BLOCK))
        ]
        assert not wrong
        assert_nothing_left(client)


def test_while_all_reads_that_are_left_are_under_way_others_miss(local: Server, own: Namespace) -> None:
    (key,) = make_keys(1)
    with KVStoreClient(local.endpoint, own, shared_memory=True) as client:
        client.set([key], blocks_of([key], BLOCK), reads=2)
        with client.borrow([key]) as first, client.borrow([key]) as second, client.borrow([key]) as third:
            assert (first[0], third[0]) == (second[0], None)
            assert client.contains([key]).all()
            assert client.get([key]).hit == 0
        assert not client.contains([key]).any()
        assert_nothing_left(client)


def test_a_client_that_is_killed_while_it_reads_in_shared_memory_has_not_read(local: Server, own: Namespace) -> None:
    keys = make_keys(8)
    script = textwrap.dedent(
        """
        import pickle, sys, time
        from kvstore_client import KVStoreClient
        namespace, endpoint, keys = pickle.loads(bytes.fromhex(sys.argv[1]))
        with KVStoreClient(endpoint, namespace, shared_memory=True) as client, client.borrow(keys) as blocks:
            print(sum(block is not None for block in blocks), flush=True)
            time.sleep(60)
        """
    )
    with KVStoreClient(local.endpoint, own, shared_memory=True) as client:
        client.set(keys, blocks_of(keys, BLOCK), reads=1)
        given = pickle.dumps((own, local.endpoint, keys)).hex()
        command = [sys.executable, "-c", script, given]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "8\n"
            assert client.get(keys).hit == 0 and client.contains(keys).all()
        finally:
            os.kill(holder.pid, signal.SIGKILL)
            holder.communicate()
        wait_until(lambda: not shard_info(client).lent_blocks)
        assert client.get(keys).blocks == blocks_of(keys, BLOCK)
        assert_nothing_left(client)


def test_a_client_that_ends_has_read_what_it_gave_back(local: Server, own: Namespace) -> None:
    keys = make_keys(8)
    with KVStoreClient(local.endpoint, own, shared_memory=True) as client:
        for _ in range(5):
            client.set(keys, blocks_of(keys, BLOCK), reads=1)
            with KVStoreClient(local.endpoint, own, shared_memory=True) as reader:
                assert reader.get(keys).hit == 8
            wait_until(lambda: not shard_info(client).lent_blocks)
            assert not client.contains(keys).any()


# ---- time ----------------------------------------------------------------------------------------------------------


def test_a_block_that_nobody_reads_goes_when_its_time_is_over(
    start_server: StartServer, clock: Clock, own: Namespace
) -> None:
    server = start_server(memory="8MiB", segment="1MiB", **clock.environment)
    keys = make_keys(3)
    with KVStoreClient(server.endpoint, own) as client:
        for key, ttl_s in zip(keys, (None, 10, 3600), strict=True):
            client.set([key], blocks_of([key], BLOCK), reads=200, ttl_s=ttl_s)
        for seconds, there in ((8, [True] * 3), (4, [True, False, True]), (50, [False, False, True])):
            clock.advance(seconds)
            assert client.contains(keys).tolist() == there
        clock.advance(3600)
        wait_until(lambda: not namespace_info(client).blocks, what="the sweep finds it without a look-up")
        clock.advance(6)
        wait_until(lambda: not shard_info(client).transient_bytes, what="the empty segment is given back")


def test_who_reads_when_its_time_is_over_reads_on(
    start_server: StartServer, clock: Clock, tmp_path: Path, own: Namespace
) -> None:
    socket = str(tmp_path / "kv.sock")
    server = start_server("--unix-socket", socket, memory="8MiB", segment="1MiB", **clock.environment)
    keys = make_keys(PER_SEGMENT)
    blocks = blocks_of(keys, BLOCK)
    with KVStoreClient(server.endpoint, own, shared_memory=True) as client:
        client.set(keys, blocks, reads=5)
        with client.borrow(keys) as borrowed:
            clock.advance(100)
            assert not client.contains(keys).any()
            others = make_keys(PER_SEGMENT, first=100)
            assert client.set(others, blocks_of(others, BLOCK), reads=1).refused == PER_SEGMENT
            assert [bytes(block or b"") for block in borrowed] == blocks
        assert_nothing_left(client)


def test_to_set_it_again_renews_its_reads_and_its_time(start_server: StartServer, clock: Clock, own: Namespace) -> None:
    server = start_server(memory="8MiB", segment="1MiB", **clock.environment)
    keys = make_keys(2)
    blocks = blocks_of(keys, BLOCK)
    with KVStoreClient(server.endpoint, own) as client:
        client.set(keys, blocks, reads=2)
        assert client.get(keys).hit == 2
        clock.advance(50)
        result = client.set(keys, blocks, reads=2)
        assert (result.created, result.existed) == (0, 2)
        clock.advance(50)
        assert [client.get(keys).hit for _ in range(3)] == [2, 2, 0]


# ---- beside ordinary blocks ----------------------------------------------------------------------------------------


def test_an_ordinary_block_stays_one_and_a_transient_one_becomes_one(client: KVStoreClient) -> None:
    keys = make_keys(4)
    blocks = blocks_of(keys, BLOCK)
    client.set(keys[:2], blocks[:2])
    result = client.set(keys, blocks, reads=1)
    assert (result.created, result.existed) == (2, 2)
    result = client.set(keys[1:3], blocks[1:3])
    assert (result.created, result.existed) == (1, 1)
    for _ in range(3):
        assert client.get(keys[:3]).blocks == blocks[:3]
    assert client.get(keys).hit == 4 and client.contains(keys).tolist() == [True] * 3 + [False]
    assert client.set(keys[3:], blocks[3:], reads=1).created == 1
    assert client.set(keys[3:], blocks_of(keys[3:], BLOCK, 1), force=True).forced == 1
    assert client.get(keys[3:]).blocks == client.get(keys[3:]).blocks == blocks_of(keys[3:], BLOCK, 1)


def test_it_fulfils_a_promise(local: Server, own: Namespace) -> None:
    keys = make_keys(4)
    rows = np.zeros((4, BLOCK), dtype=np.uint8)
    with (
        KVStoreClient(local.endpoint, own) as setter,
        KVStoreClient(local.endpoint, own) as reader,
        ThreadPoolExecutor(1) as thread,
        setter.promise(keys),
    ):
        reading = thread.submit(reader.get_into, keys, rows, wait_s=20)
        wait_until(lambda: namespace_info(setter).awaited)
        setter.set(keys, blocks_of(keys, BLOCK), reads=1)
        assert reading.result().all() and [row.tobytes() for row in rows] == blocks_of(keys, BLOCK)
        assert_nothing_left(setter)


def test_what_is_beyond_the_limit_is_refused_block_by_block(client: KVStoreClient) -> None:
    limit = shard_info(client).transient_limit_bytes
    assert limit == 4 * SEGMENT, "10 % of 32 segments, rounded up"
    room = limit // BLOCK
    ordinary, keys = make_keys(200), make_keys(room + 5, first=1000)
    client.set(ordinary, blocks_of(ordinary, BLOCK))
    result = client.set(keys, blocks_of(keys, BLOCK), reads=1)
    assert (result.created, result.error, result.refused) == (room, 5, 5)
    assert client.contains(keys).tolist() == [True] * room + [False] * 5
    assert client.contains(ordinary).all()
    many = make_keys(1000, first=2000)
    for at in range(0, 1000, 100):
        client.set(many[at : at + 100], blocks_of(many[at : at + 100], BLOCK))
    assert client.get(keys[:room]).blocks == blocks_of(keys[:room], BLOCK), "ordinary blocks evict none of them"
    assert shard_info(client).transient_bytes == limit


def test_a_server_without_them_refuses_them_all(start_server: StartServer, own: Namespace) -> None:
    server = start_server("--transient-memory", "0", memory="8MiB", segment="1MiB")
    keys = make_keys(3)
    with KVStoreClient(server.endpoint, own) as client:
        assert client.set(keys, blocks_of(keys, BLOCK), reads=1).refused == 3
        assert client.set(keys, blocks_of(keys, BLOCK)).created == 3


def test_what_makes_no_sense_is_refused(local: Server, own: Namespace) -> None:
    keys = make_keys(1)
    blocks = blocks_of(keys, BLOCK)
    with KVStoreClient(local.endpoint, own) as client:
        with pytest.raises(ValueError, match="reads=256: expected 0 to 255"):
            client.set(keys, blocks, reads=256)
        with pytest.raises(ValueError, match="reads=1 and force=True"):
            client.set(keys, blocks, reads=1, force=True)
        assert client.set(keys, blocks, reads=0).created == 1 and not namespace_info(client).transient_blocks
    with RawClient(local) as raw:
        raw.hello(own.canonical())
        ordinary = [False, b"", b"", 0, b"", 0, b"", False]
        raw.send(pack(SET, 1, 10_000, 1, 16, True, 0, False, 0.0, *ordinary, 1), keys[0], blocks[0], sums_of(blocks))
        header, _ = raw.reply()
        assert header[0] == ERROR and "0 with force" in header[3]


def test_purge_and_delete_remove_them(client: KVStoreClient) -> None:
    keys = make_keys(20)
    client.set(keys, blocks_of(keys, BLOCK), reads=3)
    assert client.delete(keys[:5]) == 5
    assert client.purge() == 15
    assert_nothing_left(client)


def test_the_async_client_and_the_command_set_them(local: Server, own: Namespace, tmp_path: Path) -> None:
    keys = make_keys(2)

    async def set_and_get() -> list[int]:
        async with AsyncKVStoreClient(local.endpoint, own) as client:
            await client.set(keys[:1], blocks_of(keys[:1], BLOCK), reads=1, ttl_s=30)
            return [(await client.get(keys[:1])).hit for _ in range(2)]

    assert asyncio.run(set_and_get()) == [1, 0]
    file = tmp_path / "block"
    file.write_bytes(blocks_of(keys[1:], BLOCK)[0])
    command = [sys.executable, "-m", "kvstore_cli", "set", keys[1].hex(), str(file), "--reads", "1", "--ttl", "50"]
    command += ["--namespace", own.canonical().decode(), "--endpoint", local.endpoint, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout)["created"] == 1, done.stderr
    with KVStoreClient(local.endpoint, own) as client:
        assert [client.get(keys[1:]).hit for _ in range(2)] == [1, 0]
    command.append("--force")
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 2 and "--reads and --force" in done.stdout + done.stderr


def test_an_operator_sees_them(start_server: StartServer, own: Namespace) -> None:
    server = start_server("--http", "127.0.0.1:0", "--transient-memory", "2MiB", memory="8MiB", segment="1MiB")
    keys = make_keys(3)
    with KVStoreClient(server.endpoint, own) as client:
        client.set(keys, blocks_of(keys, BLOCK), reads=1)
        info = client.info()
        assert (info.full_blocks, info.free_blocks) == (3, 7 * PER_SEGMENT)  # their segment has no room for others
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    found = dict(re.findall(r"^(kvstore_transient_\w+)\{.*\} (\S+)$", metrics, re.MULTILINE))
    assert {name.removeprefix("kvstore_transient_"): float(value) for name, value in found.items()} == {
        "bytes": SEGMENT,
        "limit_bytes": 2 * SEGMENT,
        "blocks": 3,
    }
    command = [sys.executable, "-m", "kvstore_cli", "info", "--endpoint", server.endpoint]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(), timeout=60).stdout
    assert re.search(r"Transient blocks *\n(.*\n){2}.*/0 +3 +1.0 MiB +2.0 MiB", shown), shown


# ---- never on disk, never elsewhere --------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["all", "reused", "evicted"])
def test_they_never_reach_the_disk(start_server: StartServer, folder: Path, own: Namespace, write: str) -> None:
    flags = disk_flags(folder, write=write)
    server = start_server(*flags, memory="16MiB", segment="1MiB")
    ordinary, keys = make_keys(300), make_keys(30, first=1000)
    with KVStoreClient(server.endpoint, own, timeout_s=20) as client:
        wait_until_on(client)
        assert client.set(keys, blocks_of(keys, BLOCK), reads=100, ttl_s=3600).created == 30
        for at in range(0, 300, 50):  # more than memory holds
            client.set(ordinary[at : at + 50], blocks_of(ordinary[at : at + 50], BLOCK))
            assert client.get(ordinary[at : at + 50]).hit == client.get(keys).hit + 20 == 50
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


def test_one_that_becomes_ordinary_reaches_the_disk(start_server: StartServer, folder: Path, own: Namespace) -> None:
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


def test_with_replicas_there_is_one_copy_and_reading_makes_no_more(start_server: StartServer) -> None:
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


def test_with_replicas_the_copy_is_where_it_can_be(start_server: StartServer) -> None:
    namespace = make_namespace(BLOCK, "transient-reachable")
    servers = [start_server(memory="64MiB") for _ in range(2)]
    keys = make_keys(20)
    with KVStoreClient([server.endpoint for server in servers], namespace, replicas=2, timeout_s=5) as client:
        servers[0].kill()
        assert client.set(keys, blocks_of(keys, BLOCK), reads=1).created == 20
        assert client.get(keys).blocks == blocks_of(keys, BLOCK)
        assert client.get(keys).hit == 0


def test_credit_and_its_end_leave_nothing_behind(local: Server, own: Namespace) -> None:
    """A reader that is granted one block after the other reads each of them once."""
    keys = make_keys(6)
    with KVStoreClient(local.endpoint, own, shared_memory=False) as client, RawClient(local) as raw:
        client.set(keys, blocks_of(keys, BLOCK), reads=1)
        raw.hello(own.canonical())
        raw.send(pack(GET, 1, 10_000, 6, 16, BLOCK), b"".join(keys))
        got = []
        while len(got) < 6:
            header, frames = raw.reply()
            assert header[0] == PART
            got += frames
            raw.send(pack(CREDIT, 1, BLOCK))
        assert got == blocks_of(keys, BLOCK)
        wait_until(lambda: not namespace_info(client).blocks)
        assert_nothing_left(client)
