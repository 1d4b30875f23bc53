"""The generation of each namespace on one shard: a number that a purge raises, and that makes all older blocks misses.

Engines hold copies of what the store has: in their GPUs, in host memory, on their way. So it is not enough to remove
blocks: what was made before the purge must not be set again. A SET says in which generation its blocks were made, and
a shard at a higher one refuses them.

A generation is chosen by who purges: more than all that he knows, and at least the time in nanoseconds since 1970. So
none is used twice, not even by a store that has lost its memory, unless a clock is put back. 0: nobody has purged the
namespace, as far as the shard knows. It outlives the namespace's blocks, and with a disk tier the process: a file in
the shard's folder has it, written before a block is removed, and says which removals were not complete.

Only the thread of the shard's loop uses this module. Writing the file blocks it, for some milliseconds a purge.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from kvstore.wire import ErrorCode, WireError

FILE: Final = "generations"
MOST: Final = 65536  # namespaces with a generation of their own
LATEST_S: Final = 86400.0  # how far in the future one may be: clocks differ
_SUM_BYTES: Final = 8

log = logging.getLogger("kvstore.shard")


class _Saved(msgspec.Struct, array_like=True):
    least: int
    known: dict[bytes, int]
    emptying: list[bytes]


class Generations:
    """By the namespaces' ids."""

    def __init__(self) -> None:
        self._least = 0  # of every namespace
        self._known: dict[bytes, int] = {}
        self._emptying: dict[bytes, int] = {}  # how many removals of its older blocks are under way
        self._path: Path | None = None
        self._failing = False

    def of(self, namespace_id: bytes) -> int:
        """-> the generation of a namespace."""
        return max(self._least, self._known.get(namespace_id, 0))

    @property
    def highest(self) -> int:
        """Of all namespaces."""
        return max(self._least, *self._known.values()) if self._known else self._least

    def raise_to(self, namespace_id: bytes, generation: int) -> None:
        """The namespace is at this generation now, unless it is at a higher one."""
        if generation <= self.of(namespace_id):
            return
        self._known.pop(namespace_id, None)  # so that the dict is in the order of the last changes
        self._known[namespace_id] = generation
        while len(self._known) > MOST:  # what is forgotten counts for all: too many blocks are misses, never too few
            self._least = max(self._least, self._known.pop(next(iter(self._known))))

    def raise_all(self, generation: int) -> None:
        """Every namespace, also one that is not there now, is at this generation or a higher one."""
        self._least = max(self._least, generation)
        self._known = {each: known for each, known in self._known.items() if known > self._least}

    # ---- removals --------------------------------------------------------------------------------------------

    def is_emptying(self, namespace_id: bytes) -> bool:
        """Whether blocks of an earlier generation may still be there: none of the namespace's is to be found."""
        return namespace_id in self._emptying

    @property
    def emptying(self) -> list[bytes]:
        """The namespaces of which blocks of an earlier generation are being removed."""
        return list(self._emptying)

    def begin_emptying(self, namespace_id: bytes) -> None:
        """The removal of older blocks begins."""
        self._emptying[namespace_id] = self._emptying.get(namespace_id, 0) + 1

    def end_emptying(self, namespace_id: bytes) -> None:
        """They are removed."""
        left = self._emptying.get(namespace_id, 0) - 1
        if left > 0:
            self._emptying[namespace_id] = left
        else:
            self._emptying.pop(namespace_id, None)

    # ---- the file --------------------------------------------------------------------------------------------

    def keep_in(self, directory: Path) -> None:
        """Read what an earlier process has written there, and write to it from now on. A damaged file is logged: then
        clients that know better tell the shard."""
        self._path = path = directory / FILE
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            log.error("disk: the generations of namespaces cannot be read: %s", error)
            return
        body, saved_sum = data[:-_SUM_BYTES], data[-_SUM_BYTES:]
        try:
            if xxhash.xxh3_64_digest(body) != saved_sum:
                raise ValueError("its checksum does not match")
            saved = msgspec.msgpack.decode(body, type=_Saved)
        except (ValueError, msgspec.DecodeError) as error:
            log.error("disk: %s is damaged (%s): a purge from before this start may be unknown here", path, error)
            return
        self._least, self._known = saved.least, saved.known
        self._emptying = dict.fromkeys(saved.emptying, 1)

    def save(self) -> None:
        """Write all to the file, if there is one. A failure is logged: the shard goes on with what it knows."""
        if self._path is None:
            return
        body = msgspec.msgpack.encode(_Saved(self._least, self._known, list(self._emptying)))
        new = self._path.with_suffix(".new")
        try:
            with new.open("wb") as file:
                file.write(body + xxhash.xxh3_64_digest(body))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.error("disk: the generations of namespaces cannot be written: %s", error)
            self._failing = True


def next_generation(known: int) -> int:
    """-> one that is higher than `known`, and that nobody has used."""
    return max(known + 1, time.time_ns())


def check_generation(generation: int) -> None:
    """Raise `WireError` for one that lies in the future: whoever came after it would have to wait for its time."""
    latest = time.time_ns() + int(LATEST_S * 1e9)
    if generation > latest:
        raise WireError(
            ErrorCode.LIMIT,
            f"generation {generation}: expected nanoseconds since 1970, at most a day ahead of this server's clock "
            f"({latest}); set the clocks",
        )
