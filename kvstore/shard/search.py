"""The search for the blocks of a GET: which of them are there, and which ones the GET waits for.

If another client is writing a block, or a thread is reading it from disk, the search waits for the block. The wait ends
when the block is there, when the write is given up, or when the deadline passes. The search also waits for a promised
block if the GET requests that. It waits for a few blocks at a time. Before it looks up others, some of these must have
come or been given up. A block that is not there when its turn comes is a miss.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore._index import BlockIndex
from kvstore.disk.tier import DiskTier
from kvstore.store.expected import WAITER_BYTES
from kvstore.store.namespace import NamespaceStore
from kvstore.store.namespaces import ShardStore
from kvstore.store.tier import Slots
from kvstore.wire import Get

READ_AHEAD_BYTES: Final = 32 << 20  # how far ahead of its next part a GET starts to read from disk
MAX_WAITING: Final = 8  # blocks that a GET waits for at a time
LATE_BYTES: Final = 16 << 10  # a larger search counts the use at once, because its memory is later in no account

Positions = npt.NDArray[np.uint32]


class Search:
    """The blocks of one GET. Used by the loop's thread only. At the end, `stop_waiting` must be called."""

    __slots__ = (
        "_again",
        "_ahead",
        "_at_once",
        "_disk",
        "_key_bytes",
        "_keys",
        "_namespace",
        "_next",
        "_store",
        "_waiting",
        "_wake",
        "count",
        "fetched",
        "misses",
        "untouched",
        "wait_until",
    )

    def __init__(
        self,
        store: ShardStore,
        disk: DiskTier | None,
        namespace: NamespaceStore,
        request: Get,
        keys: bytes,
        now: float,
        pin_until: float,
        wake: Callable[[], None],
    ) -> None:
        """wake: a function that is called when the state of a block for which the search waits has changed."""
        self._store = store
        self._disk = disk
        self._namespace = namespace
        self._keys = memoryview(keys)
        self._key_bytes = request.key_bytes
        self._wake = wake
        self._next = 0
        self._ahead = 0  # blocks before this position have been looked up on disk
        self._at_once = request.count  # the number of blocks to look up at a time
        self._waiting: list[int] = []  # positions of blocks that are not there yet
        self._again = array("I")  # positions to look up again, because there was no room for them
        self.count = request.count
        self.misses = 0
        self.fetched = False  # at least one block was read from disk
        self.wait_until = now + request.wait_ms / 1000 if request.wait_ms else 0.0  # for promised blocks
        self.untouched = False  # a use of the blocks must still be counted
        if request.prefix:
            self._cut_to_prefix(keys, now, request.refresh, store.ticks(request.count), pin_until)
        elif request.references and disk is None and self.nbytes <= LATE_BYTES:
            self.untouched = request.refresh
        else:  # touch the chain as a whole, because its parts may be sent in any order
            namespace.contains(keys, now, request.refresh, store.ticks(request.count))

    def _cut_to_prefix(self, keys: bytes, now: float, used: bool, ticks: int, pin_until: float) -> None:
        """Reduce the request to the blocks before the first one that is neither there nor expected.

        These blocks are touched, and pinned until `pin_until`, because all blocks after an evicted one would be
        useless.
        """
        namespace = self._namespace
        length = namespace.match_prefix(keys, now, used, ticks, pin_until)
        if self.wait_until and namespace.promises:
            rest = keys[length * self._key_bytes :]
            absent = namespace.expected(rest, now, False, 0).find(0) if rest else 0
            length = self.count if absent < 0 else length + absent
        self.misses = self.count - length
        self.count = length
        self._keys = memoryview(keys[: length * self._key_bytes])

    @property
    def nbytes(self) -> int:
        """The most memory that the search takes, in bytes."""
        waiters = min(self.count, MAX_WAITING) * WAITER_BYTES
        return len(self._keys) + self.count * self._again.itemsize + waiters

    @property
    def undecided(self) -> int:
        """The number of blocks that must still be looked up, whether for the first time or again."""
        return self.count - self._next + len(self._waiting) + len(self._again)

    def touch(self, now: float) -> None:
        """Count a use of the chain as a whole, so that its tail is evicted first even if parts are sent in another
        order."""
        self.untouched = False
        self._namespace.in_memory(bytes(self._keys), now, True, self._store.ticks(self.count))

    def give_up(self) -> None:
        """Count all undecided blocks as misses."""
        self.misses += self.undecided
        self.stop_waiting()
        del self._again[:]
        self._next = self._ahead = self.count

    def stop_waiting(self) -> None:
        """Cancel all waits, so that no block wakes this search any more."""
        waiting, self._waiting = self._waiting, []
        for position in waiting:
            self._namespace.waiters.discard(self._key(position), self._wake)

    def put_back(self, positions: Positions) -> None:
        """Look up these blocks again later, because there is no room for them now. The caller must release their
        slots."""
        self._again.extend(positions.tolist())

    def take(self, room: int, now: float) -> tuple[Positions, Slots]:
        """Reference up to `room` blocks that are in memory, beginning with those for which the search waited. Return no
        blocks if the search must wait or no blocks are left."""
        while True:
            self.read_ahead(now)
            positions, slots = self._acquire(room, now)
            if len(positions) or self._waiting or not self.undecided:
                return positions, slots  # otherwise all blocks looked up so far are misses, so more must be looked up

    def read_ahead(self, now: float) -> None:
        """Start to read the next blocks from disk, so that they are in memory when their turn comes."""
        namespace = self._namespace
        if namespace.disk is None or namespace.disk.empty:
            self._ahead = self.count
        if self._ahead == self.count:
            return
        window = max(1, min(READ_AHEAD_BYTES, self._store.limit_bytes // 4) // namespace.block_bytes)
        end = min(self.count, self._next - len(self._waiting) - len(self._again) + window)
        if end - self._ahead < min(self.count - self._ahead, max(1, window // 4)):
            return  # wait until there are enough blocks to make a look-up worth its cost
        keys = np.frombuffer(self._keys, dtype=np.uint8).reshape(-1, self._key_bytes)[self._ahead : end]
        self._ahead = end
        present = namespace.in_memory(keys.reshape(-1), now, False, 0)
        absent = np.frombuffer(present, dtype=np.uint8) == 0
        if absent.any():
            self._fetch(keys[absent], now)

    def _key(self, position: int) -> bytes:
        return bytes(self._keys[position * self._key_bytes : (position + 1) * self._key_bytes])

    def _fetch(self, keys: npt.NDArray[np.uint8], now: float) -> npt.NDArray[np.bool_]:
        """Start to read from disk those blocks that are not in memory. Return for each key whether to wait for its
        block."""
        assert self._disk is not None
        expected: npt.NDArray[np.bool_] = self._disk.fetch(self._namespace, keys.tobytes(), now) != BlockIndex.ABSENT
        self.fetched = self.fetched or bool(expected.any())
        return expected

    def _acquire(self, room: int, now: float) -> tuple[Positions, Slots]:
        found: list[tuple[Positions, Slots]] = []
        if self._waiting or self._again:
            known = np.array([*self._waiting, *self._again], dtype=np.uint32)
            del self._again[:]
            self.stop_waiting()
            every = np.frombuffer(self._keys, dtype=np.uint8).reshape(-1, self._key_bytes)
            positions, slots, rest = self._find(known, every[known].tobytes(), now)
            self.put_back(rest)
            if len(positions) > room:  # one look-up of all of them is cheaper than several look-ups of some
                self._namespace.release(slots[room:])
                self.put_back(positions[room:])
            found.append((positions[:room], slots[:room]))
            room -= len(found[0][0])
        while self._next < self._ahead and room > 0 and len(self._waiting) < MAX_WAITING:
            end = min(self._ahead, self._next + min(room, self._at_once))
            named = self._keys[self._next * self._key_bytes : end * self._key_bytes]
            positions, slots, rest = self._find(np.arange(self._next, end, dtype=np.uint32), named, now)
            self._next = end - len(rest)
            # The look-up of the rest was useless. It would be useless again each time that one of the awaited blocks
            # comes or is given up.
            self._at_once = 2 * MAX_WAITING if len(rest) else min(2 * self._at_once, self.count)
            found.append((positions, slots))
            room -= len(positions)
        if len(found) == 1:
            return found[0]
        if not found:
            return np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int32)
        positions, slots = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return positions, slots

    def _find(self, positions: Positions, named: bytes | memoryview, now: float) -> tuple[Positions, Slots, Positions]:
        """Reference the blocks that are in memory. Wait for the others, or count them as misses. `named`: the keys of
        the blocks. Return the positions and slots of the blocks that are there. Also return the positions at the end
        that were skipped, because the search already waited for enough blocks."""
        namespace = self._namespace
        slots = namespace.acquire(named, now, 0, False, True)
        there = slots >= 0
        if there.all():
            return positions, slots, positions[:0]
        keys = np.frombuffer(named, dtype=np.uint8).reshape(-1, self._key_bytes)
        expected = slots == BlockIndex.COMING
        absent = slots == BlockIndex.ABSENT
        if absent.any() and namespace.disk is not None and not namespace.disk.empty:
            expected[absent] = self._fetch(keys[absent], now)
        most = MAX_WAITING - len(self._waiting)
        if self.wait_until > now and namespace.promises:
            promised = 0
            for row in np.flatnonzero(absent & ~expected).tolist():
                if keys[row].tobytes() in namespace.promises:
                    expected[row] = True
                    promised += 1
                    if promised > most:  # the blocks behind it are looked up later
                        break
        waits = np.flatnonzero(expected)
        end = len(positions)
        if len(waits) > most:
            end = int(waits[most])
            namespace.release(slots[end:][there[end:]])
        for position in positions[waits[:most]].tolist():
            self._waiting.append(position)
            namespace.waiters.add(self._key(position), self._wake)
        self.misses += int((~there & ~expected)[:end].sum())
        there = there[:end]
        return positions[:end][there], slots[:end][there], positions[end:]
