"""One namespace on a shard: its blocks in memory and, where the shard has a disk tier, on disk.

A block lies in one tier or in both; one answer covers both, and no question touches the disk: the index of what lies
there is in memory, too. Memory is what clients write to and read from: a block that is on disk only is fetched into
memory first (`kvstore.disk`).

One thread, the shard's loop, uses all of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstore._cext import BlockIndex
from kvstore.store.arena import Arena
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.tier import NamespaceTier, Slots
from kvstore.wire import NamespaceInfo


def find_parent(chain: bytes, keys: bytes, key_bytes: int) -> tuple[bytes, bool]:
    """Where `keys` lie in a chain that was asked for before: the key before the first, b"" if that is not known, and
    whether they reach the chain's end."""
    at = chain.find(keys[:key_bytes])
    while at > 0 and at % key_bytes:
        at = chain.find(keys[:key_bytes], at + 1)
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
    ttl_s: int = 0  # 0: blocks do not expire
    priority: int = 0  # of each block at least
    replicas: int = 1  # the most copies a client said it keeps of each block
    parked: set[Callable[[], None]] = field(default_factory=set)  # called once, when a block is written or given up
    hits: int = 0
    misses: int = 0
    created: int = 0
    empty_since: float | None = None  # monotonic seconds, noted by `Store.expire`

    @property
    def empty(self) -> bool:
        """It holds no block, and no client is reading or writing one."""
        return self.memory.empty and not self.parked and (self.disk is None or self.disk.empty)

    def wake_parked(self) -> None:
        """A write ended: streams that wait for a block look again."""
        if self.parked:
            parked, self.parked = self.parked, set()
            for wake in parked:
                wake()

    def views(self, slots: Slots) -> list[memoryview]:
        """The memory of `slots`, in order, neighbours merged into one view."""
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

    # ---- questions: one answer for both tiers ----------------------------------------------------------------

    def contains(self, keys: bytes, now: float, refresh: bool, tick: int, pin_until: float = 0.0) -> bytes:
        """One byte a key: 1 when the block is here or is being written."""
        present = self.memory.index.contains(keys, now, refresh, tick, pin_until)
        if self.disk is None or self.disk.empty or not (refresh or pin_until > now or 0 in present):
            return present
        on_disk = self.disk.contains(keys, now, refresh, tick, pin_until)
        return (np.frombuffer(present, dtype=np.uint8) | np.frombuffer(on_disk, dtype=np.uint8)).tobytes()

    def match_prefix(self, keys: bytes, now: float, refresh: bool, tick: int, pin_until: float = 0.0) -> int:
        """The length of the leading run that is here or is being written; only that run is touched and pinned."""
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

    def on_disk(self, keys: bytes, now: float) -> bytes:
        """One byte a key: 1 when the block is on disk."""
        if self.disk is None or self.disk.empty:
            return bytes(len(keys) // self.key_bytes)
        return self.disk.contains(keys, now, False, 0)

    def hottest(self, skip: int, limit: int, now: float) -> tuple[bytes, int]:
        """The keys of `limit` blocks after the first `skip`, most recently used first, and how many blocks there are.

        Of a block in both tiers the older use counts: on its way to the other one it was used by nobody. About 0.1 s
        and 24 bytes of memory for each of a million blocks, for as long as it takes.
        """
        index = self.memory.index
        slots = index.ready_slots()
        ticks = index.ticks_of(slots)
        memory_blocks = len(slots)
        if self.disk is not None and not self.disk.empty:
            twins = self.disk.index.acquire(index.keys_of(slots), now, 0, False)
            self.disk.index.release(twins)
            both = twins >= 0
            ticks[both] = np.minimum(ticks[both], self.disk.index.ticks_of(twins[both]))
            on_disk = self.disk.index.ready_slots()
            on_disk = on_disk[~np.isin(on_disk, twins[both], assume_unique=True)]
            slots = np.concatenate([slots, on_disk])
            ticks = np.concatenate([ticks, self.disk.index.ticks_of(on_disk)])
        total = len(slots)
        end = min(total, skip + limit)
        rows = np.argpartition(ticks, total - end)[total - end :] if 0 < end < total else np.arange(end)
        rows = rows[np.argsort(ticks[rows])[::-1]][skip:]
        keys = np.empty((len(rows), self.key_bytes), dtype=np.uint8)
        in_memory = rows < memory_blocks
        for tier, part in ((self.memory, in_memory), (self.disk, ~in_memory)):
            if tier is not None and part.any():
                found = np.frombuffer(tier.index.keys_of(slots[rows[part]]), dtype=np.uint8)
                keys[part] = found.reshape(-1, self.key_bytes)
        return keys.tobytes(), total

    def delete(self, keys: bytes, now: float) -> int:
        """Delete blocks from both tiers. -> how many blocks there were."""
        if self.disk is None or self.disk.empty:
            return self.memory.index.delete(keys)
        size, both = self.key_bytes, 0
        distinct = dict.fromkeys(keys[at : at + size] for at in range(0, len(keys), size))
        on_disk = self.disk.contains(b"".join(distinct), now, False, 0)
        for key, there in zip(distinct, on_disk, strict=True):
            both += there and self.memory.index.state_of(key) == BlockIndex.READY
        return self.memory.index.delete(keys) + self.disk.delete(keys) - both

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
        )
