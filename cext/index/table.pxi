# The table from key to slot, and the bitmap of free slots: two plain structures that are independent of block states.
#
# The table is a hash table of pairs (hash, slot), with open addressing, linear probing, backward-shift deletion, and at
# most 70 % full. The keys themselves are in the records. The table grows when a segment is attached, so no later call
# can run out of memory half way. Keys come from the network, so the hash is SipHash-1-3 with a random key.
#
# A cursor moves over the bitmap, so a batch gets ascending slots.


cdef struct Entry:
    uint32_t hash
    int32_t slot


cdef struct Table:
    Entry *entries
    uint32_t mask
    Py_ssize_t key_bytes
    uint64_t k0, k1


cdef inline Py_ssize_t table_capacity(Table *table) noexcept nogil:
    return 0 if table.entries == NULL else <Py_ssize_t>table.mask + 1


cdef inline uint32_t table_hash(Table *table, const unsigned char *key) noexcept nogil:
    return kv_siphash(key, table.key_bytes, table.k0, table.k1)


cdef inline void table_insert(Table *table, uint32_t hash, int32_t slot) noexcept nogil:
    cdef uint32_t i = hash & table.mask
    while table.entries[i].slot != NONE:
        i = (i + 1) & table.mask
    table.entries[i].hash = hash
    table.entries[i].slot = slot


cdef bint table_resize(Table *table, Py_ssize_t capacity) noexcept nogil:
    """Changes the table's capacity. Returns False, and changes nothing, if there is no memory for the new table."""
    cdef Entry *old = table.entries
    cdef Py_ssize_t i, count = table_capacity(table)
    cdef Entry *entries = <Entry *>malloc(capacity * sizeof(Entry))
    if entries == NULL:
        return False
    memset(entries, 0xFF, capacity * sizeof(Entry))  # so that every slot is NONE
    table.entries = entries
    table.mask = <uint32_t>(capacity - 1)
    for i in range(count):
        if old[i].slot != NONE:
            table_insert(table, old[i].hash, old[i].slot)
    free(old)
    return True


cdef void table_remove(Table *table, Entry *entry) noexcept nogil:
    cdef uint32_t hole = <uint32_t>(entry - table.entries), i = hole
    while True:
        i = (i + 1) & table.mask
        if table.entries[i].slot == NONE:
            break
        # An entry may move back into the hole unless its home position is between the hole and the entry.
        if ((i - table.entries[i].hash) & table.mask) >= ((i - hole) & table.mask):
            table.entries[hole] = table.entries[i]
            hole = i
    table.entries[hole].slot = NONE


cdef inline Entry *table_find(Table *table, Space *space, const unsigned char *key, uint32_t hash) noexcept nogil:
    """Returns the entry of a key, or NULL."""
    cdef uint32_t i = hash & table.mask
    while table.entries[i].slot != NONE:
        if table.entries[i].hash == hash:
            if memcmp(record_key(record_at(space, table.entries[i].slot)), key, table.key_bytes) == 0:
                return &table.entries[i]
        i = (i + 1) & table.mask
    return NULL


cdef inline Entry *table_find_slot(Table *table, Space *space, int32_t slot, uint32_t hash) noexcept nogil:
    """Returns the entry of a slot, or of the WRITING slot that will replace this slot. The entry must exist."""
    cdef uint32_t i = hash & table.mask
    cdef Record *record
    while True:
        if table.entries[i].slot == slot:
            return &table.entries[i]
        if table.entries[i].hash == hash:
            record = record_at(space, table.entries[i].slot)
            if record.state != READY and record.older == slot:
                return &table.entries[i]
        i = (i + 1) & table.mask


# ---- free slots ----


cdef struct FreeSlots:
    uint64_t *bitmap    # 1: free
    Py_ssize_t words, cursor, count


cdef bint free_reach(FreeSlots *slots, Py_ssize_t end) noexcept nogil:
    """Grows the bitmap for the slots below ``end``. Returns False if there is no memory for the larger bitmap."""
    cdef Py_ssize_t words = (end + 63) // 64
    cdef void *memory
    if words > slots.words:
        memory = realloc(slots.bitmap, words * sizeof(uint64_t))
        if memory == NULL:
            return False
        slots.bitmap = <uint64_t *>memory
        memset(slots.bitmap + slots.words, 0, (words - slots.words) * sizeof(uint64_t))
        slots.words = words
    return True


cdef inline void free_put(FreeSlots *slots, int32_t slot) noexcept nogil:
    slots.bitmap[slot >> 6] |= <uint64_t>1 << (slot & 63)
    slots.count += 1


cdef inline void free_remove(FreeSlots *slots, int32_t slot) noexcept nogil:
    """Takes a given free slot."""
    slots.bitmap[slot >> 6] &= ~(<uint64_t>1 << (slot & 63))
    slots.count -= 1


cdef int32_t free_take(FreeSlots *slots) noexcept nogil:
    """Takes the next free slot at or after the cursor, and returns it, or NONE. Wraps around at the end."""
    cdef Py_ssize_t word = slots.cursor >> 6
    cdef uint64_t bits
    if slots.count == 0:
        return NONE
    if word >= slots.words:
        word = 0
        bits = slots.bitmap[0]
    else:
        bits = slots.bitmap[word] & (<uint64_t>-1 << (slots.cursor & 63))
    while bits == 0:
        word += 1
        if word == slots.words:
            word = 0
        bits = slots.bitmap[word]
    cdef int32_t slot = <int32_t>(word * 64 + kv_lowest_bit(bits))
    free_remove(slots, slot)
    slots.cursor = slot + 1
    return slot
