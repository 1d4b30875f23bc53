# The default policy: evicts the blocks that are worth least, judged by how similar blocks were used again.
#
# For KV blocks it matters more whether they are used again than when they were last used: the last block of a prompt is
# hardly ever requested again, while the tenth use of a system prompt is followed by an eleventh. So blocks are kept in
# one list for each class (how often they were used, what they follow, whether they end their chain), priority and age
# bin. The lists are ranked by the Gittins index that reuse.pxi learns for their class and bin. Eviction takes the lists
# in that order, the oldest block of each first. On the Mooncake trace of a chat service, with room for 1, 2, 5 and 10 %
# of its blocks, the hit rate is 5, 7, 3 and 2 points higher than with LRU, and the same with room for 25 and 50 %. A
# flood of blocks that are not used again does not empty the cache once the policy has seen that other blocks are.
#
# Classes: 1 to 14 by uses (1, 2, 3, 4, 5-6, 7-11, 12-23, 24-47 ...). Blocks with one use may also be of class 0: the
# end of the chain; 15, 16, 17: behind a block with 1 to 3, 4 to 23, more uses. The count of uses survives eviction
# (seen.pxi), and a block has at least as many uses as the blocks behind it in its chain. Worth rises with uses, so a
# chain is evicted from its tail. New blocks of a chain are put right behind their parent, on the older side, if they
# belong to the same list.
#
# Nothing depends on a clock: time is the number of blocks used so far (lists.pxi), and everything scales with the
# number of slots.
#
# Cost: a use moves a block to a list's head, and as the block ages it is moved up to 25 times; each batch does a part
# of these moves. Memory: for each slot 8 bytes here, 8 for seen uses and 14 for samples.


cdef enum:
    MOST_COUNTED = 0xFFFF   # uses
    # "A cache of references" is as many uses of blocks as the cache has slots.
    WINDOWS = 64            # uses of a block within 1/64 of a cache of references count once: a request's look-up, read
                            # and write, and those of other ranks; 1/16 to 1/256 work as well
    GRACE = 16              # blocks used within 1/16 of a cache of references go last: another engine may be about to
                            # read a block that one engine has just set, whatever such blocks are worth on average
    GRACE_REQUESTS = 2      # blocks used within so many requests go last, too: they are about to be extended
    MOST_GRACE = 4          # but at most a quarter of the cache goes last
    REQUESTS = 256          # the size of requests is averaged over so many
    AGINGS = 128            # rounds of aging in a cache of references; a round moves blocks to the lists of their age
    AGED_PER_USE = 16       # blocks that may be moved by aging at each batch: so many for each block used, plus
    AGED_AT_LEAST = 500
    RANKINGS = 16           # how often the lists are ranked anew in a cache of references
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
    """Returns the fewest uses of a block of one of the classes 1 to 14; 0 for 0."""
    return kind if kind <= 5 else 7 if kind == 6 else 6 << (kind - 6)


@cython.final
cdef class Adaptive(Policy):
    """The default policy: updates lists and statistics at each use of a block, and walks over the lists to evict."""

    cdef Lists lists                            # the blocks, and the time
    cdef Py_ssize_t[PRIORITIES] blocks
    cdef uint32_t parked_until                  # no parked block's pin ends earlier
    cdef Reuse reuse
    cdef Seen seen
    cdef Py_ssize_t capacity                    # slots
    cdef uint32_t window
    cdef uint64_t next_ranking, next_aging
    cdef double mean_request
    cdef Py_ssize_t request                     # blocks used so far by the present request
    cdef bint read_before                       # these uses were reads: an insert that follows belongs to the request
    # The walk: priority, position in the order, the next block (NONE: the next list's oldest); whether this is the
    # second pass over the lists, for the blocks spared by the first one, and whether this list may have spared blocks.
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
        """Moves time on by ``count`` used blocks, and does the housekeeping that is due."""
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
        """Counts a use of a block, whose class is ``kind`` from now on.

        ``known``: the block was in the cache, so that its MONITORED flag tells whether its last use is a sample.
        """
        cdef uint32_t now = <uint32_t>self.lists.references
        if not known or life.kind & MONITORED:
            self.reuse.used_again(record.hash, now)
        life.kind = <uint8_t>kind
        if self.reuse.take(record.hash, kind, now):
            life.kind |= MONITORED

    cdef void inserted(
        self, const int32_t *slots, Py_ssize_t n, int32_t parent, bint ends_chain, bint behind
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
        uses_above = behind if parent == NONE else life_at(self.space, parent).uses
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
        self.advance(count, True)  # only now, so that inserted blocks have the same stamp as blocks that were read

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
        life.uses = 2  # not 1, because an earlier run kept the block
        life.kind = 2
        life.stamp = <uint32_t>self.lists.references - self.window  # so that its next use counts
        lists_push(self.space, &self.lists, slot, record, life, 0)

    cdef void kept(self, int32_t slot, Record *record) noexcept nogil:
        cdef Life *life = life_at(self.space, slot)
        lists_unlink(self.space, &self.lists, record, life)
        lists_push(self.space, &self.lists, slot, record, life, KEPT_BIN)
        record.linked |= KEPT

    cdef void bared(self, int32_t slot, Record *record) noexcept nogil:
        cdef Life *life = life_at(self.space, slot)
        lists_unlink(self.space, &self.lists, record, life)
        lists_push_oldest(
            self.space, &self.lists, slot, record, life,
            self.reuse.bin_of(<uint32_t>self.lists.references - life.stamp),
        )

    cdef int32_t first_kept(self, int priority) noexcept nogil:
        return self.lists.kept[priority].oldest

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
        """Returns parked blocks that are not pinned any more to their lists, as if they were just used."""
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
        """Goes to the next list with blocks. False: there is none left."""
        cdef int32_t number
        while True:
            self.position += 1
            if self.position >= LISTS or self.blocks[self.priority] == 0:
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
            # Blocks of bin 0 that were used within the grace are spared: the first pass over the lists skips them, the
            # second pass returns only them.
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
        """Returns the least recently used block, whatever it is worth; namespaces are compared by it."""
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
