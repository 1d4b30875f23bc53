"""The keeper: the only process that opens a shard's persistent index. It is a child of the shard, and a socketpair
connects the two.

LMDB maps its file and trusts the content. Its pages have no checksums, so a damaged page can crash or mislead the
process that reads it. Therefore the keeper maps the index, and the shard never does. So damage can kill only the
keeper. At the start the keeper reads the old index in key order, and accepts only records whose guards are right. It
sends them to the shard, and writes them to a new environment, `index.new/`. When the new environment is complete, its
file replaces the old one. So no damage survives a start, not even damage to free lists. Until then the old index is not
changed.

After that the keeper applies operations in the order in which they were sent. It commits with fsync `COMMIT_DELAY_S`
after the first uncommitted operation, or at `COMMIT_ENTRIES` uncommitted entries. It also commits when the shard
requests it, and when the shard's end of the socket is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import operator
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore import logs
from kvstore.disk import messages
from kvstore.disk.entries import (
    ENTRY,
    ORDINAL_BYTES,
    VALUE_BYTES,
    check_entries,
    pack_entries,
    pack_namespace,
    record_keys,
    unpack_namespace,
    unpack_ordinal,
)
from kvstore.disk.format import INDEX, NO_SPACE
from kvstore.disk.index_files import BLOCKS, DATA_FILE, NAMESPACES_TABLE, NewIndex, OldIndex, Record
from kvstore.disk.messages import IndexedNamespace, Operation

COMMIT_DELAY_S: Final = 0.25
COMMIT_ENTRIES: Final = 8192
_REBUILD_COMMIT_ENTRIES: Final = 1 << 17  # bounds the memory of uncommitted pages
_NEARLY_FULL_BYTES: Final = 1 << 20
_RECV_BYTES: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1


class ShardGone(Exception):
    """The error when the shard's end of the socketpair is closed."""


class ShardSocket:
    """The keeper's connection to the shard. All methods block."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._inbox = messages.Inbox(messages.OPERATIONS)

    def tell(self, event: messages.Event) -> None:
        """Send an event. Raises `ShardGone`."""
        try:
            self._sock.sendall(messages.frame(event))
        except ConnectionError:
            raise ShardGone from None

    def hear(self, timeout_s: float | None) -> Iterator[Operation]:
        """Return the operations that have arrived, or none after `timeout_s`. Raises `ShardGone` after the last one."""
        if timeout_s is not None and not self._readable.poll(timeout_s * 1000):
            return iter(())
        try:
            data = self._sock.recv(_RECV_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise ShardGone
        return self._inbox.feed(data)


class IndexRebuild:
    """Reads the old index and sends its valid records to the shard. With `rebuild`, also writes them to a new index.

    If writing fails, reading goes on, so that the shard gets the records of the old index even when the disk is full.
    """

    def __init__(self, directory: Path, shard: ShardSocket) -> None:
        self._directory = directory
        self._old = OldIndex(directory)
        self._new: NewIndex | None = None
        self._failure: Exception | None = None
        self._shard = shard
        self._last_key = b""
        self.namespaces: dict[int, IndexedNamespace] = {}  # by ordinal
        self.entries = 0
        self.bad = 0

    def rebuild(self, map_bytes: int) -> NewIndex:
        """Read the old index and replace it. Return the new index. Raises the error if the new index cannot be
        written."""
        try:
            new = self._new = NewIndex(self._directory, map_bytes)
        except (lmdb.Error, OSError) as error:
            self._failure = error
        self._read()
        if self._failure is not None:
            raise self._failure
        new.replace_old()
        self._tell_done()
        return new

    def read(self) -> None:
        """Read the old index without changing anything."""
        self._read()
        self._tell_done()

    def _read(self) -> None:
        self._recover_namespaces()
        self._shard.tell(messages.NamespacesKnown())
        for records in self._old.records(BLOCKS):
            for key_size, group in itertools.groupby(records, _group_of):
                self._recover_blocks(*key_size, list(group))

    def _tell_done(self) -> None:
        self._shard.tell(messages.RecoveryDone(self.entries, self.bad, self._old.damage))

    def _write(self, write: Callable[[NewIndex], None]) -> None:
        if self._new is None:
            return
        try:
            write(self._new)
            if self._new.pending >= _REBUILD_COMMIT_ENTRIES:
                self._new.commit()
        except (lmdb.Error, OSError) as error:
            self._new, self._failure = None, error

    def _recover_namespaces(self) -> None:
        known: set[bytes] = set()
        for records in self._old.records(NAMESPACES_TABLE):
            for key, value in records:
                ordinal, found = unpack_ordinal(key), unpack_namespace(value)
                if len(key) != ORDINAL_BYTES or found is None or found[0] in known or ordinal in self.namespaces:
                    self.bad += 1
                    continue
                namespace = self.namespaces[ordinal] = IndexedNamespace(ordinal, *found)
                known.add(namespace.canonical)
                self._write(operator.methodcaller("put_namespace", ordinal, value))
                self._shard.tell(namespace)

    def _recover_blocks(self, prefix: bytes, key_size: int, value_size: int, records: list[Record]) -> None:
        """Recover records of one namespace. All keys must have the same size, and all values, too."""
        namespace = self.namespaces.get(unpack_ordinal(prefix))
        if namespace is None or key_size != ORDINAL_BYTES + namespace.key_bytes or value_size != VALUE_BYTES:
            self.bad += len(records)
            return
        values = b"".join([value for _, value in records])
        entries, good = check_entries(namespace.canonical, namespace.key_bytes, _keys_in(records), values)
        if not good.all() or not self._in_order(records):
            right = self._select(records, good)
            self.bad += len(records) - len(right)
            records, entries = [records[row] for row in right], entries[right]
            if not records:
                return
        self._last_key = records[-1][0]
        self.entries += len(records)
        self._write(operator.methodcaller("put", records, append=True))
        self._shard.tell(messages.Recovered(namespace.ordinal, _keys_in(records), entries.tobytes()))

    def _in_order(self, records: list[Record]) -> bool:
        keys = [key for key, _ in records]
        return self._last_key < keys[0] and all(map(operator.lt, keys, itertools.islice(keys, 1, None)))

    def _select(self, records: list[Record], good: npt.NDArray[np.bool_]) -> list[int]:
        """Return the rows whose guards are right and whose keys ascend.

        A record that is out of order either was read before, or lies on a page that is no longer part of the tree.
        """
        last, rows = self._last_key, []
        for row in good.nonzero()[0].tolist():
            key = records[row][0]
            if last < key:
                last = key
                rows.append(row)
        return rows


def _group_of(record: Record) -> tuple[bytes, int, int]:
    return record[0][:ORDINAL_BYTES], len(record[0]), len(record[1])


def _keys_in(records: list[Record]) -> bytes:
    return b"".join([key[ORDINAL_BYTES:] for key, _ in records])


class Service:
    """Applies the shard's operations and commits them."""

    def __init__(self, index: NewIndex, shard: ShardSocket, namespaces: dict[int, IndexedNamespace]) -> None:
        self._index = index
        self._shard = shard
        self._namespaces = namespaces
        self._applied = 0
        self._committed = 0
        self._commit_now = False
        self._stop = False

    def run(self) -> None:
        """Serve until the shard sends STOP or is gone. When this returns, everything that the shard has sent is
        committed."""
        try:
            while not self._stop:
                wait_s = max(0.0, self._index.since + COMMIT_DELAY_S - time.monotonic()) if self._index.dirty else None
                for message in self._shard.hear(wait_s):
                    self._apply(message)
                if self._due():
                    self._commit()
        except ShardGone:
            self._index.commit()

    def _due(self) -> bool:
        index = self._index
        if self._commit_now or self._stop or index.pending >= COMMIT_ENTRIES:
            return True
        return index.dirty and time.monotonic() >= index.since + COMMIT_DELAY_S

    def _commit(self) -> None:
        self._index.commit()
        self._commit_now = False
        if self._committed != self._applied:
            self._committed = self._applied
            self._shard.tell(messages.Committed(self._committed))

    def _apply(self, operation: Operation) -> None:
        index = self._index
        if isinstance(operation, messages.Put):
            ordinal, keys = operation.ordinal, operation.keys
            namespace, entries = self._namespaces[ordinal], np.frombuffer(operation.entries, ENTRY)
            values = pack_entries(namespace.canonical, namespace.key_bytes, keys, entries)
            index.put(list(zip(record_keys(ordinal, namespace.key_bytes, keys), values, strict=True)))
        elif isinstance(operation, messages.DropEntries):
            key_bytes = self._namespaces[operation.ordinal].key_bytes
            index.delete(record_keys(operation.ordinal, key_bytes, operation.keys))
        elif isinstance(operation, IndexedNamespace):
            ordinal, canonical = operation.ordinal, operation.canonical
            self._namespaces[ordinal] = operation
            index.put_namespace(ordinal, pack_namespace(canonical, operation.key_bytes, operation.replicas))
        elif isinstance(operation, messages.ForgetNamespace):
            del self._namespaces[operation.ordinal]
            index.delete_namespace(operation.ordinal)
        self._commit_now = self._commit_now or isinstance(operation, messages.CommitNow)
        self._stop = self._stop or isinstance(operation, messages.Stop)
        if isinstance(operation, messages.Sequenced):
            self._applied = operation.sequence


def run(directory: Path, shard: ShardSocket, mode: str, map_bytes: int) -> None:
    """Run in one of three modes. `recover`: send the old index to the shard, replace it, then serve. `fresh`: discard
    the old index, then serve. `read`: send the old index, and change nothing."""
    if mode == "fresh":
        (directory / INDEX / DATA_FILE).unlink(missing_ok=True)  # first, because the new index may need its space
        index = NewIndex(directory, map_bytes)
        index.replace_old()
        Service(index, shard, {}).run()
        return
    recovery = IndexRebuild(directory, shard)
    if mode == "read":
        recovery.read()
    else:
        index = recovery.rebuild(map_bytes)
        Service(index, shard, recovery.namespaces).run()


def _free_bytes(directory: Path) -> int:
    """Return the number of bytes that an unprivileged process can still write to the file system of `directory`."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def main() -> None:
    """The entry point of a keeper. The arguments are the folder of the code, the shard's folder, the socket's
    descriptor, the mode, the map's size in bytes, and the log's level, name and format."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the shard decides when its keeper ends
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _, _, directory, fd, mode, map_bytes, *log = sys.argv
    logs.configure(*log)
    sock = socket.socket(fileno=int(fd))
    shard = ShardSocket(sock)
    try:
        run(Path(directory), shard, mode, int(map_bytes))
    except ShardGone:
        pass  # the shard was killed, or has given up this keeper
    except (lmdb.Error, OSError) as error:
        sentence = f"the index of {directory} failed: {type(error).__name__}: {error}"
        free_bytes = _free_bytes(Path(directory))
        no_space = any(os.strerror(code) in str(error) for code in NO_SPACE)
        if free_bytes < _NEARLY_FULL_BYTES:  # LMDB reports the first short write as EIO
            no_space = True
            sentence += f"; no space left: {free_bytes} bytes are free on this file system"
        with contextlib.suppress(ShardGone):
            shard.tell(messages.KeeperFailed(sentence, no_space))
        sys.exit(1)
    finally:
        sock.detach()  # the kernel closes it when the process ends, so the exit status follows at once
