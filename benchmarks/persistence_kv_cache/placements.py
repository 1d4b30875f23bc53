"""The candidate placements: ways to keep block bytes on disk.

A placement keeps blocks with 16-byte keys in a separate directory. All give the same guarantee: after `sync`, the
blocks and the data needed to find them again are on disk. No placement keeps the server's checksums and recency.

* `LmdbValues`: the block is the value. A large value occupies a run of contiguous 4 KiB pages. Entries like those of
  the segments' index are in a separate database, because this binding cannot list the keys of large values without
  reading the values.
* `FilePerBlock`: 256 directories, with one file for each block, named by its key. `MappedFiles` reads them through
  mmap.
* `Segments`: preallocated files of slots. Free slots are reused, and an LMDB index says which block is in which slot.
  With O_DIRECT, the page cache is not used. Without an index and in one file it is `plain`, the limit of the others.
* `LevelDb`: the store that the published design tried in addition to files; needs plyvel.

Only one thread calls a placement; `threads` is the number of threads over which a call spreads its reads or writes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import lmdb
import numpy as np

from benchmarks.persistence_kv_cache.files import ALIGNMENT, preallocate, read_row, spread, write_row
from benchmarks.remote_kv_cache.harness import missing_module
from benchmarks.remote_kv_cache.shapes import KEY_BYTES, Rows

SEGMENT_BYTES: Final = 64 << 20
_ENTRY: Final = struct.Struct("<IIQQIIQQ")  # the fields that the server keeps of a block; here only the place is set
_INDEX_MAP_BYTES: Final = 4 << 30
_FAN_OUT: Final = 256
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

PLAIN: Final = "plain file"
PLAIN_DIRECT: Final = "plain file, O_DIRECT"
LMDB: Final = "LMDB values"
LMDB_WRITEMAP: Final = "LMDB values, writemap"
FILES: Final = "one file a block"
MAPPED: Final = "one file a block, mmap"
SEGMENTS: Final = "segments"
SEGMENTS_DIRECT: Final = "segments, O_DIRECT"
LEVELDB: Final = "leveldb"


class Placement(Protocol):
    """Keeps blocks in a directory. `parallel_writes`: whether more than one thread can write."""

    parallel_writes: bool

    def open(self) -> None:
        """Make the placement ready for use, empty or with the blocks that are in its directory."""

    def close(self) -> None: ...

    def keys(self) -> set[bytes]:
        """The keys of all blocks. They are read from disk, as a server must do when it starts, unless they are already
        known."""

    def write(self, keys: Sequence[bytes], rows: Sequence[Rows], threads: int) -> None:
        """Add blocks whose keys are new."""

    def read(self, keys: Sequence[bytes], rows: Rows, threads: int) -> None:
        """Read block i into rows[i]. Raises `KeyError` or `OSError` for a block that is not there."""

    def delete(self, keys: Sequence[bytes]) -> None: ...

    def sync(self) -> None:
        """Return when all written blocks are on disk."""


class LmdbValues:
    """One transaction per call; fsync only in `sync`."""

    parallel_writes = False  # LMDB has one writer

    def __init__(self, directory: Path, map_bytes: int, writemap: bool = False) -> None:
        self._directory = directory
        self._map_bytes = map_bytes
        self._writemap = writemap
        self._env: lmdb.Environment

    def open(self) -> None:
        self._env = lmdb.open(
            str(self._directory), map_size=self._map_bytes, max_dbs=2, sync=False, writemap=self._writemap
        )
        self._values = self._env.open_db(b"values")
        self._entries = self._env.open_db(b"entries")

    def close(self) -> None:
        self._env.close()

    def keys(self) -> set[bytes]:
        with self._env.begin() as transaction, transaction.cursor(self._entries) as cursor:
            return set(cursor.iternext(keys=True, values=False))

    def write(self, keys: Sequence[bytes], rows: Sequence[Rows], threads: int) -> None:
        with self._env.begin(write=True) as transaction:
            for key, row in zip(keys, rows, strict=True):
                transaction.put(key, row, db=self._values)
                transaction.put(key, _ENTRY.pack(0, 0, 0, 0, 0, 0, 0, 0), db=self._entries)

    def read(self, keys: Sequence[bytes], rows: Rows, threads: int) -> None:
        def work(start: int, end: int) -> None:
            with self._env.begin(buffers=True) as transaction:
                for number in range(start, end):
                    value = transaction.get(keys[number], db=self._values)
                    if value is None:
                        raise KeyError(keys[number])
                    rows[number] = np.frombuffer(value, dtype=np.uint8)

        spread(threads, len(keys), work)

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._env.begin(write=True) as transaction:
            for key in keys:
                transaction.delete(key, db=self._values)
                transaction.delete(key, db=self._entries)

    def sync(self) -> None:
        self._env.sync(True)


class FilePerBlock:
    """Blocks are found by their file names alone. `sync` is one syncfs, far cheaper than an fsync for each file."""

    parallel_writes = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._directory}/{name[:2]}/{name}"

    def open(self) -> None:
        for number in range(_FAN_OUT):
            (self._directory / f"{number:02x}").mkdir(exist_ok=True)

    def close(self) -> None:
        pass  # nothing is held open

    def keys(self) -> set[bytes]:
        found: set[bytes] = set()
        for number in range(_FAN_OUT):
            found.update(map(bytes.fromhex, os.listdir(self._directory / f"{number:02x}")))
        return found

    def write(self, keys: Sequence[bytes], rows: Sequence[Rows], threads: int) -> None:
        def work(start: int, end: int) -> None:
            for number in range(start, end):
                descriptor = os.open(self._path(keys[number]), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                try:
                    write_row(descriptor, rows[number], 0)
                finally:
                    os.close(descriptor)

        spread(threads, len(keys), work)

    def read(self, keys: Sequence[bytes], rows: Rows, threads: int) -> None:
        def work(start: int, end: int) -> None:
            for number in range(start, end):
                descriptor = os.open(self._path(keys[number]), os.O_RDONLY)
                try:
                    self.read_file(descriptor, rows[number])
                finally:
                    os.close(descriptor)

        spread(threads, len(keys), work)

    def read_file(self, descriptor: int, row: Rows) -> None:
        """Read one block from its open file."""
        read_row(descriptor, row, 0)

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            os.unlink(self._path(key))

    def sync(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            if _LIBC.syncfs(descriptor):
                raise OSError(ctypes.get_errno(), f"syncfs of {self._directory}")
        finally:
            os.close(descriptor)


class MappedFiles(FilePerBlock):
    """The same files, but a read maps each file and copies from the mapping."""

    def read_file(self, descriptor: int, row: Rows) -> None:
        with mmap.mmap(descriptor, row.nbytes, prot=mmap.PROT_READ) as view:
            np.copyto(row, np.frombuffer(view, dtype=np.uint8))


class Segments:
    """Room for exactly `capacity` blocks. If `indexed` is False, the slots are known only while this object lives."""

    parallel_writes = True

    def __init__(
        self,
        directory: Path,
        capacity: int,
        block_bytes: int,
        direct: bool,
        indexed: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._directory = directory
        self._capacity = capacity
        self._block_bytes = block_bytes
        self._direct = direct
        self._indexed = indexed
        self._per_segment = max(1, segment_bytes // block_bytes)
        self._places: dict[bytes, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._descriptors: list[int] = []
        self._index: lmdb.Environment

    def open(self) -> None:
        for first in range(0, self._capacity, self._per_segment):
            size = min(self._per_segment, self._capacity - first) * self._block_bytes
            path = self._directory / f"{first // self._per_segment:08d}.seg"
            self._descriptors.append(preallocate(path, size, self._direct))
        if self._indexed:
            self._index = lmdb.open(str(self._directory / "index"), map_size=_INDEX_MAP_BYTES, sync=False)
            self._recover()

    def _recover(self) -> None:
        with self._index.begin() as transaction, transaction.cursor() as cursor:
            entries = {key: _ENTRY.unpack(value) for key, value in cursor}
        self._places = {key: entry[0] * self._per_segment + entry[1] for key, entry in entries.items()}
        taken = set(self._places.values())
        self._free = [place for place in range(self._capacity - 1, -1, -1) if place not in taken]

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        if self._indexed:
            self._index.close()

    def keys(self) -> set[bytes]:
        return set(self._places)

    def _locate(self, place: int) -> tuple[int, int]:
        segment, slot = divmod(place, self._per_segment)
        return self._descriptors[segment], slot * self._block_bytes

    def write(self, keys: Sequence[bytes], rows: Sequence[Rows], threads: int) -> None:
        places = [self._free.pop() for _ in keys]

        def work(start: int, end: int) -> None:
            for number in range(start, end):
                descriptor, offset = self._locate(places[number])
                write_row(descriptor, rows[number], offset)

        spread(threads, len(keys), work)
        self._places.update(zip(keys, places, strict=True))
        if self._indexed:
            with self._index.begin(write=True) as transaction:
                for key, place in zip(keys, places, strict=True):
                    transaction.put(key, _ENTRY.pack(*divmod(place, self._per_segment), 0, 0, 0, 0, 0, 0))

    def read(self, keys: Sequence[bytes], rows: Rows, threads: int) -> None:
        def work(start: int, end: int) -> None:
            for number in range(start, end):
                descriptor, offset = self._locate(self._places[keys[number]])
                read_row(descriptor, rows[number], offset)

        spread(threads, len(keys), work)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._free += [self._places.pop(key) for key in keys]
        if self._indexed:
            with self._index.begin(write=True) as transaction:
                for key in keys:
                    transaction.delete(key)

    def sync(self) -> None:
        for descriptor in self._descriptors:
            os.fdatasync(descriptor)
        if self._indexed:
            self._index.sync(True)


class LevelDb:
    """Uses plyvel without compression, since the blocks do not compress. A synchronous empty batch ends a write."""

    parallel_writes = False  # its writers queue for one log

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._db: Any

    def open(self) -> None:
        import plyvel

        self._db = plyvel.DB(str(self._directory), create_if_missing=True, compression=None)

    def close(self) -> None:
        self._db.close()

    def keys(self) -> set[bytes]:
        return set(self._db.iterator(include_value=False))

    def write(self, keys: Sequence[bytes], rows: Sequence[Rows], threads: int) -> None:
        with self._db.write_batch() as batch:
            for key, row in zip(keys, rows, strict=True):
                batch.put(key, row.tobytes())

    def read(self, keys: Sequence[bytes], rows: Rows, threads: int) -> None:
        def work(start: int, end: int) -> None:
            for number in range(start, end):
                value = self._db.get(keys[number])
                if value is None:
                    raise KeyError(keys[number])
                rows[number] = np.frombuffer(value, dtype=np.uint8)

        spread(threads, len(keys), work)

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._db.write_batch() as batch:
            for key in keys:
                batch.delete(key)

    def sync(self) -> None:
        self._db.put(b"\xff" * (KEY_BYTES + 1), b"", sync=True)
        self._db.delete(b"\xff" * (KEY_BYTES + 1))


# Name -> a function that makes the placement in an empty directory, for `capacity` blocks of `block_bytes`.
PLACEMENTS: Final[dict[str, Callable[[Path, int, int], Placement]]] = {
    PLAIN: lambda path, capacity, size: Segments(path, capacity, size, False, False, capacity * size),
    PLAIN_DIRECT: lambda path, capacity, size: Segments(path, capacity, size, True, False, capacity * size),
    SEGMENTS: lambda path, capacity, size: Segments(path, capacity, size, direct=False),
    SEGMENTS_DIRECT: lambda path, capacity, size: Segments(path, capacity, size, direct=True),
    FILES: lambda path, capacity, size: FilePerBlock(path),
    MAPPED: lambda path, capacity, size: MappedFiles(path),
    LMDB: lambda path, capacity, size: LmdbValues(path, _map_bytes(capacity, size)),
    LMDB_WRITEMAP: lambda path, capacity, size: LmdbValues(path, _map_bytes(capacity, size), writemap=True),
    LEVELDB: lambda path, capacity, size: LevelDb(path),
}


def _map_bytes(capacity: int, block_bytes: int) -> int:
    """The size of LMDB's map: enough for values that leave most of a page empty and for the gaps that replaced blocks
    leave. The space that is really used is measured."""
    return 8 * capacity * (block_bytes + ALIGNMENT) + (64 << 20)


def unavailable(names: Iterable[str], block_bytes: int, directory: Path) -> dict[str, str]:
    """The placements that cannot be measured on this machine with blocks of this size, and why."""
    reasons = {LEVELDB: missing_module("plyvel")}
    direct = _no_direct(block_bytes, directory)
    reasons |= {PLAIN_DIRECT: direct, SEGMENTS_DIRECT: direct}
    return {name: reasons[name] for name in names if reasons.get(name)}


def _no_direct(block_bytes: int, directory: Path) -> str:
    if block_bytes % ALIGNMENT:
        return f"O_DIRECT needs blocks of a multiple of {ALIGNMENT} bytes"
    probe = directory / "direct"
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as error:
        return f"no O_DIRECT on this file system: {error.strerror}"
    finally:
        probe.unlink(missing_ok=True)
    return ""


def empty(directory: Path) -> None:
    """Replace a directory by a new, empty one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
