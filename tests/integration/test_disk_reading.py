"""Reads that combine memory and disk, and which blocks are written to disk and when."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Namespace
from tests.support.clock import Clock
from tests.support.disk import (
    BLOCK,
    KiB,
    MiB,
    disk_flags,
    disk_info,
    fill,
    open_client,
    read,
    wait_until_on,
    wait_until_written,
)
from tests.support.harness import (
    GET,
    MakeNamespace,
    MemoryWatch,
    RawClient,
    StartServer,
    block_of,
    blocks_of,
    make_keys,
    pack,
    stays,
    sums_of,
    wait_until,
)

# ---- reading from both tiers ---------------------------------------------------------------------------------------


def test_a_streamed_get_combines_memory_disk_duplicates_and_misses(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="16MiB", segment="1MiB")
    keys = make_keys(800)
    absent = make_keys(50, first=9000)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        wait_until_written(client)
        wanted = [*keys[::4], *absent[:25], *keys[-60:], *keys[:40], *absent[25:], *keys[::4]]
        random.Random(4).shuffle(wanted)
        there = set(keys)
        got = {position: bytes(block) for position, block in client.stream_get(wanted)}
        assert set(got) == {position for position, key in enumerate(wanted) if key in there}
        assert all(block == block_of(wanted[position], BLOCK) for position, block in got.items())


def test_a_key_repeated_in_one_get_is_read_once(start_server: StartServer, folder: Path, namespace: Namespace) -> None:
    server = start_server(*disk_flags(folder), memory="4MiB", segment="1MiB")
    keys = make_keys(300)
    with open_client(server, namespace) as client, RawClient(server) as raw:
        fill(client, keys, BLOCK)
        before = wait_until_written(client)
        raw.hello(namespace.canonical())
        wanted = [keys[0], keys[1], keys[0], keys[0], keys[1]]
        raw.send(pack(GET, 9, 10_000, len(wanted), 16, 0), b"".join(wanted))
        got: dict[int, bytes] = {}
        while True:
            fields, frames = raw.reply()
            positions = np.frombuffer(fields[2], dtype="<u4").tolist()
            payload = b"".join(frames)
            blocks = [payload[at : at + BLOCK] for at in range(0, len(payload), BLOCK)]
            assert fields[3] == sums_of(blocks)
            got.update(zip(positions, blocks, strict=True))
            if fields[4]:
                break
        assert fields[5:7] == [5, 0]
        assert [got[position] for position in range(5)] == blocks_of(wanted, BLOCK)
        assert disk_info(client).fetched_blocks == before.fetched_blocks + 2


def test_concurrent_readers_read_the_same_blocks_from_disk(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="8MiB", segment="1MiB")
    keys = make_keys(400)
    failures: list[BaseException] = []

    def read_all(number: int) -> None:
        try:
            with open_client(server, namespace) as reader:
                for _ in range(3):
                    wanted = keys if number % 2 else keys[::-1]
                    got = dict(reader.stream_get(wanted))
                    assert len(got) == 400, f"{400 - len(got)} misses"
                    for position, block in got.items():
                        assert bytes(block) == block_of(wanted[position], BLOCK)
        except BaseException as error:
            failures.append(error)

    with open_client(server, namespace) as client, MemoryWatch(server, 8 * MiB):
        fill(client, keys, BLOCK)
        wait_until_written(client)
        threads = [threading.Thread(target=read_all, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures, failures[0]


@pytest.mark.parametrize("size", [4 * KiB, 1 * MiB])
def test_a_get_may_be_many_times_the_size_of_memory(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace, size: int
) -> None:
    server = start_server(*disk_flags(folder), memory="4MiB", segment="1MiB")
    keys = make_keys(64 * MiB // size // (4 if size < MiB else 1))
    with open_client(server, new_namespace(size)) as client:
        fill(client, keys, size)
        wait_until_written(client)
        out = np.zeros((len(keys), size), dtype=np.uint8)
        assert client.get_into(keys, out, timeout_s=60.0).all()
        for key, row in zip(keys, out, strict=True):
            assert row.tobytes() == block_of(key, size)


def test_an_interrupted_reader_leaves_nothing_referenced(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="4MiB", segment="1MiB")
    keys = make_keys(400)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        wait_until_written(client)
        for _ in range(10):
            with open_client(server, namespace) as other:
                stream = other.stream_get(keys)
                next(stream)
                stream.close()
            with RawClient(server) as raw:
                raw.hello(namespace.canonical())
                raw.send(pack(GET, 9, 10_000, 400, 16, 0), b"".join(keys))
        fill(client, make_keys(200, first=3000), BLOCK)
        assert all(read(client, keys, BLOCK))


# ---- what is written -----------------------------------------------------------------------------------------------


def test_policy_all_writes_every_set_block(start_server: StartServer, folder: Path, namespace: Namespace) -> None:
    server = start_server(*disk_flags(folder, write="all"), memory="64MiB", segment="1MiB")
    keys = make_keys(200)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        info = wait_until(lambda: (found := disk_info(client)).blocks == 200 and found)
        assert info.written_blocks == 200 and info.written_bytes == 200 * BLOCK


def test_policy_reused_writes_read_blocks_and_the_rest_at_the_end(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder, write="reused"), memory="64MiB", segment="1MiB")
    keys = make_keys(200)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, BLOCK)
        assert client.contains(keys).all()
        # 1.5 s is longer than a dirty block waits for a quiet moment.
        stays(lambda: disk_info(client).written_blocks == 0, 1.5)
        assert all(read(client, keys[:50], BLOCK))
        wait_until(lambda: disk_info(client).written_blocks == 50)
        assert all(read(client, keys[:50], BLOCK))
        assert wait_until_written(client).written_blocks == 50
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert all(read(client, keys, BLOCK))


def test_policy_evicted_writes_what_memory_cannot_hold(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    flags = disk_flags(folder, "256MiB", "--policy", "lru", write="evicted")
    server = start_server(*flags, memory="16MiB", segment="1MiB")
    keys = make_keys(600)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys[:128], BLOCK)
        stays(lambda: disk_info(client).written_blocks == 0, 1.5, "memory has room for all of them")
        for at in range(128, 600, 8):  # more slowly than the disk writes
            fill(client, keys[at : at + 8], BLOCK)
            wait_until_written(client)
            time.sleep(0.03)
        assert sum(read(client, keys, BLOCK)) >= 500
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert sum(read(client, keys, BLOCK)) >= 500


@pytest.mark.parametrize("write", ["all", "evicted"])
def test_a_flood_of_sets_is_stored_whole_and_stays_within_memory(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace, write: str
) -> None:
    server = start_server(*disk_flags(folder, "1GiB", write=write), memory="16MiB", segment="1MiB")
    keys = make_keys(600)
    with open_client(server, new_namespace(512 * KiB)) as client, MemoryWatch(server, 16 * MiB):
        fill(client, keys, 512 * KiB)
        present = read(client, keys, 512 * KiB)
    if write == "all":
        assert all(present), "nothing acknowledged was dropped for want of disk speed"


# ---- time to live --------------------------------------------------------------------------------------------------


def test_blocks_expire_on_disk_and_across_a_restart(
    start_server: StartServer, folder: Path, namespace: Namespace, clock: Clock
) -> None:
    flags = disk_flags(folder, "256MiB", "--ttl-seconds", "600")
    server = start_server(*flags, memory="8MiB", segment="1MiB", **clock.environment)
    keys = make_keys(400)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, BLOCK)
        wait_until_written(client)
    assert server.stop() == 0
    clock.advance(300)
    server.restart()
    with open_client(server, namespace) as client:
        assert wait_until_on(client).recovered_blocks == 400
        clock.advance(270)
        assert client.contains(keys).all(), "not before their time"
        clock.advance(31.5)
        assert not client.contains(keys).any() and not any(read(client, keys, BLOCK))
        wait_until(lambda: disk_info(client).blocks == 0, what="their space comes back")
        fill(client, keys, BLOCK, version=1)
        wait_until_written(client)
        assert all(read(client, keys, BLOCK, version=1))
    server.kill()
    clock.advance(601.5)
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert not client.contains(keys).any()
