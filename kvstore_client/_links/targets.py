"""The memory that receives the blocks of a GET: the caller's own rows, or buffers that the caller receives.

The thread that reads a connection fills this memory, under the `receive_lock` of the connection's link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore._cext import Landing, LentBlocks, checksum_into
from kvstore.wire import ErrorCode, Part, Reply, WireError, frame_blocks
from kvstore.wire.dealer import FrameBuffers, GetAnswer, SharedBlocks
from kvstore.wire.remote_memory import RemoteBlocks
from kvstore.wire.shared import MAX_REFERENCES
from kvstore_client._links.buffers import Rows

if TYPE_CHECKING:
    from kvstore_client._links.block_mac import BatchMacs


class PlacedBlocks(GetAnswer):
    """The answer to a GET, whose blocks go to `target`. `positions[i]`: the position of the request's key i in the
    caller's batch. `key_bytes`: the size of a key if the GET asks for attributes, which are then in `attributes[i]`."""

    __slots__ = ("_landing", "_placing", "arrived", "attributes", "hit", "positions", "read", "target")

    def __init__(
        self, request_id: int, positions: npt.NDArray[np.intp], target: BlockTarget, key_bytes: int = 0
    ) -> None:
        super().__init__(request_id, len(positions), target.block_bytes, key_bytes)
        self.attributes = self.part_attributes
        if key_bytes:
            self.attributes = np.zeros(len(positions), dtype=self.part_attributes.dtype)
        self.positions = positions
        self.target = target
        self.arrived = self.hit = 0  # how many blocks arrived, and how many of these have the right bytes
        self.read = 0  # the number of lent blocks that were read but not released yet
        self._landing: Landing | None = None  # receives blocks whose destinations are known beforehand
        self._placing: list[int] = []  # the positions of the blocks in the part that is arriving

    def land(self) -> Landing | None:
        if len(self.attributes):
            return None
        self._landing = self.target.landing(self.id, self.positions)
        return self._landing

    def settle(self) -> None:
        """Check and count the blocks that were received. This is called when no more blocks come."""
        landing, self._landing = self._landing, None
        if landing is not None:
            right, wrong = self.target.landed(self.positions, landing)
            self.hit = int(right.sum())
            self.arrived = self.hit + int(wrong.sum())

    def begin_message(self, reply: Reply) -> None:
        if self._landing is not None and isinstance(reply, Part):
            raise WireError(ErrorCode.PROTOCOL, "a PART does not match its GET, or has a block that came before")
        super().begin_message(reply)
        if len(self.attributes) and isinstance(reply, Part):
            self.attributes[self.part_positions] = self.part_attributes

    def begin_payload(self) -> list[memoryview]:
        self._placing = self.positions[self.part_positions].tolist()
        return self.target.views(self._placing)

    def end_payload(self) -> None:
        self.arrived += len(self._placing)
        self.hit += self.target.placed(self._placing, self.part_sums)

    def read_lent(self) -> SharedBlocks | None:
        """Read blocks of the first loan in `lent`. If the loan is to be given back now, return it. The loan stays in
        `lent` until the caller has given it back. Only the calling thread of the GET calls this."""
        lent = self.lent[0]
        end = lent.read + self.target.at_once
        some = slice(lent.read, end)
        positions = self.positions[lent.positions[some]].tolist()
        self.hit += self.target.copy(positions, lent.loan.blocks.some(some), lent.sums[some])
        self.arrived += len(positions)
        lent.read += len(positions)
        self.read += len(positions)
        if lent.read < len(lent.positions):
            return None
        if not self.target.keep(self, lent):
            return lent
        self.kept = True  # before `popleft`, because an interrupt may come in between
        self.lent.popleft()
        return None

    def to_release(self, at_least: int) -> int:
        """Return how many of the blocks that were read may be released now. Return 0 if they have fewer than `at_least`
        bytes."""
        if self.kept or self.read * self.target.block_bytes < at_least:
            return 0
        count, self.read = self.read, 0
        return count


class BlockTarget:
    """The memory for the blocks of one call. `macs`: computes the MACs of the blocks, or None if their checksums are
    not MACs. `bad`: the positions of blocks whose bytes do not match their checksum."""

    def __init__(self, block_bytes: int, verify: bool, macs: BatchMacs | None = None) -> None:
        self.block_bytes = block_bytes
        self.verify = verify or macs is not None
        self.macs = macs
        self.bad: list[int] = []
        self.at_once = MAX_REFERENCES  # the most blocks that are copied from shared memory at a time

    def landing(self, request_id: int, positions: npt.NDArray[np.intp]) -> Landing | None:
        """Return an object that receives these blocks, or None if their destinations are not known beforehand. When the
        blocks have arrived, `landed` is called."""
        return None

    def landed(
        self, positions: npt.NDArray[np.intp], landing: Landing
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Note the blocks that `landing` has received. Return which have the right bytes, and which the wrong ones."""
        raise NotImplementedError

    def views(self, positions: list[int]) -> list[memoryview]:
        """Return writable memory for these blocks, in this order."""
        raise NotImplementedError

    def placed(self, positions: list[int], sums: npt.NDArray[np.uint64]) -> int:
        """Check and note blocks whose bytes have arrived. Return how many of them have the right bytes."""
        raise NotImplementedError

    def copy(self, positions: list[int], blocks: RemoteBlocks, sums: npt.NDArray[np.uint64]) -> int:
        """Copy blocks from shared memory. Return how many of them have the right bytes."""
        raise NotImplementedError

    def keep(self, answer: PlacedBlocks, lent: SharedBlocks) -> bool:
        """Return whether the lent memory is read after this call, too. If so, this target gives the loan back later."""
        return False

    def _copied(self, found: npt.NDArray[np.uint64], positions: list[int], sums: npt.NDArray[np.uint64]) -> list[bool]:
        """Return which blocks have the right bytes: those whose computed checksums `found` equal `sums`."""
        if not self.verify:
            return [True] * len(positions)
        good = found == sums
        if not good.all():
            self.bad.extend(position for position, ok in zip(positions, good.tolist(), strict=True) if not ok)
        result: list[bool] = good.tolist()
        return result

    def _check(self, views: Sequence[memoryview], positions: list[int], sums: npt.NDArray[np.uint64]) -> list[bool]:
        if self.macs is not None:
            return self._copied(self.macs.of(positions, views), positions, sums)
        found = np.empty(len(positions), dtype=np.uint64)
        if self.verify:
            checksum_into(views, found)
        return self._copied(found, positions, sums)


class IntoTarget(BlockTarget):
    """The caller's own rows. The block at position i goes to `rows[slots[i]]`, or to `rows[i]` without slots."""

    def __init__(
        self, rows: Rows, slots: Sequence[int] | None, count: int, verify: bool, macs: BatchMacs | None = None
    ) -> None:
        super().__init__(rows.shape[1], verify, macs)
        self._rows = rows
        self._flat = memoryview(rows.reshape(-1)) if rows.flags.c_contiguous else None
        self._slots = slots
        self.present = np.zeros(count, dtype=np.bool_)

    def landing(self, request_id: int, positions: npt.NDArray[np.intp]) -> Landing | None:
        self.present[positions] = False  # a row may have its block from an earlier attempt, but is overwritten now
        slots = self._slots
        places = np.ascontiguousarray(positions if slots is None else np.array(slots)[positions], dtype=np.int64)
        verify = self.verify and self.macs is None
        return Landing(request_id, self._rows, places, self.block_bytes, verify, frame_blocks(self.block_bytes))

    def landed(
        self, positions: npt.NDArray[np.intp], landing: Landing
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        right, wrong = landing.outcomes()
        if self.macs is not None:
            came = np.flatnonzero(right)
            theirs = positions[came].tolist()
            good = self.macs.of(theirs, map(self.row, theirs)) == landing.sums()[came]
            right[came], wrong[came] = good, ~good
        self.present[positions] = right
        self.bad.extend(positions[wrong].tolist())
        return right, wrong

    def row(self, position: int) -> memoryview:
        """Return the memory of one block."""
        number = position if self._slots is None else self._slots[position]
        if self._flat is None:
            return memoryview(self._rows[number])
        return self._flat[number * self.block_bytes : (number + 1) * self.block_bytes]

    def views(self, positions: list[int]) -> list[memoryview]:
        self.present[positions] = False  # a row may have its block from an earlier attempt, but is overwritten now
        count, first = len(positions), positions[0]
        if self._slots is None and self._flat is not None and positions == list(range(first, first + count)):
            return [self._flat[first * self.block_bytes : (first + count) * self.block_bytes]]
        return [self.row(position) for position in positions]

    def placed(self, positions: list[int], sums: npt.NDArray[np.uint64]) -> int:
        good = self._check([self.row(position) for position in positions], positions, sums)
        self.present[positions] = good
        return sum(good)

    def copy(self, positions: list[int], blocks: RemoteBlocks, sums: npt.NDArray[np.uint64]) -> int:
        self.present[positions] = False
        slots = self._slots
        places = np.array(positions if slots is None else [slots[position] for position in positions], dtype=np.int64)
        found = blocks.read(self._rows, places)
        if self.macs is not None:
            found = self.macs.of(positions, map(self.row, positions))
        good = self._copied(found, positions, sums)
        self.present[positions] = good
        return sum(good)


class QueueTarget(BlockTarget):
    """Buffers that the caller receives in the order in which they are filled. A buffer is used again only when no view
    of it is left."""

    def __init__(self, buffers: FrameBuffers, block_bytes: int, verify: bool, macs: BatchMacs | None = None) -> None:
        super().__init__(block_bytes, verify, macs)
        self.ready: deque[tuple[int, memoryview | None]] = deque()  # the view is None if the block's bytes were wrong
        self._buffers = buffers
        self._filling: dict[int, memoryview] = {}  # by first position, because several links may receive frames at once
        self.at_once = frame_blocks(block_bytes)

    def views(self, positions: list[int]) -> list[memoryview]:
        filling = self._buffers.take(len(positions) * self.block_bytes)
        self._filling[positions[0]] = filling
        return [filling]

    def placed(self, positions: list[int], sums: npt.NDArray[np.uint64]) -> int:
        views = self._blocks(self._filling.pop(positions[0]))
        return self._hand_out(positions, views, self._check(views, positions, sums))

    def copy(self, positions: list[int], blocks: RemoteBlocks, sums: npt.NDArray[np.uint64]) -> int:
        filled = self._buffers.take(len(positions) * self.block_bytes)
        places = np.arange(0, len(filled), self.block_bytes, dtype=np.int64)
        found = blocks.read(filled, places)
        views = self._blocks(filled)
        if self.macs is not None:
            found = self.macs.of(positions, views)
        return self._hand_out(positions, views, self._copied(found, positions, sums))

    def _blocks(self, filled: memoryview) -> list[memoryview]:
        size = self.block_bytes
        return [filled[at : at + size].toreadonly() for at in range(0, len(filled), size)]

    def _hand_out(self, positions: list[int], views: list[memoryview], good: list[bool]) -> int:
        self.ready.extend(
            (position, view if ok else None) for position, view, ok in zip(positions, views, good, strict=True)
        )
        return sum(good)


class BorrowTarget(QueueTarget):
    """Blocks that are read in place: in the server's memory if the server lends them, else in buffers. `blocks[i]`: the
    block at position i, or None until it has arrived."""

    def __init__(
        self, buffers: FrameBuffers, block_bytes: int, count: int, verify: bool, macs: BatchMacs | None = None
    ) -> None:
        super().__init__(buffers, block_bytes, verify, macs)
        self.at_once = MAX_REFERENCES
        self.blocks: list[memoryview | None] = [None] * count
        self.lent: list[tuple[PlacedBlocks, SharedBlocks]] = []  # loans to be given back
        self.present = np.zeros(count, dtype=np.bool_)
        self.exporters: list[LentBlocks] = []  # objects that keep the lent blocks in the server's memory

    def copy(self, positions: list[int], blocks: RemoteBlocks, sums: npt.NDArray[np.uint64]) -> int:
        exporter = blocks.lent()
        if exporter is None:  # these blocks are not lent, so read them one buffer at a time
            hit, group = 0, frame_blocks(self.block_bytes)
            for start in range(0, len(positions), group):
                some = slice(start, start + group)
                hit += super().copy(positions[some], blocks.some(some), sums[some])
            return hit
        self.exporters.append(exporter)
        views = exporter.views()
        return self._hand_out(positions, views, self._check(views, positions, sums))

    def keep(self, answer: PlacedBlocks, lent: SharedBlocks) -> bool:
        self.lent.append((answer, lent))
        return True

    def _hand_out(self, positions: list[int], views: list[memoryview], good: list[bool]) -> int:
        for position, view, ok in zip(positions, views, good, strict=True):
            if ok:
                self.blocks[position] = view
        self.present[positions] = good
        return sum(good)
