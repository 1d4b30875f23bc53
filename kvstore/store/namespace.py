"""One namespace on a shard: its blocks in memory and, where the shard has a disk tier, on disk.

A block is in one tier or in both. One look-up covers both tiers and never touches the disk, because the index of the
disk tier is in memory, too. Clients write to memory and read from memory: a block that is only on disk is first fetched
into memory (`kvstore.disk`).

Only the thread of the shard's loop uses this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvstore._cext import BlockIndex
from kvstore.store.arena import Arena
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.expected import Promises, Waiters, split
from kvstore.store.tier import NamespaceTier, Slots, keys_before
from kvstore.wire import NamespaceInfo, Presence
from kvstore.wire.attributes import TTL_STEP_S, attributes_dtype


def find_parent(chain: bytes, keys: bytes, key_bytes: int) -> tuple[bytes, bool]:
    """Find `keys` in a chain that a client asked for before.

    -> the key before the first of them, b"" if it is not known, and whether they reach the chain's end.
    """
    if not keys or not chain or len(chain) % key_bytes:  # nothing was asked for, or keys of another length
        return b"", False
    at = chain.find(keys[:key_bytes])
    if at % key_bytes:  # made of the ends of two keys; to search on could find such a place at every key
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
    listed: bool = False  # for a mover: other nodes may have copies of its blocks
    replicas: int = 1  # the largest number of copies that a client keeps of each block
    opaque_sums: bool = False  # the checksums are MACs: only clients can check them
    waiters: Waiters = field(default_factory=Waiters)  # for blocks that are written, or were promised
    promises: Promises = field(init=False)
    hits: int = 0
    misses: int = 0
    created: int = 0
    pins: int = 0  # pinned blocks in memory, at most
    pins_counted_at: float = float("-inf")  # monotonic seconds
    empty_since: float | None = None  # monotonic seconds, set by `Store.expire`

    def __post_init__(self) -> None:
        self.promises = Promises(self.waiters)

    @property
    def empty(self) -> bool:
        """It has no block, and no client is reading, writing or promising one."""
        expected = self.waiters or self.promises
        return self.memory.empty and not expected and (self.disk is None or self.disk.empty)

    def count_pins(self, now: float) -> None:
        """Count the pinned blocks in memory."""
        self.pins, self.pins_counted_at = self.memory.index.pinned(now), now

    def tell(self, keys: bytes) -> None:
        """A write of these blocks has ended, or was given up: wake who waits for one of them."""
        if self.waiters:
            self.waiters.tell(split(keys, self.key_bytes))

    def views(self, slots: Slots) -> list[memoryview]:
        """-> the memory of `slots`, in order, with adjacent slots merged into one view."""
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

    def attributes_of(self, slots: Slots, now: float) -> bytes:
        """-> what goes with the blocks in `slots`, as PART carries it."""
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
        """-> one byte a key: 1 when the block is in a tier or is being written."""
        present = self.memory.index.contains(keys, now, refresh, tick, pin_until)
        if self.disk is None or self.disk.empty or not (refresh or pin_until > now or 0 in present):
            return present
        on_disk = self.disk.contains(keys, now, refresh, tick, pin_until)
        return (np.frombuffer(present, dtype=np.uint8) | np.frombuffer(on_disk, dtype=np.uint8)).tobytes()

    def match_prefix(self, keys: bytes, now: float, refresh: bool, tick: int, pin_until: float = 0.0) -> int:
        """-> the length of the leading run of blocks that are in a tier or are being written.

        Only that run is touched (`refresh`) and pinned (until `pin_until`, monotonic seconds).
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
        """-> one byte a key, a `Presence`."""
        present = self.contains(keys, now, refresh, tick, pin_until)
        if not self.promises or 0 not in present:
            return present
        promised = bytearray(present)
        for number, key in enumerate(split(keys, self.key_bytes)):
            if not promised[number] and key in self.promises:
                promised[number] = Presence.PROMISED
        return bytes(promised)

    def on_disk(self, keys: bytes, now: float) -> bytes:
        """-> one byte a key: 1 when the block is on disk."""
        if self.disk is None or self.disk.empty:
            return bytes(len(keys) // self.key_bytes)
        return self.disk.contains(keys, now, False, 0)

    def expire(self, keys: bytes, now: float, expires: float) -> bytes:
        """Have blocks expire at that time; 0: never. Transient blocks keep theirs. -> one byte a key: 1 when the block
        was in a tier."""
        there = self.memory.index.set_expiry(keys, now, expires)
        if self.disk is None or self.disk.empty:
            return there
        on_disk = self.disk.index.set_expiry(keys, now, expires)
        return (np.frombuffer(there, dtype=np.uint8) | np.frombuffer(on_disk, dtype=np.uint8)).tobytes()

    def delete(self, keys: bytes, now: float) -> int:
        """Delete blocks from both tiers. -> how many blocks existed."""
        if self.disk is None or self.disk.empty:
            return self.memory.index.delete(keys, now)
        size, both = self.key_bytes, 0
        distinct = dict.fromkeys(keys[at : at + size] for at in range(0, len(keys), size))
        joined = b"".join(distinct)
        in_memory, on_disk = (tier.contains(joined, now, False, 0) for tier in (self.memory.index, self.disk))
        for key, memory, disk in zip(distinct, in_memory, on_disk, strict=True):  # `memory`: or it is being written
            both += bool(memory and disk) and self.memory.index.state_of(key) == BlockIndex.READY
        return self.memory.index.delete(keys, now) + self.disk.delete(keys) - both

    def info(self, now: float) -> NamespaceInfo:
        index, disk = self.memory.index, self.disk
        return NamespaceInfo(
            id=self.id.hex(),
            namespace=self.canonical.decode(),
            block_bytes=self.block_bytes,
            blocks=index.ready,
            writing=index.writing,
            segments=len(self.memory.segments),
            slots=index.slots,
            memory_bytes=self.memory.nbytes,
            pinned=index.pinned(now),
            hits=self.hits,
            misses=self.misses,
            created=self.created,
            evicted=self.memory.evicted,
            disk_blocks=disk.index.ready if disk else 0,
            disk_bytes=disk.nbytes if disk else 0,
            disk_evicted=disk.evicted if disk else 0,
            replicas=self.replicas,
            promised=len(self.promises),
            awaited=len(self.waiters),
            transient_blocks=index.transient,
            transient_slots=index.transient_slots,
            transient_bytes=self.memory.transient_bytes,
        )
