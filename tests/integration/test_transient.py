"""Transient blocks: each is dropped after the number of reads that its set allows, or when its time is over. Other
readers and failed reads must not change that."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import KVStoreClient, Namespace
from tests.support.clock import Clock
from tests.support.harness import (
    CANCEL,
    CREDIT,
    GET,
    PART,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    environment,
    make_keys,
    namespace_info,
    pack,
    shard_info,
    wait_until,
)

BLOCK = 64 << 10
SEGMENT = 1 << 20
PER_SEGMENT = SEGMENT // BLOCK


@pytest.fixture
def local(start_server: StartServer, tmp_path: Path) -> Server:
    """A server of 32 segments, four of which may have transient blocks, for clients with and without shared memory."""
    return start_server("--unix-socket", str(tmp_path / "kv.sock"), memory="32MiB", segment="1MiB")


@pytest.fixture
def own(new_namespace: MakeNamespace) -> Namespace:
    return new_namespace(BLOCK)


@pytest.fixture(params=[True, False], ids=["shared memory", "tcp"])
def client(request: pytest.FixtureRequest, local: Server, own: Namespace) -> Iterator[KVStoreClient]:
    with KVStoreClient(local.endpoint, own, shared_memory=request.param) as client:
        yield client


def assert_nothing_left(client: KVStoreClient) -> None:
    """Check that every counter of the shard has the same value as before the first block."""
    client.info()
    info, shard = namespace_info(client), shard_info(client)
    assert (info.blocks, info.writing, info.transient_blocks) == (0, 0, 0)
    assert (shard.lent_blocks, shard.lent_bytes) == (0, 0)
    # All slots can be used again.
    room = shard.transient_limit_bytes // BLOCK
    keys = make_keys(room, first=1 << 20)
    assert client.set(keys, blocks_of(keys, BLOCK), reads=1).created == room
    assert client.delete(keys) == room


def test_a_block_is_gone_right_after_its_last_read(client: KVStoreClient) -> None:
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


def test_each_block_has_its_own_count(client: KVStoreClient) -> None:
    keys = make_keys(6)
    client.set(keys, blocks_of(keys, BLOCK), reads=2)
    client.get(keys[:3])
    client.get([*keys[2:5], keys[4]])  # a key that is named twice is read once
    assert client.contains(keys).tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("reads", [1, 3, 20])
def test_exactly_the_given_number_of_concurrent_reads_succeed(local: Server, own: Namespace, reads: int) -> None:
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
        # While all remaining reads of a block are in progress, other reads miss. Here all reads in progress succeed.
        assert (times == min(reads, readers)).all(), times
        assert setter.contains(keys).all() == (reads > readers)
        setter.delete(keys)
        assert_nothing_left(setter)


def test_a_cancelled_reader_has_read_the_blocks_already_sent(local: Server, own: Namespace) -> None:
    keys = make_keys(PER_SEGMENT)
    with KVStoreClient(local.endpoint, own, shared_memory=False) as client, RawClient(local) as raw:
        client.set(keys, blocks_of(keys, BLOCK), reads=1)
        raw.hello(own.canonical())
        raw.send(pack(GET, 2, 10_000, len(keys), 16, BLOCK), b"".join(keys))  # with credit for one block
        assert raw.reply()[0][0] == PART
        raw.send(pack(CANCEL, 2))
        raw.hello(own.canonical())  # the reply shows that the cancellation is complete
        found = client.get(keys)
        assert found.hit == len(keys) - 1 and found.blocks[0] is None
        assert_nothing_left(client)


def test_a_lost_reader_has_read_the_blocks_already_sent(start_server: StartServer, own: Namespace) -> None:
    server = start_server("--transient-memory", "50%")
    keys = make_keys(400)  # more than the kernel buffers for a reader that reads nothing
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


def test_while_all_remaining_reads_are_in_progress_others_miss(local: Server, own: Namespace) -> None:
    (key,) = make_keys(1)
    with KVStoreClient(local.endpoint, own, shared_memory=True) as client:
        client.set([key], blocks_of([key], BLOCK), reads=2)
        with client.borrow([key]) as first, client.borrow([key]) as second, client.borrow([key]) as third:
            assert (first[0], third[0]) == (second[0], None)
            assert client.contains([key]).all()
            assert client.get([key]).hit == 0
        assert not client.contains([key]).any()
        assert_nothing_left(client)


def test_a_client_killed_while_reading_shared_memory_has_not_read(local: Server, own: Namespace) -> None:
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


def test_a_client_that_ends_has_read_the_blocks_it_released(local: Server, own: Namespace) -> None:
    keys = make_keys(8)
    with KVStoreClient(local.endpoint, own, shared_memory=True) as client:
        for _ in range(5):
            client.set(keys, blocks_of(keys, BLOCK), reads=1)
            with KVStoreClient(local.endpoint, own, shared_memory=True) as reader:
                assert reader.get(keys).hit == 8
            wait_until(lambda: not shard_info(client).lent_blocks)
            assert not client.contains(keys).any()


def test_credit_and_its_end_leave_nothing_behind(local: Server, own: Namespace) -> None:
    """A reader that gets credit for one block at a time reads each block once."""
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


# ---- time ----------------------------------------------------------------------------------------------------------


def test_an_unread_block_goes_when_its_time_is_over(start_server: StartServer, clock: Clock, own: Namespace) -> None:
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


def test_a_read_in_progress_at_expiry_is_completed(
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


def test_setting_it_again_renews_its_reads_and_time(start_server: StartServer, clock: Clock, own: Namespace) -> None:
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


def test_an_ordinary_block_stays_ordinary_and_a_transient_one_becomes_ordinary(client: KVStoreClient) -> None:
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


def test_blocks_beyond_the_limit_are_refused_individually(client: KVStoreClient) -> None:
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


def test_purge_and_delete_remove_them(client: KVStoreClient) -> None:
    keys = make_keys(20)
    client.set(keys, blocks_of(keys, BLOCK), reads=3)
    assert client.delete(keys[:5]) == 5
    assert client.purge() == 15
    assert_nothing_left(client)
