# The default policy: what goes is what is worth least, judged by how blocks like it were used again.
#
# KV blocks differ more in whether they return than in when they were last used: the last block of a prompt is hardly
# ever asked for again, the tenth use of a system prompt is followed by an eleventh. So blocks are kept in a list for
# each class (how often used, what they hang on, whether they end their chain), priority and age bin, and the lists are
# ranked by the Gittins index that reuse.pxi learns for their class and bin. Eviction takes the lists in that order,
# the oldest block of each first. On the Mooncake trace of a chat service, with room for 1, 2, 5 and 10 % of its
# blocks, this turns 5, 7, 3 and 2 points more references into hits than LRU, and as many with room for 25 and 50 %. A
# flood of blocks that do not return does not empty the cache once it has seen that others do.
#
# Classes: 1 to 14 by uses (1, 2, 3, 4, 5-6, 7-11, 12-23, 24-47 ...). Of first uses also 0: the end of its chain; 15,
# 16, 17: behind a block with 1 to 3, 4 to 23, more uses. Uses outlive eviction (seen.pxi), and a block has at least as
# many as those behind it in its chain. With worth rising with uses, a chain goes from its tail: what is new in it is
# put right behind its parent, on the older side, if that is in the same list.
#
# Nothing depends on a clock: time is the number of blocks used so far (lists.pxi), and everything scales with the
# number of slots.
#
# Cost: a use moves a block to a list's head, and as it ages it is moved up to 25 times, a little at each batch. Per
# slot 8 bytes here, 8 of seen uses and 14 of samples.


cdef enum:
    MOST_COUNTED = 0xFFFF   # uses
    WINDOWS = 64            # the uses within 1/64 of the cache's references are one: a request's look-up, read
                            # and write of a block, other ranks'; 1/16 to 1/256 do as well
    GRACE = 16              # the youngest 1/16 of the cache's references go last: a block that one engine has just set,
                            # another may be about to read, whatever such blocks are worth on average
    GRACE_REQUESTS = 2      # so does what was used within so many requests: it is about to be extended
    MOST_GRACE = 4          # but no more than a quarter of the cache
    REQUESTS = 256          # over which their size is averaged
    AGINGS = 128            # times, while a cache of references goes by, that blocks which are older now change lists
    AGED_PER_USE = 16       # blocks that may change lists at each batch: so many for each block used, and
    AGED_AT_LEAST = 500
    RANKINGS = 16           # times, while a cache of references goes by, that the lists are ranked anew
    LEAST_BETWEEN_RANKINGS = 256


cdef inline int kind_of_uses(int uses) noexcept nogil:
    cdef int kind = 6, most = 11
    if uses <= 4:
        return uses
    if uses <= 6:
        return 5
    while uses > most and kind < 14:
        kind += 1
        most = 2 * most + 1
    return kind


cdef inline int least_uses(int kind) noexcept nogil:
    """The fewest uses of a block of one of the classes 1 to 14; 0 for 0."""
    return kind if kind <= 5 else 7 if kind == 6 else 6 << (kind - 6)


@cython.final
cdef class Adaptive(Policy):
    """What each use says about a block, and the walk over the lists."""

    cdef Lists lists                            # where they are, and the time
    cdef Py_ssize_t[PRIORITIES] blocks
    cdef uint32_t parked_until                  # no parked block's pin ends earlier
    cdef Reuse reuse
    cdef Seen seen
    cdef Py_ssize_t capacity                    # slots
    cdef uint32_t window
    cdef uint64_t next_ranking, next_aging
    cdef double mean_request
    cdef Py_ssize_t request                     # blocks used so far by the request that goes on
    cdef bint read_before                       # whether these were reads: an insert that follows belongs to them
    # The walk: priority, position in the order, the block to look at next (NONE: the next list's oldest); whether this
    # is the second time over the lists, for blocks spared the first time, and whether this list's can be.
    cdef int priority
    cdef int position
    cdef int32_t at
    cdef bint again, sparing
    cdef uint32_t grace, now

    def __cinit__(self):
        self.slot_bytes = sizeof(Life)
        lists_clear(&self.lists)
        self.reuse = Reuse()
        self.parked_until = 0xFFFFFFFF
        self.seen = Seen()
        self.mean_request = 8
        self.resized(0)
        self.reuse.solve(self.mean_request)

    # -- time ------------------------------------------------------------------------------------------------

    cdef void advance(self, Py_ssize_t count, bint inserting) noexcept nogil:
        """So many blocks are used, and time goes on by as many; the housekeeping that is due."""
        if not (inserting and self.read_before) and self.request != 0:
            self.mean_request += (self.request - self.mean_request) / REQUESTS
            self.request = 0
        self.request += count
        self.read_before = not inserting
        self.lists.references += count
        if self.lists.aging == 0 and self.lists.references >= self.next_aging:
            self.next_aging = self.lists.references + max(<Py_ssize_t>1, self.capacity // AGINGS)
            self.lists.aging = BINS - 1
        if self.lists.aging != 0:
            lists_age(self.space, &self.lists, self.reuse, AGED_AT_LEAST + AGED_PER_USE * count)
        if self.lists.references >= self.next_ranking:
            self.next_ranking = self.lists.references + max(LEAST_BETWEEN_RANKINGS, self.capacity // RANKINGS)
            self.reuse.solve(self.mean_request)

    # -- events ----------------------------------------------------------------------------------------------

    cdef inline void count_use(self, Record *record, Life *life, int kind, bint known) noexcept nogil:
        """A block is used and of this class from now on; ``known``: without a sample unless its life says so."""
        cdef uint32_t now = <uint32_t>self.lists.references
        if not known or life.kind & MONITORED:
            self.reuse.used_again(record.hash, now)
        life.kind = <uint8_t>kind
        if self.reuse.take(record.hash, kind, now):
            life.kind |= MONITORED

    cdef void inserted(
        self, const int32_t *slots, Py_ssize_t n, int32_t parent, bint ends_chain
    ) noexcept nogil:
        cdef Py_ssize_t i, count = 0
        cdef int most = 0, kind, uses_above
        cdef Record *record
        cdef Life *life
        for i in range(n):
            if slots[i] >= 0:
                count += 1
                record = record_at(self.space, slots[i])
                self.blocks[record.priority] += 1
                self.seen.prefetch(record.hash)
                self.reuse.prefetch(record.hash)
        for i in range(n - 1, -1, -1):
            if slots[i] >= 0:
                record = record_at(self.space, slots[i])
                most = max(most, 1 + least_uses(self.seen.take(record.hash)))
                life_at(self.space, slots[i]).uses = <uint16_t>most
        uses_above = 0 if parent == NONE else life_at(self.space, parent).uses
        for i in range(n):
            if slots[i] < 0:
                continue
            record = record_at(self.space, slots[i])
            life = life_at(self.space, slots[i])
            kind = kind_of_uses(life.uses)
            if life.uses == 1:
                if ends_chain and i == n - 1:
                    kind = 0
                elif uses_above > 0:
                    kind = 15 if uses_above < 4 else 16 if uses_above < 24 else 17
            self.count_use(record, life, kind, False)
            if not lists_push_behind(self.space, &self.lists, parent, slots[i], record, life):
                life.stamp = <uint32_t>self.lists.references
                lists_push(self.space, &self.lists, slots[i], record, life, 0)
            parent = slots[i]
        self.advance(count, True)  # only now: what was inserted is as old as what its request read

    cdef void touched(self, const int32_t *slots, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i, count = 0
        cdef int most = 0
        cdef int32_t parent = NONE
        cdef Record *record
        cdef Life *life
        for i in range(n):
            if slots[i] >= 0:
                kv_prefetch(life_at(self.space, slots[i]))
        for i in range(n):
            if slots[i] >= 0:
                count += life_at(self.space, slots[i]).stamp != <uint32_t>self.lists.references
        if count != 0:
            self.advance(count, False)
        for i in range(n - 1, -1, -1):
            if slots[i] < 0:
                continue
            record = record_at(self.space, slots[i])
            life = life_at(self.space, slots[i])
            if <uint32_t>self.lists.references - life.stamp >= self.window:
                most = min(max(most, life.uses + 1), MOST_COUNTED)
                lists_unlink(self.space, &self.lists, record, life)
                self.count_use(record, life, kind_of_uses(most), True)
            elif life.uses < most:
                lists_unlink(self.space, &self.lists, record, life)
                life.kind = (life.kind & MONITORED) | <uint8_t>kind_of_uses(most)
            else:
                most = life.uses
                continue
            life.uses = <uint16_t>most
            life.stamp = <uint32_t>self.lists.references
            lists_push(self.space, &self.lists, slots[i], record, life, 0)
        for i in range(n):
            if slots[i] < 0:
                continue
            life = life_at(self.space, slots[i])
            if parent != NONE and life.bin == 0 and life.stamp != life_at(self.space, parent).stamp:
                lists_settle(self.space, &self.lists, parent, slots[i], life)
            parent = slots[i]

    cdef void restored(self, int32_t slot) noexcept nogil:
        cdef Record *record = record_at(self.space, slot)
        cdef Life *life = life_at(self.space, slot)
        self.blocks[record.priority] += 1
        life.uses = 2  # it was worth keeping
        life.kind = 2
        life.stamp = <uint32_t>self.lists.references - self.window  # so that its next use counts
        lists_push(self.space, &self.lists, slot, record, life, 0)

    cdef void removed(self, int32_t slot, Record *record, bint evicted) noexcept nogil:
        cdef Life *life = life_at(self.space, slot)
        lists_unlink(self.space, &self.lists, record, life)
        self.blocks[record.priority] -= 1
        if evicted:
            self.seen.put(record.hash, kind_of_uses(life.uses))

    cdef void resized(self, Py_ssize_t slots) noexcept:
        self.capacity = max(<Py_ssize_t>1, slots)
        self.window = <uint32_t>max(<Py_ssize_t>1, self.capacity // WINDOWS)
        if self.reuse.resize(self.capacity, <uint32_t>self.lists.references):
            self.seen.resize(2 * self.capacity)
            lists_file_anew(self.space, &self.lists, self.reuse)

    # -- eviction --------------------------------------------------------------------------------------------

    cdef void unpark(self) noexcept nogil:
        """Blocks that are pinned no more come back as if just used."""
        cdef int priority
        cdef int32_t slot, newer
        cdef uint32_t until = 0xFFFFFFFF
        cdef Record *record
        cdef Life *life
        for priority in range(PRIORITIES):
            slot = self.lists.parked[priority].oldest
            while slot != NONE:
                record = record_at(self.space, slot)
                newer = record.newer
                if record.pin_until > self.now and not is_expired(self.space, record):
                    until = min(until, pinned_until(record))
                else:
                    life = life_at(self.space, slot)
                    lists_unlink(self.space, &self.lists, record, life)
                    life.stamp = <uint32_t>self.lists.references
                    lists_push(self.space, &self.lists, slot, record, life, 0)
                slot = newer
        self.parked_until = until

    cdef void start(self, uint32_t now) noexcept nogil:
        self.now = now
        self.priority = 0
        self.position = -1
        self.at = NONE
        self.again = False
        self.grace = <uint32_t>min(
            max(GRACE_REQUESTS * self.mean_request, <double>(self.capacity // GRACE)),
            <double>(self.capacity // MOST_GRACE),
        )
        if self.parked_until <= now:
            self.unpark()

    cdef inline bint spared(self, int32_t slot) noexcept nogil:
        return <uint32_t>self.lists.references - life_at(self.space, slot).stamp < self.grace

    cdef bint next_list(self) noexcept nogil:
        """Goes to a list with blocks; False: there is none left."""
        cdef int32_t number
        while True:
            self.position += 1
            if self.position == LISTS or self.blocks[self.priority] == 0:
                if not self.again and self.blocks[self.priority] != 0:
                    self.again = True
                elif self.priority + 1 < PRIORITIES:
                    self.priority += 1
                    self.again = False
                else:
                    return False
                self.position = -1
                continue
            number = self.reuse.order[self.position]
            self.at = self.lists.lines[self.priority][number].oldest
            if self.at == NONE:
                continue
            # The first time over the lists those just used more than once are spared: they are about to be extended.
            # The second time only these are left.
            self.sparing = number % BINS == 0
            if not self.again:
                return True
            if self.sparing:
                while self.at != NONE and not self.spared(self.at):
                    self.at = record_at(self.space, self.at).newer
                if self.at != NONE:
                    return True

    cdef int32_t next(self) noexcept nogil:
        cdef int32_t slot
        cdef Record *record
        cdef Life *life
        while True:
            if self.at == NONE and not self.next_list():
                return NONE
            slot = self.at
            if self.sparing and not self.again and self.spared(slot):
                self.at = NONE
                continue
            record = record_at(self.space, slot)
            self.at = record.newer
            if not is_held(self.space, record, self.now):
                return slot
            if record.pin_until > self.now:
                life = life_at(self.space, slot)
                lists_unlink(self.space, &self.lists, record, life)
                lists_push(self.space, &self.lists, slot, record, life, PARKED)
                self.parked_until = min(self.parked_until, pinned_until(record))

    cdef int32_t oldest(self) noexcept nogil:
        """The least recently used block, whatever it is worth: what namespaces are compared by."""
        cdef int priority, bin
        cdef uint32_t kinds, seen
        cdef int32_t found, slot
        for priority in range(PRIORITIES):
            if self.blocks[priority] == 0:
                continue
            found = self.lists.parked[priority].oldest
            seen = 0
            for bin in range(BINS - 1, -1, -1):
                kinds = self.lists.occupied[priority][bin] & ~seen
                seen |= kinds
                while kinds != 0:
                    slot = self.lists.lines[priority][kv_lowest_bit(kinds) * BINS + bin].oldest
                    kinds &= kinds - 1
                    if found == NONE or record_at(self.space, slot).tick < record_at(self.space, found).tick:
                        found = slot
            return found
        return NONE

    cdef Py_ssize_t nbytes(self) noexcept:
        return self.reuse.nbytes() + self.seen.nbytes()
