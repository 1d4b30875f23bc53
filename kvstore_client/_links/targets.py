"""The memory that receives the blocks of a GET: the caller's own rows, or buffers that are handed to the caller.

The thread that reads a connection fills it, under that link's `receive_lock`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore._cext import checksum_into
from kvstore.wire.attributes import Attributes
from kvstore.wire.dealer import FrameBuffers, GetAnswer
from kvstore_client._links.buffers import Rows

_KEPT_BUFFERS: Final = 64  # buffers kept for a stream: more than its credit allows to be on the way


class PlacedBlocks(GetAnswer):
    """The answer to a GET, whose blocks go to `target`. `positions[i]` is the caller's position of the request's
    key i. `key_bytes`: of the keys, if the GET asks for attributes; then `attributes[i]` are those of key i."""

    __slots__ = ("_placing", "arrived", "attributes", "hit", "positions", "target")

    def __init__(
        self, request_id: int, positions: npt.NDArray[np.intp], target: BlockTarget, key_bytes: int = 0
    ) -> None:
        super().__init__(request_id, len(positions), target.block_bytes, key_bytes)
        self.attributes: Attributes = np.zeros(len(positions) if key_bytes else 0, dtype=self.part_attributes.dtype)
        self.positions = positions
        self.target = target
        self.arrived = self.hit = 0  # blocks that arrived, and how many of them have the right bytes
        self._placing: list[int] = []  # the caller's positions of the blocks in the part that is arriving

    def begin_payload(self) -> list[memoryview]:
        self._placing = self.positions[self.part_positions].tolist()
        if len(self.attributes):
            self.attributes[self.part_positions] = self.part_attributes
        return self.target.views(self._placing)

    def end_payload(self) -> None:
        self.arrived += len(self._placing)
        self.hit += self.target.placed(self._placing, self.part_sums)


class BlockTarget:
    """The memory for the blocks of one call. `bad`: positions of blocks whose bytes do not match their checksum."""

    def __init__(self, block_bytes: int, verify: bool) -> None:
        self.block_bytes = block_bytes
        self.verify = verify
        self.bad: list[int] = []

    def views(self, positions: list[int]) -> list[memoryview]:
        """Writable memory for these blocks, in this order."""
        raise NotImplementedError

    def placed(self, positions: list[int], sums: npt.NDArray[np.uint64]) -> int:
        """Take in blocks whose bytes have arrived. -> how many of them have the right bytes."""
        raise NotImplementedError

    def _check(self, views: Sequence[memoryview], positions: list[int], sums: npt.NDArray[np.uint64]) -> list[bool]:
        if not self.verify:
            return [True] * len(positions)
        found = np.empty(len(positions), dtype=np.uint64)
        checksum_into(views, found)
        good = found == sums
        if not good.all():
            self.bad.extend(position for position, ok in zip(positions, good.tolist(), strict=True) if not ok)
        result: list[bool] = good.tolist()
        return result


class IntoTarget(BlockTarget):
    """The caller's own rows: block of position i goes to `rows[slots[i]]` (`rows[i]` without slots)."""

    def __init__(self, rows: Rows, slots: Sequence[int] | None, count: int, verify: bool) -> None:
        super().__init__(rows.shape[1], verify)
        self._rows = rows
        self._flat = memoryview(rows.reshape(-1)) if rows.flags.c_contiguous else None
        self._slots = slots
        self.present = np.zeros(count, dtype=np.bool_)

    def row(self, position: int) -> memoryview:
        """The memory of one block."""
        number = position if self._slots is None else self._slots[position]
        if self._flat is None:
            return memoryview(self._rows[number])
        return self._flat[number * self.block_bytes : (number + 1) * self.block_bytes]

    def views(self, positions: list[int]) -> list[memoryview]:
        self.present[positions] = False  # a row may hold its block from an earlier try, and is about to be overwritten
        count, first = len(positions), positions[0]
        if self._slots is None and self._flat is not None and positions == list(range(first, first + count)):
            return [self._flat[first * self.block_bytes : (first + count) * self.block_bytes]]
        return [self.row(position) for position in positions]

    def placed(self, positions: list[int], sums: npt.NDArray[np.uint64]) -> int:
        good = self._check([self.row(position) for position in positions], positions, sums)
        self.present[positions] = good
        return sum(good)


class QueueTarget(BlockTarget):
    """Buffers of the target's own, handed to the caller in order of arrival. A buffer is used again only when no view
    of it is left."""

    def __init__(self, block_bytes: int, verify: bool) -> None:
        super().__init__(block_bytes, verify)
        self.ready: deque[tuple[int, memoryview | None]] = deque()  # None: the block's bytes were wrong
        self._buffers = FrameBuffers(block_bytes, _KEPT_BUFFERS)
        self._filling: dict[int, memoryview] = {}  # by first position: several links may receive a frame at once

    def views(self, positions: list[int]) -> list[memoryview]:
        filling = self._buffers.take(len(positions) * self.block_bytes)
        self._filling[positions[0]] = filling
        return [filling]

    def placed(self, positions: list[int], sums: npt.NDArray[np.uint64]) -> int:
        filled = self._filling.pop(positions[0])
        size = self.block_bytes
        views = [filled[at : at + size].toreadonly() for at in range(0, len(positions) * size, size)]
        good = self._check(views, positions, sums)
        self.ready.extend(
            (position, view if ok else None) for position, view, ok in zip(positions, views, good, strict=True)
        )
        return sum(good)
