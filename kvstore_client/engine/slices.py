"""Blocks that the store keeps in slices. A slice is a range of heads or a group of layers, and can be read separately.

A rank of an engine has some consecutive heads of every block. The number of ranks determines which heads these are. So
that engines with different tensor parallelism can share blocks, the store divides each block into ranges of heads.
There are as many ranges as the largest engine has ranks, and a rank reads and sets the ranges that it has. The groups
of a hybrid model are slices, too.

For the store, slices are blocks of one namespace. A slice's key is the block's key followed by one byte, the number of
the slice.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_client._calls.exchange import Steps
from kvstore_client._links.link import Link
from kvstore_client.engine.store import Present, Store, StorePromise
from kvstore_client.errors import KVStoreError
from kvstore_client.results import ClientStats, Lookup, SetResult

MAX_SLICES: Final = 256


class GroupSlices(NamedTuple):
    """The groups of a hybrid model, as slice numbers. A prefix needs the slices in `tables` of every block, but the
    slices in `states` of its last block only."""

    tables: Sequence[int]
    states: Sequence[int]


class HeadSlices(NamedTuple):
    """The slices that a rank has of every block. A block has `of` slices, and the rank has those in `mine`."""

    mine: range
    of: int


def slice_keys(keys: Sequence[bytes], slices: Sequence[int]) -> list[bytes]:
    """Return the keys of these slices for every block, in the order of the blocks."""
    suffixes = [bytes([slice_index]) for slice_index in slices]
    return [key + suffix for key in keys for suffix in suffixes]


class PartialBlocks:
    """The blocks that have some, but not all, of their slices in the store. Not thread-safe."""

    def __init__(self, slices: int, most: int) -> None:
        """`slices`: the number of slices of a block. `most`: how many blocks are remembered at most. Beyond that, the
        oldest are forgotten, because one of their slices probably failed."""
        self._slices = slices
        self._most = most
        self._blocks: dict[bytes, tuple[set[int], bool]] = {}  # by key: stored slices; whether one was set here

    def add(self, there: Sequence[bytes], stored: Sequence[bytes]) -> set[bytes]:
        """Note that the store has the slices in `there`, and those in `stored`, which were just set. Return the keys of
        the blocks that are complete now, if at least one of their slices was set here."""
        complete: set[bytes] = set()
        for keys, is_set in ((there, False), (stored, True)):
            for key in keys:
                block = key[:-1]
                slices, set_before = self._blocks.pop(block, (set(), False))
                slices.add(key[-1])
                if len(slices) < self._slices:
                    self._blocks[block] = slices, is_set or set_before
                elif is_set or set_before:
                    complete.add(block)
        for block in list(self._blocks)[: max(0, len(self._blocks) - self._most)]:
            del self._blocks[block]
        return complete


class SlicedPromise:
    """A promise of blocks that are kept in slices. A block counts as promised by another client if any of its slices
    is."""

    def __init__(self, promised: StorePromise, slices: int) -> None:
        self.present = whole_blocks(promised.present, slices)
        self.others: Present = np.asarray(promised.others.reshape(-1, slices).any(axis=1))
        self.renew = promised.renew
        self.withdraw = promised.withdraw


def whole_blocks(present: Present, slices: int) -> Present:
    """Return which blocks have all their slices."""
    return np.asarray(present.reshape(-1, slices).all(axis=1))


class SlicedStore:
    """A `Store` of blocks that are kept in slices. A block counts as stored if all the given slices are. In memory, the
    slices of a block follow each other. It is as thread-safe as the store that it uses.

    `store`: either the store of the slices' namespace, or a `SlicedStore` that divides these slices further. `slices`:
    the slices that each call reads and writes. `stats` and a `SetResult` count slices as blocks.
    """

    def __init__(self, store: Store, slices: Sequence[int]) -> None:
        self._store = store
        self._slices = slices

    def match_prefix(
        self, keys: Sequence[bytes], *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> int:
        found = self._store.match_prefix(
            slice_keys(keys, self._slices), refresh=refresh, pin_s=pin_s, timeout_s=timeout_s
        )
        return found // len(self._slices)

    def contains(
        self, keys: Sequence[bytes], *, refresh: bool = False, pin_s: float = 0.0, timeout_s: float | None = None
    ) -> Present:
        return self._whole(
            self._store.contains(slice_keys(keys, self._slices), refresh=refresh, pin_s=pin_s, timeout_s=timeout_s)
        )

    def in_remote(self, keys: Sequence[bytes]) -> Present:
        return self._whole(self._store.in_remote(slice_keys(keys, self._slices)))

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Lookup:
        found = self._store.lookup(slice_keys(keys, self._slices), timeout_s=timeout_s)
        return Lookup(found.present // len(self._slices), found.promised // len(self._slices))

    def promise(self, keys: Sequence[bytes], *, ttl_s: float = 30.0, timeout_s: float | None = None) -> SlicedPromise:
        promised = self._store.promise(slice_keys(keys, self._slices), ttl_s=ttl_s, timeout_s=timeout_s)
        return SlicedPromise(promised, len(self._slices))

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
        count = len(self._slices)
        rows = out.reshape(len(out) * count, -1)
        places = [slot * count + slice_index for slot in slots for slice_index in range(count)]
        present = yield from self._store.get_into_steps(
            slice_keys(keys, self._slices), rows, places, wait_s=wait_s, timeout_s=timeout_s, alone=alone
        )
        return self._whole(present)

    def first_shards(self, keys: Sequence[bytes]) -> Set[Link]:
        return self._store.first_shards(slice_keys(keys, self._slices))

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
        # The parent of a slice is the same slice of the parent block.
        parents = [
            None if each is None else each + bytes([slice_index]) for each in parent for slice_index in self._slices
        ]
        return self._store.set(
            slice_keys(keys, self._slices),
            [each for block in blocks for each in self._cut(memoryview(block).cast("B"))],
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
        return self._whole(self._store.expire(slice_keys(keys, self._slices), ttl_s=ttl_s))

    def _cut(self, block: memoryview) -> list[memoryview]:
        size = len(block) // len(self._slices)
        return [block[start:end] for start, end in pairwise(range(0, len(block) + 1, size))]

    def _whole(self, present: Present) -> Present:
        return whole_blocks(present, len(self._slices))

    def info(self, *, timeout_s: float | None = None) -> Any:
        return self._store.info(timeout_s=timeout_s)

    @property
    def stats(self) -> ClientStats:
        return self._store.stats

    def why_unanswered(self) -> KVStoreError:
        return self._store.why_unanswered()

    def close(self) -> None:
        self._store.close()
