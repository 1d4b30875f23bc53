# What callers use of an index: one class, and what each of its calls means.
#
# Cython wants a class in one file, so the work is in functions, a file an idea: looking_up.pxi, writing.pxi,
# removing.pxi, by_slot.pxi, segments.pxi. All of them work on one `Blocks` (blocks.pxi), the state.


@cython.final
cdef class BlockIndex:
    """The key -> slot index of one namespace on one shard: states, readers, pins, expiry, and who goes first.

    Slots are numbered ``ordinal * slots_per_segment + i``. ``keys`` is always one contiguous buffer of
    n * key_bytes bytes, a prefix chain with its head first. A call that touches n keys takes the ticks
    ``tick`` to ``tick + n - 1``, the head's the highest; the caller adds n before the next call. Times are
    monotonic seconds, kept to an eighth of one: pins and expiry are rounded up. Malformed arguments raise
    ValueError or TypeError and change nothing.

    ``policy`` says in which order blocks are evicted: see policies/policy.pxi. An expired block is as if deleted for
    every call that is given keys; the index knows the time from the calls that are given it.

    Not thread-safe: one thread, the shard's loop, uses an index.
    """

    FREE = 0
    WRITING = 1
    READY = 2
    GONE = 3
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
        """How many are attached."""
        return self.blocks.segments

    @property
    def slots(self) -> int:
        """How many there are: free + writing + ready + gone."""
        return self.blocks.slots

    @property
    def free(self) -> int:
        return self.blocks.unused.count

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
        """Bytes of memory the index holds."""
        return self.__sizeof__() + index_bytes(self.blocks)

    def attach(self) -> int:
        """Adds a segment of free slots and returns its ordinal, the lowest that is detached if one is."""
        return attach_segment(self.blocks)

    def detach(self, Py_ssize_t ordinal) -> int:
        """Drops a segment and the READY blocks in it, pinned ones too, and returns their number.

        ValueError, with nothing changed, while a slot of it is being written or read.
        """
        return detach_segment(self.blocks, ordinal)

    def segment_recency(self, Py_ssize_t ordinal, double now) -> tuple[int, bool]:
        """The highest tick of its READY blocks (0: none), and whether it is being written, read or pinned."""
        return recency_of_segment(self.blocks, ordinal, now)

    def oldest_tick(self) -> int:
        """The tick of the least recently used READY block of the lowest priority, held or not; 2**63 - 1 without any.

        Namespaces are compared by it when one has to give way.
        """
        cdef int32_t slot = self.blocks.policy.oldest()
        return NO_TICK if slot == NONE else self.blocks.record(slot).tick

    # -- questions -------------------------------------------------------------------------------------------

    def contains(self, keys, double now, bint refresh, uint64_t tick, double pin_until=0.0) -> bytes:
        """One byte a key: 1 when it is READY or WRITING. ``refresh`` touches, ``pin_until > now`` pins those."""
        return present_keys(self.blocks, keys, now, refresh, tick, pin_until)

    def match_prefix(self, keys, double now, bint refresh, uint64_t tick, double pin_until=0.0) -> int:
        """The length of the leading run that is READY or WRITING; only that run is touched and pinned."""
        return leading_run(self.blocks, keys, now, refresh, tick, pin_until)

    def missing(self, keys) -> int:
        """How many distinct keys of the batch are neither READY nor WRITING."""
        return count_missing(self.blocks, keys)

    def state_of(self, key) -> int:
        """FREE (absent), WRITING or READY; a key being replaced is READY."""
        cdef int32_t slot = slot_of(self.blocks, key, "key", 1)
        return FREE if slot == NONE else WRITING if self.blocks.readable(slot) == NONE else READY

    def pinned(self, double now) -> int:
        """The number of READY slots whose pin has not expired. O(slots of the segments with such a pin)."""
        return count_pinned(self.blocks, now)

    # -- readers ---------------------------------------------------------------------------------------------

    def acquire(self, keys, double now, uint64_t tick, bint refresh=True):
        """Takes a reader's reference on every READY key: int32, its slot, -1 absent, -2 WRITING."""
        return acquire_keys(self.blocks, keys, now, tick, refresh)

    def acquire_slot(self, slots) -> int:
        """Takes one more reference on slots (one, or many) that are READY or still read; returns how many."""
        return acquire_slots(self.blocks, slots)

    def release(self, slots) -> int:
        """Gives references back, negative slots skipped; returns how many slots that freed.

        ValueError names a slot released more often than it was acquired, and then nothing is released.
        """
        return release_slots(self.blocks, slots)

    # -- writers ---------------------------------------------------------------------------------------------

    def reserve(self, keys, bint force, uint64_t tick, Py_ssize_t priority=0):
        """Gives absent keys a slot to be written: int32, one per key, a slot now WRITING or a negative verdict.

        EXISTED: READY, or WRITING by someone. DUPLICATE: earlier in this batch. NO_SPACE: no slot is free.
        ``force`` gives READY keys a new slot too; the old one stays readable until the commit. READY keys of the
        batch are touched. ``priority``, 0 to 3, is that of the slots given: a block is evicted only when nothing
        evictable of a lower one is left.
        """
        return reserve_keys(self.blocks, keys, force, tick, priority)

    def commit(
        self, slots, sums, uint64_t tick, double expires=0.0, parent=b"", bint ends_chain=False
    ) -> int:
        """Makes written slots READY with their checksums, those of a chain, head first; negative slots are skipped.

        What is known of the chain helps the policy: ``parent`` is the key of the block before the first slot (empty:
        none, or unknown; it need not be there), ``ends_chain`` says that the last slot is where the chain ends. A
        slot that is skipped because its block existed does not end the run: what follows it counts as behind what is
        before it, until a refresh of the whole chain tells its place.

        They are gone at the time ``expires``; 0: never. A block that was replaced is retired: its slot is free
        once no reader holds it, its pin holds for the new one. Returns the number committed. ValueError names a slot
        that is not WRITING, and then nothing is committed.
        """
        return commit_slots(self.blocks, slots, sums, tick, expires, parent, ends_chain)

    def disown(self, slots) -> int:
        """Takes WRITING slots away from their keys, which are then as absent as if never reserved: others may set them.

        The writer keeps its slots, one reference on each, and gives them back with release(). Slots that are not
        WRITING, and negative ones, are skipped. Returns how many were taken away.
        """
        return disown_slots(self.blocks, slots)

    def abort(self, slots) -> int:
        """Frees WRITING slots; a block one was to replace stays. Errors and negative slots as for commit."""
        return abort_slots(self.blocks, slots)

    def restore(self, keys, slots, sums, ticks, expires, priorities):
        """Puts the blocks of a recovered index into given slots: int32, the slot, or -1 where that is not possible.

        It is not where the slot is not free or not attached, or the key is there already. Rows come in ascending order
        of tick, each a request of its own. ``slots`` are int32, ``sums`` and ``ticks`` uint64, ``expires`` float64,
        ``priorities`` uint8, as many as keys.
        """
        return restore_blocks(self.blocks, keys, slots, sums, ticks, expires, priorities)

    # -- by slot ---------------------------------------------------------------------------------------------

    def checksums(self, slots):
        """The checksum of each slot that holds a block, uint64; 0 for negative slots and those being written."""
        return column_of(self.blocks, slots, CHECKSUM, np.uint64)

    def ticks_of(self, slots):
        """The tick of each slot that holds a block, uint64; 0 for negative slots and those being written."""
        return column_of(self.blocks, slots, TICK, np.uint64)

    def expires_of(self, slots):
        """When the block of each slot expires, float64; 0: never, a negative slot, or being written."""
        return column_of(self.blocks, slots, EXPIRES, np.float64)

    def priorities_of(self, slots):
        """The priority of each slot that holds a block, uint8; 0 for negative slots."""
        return column_of(self.blocks, slots, PRIORITY, np.uint8)

    def states_of(self, slots):
        """The state of each slot, uint8: FREE, WRITING, READY or GONE; FREE for slots that do not exist."""
        return states_at(self.blocks, slots)

    def keys_of(self, slots) -> bytes:
        """The key of each slot that holds a block, end to end; zeros for negative slots."""
        return keys_at(self.blocks, slots)

    def ready_slots(self, uint64_t since=0):
        """The READY slots, int32, ascending, whose tick is at least ``since``; none that has expired."""
        return slots_used_since(self.blocks, since)

    # -- removal ---------------------------------------------------------------------------------------------

    def delete(self, keys) -> int:
        """Deletes READY blocks, pinned ones too; returns their number. A slot being read is free once released."""
        return delete_keys(self.blocks, keys)

    def drop(self, slots) -> int:
        """Deletes the blocks in these slots, for instance corrupt ones; slots that are not READY are ignored."""
        return drop_slots(self.blocks, slots)

    def clear(self) -> int:
        """Deletes every READY block; returns their number."""
        return delete_all(self.blocks)

    @property
    def keep_lapsed(self) -> bool:
        """Whether take_lapsed() is to tell what expired."""
        return self.blocks.keep_lapsed

    @keep_lapsed.setter
    def keep_lapsed(self, bint keep):
        self.blocks.keep_lapsed = keep

    def take_lapsed(self) -> bytes:
        """The keys, end to end, of blocks dropped since the last call because they had expired (`keep_lapsed`).

        A key for which there was no memory is not among them.
        """
        return lapsed_keys(self.blocks)

    def expire(self, double now, Py_ssize_t limit) -> int:
        """Drops what has expired among the next ``limit`` slots, over calls all of them; returns how many.

        Costs nothing while no block is to expire.
        """
        return drop_expired(self.blocks, now, limit)

    def evict(self, Py_ssize_t n, double now, keys=None) -> int:
        """Frees up to n slots of READY blocks, as the policy chooses; returns how many.

        Blocks being read or pinned stay, and so do those of a higher priority while one of a lower can go. The keys
        of the blocks are appended to ``keys``, a bytearray. What had expired may be among them.
        """
        return evict_blocks(self.blocks, n, now, keys)

    def victims(self, Py_ssize_t n, double now):
        """The slots, int32, of up to n blocks that evict() would take next, in that order; none is expired."""
        return next_victims(self.blocks, n, now)
