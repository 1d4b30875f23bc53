# The lists of the default policy: its blocks by priority, class and age bin.
#
# What must hold: a READY block is in exactly one list, which its `Life` and its priority determine. Usually that is the
# list of its class and bin. A block that was pinned when it would have been evicted is in the parked list of its
# priority, so that evictions need not walk over it. A block that others of its chain followed at that time is in the
# kept list. If the lists of one class and priority are concatenated, they are in order of stamps (except for restored
# blocks and blocks whose pins have ended). So the blocks that become too old for a list are at its old end, and move to
# the next list in one piece.
#
# Time is the number of blocks used so far. Stamps are its low 32 bits, and only differences below 2^31 are compared.
# Older blocks are in the last bin, where only the order counts. Time starts just before stamps wrap around, so that a
# mistake in the handling of the wrap-around shows at once.


cdef enum:
    PARKED = 26             # = BINS: the bin of parked blocks
    KEPT_BIN = 27           # the bin of blocks that others follow
    CLASS = 0x1F            # in `kind`: the class
    CONTEXT = 0x20          # in `kind`: the lower of two bits with the context of a block of class 0 (see default.pxi)
    MONITORED = 0x80        # in `kind`: the block's last use is a sample

cdef uint64_t FIRST_REFERENCE = 0xFFFF0000


cdef struct Life:
    # The policy's data for a block, stored behind the records of its segment.
    uint32_t stamp
    uint16_t uses
    uint8_t kind        # the class, the context, and the flag MONITORED
    uint8_t bin


cdef struct Line:
    int32_t newest
    int32_t oldest


cdef struct Lists:
    Line[PRIORITIES][LISTS] lines
    Line[PRIORITIES] parked                 # blocks that were pinned when they would have been evicted
    Line[PRIORITIES] kept                   # blocks that others followed when they would have been evicted
    uint32_t[PRIORITIES][BINS] occupied     # by class: which lists are not empty
    uint64_t references                     # time: the number of blocks used so far
    int aging                               # the bins that must still be checked in this round of aging


cdef void lists_clear(Lists *lists) noexcept nogil:
    memset(lists.lines, 0xFF, sizeof(lists.lines))
    memset(lists.parked, 0xFF, sizeof(lists.parked))
    memset(lists.kept, 0xFF, sizeof(lists.kept))
    memset(lists.occupied, 0, sizeof(lists.occupied))
    lists.references = FIRST_REFERENCE
    lists.aging = 0


cdef inline Life *life_at(Space *space, int32_t slot) noexcept nogil:
    cdef uint32_t ordinal = segment_of(space, slot)
    return <Life *>(space.segment[ordinal].records + space.policy_at) + (
        slot - <Py_ssize_t>ordinal * space.slots_per_segment
    )


cdef inline Line *line_of(Lists *lists, Record *record, Life *life) noexcept nogil:
    if life.bin == PARKED:
        return &lists.parked[record.priority]
    if life.bin == KEPT_BIN:
        return &lists.kept[record.priority]
    return &lists.lines[record.priority][(life.kind & CLASS) * BINS + life.bin]


cdef inline void lists_unlink(Space *space, Lists *lists, Record *record, Life *life) noexcept nogil:
    cdef Line *line = line_of(lists, record, life)
    record.linked &= ~<uint8_t>KEPT
    if record.newer == NONE:
        line.newest = record.older
    else:
        record_at(space, record.newer).older = record.older
    if record.older == NONE:
        line.oldest = record.newer
    else:
        record_at(space, record.older).newer = record.newer
    if line.newest == NONE and life.bin < BINS:
        lists.occupied[record.priority][life.bin] &= ~(<uint32_t>1 << (life.kind & CLASS))


cdef inline void lists_push(
    Space *space, Lists *lists, int32_t slot, Record *record, Life *life, int bin
) noexcept nogil:
    """Puts a block at the newest end of its list."""
    cdef Line *line
    life.bin = <uint8_t>bin
    line = line_of(lists, record, life)
    record.newer = NONE
    record.older = line.newest
    if line.newest == NONE:
        line.oldest = slot
        if bin < BINS:
            lists.occupied[record.priority][bin] |= <uint32_t>1 << (life.kind & CLASS)
    else:
        record_at(space, line.newest).newer = slot
    line.newest = slot


cdef inline void lists_push_oldest(
    Space *space, Lists *lists, int32_t slot, Record *record, Life *life, int bin
) noexcept nogil:
    """Puts a block at the oldest end of its list."""
    cdef Line *line
    life.bin = <uint8_t>bin
    line = line_of(lists, record, life)
    record.older = NONE
    record.newer = line.oldest
    if line.oldest == NONE:
        line.newest = slot
        lists.occupied[record.priority][bin] |= <uint32_t>1 << (life.kind & CLASS)
    else:
        record_at(space, line.oldest).older = slot
    line.oldest = slot


cdef inline bint lists_push_behind(
    Space *space, Lists *lists, int32_t parent, int32_t slot, Record *record, Life *life
) noexcept nogil:
    """Puts a block right behind its parent, so that it is evicted before the parent, if both belong to one list of bin
    0.

    Otherwise returns False and changes nothing.
    """
    cdef Record *above
    cdef Life *life_above
    if parent == NONE:
        return False
    above = record_at(space, parent)
    life_above = life_at(space, parent)
    if (
        life_above.bin != 0 or ((life_above.kind ^ life.kind) & CLASS) != 0
        or above.priority != record.priority
    ):
        return False
    life.bin = 0
    life.stamp = life_above.stamp
    record.newer = parent
    record.older = above.older
    if above.older == NONE:
        line_of(lists, record, life).oldest = slot
    else:
        record_at(space, above.older).newer = slot
    above.older = slot
    return True


cdef void lists_settle(Space *space, Lists *lists, int32_t parent, int32_t slot, Life *life) noexcept nogil:
    """Moves a block that is newer than its parent in the chain right behind the parent, if both are in one list."""
    cdef Life *above = life_at(space, parent)
    cdef Record *record = record_at(space, slot)
    if (
        life.stamp - above.stamp < MAX_AGE and above.bin == 0 and parent != slot
        and ((above.kind ^ life.kind) & CLASS) == 0
        and record_at(space, parent).priority == record.priority
    ):
        lists_unlink(space, lists, record, life)
        lists_push_behind(space, lists, parent, slot, record, life)


cdef void lists_age(Space *space, Lists *lists, Reuse reuse, Py_ssize_t limit) noexcept nogil:
    """Continues a round of aging over the bins, the oldest first. Checks about ``limit`` blocks and samples."""
    cdef int bin, priority
    cdef uint32_t kinds
    cdef uint32_t now = <uint32_t>lists.references
    while lists.aging > 0:
        bin = lists.aging - 1
        limit -= 1 + reuse.age(bin, now, limit)
        for priority in range(PRIORITIES):
            kinds = lists.occupied[priority][bin]
            while kinds != 0 and limit > 0:
                limit -= 1 + age_list(
                    space, lists, priority, kv_lowest_bit(kinds), bin, now, reuse.ages[bin + 1], limit
                )
                kinds &= kinds - 1
        if limit <= 0:
            return
        lists.aging -= 1


cdef Py_ssize_t age_list(
    Space *space, Lists *lists, int priority, int kind, int bin, uint32_t now, uint32_t edge, Py_ssize_t limit
) noexcept nogil:
    """Moves the blocks of age ``edge`` and more, which are at a list's old end, in one piece to the list of the next
    bin.

    Returns the number of moved blocks, which is at most ``limit``.
    """
    cdef Line *line = &lists.lines[priority][kind * BINS + bin]
    cdef Line *older = line + 1
    cdef int32_t first = line.oldest, last = NONE, slot = first
    cdef Py_ssize_t count = 0
    cdef Life *life
    while slot != NONE and count < limit:
        life = life_at(space, slot)
        if now - life.stamp < edge:
            break
        life.bin = <uint8_t>(bin + 1)
        last = slot
        slot = record_at(space, slot).newer
        count += 1
    if count == 0:
        return 0
    line.oldest = slot
    if slot == NONE:
        line.newest = NONE
        lists.occupied[priority][bin] &= ~(<uint32_t>1 << kind)
    else:
        record_at(space, slot).older = NONE
    record_at(space, last).newer = NONE
    record_at(space, first).older = older.newest
    if older.newest == NONE:
        older.oldest = first
        lists.occupied[priority][bin + 1] |= <uint32_t>1 << kind
    else:
        record_at(space, older.newest).newer = first
    older.newest = last
    return count


cdef void lists_file_anew(Space *space, Lists *lists, Reuse reuse) noexcept nogil:
    """Moves every block to the bin of its age, because the edges of the bins have changed."""
    cdef int priority, kind, bin
    cdef int32_t slot, newer
    cdef int32_t[BINS] oldest
    cdef Life *life
    lists.aging = 0
    for priority in range(PRIORITIES):
        for kind in range(CLASSES):
            for bin in range(BINS):
                oldest[bin] = lists.lines[priority][kind * BINS + bin].oldest
                lists.lines[priority][kind * BINS + bin].oldest = NONE
                lists.lines[priority][kind * BINS + bin].newest = NONE
                lists.occupied[priority][bin] &= ~(<uint32_t>1 << kind)
            for bin in range(BINS - 1, -1, -1):
                slot = oldest[bin]
                while slot != NONE:
                    newer = record_at(space, slot).newer
                    life = life_at(space, slot)
                    lists_push(
                        space, lists, slot, record_at(space, slot), life,
                        reuse.bin_of(<uint32_t>lists.references - life.stamp),
                    )
                    slot = newer
