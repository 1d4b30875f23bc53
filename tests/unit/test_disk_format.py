"""The disk tier's directory: which contents are accepted, repaired or refused, which process may use it, and the
records of its index."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.disk import format as disk_format
from kvstore.disk.entries import (
    ENTRY,
    check_entries,
    pack_entries,
    pack_namespace,
    record_keys,
    unpack_namespace,
    unpack_ordinal,
)
from kvstore.disk.format import DiskFormatError, Layout, lock_shard, open_layout, read_layout, segment_path
from kvstore.wire import namespace_id
from tests.support.harness import environment, make_keys

SEGMENT_BYTES = 1 << 20


def tree_of(path: Path) -> dict[str, bytes]:
    """Return every file and folder below `path`, with its bytes."""
    return {
        str(found.relative_to(path)): b"" if found.is_dir() else found.read_bytes() for found in sorted(path.rglob("*"))
    }


def assert_refused(path: Path, match: str, shards: int = 2) -> None:
    """Check that `open_layout` refuses the directory and changes nothing."""
    before = tree_of(path)
    with pytest.raises(DiskFormatError, match=match):
        open_layout(path, shards, SEGMENT_BYTES)
    assert tree_of(path) == before


def mark(**fields: object) -> bytes:
    """Return a mark with a valid guard."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    return json.dumps({**fields, "guard": xxhash.xxh3_64_hexdigest(text)}, separators=(",", ":")).encode()


# ---- the directory -----------------------------------------------------------------------------------------------


def test_a_new_directory_is_created_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    layout = open_layout(path, 2, SEGMENT_BYTES)
    assert layout == Layout(path, 2, SEGMENT_BYTES, layout.identity) and len(layout.identity) == 16
    text = (path / "FORMAT").read_bytes()
    fields = json.loads(text)
    assert text.strip() == mark(
        format="kvstore-disk", version=2, shards=2, segment_bytes=SEGMENT_BYTES, identity=layout.identity
    )
    assert set(fields) == {"format", "version", "shards", "segment_bytes", "identity", "guard"}
    for shard in range(2):
        directory = layout.shard_directory(shard)
        assert directory == path / f"shard-{shard}"
        assert (directory / "FORMAT").read_bytes() == text
        assert segment_path(directory, 7) == directory / "segments" / "00000007.seg"
        assert (directory / "segments").is_dir()


def test_the_recorded_segment_size_wins(tmp_path: Path) -> None:
    open_layout(tmp_path, 2, SEGMENT_BYTES)
    before = tree_of(tmp_path)
    assert open_layout(tmp_path, 2, 4 * SEGMENT_BYTES).segment_bytes == SEGMENT_BYTES
    assert read_layout(tmp_path) == open_layout(tmp_path, 2, SEGMENT_BYTES)
    assert tree_of(tmp_path) == before


@pytest.mark.parametrize("leftover", ["lost+found", "FORMAT.new"])
def test_mounted_file_systems_and_interrupted_creations_count_as_empty(tmp_path: Path, leftover: str) -> None:
    if leftover == "lost+found":
        (tmp_path / leftover).mkdir()
    else:
        (tmp_path / leftover).write_bytes(b'{"form')
    assert open_layout(tmp_path, 1, SEGMENT_BYTES) == read_layout(tmp_path)


def test_an_interrupted_creation_is_completed(tmp_path: Path) -> None:
    layout = open_layout(tmp_path, 2, SEGMENT_BYTES)
    whole = tree_of(tmp_path)
    for file in ("FORMAT", "lock"):
        (layout.shard_directory(1) / file).unlink()
    (layout.shard_directory(1) / "segments").rmdir()
    layout.shard_directory(1).rmdir()
    open_layout(tmp_path, 2, SEGMENT_BYTES)
    assert tree_of(tmp_path) == whole


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    open_layout(tmp_path, 2, SEGMENT_BYTES)
    (tmp_path / "FORMAT").write_bytes(mark(format="kvstore-disk", version=4, something="else"))
    assert_refused(tmp_path, r"disk format version 4, and this server knows versions 2 and 3: use the release")
    with pytest.raises(DiskFormatError, match="version 4"):
        read_layout(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "shard-0/segments/00000000.seg", "index/data.mdb"])
def test_a_foreign_directory_is_refused_and_unchanged(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"mine")
    assert_refused(tmp_path, r"is not a disk tier of kvstore.*holds '.*'\. Nothing was changed\..*new or empty\.$")
    with pytest.raises(DiskFormatError, match="not a disk tier"):
        read_layout(tmp_path)


def test_another_programs_mark_is_foreign(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_bytes(mark(format="other-store", version=2, shards=2, segment_bytes=SEGMENT_BYTES))
    assert_refused(tmp_path, "not a disk tier")


def test_another_number_of_shards_is_refused(tmp_path: Path) -> None:
    open_layout(tmp_path, 4, SEGMENT_BYTES)
    assert_refused(tmp_path, r"blocks of 4 shards, and this server has 2: start it with --shards 4")


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    for path in (file, file / "below"):
        with pytest.raises(DiskFormatError, match="is not a directory: give --disk another path"):
            open_layout(path, 1, SEGMENT_BYTES)
    assert file.read_bytes() == b"mine"


def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    else:
        locked.chmod(0)
    try:
        with pytest.raises(DiskFormatError, match="no permission to use"):
            open_layout(locked / "disk", 1, SEGMENT_BYTES)
    finally:
        os.seteuid(was)
        locked.chmod(0o700)


def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path]
    mounted = subprocess.run(mount, check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode()}")
    try:
        open_layout(tmp_path, 1, SEGMENT_BYTES)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        with pytest.raises(DiskFormatError, match="read-only file system: mount it writable"):
            open_layout(tmp_path, 1, SEGMENT_BYTES)
        assert read_layout(tmp_path).shards == 1
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_damaged_mark_is_repaired_from_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = open_layout(tmp_path, 2, SEGMENT_BYTES)
    whole = tree_of(tmp_path)
    good = (tmp_path / "FORMAT").read_bytes()
    damaged = [good[:size] for size in range(0, len(good), 7)]
    for at in range(len(good)):
        for bit in (1, 128):
            damaged.append(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
    for bad in damaged:
        for file in (tmp_path / "FORMAT", layout.shard_directory(0) / "FORMAT"):
            file.write_bytes(bad)
            caplog.clear()
            with caplog.at_level(logging.WARNING, "kvstore.disk"):
                assert open_layout(tmp_path, 2, 2 * SEGMENT_BYTES) == layout
            assert [record.getMessage() for record in caplog.records] == [f"{file} was damaged: repaired from a copy"]
            assert tree_of(tmp_path) == whole


def test_content_without_a_valid_mark_is_foreign(tmp_path: Path) -> None:
    layout = open_layout(tmp_path, 2, SEGMENT_BYTES)
    for directory in (tmp_path, layout.shard_directory(0), layout.shard_directory(1)):
        (directory / "FORMAT").write_bytes(b"\0" * 64)
    assert_refused(tmp_path, r"no readable file FORMAT, but holds 'shard-0', 'shard-1'")


def test_a_shard_of_another_tier_is_refused(tmp_path: Path) -> None:
    one = open_layout(tmp_path / "one", 2, SEGMENT_BYTES)
    other = open_layout(tmp_path / "other", 3, SEGMENT_BYTES)
    (one.shard_directory(1) / "FORMAT").write_bytes((other.shard_directory(1) / "FORMAT").read_bytes())
    assert_refused(tmp_path / "one", "belongs to a disk tier of 3 shards")


def test_an_empty_or_missing_directory_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(DiskFormatError, match="is empty"):
        read_layout(tmp_path)
    with pytest.raises(DiskFormatError, match="No such file"):
        read_layout(tmp_path / "nowhere")
    assert tree_of(tmp_path) == {}


# ---- the lock ----------------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from kvstore.disk.format import lock_shard
lock_shard(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run another process that holds the lock until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_only_one_process_at_a_time_uses_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_format, "DISK_LOCK_WAIT_S", 0.1)
    with holder(tmp_path) as process, pytest.raises(DiskFormatError, match=f"in use by process {process.pid}: stop it"):
        lock_shard(tmp_path)
    os.close(lock_shard(tmp_path))
    (tmp_path / "lock").unlink()
    with holder(tmp_path):
        (tmp_path / "lock").write_text("rubbish")
        with pytest.raises(DiskFormatError, match="in use by another process"):
            lock_shard(tmp_path)


def test_a_lock_waits_for_an_ending_predecessor(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        ending = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {process.pid}"])
        os.close(lock_shard(tmp_path))
        assert ending.wait(5) == 0
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_that_fails_reports_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskFormatError, match="not a directory"):
        lock_shard(tmp_path / "file")


# ---- records of the index ----------------------------------------------------------------------------------------

CANONICAL = b'{"model":"m"}'


def entries_of(count: int) -> np.ndarray:
    entries = np.zeros(count, ENTRY)
    numbers = np.random.default_rng(count)
    for name in ENTRY.names or ():
        entries[name] = numbers.integers(0, np.iinfo(ENTRY[name]).max, count, ENTRY[name], endpoint=True)
    return entries


@pytest.mark.parametrize("key_bytes", [8, 16, 33, 64])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_entries_read_back_as_written(key_bytes: int, count: int) -> None:
    keys = b"".join(make_keys(count, key_bytes=key_bytes))
    entries = entries_of(count)
    values = pack_entries(CANONICAL, key_bytes, keys, entries)
    assert [len(value) for value in values] == [48] * count
    found, good = check_entries(CANONICAL, key_bytes, keys, b"".join(values))
    assert good.all()
    assert np.array_equal(found, entries)


def test_a_record_has_the_documented_layout() -> None:
    (key,) = make_keys(1)
    entry = entries_of(1)
    (value,) = pack_entries(CANONICAL, 16, key, entry)
    guard = xxhash.xxh3_64_intdigest(namespace_id(CANONICAL) + key + entry.tobytes())
    assert value == entry.tobytes() + guard.to_bytes(8, "little")
    (index_key,) = record_keys(258, 16, key)
    assert index_key == b"\x01\x02" + key
    assert unpack_ordinal(index_key) == 258


def test_any_flipped_bit_of_a_record_is_noticed() -> None:
    (key,) = make_keys(1)
    (value,) = pack_entries(CANONICAL, 16, key, entries_of(1))
    for at in range(len(value) * 8):
        bad = bytearray(value)
        bad[at // 8] ^= 1 << at % 8
        assert not check_entries(CANONICAL, 16, key, bytes(bad))[1].any()
    for at in range(len(key) * 8):
        bad = bytearray(key)
        bad[at // 8] ^= 1 << at % 8
        assert not check_entries(CANONICAL, 16, bytes(bad), value)[1].any()
    assert not check_entries(CANONICAL + b" ", 16, key, value)[1].any()


def test_any_flipped_bit_of_a_namespace_is_noticed() -> None:
    value = pack_namespace(CANONICAL, 16, 2)
    assert unpack_namespace(value) == (CANONICAL, 16, 2)
    for at in range(len(value) * 8):
        bad = bytearray(value)
        bad[at // 8] ^= 1 << at % 8
        assert unpack_namespace(bytes(bad)) is None
    for size in range(len(value)):
        assert unpack_namespace(value[:size]) is None
