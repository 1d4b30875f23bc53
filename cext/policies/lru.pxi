# Least recently used, with one list per priority. Within one request, the tail is evicted before the head.


cdef struct Chain:
    # A list of READY blocks, linked through their records.
    int32_t newest
    int32_t oldest
    # All blocks older than `unpinned_from` are pinned until at least `pinned_until`. If `unpinned_from` is NONE, all
    # blocks are pinned until then. So evictions need not always walk over pinned blocks at the old end.
    int32_t unpinned_from
    uint32_t pinned_until


cdef inline void chain_clear(Chain *chain) noexcept nogil:
    chain.newest = chain.oldest = chain.unpinned_from = NONE
    chain.pinned_until = 0


cdef inline void chain_push(Space *space, Chain *chain, int32_t slot, Record *record) noexcept nogil:
    record.newer = NONE
    record.older = chain.newest
    if chain.newest == NONE:
        chain.oldest = slot
    else:
        record_at(space, chain.newest).newer = slot
    chain.newest = slot
    if chain.unpinned_from == NONE:
        chain.unpinned_from = slot


cdef inline void chain_unlink(Space *space, Chain *chain, int32_t slot, Record *record) noexcept nogil:
    if chain.unpinned_from == slot:
        chain.unpinned_from = record.newer
    if record.newer == NONE:
        chain.newest = record.older
    else:
        record_at(space, record.newer).older = record.older
    if record.older == NONE:
        chain.oldest = record.newer
    else:
        record_at(space, record.older).newer = record.newer


cdef inline void chain_put_back(Space *space, Chain *chain, int32_t slot, Record *record) noexcept nogil:
    """Puts a block where walks begin: at the old end, but before the blocks there that are known to be pinned."""
    if chain.unpinned_from == NONE:
        chain_push(space, chain, slot, record)
        return
    record.newer = chain.unpinned_from
    record.older = record_at(space, record.newer).older
    record_at(space, record.newer).older = slot
    if record.older == NONE:
        chain.oldest = slot
    else:
        record_at(space, record.older).newer = slot
    chain.unpinned_from = slot


cdef inline int32_t chain_begin(Chain *chain, uint32_t now) noexcept nogil:
    """Returns the block at which a walk begins, the oldest one that may be unpinned. Returns NONE if all are pinned."""
    if chain.pinned_until <= now:
        chain.unpinned_from = chain.oldest
        chain.pinned_until = 0xFFFFFFFF
    return chain.unpinned_from


cdef inline void chain_pass(Chain *chain, int32_t slot, Record *record, uint32_t now) noexcept nogil:
    """Notes that a walk passes over a held block. If this block and all older blocks are pinned, the next walk begins
    behind it."""
    if chain.unpinned_from == slot and record.pin_until > now:
        chain.unpinned_from = record.newer
        chain.pinned_until = min(chain.pinned_until, pinned_until(record))


@cython.final
cdef class Lru(Policy):
    """Least recently used first.

    If a block is held, the blocks before it in its chain are spared, because the held block would be useless without
    them. Its chain is the one with which it was last touched. Spared blocks are evicted when no other blocks of their
    priority are left.
    """

    cdef Chain[PRIORITIES] chains
    cdef Chain[PRIORITIES] kept_chains  # KEPT blocks
    # The walk: its list and position, whether it has passed a held block, the batch of that block, and whether it has
    # spared blocks. Also whether this is the second pass over the list, which returns the blocks that the first one
    # spared.
    cdef int priority
    cdef int32_t at
    cdef bint passed_held, spared, again
    cdef uint64_t held_batch
    cdef uint32_t now

    def __cinit__(self):
        cdef int i
        for i in range(PRIORITIES):
            chain_clear(&self.chains[i])
            chain_clear(&self.kept_chains[i])

    cdef inline void unlink(self, int32_t slot, Record *record) noexcept nogil:
        cdef Chain *chain = &self.chains[record.priority]
        if record.linked & KEPT:
            chain = &self.kept_chains[record.priority]
        chain_unlink(self.space, chain, slot, record)
        record.linked &= ~<uint8_t>KEPT

    cdef void inserted(
        self, const int32_t *slots, Py_ssize_t n, int32_t parent, bint ends_chain, bint behind
    ) noexcept nogil:
        cdef Py_ssize_t i
        cdef Record *record
        for i in range(n - 1, -1, -1):
            if slots[i] >= 0:
                record = record_at(self.space, slots[i])
                chain_push(self.space, &self.chains[record.priority], slots[i], record)

    cdef void touched(self, const int32_t *slots, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        cdef Record *record
        cdef Chain *chain
        for i in range(n - 1, -1, -1):
            if slots[i] >= 0:
                record = record_at(self.space, slots[i])
                chain = &self.chains[record.priority]
                if chain.newest != slots[i]:
                    self.unlink(slots[i], record)
                    chain_push(self.space, chain, slots[i], record)

    cdef void removed(self, int32_t slot, Record *record, bint evicted) noexcept nogil:
        self.unlink(slot, record)

    cdef void kept(self, int32_t slot, Record *record) noexcept nogil:
        self.unlink(slot, record)
        chain_push(self.space, &self.kept_chains[record.priority], slot, record)
        record.linked |= KEPT

    cdef void bared(self, int32_t slot, Record *record) noexcept nogil:
        self.unlink(slot, record)
        chain_put_back(self.space, &self.chains[record.priority], slot, record)

    cdef int32_t first_kept(self, int priority) noexcept nogil:
        return self.kept_chains[priority].oldest

    cdef void begin_pass(self) noexcept nogil:
        cdef Chain *chain = &self.chains[self.priority]
        cdef int32_t before
        cdef Record *record
        self.at = chain_begin(chain, self.now)
        before = chain.newest if self.at == NONE else record_at(self.space, self.at).older
        self.passed_held = before != NONE
        if self.passed_held:
            record = record_at(self.space, before)
            self.held_batch = record.tick - record.rank

    cdef void start(self, uint32_t now) noexcept nogil:
        self.now = now
        self.priority = 0
        self.spared = self.again = False
        self.begin_pass()

    cdef int32_t next(self) noexcept nogil:
        cdef int32_t slot
        cdef Record *record
        cdef uint64_t batch
        while True:
            while self.at != NONE:
                slot = self.at
                record = record_at(self.space, slot)
                self.at = record.newer
                batch = record.tick - record.rank
                if is_held(self.space, record, self.now):
                    chain_pass(&self.chains[self.priority], slot, record, self.now)
                    self.passed_held = True
                    self.held_batch = batch
                elif self.passed_held and batch == self.held_batch:
                    if self.again:
                        return slot
                    self.spared = True
                elif not self.again:
                    return slot
            if self.spared and not self.again:
                self.again = True
            elif self.priority + 1 < PRIORITIES:
                self.priority += 1
                self.spared = self.again = False
            else:
                return NONE
            self.begin_pass()

    cdef int32_t oldest(self) noexcept nogil:
        cdef int i
        for i in range(PRIORITIES):
            if self.chains[i].oldest != NONE:
                return self.chains[i].oldest
        return NONE
