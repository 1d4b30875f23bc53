"""All namespaces of one shard, and the account of the memory that their blocks and the indexes of both tiers take.

The first SET creates a namespace. A namespace is forgotten when it has been empty for `EMPTY_S`. The store uses a disk
tier only through `Disk`.

Only the thread of the shard's loop uses this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore._index import BlockIndex
from kvstore.store.arena import Arena
from kvstore.store.chains import Chains
from kvstore.store.disk_blocks import DiskBlocks
from kvstore.store.namespace import NamespaceStore
from kvstore.store.quotas import Quotas
from kvstore.store.rules import NamespaceRule
from kvstore.store.tier import NamespaceTier, Slots, Tier
from kvstore.wire import ErrorCode, WireError, decode_namespace, frame_blocks, namespace_id
from kvstore.wire.status import segment_slots

MAX_NAMESPACES: Final = 1024
FREE_TIMES: Final = 3  # for the same rule as in `kvstore.shard.account`
INDEX_OVERHEAD_BYTES: Final = 96 << 20  # index memory beyond this counts against the shard's limit
EXPIRE_STEP: Final = 16384  # the number of slots checked at a time
EMPTY_S: Final = 5.0  # a namespace that has been empty for this long is forgotten
SLOT_BYTES: Final = 152  # the most memory that an index takes for a slot, in addition to the key
MAX_INDEX_SHARE: Final = 0.5  # of the limit; the disk tier stops growing when the indexes would take more than this

Priorities = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Disk:
    """The store's interface to a disk tier."""

    blocks: Tier[DiskBlocks]  # the blocks of all namespaces
    open: Callable[[bytes, int, int], DiskBlocks | None]
    """Make a new namespace's blocks on disk, from its canonical JSON, the bytes of a key and the bytes of a block.
    Return None if a block does not fit a segment."""
    forget: Callable[[DiskBlocks], None]
    """Drop a namespace that is gone, and its blocks on disk."""


class ShardStore:
    """All namespaces of one shard."""

    def __init__(
        self,
        limit_bytes: int,
        segment_bytes: int,
        policy: str = "lru",
        rules: Sequence[NamespaceRule] = (),
        shared: bool = False,
        lends: bool = False,
        transient_bytes: int = 0,
    ) -> None:
        """shared: whether the node has other shards, which get parts of the same chains.
        lends: whether clients on this host may read the shard's memory.
        transient_bytes: the most memory for transient blocks, rounded up to whole segments. At least one segment stays
        for ordinary blocks.
        """
        self.arena = Arena(limit_bytes, segment_bytes, lends)
        self.limit_bytes = limit_bytes
        self.transient_segments = min(-(-transient_bytes // segment_bytes), self.arena.segments - 1)
        self.policy = policy
        self._rules = rules
        self.memory: Tier[NamespaceTier] = Tier(self.arena, self._memory_may_grow)
        self.disk: Disk | None = None
        self.chains = Chains(shared)
        self._namespaces: dict[bytes, NamespaceStore] = {}
        self._tick = 1
        self._hits_forgotten = self._misses_forgotten = self._created_forgotten = 0  # counts of forgotten namespaces

    def __iter__(self) -> Iterator[NamespaceStore]:
        return iter(self._namespaces.values())

    def use_quotas(self, memory: Quotas, disk: Quotas) -> None:
        """Apply these quotas of tenants to memory and, if there is a disk tier, to the disk."""
        self.memory.quotas = memory
        if self.disk is not None:
            self.disk.blocks.quotas = disk

    def ticks(self, count: int) -> int:
        """Reserve `count` recency ticks. Return the lowest one."""
        tick = self._tick
        self._tick += max(count, 1)
        return tick

    def skip_ticks(self, past: int) -> None:
        """Return only ticks above `past` from now on, because blocks of an earlier run have the lower ones."""
        self._tick = max(self._tick, past + 1)

    @property
    def index_bytes(self) -> int:
        """The memory of all indexes of both tiers, in bytes."""
        return self.memory.index_bytes + (self.disk.blocks.index_bytes if self.disk else 0)

    @property
    def hits(self) -> int:
        """The number of requested blocks that were sent since the start."""
        return self._hits_forgotten + sum(namespace.hits for namespace in self)

    @property
    def misses(self) -> int:
        """The number of requested blocks since the start that were not there."""
        return self._misses_forgotten + sum(namespace.misses for namespace in self)

    @property
    def created(self) -> int:
        """The number of blocks stored since the start."""
        return self._created_forgotten + sum(namespace.created for namespace in self)

    def check_namespace(self, canonical: bytes) -> int:
        """Return `block_bytes` of a namespace. Raises `WireError` when this shard cannot hold the namespace."""
        block_bytes = decode_namespace(canonical).block_bytes
        if block_bytes > self.arena.segment_bytes:
            raise WireError(
                ErrorCode.OUT_OF_MEMORY,
                f"blocks of {block_bytes} bytes do not fit a segment of {self.arena.segment_bytes} bytes; "
                "start the server with a larger --segment",
            )
        return block_bytes

    def get(self, canonical: bytes) -> NamespaceStore | None:
        """Return the namespace, or None if this shard does not have it."""
        return self._namespaces.get(canonical)

    def find(self, canonical: bytes, key_bytes: int) -> NamespaceStore | None:
        """Return the namespace, or None if it does not exist or is empty. Raises `WireError` if the length of the
        namespace's keys is not `key_bytes`."""
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
        """Return the namespace, and create it if it is new. Raises `WireError` if it cannot be created.

        The first block that is set decides the length of the namespace's keys. While the namespace is empty, it accepts
        another length.
        """
        found = self.find(canonical, key_bytes) or self._namespaces.get(canonical)
        if found is not None:
            if found.key_bytes == key_bytes:
                return found
            self._forget(found)
        block_bytes = self.check_namespace(canonical)
        if len(self._namespaces) >= MAX_NAMESPACES:
            self._forget_an_empty_one()
        header = decode_namespace(canonical)
        self._check_room_of(header.tenant)
        index = BlockIndex(key_bytes, segment_slots(self.arena.segment_bytes, block_bytes), self.policy)
        rule = next((rule for rule in self._rules if fnmatchcase(header.model, rule.match)), None)
        namespace = NamespaceStore(
            canonical=canonical,
            id=namespace_id(canonical),
            block_bytes=block_bytes,
            key_bytes=key_bytes,
            arena=self.arena,
            memory=NamespaceTier(self.arena, block_bytes, index, header.tenant),
            disk=self.disk.open(canonical, key_bytes, block_bytes) if self.disk else None,
            frame_blocks=frame_blocks(block_bytes),
            tenant=header.tenant,
            model=header.model,
            ttl_s=rule.ttl_seconds if rule else 0,
            priority=rule.priority if rule else 0,
            opaque_sums=header.opaque_sums,
        )
        if self.chains.shared and namespace.disk is None:
            namespace.memory.cuts = []
        self.memory.members.append(namespace.memory)
        self._namespaces[canonical] = namespace
        return namespace

    def _forget(self, namespace: NamespaceStore) -> None:
        self.memory.remove(namespace.memory)
        if self.disk is not None and namespace.disk is not None:
            self.disk.forget(namespace.disk)
        del self._namespaces[namespace.canonical]
        self._hits_forgotten += namespace.hits
        self._misses_forgotten += namespace.misses
        self._created_forgotten += namespace.created

    def _check_room_of(self, tenant: str) -> None:
        """Raise `WireError` if a tenant has its full share of namespaces. If there are tenants, each may have at most
        `FREE_TIMES` times as many namespaces as are left for all."""
        free = MAX_NAMESPACES - len(self._namespaces)
        if self.memory.quotas is None or sum(each.tenant == tenant for each in self) < FREE_TIMES * free:
            return
        raise WireError(
            ErrorCode.LIMIT,
            f"tenant {tenant!r} has {FREE_TIMES} times as many namespaces on this shard as the {free} that are left "
            "for all tenants: delete all blocks of some namespaces first",
        )

    def _forget_an_empty_one(self) -> None:
        for namespace in self:
            if namespace.empty:
                self._forget(namespace)
                return
        raise WireError(
            ErrorCode.LIMIT,
            f"this shard holds blocks of {MAX_NAMESPACES} namespaces, its limit: delete all blocks of one of them",
        )

    def reserve(
        self,
        namespace: NamespaceStore,
        keys: bytes,
        force: bool,
        now: float,
        priority: int | Priorities = 0,
        before: bytes = b"",
        reads: int = 0,
    ) -> Slots:
        """Reserve a memory slot for every block that is in neither tier or, with `force`, for every block.

        priority: the priority of the blocks, either one for all or one for each. The namespace's rule sets the minimum.
        before: the key of a block that must not be evicted for the new ones; empty if there is none. The blocks before
        it in its chain are not evicted either.
        reads: how often the blocks may be read if they are transient, or 0 for ordinary blocks. Ordinary blocks replace
        transient ones.

        Return a slot or a negative verdict of `BlockIndex.reserve` for each key.
        """
        index, count = namespace.memory.index, len(keys) // namespace.key_bytes
        if isinstance(priority, int):
            priority = max(priority, namespace.priority)
        else:
            priority = np.maximum(priority, np.uint8(namespace.priority))
        on_disk = np.frombuffer(namespace.on_disk(keys, now), dtype=np.uint8) != 0
        wanted = keys
        if on_disk.any():
            wanted = np.frombuffer(keys, dtype=np.uint8).reshape(count, namespace.key_bytes)[~on_disk].tobytes()
            if not (force or isinstance(priority, int)):
                priority = priority[~on_disk]
        missing = index.missing(wanted, reads)
        if force:
            wanted = keys
        room = count if force else missing
        # Blocks of this SET that exist already must not be evicted to make room for its other blocks.
        held = None
        if namespace.disk is not None:  # evicted blocks remain on disk, so a chain may be larger than memory
            before = b""
        if reads:
            self.memory.make_transient_room(namespace.memory, room, self.transient_segments, now)
        elif room > index.free:
            held = index.acquire(wanted + before if room < count else before, now, 0, False)
            index.guard(before)
        if not reads:
            self.memory.make_room(namespace.memory, room, now)
        self.chains.evicted(namespace)
        reserved = index.reserve(wanted, force, self.ticks(count), priority, reads)
        if held is not None:
            index.release(held)
            index.guard(b"")
        if len(reserved) == count:
            return reserved
        slots = np.full(count, BlockIndex.EXISTED, dtype=np.int32)
        slots[~on_disk] = reserved
        return slots

    def reserve_to_fetch(self, namespace: NamespaceStore, keys: bytes, priorities: Priorities, now: float) -> Slots:
        """Reserve memory slots for blocks that are read from disk. Return the same as `reserve`."""
        index = namespace.memory.index
        self.memory.make_room(namespace.memory, index.missing(keys), now)
        return index.reserve(keys, False, self.ticks(len(priorities)), priorities)

    def is_full(self, namespace: NamespaceStore, count: int) -> bool:
        """Return whether `count` more blocks of a namespace fit in memory only if other blocks are evicted."""
        return namespace.memory.index.free < count and not self.room_bytes

    def refuse(self, namespace: NamespaceStore, keys: bytes, now: float) -> Slots:
        """Return the verdicts on keys whose blocks will not be stored: either they exist, or there is no room for
        them."""
        present = np.frombuffer(namespace.contains(keys, now, False, 0), dtype=np.bool_)
        index = namespace.memory.index
        if index.transient:
            found = index.acquire(keys, now, 0, False)
            present = present & (index.reads_of(found) == 0)
            index.release(found)
        return np.where(present, BlockIndex.EXISTED, BlockIndex.NO_SPACE).astype(np.int32)

    def expire(self, now: float, ending: bool = False) -> None:
        """Free expired blocks, checking some of the slots in each call. End the promises whose time is over, or all
        promises if the shard is `ending`. Forget namespaces that have been empty for `EMPTY_S`. Shrink tenants that
        hold more memory than their quota.

        The loop calls this method every fraction of a second.
        """
        self.memory.keep_quotas(now)
        for namespace in list(self):
            if namespace.promises:
                namespace.promises.expire(float("inf") if ending else now)
            namespace.memory.index.expire(now, EXPIRE_STEP)
            if namespace.memory.transient:
                _give_up_unused(namespace.memory, now)
            if namespace.disk is not None:
                namespace.disk.expire(now, EXPIRE_STEP)
            if not namespace.empty:
                namespace.empty_since = None
            elif namespace.empty_since is None:
                namespace.empty_since = now
            elif now - namespace.empty_since >= EMPTY_S:
                self._forget(namespace)

    @property
    def room_bytes(self) -> int:
        """The number of bytes, in whole segments, that can be filled before a block is evicted. A large index lowers
        this number."""
        used = (self.arena.segments - self.arena.free) * self.arena.segment_bytes
        allowed = max(0, self.limit_bytes - used - self._index_excess()) // self.arena.segment_bytes
        return min(allowed, self.arena.free) * self.arena.segment_bytes

    # ---- memory of the indexes ---------------------------------------------------------------------------------

    def _memory_may_grow(self, growing: NamespaceTier, now: float) -> bool:
        """Return whether one more segment and its index, which is large for small blocks, stay within the shard's
        limit.

        This applies to a namespace's first segment, too: if it does not fit, the blocks replace older ones or are
        refused.
        """
        excess = self._index_excess(growing.index.slots_per_segment * (growing.index.key_bytes + SLOT_BYTES))
        if excess:
            self.arena.allow((self.limit_bytes - excess) // self.arena.segment_bytes)
        in_use = self.arena.segments - self.arena.free
        return (in_use + 1) * self.arena.segment_bytes + excess <= self.limit_bytes

    def disk_may_grow(self, slots: int, key_bytes: int, now: float) -> bool:
        """Return whether memory may hold the index of `slots` more slots on disk. Gives back segments of memory if that
        makes room."""
        excess = self._index_excess(slots * (key_bytes + SLOT_BYTES))
        if excess > self.limit_bytes * MAX_INDEX_SHARE:
            return False
        if not excess:
            return True
        while excess + (self.arena.segments - self.arena.free) * self.arena.segment_bytes > self.limit_bytes:
            if not self.memory.shrink(now):
                break
        self.arena.allow((self.limit_bytes - excess) // self.arena.segment_bytes)
        return True

    def _index_excess(self, more: int = 0) -> int:
        return max(0, self.index_bytes + more - INDEX_OVERHEAD_BYTES)


def _give_up_unused(tier: NamespaceTier, now: float) -> None:
    """Give back a segment for transient blocks if one has been empty for `EMPTY_S`. It is not given back earlier,
    because other blocks would be evicted if the namespace soon needed a segment again."""
    if tier.index.unused_transient() < 0:
        tier.unused_since = None
    elif tier.unused_since is None:
        tier.unused_since = now
    elif now - tier.unused_since >= EMPTY_S:
        tier.give_up_transient(now)
        tier.unused_since = None
