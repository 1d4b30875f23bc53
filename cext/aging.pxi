# Blocks in lists by priority, class and age bin: the places of the default policy's blocks.
#
# What must hold: a READY block is in one list, the one that its life and priority name: that of its class and bin, or,
# if it was pinned when its turn to be evicted came, the parked ones of its priority, where no eviction passes over it.
# Of one class and priority the lists, end to end, are in order of stamps (restored blocks and those whose pins ended
# excepted), so what is to move on is at a list's old end, and moves in one piece.
#
# Time is the number of blocks used so far. Stamps are its low 32 bits, and only differences below 2^31 are looked at:
# older blocks are in the last bin, where only the order counts. It starts just before it wraps around, so that whatever
# is wrong about that shows at once.


cdef enum:
    PARKED = 26             # BINS: the bin of blocks that are parked
    MONITORED = 0x80        # of a class: its last use is a sample

cdef uint64_t FIRST_REFERENCE = 0xFFFF0000


cdef struct Life:
    # What the policy knows of a block; beside the records of its segment.
    uint32_t stamp
    uint16_t uses
    uint8_t kind        # the class, and MONITORED
    uint8_t bin


cdef struct Line:
    int32_t newest
    int32_t oldest


cdef inline Life *life_at(Space *space, int32_t slot) noexcept nogil:
    cdef uint32_t ordinal = <uint32_t>slot
    if space.magic != 0:
        ordinal = kv_divide(ordinal, space.magic)
    return <Life *>(space.segment[ordinal].records + space.slots_per_segment * space.stride) + (
        slot - <Py_ssize_t>ordinal * space.slots_per_segment
    )


cdef class Aging(Policy):
    """The part of the default policy that knows where blocks are."""

    cdef Line[PRIORITIES][LISTS] lines
    cdef Line[PRIORITIES] parked                # blocks that were pinned when their turn came
    cdef uint32_t[PRIORITIES][BINS] occupied    # by class: lists that are not empty
    cdef Reuse reuse
    cdef uint64_t references                    # time
    cdef int aging                              # bins that are still to be looked at in this round

    def __cinit__(self):
        self.slot_bytes = sizeof(Life)
        memset(self.lines, 0xFF, sizeof(self.lines))
        memset(self.parked, 0xFF, sizeof(self.parked))
        self.reuse = Reuse()
        self.references = FIRST_REFERENCE

    @cython.final
    cdef inline Line *line_of(self, Record *record, Life *life) noexcept nogil:
        if life.bin == PARKED:
            return &self.parked[record.priority]
        return &self.lines[record.priority][(life.kind & ~MONITORED) * BINS + life.bin]

    @cython.final
    cdef inline void unlink(self, Record *record, Life *life) noexcept nogil:
        cdef Line *line = self.line_of(record, life)
        if record.newer == NONE:
            line.newest = record.older
        else:
            record_at(self.space, record.newer).older = record.older
        if record.older == NONE:
            line.oldest = record.newer
        else:
            record_at(self.space, record.older).newer = record.newer
        if line.newest == NONE and life.bin != PARKED:
            self.occupied[record.priority][life.bin] &= ~(<uint32_t>1 << (life.kind & ~MONITORED))

    @cython.final
    cdef inline void push(self, int32_t slot, Record *record, Life *life, int bin) noexcept nogil:
        """Makes a block its list's newest."""
        cdef Line *line
        life.bin = <uint8_t>bin
        line = self.line_of(record, life)
        record.newer = NONE
        record.older = line.newest
        if line.newest == NONE:
            line.oldest = slot
            if bin != PARKED:
                self.occupied[record.priority][bin] |= <uint32_t>1 << (life.kind & ~MONITORED)
        else:
            record_at(self.space, line.newest).newer = slot
        line.newest = slot

    @cython.final
    cdef inline bint push_behind(self, int32_t parent, int32_t slot, Record *record, Life *life) noexcept nogil:
        """Puts a block right behind its parent, so that it goes first, if it belongs into the same list, of bin 0."""
        cdef Record *above
        cdef Life *life_above
        if parent == NONE:
            return False
        above = record_at(self.space, parent)
        life_above = life_at(self.space, parent)
        if (
            life_above.bin != 0 or ((life_above.kind ^ life.kind) & ~MONITORED) != 0
            or above.priority != record.priority
        ):
            return False
        life.bin = 0
        life.stamp = life_above.stamp
        record.newer = parent
        record.older = above.older
        if above.older == NONE:
            self.line_of(record, life).oldest = slot
        else:
            record_at(self.space, above.older).newer = slot
        above.older = slot
        return True

    @cython.final
    cdef void settle(self, int32_t parent, int32_t slot, Life *life) noexcept nogil:
        """A block newer than the one before it in its chain comes to lie behind it if they share a list."""
        cdef Life *above = life_at(self.space, parent)
        cdef Record *record = record_at(self.space, slot)
        if (
            life.stamp - above.stamp < MAX_AGE and above.bin == 0 and parent != slot
            and ((above.kind ^ life.kind) & ~MONITORED) == 0
            and record_at(self.space, parent).priority == record.priority
        ):
            self.unlink(record, life)
            self.push_behind(parent, slot, record, life)

    @cython.final
    cdef void age(self, Py_ssize_t limit) noexcept nogil:
        """Goes on with a round over the bins, the old ones first; looks at about ``limit`` blocks and samples."""
        cdef int bin, priority
        cdef uint32_t kinds
        cdef uint32_t now = <uint32_t>self.references
        while self.aging > 0:
            bin = self.aging - 1
            limit -= 1 + self.reuse.age(bin, now, limit)
            for priority in range(PRIORITIES):
                kinds = self.occupied[priority][bin]
                while kinds != 0 and limit > 0:
                    limit -= 1 + self.age_list(priority, kv_lowest_bit(kinds), bin, now, limit)
                    kinds &= kinds - 1
            if limit <= 0:
                return
            self.aging -= 1

    @cython.final
    cdef Py_ssize_t age_list(self, int priority, int kind, int bin, uint32_t now, Py_ssize_t limit) noexcept nogil:
        """Moves the old end of a list to the next bin's, as one piece."""
        cdef Line *line = &self.lines[priority][kind * BINS + bin]
        cdef Line *older = line + 1
        cdef int32_t first = line.oldest, last = NONE, slot = first
        cdef Py_ssize_t count = 0
        cdef Life *life
        while slot != NONE and count < limit:
            life = life_at(self.space, slot)
            if now - life.stamp < self.reuse.ages[bin + 1]:
                break
            life.bin = <uint8_t>(bin + 1)
            last = slot
            slot = record_at(self.space, slot).newer
            count += 1
        if count == 0:
            return 0
        line.oldest = slot
        if slot == NONE:
            line.newest = NONE
            self.occupied[priority][bin] &= ~(<uint32_t>1 << kind)
        else:
            record_at(self.space, slot).older = NONE
        record_at(self.space, last).newer = NONE
        record_at(self.space, first).older = older.newest
        if older.newest == NONE:
            older.oldest = first
            self.occupied[priority][bin + 1] |= <uint32_t>1 << kind
        else:
            record_at(self.space, older.newest).newer = first
        older.newest = last
        return count

    @cython.final
    cdef void file_anew(self) noexcept nogil:
        """The bins are others: every block goes to the one of its age."""
        cdef int priority, kind, bin
        cdef int32_t slot, newer
        cdef int32_t[BINS] oldest
        cdef Life *life
        self.aging = 0
        for priority in range(PRIORITIES):
            for kind in range(CLASSES):
                for bin in range(BINS):
                    oldest[bin] = self.lines[priority][kind * BINS + bin].oldest
                    self.lines[priority][kind * BINS + bin].oldest = NONE
                    self.lines[priority][kind * BINS + bin].newest = NONE
                    self.occupied[priority][bin] &= ~(<uint32_t>1 << kind)
                for bin in range(BINS - 1, -1, -1):
                    slot = oldest[bin]
                    while slot != NONE:
                        newer = record_at(self.space, slot).newer
                        life = life_at(self.space, slot)
                        self.push(
                            slot, record_at(self.space, slot), life,
                            self.reuse.bin_of(<uint32_t>self.references - life.stamp),
                        )
                        slot = newer
