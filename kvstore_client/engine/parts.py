"""Blocks that the store has in parts, each of which can be asked for: ranges of heads, or groups of layers.

A rank of an engine has some consecutive heads of every block; with another number of ranks it has others. So that
engines of different tensor parallelism share blocks, the store has each block in ranges of heads, as many as the
largest engine has ranks, and a rank reads and sets those that it has. The groups of a hybrid model are parts, too.

Parts are blocks of one namespace. Their keys are the block's key and one byte more: the number of the part.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_client._calls.exchange import Steps
from kvstore_client._links.link import Link
from kvstore_client.engine.store import Present, Promised, Store
from kvstore_client.errors import KVStoreError
from kvstore_client.results import ClientStats, Lookup, SetResult

MAX_PARTS: Final = 256


class GroupParts(NamedTuple):
    """The groups of a hybrid model, as numbers of parts. A prefix needs the parts of all `tables` of each block, and
    those of all `states` of its last block alone."""

    tables: Sequence[int]
    states: Sequence[int]


class HeadParts(NamedTuple):
    """The parts that a rank has of every block: `mine`, of 0 … `of` - 1."""

    mine: range
    of: int


def part_keys(keys: Sequence[bytes], parts: Sequence[int]) -> list[bytes]:
    """The keys of these parts of every block, block by block."""
    suffixes = [bytes([part]) for part in parts]
    return [key + suffix for key in keys for suffix in suffixes]


class PartialBlocks:
    """The blocks of which the store has some parts, and not all yet. Used by one thread."""

    def __init__(self, parts: int, most: int) -> None:
        """parts: of a block. most: so many blocks are remembered; the oldest, of which some part failed, are not."""
        self._parts = parts
        self._most = most
        self._blocks: dict[bytes, tuple[set[int], bool]] = {}  # their parts; whether one was set here

    def add(self, there: Sequence[bytes], stored: Sequence[bytes]) -> set[bytes]:
        """The store has these parts; the last ones were just set. -> the keys of blocks that are complete by that, and
        of which some part was set here."""
        complete: set[bytes] = set()
        for keys, is_set in ((there, False), (stored, True)):
            for key in keys:
                block = key[:-1]
                parts, set_before = self._blocks.pop(block, (set(), False))
                parts.add(key[-1])
                if len(parts) < self._parts:
                    self._blocks[block] = parts, is_set or set_before
                elif is_set or set_before:
                    complete.add(block)
        for block in list(self._blocks)[: max(0, len(self._blocks) - self._most)]:
            del self._blocks[block]
        return complete


class SlicedPromise:
    """A promise of blocks that are kept in slices. What others have promised a slice of is theirs."""

    def __init__(self, promised: Promised, slices: int) -> None:
        self.present = whole_blocks(promised.present, slices)
        self.others: Present = np.asarray(promised.others.reshape(-1, slices).any(axis=1))
        self.renew = promised.renew
        self.withdraw = promised.withdraw


def whole_blocks(present: Present, slices: int) -> Present:
    """Which blocks have all their slices."""
    return np.asarray(present.reshape(-1, slices).all(axis=1))


class SlicedStore:
    """A `Store` of blocks that are kept in parts. A block is there if all these parts are; its memory has them one
    after the other. Thread-safe as the store itself.

    `store`: of the namespace of the parts; or of parts that are themselves in parts. `parts`: those that each call is
    about. Blocks in `stats` and in a `SetResult` are parts.
    """

    def __init__(self, store: Store, parts: Sequence[int]) -> None:
        self._store = store
        self._parts = parts

    def match_prefix(
        self, keys: Sequence[bytes], *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> int:
        found = self._store.match_prefix(
            part_keys(keys, self._parts), refresh=refresh, pin_s=pin_s, timeout_s=timeout_s
        )
        return found // len(self._parts)

    def contains(
        self, keys: Sequence[bytes], *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> Present:
        return self._whole(
            self._store.contains(part_keys(keys, self._parts), refresh=refresh, pin_s=pin_s, timeout_s=timeout_s)
        )

    def in_remote(self, keys: Sequence[bytes]) -> Present:
        return self._whole(self._store.in_remote(part_keys(keys, self._parts)))

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Lookup:
        found = self._store.lookup(part_keys(keys, self._parts), timeout_s=timeout_s)
        return Lookup(found.present // len(self._parts), found.promised // len(self._parts))

    def promise(self, keys: Sequence[bytes], *, ttl_s: float = 30.0, timeout_s: float | None = None) -> SlicedPromise:
        promised = self._store.promise(part_keys(keys, self._parts), ttl_s=ttl_s, timeout_s=timeout_s)
        return SlicedPromise(promised, len(self._parts))

    def get_into_steps(
        self,
        keys: Sequence[bytes],
        out: npt.NDArray[np.uint8],
        slots: Sequence[int],
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
        alone: bool = False,
    ) -> Steps[Present]:
        count = len(self._parts)
        rows = out.reshape(len(out) * count, -1)
        places = [slot * count + part for slot in slots for part in range(count)]
        present = yield from self._store.get_into_steps(
            part_keys(keys, self._parts), rows, places, wait_s=wait_s, timeout_s=timeout_s, alone=alone
        )
        return self._whole(present)

    def first_shards(self, keys: Sequence[bytes]) -> Set[Link]:
        return self._store.first_shards(part_keys(keys, self._parts))

    def set(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Any],
        *,
        deferred: bool = True,
        parent: Sequence[bytes | None],
        priority: int = 0,
        ttl_s: float | None = None,
        generation: int | None = None,
    ) -> SetResult:
        # A part follows the same part of the parent.
        parents = [None if each is None else each + bytes([part]) for each in parent for part in self._parts]
        return self._store.set(
            part_keys(keys, self._parts),
            [part for block in blocks for part in self._cut(memoryview(block).cast("B"))],
            deferred=deferred,
            parent=parents,
            priority=priority,
            ttl_s=ttl_s,
            generation=generation,
        )

    @property
    def generation(self) -> int:
        return self._store.generation

    @property
    def reached(self) -> bool:
        return self._store.reached

    def expire(self, keys: Sequence[bytes], *, ttl_s: float | None = None) -> Present:
        return self._whole(self._store.expire(part_keys(keys, self._parts), ttl_s=ttl_s))

    def _cut(self, block: memoryview) -> list[memoryview]:
        size = len(block) // len(self._parts)
        return [block[start:end] for start, end in pairwise(range(0, len(block) + 1, size))]

    def _whole(self, present: Present) -> Present:
        return whole_blocks(present, len(self._parts))

    def info(self, *, timeout_s: float | None = None) -> Any:
        return self._store.info(timeout_s=timeout_s)

    @property
    def stats(self) -> ClientStats:
        return self._store.stats

    def why_unanswered(self) -> KVStoreError:
        return self._store.why_unanswered()

    def close(self) -> None:
        self._store.close()


def __getattr__(name: str) -> Any:
    if name == "PartsStore":
        warnings.warn("kvstore_client.engine.parts.PartsStore is SlicedStore now", DeprecationWarning, stacklevel=2)
        return SlicedStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
