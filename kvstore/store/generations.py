"""The generation of each namespace on one shard. A purge raises this number, and all older blocks are then misses.

Engines hold copies of blocks in their GPUs, in host memory and in transfers. So it is not enough to remove the blocks
from the store: engines must not set older blocks again either. A SET says in which generation its blocks were made, and
a shard at a higher generation refuses them.

The client that purges chooses the new generation. It is higher than every generation that the client knows, and at
least the time in nanoseconds since 1970. So no generation is used twice, not even by a store that has lost its memory,
unless a clock is put back. Generation 0 means that the shard knows of no purge of the namespace. A generation outlives
the namespace's blocks and, with a disk tier, the process. A file in the shard's folder records the generation before
any block is removed. The file also says which removals are not complete.

Only the thread of the shard's loop uses this module. Writing the file blocks that thread for some milliseconds per
purge.
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
MAX_GENERATIONS: Final = 65536  # the most namespaces with a generation of their own
LATEST_S: Final = 86400.0  # how far in the future a generation may be, in seconds, because clocks differ
_SUM_BYTES: Final = 8

log = logging.getLogger("kvstore.shard")


class _Saved(msgspec.Struct, array_like=True):
    least: int
    known: dict[bytes, int]
    emptying: list[bytes]


class Generations:
    """The generations of namespaces, by the namespaces' ids."""

    def __init__(self) -> None:
        self._least = 0  # the lowest generation of any namespace
        self._known: dict[bytes, int] = {}
        self._emptying: dict[bytes, int] = {}  # by namespace: how many removals of older blocks are in progress
        self._path: Path | None = None
        self._failing = False

    def of(self, namespace_id: bytes) -> int:
        """Return the generation of a namespace."""
        return max(self._least, self._known.get(namespace_id, 0))

    @property
    def highest(self) -> int:
        """The highest generation of all namespaces."""
        return max(self._least, *self._known.values()) if self._known else self._least

    def raise_to(self, namespace_id: bytes, generation: int) -> None:
        """Raise a namespace to this generation, unless it is at a higher one."""
        if generation <= self.of(namespace_id):
            return
        self._known.pop(namespace_id, None)  # so that the namespace moves to the end of the dict
        self._known[namespace_id] = generation
        while len(self._known) > MAX_GENERATIONS:
            # The forgotten generation then applies to all namespaces. So too many blocks are misses, but never too few.
            self._least = max(self._least, self._known.pop(next(iter(self._known))))

    def raise_all(self, generation: int) -> None:
        """Raise every namespace to at least this generation, including namespaces that do not exist yet."""
        self._least = max(self._least, generation)
        self._known = {each: known for each, known in self._known.items() if known > self._least}

    # ---- removals --------------------------------------------------------------------------------------------

    def is_emptying(self, namespace_id: bytes) -> bool:
        """Return whether blocks of an earlier generation may still be there. Until they are removed, no block of the
        namespace may be found."""
        return namespace_id in self._emptying

    @property
    def emptying(self) -> list[bytes]:
        """The namespaces whose blocks of an earlier generation are being removed."""
        return list(self._emptying)

    def begin_emptying(self, namespace_id: bytes) -> None:
        """Record that a removal of older blocks begins."""
        self._emptying[namespace_id] = self._emptying.get(namespace_id, 0) + 1

    def end_emptying(self, namespace_id: bytes) -> None:
        """Record that a removal has ended."""
        left = self._emptying.get(namespace_id, 0) - 1
        if left > 0:
            self._emptying[namespace_id] = left
        else:
            self._emptying.pop(namespace_id, None)

    # ---- the file --------------------------------------------------------------------------------------------

    def keep_in(self, directory: Path) -> None:
        """Read the file that an earlier process has written in this folder, and save to it from now on. A damaged file
        is logged. Clients that know of later purges then report them to the shard."""
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
            log.error("disk: %s is damaged (%s): this shard may not know of purges before its start", path, error)
            return
        self._least, self._known = saved.least, saved.known
        self._emptying = dict.fromkeys(saved.emptying, 1)

    def save(self) -> None:
        """Write all generations to the file, if there is one. A failure is logged, and the generations in memory stay
        valid."""
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

    def save_again(self) -> None:
        """Write the file if the last attempt failed."""
        if self._failing:
            self.save()


def next_generation(known: int) -> int:
    """Return an unused generation that is higher than `known`."""
    return max(known + 1, time.time_ns())


def check_generation(generation: int) -> None:
    """Raise `WireError` if a generation is too far in the future, because no later purge would be possible until that
    time."""
    latest = time.time_ns() + int(LATEST_S * 1e9)
    if generation > latest:
        raise WireError(
            ErrorCode.LIMIT,
            f"generation {generation}: expected nanoseconds since 1970, at most a day ahead of this server's clock, so "
            f"at most {latest}; set the clocks",
        )
