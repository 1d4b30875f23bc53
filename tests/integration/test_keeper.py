"""The keeper of the persistent index, as a real child process on a real disk. It is killed, stopped, and given damaged
files.

An entry follows from its key and a version, so every recovered entry shows whether it was ever put. Operations follow
from a seed, so a recovered index shows the operation after which it was committed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from kvstore.disk import keeper
from kvstore.disk.entries import ENTRY
from kvstore.disk.format import lock_shard
from kvstore.disk.keeper import MAX_INDEXED_NAMESPACES, TooManyNamespaces, read_index
from kvstore.disk.messages import Committed, Event, IndexedNamespace, KeeperFailed, Recovered, RecoveryDone
from tests.support import forked, forked_children
from tests.support.harness import alive, environment, make_keys, wait_until
from tests.support.keeper_loop import DEADLINE_S, NAMESPACES, Loop, State, apply_operation, entries_of, run_operations

AT_LENGTH = "KVSTORE_FLIP_TRIALS" in os.environ  # set by `make torture`
KILLS = 40 if AT_LENGTH else 4  # every fourth kill hits the keeper during its start


def split(keys: bytes, key_bytes: int) -> list[bytes]:
    return [keys[at : at + key_bytes] for at in range(0, len(keys), key_bytes)]


def state_of(events: Sequence[Event]) -> State:
    """Return the recovered state. Fails if an entry was never put, or is reported twice."""
    namespaces: dict[int, tuple[bytes, int]] = {}
    state: State = {}
    for event in events:
        if isinstance(event, IndexedNamespace):
            assert event.ordinal not in namespaces
            namespaces[event.ordinal] = (event.canonical, event.key_bytes)
        elif isinstance(event, Recovered):
            canonical, key_bytes = namespaces[event.ordinal]
            assert (canonical, key_bytes) in NAMESPACES
            keys = split(event.keys, key_bytes)
            entries = np.frombuffer(event.entries, ENTRY)
            assert 0 < len(keys) == len(entries) <= 8192
            for version in np.unique(entries["segment"]).tolist():
                rows = np.nonzero(entries["segment"] == version)[0]
                these = [keys[row] for row in rows]
                assert np.array_equal(entries[rows], entries_of(canonical, these, version))
                for key in these:
                    assert (canonical, key) not in state
                    state[canonical, key] = version
    return state


@pytest.fixture(autouse=True)
def forked_keepers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork keepers from this process, which takes a tenth of the time of a normal start. The first test, and those that
    measure time, start keepers as a shard does."""
    first = request.function is test_entries_of_several_namespaces_survive_a_stop
    if not first and request.node.get_closest_marker("exclusive") is None and forked.forkable(environment()):
        monkeypatch.setattr(keeper, "_spawn", forked_children._fork_keeper)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    """Starts keepers of one folder, and kills them after the test."""
    loops: list[Loop] = []

    def make(directory: Path = tmp_path / "shard-0", **arguments: Any) -> Loop:
        loops.append(Loop(directory, **arguments))
        return loops[-1]

    yield make
    for loop in loops:
        loop.keeper.kill()


# ---- what is put is found ----------------------------------------------------------------------------------------


def test_entries_of_several_namespaces_survive_a_stop(start: Callable[..., Loop]) -> None:
    loop = start()
    assert loop.recovered() == RecoveryDone(0, 0, "")
    expected: State = {}
    for version in (1, 2):
        for canonical, key_bytes in NAMESPACES:
            keys = make_keys(9000, first=4500 * version, key_bytes=key_bytes)
            loop.put(canonical, key_bytes, keys, version)
            expected.update({(canonical, key): version for key in keys})
    for canonical, key_bytes in NAMESPACES:
        gone = make_keys(3000, first=6000, key_bytes=key_bytes) + make_keys(10, first=10**6, key_bytes=key_bytes)
        loop.delete(canonical, key_bytes, gone)
        for key in gone:
            expected.pop((canonical, key), None)
    assert loop.keeper.stop(DEADLINE_S)
    for _ in range(2):
        again = start()
        assert again.recovered() == RecoveryDone(len(expected), 0, "")
        assert state_of(again.events) == expected
        assert {event.canonical: event.ordinal for event in again.all(IndexedNamespace)} == {
            canonical: ordinal for ordinal, (canonical, _) in enumerate(NAMESPACES)
        }
        assert again.keeper.stop(DEADLINE_S)


def test_operations_are_applied_in_the_order_sent(start: Callable[..., Loop]) -> None:
    loop = start(fresh=True)
    canonical, key_bytes = NAMESPACES[0]
    keys = make_keys(100)
    for version in range(1, 50):
        loop.put(canonical, key_bytes, keys, version)
        loop.delete(canonical, key_bytes, keys[version:])
    loop.put(canonical, key_bytes, [keys[99], keys[99]], 50)
    assert loop.keeper.stop(DEADLINE_S)
    again = start()
    again.recovered()
    assert state_of(again.events) == {(canonical, key): 49 for key in keys[:49]} | {(canonical, keys[99]): 50}


def test_entries_put_during_recovery_replace_recovered_ones(start: Callable[..., Loop]) -> None:
    canonical, key_bytes = NAMESPACES[0]
    keys = make_keys(50_000)
    loop = start(fresh=True)
    loop.put(canonical, key_bytes, keys, 1)
    assert loop.keeper.stop(DEADLINE_S)
    again = start()
    again.until(lambda: again.keeper.namespaces_known)
    again.put(canonical, key_bytes, keys[:10], 2)
    again.delete(canonical, key_bytes, keys[10:20])
    assert again.keeper.stop(DEADLINE_S)
    last = start()
    last.recovered()
    assert state_of(last.events) == {
        (canonical, key): 2 if i < 10 else 1 for i, key in enumerate(keys) if not 10 <= i < 20
    }


@pytest.mark.exclusive
def test_a_commit_follows_within_its_delay_or_at_once_on_request(start: Callable[..., Loop]) -> None:
    loop = start(fresh=True)
    canonical, key_bytes = NAMESPACES[0]
    loop.keeper.sync()
    loop.until(lambda: loop.committed(1))
    began = time.monotonic()
    sequence = loop.put(canonical, key_bytes, make_keys(3), 1)
    loop.until(lambda: loop.committed(sequence))
    delayed_s = time.monotonic() - began
    assert 0.2 < delayed_s < 2.0
    loop.put(canonical, key_bytes, make_keys(3), 2)
    sequence = loop.keeper.sync()
    loop.until(lambda: loop.committed(sequence))
    # A commit that was reported survives a kill.
    loop.keeper.kill()
    again = start()
    again.recovered()
    assert state_of(again.events) == {(canonical, key): 2 for key in make_keys(3)}


def test_a_keeper_commits_everything_when_its_shard_disconnects(start: Callable[..., Loop]) -> None:
    loop = start(fresh=True)
    canonical, key_bytes = NAMESPACES[0]
    loop.put(canonical, key_bytes, make_keys(300), 1)
    loop.until(lambda: not loop.keeper.wants_write)
    with socket.socket(fileno=os.dup(loop.keeper.fileno())) as sock:
        sock.shutdown(socket.SHUT_WR)
    loop.until(loop.ended)
    assert "exit status 0" in loop.ended().message
    again = start()
    assert again.recovered().entries == 300


def test_a_fresh_start_forgets_the_old_index(start: Callable[..., Loop]) -> None:
    canonical, key_bytes = NAMESPACES[0]
    loop = start(fresh=True)
    loop.put(canonical, key_bytes, make_keys(10), 1)
    assert loop.keeper.stop(DEADLINE_S)
    assert start(fresh=True).keeper.stop(DEADLINE_S)
    assert start().recovered() == RecoveryDone(0, 0, "")


@pytest.mark.exclusive
def test_100_000_entries_are_recovered_within_two_seconds(start: Callable[..., Loop], tmp_path: Path) -> None:
    canonical, key_bytes = NAMESPACES[0]
    loop = start(fresh=True)
    for first in range(0, 100_000, 5000):
        loop.put(canonical, key_bytes, make_keys(5000, first), 1)
    assert loop.keeper.stop(DEADLINE_S)
    began = time.monotonic()
    again = start()
    assert again.recovered().entries == 100_000
    assert time.monotonic() - began < 2.0
    assert again.keeper.stop(DEADLINE_S)
    # Entries are written in the order of their keys, so pages are full.
    assert (tmp_path / "shard-0" / "index" / "data.mdb").stat().st_size < 80 * 100_000


# ---- namespaces --------------------------------------------------------------------------------------------------


def test_namespace_numbers_are_stable_reused_and_bounded(start: Callable[..., Loop]) -> None:
    loop = start()
    with pytest.raises(RuntimeError, match="not known yet"):
        loop.keeper.open_namespace(b"{}", 16)
    loop.recovered()
    names = [b'{"model":"%d"}' % number for number in range(MAX_INDEXED_NAMESPACES)]
    assert [loop.keeper.open_namespace(name, 16) for name in names] == list(range(MAX_INDEXED_NAMESPACES))
    assert loop.keeper.open_namespace(names[7], 16) == 7
    with pytest.raises(ValueError, match="keys of 8 bytes: this namespace has keys of 16"):
        loop.keeper.open_namespace(names[7], 8)
    with pytest.raises(TooManyNamespaces):
        loop.keeper.open_namespace(b"{}", 16)
    for number in (7, 3):
        loop.keeper.forget_namespace(names[number])
    with pytest.raises(KeyError):
        loop.keeper.put(7, b"", np.zeros(0, ENTRY))
    assert loop.keeper.open_namespace(b"{}", 8) == 3
    for replicas in (2, 3, 1):  # only the highest number counts
        assert loop.keeper.open_namespace(names[9], 16, replicas) == 9
    assert loop.keeper.stop(DEADLINE_S)
    again = start()
    again.recovered()
    found = {event.ordinal: (event.canonical, event.key_bytes) for event in again.all(IndexedNamespace)}
    assert found[3] == (b"{}", 8)
    assert {event.ordinal: event.replicas for event in again.all(IndexedNamespace)} == {
        ordinal: 3 if ordinal == 9 else 1 for ordinal in found
    }
    assert set(found) == set(range(MAX_INDEXED_NAMESPACES)) - {7}
    assert again.keeper.open_namespace(names[1023], 16) == 1023
    assert again.keeper.open_namespace(names[3], 16) == 7


def test_entries_that_do_not_fit_their_namespace_are_refused_before_sending(start: Callable[..., Loop]) -> None:
    loop = start(fresh=True)
    ordinal = loop.keeper.open_namespace(*NAMESPACES[0])
    with pytest.raises(ValueError, match="31 bytes of keys for 2 entries"):
        loop.keeper.put(ordinal, b"x" * 31, np.zeros(2, ENTRY))
    with pytest.raises(ValueError, match="31 bytes of keys"):
        loop.keeper.delete(ordinal, b"x" * 31)
    assert loop.keeper.stop(DEADLINE_S)


# ---- bounds, and the end -----------------------------------------------------------------------------------------


def test_the_backlog_of_a_stopped_keeper_is_visible(start: Callable[..., Loop]) -> None:
    loop = start(fresh=True)
    loop.keeper.sync()
    loop.until(lambda: loop.committed(1))
    assert loop.keeper.backlog_bytes == 0 and not loop.keeper.wants_write
    os.kill(loop.keeper.pid, signal.SIGSTOP)
    canonical, key_bytes = NAMESPACES[0]
    sequence = 0
    for version in range(1, 21):
        sequence = loop.put(canonical, key_bytes, make_keys(5000), version)
        loop.turn(0)
    queued = 20 * 5000 * (key_bytes + ENTRY.itemsize)
    assert queued - (1 << 20) < loop.keeper.backlog_bytes <= queued + 4096
    assert loop.keeper.wants_write
    os.kill(loop.keeper.pid, signal.SIGCONT)
    loop.until(lambda: loop.committed(sequence))
    assert loop.keeper.backlog_bytes == 0 and not loop.keeper.wants_write


@pytest.mark.exclusive
def test_stop_returns_at_its_deadline(start: Callable[..., Loop]) -> None:
    loop = start(fresh=True)
    loop.put(*NAMESPACES[0], make_keys(10), 1)
    os.kill(loop.keeper.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert not loop.keeper.stop(0.3)
    assert time.monotonic() - began < 2.0
    assert not psutil.pid_exists(loop.keeper.pid)


def test_a_keeper_ignores_signals_meant_for_its_shard(start: Callable[..., Loop]) -> None:
    loop = start(fresh=True)
    loop.keeper.sync()
    loop.until(lambda: loop.committed(1))
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(loop.keeper.pid, number)
    loop.put(*NAMESPACES[0], make_keys(10), 1)
    assert loop.keeper.stop(DEADLINE_S)
    assert start().recovered().entries == 10


def test_the_keeper_holds_the_lock_until_it_ends(
    start: Callable[..., Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.disk.format.DISK_LOCK_WAIT_S", 0.1)
    loop = start(fresh=True)
    with pytest.raises(Exception, match="is in use by process"):
        lock_shard(tmp_path / "shard-0")
    loop.keeper.kill()
    os.close(lock_shard(tmp_path / "shard-0"))


# ---- failures ----------------------------------------------------------------------------------------------------


def test_a_stale_new_index_is_removed_and_the_old_one_used(start: Callable[..., Loop], tmp_path: Path) -> None:
    loop = start(fresh=True)
    loop.put(*NAMESPACES[0], make_keys(10), 1)
    assert loop.keeper.stop(DEADLINE_S)
    stale = tmp_path / "shard-0" / "index.new"
    stale.mkdir()
    (stale / "data.mdb").write_bytes(random.Random(1).randbytes(50_000))
    (stale / "lock.mdb").write_bytes(b"")
    again = start()
    assert again.recovered() == RecoveryDone(10, 0, "")
    assert not stale.exists()


def test_a_full_map_is_reported_as_a_failure(start: Callable[..., Loop]) -> None:
    loop = start(fresh=True, map_bytes=256 << 10)
    loop.put(*NAMESPACES[0], make_keys(8000), 1)
    loop.until(loop.ended)
    assert "MapFullError" in loop.ended().message
    assert not loop.keeper.wants_write
    loop.keeper.put(0, make_keys(1)[0], np.zeros(1, ENTRY))  # goes nowhere
    assert loop.keeper.backlog_bytes == 0
    assert not loop.keeper.stop(1.0)


def test_a_full_disk_is_reported_as_a_failure(start: Callable[..., Loop], tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr}")
    try:
        loop = start(disk / "shard-0", fresh=True)
        sequence = loop.put(*NAMESPACES[0], make_keys(2000), 1)
        loop.keeper.sync()
        loop.until(lambda: loop.committed(sequence))
        for version in range(2, 12):
            loop.put(*NAMESPACES[0], make_keys(4000, first=4000 * version), version)
        loop.until(loop.ended)
        assert "no space left" in loop.ended().message
        assert loop.ended().no_space
        loop.keeper.kill()
        # The next keeper needs room for a second index, so the disk is full for it, too. It reports its entries before
        # it fails.
        again = start(disk / "shard-0")
        again.until(again.ended)
        assert "no space left" in again.ended().message
        found = state_of(again.events)
        assert {key for (_, key), version in found.items() if version == 1} == set(make_keys(2000))
        again.keeper.kill()
        # A keeper that starts with an empty index can use the space of the old one.
        last = start(disk / "shard-0", fresh=True)
        last.put(*NAMESPACES[0], make_keys(2000), 1)
        assert last.keeper.stop(DEADLINE_S)
        last = start(disk / "shard-0")
        assert last.recovered().entries == 2000
        last.keeper.kill()
    finally:
        wait_until(lambda: subprocess.run(["umount", disk], check=False).returncode == 0, DEADLINE_S, "umount")


def test_an_index_that_is_no_folder_is_reported_as_a_failure(start: Callable[..., Loop], tmp_path: Path) -> None:
    (tmp_path / "shard-0").mkdir()
    (tmp_path / "shard-0" / "index").write_bytes(b"mine")
    loop = start()
    loop.until(loop.ended)
    assert "Error" in loop.ended().message and not loop.ended().no_space
    assert (tmp_path / "shard-0" / "index").read_bytes() == b"mine"


# ---- killed at any instant ---------------------------------------------------------------------------------------


def assert_state_of_a_commit(found: State, before: State, seed: int, committed: int, sent: int) -> None:
    """Check that the index is in the state after some operation: the last one known to be committed, the last one sent,
    or one between them."""
    state = dict(before)
    for number in range(1, committed + 1):
        apply_operation(seed, number, state)
    for number in range(committed + 1, sent + 1):
        if state == found:
            return
        apply_operation(seed, number, state)
    assert state == found


def recover_all(directory: Path) -> State:
    """Return the contents of the index. Checks that `read_index`, which changes nothing, and a keeper find the same."""
    read = list(read_index(directory))
    loop = Loop(directory)
    try:
        done = loop.recovered()
        assert read[-1] == done
        assert (done.bad_entries, done.damage) == (0, "")
        state = state_of(loop.events)
        assert state_of(read) == state
        if random.random() < 0.5:
            assert loop.keeper.stop(DEADLINE_S)
    finally:
        loop.keeper.kill()
    return state


def test_a_keeper_killed_at_any_instant_keeps_committed_entries(tmp_path: Path) -> None:
    random.seed(1)
    directory = tmp_path / "shard-0"
    state: State = {}
    for seed in range(KILLS):
        loop = Loop(directory)
        try:
            if seed % 4 != 3:  # in every fourth round, the keeper is killed during its start
                loop.recovered()
                sent = run_operations(loop, seed, random.uniform(0.0, 0.5))
            else:
                sent = 0
                time.sleep(random.uniform(0.0, 0.03))
            os.kill(loop.keeper.pid, signal.SIGKILL)
            loop.until(loop.ended)
            assert "SIGKILL" in loop.ended().message
        finally:
            loop.keeper.kill()
        committed = max((event.sequence for event in loop.all(Committed)), default=0)
        found = recover_all(directory)
        assert_state_of_a_commit(found, state, seed, committed, sent)
        state = found
    assert state


def test_a_shard_killed_at_any_instant_keeps_committed_entries(tmp_path: Path) -> None:
    random.seed(2)
    directory = tmp_path / "shard-0"
    directory.mkdir()
    state: State = {}
    for seed in range(KILLS):
        out, theirs = os.pipe()
        with open(theirs, "wb") as says, open(os.devnull, "r+b") as nothing:
            arguments = (str(directory), str(seed))
            shard = forked.start(
                "tests.support.keeper_loop", arguments, stdin=nothing, stdout=says, stderr=nothing, env=environment()
            )
        with open(out) as said:
            its_keeper = psutil.Process(int(said.readline()))
            if seed % 4 != 3:
                assert said.readline() == "recovered\n"
            time.sleep(random.uniform(0.0, 0.4 if seed % 4 != 3 else 0.04))
            shard.kill()
            lines = [line.split() for line in said.read().splitlines() if line != "recovered"]
        assert shard.wait(DEADLINE_S) == -signal.SIGKILL
        wait_until(lambda dead=its_keeper: not alive(dead), DEADLINE_S, "the keeper dies with its shard")
        said = {"sent": 0, "committed": 0}
        said.update((what, int(number)) for what, number in lines)
        found = recover_all(directory)
        assert_state_of_a_commit(found, state, seed, said["committed"], said["sent"])
        state = found
    assert state


# ---- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of an index after several commits, with replaced and deleted entries and free pages."""
    directory = tmp_path_factory.mktemp("old") / "shard-0"
    loop = Loop(directory, fresh=True)
    for version in range(1, 6):
        for canonical, key_bytes in NAMESPACES:
            loop.put(canonical, key_bytes, make_keys(700, first=400 * version, key_bytes=key_bytes), version)
            loop.delete(canonical, key_bytes, make_keys(150, first=380 * version, key_bytes=key_bytes))
        sequence = loop.keeper.sync()
        loop.until(lambda sequence=sequence: loop.committed(sequence))
    assert loop.keeper.stop(DEADLINE_S)
    return (directory / "index" / "data.mdb").read_bytes()


def damaged(kind: str, file: bytes, numbers: random.Random) -> bytes:
    """Return a damaged copy of the file."""
    data = bytearray(file)
    at = numbers.randrange(len(data))
    page = at & ~4095
    if kind == "flip":
        data[at] ^= numbers.randrange(1, 256)
    elif kind == "flip_head":  # the head of a page, or of one of the two pages that refer to the roots
        page = numbers.choice([page, page, 0, 4096])
        data[page + numbers.randrange(152 if page < 8192 else 64)] ^= 1 << numbers.randrange(8)
    elif kind == "truncate":
        del data[at:]
    elif kind == "zeros":
        data[page : page + 4096] = bytes(4096)
    elif kind == "other_page":
        other = numbers.randrange(len(data)) & ~4095
        data[page : page + 4096] = data[other : other + 4096]
    else:
        assert kind == "garbage"
        size = numbers.choice([100, 4096, len(data) - at])
        data[at : at + size] = numbers.randbytes(min(size, len(data) - at))
    return bytes(data)


@pytest.mark.parametrize(
    ("kind", "trials"),
    [("flip", 8), ("flip_head", 8), ("truncate", 4), ("zeros", 4), ("other_page", 4), ("garbage", 4)],
)
def test_a_damaged_index_never_yields_entries_that_were_not_put(
    tmp_path: Path, index_file: bytes, kind: str, trials: int
) -> None:
    trials *= 4 if AT_LENGTH else 1
    numbers = random.Random(kind)
    complete = 0
    for first in range(0, trials, 4):
        loops = []
        for trial in range(first, first + 4):
            directory = tmp_path / str(trial) / "shard-0"
            (directory / "index").mkdir(parents=True)
            (directory / "index" / "data.mdb").write_bytes(damaged(kind, index_file, numbers))
            loops.append(Loop(directory))
        try:
            for loop in loops:
                complete += serves_after(loop)
        finally:
            for loop in loops:
                loop.keeper.kill()
        for trial in range(first, first + 4):
            shutil.rmtree(tmp_path / str(trial))
    if kind == "flip":
        assert complete > trials / 2  # most bytes affect only one entry


def serves_after(loop: Loop) -> bool:
    """Check that recovered entries had been put, and that the shard continues with a working index. Returns whether the
    keeper survived."""
    loop.until(lambda: loop.ended() or not loop.keeper.recovering)
    found = state_of(loop.events)
    survived = loop.ended() is None
    if not survived:
        loop.keeper.kill()
        loop = Loop(loop.keeper.directory, fresh=True)
        for canonical, key_bytes in NAMESPACES:
            for version in range(6):
                keys = [key for (name, key), put in found.items() if (name, put) == (canonical, version)]
                loop.put(canonical, key_bytes, keys, version)
    else:
        assert loop.all(RecoveryDone)[0].entries == len(found)
    canonical, key_bytes = NAMESPACES[0]
    (key,) = make_keys(1, first=10**9)
    loop.put(canonical, key_bytes, [key], 9)
    assert loop.keeper.stop(DEADLINE_S)
    again = Loop(loop.keeper.directory)
    try:
        assert again.recovered().bad_entries == 0
        assert state_of(again.events) == found | {(canonical, key): 9}
    finally:
        again.keeper.kill()
    return survived


def test_reading_a_damaged_index_changes_nothing(tmp_path: Path, index_file: bytes) -> None:
    directory = tmp_path / "shard-0"
    file = directory / "index" / "data.mdb"
    file.parent.mkdir(parents=True)
    numbers = random.Random(5)
    for kind in ("flip", "truncate", "garbage", "flip_head"):
        data = damaged(kind, index_file, numbers)
        file.write_bytes(data)
        events = list(read_index(directory))
        state_of(events)
        assert isinstance(events[-1], RecoveryDone | KeeperFailed)
        assert [found.name for found in directory.rglob("*")] == ["index", "data.mdb"]
        assert file.read_bytes() == data


def test_an_empty_file_is_an_empty_index(start: Callable[..., Loop], tmp_path: Path) -> None:
    (tmp_path / "shard-0" / "index").mkdir(parents=True)
    (tmp_path / "shard-0" / "index" / "data.mdb").write_bytes(b"")
    done = start().recovered()
    assert (done.entries, done.bad_entries) == (0, 0)
    assert done.damage
