# The blocks of one index: their records, the look-up by key, and the state changes of a block.
#
# A slot is FREE, then WRITING (reserved for a key), then READY (committed), then FREE again. A block that is removed
# while a reader holds it is GONE until the reader releases it. The methods of the index are composed of these state
# changes in looking_up.pxi, writing.pxi, removing.pxi, linking.pxi, by_slot.pxi and segments.pxi.
#
# What must hold: a key has at most one table entry, which is either its READY slot or its WRITING slot. In the second
# case `older` of the WRITING slot is the READY slot that it will replace, or NONE. The policy has the READY slots of
# ordinary blocks and no others. GONE slots have refs > 0, and are neither in the table nor in the policy. An expired
# block stays READY until a look-up, an eviction or the sweep finds it.
#
# A transient block (`reads` of its record is not 0) is dropped when it has been read as often as `reads` says, or when
# it expires. It is not in the policy and has no links, so it is never evicted and protects no other block. Transient
# blocks have segments of their own, and the number of these segments bounds the memory that cannot be evicted.


@cython.final
cdef class Blocks:
    """The state of an index. The methods do not check their arguments: slots must exist, and keys must have the right
    length."""

    cdef Space space
    cdef Table table
    cdef FreeSlots unused
    cdef FreeSlots spare                    # the free slots of the segments for transient blocks
    cdef Policy policy
    cdef Py_ssize_t ready, writing, gone    # the number of slots in each state
    cdef Py_ssize_t segments, slots         # the numbers of attached segments and slots
    cdef Py_ssize_t transient               # the number of READY transient blocks
    cdef Py_ssize_t transient_slots         # the attached slots in segments for transient blocks
    cdef uint32_t soonest                   # no transient block expires before this time
    cdef Py_ssize_t lowest_detached         # no segment with a lower ordinal is detached
    cdef Py_ssize_t expiring                # the number of READY blocks with an expiry time
    cdef int32_t guarded                    # the block whose chain is not evicted, or NONE
    cdef Py_ssize_t hand                    # the slot at which the sweep for expired blocks continues
    cdef bint keep_lapsed                   # whether the keys of expired blocks are kept
    cdef unsigned char *lapsed              # the keys of expired blocks
    cdef Py_ssize_t lapsed_count, lapsed_capacity

    def __cinit__(self, Py_ssize_t key_bytes, Py_ssize_t slots_per_segment, Policy policy):
        self.space.slots_per_segment = slots_per_segment
        self.space.stride = (sizeof(Record) + key_bytes + 7) & ~7
        self.space.magic = 0 if slots_per_segment == 1 else <uint64_t>-1 // <uint64_t>slots_per_segment + 1
        self.table.key_bytes = key_bytes
        self.table.k0 = int.from_bytes(os.urandom(8), "little")
        self.table.k1 = int.from_bytes(os.urandom(8), "little")
        self.guarded = NONE
        self.soonest = 0xFFFFFFFF
        self.policy = policy
        self.policy.space = &self.space
        self.space.links_at = slots_per_segment * self.space.stride
        self.space.policy_at = self.space.links_at + slots_per_segment * sizeof(Link)
        if not table_resize(&self.table, 8):
            raise MemoryError("no memory for an index table of 8 entries")

    def __dealloc__(self):
        cdef Py_ssize_t ordinal
        for ordinal in range(self.space.ordinals):
            free(self.space.segment[ordinal].records)
        free(self.space.segment)
        free(self.unused.bitmap)
        free(self.spare.bitmap)
        free(self.table.entries)
        free(self.lapsed)

    # -- time, records ---------------------------------------------------------------------------------------

    cdef inline uint32_t advance(self, double now) noexcept nogil:
        """Moves the index's clock forward to ``now``. It never goes back. Returns ``now`` in eighths of a second."""
        cdef uint32_t time = eighths_down(now)
        self.space.clock = max(self.space.clock, time)
        return time

    cdef inline Record *record(self, int32_t slot) noexcept nogil:
        return record_at(&self.space, slot)

    cdef inline bint exists(self, int32_t slot) noexcept nogil:
        return (
            0 <= slot < self.space.ordinals * self.space.slots_per_segment
            and self.space.segment[segment_of(&self.space, slot)].records != NULL
        )

    cdef object complaint(self, int32_t slot, str expected):
        """Returns the exception for a slot whose state is not the expected one."""
        if not self.exists(slot):
            return ValueError(f"slot {slot} is in no attached segment of {self.space.slots_per_segment} slots")
        return ValueError(f"slot {slot} is {STATE_NAMES[self.record(slot).state]}, expected {expected}")

    # -- looking up ------------------------------------------------------------------------------------------

    cdef Entry *look_up(self, const unsigned char *key, uint32_t hash) noexcept nogil:
        """Returns the entry of a key, or NULL. If its block has expired, the block is dropped first."""
        cdef Entry *entry = table_find(&self.table, &self.space, key, hash)
        cdef Record *record
        if entry == NULL:
            return NULL
        record = self.record(entry.slot)
        if record.state == READY:
            if is_expired(&self.space, record):
                self.lapse(entry.slot, record)
                return NULL
        elif record.older != NONE and is_expired(&self.space, self.record(record.older)):
            self.lapse(record.older, self.record(record.older))
        return entry

    cdef void find(self, const unsigned char *keys, Py_ssize_t n, int32_t *slots) noexcept nogil:
        """Finds the slot of each key, or NONE. Prefetches for many keys at once, because a cold index costs mainly
        latency."""
        cdef uint32_t[64] hashes  # a ring of two groups of LOOKAHEAD
        cdef uint32_t at
        cdef Py_ssize_t base = -LOOKAHEAD, i, key_bytes = self.table.key_bytes
        cdef Entry *entries = self.table.entries
        cdef Entry *entry
        while base < n:
            for i in range(base + LOOKAHEAD, min(base + 2 * LOOKAHEAD, n)):
                hashes[i & 63] = table_hash(&self.table, keys + i * key_bytes)
                kv_prefetch(&entries[hashes[i & 63] & self.table.mask])
            for i in range(max(base, 0), min(base + LOOKAHEAD, n)):
                at = hashes[i & 63] & self.table.mask
                while entries[at].slot != NONE and entries[at].hash != hashes[i & 63]:
                    at = (at + 1) & self.table.mask
                if entries[at].slot != NONE:
                    kv_prefetch(self.record(entries[at].slot))
            for i in range(max(base, 0), min(base + LOOKAHEAD, n)):
                entry = self.look_up(keys + i * key_bytes, hashes[i & 63])
                slots[i] = NONE if entry == NULL else entry.slot
            base += LOOKAHEAD

    cdef inline int32_t readable(self, int32_t slot) noexcept nogil:
        """Returns the READY slot for a table entry's slot: that slot itself, or the one that it will replace, or
        NONE."""
        cdef Record *record
        if slot == NONE:
            return NONE
        record = self.record(slot)
        return slot if record.state == READY else record.older

    cdef inline int32_t placed(self, int32_t slot) noexcept nogil:
        """Returns the slot that is linked for a table entry's slot: the READY slot, or else the slot that is being
        written. Returns NONE for transient blocks."""
        cdef Record *record
        if slot == NONE:
            return NONE
        record = self.record(slot)
        if record.state == WRITING and record.older != NONE and self.record(record.older).reads == 0:
            return record.older
        return slot if (record.state == READY or record.state == WRITING) and record.reads == 0 else NONE

    # -- use -------------------------------------------------------------------------------------------------

    cdef void touch(self, const int32_t *slots, Py_ssize_t n, Py_ssize_t batch, uint64_t tick) noexcept nogil:
        """Sets the ticks of the first n blocks of a batch, because they were used. The head gets the highest tick.
        Skips negative slots."""
        cdef Py_ssize_t i
        cdef Record *record
        for i in range(n - 1, -1, -1):
            if slots[i] >= 0:
                record = self.record(slots[i])
                record.rank = <uint32_t>(batch - 1 - i)
                record.tick = tick + record.rank
        self.touched(slots, n)

    cdef void touched(self, const int32_t *slots, Py_ssize_t n) noexcept nogil:
        """Reports the use of blocks to the policy. Transient blocks are left out, because the policy does not have
        them."""
        cdef Py_ssize_t i, start = 0
        if self.transient != 0:
            for i in range(n):
                if slots[i] >= 0 and self.record(slots[i]).reads != 0:
                    if i > start:
                        self.policy.touched(slots + start, i - start)
                    start = i + 1
        if start < n:
            self.policy.touched(slots + start, n - start)

    cdef inline void pin(self, int32_t slot, uint32_t until) noexcept nogil:
        """Keeps a block from being evicted until ``until``. A pin is never shortened."""
        cdef Record *record = self.record(slot)
        cdef Segment *segment = &self.space.segment[segment_of(&self.space, slot)]
        record.pin_until = max(record.pin_until, until)
        segment.latest_pin = max(segment.latest_pin, until)

    # -- the beginning and the end of a block ----------------------------------------------------------------

    cdef void fill(
        self, int32_t slot, uint8_t state, const unsigned char *key, uint32_t hash, uint8_t priority, uint8_t reads
    ) noexcept nogil:
        """Initialises the record of a slot for a new block."""
        cdef Record *record = self.record(slot)
        memset(record, 0, sizeof(Record))
        record.state = state
        record.newer = record.older = NONE
        record.hash = hash
        record.priority = priority
        record.reads = reads
        if reads != 0:
            self.space.segment[segment_of(&self.space, slot)].used += 1
        memcpy(record_key(record), key, self.table.key_bytes)

    cdef inline void put_free(self, int32_t slot, Record *record) noexcept nogil:
        record.state = FREE
        if record.reads == 0:
            free_put(&self.unused, slot)
        else:
            free_put(&self.spare, slot)
            self.space.segment[segment_of(&self.space, slot)].used -= 1

    cdef bint retire(self, int32_t slot, Record *record, bint evicted) noexcept nogil:
        """Takes out of use a READY slot that is no longer in the table. Returns True if this frees the slot."""
        if record.reads == 0:
            self.policy.removed(slot, record, evicted)
        else:
            self.transient -= 1
        if record.linked:
            links_cut(&self.space, self.policy, slot, record)
        self.ready -= 1
        self.expiring -= record.expires != 0
        if record.refs == 0:
            self.put_free(slot, record)
            return True
        record.state = GONE
        self.gone += 1
        return False

    cdef bint forget(self, int32_t slot, Record *record, bint evicted) noexcept nogil:
        """Deletes a READY block. A write that will replace it goes on. Returns True if this frees the block's slot."""
        cdef Entry *entry = table_find_slot(&self.table, &self.space, slot, record.hash)
        if entry.slot == slot:
            table_remove(&self.table, entry)
        else:
            if record.linked:
                links_inherit(&self.space, slot, record, entry.slot)
            self.record(entry.slot).older = NONE
        return self.retire(slot, record, evicted)

    cdef void lapse(self, int32_t slot, Record *record) noexcept nogil:
        """Drops an expired block. Keeps its key if `keep_lapsed` is set and there is memory for it."""
        cdef Py_ssize_t key_bytes = self.table.key_bytes, capacity = max(<Py_ssize_t>64, 2 * self.lapsed_capacity)
        cdef void *memory
        if self.keep_lapsed and self.lapsed_count == self.lapsed_capacity:
            memory = realloc(self.lapsed, capacity * key_bytes)
            if memory != NULL:
                self.lapsed = <unsigned char *>memory
                self.lapsed_capacity = capacity
        if self.keep_lapsed and self.lapsed_count < self.lapsed_capacity:
            memcpy(self.lapsed + self.lapsed_count * key_bytes, record_key(record), key_bytes)
            self.lapsed_count += 1
        self.forget(slot, record, False)
