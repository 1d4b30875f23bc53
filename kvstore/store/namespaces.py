"""What a shard keeps: its namespaces, each with blocks in memory and, where the shard has a disk tier, on disk.

A block lies in one tier or in both; one answer covers both, and no question touches the disk. Memory is what clients
write to and read from: a block that is on disk only is fetched into memory first (`kvstore.disk`).

One thread, the shard's loop, uses all of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, Protocol

import numpy as np

from kvstore._cext import BlockIndex
from kvstore.store.arena import Arena
from kvstore.store.rules import NamespaceRule
from kvstore.store.tier import NamespaceTier, Slots, Tier
from kvstore.wire import (
    ErrorCode,
    NamespaceInfo,
    WireError,
    decode_namespace,
    frame_blocks,
    namespace_id,
)

MAX_NAMESPACES: Final = 1024
INDEX_OVERHEAD_BYTES: Final = 96 << 20  # index memory beyond this counts against the shard's limit
EXPIRE_STEP: Final = 16384  # slots looked at a time
SLOT_BYTES: Final = 112  # of an index, at most, beside the key
MAX_INDEX_SHARE: Final = 0.5  # of the limit: a disk so large that its index would take more is not filled


def find_parent(chain: bytes, keys: bytes, key_bytes: int) -> tuple[bytes, bool]:
    """Where `keys` lie in a chain that was asked for before: the key before the first, b"" if that is not known, and
    whether they reach the chain's end."""
    at = chain.find(keys[:key_bytes])
    while at > 0 and at % key_bytes:
        at = chain.find(keys[:key_bytes], at + 1)
    return chain[at - key_bytes : at] if at > 0 else b"", bool(chain) and chain.endswith(keys[-key_bytes:])


class Parked(Protocol):
    """Who waits for a block that is being written."""

    def wake(self) -> None:
        """A block that was being written is there, or is not coming."""


class DiskBlocks(Protocol):
    """One namespace's blocks on disk."""

    index: BlockIndex
    evicted: int

    @property
    def empty(self) -> bool:
        """No block in it, and nobody at one."""

    @property
    def nbytes(self) -> int:
        """Bytes of segments it holds."""

    def contains(self, keys: bytes, now: float, refresh: bool, tick: int, pin_until: float = 0.0) -> bytes:
        """One byte a key: 1 when the block is on disk, not only on its way there."""

    def delete(self, keys: bytes) -> int:
        """Delete blocks. -> how many there were."""

    def expire(self, now: float, limit: int) -> None:
        """Free what is past its time among the next `limit` slots."""


class Disk(Protocol):
    """A disk tier, as far as the namespaces need it."""

    @property
    def index_bytes(self) -> int:
        """Memory of its indexes."""

    def open(self, canonical: bytes, key_bytes: int, block_bytes: int) -> DiskBlocks | None:
        """A new namespace's place on disk; None when there is none for its blocks."""

    def forget(self, canonical: bytes) -> None:
        """The namespace is gone."""


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
    parked: set[Parked] = field(default_factory=set)
    hits: int = 0
    misses: int = 0
    created: int = 0

    @property
    def empty(self) -> bool:
        """Nothing in it and nobody at it."""
        return self.memory.empty and not self.parked and (self.disk is None or self.disk.empty)

    def wake_parked(self) -> None:
        """A write ended: whoever waits for one looks again."""
        if self.parked:
            parked, self.parked = self.parked, set()
            for waiter in parked:
                waiter.wake()

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


class Store:
    """All namespaces of one shard."""

    def __init__(
        self, limit_bytes: int, segment_bytes: int, policy: str = "lru", rules: Sequence[NamespaceRule] = ()
    ) -> None:
        self.arena = Arena(limit_bytes, segment_bytes)
        self.limit_bytes = limit_bytes
        self.policy = policy
        self._rules = rules
        self.memory: Tier[NamespaceTier] = Tier(self.arena, self._memory_may_grow)
        self.disk: Disk | None = None
        self._namespaces: dict[bytes, NamespaceStore] = {}
        self._tick = 1

    def __iter__(self) -> Iterator[NamespaceStore]:
        return iter(self._namespaces.values())

    def ticks(self, count: int) -> int:
        """Reserve `count` recency ticks; the lowest is returned."""
        tick = self._tick
        self._tick += max(count, 1)
        return tick

    def skip_ticks(self, past: int) -> None:
        """Give no tick up to `past` any more: blocks of an earlier run have them."""
        self._tick = max(self._tick, past + 1)

    @property
    def index_bytes(self) -> int:
        """Memory of all indexes, of both tiers."""
        return self.memory.index_bytes + (self.disk.index_bytes if self.disk else 0)

    def check_namespace(self, canonical: bytes) -> int:
        """`block_bytes` of a namespace this shard could hold; `WireError` says why it could not."""
        block_bytes = decode_namespace(canonical).block_bytes
        if block_bytes > self.arena.segment_bytes:
            raise WireError(
                ErrorCode.OUT_OF_MEMORY,
                f"blocks of {block_bytes} bytes do not fit a segment of {self.arena.segment_bytes} bytes; "
                "start the server with a larger --segment",
            )
        return block_bytes

    def get(self, canonical: bytes) -> NamespaceStore | None:
        """The namespace, if it is known here."""
        return self._namespaces.get(canonical)

    def find(self, canonical: bytes, key_bytes: int) -> NamespaceStore | None:
        """The namespace, if it holds anything; `WireError` when its keys have another length."""
        found = self._namespaces.get(canonical)
        if found is None or found.empty:
            return None
        if found.key_bytes != key_bytes:
            raise WireError(
                ErrorCode.KEY_SIZE,
                f"keys of {key_bytes} bytes: this namespace's keys have {found.key_bytes} bytes",
            )
        return found

    def open(self, canonical: bytes, key_bytes: int) -> NamespaceStore:
        """The namespace, made if it is new. The first block set decides its key length."""
        found = self.find(canonical, key_bytes) or self._namespaces.get(canonical)
        if found is not None:
            if found.key_bytes == key_bytes:
                return found
            self._forget(found)
        block_bytes = self.check_namespace(canonical)
        if len(self._namespaces) >= MAX_NAMESPACES:
            self._forget_an_empty_one()
        index = BlockIndex(key_bytes, self.arena.segment_bytes // block_bytes, self.policy)
        model = decode_namespace(canonical).model
        rule = next((rule for rule in self._rules if fnmatchcase(model, rule.match)), None)
        namespace = NamespaceStore(
            canonical=canonical,
            id=namespace_id(canonical),
            block_bytes=block_bytes,
            key_bytes=key_bytes,
            arena=self.arena,
            memory=NamespaceTier(self.arena, block_bytes, index),
            disk=self.disk.open(canonical, key_bytes, block_bytes) if self.disk else None,
            frame_blocks=frame_blocks(block_bytes),
            ttl_s=rule.ttl_seconds if rule else 0,
            priority=rule.priority if rule else 0,
        )
        self.memory.members.append(namespace.memory)
        self._namespaces[canonical] = namespace
        return namespace

    def _forget(self, namespace: NamespaceStore) -> None:
        self.memory.remove(namespace.memory)
        if self.disk is not None:
            self.disk.forget(namespace.canonical)
        del self._namespaces[namespace.canonical]

    def _forget_an_empty_one(self) -> None:
        for namespace in self:
            if namespace.empty:
                self._forget(namespace)
                return
        raise WireError(ErrorCode.LIMIT, f"{MAX_NAMESPACES} namespaces hold blocks already; delete one's blocks first")

    def reserve(self, namespace: NamespaceStore, keys: bytes, force: bool, now: float, priority: int = 0) -> Slots:
        """Reserve a memory slot for every block that is wanted. -> slots or verdicts."""
        index, count = namespace.memory.index, len(keys) // namespace.key_bytes
        priority = max(priority, namespace.priority)
        on_disk = np.frombuffer(namespace.on_disk(keys, now), dtype=np.uint8) != 0
        wanted = keys
        if on_disk.any():
            wanted = np.frombuffer(keys, dtype=np.uint8).reshape(count, namespace.key_bytes)[~on_disk].tobytes()
        missing = index.missing(wanted)
        if force:
            wanted = keys
        room = count if force else missing
        # What a SET names itself must not give way to its other blocks.
        held = index.acquire(wanted, now, 0, False) if room > index.free and room < count else None
        self.memory.make_room(namespace.memory, room, now)
        reserved = index.reserve(wanted, force, self.ticks(count), priority)
        if held is not None:
            index.release(held)
        if len(reserved) == count:
            return reserved
        slots = np.full(count, BlockIndex.EXISTED, dtype=np.int32)
        slots[~on_disk] = reserved
        return slots

    def expire(self, now: float) -> None:
        """Free what is past its time, some of it at a time."""
        for namespace in self:
            namespace.memory.index.expire(now, EXPIRE_STEP)
            if namespace.disk is not None:
                namespace.disk.expire(now, EXPIRE_STEP)

    @property
    def room_bytes(self) -> int:
        """What memory takes in whole segments before a block is evicted; a large index takes of it, too."""
        used = (self.arena.segments - self.arena.free) * self.arena.segment_bytes
        allowed = max(0, self.limit_bytes - used - self._index_excess()) // self.arena.segment_bytes
        return min(allowed, self.arena.free) * self.arena.segment_bytes

    # ---- what indexes may take ---------------------------------------------------------------------------------

    def _memory_may_grow(self, growing: NamespaceTier, now: float) -> bool:
        """Whether one more segment keeps the shard inside its limit (small blocks need much index)."""
        in_use = (self.arena.segments - self.arena.free + 1) * self.arena.segment_bytes
        return in_use + self._index_excess() <= self.limit_bytes or not growing.segments

    def disk_may_grow(self, slots: int, key_bytes: int, now: float) -> bool:
        """Whether so many more slots on disk may have their index in memory; memory for blocks gives way to it."""
        excess = self._index_excess(slots * (key_bytes + SLOT_BYTES))
        if excess > self.limit_bytes * MAX_INDEX_SHARE:
            return False
        if not excess:
            return True
        while excess + (self.arena.segments - self.arena.free) * self.arena.segment_bytes > self.limit_bytes:
            if not self.memory.shrink(now):
                break
        self.arena.discard_free()
        return True

    def _index_excess(self, more: int = 0) -> int:
        return max(0, self.index_bytes + more - INDEX_OVERHEAD_BYTES)
