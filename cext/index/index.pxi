# The interface of an index: one class, and the contract of each of its methods.
#
# Cython needs a class to be in one file. So the methods only call functions, which are grouped in looking_up.pxi,
# writing.pxi, removing.pxi, linking.pxi, by_slot.pxi and segments.pxi. All of them work on one `Blocks` (blocks.pxi),
# which has the state.


@cython.final
cdef class BlockIndex:
    """The key -> slot index of one namespace on one shard: states, readers, pins, expiry, and eviction.

    Slots are numbered ``ordinal * slots_per_segment + i``. ``keys`` is always one contiguous buffer of n * key_bytes
    bytes, a prefix chain with its head first. A call that touches n keys uses the ticks ``tick`` to ``tick + n - 1``,
    the highest for the head. The caller must add n to the tick before the next call. Times are monotonic seconds, and
    are stored in eighths of a second. Pins and expiry are rounded up. Malformed arguments raise ValueError or TypeError
    and change nothing.

    ``policy`` determines the order of eviction (see policies/policy.pxi). For every call with keys, an expired block
    counts as deleted. The index has no clock: its time is the latest ``now`` that a call was given.

    Not thread-safe. Only one thread, that of the shard's loop, uses an index.
    """

    FREE = 0
    WRITING = 1
    READY = 2
    GONE = 3
    ABSENT = -1
    COMING = -2
    EXISTED = -1
    DUPLICATE = -2
    NO_SPACE = -3
    POLICIES = tuple(_POLICIES)

    cdef Blocks blocks

    def __cinit__(self, key_bytes: int, slots_per_segment: int, policy: str = "lru"):
        if not 8 <= key_bytes <= 64:
            raise ValueError(f"key_bytes is {key_bytes}, expected 8 to 64")
        if not 1 <= slots_per_segment <= MAX_SLOTS:
            raise ValueError(f"slots_per_segment is {slots_per_segment}, expected 1 to {MAX_SLOTS}")
        if policy not in _POLICIES:
            raise ValueError(f"policy is {policy!r}, expected one of {', '.join(_POLICIES)}")
        self.blocks = Blocks(key_bytes, slots_per_segment, _POLICIES[policy]())

    # -- segments --------------------------------------------------------------------------------------------

    @property
    def key_bytes(self) -> int:
        return self.blocks.table.key_bytes

    @property
    def slots_per_segment(self) -> int:
        return self.blocks.space.slots_per_segment

    @property
    def segments(self) -> int:
        """The number of attached segments."""
        return self.blocks.segments

    @property
    def slots(self) -> int:
        """The number of slots: free + spare + writing + ready + gone."""
        return self.blocks.slots

    @property
    def free(self) -> int:
        """The number of free slots for ordinary blocks."""
        return self.blocks.unused.count

    @property
    def spare(self) -> int:
        """The number of free slots for transient blocks."""
        return self.blocks.spare.count

    @property
    def transient(self) -> int:
        """The number of READY transient blocks; `ready` counts them, too."""
        return self.blocks.transient

    @property
    def transient_slots(self) -> int:
        """The number of slots in the segments for transient blocks; `slots` counts them, too."""
        return self.blocks.transient_slots

    @property
    def writing(self) -> int:
        return self.blocks.writing

    @property
    def ready(self) -> int:
        return self.blocks.ready

    @property
    def gone(self) -> int:
        return self.blocks.gone

    @property
    def nbytes(self) -> int:
        """The memory of the index, in bytes."""
        return self.__sizeof__() + index_bytes(self.blocks)

    def attach(self, bint transient=False) -> int:
        """Adds a segment of free slots. Returns its ordinal, which is the lowest detached one, or else a new one.
        ``transient``: whether the segment is only for transient blocks.
        """
        return attach_segment(self.blocks, transient)

    def unused_transient(self) -> int:
        """Returns the ordinal of an empty segment for transient blocks, or -1 if there is none."""
        return unused_transient_segment(self.blocks)

    def detach(self, Py_ssize_t ordinal) -> int:
        """Drops a segment and its READY blocks, including pinned ones. Returns the number of blocks.

        Raises ValueError, and changes nothing, while a slot of the segment is being written or read.
        """
        return detach_segment(self.blocks, ordinal)

    def segment_recency(self, Py_ssize_t ordinal, double now) -> tuple[int, bool]:
        """Returns the highest tick of a segment's READY blocks (0 if there are none), and whether any of its slots is
        being written, read or pinned."""
        return recency_of_segment(self.blocks, ordinal, now)

    def oldest_tick(self) -> int:
        """Returns the tick of the least recently used READY block of the lowest priority, even if the block is held.

        Returns 2**63 - 1 if there is no block. When a namespace must give back a segment, namespaces are compared by
        this tick.
        """
        cdef int32_t slot = self.blocks.policy.oldest()
        return NO_TICK if slot == NONE else self.blocks.record(slot).tick

    # -- look-ups --------------------------------------------------------------------------------------------

    def contains(self, keys, double now, bint refresh, uint64_t tick, double pin_until=0.0) -> bytes:
        """Returns one byte per key: 1 if its block is READY or WRITING. ``refresh`` touches these blocks, and
        ``pin_until > now`` pins them."""
        return present_keys(self.blocks, keys, now, refresh, tick, pin_until)

    def match_prefix(self, keys, double now, bint refresh, uint64_t tick, double pin_until=0.0) -> int:
        """Returns the length of the leading run of keys that are READY or WRITING. Only the blocks of this run are
        touched and pinned."""
        return leading_run(self.blocks, keys, now, refresh, tick, pin_until)

    def missing(self, keys, int reads=0) -> int:
        """Returns the number of distinct keys of the batch to which reserve() would give a slot if there were enough.
        These are the keys that are neither READY nor WRITING and, if ``reads`` is 0, the keys of transient blocks."""
        return count_missing(self.blocks, keys, reads)

    def state_of(self, key) -> int:
        """Returns FREE (absent), WRITING or READY. A key whose block is being replaced is READY."""
        cdef int32_t slot = slot_of(self.blocks, key, "key", 1)
        return FREE if slot == NONE else WRITING if self.blocks.readable(slot) == NONE else READY

    def pinned(self, double now) -> int:
        """Returns the number of READY slots whose pin has not expired. Takes O(slots of the segments that
        have pins)."""
        return count_pinned(self.blocks, now)

    # -- readers ---------------------------------------------------------------------------------------------

    def acquire(self, keys, double now, uint64_t tick, bint refresh=True, bint reading=False):
        """Takes a reader's reference on every READY key. Returns int32: the slot, or ABSENT, or COMING (WRITING).

        ``reading``: whether the block will be read for a client. If so, a transient block counts as ABSENT while
        at least as many references to it are held as it has reads left.
        """
        return acquire_keys(self.blocks, keys, now, tick, refresh, reading)

    def acquire_slot(self, slots) -> int:
        """Takes one more reference on each of the slots, which must be READY or still being read. Returns their
        number."""
        return acquire_slots(self.blocks, slots)

    def release(self, slots, bint read=False) -> int:
        """Gives back references. Negative slots are skipped. Returns the number of slots that became free.

        ``read``: whether a client has read each of the blocks. A transient block that was read for the last time is
        dropped.

        Raises ValueError, and releases nothing, if a slot would be released more often than it was acquired.
        """
        return release_slots(self.blocks, slots, read)

    # -- writers ---------------------------------------------------------------------------------------------

    def reserve(self, keys, bint force, uint64_t tick, priority=0, int reads=0):
        """Gives absent keys a slot for writing. Returns one int32 per key: a slot, now WRITING, or a negative verdict.

        EXISTED: the key is READY, or another writer is WRITING it. DUPLICATE: the key occurs earlier in this batch.
        NO_SPACE: no slot is free. With ``force``, READY keys get a new slot too, and the old one stays readable until
        the commit. READY keys of the batch are touched. ``priority``, from 0 to 3, is the priority of the new blocks,
        either one for all or one for each key. A block is evicted only if no evictable block of a lower priority is
        left.

        ``reads``: from 1 to 255 if the new blocks are transient and may be read this often. The commit must say when
        they expire. With 0, the new blocks are ordinary, and READY transient blocks get a new slot, as with ``force``.
        """
        return reserve_keys(self.blocks, keys, force, tick, priority, reads)

    def renew(self, keys, int reads, double now, double expires) -> int:
        """Allows at least ``reads`` more reads of the transient blocks among these keys, and keeps them at least until
        ``expires``. Returns the number of transient blocks."""
        return renew_keys(self.blocks, keys, reads, now, expires)

    def set_expiry(self, keys, double now, double expires) -> bytes:
        """Sets the time when the blocks of these keys expire to ``expires``; 0 means never. Returns one byte per key: 1
        if its time was set, because its block is READY and not transient."""
        return set_expiry_keys(self.blocks, keys, now, expires)

    def commit(
        self, slots, sums, uint64_t tick, expires=0.0, parent=b"", bint ends_chain=False, bint behind=False
    ) -> int:
        """Makes written slots of a chain, head first, READY with their checksums. Negative slots are skipped.

        ``parent``, ``ends_chain`` and ``behind`` are hints for the policy. ``parent``: the key of the block before the
        first slot, or empty if there is none or it is unknown. Its block may be missing. ``ends_chain``: whether the
        chain ends with the last slot, until a later call names that slot's key as ``parent``. ``behind``: whether the
        chain begins before the first slot, even if the parent is missing. A slot that is skipped because its block
        existed does not interrupt the chain. The next block counts as the successor of the previous one, until a
        refresh of the whole chain shows its place.

        ``expires``: when the blocks expire, either one time for all or one for each slot; 0 means never. A
        replaced block is retired: its slot becomes free when no reader holds it, and the new block takes over its pin.
        Returns the number of committed slots. Raises ValueError, and commits nothing, if a slot is not WRITING.
        """
        return commit_slots(self.blocks, slots, sums, tick, expires, parent, ends_chain, behind)

    def link(self, keys, before=b"", slots=None, uint64_t call=0, offsets=None) -> int:
        """Links the keys as a chain, head first, which continues the chain of the key ``before`` (if it is not empty).
        ``before`` may also have one key for each of ``keys``: the key before it. ``slots`` saves look-ups: it has the
        slot of each key that the caller knows, and negative numbers for the others. ``offsets``, uint32: the place of
        each key in the call ``call``. The places are stored for the blocks in ``slots``, and cut() uses them.

        Each READY or WRITING block is linked to the nearest one before it. A block that is linked to another one keeps
        its place, unless the nearest one comes between these two. A block to which others are linked is not evicted
        before them. Returns the number of blocks that were linked. A link is not made if it would close a circle, or if
        thousands of blocks already follow the block.
        """
        return link_keys(self.blocks, keys, before, slots, call, offsets)

    def disown(self, slots) -> int:
        """Detaches WRITING slots from their keys, so that the keys are absent again and other writers may set them.

        The writer keeps its slots, with one reference on each, and gives them back with release(). Negative slots, and
        slots that are not WRITING, are skipped. Returns the number of slots that were detached.
        """
        return disown_slots(self.blocks, slots)

    def abort(self, slots) -> int:
        """Frees WRITING slots. A block that would have been replaced stays. Blocks that are linked to these slots are
        linked to the blocks before them. Errors and negative slots are as for commit.

        Returns the number of slots.
        """
        return abort_slots(self.blocks, slots)

    def restore(self, keys, slots, sums, ticks, expires, priorities):
        """Puts the blocks of a recovered index into given slots. Returns one int32 per row: the slot, or -1 if it is
        skipped.

        A row is skipped if its slot is not free or not attached, or if its key is already in the index. The rows must
        be in ascending order of tick, and each row counts as a request of its own. ``slots``: int32. ``sums``,
        ``ticks``: uint64. ``expires``: float64. ``priorities``: uint8. Each array has one item per key.
        """
        return restore_blocks(self.blocks, keys, slots, sums, ticks, expires, priorities)

    # -- by slot ---------------------------------------------------------------------------------------------

    def checksums(self, slots):
        """Returns the checksum of each slot that holds a block, as uint64; 0 for negative and WRITING slots."""
        return column_of(self.blocks, slots, CHECKSUM, np.uint64)

    def ticks_of(self, slots):
        """Returns the tick of each slot that holds a block, as uint64; 0 for negative and WRITING slots."""
        return column_of(self.blocks, slots, TICK, np.uint64)

    def expires_of(self, slots):
        """Returns the expiry time of the block in each slot, as float64; 0 for blocks that never expire, and for
        negative or WRITING slots."""
        return column_of(self.blocks, slots, EXPIRES, np.float64)

    def priorities_of(self, slots):
        """Returns the priority of each slot that holds a block, as uint8; 0 for negative slots."""
        return column_of(self.blocks, slots, PRIORITY, np.uint8)

    def reads_of(self, slots):
        """Returns how often each slot's block may still be read, as uint8; 0 for ordinary blocks and negative
        slots."""
        return column_of(self.blocks, slots, READS, np.uint8)

    def states_of(self, slots):
        """Returns the state of each slot, as uint8: FREE, WRITING, READY or GONE. Slots that do not exist are FREE."""
        return states_at(self.blocks, slots)

    def keys_of(self, slots) -> bytes:
        """Returns the concatenated keys of the slots, each of which must hold a block. A negative slot gives zeros."""
        return keys_at(self.blocks, slots)

    def before_of(self, slots):
        """Returns the slot of the block that each slot's block follows in its chain, as int32; -1 if the block follows
        none, and for negative slots."""
        return slots_before(self.blocks, slots)

    def links_of(self, slots) -> tuple[bytes, bytes]:
        """Returns the links of the blocks in these slots, for link() of another index. These are the keys of blocks
        that follow other blocks, and the keys of the blocks that they follow. At least one block of each link is in one
        of the slots. Negative slots are skipped."""
        return links_of(self.blocks, slots)

    def ready_slots(self, uint64_t since=0, bint every=False):
        """Returns the READY slots whose tick is at least ``since``, as int32 in ascending order.

        Slots of transient blocks, and of expired blocks that are not removed yet, are included only with ``every``.
        """
        return slots_used_since(self.blocks, since, every)

    # -- removal ---------------------------------------------------------------------------------------------

    def delete(self, keys, double now=0.0) -> int:
        """Deletes READY blocks, including pinned ones. Returns how many of them had not expired by ``now`` or by the
        latest time that a call was given. A slot that is being read becomes free when it is released."""
        return delete_keys(self.blocks, keys, now)

    def drop(self, slots) -> int:
        """Deletes the blocks in these slots, for example because they are corrupt. Slots that are not READY are
        ignored. Returns the number of deleted blocks."""
        return drop_slots(self.blocks, slots)

    def clear(self) -> int:
        """Deletes all READY blocks. Returns the number of deleted blocks."""
        return delete_all(self.blocks)

    def guard(self, key) -> None:
        """Protects the block of this key, and the blocks before it in its chain, from evict(). An empty key ends all
        protection."""
        self.blocks.guarded = self.blocks.placed(slot_of(self.blocks, key, "key", 0))

    @property
    def keep_lapsed(self) -> bool:
        """Whether the keys of expired blocks are kept for take_lapsed()."""
        return self.blocks.keep_lapsed

    @keep_lapsed.setter
    def keep_lapsed(self, bint keep):
        self.blocks.keep_lapsed = keep

    def take_lapsed(self) -> bytes:
        """Returns the concatenated keys of the blocks that were dropped since the last call because they had expired.

        Needs `keep_lapsed`. Keys for which there was no memory are missing.
        """
        return lapsed_keys(self.blocks)

    def expire(self, double now, Py_ssize_t limit) -> int:
        """Drops expired blocks among the next ``limit`` slots. Successive calls cover all slots. Returns the number
        dropped.

        Costs nothing while no block has an expiry time.
        """
        return drop_expired(self.blocks, now, limit)

    def expire_transient(self, double now) -> int:
        """Drops all transient blocks that have expired. Returns the number of dropped blocks. Costs nothing before the
        first one expires."""
        return 0 if self.blocks.advance(now) < self.blocks.soonest else drop_transient(self.blocks, False)

    def evict(self, Py_ssize_t n, double now, keys=None, list cuts=None) -> int:
        """Evicts up to n READY blocks, which the policy chooses. Returns the number of evicted blocks.

        Blocks that are being read or pinned stay, and blocks of a higher priority stay while a block of a lower
        priority can be evicted. A block stays while others are linked to it, unless all blocks that could be evicted
        before it are held. The keys of the evicted blocks are appended to ``keys``, a bytearray. Expired blocks may be
        among them. For each known call with evicted blocks, ``cuts`` gets the call, its lowest evicted offset, and the
        key of the block before that offset (empty if there is none).
        """
        return evict_blocks(self.blocks, n, now, keys, cuts)

    def cut(self, key, uint64_t call, uint32_t offset, double now, Py_ssize_t limit) -> tuple[int, bytes]:
        """Evicts blocks that are useless because another shard has lost the block at ``offset`` of a call. These are
        the call's blocks here from ``offset`` on, and all blocks that follow them. ``key``: the key of the call's last
        block here.

        Evicts up to ``limit`` blocks at a time. Blocks that are held stay, and so do the blocks before them. Returns
        the number of evicted blocks, and the key of the call's last block that is left, for another cut. The key is
        empty if no block is left.
        """
        return cut_chain(self.blocks, key, call, offset, now, limit)

    def victims(self, Py_ssize_t n, double now):
        """Returns the slots of up to n blocks that evict() would take next, as int32 in the order of eviction. Expired
        blocks are left out."""
        return next_victims(self.blocks, n, now)
