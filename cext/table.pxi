# Where blocks are: slots with their states, which of them are free, and the way from a key to its slot.
#
# The table (open addressing, linear probing, backward-shift deletion, at most 70 % full) holds (hash, slot) pairs; it
# is grown by attach(), so no later call can run out of memory half way. A bitmap says which slots are free; a cursor
# moves over it, so batches land on ascending slots.
#
# What must hold. A key has at most one table entry: its READY slot, or its WRITING slot, whose `older` then names the
# READY slot it will replace (NONE: nothing). The policy knows the READY slots and no others. GONE slots have refs > 0
# and are known to neither. Keys come from the network, so the hash is SipHash-1-3 under a random key. An expired block
# is READY until someone comes by: a look-up, an eviction, or the sweep.


cdef struct Entry:
    uint32_t hash
    int32_t slot


cdef class _Table:
    """The part of an index that trusts its caller: slots exist, keys are of the right length."""

    cdef Space space
    cdef Policy policy
    cdef readonly Py_ssize_t key_bytes, slots_per_segment
    cdef readonly Py_ssize_t ready, writing, free, gone, segments, slots
    cdef Py_ssize_t expiring        # READY blocks that will expire
    cdef public bint keep_lapsed    # whether take_lapsed() is to tell what expired
    cdef unsigned char *lapsed      # its keys
    cdef Py_ssize_t lapsed_count, lapsed_capacity
    cdef uint64_t k0, k1
    cdef Py_ssize_t lowest_detached
    cdef uint64_t *bitmap           # 1: free
    cdef Py_ssize_t words, cursor
    cdef Entry *table
    cdef uint32_t mask

    def __dealloc__(self):
        cdef Py_ssize_t ordinal
        for ordinal in range(self.space.ordinals):
            free(self.space.segment[ordinal].records)
        free(self.space.segment)
        free(self.bitmap)
        free(self.table)
        free(self.lapsed)

    # -- records and free slots -----------------------------------------------------------------------------

    @cython.final
    cdef inline uint32_t advance(self, double now) noexcept nogil:
        """Takes note of the time; it never goes back."""
        cdef uint32_t time = eighths_down(now)
        self.space.clock = max(self.space.clock, time)
        return time

    @cython.final
    cdef inline Record *record(self, int32_t slot) noexcept nogil:
        return record_at(&self.space, slot)

    @cython.final
    cdef inline bint exists(self, int32_t slot) noexcept nogil:
        return (
            0 <= slot < self.space.ordinals * self.slots_per_segment
            and self.space.segment[slot // self.slots_per_segment].records != NULL
        )

    @cython.final
    cdef int32_t take_free(self) noexcept nogil:
        """The next free slot at or after the cursor, or NONE."""
        cdef Py_ssize_t word = self.cursor >> 6
        cdef uint64_t bits
        if self.free == 0:
            return NONE
        if word >= self.words:
            word = 0
            bits = self.bitmap[0]
        else:
            bits = self.bitmap[word] & (<uint64_t>-1 << (self.cursor & 63))
        while bits == 0:
            word += 1
            if word == self.words:
                word = 0
            bits = self.bitmap[word]
        cdef int32_t slot = <int32_t>(word * 64 + kv_lowest_bit(bits))
        self.bitmap[word] &= ~(<uint64_t>1 << (slot & 63))
        self.free -= 1
        self.cursor = slot + 1
        return slot

    @cython.final
    cdef inline void put_free(self, int32_t slot, Record *record) noexcept nogil:
        record.state = FREE
        self.bitmap[slot >> 6] |= <uint64_t>1 << (slot & 63)
        self.free += 1

    @cython.final
    cdef void touch(self, const int32_t *slots, Py_ssize_t n, Py_ssize_t batch, uint64_t tick) noexcept nogil:
        """The first n of a batch were used, the head last; negative entries are skipped."""
        cdef Py_ssize_t i
        cdef Record *record
        for i in range(n - 1, -1, -1):
            if slots[i] >= 0:
                record = self.record(slots[i])
                record.rank = <uint32_t>(batch - 1 - i)
                record.tick = tick + record.rank
        self.policy.touched(slots, n)

    # -- table -----------------------------------------------------------------------------------------------

    @cython.final
    cdef bint resize_table(self, Py_ssize_t capacity) noexcept nogil:
        cdef Entry *old = self.table
        cdef Py_ssize_t i, count = 0 if old == NULL else <Py_ssize_t>self.mask + 1
        cdef Entry *table = <Entry *>malloc(capacity * sizeof(Entry))
        if table == NULL:
            return False
        memset(table, 0xFF, capacity * sizeof(Entry))  # every slot NONE
        self.table = table
        self.mask = <uint32_t>(capacity - 1)
        for i in range(count):
            if old[i].slot != NONE:
                self.insert(old[i].hash, old[i].slot)
        free(old)
        return True

    @cython.final
    cdef inline uint32_t hash_key(self, const unsigned char *key) noexcept nogil:
        return kv_siphash(key, self.key_bytes, self.k0, self.k1)

    @cython.final
    cdef inline Entry *entry_of(self, const unsigned char *key, uint32_t hash) noexcept nogil:
        cdef uint32_t i = hash & self.mask
        while self.table[i].slot != NONE:
            if self.table[i].hash == hash:
                if memcmp(record_key(self.record(self.table[i].slot)), key, self.key_bytes) == 0:
                    return &self.table[i]
            i = (i + 1) & self.mask
        return NULL

    @cython.final
    cdef Entry *look_up(self, const unsigned char *key, uint32_t hash) noexcept nogil:
        """The entry of a key, or NULL; a block found expired is dropped first."""
        cdef Entry *entry = self.entry_of(key, hash)
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

    @cython.final
    cdef inline Entry *entry_of_slot(self, int32_t slot, uint32_t hash) noexcept nogil:
        """The entry that names a slot, or the WRITING slot that is to replace it."""
        cdef uint32_t i = hash & self.mask
        cdef Record *record
        while True:
            if self.table[i].slot == slot:
                return &self.table[i]
            if self.table[i].hash == hash:
                record = self.record(self.table[i].slot)
                if record.state != READY and record.older == slot:
                    return &self.table[i]
            i = (i + 1) & self.mask

    @cython.final
    cdef inline void insert(self, uint32_t hash, int32_t slot) noexcept nogil:
        cdef uint32_t i = hash & self.mask
        while self.table[i].slot != NONE:
            i = (i + 1) & self.mask
        self.table[i].hash = hash
        self.table[i].slot = slot

    @cython.final
    cdef void remove(self, Entry *entry) noexcept nogil:
        cdef uint32_t hole = <uint32_t>(entry - self.table), i = hole
        while True:
            i = (i + 1) & self.mask
            if self.table[i].slot == NONE:
                break
            # An entry may move back into the hole unless its home lies between the two.
            if ((i - self.table[i].hash) & self.mask) >= ((i - hole) & self.mask):
                self.table[hole] = self.table[i]
                hole = i
        self.table[hole].slot = NONE

    @cython.final
    cdef void find(self, const unsigned char *keys, Py_ssize_t n, int32_t *slots) noexcept nogil:
        """The slot of each key, or NONE. Requests memory for many keys at once: a cold index is all latency."""
        cdef uint32_t[64] hashes  # a ring of two groups
        cdef uint32_t at
        cdef Py_ssize_t base = -LOOKAHEAD, i
        cdef Entry *entry
        while base < n:
            for i in range(base + LOOKAHEAD, min(base + 2 * LOOKAHEAD, n)):
                hashes[i & 63] = self.hash_key(keys + i * self.key_bytes)
                kv_prefetch(&self.table[hashes[i & 63] & self.mask])
            for i in range(max(base, 0), min(base + LOOKAHEAD, n)):
                at = hashes[i & 63] & self.mask
                while self.table[at].slot != NONE and self.table[at].hash != hashes[i & 63]:
                    at = (at + 1) & self.mask
                if self.table[at].slot != NONE:
                    kv_prefetch(self.record(self.table[at].slot))
            for i in range(max(base, 0), min(base + LOOKAHEAD, n)):
                entry = self.look_up(keys + i * self.key_bytes, hashes[i & 63])
                slots[i] = NONE if entry == NULL else entry.slot
            base += LOOKAHEAD

    @cython.final
    cdef inline int32_t readable(self, int32_t slot) noexcept nogil:
        """The READY slot behind a table entry's slot: itself, what it is to replace, or NONE."""
        cdef Record *record
        if slot == NONE:
            return NONE
        record = self.record(slot)
        return slot if record.state == READY else record.older

    @cython.final
    cdef bint retire(self, int32_t slot, Record *record, bint evicted) noexcept nogil:
        """Takes a READY slot, no longer named by the table, out of use; true when that frees it."""
        self.policy.removed(slot, record, evicted)
        self.ready -= 1
        self.expiring -= record.expires != 0
        if record.refs == 0:
            self.put_free(slot, record)
            return True
        record.state = GONE
        self.gone += 1
        return False

    @cython.final
    cdef void lapse(self, int32_t slot, Record *record) noexcept nogil:
        """Drops a block that has expired; without memory to note its key, take_lapsed() will not tell of it."""
        cdef Py_ssize_t capacity = max(<Py_ssize_t>64, 2 * self.lapsed_capacity)
        cdef void *memory
        if self.keep_lapsed and self.lapsed_count == self.lapsed_capacity:
            memory = realloc(self.lapsed, capacity * self.key_bytes)
            if memory != NULL:
                self.lapsed = <unsigned char *>memory
                self.lapsed_capacity = capacity
        if self.keep_lapsed and self.lapsed_count < self.lapsed_capacity:
            memcpy(self.lapsed + self.lapsed_count * self.key_bytes, record_key(record), self.key_bytes)
            self.lapsed_count += 1
        self.forget(slot, record, False)

    @cython.final
    cdef bint forget(self, int32_t slot, Record *record, bint evicted) noexcept nogil:
        """Deletes a READY block; a write that was to replace it goes on. True when that frees its slot."""
        cdef Entry *entry = self.entry_of_slot(slot, record.hash)
        if entry.slot == slot:
            self.remove(entry)
        else:
            self.record(entry.slot).older = NONE
        return self.retire(slot, record, evicted)
