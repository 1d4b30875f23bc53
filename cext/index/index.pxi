# The interface of an index: one class, and the contract of each of its methods.
#
# Cython needs a class to be in one file, so the methods only call functions, grouped in looking_up.pxi, writing.pxi,
# removing.pxi, linking.pxi, by_slot.pxi and segments.pxi. All of them work on one `Blocks` (blocks.pxi), which has the state.


@cython.final
cdef class BlockIndex:
    """The key -> slot index of one namespace on one shard: states, readers, pins, expiry, and eviction.

    Slots are numbered ``ordinal * slots_per_segment + i``. ``keys`` is always one contiguous buffer of
    n * key_bytes bytes, a prefix chain with its head first. A call that touches n keys uses the ticks
    ``tick`` to ``tick + n - 1``, the highest for the head; the caller must add n before the next call. Times are
    monotonic seconds, stored in eighths of a second: pins and expiry are rounded up. Malformed arguments raise
    ValueError or TypeError and change nothing.

    ``policy`` determines the order of eviction: see policies/policy.pxi. For every call with keys, an expired block
    counts as deleted. The index has no clock: its time is the latest ``now`` that a call was given.

    Not thread-safe: only one thread, the shard's loop, uses an index.
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
        """Free slots for ordinary blocks."""
        return self.blocks.unused.count

    @property
    def spare(self) -> int:
        """Free slots for transient blocks."""
        return self.blocks.spare.count

    @property
    def transient(self) -> int:
        """The number of READY transient blocks; `ready` counts them, too."""
        return self.blocks.transient

    @property
    def transient_slots(self) -> int:
        """The slots of the segments for transient blocks; `slots` counts them, too."""
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
        """The memory of the index in bytes."""
        return self.__sizeof__() + index_bytes(self.blocks)

    def attach(self, bint transient=False) -> int:
        """Adds a segment of free slots. Returns its ordinal: the lowest detached one, or a new one if there is none.
        ``transient``: it is for transient blocks, and for no others."""
        return attach_segment(self.blocks, transient)

    def unused_transient(self) -> int:
        """Returns the ordinal of a segment for transient blocks that has none, -1 if there is no such segment."""
        return unused_transient_segment(self.blocks)

    def detach(self, Py_ssize_t ordinal) -> int:
        """Drops a segment and its READY blocks, pinned ones too. Returns the number of blocks.

        Raises ValueError, and changes nothing, while a slot of the segment is being written or read.
        """
        return detach_segment(self.blocks, ordinal)

    def segment_recency(self, Py_ssize_t ordinal, double now) -> tuple[int, bool]:
        """Returns the highest tick of a segment's READY blocks (0: none), and whether any of its slots is being
        written, read or pinned."""
        return recency_of_segment(self.blocks, ordinal, now)

    def oldest_tick(self) -> int:
        """Returns the tick of the least recently used READY block of the lowest priority, even if it is held.

        2**63 - 1 when there is no block. Namespaces are compared by it when one of them must give back a segment.
        """
        cdef int32_t slot = self.blocks.policy.oldest()
        return NO_TICK if slot == NONE else self.blocks.record(slot).tick

    # -- look-ups --------------------------------------------------------------------------------------------

    def contains(self, keys, double now, bint refresh, uint64_t tick, double pin_until=0.0) -> bytes:
        """Returns one byte a key: 1 when it is READY or WRITING. ``refresh`` touches and ``pin_until > now`` pins these
        blocks."""
        return present_keys(self.blocks, keys, now, refresh, tick, pin_until)

    def match_prefix(self, keys, double now, bint refresh, uint64_t tick, double pin_until=0.0) -> int:
        """Returns the length of the leading run that is READY or WRITING; only that run is touched and pinned."""
        return leading_run(self.blocks, keys, now, refresh, tick, pin_until)

    def missing(self, keys, int reads=0) -> int:
        """Returns how many distinct keys of the batch reserve() would give a slot, if there were enough: those that are
        neither READY nor WRITING and, with ``reads`` 0, those of transient blocks."""
        return count_missing(self.blocks, keys, reads)

    def state_of(self, key) -> int:
        """Returns FREE (absent), WRITING or READY; a key that is being replaced is READY."""
        cdef int32_t slot = slot_of(self.blocks, key, "key", 1)
        return FREE if slot == NONE else WRITING if self.blocks.readable(slot) == NONE else READY

    def pinned(self, double now) -> int:
        """Returns the number of READY slots whose pin has not expired. O(slots of the segments with such a pin)."""
        return count_pinned(self.blocks, now)

    # -- readers ---------------------------------------------------------------------------------------------

    def acquire(self, keys, double now, uint64_t tick, bint refresh=True, bint reading=False):
        """Takes a reader's reference on every READY key. Returns int32: the slot, ABSENT, or COMING (WRITING).

        ``reading``: to read the block for a client. A transient block is absent for it while as many references are
        held as it has reads left."""
        return acquire_keys(self.blocks, keys, now, tick, refresh, reading)

    def acquire_slot(self, slots) -> int:
        """Takes one more reference on slots (one, or many) that are READY or still being read. Returns how many."""
        return acquire_slots(self.blocks, slots)

    def release(self, slots, bint read=False) -> int:
        """Gives references back; negative slots are skipped. Returns how many slots became free.

        ``read``: a client has read each of the blocks. A transient block that was read for the last time is dropped.

        Raises ValueError, and releases nothing, when a slot is released more often than it was acquired.
        """
        return release_slots(self.blocks, slots, read)

    # -- writers ---------------------------------------------------------------------------------------------

    def reserve(self, keys, bint force, uint64_t tick, priority=0, int reads=0):
        """Gives absent keys a slot to be written. Returns int32, one a key: a slot, now WRITING, or a negative verdict.

        EXISTED: the key is READY, or WRITING by another writer. DUPLICATE: it occurs earlier in this batch. NO_SPACE:
        no slot is free. ``force`` gives READY keys a new slot too; the old one stays readable until the commit. READY
        keys of the batch are touched. ``priority``, 0 to 3, is the priority of the new blocks, one for all or one for
        each key: a block is evicted only when no evictable block of a lower priority is left.

        ``reads``, 1 to 255: the new blocks are transient, and may be read so often; the commit must say when they
        expire. 0: ordinary blocks. Then a READY transient block gets a new slot, too, as with ``force``.
        """
        return reserve_keys(self.blocks, keys, force, tick, priority, reads)

    def renew(self, keys, int reads, double now, double expires) -> int:
        """Lets the transient blocks among these be read ``reads`` more times at least, and live until ``expires`` at
        least. Returns their number."""
        return renew_keys(self.blocks, keys, reads, now, expires)

    def set_expiry(self, keys, double now, double expires) -> bytes:
        """Has the blocks of these keys expire at the time ``expires``; 0: never. Returns one byte a key: 1 when it is
        READY and not transient, so that its time is now this one."""
        return set_expiry_keys(self.blocks, keys, now, expires)

    def commit(
        self, slots, sums, uint64_t tick, expires=0.0, parent=b"", bint ends_chain=False, bint behind=False
    ) -> int:
        """Makes written slots of a chain, head first, READY with their checksums; negative slots are skipped.

        ``parent``, ``ends_chain`` and ``behind`` are hints for the policy. ``parent``: the key of the block before the
        first slot (empty: none, or unknown; the block need not be there). ``ends_chain``: the chain ends with the last
        slot, until a later call names it as ``parent``. ``behind``: the chain does not begin with the first slot, even
        if the parent is not there. A slot that is skipped because its block existed does not interrupt the chain: the
        next block counts as the successor of the previous one, until a refresh of the whole chain shows its place.

        The blocks expire at the time ``expires``, one for all or one for each slot; 0: never. A block that is
        replaced is retired: its slot becomes free when no reader holds it, and its pin goes over to the new block.
        Returns the number of committed slots. Raises ValueError, and commits nothing, when a slot is not WRITING.
        """
        return commit_slots(self.blocks, slots, sums, tick, expires, parent, ends_chain, behind)

    def link(self, keys, before=b"", slots=None, uint64_t call=0, offsets=None) -> int:
        """Says that the keys are a chain, head first, which continues the chain of the key ``before`` (empty: no chain).
        Or ``before`` has as many keys: the one before each. ``slots``, if it is given, saves the look-ups: the slot of
        each key that the caller knows, negative for the others. ``offsets``, uint32: the place of each key in the call
        ``call``; it is kept for the blocks in ``slots``, for cut().

        Each READY block is linked to the nearest READY block before it, if it is not linked yet. A block that others
        are linked to is not evicted before these. Returns how many blocks were linked. A link that would close a circle
        is not made, nor one to a block that thousands follow already.
        """
        return link_keys(self.blocks, keys, before, slots, call, offsets)

    def disown(self, slots) -> int:
        """Detaches WRITING slots from their keys, so that the keys are absent again and other writers may set them.

        The writer keeps its slots, with one reference on each, and gives them back with release(). Slots that are not
        WRITING, and negative ones, are skipped. Returns how many slots were detached.
        """
        return disown_slots(self.blocks, slots)

    def abort(self, slots) -> int:
        """Frees WRITING slots; a block that was to be replaced stays. Errors and negative slots as for commit.

        Returns the number of slots.
        """
        return abort_slots(self.blocks, slots)

    def restore(self, keys, slots, sums, ticks, expires, priorities):
        """Puts the blocks of a recovered index into given slots. Returns int32: the slot, or -1 for a skipped row.

        A row is skipped when its slot is not free or not attached, or when its key is there already. The rows must be
        in ascending order of tick; each counts as a request of its own. ``slots``: int32, ``sums`` and ``ticks``:
        uint64, ``expires``: float64, ``priorities``: uint8; as many as keys.
        """
        return restore_blocks(self.blocks, keys, slots, sums, ticks, expires, priorities)

    # -- by slot ---------------------------------------------------------------------------------------------

    def checksums(self, slots):
        """Returns the checksum of each slot that holds a block, uint64; 0 for negative and WRITING slots."""
        return column_of(self.blocks, slots, CHECKSUM, np.uint64)

    def ticks_of(self, slots):
        """Returns the tick of each slot that holds a block, uint64; 0 for negative and WRITING slots."""
        return column_of(self.blocks, slots, TICK, np.uint64)

    def expires_of(self, slots):
        """Returns when the block of each slot expires, float64; 0: never, or a negative or WRITING slot."""
        return column_of(self.blocks, slots, EXPIRES, np.float64)

    def priorities_of(self, slots):
        """Returns the priority of each slot that holds a block, uint8; 0 for negative slots."""
        return column_of(self.blocks, slots, PRIORITY, np.uint8)

    def reads_of(self, slots):
        """Returns how often the block of each slot may still be read, uint8; 0 for ordinary ones and negative slots."""
        return column_of(self.blocks, slots, READS, np.uint8)

    def states_of(self, slots):
        """Returns the state of each slot, uint8: FREE, WRITING, READY or GONE; FREE for slots that do not exist."""
        return states_at(self.blocks, slots)

    def keys_of(self, slots) -> bytes:
        """Returns the key of each slot that holds a block, concatenated; zeros for negative slots."""
        return keys_at(self.blocks, slots)

    def before_of(self, slots):
        """Returns the slot, int32, of the block that each slot's block follows in its chain; -1 if it follows none, and
        for negative slots."""
        return slots_before(self.blocks, slots)

    def links_of(self, slots) -> tuple[bytes, bytes]:
        """Returns the links of the blocks in these slots, for link() of another index: the keys of blocks that follow
        another one, and the keys of those that they follow. Either is in one of the slots. Negative slots are skipped.
        """
        return links_of(self.blocks, slots)

    def ready_slots(self, uint64_t since=0, bint every=False):
        """Returns the READY slots, int32, ascending, that have a tick of at least ``since``.

        Those of transient blocks, and of blocks that have expired and are not yet removed, only with ``every``."""
        return slots_used_since(self.blocks, since, every)

    # -- removal ---------------------------------------------------------------------------------------------

    def delete(self, keys, double now=0.0) -> int:
        """Deletes READY blocks, pinned ones too. Returns the number of those that had not expired by ``now``, or by
        the latest time that the index was told. A slot being read becomes free when released."""
        return delete_keys(self.blocks, keys, now)

    def drop(self, slots) -> int:
        """Deletes the blocks in these slots, such as corrupt ones; slots that are not READY are ignored. Returns how
        many were deleted."""
        return drop_slots(self.blocks, slots)

    def clear(self) -> int:
        """Deletes all READY blocks. Returns their number."""
        return delete_all(self.blocks)

    def guard(self, key) -> None:
        """Has evict() leave the block of this key and those before it in its chain. Empty: none any more."""
        self.blocks.guarded = self.blocks.readable(slot_of(self.blocks, key, "key", 0))

    @property
    def keep_lapsed(self) -> bool:
        """Whether to keep the keys of expired blocks for take_lapsed()."""
        return self.blocks.keep_lapsed

    @keep_lapsed.setter
    def keep_lapsed(self, bint keep):
        self.blocks.keep_lapsed = keep

    def take_lapsed(self) -> bytes:
        """Returns the keys, concatenated, of blocks that were dropped since the last call because they had expired.

        Needs `keep_lapsed`. Keys for which there was no memory are missing.
        """
        return lapsed_keys(self.blocks)

    def expire(self, double now, Py_ssize_t limit) -> int:
        """Drops expired blocks among the next ``limit`` slots; successive calls cover all slots. Returns how many.

        Costs nothing while no block has an expiry time.
        """
        return drop_expired(self.blocks, now, limit)

    def expire_transient(self, double now) -> int:
        """Drops all transient blocks that have expired. Returns how many. Costs nothing before the first one does."""
        return 0 if self.blocks.advance(now) < self.blocks.soonest else drop_transient(self.blocks, False)

    def evict(self, Py_ssize_t n, double now, keys=None, list cuts=None) -> int:
        """Evicts up to n READY blocks, which the policy chooses. Returns how many.

        Blocks that are being read or pinned stay, and blocks of a higher priority stay while one of a lower priority
        can be evicted. A block stays while others are linked to it, unless all that could go before it are held. The
        keys of the evicted blocks are appended to ``keys``, a bytearray. Expired blocks may be among them. Of blocks of
        known calls, ``cuts`` gets (call, the least offset that went, the key of the block before it, empty if there is
        none).
        """
        return evict_blocks(self.blocks, n, now, keys, cuts)

    def cut(self, key, uint64_t call, uint32_t offset, double now, Py_ssize_t limit) -> tuple[int, bytes]:
        """Evicts what is useless because another shard has lost the block at ``offset`` of a call: of the call's blocks
        here, the last of which is ``key``, those from ``offset`` on, and all that follow them.

        Up to ``limit`` blocks at a time; blocks that are held, and those before them, stay. Returns how many were
        evicted, and the key of the last block of the call that is left, for another cut; empty if there is none.
        """
        return cut_chain(self.blocks, key, call, offset, now, limit)

    def victims(self, Py_ssize_t n, double now):
        """Returns the slots, int32, of up to n blocks that evict() would take next, in its order, without expired ones.
        """
        return next_victims(self.blocks, n, now)
