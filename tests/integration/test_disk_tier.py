"""The disk tier of real servers in real folders: which blocks survive a restart, a lookup, a deletion or a
replacement."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from kvstore_client import Namespace
from tests.support.disk import (
    BLOCK,
    KiB,
    MiB,
    allocated_bytes,
    disk_flags,
    disk_info,
    fill,
    keeper_of,
    open_client,
    read,
    wait_until_durable,
    wait_until_on,
    wait_until_written,
)
from tests.support.harness import (
    MakeNamespace,
    StartServer,
    alive,
    blocks_of,
    make_keys,
    namespace_info,
    wait_until,
)

# ---- what survives -------------------------------------------------------------------------------------------------


def test_a_clean_stop_loses_nothing_of_any_namespace(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace
) -> None:
    server = start_server(*disk_flags(folder, "512MiB"), memory="128MiB", segment="4MiB")
    shapes = [
        (4096, 16, 300),
        (4095, 8, 300),
        (64, 32, 2000),
        (64 * KiB, 64, 200),
        (917_504, 20, 40),
        (4 * KiB, 33, 50),
    ]
    sets = [(new_namespace(size), make_keys(count, key_bytes=length), size) for size, length, count in shapes]
    for namespace, keys, size in sets:
        with open_client(server, namespace) as client:
            fill(client, keys, size)
    assert server.stop() == 0
    server.restart()
    for namespace, keys, size in sets:
        with open_client(server, namespace) as client:
            wait_until_on(client)
            assert all(read(client, keys, size)), f"blocks of {size} bytes"
    assert "Traceback" not in server.log_text()


def test_a_clean_stop_loses_no_block_of_one_byte(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace
) -> None:
    server = start_server(*disk_flags(folder, "512MiB"), memory="64MiB", segment="1MiB")
    namespace, keys = new_namespace(1), make_keys(100)
    with open_client(server, namespace) as client:
        fill(client, keys, 1)
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert all(read(client, keys, 1))


@pytest.mark.parametrize("policy", ["lru", "default"])
def test_a_set_larger_than_memory_is_read_from_disk(
    start_server: StartServer, folder: Path, namespace: Namespace, policy: str
) -> None:
    server = start_server(*disk_flags(folder, "256MiB", "--policy", policy), memory="8MiB", segment="1MiB")
    keys = make_keys(1000)  # 62.5 MiB
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        wait_until_written(client)
        for _ in range(2):
            assert all(read(client, keys, BLOCK))
        info = disk_info(client)
        assert info.blocks == 1000 and info.fetched_blocks >= 800 and info.corrupt_blocks == 0
        assert namespace_info(client).blocks <= 128


@pytest.mark.parametrize("memory_mib", [16, 48])
def test_the_hottest_blocks_are_in_memory_soon_after_a_start(
    start_server: StartServer, folder: Path, namespace: Namespace, memory_mib: int
) -> None:
    flags = disk_flags(folder, "256MiB", "--policy", "lru")
    server = start_server(*flags, memory=f"{memory_mib}MiB", segment="1MiB")
    keys = make_keys(1000)
    room = memory_mib * 16
    hot = keys[100 : 100 + room // 2]
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        wait_until_written(client)
        assert all(read(client, hot, BLOCK))
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        warm = wait_until_on(client)
        assert warm.recovered_blocks == 1000 and warm.fetched_blocks <= room
        assert all(read(client, hot, BLOCK))
        assert disk_info(client).fetched_blocks == warm.fetched_blocks, "they came from memory"
        assert all(read(client, keys, BLOCK))


def test_memory_may_change_and_the_disk_shrink_at_a_restart(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    keys = make_keys(1500)
    server = start_server(*disk_flags(folder, "256MiB", "--policy", "lru"), memory="16MiB", segment="1MiB")
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        wait_until_written(client)
    assert server.stop() == 0
    server = start_server(*disk_flags(folder, "256MiB"), memory="256MiB", segment="8MiB")
    with open_client(server, namespace) as client:
        assert wait_until_on(client).recovered_blocks == 1500
        assert all(read(client, keys, BLOCK))
    assert server.stop() == 0
    server = start_server(*disk_flags(folder, "64MiB"), memory="16MiB", segment="1MiB")
    with open_client(server, namespace) as client:
        info = wait_until_on(client)
        assert 200 <= info.recovered_blocks <= 1024
        read(client, keys, BLOCK)
        fill(client, make_keys(100, first=5000), BLOCK)
        assert sum(read(client, keys, BLOCK)) >= 100
    assert server.stop() == 0
    assert "Traceback" not in server.log_text()


def test_a_smaller_disk_limit_holds_after_a_restart(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder, "256MiB"), memory="16MiB", segment="1MiB")
    with open_client(server, namespace) as client:
        fill(client, make_keys(1500), BLOCK)
    assert server.stop() == 0
    server = start_server(*disk_flags(folder, "64MiB"), memory="16MiB", segment="1MiB")
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert allocated_bytes(folder) <= 64 * MiB


def test_a_restarted_shard_serves_its_disk_blocks_again(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="32MiB", segment="1MiB")
    keys = make_keys(800)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        wait_until_durable(client)
    (shard,) = server.shards()
    keeper = keeper_of(shard)
    shard.kill()
    wait_until(lambda: "shard 0 is serving again" in server.log_text())
    assert not alive(keeper)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert all(read(client, keys, BLOCK))


def test_each_shard_of_a_server_has_its_own_folder(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server("--shards", "2", *disk_flags(folder, "128MiB"), memory="32MiB", segment="1MiB")
    keys = make_keys(600)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        wait_until(lambda: all(shard.disk and shard.disk.state == "on" for shard in client.info().shards))
        assert all(read(client, keys, BLOCK))
    assert allocated_bytes(folder) <= 128 * MiB


# ---- questions -----------------------------------------------------------------------------------------------------


def test_lookups_cover_both_tiers_without_reading_the_disk(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="4MiB", segment="1MiB")
    keys = make_keys(500)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        before = wait_until_written(client)
        absent = make_keys(10, first=9000)
        assert client.contains(keys).all() and client.contains(keys, refresh=True).all()
        assert not client.contains(absent).any()
        assert client.match_prefix(keys) == 500
        assert client.match_prefix([*keys[:300], absent[0], *keys[300:]]) == 300
        assert client.match_prefix(keys, refresh=True, pin_s=1.0) == 500
        after = disk_info(client)
        assert (after.fetched_blocks, after.fetched_bytes) == (before.fetched_blocks, before.fetched_bytes)
        assert namespace_info(client).blocks <= 64, "most of them are on disk only"


def test_setting_a_block_that_is_on_disk_reports_that_it_exists(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="4MiB", segment="1MiB")
    keys = make_keys(500)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        before = wait_until_written(client)
        for at in range(0, 500, 50):
            result = client.set(keys[at : at + 50], blocks_of(keys[at : at + 50], BLOCK))
            assert (result.existed, result.created, result.error) == (50, 0, 0)
        after = wait_until_written(client)
        assert after.written_blocks == before.written_blocks and after.fetched_blocks == before.fetched_blocks
        mixed = [*keys[:5], *make_keys(5, first=7000)]
        result = client.set(mixed, blocks_of(mixed, BLOCK))
        assert (result.existed, result.created) == (5, 5)


def test_pins_keep_blocks_on_disk(start_server: StartServer, folder: Path, namespace: Namespace) -> None:
    server = start_server(*disk_flags(folder, "32MiB", "--policy", "lru"), memory="4MiB", segment="1MiB")
    keys = make_keys(100)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        wait_until_written(client)
        pinned = keys[:16]  # all blocks of one SET, because pinned blocks also protect the others of their SET
        assert client.contains(pinned, pin_s=60.0).all()
        fill(client, make_keys(2000, first=1000), BLOCK)  # four times the disk
        wait_until_written(client)
        assert disk_info(client).evicted > 0
        assert all(read(client, pinned, BLOCK)) and not client.contains(keys[16:]).any()


# ---- what is deleted or replaced -----------------------------------------------------------------------------------


def test_delete_removes_from_both_tiers_permanently(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="8MiB", segment="1MiB")
    keys = make_keys(500)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        wait_until_durable(client)
        gone = keys[::3]
        assert client.delete([*gone, *make_keys(3, first=9000)]) == len(gone)
        server.kill()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert not client.contains(gone).any()
        assert not any(read(client, gone, BLOCK))
        assert all(read(client, [key for key in keys if key not in set(gone)], BLOCK))


def test_blocks_that_expire_while_they_are_written_to_disk_disturb_nothing(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace
) -> None:
    server = start_server(*disk_flags(folder, "1GiB"), memory="512MiB", segment="4MiB")
    kept, keys = make_keys(20), make_keys(256, first=1000)
    lasting, short = new_namespace(BLOCK), new_namespace(64 * KiB)
    with open_client(server, lasting) as client, open_client(server, short) as other:
        fill(client, kept, BLOCK)
        blocks = blocks_of(keys, 64 * KiB)
        for number in range(20):  # chains, which are linked again when they are on disk
            renewed = [key[:-1] + bytes([number]) for key in keys]
            other.set(renewed, blocks, deferred=False, ttl_s=1.0 if number % 2 else None)
            other.get(renewed)
            other.expire(renewed, ttl_s=0.001)
        wait_until_written(client)
        assert all(read(client, kept, BLOCK))
        wait_until(lambda: not other.contains(renewed).any(), what="the blocks expire")
    assert "Traceback" not in server.log_text() and "is off" not in server.log_text()


def test_a_block_deleted_right_after_its_set_does_not_return(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="32MiB", segment="1MiB")
    keys = make_keys(64)
    for number in range(3):
        with open_client(server, namespace) as client:
            wait_until_on(client)
            fill(client, keys, BLOCK)
            time.sleep(0.02 * number)  # not written yet, being written, or written
            assert client.delete(keys) == 64
            server.kill()
        server.restart()
        with open_client(server, namespace) as client:
            wait_until_on(client)
            assert not client.contains(keys).any()


def test_force_replaces_permanently(start_server: StartServer, folder: Path, namespace: Namespace) -> None:
    server = start_server(*disk_flags(folder), memory="8MiB", segment="1MiB")
    keys = make_keys(300)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        wait_until_durable(client)
        replaced = keys[100:140]
        result = client.set(replaced, blocks_of(replaced, BLOCK, 1), force=True)
        assert result.error == 0 and result.existed == 0 and result.forced + result.created == 40
        server.kill()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        read(client, replaced, BLOCK, version=1)  # it is either gone or new
        assert all(read(client, keys[:100], BLOCK))
        fill(client, replaced, BLOCK, version=2, force=True)
        fill(client, make_keys(300, first=5000), BLOCK)  # out of memory
        wait_until_written(client)
        assert all(read(client, replaced, BLOCK, version=2))


def test_force_replaces_while_old_bytes_are_read_from_disk(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="8MiB", segment="1MiB")
    keys = make_keys(600)
    stop = threading.Event()

    def read_on(number: int) -> None:
        rng = random.Random(number)
        with open_client(server, namespace) as reader:
            while not stop.is_set():
                reader.get(rng.sample(keys, 30))

    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        wait_until_written(client)
        readers = [threading.Thread(target=read_on, args=(number,)) for number in range(3)]
        for reader in readers:
            reader.start()
        try:
            for at in range(0, 600, 20):
                some = keys[at : at + 20]
                result = client.set(some, blocks_of(some, BLOCK, 1), force=True)
                assert result.existed == 0, "nobody else sets these blocks, so none is left alone"
                read(client, some, BLOCK, version=1)
        finally:
            stop.set()
            for reader in readers:
                reader.join(20)


def test_blocks_deleted_during_recovery_do_not_return(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace
) -> None:
    server = start_server(*disk_flags(folder), memory="64MiB", segment="1MiB")
    namespace, keys = new_namespace(64), make_keys(50_000)
    with open_client(server, namespace) as client:
        fill(client, keys, 64)
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        client.delete(keys[:100])
        assert not client.contains(keys[:100]).any()
        wait_until_on(client)
        assert not client.contains(keys[:100]).any()
        assert all(read(client, keys[100:1000], 64))
        server.kill()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert not client.contains(keys[:100]).any()


def test_blocks_replaced_during_recovery_do_not_return(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace
) -> None:
    server = start_server(*disk_flags(folder), memory="64MiB", segment="1MiB")
    namespace, keys = new_namespace(64), make_keys(50_000)
    with open_client(server, namespace) as client:
        fill(client, keys, 64)
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        result = client.set(keys[:100], blocks_of(keys[:100], 64, 1), force=True)
        assert result.error == 0 and result.existed == 0
        assert all(read(client, keys[:100], 64, version=1))
        wait_until_on(client)
        assert all(read(client, keys[:100], 64, version=1))
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert all(read(client, keys[:100], 64, version=1))


@pytest.mark.parametrize("tiers", ["memory", "memory and disk"])
def test_a_set_never_evicts_the_blocks_it_names(
    start_server: StartServer, folder: Path, namespace: Namespace, tiers: str
) -> None:
    flags = disk_flags(folder, write="reused") if tiers != "memory" else []  # with `reused`, no block is written here
    server = start_server(*flags, memory="4MiB", segment="1MiB")
    keys = make_keys(100)
    with open_client(server, namespace) as client:
        fill(client, keys[:64], BLOCK)  # memory is full
        some = [*keys[12:16], *keys[64:72]]  # the least recently used blocks, and new ones
        result = client.set(some, blocks_of(some, BLOCK))
        assert (result.error, result.created, result.existed) == (0, 8, 4)
