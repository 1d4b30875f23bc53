"""A server that is killed at random instants, and files whose bytes change: every read gets the right bytes or misses.

A writer in a process of its own sets, replaces and deletes blocks whose bytes contain their key and version. It notes
every operation in a journal, before the operation begins and after it was acknowledged. The journal shows which
versions of a key a restarted server may serve:

* the version of the last acknowledged forced set, and all versions set since then, or since the last acknowledged
  delete; also if the operation was not acknowledged;
* no others. After a kill the block may be missing; after a clean stop an acknowledged block must be there.

All rounds use one folder, so damage would accumulate. `KVSTORE_TORTURE_ROUNDS` and `KVSTORE_FLIP_TRIALS` set the number
of rounds and of changed bytes. With the `KVSTORE_TORTURE_SEED` of an earlier run, the same choices are made; timing may
still differ.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvstore_client import KVStoreClient
from tests.chaos.torture_writer import SHAPES, namespaces, torture_block
from tests.chaos.worker import soak
from tests.support import forked
from tests.support.disk import (
    KiB,
    MiB,
    allocated_bytes,
    disk_flags,
    disk_info,
    fill,
    flip,
    index_file,
    open_client,
    read,
    segment_files,
    wait_until_durable,
    wait_until_on,
    wait_until_written,
)
from tests.support.harness import (
    STOP_S,
    MakeNamespace,
    MemoryWatch,
    Server,
    StartServer,
    alive,
    environment,
    make_keys,
    make_namespace,
    wait_until,
)

ROUNDS = int(os.environ.get("KVSTORE_TORTURE_ROUNDS", "4"))
ENCRYPTED_ROUNDS = int(os.environ.get("KVSTORE_TORTURE_ROUNDS", "2"))
AT_LENGTH = "KVSTORE_TORTURE_ROUNDS" in os.environ
WAITS_S = [0.02, 0.3, 1.0, 2.5] if AT_LENGTH else [0.02, 0.1, 0.3, 0.8]  # the latest time at which a server is killed
SOAK_S = 3.0 if AT_LENGTH else 1.0
FLIPS = int(os.environ.get("KVSTORE_FLIP_TRIALS", "20"))
SEED = int(os.environ.get("KVSTORE_TORTURE_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)

FLIPS_A_START = 25


# ---- what may be served --------------------------------------------------------------------------------------------


@dataclass
class Model:
    """What the journal says about every block."""

    allowed: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # (size, number of key) -> versions
    must: set[tuple[int, int]] = field(default_factory=set)  # acknowledged, and not deleted
    version: int = 0
    read_bytes: int = 0

    def take(self, journal: Path) -> set[tuple[int, int]]:
        """Read the lines added to the journal since the last call. Returns the blocks that they mention."""
        with journal.open("rb") as opened:
            opened.seek(self.read_bytes)
            lines = opened.read().splitlines(keepends=True)
        begun: dict[int, tuple[str, list[tuple[int, int]]]] = {}
        touched: set[tuple[int, int]] = set()
        for line in lines:
            self.read_bytes += len(line)
            assert line.endswith(b"\n")
            what, version, *rest = json.loads(line)
            if what == "begin":
                kind, size, numbers = rest
                blocks = [(size, number) for number in numbers]
                touched.update(blocks)
                begun[version] = (kind, blocks)
                self.version = version
                if kind == "delete":
                    self.must.difference_update(blocks)
                else:
                    for block in blocks:
                        self.allowed.setdefault(block, set()).add(version)
                continue
            kind, blocks = begun[version]
            if what == "partly":
                continue
            if kind != "set":
                for block in blocks:
                    self.allowed[block] = {version} if kind == "force" else set()
            if kind != "delete":
                self.must.update(blocks)
        return touched

    def check(self, server: Server, clean: bool) -> str:
        """Read every block. Returns a text with the numbers of blocks that are served, lost although acknowledged, and
        damaged."""
        served: set[tuple[int, int]] = set()
        damaged = 0
        for size, namespace in namespaces().items():
            keys = make_keys(SHAPES[size])
            with open_client(server, namespace) as client:
                wait_until_on(client)
                present = client.contains(keys)
                for at in range(0, len(keys), 100):
                    for number, block in enumerate(client.get(keys[at : at + 100]).blocks, start=at):
                        if block is None:
                            continue
                        version = int.from_bytes(block[:8], "little")
                        name = f"block {number} of {size} bytes, version {version}"
                        assert version in self.allowed.get((size, number), set()), (
                            f"{name} is served, allowed are {sorted(self.allowed.get((size, number), set()))}"
                        )
                        assert bytes(block) == torture_block(keys[number], size, version), f"wrong bytes: {name}"
                        assert present[number], f"{name} came out of nowhere"
                        served.add((size, number))
                damaged = disk_info(client).corrupt_blocks
        lost = self.must - served
        self.must = served  # from here on, a clean stop must not lose these
        if clean:
            assert not lost, f"{len(lost)} of {len(lost | served)} lost by a clean stop, among them {sorted(lost)[:5]}"
        return f"{len(served)} served, {len(lost)} lost, {damaged} damaged"


def kill_all(server: Server, rng: random.Random) -> None:
    """Send SIGKILL to every process of a server, in a random order."""
    supervisor = psutil.Process(server.process.pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    rng.shuffle(processes)
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    wait_until(lambda: not any(alive(process) for process in processes), STOP_S)
    server.kill()


@pytest.mark.timeout(180 + 20 * ROUNDS)
@pytest.mark.parametrize(
    ("disk_size", "encrypted", "rounds"),
    [
        ("512MiB", False, ROUNDS),  # room for everything
        ("12MiB", False, ROUNDS),  # room for less than half
        ("512MiB", True, ENCRYPTED_ROUNDS),
    ],
)
def test_a_server_killed_at_any_instant_serves_nothing_wrong(
    start_server: StartServer, tmp_path: Path, disk_size: str, encrypted: bool, rounds: int
) -> None:
    print(f"KVSTORE_TORTURE_SEED={SEED}")
    rng = random.Random(SEED)
    folder, journal, model = tmp_path / "disk", tmp_path / "journal", Model()
    journal.touch()
    key = []
    if encrypted:
        key_file = tmp_path / "key"
        key_file.write_text(rng.randbytes(32).hex())
        key_file.chmod(0o600)
        key = ["--disk-key-file", str(key_file)]
    clean = False
    for number in range(rounds + 1):
        policy, how = rng.choice(["lru", "default"]), rng.choice(["all", "all", "reused", "evicted"])
        flags = disk_flags(folder, disk_size, "--policy", policy, *key, write=how)
        server = start_server(*flags, memory=f"{rng.choice([8, 16, 64])}MiB", segment="1MiB")
        at_once = rng.random() < 0.3  # the writer begins during recovery
        if not at_once or number == rounds:
            print(f"round {number}: {'clean' if clean else 'killed'}, {model.check(server, clean)}")
            if number == rounds:
                break
        elif not clean:
            model.must.clear()  # the blocks lost by the kill are unknown
        told = (server.endpoint, str(journal), str(rng.randrange(1 << 32)), str(model.version))
        with open(os.devnull, "r+b") as nothing:
            writer = forked.start(
                "tests.chaos.torture_writer", told, stdin=nothing, stdout=nothing, stderr=nothing, env=environment()
            )
        try:
            wait_until(lambda: journal.stat().st_size > model.read_bytes, what="the writer writes")
            time.sleep(rng.choice(WAITS_S) * rng.random())
            clean = rng.random() < 0.25
            if clean:
                assert server.stop() == 0
            else:
                kill_all(server, rng)
            writer.wait(30)
        finally:
            writer.kill()
            writer.wait()
        touched = model.take(journal)
        if how != "all":
            model.must -= touched  # blocks without room in memory may be gone
        if disk_size != "512MiB":
            model.must.clear()
        assert "Traceback" not in server.log_text(), server.log_text()[-3000:]


# ---- clients that get in each other's way ---------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "write"), [("default", "all"), ("default", "evicted"), ("lru", "reused")])
def test_clients_of_shared_blocks_find_no_wrong_byte(
    start_server: StartServer, tmp_path: Path, policy: str, write: str
) -> None:
    folder = tmp_path / "disk"
    flags = disk_flags(folder, "64MiB", "--policy", policy, "--scrub-mbps", "50", write=write)
    server = start_server(*flags, memory="16MiB", segment="1MiB")  # of 125 MiB that the clients use
    with server.unharmed(), MemoryWatch(server, 16 * MiB):
        for hits in (counts["hits"] for counts in soak(server, workers=3, seconds=SOAK_S)):
            assert hits > 0
        with open_client(server, make_namespace(64 * KiB, "soak")) as reader:
            info = disk_info(reader)
            assert info.state == "on" and info.corrupt_blocks == 0 and info.written_blocks > 0
    assert allocated_bytes(folder) <= 64 * MiB
    assert server.stop() == 0


# ---- bytes that change ---------------------------------------------------------------------------------------------


class Victim:
    """A folder with the blocks of two namespaces, which one server after another uses."""

    def __init__(self, start_server: StartServer, folder: Path, new_namespace: MakeNamespace) -> None:
        self.folder = folder
        self.sets = [(new_namespace(size), make_keys(count), size) for size, count in ((4096, 1000), (1000, 1000))]
        self.server = start_server(*disk_flags(folder, "64MiB"), memory="8MiB", segment="1MiB")
        self.refill()
        assert self.server.stop() == 0

    def clients(self) -> Iterator[tuple[KVStoreClient, Sequence[bytes], int]]:
        for namespace, keys, size in self.sets:
            with open_client(self.server, namespace) as client:
                wait_until_on(client)
                yield client, keys, size

    def refill(self) -> None:
        """Set all blocks, and wait until they are on disk."""
        for client, keys, size in self.clients():
            there = client.contains(keys)
            fill(client, [key for key, present in zip(keys, there, strict=True) if not present], size)
            wait_until_written(client)

    def check(self) -> tuple[int, int]:
        """Start the server and read all blocks: each is right or a miss, and the shard survives. Returns the number of
        misses, and of damaged blocks that the shard counted."""
        before = len(self.server.log_text())
        self.server.restart()
        pids = [shard.pid for shard in self.server.shards()]
        misses = damaged = 0
        for client, keys, size in self.clients():
            misses += len(keys) - sum(read(client, keys, size))
            damaged = disk_info(client).corrupt_blocks
        assert [shard.pid for shard in self.server.shards()] == pids
        text = self.server.log_text()[before:]
        assert "Traceback" not in text and "died" not in text, text[-3000:]
        return misses, damaged


@pytest.mark.timeout(120 + FLIPS)
def test_a_changed_byte_of_a_segment_is_a_miss(
    start_server: StartServer, tmp_path: Path, new_namespace: MakeNamespace
) -> None:
    print(f"KVSTORE_TORTURE_SEED={SEED}")
    rng = random.Random(SEED)
    victim = Victim(start_server, tmp_path / "disk", new_namespace)
    trials = hits = 0
    while trials < FLIPS - FLIPS // 2:
        count = min(FLIPS_A_START, FLIPS - FLIPS // 2 - trials)
        places = set()
        while len(places) < count:  # at most one change in each block, so that each is a separate trial
            path = rng.choice(segment_files(victim.folder))
            places.add((path, rng.randrange(path.stat().st_size // 4096)))
        for path, page in places:
            flip(path, page * 4096 + rng.randrange(4096), 1 << rng.randrange(8))
        trials += count
        misses, damaged = victim.check()
        assert misses <= count
        assert damaged == misses, f"{damaged} damaged blocks counted, {misses} misses"
        hits += misses
        victim.refill()
        assert victim.server.stop() == 0
    print(f"{trials} bytes of segments changed: {hits} blocks were misses")
    assert hits >= trials // 10, "most bytes of the files are bytes of blocks"


@pytest.mark.timeout(120 + 5 * FLIPS)
def test_a_changed_byte_of_the_index_costs_only_blocks(
    start_server: StartServer, tmp_path: Path, new_namespace: MakeNamespace
) -> None:
    print(f"KVSTORE_TORTURE_SEED={SEED}")
    rng = random.Random(SEED)
    victim = Victim(start_server, tmp_path / "disk", new_namespace)
    path = index_file(victim.folder)
    missing = []
    for trial in range(FLIPS // 2):
        data = np.fromfile(path, dtype=np.uint8)
        # Half of the file is unused pages; every other trial takes a byte that is in use.
        some = np.flatnonzero(data) if trial % 2 else np.arange(len(data))
        at = int(some[rng.randrange(len(some))])
        mask = 1 << rng.randrange(8)
        print(f"trial {trial}: byte {at} of {len(data)}, mask {mask}", end="")
        flip(path, at, mask)
        misses, damaged = victim.check()
        print(f": {misses} misses, {damaged} damaged")
        missing.append(misses)
        victim.refill()
        if rng.random() < 0.5:
            assert victim.server.stop() == 0
        else:
            for client, _, _ in victim.clients():
                wait_until_durable(client)
            victim.server.kill()
    print(f"{len(missing)} bytes of the index changed: misses {sorted(missing)}")
