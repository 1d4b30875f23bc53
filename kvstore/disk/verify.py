"""Checks a disk tier that no server uses: every entry of its indexes, and every block against its checksum.

Nothing is changed, so even a folder on a read-only file system can be checked. A separate process reads the index
(`keeper.read_index`), because a damaged index can crash its reader. Entries that the process sent before a crash are
still checked. A namespace's blocks are read in the order of their places, each file from its beginning.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore._cext import read_blocks
from kvstore.disk.entries import ENTRY, Entries
from kvstore.disk.format import (
    LOCK_FILE,
    DiskFormatError,
    Layout,
    check_key,
    flock_within,
    lock_holder,
    read_layout,
    segment_path,
)
from kvstore.disk.keeper import read_index
from kvstore.disk.messages import IndexedNamespace, KeeperFailed, Recovered, RecoveryDone
from kvstore.disk.sealing import Cipher, Seal, seal_of
from kvstore.disk.segments import CORRUPT, bypasses_page_cache, open_segment
from kvstore.wire import WireError, decode_namespace, namespace_id

if TYPE_CHECKING:
    from kvstore.disk.encryption import DiskKey

VERIFY_BATCH_BYTES: Final = 8 << 20
VERIFY_LOCK_WAIT_S: Final = 1.0  # a server that was just killed may still be ending

Progress = Callable[[int, int], None]  # the bytes done so far, and the bytes in all


class DamagedBlock(msgspec.Struct, frozen=True):
    """A block that would be a miss for clients, because its bytes are wrong or cannot be read."""

    shard: int
    namespace: str  # the namespace's id, in hexadecimal
    model: str
    key: str  # in hexadecimal
    segment: int
    place: int  # the slot within the segment
    reason: str


class MissingSegment(msgspec.Struct, frozen=True):
    """A segment file that is in the index but cannot be used, and the number of blocks that are lost with it."""

    shard: int
    segment: int
    blocks: int
    reason: str


class VerifyReport(msgspec.Struct):
    """What a check has found so far, and its result. `ok`: whether no damage was found."""

    ok: bool
    path: str
    shards: int
    blocks: int = 0  # the number of blocks whose bytes were checked
    bytes: int = 0
    expired_blocks: int = 0  # the number of expired blocks, which were not checked
    damaged: list[DamagedBlock] = []
    missing_segments: list[MissingSegment] = []
    bad_entries: int = 0  # the number of index entries whose guard failed
    index_damage: list[str] = []  # reasons why an index was not read to its end, or its blocks were not checked


@dataclass
class _Namespace:
    """One namespace's entries on one shard."""

    shard: int
    id: str
    model: str
    block_bytes: int
    key_bytes: int
    keys: npt.NDArray[np.uint8]
    entries: Entries
    seal: Seal | None

    @property
    def slot_bytes(self) -> int:
        return self.block_bytes if self.seal is None else self.seal.slot_bytes

    def read(self, fd: int, memory: mmap.mmap, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        """Read the blocks of these rows, which are in one segment, to the beginning of `memory`. Return the blocks'
        statuses, as `read_blocks` does."""
        places = np.arange(len(rows), dtype=np.int64) * self.block_bytes
        offsets = self.entries["place"][rows].astype(np.int64) * self.slot_bytes
        sums = np.ascontiguousarray(self.entries["checksum"][rows])
        if self.seal is None:
            return read_blocks(fd, memory, places, offsets, self.block_bytes, sums)
        return self.seal.read(fd, memory, places, offsets, self.keys[rows].tobytes(), sums)

    def damaged(self, row: int, reason: str) -> DamagedBlock:
        segment, place = int(self.entries["segment"][row]), int(self.entries["place"][row])
        return DamagedBlock(self.shard, self.id, self.model, self.keys[row].tobytes().hex(), segment, place, reason)


def verify(path: Path, progress: Progress, key: DiskKey | None = None) -> VerifyReport:
    """Check the disk tier in the folder `path`. Blocks until all of it is read.

    key: the operator's key, for an encrypted folder.
    progress: a function that is called with the number of bytes checked so far and the total number.

    Raises `DiskFormatError` if `path` is not a disk tier of this format version, cannot be read, is in use by a server,
    or has another key.
    """
    layout = _find(path)
    check_key(layout, key)
    found = VerifyReport(ok=False, path=str(path), shards=layout.shards)
    with ExitStack() as locks:
        namespaces: list[_Namespace] = []
        for shard in range(layout.shards):
            directory = layout.shard_directory(shard)
            if directory.is_dir():
                locks.enter_context(_unused(directory))
                namespaces += _read_index(layout, shard, _cipher(layout, key, shard), found)
            else:
                found.index_damage.append(f"shard {shard}: its folder {directory} is missing")
        total = sum(len(namespace.entries) * namespace.block_bytes for namespace in namespaces)
        done = 0
        progress(done, total)
        for namespace in namespaces:
            for checked in _check_namespace(layout, namespace, found):
                done += checked
                progress(done, total)
    found.ok = not (found.damaged or found.missing_segments or found.bad_entries or found.index_damage)
    return found


def _cipher(layout: Layout, key: DiskKey | None, shard: int) -> Cipher | None:
    if layout.encryption is None or key is None:
        return None
    from kvstore.disk.encryption import AESGCMCipher

    return AESGCMCipher(key.shard_key(layout.encryption, shard))


def _find(path: Path) -> Layout:
    if not path.exists():
        raise DiskFormatError(f"{path}: no such folder")
    layout = read_layout(path)
    if not any(layout.shard_directory(shard).is_dir() for shard in range(layout.shards)):
        raise DiskFormatError(
            f"{path} holds none of the {layout.shards} folder(s) shard-0 ... of its disk tier: "
            "give the folder that --disk names"
        )
    return layout


@contextmanager
def _unused(directory: Path) -> Iterator[None]:
    """Keep servers from using a shard's folder while it is checked. Raises `DiskFormatError` if a server is using the
    folder."""
    try:
        fd = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # servers make this file and never remove it, so none is running
        yield
        return
    except OSError as error:
        raise DiskFormatError(f"{directory} cannot be read: {error}") from None
    try:
        if not flock_within(fd, fcntl.LOCK_SH, VERIFY_LOCK_WAIT_S):
            raise DiskFormatError(
                f"{directory} is in use by a running server ({lock_holder(fd)}): stop it first, or let it check "
                "itself: kvstore verify --endpoint HOST:PORT"
            )
        yield
    finally:
        os.close(fd)


# ---- the index -----------------------------------------------------------------------------------------------------


def _read_index(layout: Layout, shard: int, cipher: Cipher | None, found: VerifyReport) -> list[_Namespace]:
    known: dict[int, IndexedNamespace] = {}
    pieces: dict[int, list[Recovered]] = {}
    for event in read_index(layout.shard_directory(shard)):
        if isinstance(event, IndexedNamespace):
            known[event.ordinal] = event
        elif isinstance(event, Recovered):
            pieces.setdefault(event.ordinal, []).append(event)
        elif isinstance(event, RecoveryDone):
            found.bad_entries += event.bad_entries
            if event.damage:
                found.index_damage.append(f"shard {shard}: the index: {event.damage}")
        elif isinstance(event, KeeperFailed):
            found.index_damage.append(f"shard {shard}: the index could not be read to its end: {event.message}")
    namespaces = [_namespace(shard, known[ordinal], some, cipher, found) for ordinal, some in pieces.items()]
    return [namespace for namespace in namespaces if namespace is not None]


def _namespace(
    shard: int, event: IndexedNamespace, pieces: list[Recovered], cipher: Cipher | None, found: VerifyReport
) -> _Namespace | None:
    """Return the entries of a namespace that have not expired, in the order of segment and place. Return None if the
    namespace is unreadable."""
    entries = np.frombuffer(b"".join([piece.entries for piece in pieces]), dtype=ENTRY)
    keys = np.frombuffer(b"".join([piece.keys for piece in pieces]), dtype=np.uint8).reshape(-1, event.key_bytes)
    name = namespace_id(event.canonical).hex()
    try:
        header = decode_namespace(event.canonical)
    except WireError as error:
        found.index_damage.append(f"shard {shard}: {len(entries)} blocks of namespace {name} not checked: {error}")
        return None
    alive = (entries["expires"] == 0) | (entries["expires"] > time.time())
    found.expired_blocks += int((~alive).sum())
    entries, keys = entries[alive], keys[alive]
    order = np.lexsort((entries["place"], entries["segment"]))
    return _Namespace(
        shard,
        name,
        header.model,
        header.block_bytes,
        event.key_bytes,
        keys[order],
        entries[order].astype(ENTRY),
        seal_of(event.canonical, event.key_bytes, header.block_bytes, header.opaque_sums, cipher),
    )


# ---- the blocks ----------------------------------------------------------------------------------------------------


def _check_namespace(layout: Layout, namespace: _Namespace, found: VerifyReport) -> Iterator[int]:
    """Check a namespace's blocks. Yields, piece by piece, the number of bytes that were checked or are missing."""
    segments = namespace.entries["segment"]
    for segment in np.unique(segments).tolist():
        start, end = np.searchsorted(segments, [segment, segment + 1]).tolist()
        try:
            fd = _open(layout, namespace, segment)
        except OSError as error:
            reason = error.strerror or str(error)
            found.missing_segments.append(MissingSegment(namespace.shard, segment, end - start, reason))
            yield (end - start) * namespace.block_bytes
            continue
        try:
            yield from _check_segment(layout, namespace, fd, np.arange(start, end), found)
        finally:
            os.close(fd)


def _open(layout: Layout, namespace: _Namespace, segment: int) -> int:
    """Open a segment for reading, as the tier does. Raises `OSError`, also if the file has a wrong size."""
    path = segment_path(layout.shard_directory(namespace.shard), segment)
    size = path.stat().st_size
    if size != layout.segment_bytes:
        raise OSError(errno.EINVAL, f"the file has {size} bytes: expected {layout.segment_bytes}", str(path))
    return open_segment(path, os.O_RDONLY, bypasses_page_cache(namespace.slot_bytes))


def _check_segment(
    layout: Layout, namespace: _Namespace, fd: int, rows: npt.NDArray[np.intp], found: VerifyReport
) -> Iterator[int]:
    size = namespace.block_bytes
    outside = namespace.entries["place"][rows] >= layout.segment_bytes // namespace.slot_bytes
    for row in rows[outside].tolist():
        found.damaged.append(namespace.damaged(row, "its place is not in the segment"))
    yield int(outside.sum()) * size
    rows = rows[~outside]
    step = max(1, VERIFY_BATCH_BYTES // size)
    with mmap.mmap(-1, min(step, max(1, len(rows))) * size) as memory:
        for at in range(0, len(rows), step):
            some = rows[at : at + step]
            status = namespace.read(fd, memory, some)
            for number in np.flatnonzero(status).tolist():
                code = int(status[number])
                reason = "its bytes are not those of its checksum" if code == CORRUPT else os.strerror(code)
                found.damaged.append(namespace.damaged(int(some[number]), reason))
            found.blocks += len(some)
            found.bytes += len(some) * size
            yield len(some) * size
