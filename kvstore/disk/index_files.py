"""The files of a persistent index: the LMDB environment that an earlier run left, and the one that is being written.

Only the keeper's process (`keeper_process`) uses them. LMDB maps its file and trusts the content, so reading a damaged
file may crash the process.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import lmdb

from kvstore.disk.entries import pack_ordinal
from kvstore.disk.format import INDEX

INDEX_NEW: Final = "index.new"
DATA_FILE: Final = "data.mdb"
BLOCKS: Final = b"blocks"
NAMESPACES_TABLE: Final = b"namespaces"
_BATCH: Final = 2048  # records in a batch; if damage crashes the process during a batch, the whole batch is lost
_READ_S: Final = 30.0  # if a batch takes longer, damage has put LMDB into an endless loop
_MIN_RECORD_BYTES: Final = 18  # the smallest size of a record in the file

Record: TypeAlias = tuple[bytes, bytes]


class OldIndex:
    """An index that may be damaged. All its records must be checked. Reading it may crash the process."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / INDEX
        self.damage = ""

    def records(self, table: bytes) -> Iterator[list[Record]]:
        """Yield a table's records in batches, in the order of their keys unless the table is damaged.

        If damage stops LMDB, the batches end early and `damage` is set. If there is no file, the table counts as empty.
        """
        if not (self._path / DATA_FILE).exists():
            return
        batch: list[Record] = []
        try:
            size = (self._path / DATA_FILE).stat().st_size
            with lmdb.open(str(self._path), readonly=True, create=False, lock=False, max_dbs=2) as environment:
                db = environment.open_db(table, create=False)
                with environment.begin(db) as transaction, transaction.cursor() as cursor:
                    records = iter(cursor)
                    for _ in range(size // _MIN_RECORD_BYTES // _BATCH + 2):  # the last iteration finds no records
                        # SIGALRM's default action ends the process, even while it is inside LMDB.
                        signal.setitimer(signal.ITIMER_REAL, _READ_S)
                        batch.extend(itertools.islice(records, _BATCH))
                        signal.setitimer(signal.ITIMER_REAL, 0)
                        if not batch:
                            return
                        yield batch
                        batch = []
            self.damage = "its pages are linked in circles"
        except (lmdb.Error, MemoryError, OSError) as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.damage = f"{type(error).__name__}: {error}"
            yield batch  # the records that were read before the error


class NewIndex:
    """The index that is being written. Use it on one thread only.

    pending: the number of entries that are not committed yet.
    since: when the first of these entries came, in monotonic seconds.
    """

    def __init__(self, directory: Path, map_bytes: int) -> None:
        self._directory = directory
        path = directory / INDEX_NEW
        shutil.rmtree(path, ignore_errors=True)  # left by an interrupted start; mkdir fails if it remains
        path.mkdir()
        # LMDB's own locks are not needed: the process has one thread and holds the shard's lock.
        self._environment = lmdb.open(str(path), map_size=map_bytes, max_dbs=2, mode=0o600, lock=False)
        self._blocks = self._environment.open_db(BLOCKS)
        self._namespaces = self._environment.open_db(NAMESPACES_TABLE)
        self._transaction: lmdb.Transaction | None = None
        self.pending = 0
        self.since = 0.0

    def _begin(self, entries: int) -> lmdb.Transaction:
        if self._transaction is None:
            self._transaction = self._environment.begin(write=True)
            self.since = time.monotonic()
        self.pending += entries
        return self._transaction

    @property
    def dirty(self) -> bool:
        return self._transaction is not None

    def put(self, records: list[Record], append: bool = False) -> None:
        """Put records. `append`: whether their keys are in order and greater than all keys in the table."""
        with self._begin(len(records)).cursor(self._blocks) as cursor:
            cursor.putmulti(records, append=append)

    def delete(self, keys: list[bytes]) -> None:
        transaction = self._begin(len(keys))
        for key in keys:
            transaction.delete(key, db=self._blocks)

    def put_namespace(self, ordinal: int, value: bytes) -> None:
        self._begin(1).put(pack_ordinal(ordinal), value, db=self._namespaces)

    def delete_namespace(self, ordinal: int) -> None:
        self._begin(1).delete(pack_ordinal(ordinal), db=self._namespaces)

    def commit(self) -> None:
        """Commit all operations so far. Blocks until they are on the disk."""
        transaction, self._transaction = self._transaction, None
        self.pending = 0
        if transaction is not None:
            transaction.commit()

    def replace_old(self) -> None:
        """Commit, and then replace the old index atomically."""
        self.commit()
        old, new = self._directory / INDEX, self._directory / INDEX_NEW
        old.mkdir(exist_ok=True)
        (new / DATA_FILE).replace(old / DATA_FILE)
        new.rmdir()
        for directory in (old, self._directory):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(fd)
            os.close(fd)
