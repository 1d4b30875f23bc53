"""Disks that fill up, fail, turn read-only or vanish under a server with clients: the shard continues to serve from
memory."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client import KVStoreClient, Namespace
from tests.support import forked
from tests.support.clock import Clock
from tests.support.disk import (
    BLOCK,
    KiB,
    MiB,
    allocated_bytes,
    compile_io_errors,
    disk_flags,
    disk_info,
    fill,
    held_by,
    io_errors_in,
    keeper_of,
    mount_tmpfs,
    open_client,
    read,
    unmount,
    wait_until_durable,
    wait_until_off,
    wait_until_on,
    wait_until_out_of_space,
    wait_until_written,
)
from tests.support.harness import (
    MakeNamespace,
    MemoryWatch,
    Server,
    StartServer,
    alive,
    block_of,
    blocks_of,
    environment,
    make_keys,
    wait_until,
)

LRU = ("--policy", "lru")  # so that the most recent blocks stay in the small memory
MEMORY = 16 * MiB


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "tmpfs"
    if not mount_tmpfs(place, "64m"):
        pytest.skip("no right to mount a tmpfs")
    yield place
    unmount(place)


class Load:
    """Two clients that set, read, replace and delete blocks all the time. No call may fail, and no byte may be
    wrong."""

    def __init__(self, server: Server, namespace: Namespace) -> None:
        self._server, self._namespace = server, namespace
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self.hits = 0
        self.versions = [dict.fromkeys(make_keys(600, first=10_000 * number), 0) for number in (1, 2)]
        self.rounds = [0, 0]
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(2)]

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        versions = self.versions[number]
        keys = list(versions)
        try:
            with open_client(self._server, self._namespace) as client:
                while not self._stop.wait(0.003):
                    some = rng.sample(keys, 12)
                    kind = rng.random()
                    if kind < 0.5:
                        blocks = [block_of(key, BLOCK, versions[key]) for key in some]
                        assert client.set(some, blocks).error == 0
                    elif kind < 0.6:
                        result = client.set(some, blocks_of(some, BLOCK, 1), force=True)
                        assert result.error == 0
                        if result.existed == 0:
                            versions.update(dict.fromkeys(some, 1))
                        else:  # some blocks were left unchanged, and it is unknown which
                            client.delete(some)
                    elif kind < 0.65:
                        client.delete(some)
                        versions.update(dict.fromkeys(some, 0))
                    else:
                        for key, block in zip(some, client.get(some).blocks, strict=True):
                            if block is not None:
                                self.hits += 1
                                assert bytes(block) == block_of(key, BLOCK, versions[key])
                    self.rounds[number] += 1
        except BaseException as error:
            self._failures.append(error)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.goes_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(40)
        assert not self._failures, self._failures[0]

    def goes_on(self) -> None:
        """Wait until both clients have made progress and had hits."""
        before, hits = list(self.rounds), self.hits
        wait_until(
            lambda: (
                self._failures
                or (all(now > then + 40 for now, then in zip(self.rounds, before, strict=True)) and self.hits > hits)
            ),
            20,
            "the clients go on",
        )


def error_lines(server: Server) -> list[str]:
    return [line for line in server.log_text().splitlines() if re.search(r" (ERROR|CRITICAL) ", line)]


def assert_off_and_well(server: Server, namespace: Namespace, load: Load, pids: list[int], *reasons: str) -> None:
    """Check that the tier is off and gives the reason once, and that everything else works."""
    with open_client(server, namespace) as client:
        wait_until_off(client)
        assert_well(server, client, load, pids, *reasons)
        assert disk_info(client).state == "off" and disk_info(client).blocks == 0


def assert_out_of_space_and_well(server: Server, namespace: Namespace, load: Load, pids: list[int]) -> None:
    with open_client(server, namespace) as client:
        wait_until_out_of_space(client)
        assert_well(server, client, load, pids, "No space left", "no space left")
        assert disk_info(client).state == "out of space"


def assert_well(server: Server, client: KVStoreClient, load: Load, pids: list[int], *reasons: str) -> None:
    """Check that the log says once why the tier takes no more blocks, and that everything else works."""
    load.goes_on()
    info = disk_info(client)
    assert any(reason in info.reason for reason in reasons), info.reason
    assert info.dirty_blocks == 0 and not info.behind
    keys = make_keys(50, first=90_000)
    # These blocks have a higher priority than those of the load, so the load's blocks displace only each other.
    assert client.set(keys, blocks_of(keys, BLOCK), priority=3, deferred=False).created == 50
    assert all(read(client, keys, BLOCK))
    assert client.contains(keys).all() and client.match_prefix(keys) == 50
    assert client.delete(keys) == 50 and not client.contains(keys).any()
    lines = error_lines(server)
    (line_off,) = (line for line in lines if f" is {info.state}: " in line)
    assert info.reason in line_off
    # Deletes continue, and the deleted blocks must not return: this costs the index, with one log line.
    others = [line for line in lines if line is not line_off and "while the tier cannot write" not in line]
    assert not others and len(lines) <= 2, lines
    assert [shard.pid for shard in server.shards()] == pids and "Traceback" not in server.log_text()


def pids_of(server: Server) -> list[int]:
    return [shard.pid for shard in server.shards()]


# ---- no space ------------------------------------------------------------------------------------------------------


def test_a_file_system_filled_by_others_stops_the_writes(
    start_server: StartServer, tmpfs: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(tmpfs / "disk", "56MiB"), *LRU, memory="16MiB", segment="1MiB")
    pids = pids_of(server)
    with MemoryWatch(server, MEMORY), Load(server, namespace) as load:
        with contextlib.suppress(OSError), (tmpfs / "others").open("wb", buffering=0) as others:
            while True:
                others.write(bytes(4 * KiB))
        assert_out_of_space_and_well(server, namespace, load, pids)
    (tmpfs / "others").unlink(missing_ok=True)
    assert_well_after_a_restart(server, namespace)


def test_a_disk_size_beyond_the_file_system_stops_the_writes(
    start_server: StartServer, tmpfs: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(tmpfs / "disk", "256MiB"), *LRU, memory="16MiB", segment="1MiB")
    pids = pids_of(server)
    with MemoryWatch(server, MEMORY), Load(server, namespace) as load:
        with open_client(server, namespace) as client:
            fill(client, make_keys(1500, first=50_000), BLOCK)
        assert_out_of_space_and_well(server, namespace, load, pids)
    server.kill()


def test_a_full_file_system_at_the_start_is_handled(
    start_server: StartServer, tmpfs: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(tmpfs / "disk", "48MiB"), *LRU, memory="16MiB", segment="1MiB")
    keys = make_keys(300)
    with open_client(server, namespace) as client:
        fill(client, keys, BLOCK)
        wait_until_written(client)
    assert server.stop() == 0
    with contextlib.suppress(OSError), (tmpfs / "others").open("wb", buffering=0) as others:
        while True:
            others.write(bytes(4 * KiB))
    server.restart()
    pids = pids_of(server)
    with MemoryWatch(server, MEMORY), Load(server, namespace) as load, open_client(server, namespace) as client:
        info = wait_until_out_of_space(client)
        assert "No space left" in info.reason or "no space left" in info.reason
        load.goes_on()
    assert pids_of(server) == pids and "Traceback" not in server.log_text()
    (tmpfs / "others").unlink()
    assert_well_after_a_restart(server, namespace)


def assert_well_after_a_restart(server: Server, namespace: Namespace) -> None:
    """Check that the disk tier works again after a restart, now that its disk does."""
    assert server.stop() == 0
    server.restart()
    keys = make_keys(100, first=70_000)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, BLOCK, version=3, force=True)
        wait_until_written(client)
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert all(read(client, keys, BLOCK, version=3))
    server.kill()


@pytest.mark.parametrize("write", ["all", "evicted"])
def test_disks_that_are_full_again_and_again_give_no_wrong_bytes(
    start_server: StartServer,
    folder: Path,
    namespace: Namespace,
    io_errors: Path,
    tmp_path: Path,
    clock: Clock,
    write: str,
) -> None:
    """Two shards with encrypted folders. Clients replace and delete blocks in each state and at each change of it."""
    trigger, key_file = tmp_path / "trigger", tmp_path / "key"
    key_file.write_text("5a" * 32)
    key_file.chmod(0o600)
    flags = (*disk_flags(folder, "64MiB", write=write), "--disk-key-file", str(key_file), "--shards", "2", *LRU)
    environment = {**io_errors_in(folder / "shard-", trigger, io_errors), **clock.environment}
    server = start_server(*flags, memory="32MiB", segment="1MiB", **environment)
    shards = server.shards()
    with open_client(server, namespace) as client:

        def all_are(state: str) -> bool:
            states = {shard.disk.state for shard in client.info().shards if shard.disk is not None}
            assert "off" not in states
            return states == {state}

        wait_until(lambda: all_are("on"))
        before = [held_by(shard) for shard in shards]
        with Load(server, namespace) as load:
            for _ in range(3):
                trigger.write_text("full")
                wait_until(lambda: all_are("out of space"), what="both tiers are out of space")
                load.goes_on()
                trigger.unlink()
                clock.step_until(lambda: all_are("on"), 10.0, 1200.0, "both tiers are on again")
                load.goes_on()
        wait_until(lambda: [held_by(shard) for shard in shards] == before, what=f"as many are held as before: {before}")
        assert pids_of(server) == [shard.pid for shard in shards] and "Traceback" not in server.log_text()
    server.kill()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until(lambda: all_are("on"))
        versions = {key: version for some in load.versions for key, version in some.items()}
        for version in (0, 1):
            read(client, [key for key in versions if versions[key] == version], BLOCK, version)


# ---- errors of the device ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def io_errors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled shim."""
    return compile_io_errors(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize(
    ("place", "calls"),
    [("segments", "read"), ("segments", "write"), ("index", "write"), ("index", "sync"), ("", "all")],
)
def test_a_device_with_errors_turns_the_tier_off(
    start_server: StartServer,
    folder: Path,
    namespace: Namespace,
    io_errors: Path,
    tmp_path: Path,
    place: str,
    calls: str,
) -> None:
    trigger = tmp_path / "trigger"
    shim = io_errors_in(folder / "shard-0" / place, trigger, io_errors)
    server = start_server(*disk_flags(folder), *LRU, memory="16MiB", segment="1MiB", **shim)
    pids = pids_of(server)
    kept = make_keys(200, first=40_000)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, kept, BLOCK)
        wait_until_written(client)
    with MemoryWatch(server, MEMORY), Load(server, namespace) as load:
        trigger.write_text(calls)
        assert_off_and_well(server, namespace, load, pids, "Input/output error", "ended")
    trigger.unlink()
    assert_well_after_a_restart(server, namespace)


def test_blocks_deleted_while_the_tier_is_off_do_not_return(
    start_server: StartServer, folder: Path, namespace: Namespace, io_errors: Path, tmp_path: Path
) -> None:
    trigger = tmp_path / "trigger"
    shim = io_errors_in(folder / "shard-0" / "segments", trigger, io_errors)
    server = start_server(*disk_flags(folder), memory="64MiB", segment="1MiB", **shim)
    keys = make_keys(200)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, BLOCK)
        wait_until_durable(client)
        trigger.write_text("all")
        fill(client, make_keys(10, first=5000), BLOCK)
        wait_until_off(client)
        client.delete(keys[:100])
        result = client.set(keys[100:120], blocks_of(keys[100:120], BLOCK, 1), force=True)
        assert result.error == 0 and result.existed == 0
        server.kill()
    trigger.unlink()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert not client.contains(keys[:100]).any()
        read(client, keys[100:120], BLOCK, version=1)
        fill(client, keys, BLOCK, version=2, force=True)
        wait_until_written(client)
        assert all(read(client, keys, BLOCK, version=2))


def test_errors_during_recovery_turn_the_tier_off(
    start_server: StartServer, folder: Path, namespace: Namespace, io_errors: Path, tmp_path: Path
) -> None:
    trigger = tmp_path / "trigger"
    shim = io_errors_in(folder / "shard-0" / "index", trigger, io_errors)  # including index.new
    server = start_server(*disk_flags(folder), *LRU, memory="16MiB", segment="1MiB", **shim)
    keys = make_keys(100)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, BLOCK)
    assert server.stop() == 0
    trigger.write_text("write")
    server.restart()
    pids = pids_of(server)
    with open_client(server, namespace) as client:
        wait_until_off(client)
        fill(client, keys, BLOCK, version=1, force=True)
        assert all(read(client, keys, BLOCK, version=1))
    assert pids_of(server) == pids and "Traceback" not in server.log_text()
    assert server.stop() == 0
    trigger.unlink()
    server.restart()
    with open_client(server, namespace) as client:
        assert wait_until_on(client).state == "on"


# ---- file systems that change their mind ---------------------------------------------------------------------------


def refusal(*arguments: str) -> str:
    """Return the output of a server that is expected not to start."""
    sizes = ("--memory", "16MiB", "--segment", "1MiB")
    done = forked.run("kvstore", "--port", "0", *sizes, *arguments, env=environment())
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr, done
    return done.stderr


def test_a_read_only_file_system_is_refused_at_the_start(
    start_server: StartServer, tmpfs: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(tmpfs / "disk", "48MiB"), *LRU, memory="16MiB", segment="1MiB")
    with open_client(server, namespace) as client:
        fill(client, make_keys(50), BLOCK)
    assert server.stop() == 0
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    try:
        for place in (tmpfs / "disk", tmpfs / "new"):
            said = refusal(*disk_flags(place, "48MiB"))
            assert "read-only" in said and "mount it writable" in said
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(tmpfs)], check=True)
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert all(read(client, make_keys(50), BLOCK))
    server.kill()


def test_a_file_system_that_turns_read_only_turns_the_tier_off(
    start_server: StartServer, folder: Path, namespace: Namespace, tmp_path: Path
) -> None:
    """An ext4 on a loop device becomes read-only after an error. There is no other way while files are open for
    writing."""
    image, place = tmp_path / "image", tmp_path / "loop"
    place.mkdir()
    mkfs = shutil.which("mkfs.ext4", path=os.environ.get("PATH", "") + ":/sbin:/usr/sbin")
    if os.geteuid() != 0 or mkfs is None:
        pytest.skip("no right to mount, or no mkfs.ext4")
    with image.open("wb") as opened:
        opened.truncate(128 * MiB)
    subprocess.run([mkfs, "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=False, capture_output=True).returncode:
        pytest.skip("no loop devices here")
    try:
        server = start_server(*disk_flags(place, "96MiB"), *LRU, memory="16MiB", segment="1MiB")
        pids = pids_of(server)
        with MemoryWatch(server, MEMORY), Load(server, namespace) as load:
            source = subprocess.run(
                ["findmnt", "-no", "SOURCE", str(place)], check=True, capture_output=True, text=True
            )
            device = source.stdout.strip().removeprefix("/dev/")
            trigger = Path(f"/sys/fs/ext4/{device}/trigger_fs_error")
            if not trigger.exists():
                pytest.skip("this kernel cannot make a file system fail")
            subprocess.run(["mount", "-o", "remount,errors=remount-ro", str(place)], check=True)
            trigger.write_text("the test")
            assert_off_and_well(server, namespace, load, pids, "Read-only", "read-only", "Input/output", "ended")
        server.kill()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_removed_folder_turns_the_tier_off(start_server: StartServer, folder: Path, namespace: Namespace) -> None:
    server = start_server(*disk_flags(folder), *LRU, memory="16MiB", segment="1MiB")
    pids = pids_of(server)
    with MemoryWatch(server, MEMORY), Load(server, namespace) as load:
        while folder.exists():
            with contextlib.suppress(OSError):  # the server makes files while they are removed
                shutil.rmtree(folder)
        load.goes_on()
        with open_client(server, namespace) as client:
            fill(client, make_keys(5000, first=200_000), BLOCK)  # this needs new files
            info = wait_until_off(client)
            assert "No such file" in info.reason
        load.goes_on()
    assert pids_of(server) == pids and "Traceback" not in server.log_text()
    assert_well_after_a_restart(server, namespace)


# ---- the keeper ----------------------------------------------------------------------------------------------------


def test_a_killed_keeper_turns_the_tier_off(start_server: StartServer, folder: Path, namespace: Namespace) -> None:
    server = start_server(*disk_flags(folder), *LRU, memory="16MiB", segment="1MiB")
    pids = pids_of(server)
    with MemoryWatch(server, MEMORY), Load(server, namespace) as load:
        (shard,) = server.shards()
        keeper = keeper_of(shard)
        keeper.kill()
        wait_until(lambda: not alive(keeper))
        assert_off_and_well(server, namespace, load, pids, "SIGKILL", "hung up")
        assert not shard.children()
    assert_well_after_a_restart(server, namespace)


def test_a_keeper_killed_during_recovery_is_replaced(
    start_server: StartServer, folder: Path, new_namespace: MakeNamespace
) -> None:
    namespace, keys = new_namespace(64), make_keys(100_000)
    server = start_server(*disk_flags(folder), memory="64MiB", segment="1MiB")
    with open_client(server, namespace) as client:
        fill(client, keys, 64)
    assert server.stop() == 0
    for number in range(1, 11):  # until the keeper is killed early enough: one killed later has reported more entries
        server.restart()
        (shard,) = server.shards()
        keeper = wait_until(lambda shard=shard: next(iter(shard.children()), None))
        time.sleep(0.05 / number)
        keeper.kill()
        with open_client(server, namespace) as client:
            if wait_until(lambda: (state := disk_info(client).state) != "recovering" and state) == "on":
                break
        assert server.stop() == 0
    with open_client(server, namespace) as client:
        wait_until_on(client)
        before = sum(read(client, keys[::50], 64))
        fill(client, make_keys(100, first=500_000), 64)
        wait_until_written(client)
    assert "Traceback" not in server.log_text() and shard.pid in pids_of(server)
    assert server.stop() == 0
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert sum(read(client, keys[::50], 64)) == before
        assert all(read(client, make_keys(100, first=500_000), 64))


def test_deletes_acknowledged_around_the_death_of_the_keeper_hold(
    start_server: StartServer, folder: Path, namespace: Namespace
) -> None:
    server = start_server(*disk_flags(folder), memory="64MiB", segment="1MiB")
    keys = make_keys(400)
    with open_client(server, namespace) as client:
        wait_until_on(client)
        fill(client, keys, BLOCK)
        wait_until_durable(client)
        (shard,) = server.shards()
        deleted: list[bytes] = []

        def delete_on() -> None:
            with open_client(server, namespace) as other:
                for at in range(0, 200, 4):
                    assert other.delete(keys[at : at + 4]) == 4
                    deleted.extend(keys[at : at + 4])

        deleting = threading.Thread(target=delete_on)
        deleting.start()
        wait_until(lambda: len(deleted) >= 40)
        keeper_of(shard).kill()
        deleting.join(20)
        assert len(deleted) == 200
        server.kill()
    server.restart()
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert not client.contains(deleted).any()
        read(client, keys, BLOCK)
    assert allocated_bytes(folder) <= 256 * MiB
