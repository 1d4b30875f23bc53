"""A disk tier on a file system that other programs fill: it serves its blocks, and writes again when there is room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.disk.room import LOOK_S, MAX_LOOK_S
from kvstore_client import KVStoreClient, Namespace
from tests.support.clock import Clock
from tests.support.disk import (
    BLOCK,
    KiB,
    compile_io_errors,
    disk_flags,
    disk_info,
    fill,
    held_by,
    index_file,
    io_errors_in,
    mount_tmpfs,
    open_client,
    read,
    unmount,
    wait_until_durable,
    wait_until_on,
    wait_until_out_of_space,
    wait_until_written,
)
from tests.support.harness import (
    MakeNamespace,
    Server,
    StartServer,
    blocks_of,
    make_keys,
    shard_info,
    stays,
    wait_until,
)

STEP_S = 10.0  # a longer step of the clock would look like a disk that hangs
SOON_S = 4 * LOOK_S  # a tier that was full once or twice is on again within this time after there is room


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    if not mount_tmpfs(place, "64m"):
        pytest.skip("no right to mount a tmpfs")
    yield place
    unmount(place)


class FullDisk:
    """A server with a disk tier of 48 MiB on a file system of 64 MiB, and a file that fills the file system."""

    def __init__(self, start_server: StartServer, place: Path, clock: Clock, *flags: str) -> None:
        self.clock = clock
        self.others = place / "others"
        self.folder = place / "disk"
        flags = (*disk_flags(self.folder, "48MiB"), "--policy", "lru", *flags)
        self.server: Server = start_server(*flags, memory="16MiB", segment="1MiB", **clock.environment)

    def fill(self) -> None:
        """Let another program take all space that is left."""
        with contextlib.suppress(OSError), self.others.open("ab", buffering=0) as opened:
            while True:
                opened.write(bytes(4 * KiB))

    def run_out(self, client: KVStoreClient, first: int = 80_000) -> wire.DiskInfo:
        """Fill the file system, and set blocks until the tier notices."""
        self.fill()
        fill(client, make_keys(200, first=first), BLOCK)
        return wait_until_out_of_space(client)

    def free(self, client: KVStoreClient) -> None:
        """Make room, and wait until the tier is on again."""
        self.others.unlink()
        self.wait_until_on_again(client)

    def wait_until_on_again(self, client: KVStoreClient, most_s: float = SOON_S) -> None:
        self.clock.step_until(lambda: disk_info(client).state == "on", STEP_S, most_s, "the tier is on again")


@pytest.fixture
def full_disk(start_server: StartServer, small_disk: Path, clock: Clock) -> FullDisk:
    return FullDisk(start_server, small_disk, clock)


def lines_of(server: Server, text: str) -> list[str]:
    return [line for line in server.log_text().splitlines() if text in line]


def test_a_full_tier_serves_its_blocks_and_writes_again_when_there_is_room(
    full_disk: FullDisk, namespace: Namespace
) -> None:
    server = full_disk.server
    old, meanwhile, new = make_keys(280), make_keys(200, first=80_000), make_keys(100, first=5000)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, old, BLOCK)
    assert server.stop() == 0
    server.restart()  # so that the old blocks are not among those whose use must still be recorded
    with open_client(server, namespace) as client:
        wait_until_on(client)
        info = full_disk.run_out(client)
        assert "No space left" in info.reason or "no space left" in info.reason
        assert info.blocks >= 280 and not info.behind
        # Memory has room for 256 blocks, and the 200 set last are in it. So most old blocks are read from disk.
        assert all(read(client, old[::7], BLOCK)) and disk_info(client).fetched_blocks > info.fetched_blocks + 20
        (line,) = lines_of(server, " ERROR ")
        assert f"disk tier {full_disk.folder}/shard-0 is out of space: {info.reason}; its blocks are served" in line

        kept = [key for key, there in zip(meanwhile, client.contains(meanwhile), strict=True) if there]
        assert len(kept) > 100
        full_disk.free(client)
        info = disk_info(client)
        assert info.reason == "" and info.blocks >= 280
        (line,) = lines_of(server, " WARNING ")
        assert f"disk tier {full_disk.folder}/shard-0 is on again: " in line
        wait_until(lambda: disk_info(client).blocks == 280 + len(kept), what="what is in memory is written, too")
        fill(client, new, BLOCK)
        wait_until_durable(client)
    server.kill()  # not a clean stop, so only blocks and entries that were written by themselves are there afterwards
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert all(read(client, old, BLOCK)) and all(read(client, kept, BLOCK)) and all(read(client, new, BLOCK))


def test_blocks_removed_while_the_tier_is_full_do_not_come_back(full_disk: FullDisk, namespace: Namespace) -> None:
    server, clock = full_disk.server, full_disk.clock
    keys = make_keys(280)
    deleted, replaced, expiring, kept = keys[:40], keys[40:80], keys[80:120], keys[120:]

    def check(client: KVStoreClient) -> None:
        assert not client.contains(deleted).any() and not client.contains(expiring).any()
        assert not any(read(client, deleted, BLOCK)) and not any(read(client, expiring, BLOCK))
        read(client, replaced, BLOCK, version=1)

    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, BLOCK)
        wait_until_durable(client)
        full_disk.run_out(client)
        assert client.delete(deleted) == 40
        assert client.set(replaced, blocks_of(replaced, BLOCK, 1), force=True).error == 0
        assert client.expire(expiring, ttl_s=30.0).all()
        clock.advance(31)
        check(client)
        fill(client, make_keys(256, first=20_000), BLOCK)  # so that only the disk could have the removed blocks
        check(client)
        full_disk.free(client)
        check(client)
        assert all(read(client, kept, BLOCK))
        wait_until_durable(client)
    server.kill()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        check(client)
        assert all(read(client, kept, BLOCK))


@pytest.mark.parametrize("removal", ["delete", "replace", "expire"])
def test_removals_hold_if_the_server_restarts_while_the_disk_is_full(
    full_disk: FullDisk, namespace: Namespace, removal: str
) -> None:
    server, clock = full_disk.server, full_disk.clock
    keys = make_keys(200)
    some = keys[-40:]
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, BLOCK)
        full_disk.run_out(client)
        client.delete(make_keys(10, first=80_000))
        full_disk.free(client)  # the second time must be like the first one
        wait_until_durable(client)
        assert index_file(full_disk.folder).exists()
        full_disk.run_out(client, first=40_000)
        assert all(read(client, keys, BLOCK))  # the last of them are then in memory, too
        assert index_file(full_disk.folder).exists()
        if removal == "delete":
            assert client.delete(some) == 40
        elif removal == "replace":
            fill(client, some, BLOCK, version=1, force=True)
        else:
            assert client.expire(some, ttl_s=30.0).all()
            wait_until(lambda: not index_file(full_disk.folder).exists())
            clock.advance(31)
        assert not index_file(full_disk.folder).exists()
        server.kill()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until(lambda: disk_info(client).state != "recovering")
        assert not client.contains(keys).any()
        fill(client, some, BLOCK, version=2)
        full_disk.others.unlink()
        full_disk.wait_until_on_again(client)
        assert all(read(client, some, BLOCK, version=2))


def test_a_purge_while_the_tier_is_full_holds(full_disk: FullDisk, namespace: Namespace) -> None:
    server = full_disk.server
    keys, new = make_keys(280), make_keys(50, first=5000)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, BLOCK)
        wait_until_durable(client)
        full_disk.run_out(client)
        client.delete(keys[:1])  # removes the index, so that there is space again
        full_disk.fill()
        assert client.purge() >= 279
        assert lines_of(server, "generations of namespaces cannot be written")
        assert not client.contains(keys).any() and disk_info(client).blocks == 0
        full_disk.free(client)
        assert not client.contains(keys).any()
        fill(client, new, BLOCK)
        wait_until_durable(client)
        generation = shard_info(client).generation
    server.kill()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert not client.contains(keys).any() and all(read(client, new, BLOCK))
        assert shard_info(client).generation == generation > 0


def test_a_disk_that_is_full_at_the_start_keeps_its_blocks(
    start_server: StartServer, folder: Path, namespace: Namespace, clock: Clock, tmp_path: Path
) -> None:
    """Not even the number of the process, or an empty index, can be written."""
    library, trigger, keys = compile_io_errors(tmp_path), tmp_path / "trigger", make_keys(200)
    shim = io_errors_in(folder / "shard-0", trigger, library)
    server = start_server(*disk_flags(folder), **{**shim, **clock.environment})
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, BLOCK)
        wait_until_durable(client)
    assert server.stop() == 0
    trigger.write_text("full")
    server.restart()
    with open_client(server, namespace) as client:
        client.delete(keys[:20])
        info = wait_until_out_of_space(client)
        assert info.blocks == 180 and all(read(client, keys[20:], BLOCK))
        trigger.unlink()
        clock.step_until(lambda: disk_info(client).state == "on", STEP_S, SOON_S, "the tier is on again")
        wait_until_durable(client)
    server.kill()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert not client.contains(keys[:20]).any() and all(read(client, keys[20:], BLOCK))


def test_a_disk_that_is_full_at_the_start_keeps_the_blocks_of_a_large_index(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace, clock: Clock, tmp_path: Path
) -> None:
    """The second keeper fails before recovery has ended. The server stops before the third one has all entries."""
    library, trigger, keys = compile_io_errors(tmp_path), tmp_path / "trigger", make_keys(300_000)
    namespace = new_namespace(64)
    shim = io_errors_in(folder / "shard-0", trigger, library)
    server = start_server(*disk_flags(folder, "1GiB"), **{**shim, **clock.environment})
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, 64)
    assert server.stop() == 0
    trigger.write_text("full")
    server.restart()
    with open_client(server, namespace) as client:
        client.delete(keys[:1000])
        assert wait_until_out_of_space(client).blocks == len(keys) - 1000
        assert all(read(client, keys[1000::100], 64))
        trigger.unlink()
        clock.step_until(lambda: disk_info(client).state == "on", STEP_S, SOON_S, "the tier is on again")
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        assert wait_until_on(client).recovered_blocks == len(keys) - 1000
        assert not client.contains(keys[:1000]).any() and all(read(client, keys[1000::100], 64))


def test_a_clean_stop_while_the_tier_is_full_or_has_just_come_back(full_disk: FullDisk, namespace: Namespace) -> None:
    server = full_disk.server
    keys = make_keys(280)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, BLOCK)
        wait_until_durable(client)
        full_disk.run_out(client)
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        wait_until(lambda: disk_info(client).state != "recovering")
        assert all(read(client, keys, BLOCK))
        full_disk.run_out(client, first=40_000)
        full_disk.free(client)
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert all(read(client, keys, BLOCK)) and "Traceback" not in server.log_text()


def test_a_disk_that_fills_up_again_and_again_leaks_nothing(full_disk: FullDisk, namespace: Namespace) -> None:
    server = full_disk.server
    (shard,) = server.shards()
    keys = make_keys(200)

    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, BLOCK)
        before = held_by(shard)
        for turn in range(3):
            full_disk.run_out(client, first=10_000 * (turn + 1))
            client.delete(keys[turn * 10 : turn * 10 + 10])
            assert not shard.children()
            full_disk.others.unlink()
            full_disk.wait_until_on_again(client, MAX_LOOK_S)
            wait_until_written(client)
        wait_until(lambda: held_by(shard) == before, what=f"descriptors, threads and keepers are as before: {before}")
        assert not client.contains(keys[:30]).any()
        read(client, keys, BLOCK)
    full, again = (
        [datetime.fromisoformat(line.split()[0]).timestamp() for line in lines_of(server, text)]
        for text in (" is out of space: ", " is on again: ")
    )
    waits_s = [end - begin for begin, end in zip(full, again, strict=True)]
    # Each time the disk is full again soon after it had room, so the server waits twice as long before it looks.
    assert [round(wait_s / LOOK_S) for wait_s in waits_s] == [1, 2, 4], waits_s


def test_a_used_up_quota_is_noticed_although_the_file_system_has_room(
    start_server: StartServer, small_disk: Path, namespace: Namespace, clock: Clock, tmp_path: Path
) -> None:
    """No file can be made, although statvfs shows room."""
    library, trigger = compile_io_errors(tmp_path), tmp_path / "trigger"
    shim = io_errors_in(small_disk / "disk" / "shard-0" / "segments", trigger, library)
    server = start_server(*disk_flags(small_disk / "disk", "48MiB"), **{**shim, **clock.environment})
    with open_client(server, namespace) as client:
        wait_until_on(client)
        trigger.write_text("full")
        fill(client, make_keys(200), BLOCK)
        wait_until_out_of_space(client)
        for _ in range(round(3 * LOOK_S / STEP_S)):
            clock.advance(STEP_S)
            stays(lambda: disk_info(client).state == "out of space", 0.3)
        trigger.unlink()
        clock.step_until(lambda: disk_info(client).state == "on", STEP_S, SOON_S, "the tier is on again")
        assert len(lines_of(server, " is on again: ")) == 1
