# The default policy evicts the blocks that are worth least, judged by how often similar blocks were used again.
#
# For KV blocks it matters more whether they will be used again than when they were last used. The last block of a
# prompt is hardly ever requested again, while the tenth use of a system prompt is followed by an eleventh. So blocks
# are kept in one list for each combination of class, priority and age bin. The class says how often they were used,
# what they follow, and whether they end their chain. The lists are ranked by their worth, which worth.pxi computes from
# what reuse.pxi learns about their class and bin. Eviction takes the lists in that order, and the oldest block of each
# list first. The lists of bin 0 come last, because another engine may be about to read a block that one engine has just
# set. Bin 0 covers about a sixteenth of a cache of references (see `WINDOWS`).
#
# On the Mooncake trace of a chat service, the hit rate is 5, 7, 3 and 2 points higher than with LRU if the cache has
# room for 1, 2, 5 and 10 % of the trace's blocks. With room for 25 and 50 % it is the same. A flood of blocks that are
# not used again does not empty the cache, once the policy has seen that other blocks are used again.
#
# Classes 1 to 14 are for blocks with 1, 2, 3, 4, 5-6, 7-11, 12-23, 24-47 ... uses. Blocks with one use may also be of
# other classes. Class 0: they end their chain. Classes 15, 16, 17: they are behind a block with 2 or 3, with 4 to 23,
# or with more uses. That block, their *context*, is the nearest one before them that was used more than once; new
# blocks may lie between. A chain may be set in several calls. So a block that ends a chain keeps its context, and gets
# the class of its context when another call continues the chain. The count of uses survives eviction (seen.pxi), and a
# block has at least as many uses as the blocks behind it in its chain. If new blocks of a chain belong to the same list
# as their parent, they are put right behind the parent, on the older side. `links.pxi` makes sure that a chain is
# evicted from its tail.
#
# Nothing depends on a clock. Time is the number of blocks used so far (lists.pxi), and everything scales with the
# number of slots.
#
# Cost: a use moves a block to the head of a list. As the block ages, it is moved up to 25 times, and each batch does a
# part of these moves. Memory: each slot takes 8 bytes here, 8 for seen uses and 14 for samples. Samples take less in
# large caches, and up to 224 bytes per slot in caches of a few hundred slots.


include "seen.pxi"
include "reuse.pxi"
include "worth.pxi"
include "lists.pxi"


cdef enum:
    MOST_COUNTED = 0xFFFF   # the most uses that are counted
    # "A cache of references" is a number of block uses that equals the number of slots in the cache.
    WINDOWS = 64            # uses of a block within 1/64 of a cache of references count once: a request's look-up, read
                            # and write, and those of other ranks; 1/16 to 1/256 work as well
    REQUESTS = 256          # the size of requests is averaged over this many
    AGINGS = 128            # rounds of aging in a cache of references; a round moves blocks to the lists of their age
    AGED_PER_USE = 16       # blocks that aging may move per batch: this many for each block used, plus
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
    """Returns the fewest uses of a block of class 1 to 14. Returns 0 for class 0."""
    return kind if kind <= 5 else 7 if kind == 6 else 6 << (kind - 6)


@cython.final
cdef class Adaptive(Policy):
    """The default policy. It updates lists and statistics at each use of a block, and walks over the lists to evict."""

    cdef Lists lists                            # the blocks, and the time
    cdef Py_ssize_t[PRIORITIES] blocks
    cdef uint32_t parked_until                  # no pin of a parked block ends before this time
    cdef Reuse reuse
    cdef Seen seen
    cdef Py_ssize_t capacity                    # the number of slots
    cdef uint32_t window
    cdef uint64_t next_ranking, next_aging
    cdef double mean_request
    cdef Py_ssize_t request                     # the number of blocks used so far by the current request
    # The walk: its priority, its position in the order, and the next block (NONE: the oldest block of the next list).
    # Also whether this is the second pass over the lists, which is for the blocks of bin 0.
    cdef int priority
    cdef int position
    cdef int32_t at
    cdef bint again
    cdef uint32_t now

    def __cinit__(self):
        self.slot_bytes = sizeof(Life)
        lists_clear(&self.lists)
        self.reuse = Reuse()
        self.parked_until = 0xFFFFFFFF
        self.seen = Seen()
        self.mean_request = 8
        self.resized(0)
        rank_lists(self.reuse, self.mean_request)

    # -- time ------------------------------------------------------------------------------------------------

    cdef void advance(self, Py_ssize_t count, bint continues) noexcept nogil:
        """Advances the time by ``count`` used blocks, and does the housekeeping that is due.

        ``continues``: whether the blocks belong to the same request as blocks that were used before.
        """
        if not continues and self.request != 0:
            self.mean_request += (self.request - self.mean_request) / REQUESTS
            self.request = 0
        self.request += count
        self.lists.references += count
        if self.lists.aging == 0 and self.lists.references >= self.next_aging:
            self.next_aging = self.lists.references + max(<Py_ssize_t>1, self.capacity // AGINGS)
            self.lists.aging = BINS - 1
        if self.lists.aging != 0:
            lists_age(self.space, &self.lists, self.reuse, AGED_AT_LEAST + AGED_PER_USE * count)
        if self.lists.references >= self.next_ranking:
            self.next_ranking = self.lists.references + max(LEAST_BETWEEN_RANKINGS, self.capacity // RANKINGS)
            rank_lists(self.reuse, self.mean_request)

    # -- events ----------------------------------------------------------------------------------------------

    cdef inline void count_use(self, Record *record, Life *life, int kind, bint known) noexcept nogil:
        """Counts a use of a block, whose class is ``kind`` from now on.

        ``known``: whether the block was in the cache. Then its MONITORED flag shows whether its last use is a sample.
        """
        cdef uint32_t now = <uint32_t>self.lists.references
        if not known or life.kind & MONITORED:
            self.reuse.used_again(record.hash, now)
        life.kind = <uint8_t>kind
        if self.reuse.take(record.hash, kind & CLASS, now):
            life.kind |= MONITORED

    cdef inline int context_behind(self, Life *life) noexcept nogil:
        """Returns the context of the blocks behind a block: 1 to 3 by the block's uses, or its own context if it was
        used only once."""
        if life.uses > 1:
            return 1 if life.uses < 4 else 2 if life.uses < 24 else 3
        if (life.kind & CLASS) == 0:
            return (life.kind & ~MONITORED) // CONTEXT
        return max(0, (life.kind & CLASS) - 14)

    cdef void extend(self, int32_t slot) noexcept nogil:
        """Notes that blocks are put behind this block, so that it no longer ends its chain."""
        cdef Record *record
        cdef Life *life = life_at(self.space, slot)
        cdef int context, kind
        cdef int32_t above = NONE
        if (life.kind & CLASS) != 0:
            return
        record = record_at(self.space, slot)
        context = (life.kind & ~MONITORED) // CONTEXT
        kind = context + 14 if context else 1
        if life.kind & MONITORED:
            self.reuse.reclass(record.hash, kind)
        lists_unlink(self.space, &self.lists, record, life)
        life.kind = (life.kind & MONITORED) | <uint8_t>kind
        if record.linked & FOLLOWS and record_at(self.space, link_at(self.space, slot).before).state == READY:
            above = link_at(self.space, slot).before
        if not lists_push_behind(self.space, &self.lists, above, slot, record, life):
            life.stamp = <uint32_t>self.lists.references
            lists_push(self.space, &self.lists, slot, record, life, 0)

    cdef void inserted(
        self, const int32_t *slots, Py_ssize_t n, int32_t parent, bint ends_chain, bint behind
    ) noexcept nogil:
        cdef Py_ssize_t i, count = 0
        cdef int most = 0, kind, context = behind
        cdef bint continues = behind or parent != NONE
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
        if parent != NONE and count != 0:
            self.extend(parent)
            context = self.context_behind(life_at(self.space, parent))
        for i in range(n):
            if slots[i] < 0:
                continue
            record = record_at(self.space, slots[i])
            life = life_at(self.space, slots[i])
            kind = kind_of_uses(life.uses)
            if life.uses == 1:
                if ends_chain and i == n - 1:
                    kind = context * CONTEXT
                elif context != 0:
                    kind = 14 + context
            self.count_use(record, life, kind, False)
            if not lists_push_behind(self.space, &self.lists, parent, slots[i], record, life):
                life.stamp = <uint32_t>self.lists.references
                lists_push(self.space, &self.lists, slots[i], record, life, 0)
            context = self.context_behind(life)
            parent = slots[i]
        self.advance(count, continues)  # only now, so that inserted blocks have the same stamp as blocks that were read

    cdef void touched(self, const int32_t *slots, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i, count = 0
        cdef int most = 0
        cdef uint32_t age
        cdef bint continues = True
        cdef int32_t parent = NONE
        cdef Record *record
        cdef Life *life
        for i in range(n):
            if slots[i] >= 0:
                kv_prefetch(life_at(self.space, slots[i]))
        for i in range(n):
            if slots[i] >= 0:
                age = <uint32_t>self.lists.references - life_at(self.space, slots[i]).stamp
                count += age != 0
                if age >= self.window:
                    continues = False
        if count != 0:
            self.advance(count, continues)
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
        """Puts parked blocks that are no longer pinned back into their lists, as if they had just been used."""
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
        if self.parked_until <= now:
            self.unpark()

    cdef bint next_list(self) noexcept nogil:
        """Goes to the next list with blocks. Returns False if none is left."""
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
            # The first pass over the lists leaves out those of bin 0, and the second pass returns only them.
            if (number % BINS == 0) != self.again:
                continue
            self.at = self.lists.lines[self.priority][number].oldest
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
        """Returns the least recently used block, whatever its worth. Namespaces are compared by its tick."""
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
