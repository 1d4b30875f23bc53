"""The limits of the disk tier, and how it handles damaged files and small file systems."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client import KVStoreClient, Namespace
from tests.support.disk import (
    BLOCK,
    MiB,
    allocated_bytes,
    disk_flags,
    disk_info,
    fill,
    flip,
    keeper_of,
    mount_tmpfs,
    open_client,
    read,
    segment_files,
    unmount,
    wait_until_on,
    wait_until_written,
)
from tests.support.harness import (
    OVERHEAD_BYTES,
    MakeNamespace,
    MemoryWatch,
    RawClient,
    Server,
    StartServer,
    block_of,
    blocks_of,
    make_keys,
    pack,
    rss_bytes,
    shard_info,
    stays,
    wait_until,
)

SCRUB, SCRUB_REPLY = 12, 74


# ---- what bounds it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "count"), [(917_504, 250), (4096, 30_000), (64, 300_000)])
def test_a_full_disk_never_exceeds_its_size(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace, size: int, count: int
) -> None:
    limit = 64 * MiB
    server = start_server(*disk_flags(folder, "64MiB"), memory="16MiB", segment="1MiB")
    keys = make_keys(count)
    highest = 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stop.wait(0.02):
            highest = max(highest, allocated_bytes(folder))

    watcher = threading.Thread(target=watch)
    watcher.start()
    namespace = new_namespace(size)
    rng = random.Random(size)
    try:
        with open_client(server, namespace) as client:
            wait_until_on(client)
            step = max(1, min(4096, 4 * MiB // size))
            for at in range(0, count, step):
                some = keys[at : at + step]
                assert client.set(some, blocks_of(some, size)).error == 0
                if rng.random() < 0.3:  # holes
                    client.delete(rng.sample(some, len(some) // 4))
            info = wait_until_written(client)
            assert info.evicted > 0 or size == 64
            assert info.used_bytes <= info.limit_bytes == limit
            there = client.contains(keys)
            assert there.sum() * size >= 0.15 * limit if size > 64 else there.sum() > 10_000
            sample = rng.sample(
                [key for key, present in zip(keys, there, strict=True) if present], min(count // 8, 500)
            )
            assert all(read(client, sample, size))
        assert server.stop() == 0
        server.restart()
        with open_client(server, namespace) as client:
            wait_until_on(client)
            sample = keys[-min(count // 8, 500) :]
            read(client, sample, size)
    finally:
        stop.set()
        watcher.join()
    assert highest <= limit, f"{highest / MiB:.2f} MiB on disk"
    assert "Traceback" not in server.log_text()


def test_small_blocks_on_a_large_disk_stay_within_memory(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace
) -> None:
    server = start_server(*disk_flags(folder, "50GiB"), memory="64MiB", segment="1MiB")
    namespace, keys = new_namespace(64), make_keys(50_000)
    with open_client(server, namespace) as client, MemoryWatch(server, 64 * MiB):
        wait_until_on(client)
        fill(client, keys, 64)
        wait_until_written(client)
        assert all(read(client, keys[-5000:], 64))


# ---- damage --------------------------------------------------------------------------------------------------------


def damage_one_block(folder: Path, block: bytes) -> None:
    """Change one bit in the middle of a block, wherever it is stored."""
    for path in segment_files(folder):
        at = path.read_bytes().find(block)
        if at >= 0:
            flip(path, at + len(block) // 2, 16)
            return
    raise AssertionError("the block is in no segment")


def drop_page_cache(folder: Path) -> None:
    for path in segment_files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@pytest.mark.parametrize("size", [BLOCK, 1000])
def test_a_damaged_block_is_a_miss_and_logged_once(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace, size: int
) -> None:
    server = start_server(*disk_flags(folder), memory="4MiB", segment="1MiB")
    keys = make_keys(12 * MiB // size)
    with open_client(server, new_namespace(size)) as client:
        fill(client, keys, size)
        wait_until_written(client)
        assert all(read(client, keys[-60:], size))
        damage_one_block(folder, block_of(keys[3], size))
        drop_page_cache(folder)
        for _ in range(3):
            got = client.get([*keys[:3], keys[3]])
            assert [block is None for block in got.blocks] == [False] * 3 + [True]
        assert not client.contains(keys[3:4]).any()
        assert disk_info(client).corrupt_blocks == 1
        assert server.log_text().count("damaged block(s) dropped") == 1
        fill(client, keys[3:4], size)
        assert all(read(client, keys, size))
    server.kill()
    server.restart()


def test_the_scrubber_finds_a_damaged_block(start_server: StartServer, folder: Path, namespace: Namespace) -> None:
    server = start_server(*disk_flags(folder, "256MiB", "--scrub-mbps", "100"), memory="4MiB", segment="1MiB")
    keys = make_keys(300)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        wait_until_written(client)
        damage_one_block(folder, block_of(keys[7], BLOCK))
        wait_until(lambda: disk_info(client).scrub_corrupt_blocks == 1)
        passes = disk_info(client).scrub_passes
        wait_until(lambda: disk_info(client).scrub_passes >= passes + 2)
        info = disk_info(client)
        assert info.scrub_corrupt_blocks == 1 and info.corrupt_blocks == 1
        assert server.log_text().count("damaged block(s) dropped") == 1
        assert not client.contains([keys[7]]).any() and client.contains(keys).sum() == 299


def test_scrub_makes_one_pass_on_request(start_server: StartServer, folder: Path, namespace: Namespace) -> None:
    server = start_server(*disk_flags(folder), memory="4MiB", segment="1MiB")
    keys = make_keys(300)
    with open_client(server, namespace) as client, RawClient(server) as raw:
        fill(client, keys, BLOCK)
        wait_until_written(client)
        raw.hello()
        damaged = keys[10:15]
        for key in damaged:
            damage_one_block(folder, block_of(key, BLOCK))
        before = disk_info(client)
        assert before.scrub_passes == 0 and before.scrubbed_blocks == 0
        reply = raw.ask(pack(SCRUB, 5, 1000))
        assert reply[:2] == [SCRUB_REPLY, 5] and reply[2] >= 1
        wait_until(lambda: disk_info(client).scrub_passes >= reply[2])
        info = disk_info(client)
        assert info.scrubbed_blocks == 300 and info.scrub_corrupt_blocks == 5
        assert not client.contains(damaged).any() and client.contains(keys).sum() == 295
        stays(
            lambda: disk_info(client).scrub_passes == info.scrub_passes, 1.5, "one pass was asked for, and one is made"
        )


def test_scrub_without_a_disk_reports_that(start_server: StartServer) -> None:
    with RawClient(start_server()) as raw:
        raw.hello()
        assert raw.ask(pack(SCRUB, 5, 1000)) == [SCRUB_REPLY, 5, 0]


# ---- other file systems --------------------------------------------------------------------------------------------


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "tmpfs"
    if not mount_tmpfs(place, "96m"):
        pytest.skip("no right to mount a tmpfs")
    yield place
    unmount(place)


def test_a_small_tmpfs_works_like_any_disk(start_server: StartServer, tmpfs: Path, namespace: Namespace) -> None:
    server = start_server(*disk_flags(tmpfs, "90MiB"), memory="8MiB", segment="1MiB")
    keys = make_keys(2000)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        info = wait_until_written(client)
        assert info.state == "on" and info.evicted > 0
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        assert wait_until_on(client).recovered_blocks > 500
        assert sum(read(client, keys, BLOCK)) > 500
    server.kill()


def test_a_file_system_without_direct_io_works(start_server: StartServer, namespace: Namespace) -> None:
    place = Path("/dev/shm") / f"kvstore-test-{os.getpid()}"
    place.mkdir()
    try:
        server = start_server(*disk_flags(place, "64MiB"), memory="8MiB", segment="1MiB")
        keys = make_keys(500)
        with open_client(server, namespace) as client:
            fill(client, keys, BLOCK)
            wait_until_written(client)
            assert all(read(client, keys, BLOCK))
        server.kill()
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)


def test_memory_of_a_server_with_a_disk_tier_is_bounded(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="16MiB", segment="1MiB")
    with open_client(server, namespace) as client:
        fill(client, make_keys(1500), BLOCK)
        read(client, make_keys(1500), BLOCK)
        assert shard_info(client).memory_used_bytes <= 16 * MiB
    (shard,) = server.shards()
    assert rss_bytes(shard.pid) <= 16 * MiB + OVERHEAD_BYTES
    assert rss_bytes(keeper_of(shard).pid) <= OVERHEAD_BYTES


def test_info_without_a_disk_tier_says_so(start_server: StartServer, namespace: Namespace) -> None:
    server: Server = start_server()
    with KVStoreClient(server.endpoint, namespace) as client:
        assert shard_info(client).disk is None


def test_a_hit_after_a_long_run_of_misses_is_found_at_once(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="16MiB", segment="1MiB")
    keys = make_keys(620)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys[600:], BLOCK)
        wait_until_written(client)
        began = time.monotonic()
        assert read(client, keys, BLOCK) == [False] * 600 + [True] * 20
        assert time.monotonic() - began < 10, "it did not wait for blocks that nobody brings"
