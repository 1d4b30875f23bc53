"""Sets to a shard on this host: the blocks' bytes stay in this process, and the shard copies them from there.

Blocks in memory that the shard can map (`kvstore_client.memory`) are only hashed and *named*: their addresses are sent.
Other blocks are first *staged*: they are copied to a ring of such memory, a group at a time, and hashed during the
copy. While the shard copies one group out of the ring, the next group is copied into it. The ring is small, so its
bytes stay in the CPU's cache between the two copies.

A `SharedStaging` belongs to one connection. Only the owner of the link's `sending` uses its ring.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore._cext import checksum_at, copy_blocks
from kvstore.wire.dealer import ReplyCollector
from kvstore.wire.shared import MAX_FILES, STAGED, staged_blocks
from kvstore_client._links.buffers import BlockSource
from kvstore_client.memory import SharedRegion

if TYPE_CHECKING:
    from kvstore_client._links.block_mac import BatchMacs

STAGED_GROUP_BYTES: Final = 4 << 20  # the most that is staged at a time, or one block if it is larger
NAMED_BYTES: Final = 8 << 20  # the most that is named at a time, or one block if it is larger
FIRST_BYTES: Final = 1 << 20  # the size of a SET's first part, small because the shard waits for it
GROUPS: Final = 4  # the number of groups in the ring

Entries = npt.NDArray[np.void]  # of dtype `STAGED`


class SetAnswer(ReplyCollector):
    """The answer to a SET by references. `taken`: the number of its blocks that the shard has read so far."""

    __slots__ = ("taken",)

    def __init__(self, request_id: int) -> None:
        super().__init__(request_id)
        self.taken = 0

    def begin_message(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Taken):
            self.taken = reply.count
            return
        super().begin_message(reply)


class SharedStaging:
    """The memory that one connection has shared with its shard."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.group = max(1, min(STAGED_GROUP_BYTES // block_bytes, staged_blocks(block_bytes)))  # the blocks in a group
        self.named = max(1, min(NAMED_BYTES // block_bytes, staged_blocks(block_bytes)))  # the most blocks in one frame
        self.sharing = threading.Lock()  # held by the thread that shares a region
        self.ring: SharedRegion | None = None
        self.shared: set[int] = set()  # the numbers of the regions that the shard has mapped
        self.refused = False  # the shard takes no memory, so blocks are sent through the socket
        self._next = 0  # the number of the ring's group that is used next
        self._users: deque[tuple[SetAnswer, int]] = deque()  # for each group in use: its SET, and where its blocks end

    @property
    def full(self) -> bool:
        """Whether no memory except the ring can be shared any more."""
        return len(self.shared) >= MAX_FILES - 1

    def ready_for(self, region: SharedRegion | None) -> bool:
        """Return whether blocks in this region can be set without sharing more memory. If `region` is None, the blocks
        are in other memory."""
        if self.refused or (self.ring is not None and self.ring.number in self.shared):
            return self.refused or region is None or region.number in self.shared or self.full
        return region is not None and region.number in self.shared

    def sizes(self, named: bool) -> Iterator[int]:
        """Yield the number of blocks to name or to stage at a time. It is small at first, and then grows."""
        most = self.named if named else self.group
        size = min(most, max(1, FIRST_BYTES // self.block_bytes))
        while True:
            yield size
            size = min(most, 2 * size)

    def make_ring(self) -> SharedRegion:
        """Return a new ring, which the caller must share. Raises `OSError`."""
        ring = SharedRegion(GROUPS * self.group * self.block_bytes)
        ring.populate()
        return ring

    def has_room(self) -> bool:
        """Return whether a group of the ring is free."""
        users = self._users
        while users and (users[0][0].done or users[0][0].taken >= users[0][1]):
            users.popleft()
        return len(users) < GROUPS

    def name(
        self, source: BlockSource, numbers: npt.NDArray[np.int64], region: SharedRegion, macs: BatchMacs | None
    ) -> Entries:
        """Hash blocks in a region that the shard has mapped. Return their entries."""
        entries = np.empty(len(numbers), dtype=STAGED)
        entries["file"] = region.number
        entries["offset"] = offsets = source.addresses(numbers) - region.address
        if macs is not None:
            entries["sum"] = macs.of(some := numbers.tolist(), map(source.view, some))
        else:
            entries["sum"] = checksum_at(region.memory, offsets, self.block_bytes)
        return entries

    def stage(
        self, source: BlockSource, numbers: list[int], answer: SetAnswer, end: int, macs: BatchMacs | None
    ) -> Entries:
        """Copy at most `group` blocks to the ring, which must have room. Return their entries. `answer`: the answer to
        the SET of these blocks. `end`: when the shard has read this many blocks of the SET, it has read these."""
        ring, count, block_bytes = self.ring, len(numbers), self.block_bytes
        assert ring is not None
        start = self._next % GROUPS * self.group * block_bytes
        self._next += 1
        self._users.append((answer, end))
        places = np.arange(start, start + count * block_bytes, block_bytes, dtype=np.int64)
        views = source.views(numbers)
        entries = np.empty(count, dtype=STAGED)
        entries["file"], entries["offset"] = ring.number, places
        one = len(views) == 1
        entries["sum"] = copy_blocks(
            views,
            np.zeros(count, dtype=np.int64) if one else np.arange(count, dtype=np.int64),
            np.arange(count, dtype=np.int64) * block_bytes if one else np.zeros(count, dtype=np.int64),
            block_bytes,
            ring.memory,
            places,
        )
        if macs is not None:
            entries["sum"] = macs.of(numbers, map(source.view, numbers))
        return entries
