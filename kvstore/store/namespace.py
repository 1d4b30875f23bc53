"""One namespace on a shard: its blocks in memory and, if the shard has a disk tier, on disk.

A block is in one tier or in both. One look-up covers both tiers and never touches the disk, because the index of the
disk tier is in memory, too. Clients write to memory and read from memory, so a block that is only on disk is first
fetched into memory (`kvstore.disk`).

Other modules do not directly use the index of a namespace's blocks in memory. If one call of the index is enough, an
attribute of `NamespaceStore` is the index's bound method, because the data path calls it. Otherwise, `NamespaceStore`
has a method of its own.

Only the thread of the shard's loop uses this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore._cext import checksum
from kvstore._index import BlockIndex
from kvstore.store.arena import Arena
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.expected import Promises, Waiters, split
from kvstore.store.tier import NamespaceTier, Slots, keys_before
from kvstore.wire import NamespaceInfo, Presence
from kvstore.wire.attributes import TTL_STEP_S, attributes_dtype
from kvstore.wire.status import report

MAX_PINNED_SHARE: Final = 0.5  # of the slots that a namespace has or could have for ordinary blocks
COUNT_PINS_S: Final = 0.1
COUNT_PINS_AT_LIMIT_S: Final = 0.01


def find_parent(chain: bytes, keys: bytes, key_bytes: int) -> tuple[bytes, bool]:
    """Find `keys` in a chain that a client looked up before.

    Return the key before the first of `keys` (b"" if it is unknown), and whether `keys` reach the chain's end.
    """
    if not keys or not chain or len(chain) % key_bytes:  # no chain is known, or its keys have another length
        return b"", False
    at = chain.find(keys[:key_bytes])
    if at % key_bytes:  # the match begins within a key, and so might each further one, so compare whole keys
        key = np.dtype(f"V{key_bytes}")
        places = np.frombuffer(chain, dtype=key) == np.frombuffer(keys[:key_bytes], dtype=key)
        at = int(places.argmax()) * key_bytes if places.any() else 0
    return chain[at - key_bytes : at] if at > 0 else b"", bool(chain) and chain.endswith(keys[-key_bytes:])


@dataclass(eq=False)
class NamespaceStore:
    """One namespace's blocks on this shard."""

    canonical: bytes
    id: bytes
    block_bytes: int
    key_bytes: int
    arena: Arena
    memory: NamespaceTier
    disk: DiskBlocks | None
    frame_blocks: int
    tenant: str = ""
    model: str = ""
    ttl_s: int = 0  # 0: blocks do not expire
    priority: int = 0  # the lowest priority that a block gets
    listed: bool = False  # a mover has listed the blocks, so other nodes may have copies of them
    replicas: int = 1  # the largest number of copies that a client keeps of each block
    opaque_sums: bool = False  # the checksums are MACs, so only clients can check them
    waiters: Waiters = field(default_factory=Waiters)  # clients that wait for blocks being written or promised
    promises: Promises = field(init=False)
    hits: int = 0
    misses: int = 0
    created: int = 0
    cut_off: int = 0  # blocks evicted because another shard evicted an earlier block; reset by `take_cut_off`
    pins: int = 0  # an upper bound of the number of pinned blocks in memory
    pins_counted_at: float = float("-inf")  # monotonic seconds
    empty_since: float | None = None  # monotonic seconds, set by `ShardStore.expire`

    def __post_init__(self) -> None:
        self.promises = Promises(self.waiters)
        # Methods of the index of the blocks in memory; `BlockIndex` describes them.
        index = self.memory.index
        self.in_memory, self.states_of, self.victims = index.contains, index.states_of, index.victims
        self.ready_slots = index.ready_slots
        self.acquire, self.hold, self.release = index.acquire, index.acquire_slot, index.release
        self.commit, self.link, self.renew, self.disown = index.commit, index.link, index.renew, index.disown
        self.keys_of, self.checksums, self.priorities_of = index.keys_of, index.checksums, index.priorities_of
        self.expires_of = index.expires_of

    @property
    def free_slots(self) -> int:
        """The number of blocks that fit into memory before one is evicted, if all free segments go to this
        namespace."""
        index = self.memory.index
        return index.free + self.arena.free * index.slots_per_segment

    @property
    def empty(self) -> bool:
        """True if the namespace has no block, and no client is reading, writing or promising one."""
        if not self.memory.empty:
            return False
        return not (self.waiters or self.promises) and (self.disk is None or self.disk.empty)

    def take_cut_off(self) -> int:
        """Return how many blocks have been evicted since the last call because another shard had evicted or refused a
        block before them in their chain."""
        count, self.cut_off = self.cut_off, 0
        return count

    def count_pins(self, now: float) -> None:
        """Count the pinned blocks in memory."""
        self.pins, self.pins_counted_at = self.memory.index.pinned(now), now

    def pinnable(self, count: int, now: float) -> int:
        """Return how many of `count` more blocks may be pinned. Pinned blocks must leave the namespace room for new
        blocks.

        Counting the pins of a million blocks takes milliseconds, so they are not counted for each request. Between two
        counts, each pin is added to the number, even if its block is pinned already.
        """
        index = self.memory.index
        slots = index.slots - index.transient_slots + self.arena.free * index.slots_per_segment
        most = int(slots * MAX_PINNED_SHARE)
        age_s = now - self.pins_counted_at
        if age_s > COUNT_PINS_S or (self.pins > most - count and age_s > COUNT_PINS_AT_LIMIT_S):
            self.count_pins(now)
        return max(0, min(count, most - self.pins))

    def abort(self, slots: Slots, keys: bytes) -> None:
        """Give up a write of these blocks. Free their slots, and wake the clients that wait for one of the blocks."""
        self.memory.index.abort(slots)
        self.tell(keys)

    def unreserve(self, slots: Slots) -> None:
        """Free slots that were reserved for a write, including those whose blocks were deleted meanwhile."""
        ours = self.states_of(slots) == BlockIndex.WRITING
        self.memory.index.abort(slots[ours])
        self.release(slots[~ours])

    def tell(self, keys: bytes) -> None:
        """Wake the clients that wait for one of these blocks, because a write of the blocks has ended or was given
        up."""
        if self.waiters:
            self.waiters.tell(split(keys, self.key_bytes))

    def views(self, slots: Slots) -> list[memoryview]:
        """Return the memory of `slots`, in order, with adjacent slots merged into one view."""
        memory, block_bytes = self.arena.memory, self.block_bytes
        result: list[memoryview] = []
        start = end = -1
        for at in self.memory.offsets(slots).tolist():
            if at == end:
                end += block_bytes
                continue
            if end >= 0:
                result.append(memory[start:end])
            start, end = at, at + block_bytes
        if end >= 0:
            result.append(memory[start:end])
        return result

    def coldest_first(self) -> Slots:
        """Return the slots of all readable blocks in memory, the most recently used last."""
        slots = self.ready_slots()
        return slots[np.argsort(self.memory.index.ticks_of(slots), kind="stable")]

    def ordinary(self, slots: Slots) -> Slots:
        """Return the slots whose blocks are not transient."""
        return slots[self.memory.index.reads_of(slots) == 0] if self.memory.transient else slots

    def all_keys(self, count: int) -> Iterator[bytes]:
        """Yield the keys of all blocks in both tiers that can be read, about `count` at a time."""
        for tier in filter(None, (self.memory, self.disk)):
            listed = tier.index.ready_slots(0, True)
            for slots in np.array_split(listed, len(listed) // count + 1):
                yield tier.index.keys_of(slots[np.equal(tier.index.states_of(slots), BlockIndex.READY)])

    def damaged(self, keys: bytes, now: float) -> bytes:
        """Return the keys of the blocks in memory that do not match their checksum. This hashes all blocks of `keys`
        that are in memory."""
        size, slots = self.key_bytes, self.acquire(keys, now, 0, False)
        there = np.flatnonzero(slots >= 0)
        sums = np.array([checksum(self.views(slots[i : i + 1])[0]) for i in there], dtype=np.uint64)
        wrong = there[sums != self.checksums(slots[there])]
        self.release(slots)
        return b"".join(keys[i * size : (i + 1) * size] for i in wrong.tolist())

    def record_of(
        self, slots: Slots
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64], tuple[bytes, bytes], npt.NDArray[np.uint8]]:
        """Return the data that the disk records with blocks: their checksums, their expiry times, their links, and the
        keys of the blocks that they follow."""
        index = self.memory.index
        return index.checksums(slots), index.expires_of(slots), index.links_of(slots), keys_before(self.memory, slots)

    def attributes_of(self, slots: Slots, now: float) -> bytes:
        """Return the attributes of the blocks in `slots`, in the form that a PART has."""
        index = self.memory.index
        attributes = np.zeros(len(slots), dtype=attributes_dtype(self.key_bytes))
        expires = index.expires_of(slots)
        left = np.ceil((expires - now) / TTL_STEP_S)
        attributes["ttl"] = np.where(expires > 0, np.maximum(left, 1), 0)
        attributes["priority"] = index.priorities_of(slots)
        attributes["reads"] = index.reads_of(slots)
        attributes["before"] = keys_before(self.memory, slots)
        return attributes.tobytes()

    # ---- look-ups in both tiers ------------------------------------------------------------------------------

    def contains(self, keys: bytes, now: float, refresh: bool, tick: int, pin_until: float = 0.0) -> bytes:
        """Return one byte per key: 1 if the block is in a tier or is being written, otherwise 0."""
        present = self.memory.index.contains(keys, now, refresh, tick, pin_until)
        if self.disk is None or self.disk.empty or not (refresh or pin_until > now or 0 in present):
            return present
        on_disk = self.disk.contains(keys, now, refresh, tick, pin_until)
        return (np.frombuffer(present, dtype=np.uint8) | np.frombuffer(on_disk, dtype=np.uint8)).tobytes()

    def match_prefix(self, keys: bytes, now: float, refresh: bool, tick: int, pin_until: float = 0.0) -> int:
        """Return the number of keys at the beginning of `keys` whose blocks are in a tier or are being written.

        Only these blocks are touched (`refresh`) and pinned (until `pin_until`, in monotonic seconds).
        """
        if self.disk is None or self.disk.empty:
            return self.memory.index.match_prefix(keys, now, refresh, tick, pin_until)
        length = self.memory.index.match_prefix(keys, now, False, 0)
        rest = keys[length * self.key_bytes :]
        if rest:
            absent = self.contains(rest, now, False, 0).find(0)
            length = len(keys) // self.key_bytes if absent < 0 else length + absent
        if length and (refresh or pin_until > now):
            self.contains(keys[: length * self.key_bytes], now, refresh, tick, pin_until)
        return length

    def expected(self, keys: bytes, now: float, refresh: bool, tick: int, pin_until: float = 0.0) -> bytes:
        """Return one byte per key: the value of a `Presence`."""
        present = self.contains(keys, now, refresh, tick, pin_until)
        if not self.promises or 0 not in present:
            return present
        promised = bytearray(present)
        for number, key in enumerate(split(keys, self.key_bytes)):
            if not promised[number] and key in self.promises:
                promised[number] = Presence.PROMISED
        return bytes(promised)

    def on_disk(self, keys: bytes, now: float) -> bytes:
        """Return one byte per key: 1 if the block is on disk, otherwise 0."""
        if self.disk is None or self.disk.empty:
            return bytes(len(keys) // self.key_bytes)
        return self.disk.contains(keys, now, False, 0)

    def expire(self, keys: bytes, now: float, expires: float) -> bytes:
        """Let blocks expire at the time `expires`, or never if it is 0. Transient blocks keep their expiry time. Return
        one byte per key: 1 if the block was in a tier, otherwise 0."""
        there = self.memory.index.set_expiry(keys, now, expires)
        if self.disk is None or self.disk.empty:
            return there
        on_disk = self.disk.index.set_expiry(keys, now, expires)
        return (np.frombuffer(there, dtype=np.uint8) | np.frombuffer(on_disk, dtype=np.uint8)).tobytes()

    def only_in_memory(self, slots: Slots, now: float) -> Slots:
        """Return the slots whose blocks are not on disk."""
        on_disk = np.frombuffer(self.on_disk(self.keys_of(slots), now), dtype=np.bool_)
        return slots[~on_disk]

    def delete_on_disk(self, slots: Slots) -> None:
        """Delete the copies on disk of the blocks in these slots of memory, because those copies are outdated."""
        if self.disk is not None:
            self.disk.delete(self.keys_of(slots))

    def pending(self, keys: bytes, now: float) -> npt.NDArray[np.bool_]:
        """Return for each key whether its block is being written and cannot be read in any tier yet."""
        slots = self.acquire(keys, now, 0, False)
        self.release(slots)
        absent = slots < 0
        if absent.any():
            rest = np.frombuffer(keys, dtype=np.uint8).reshape(-1, self.key_bytes)[absent].tobytes()
            absent[absent] = np.frombuffer(self.on_disk(rest, now), dtype=np.uint8) == 0
        return absent

    def delete(self, keys: bytes, now: float) -> int:
        """Delete blocks from both tiers. Return how many blocks existed."""
        if self.disk is None or self.disk.empty:
            return self.memory.index.delete(keys, now)
        size, both = self.key_bytes, 0
        distinct = dict.fromkeys(keys[at : at + size] for at in range(0, len(keys), size))
        joined = b"".join(distinct)
        in_memory, on_disk = (tier.contains(joined, now, False, 0) for tier in (self.memory.index, self.disk))
        for key, memory, disk in zip(distinct, in_memory, on_disk, strict=True):  # `memory`: in memory or being written
            both += bool(memory and disk) and self.memory.index.state_of(key) == BlockIndex.READY
        return self.memory.index.delete(keys, now) + self.disk.delete(keys) - both

    def info(self, now: float, generation: int = 0) -> NamespaceInfo:
        """Return the state and the counters of the namespace."""
        return report(
            NamespaceInfo,
            self,
            id=self.id.hex(),
            namespace=self.canonical.decode(),
            segments=len(self.memory.segments),
            pinned=self.memory.index.pinned(now),
            promised=len(self.promises),
            awaited=len(self.waiters),
            generation=generation,
        )
