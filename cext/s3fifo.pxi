# S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache eviction, SOSP 2023).
#
# Three first-in-first-out queues: new blocks enter the small one, a tenth of all; those used more than once there move
# to the main one, the others leave and are remembered as ghosts, as many as there are slots; a block that comes
# back while it is a ghost enters the main queue at once. A block at the main queue's end that was used goes round
# again, with one use less. A hit costs one counter. What the paper leaves open is decided for chains: of one request
# the tail enters before the head, so it leaves before it.
#
# A block that is pinned when its turn in the small queue comes counts as used often, or pinned blocks would fill it;
# others that are held are passed over. A walk moves on the blocks it passes and does nothing else: a second walk, with
# nothing removed, finds the same victims.


cdef enum:
    SMALL = 0
    MAIN = 1
    SMALL_PARTS = 10    # the small queue is to be one of so many parts
    MOST_USES = 3


cdef struct Queues:
    Chain small
    Chain main


@cython.final
cdef class S3Fifo(Policy):
    """First in, first out, with a quick demotion of what is used once. One set of ghosts for all priorities."""

    cdef Queues[PRIORITIES] queues
    cdef Ghosts ghosts
    # The walk: which queues and where in each, how many blocks the small queue still has and how many it is to have.
    cdef int priority
    cdef int32_t small_at, main_at
    cdef Py_ssize_t small_left, small_target
    cdef uint32_t now

    def __cinit__(self):
        cdef int i
        for i in range(PRIORITIES):
            chain_clear(&self.queues[i].small)
            chain_clear(&self.queues[i].main)
        self.ghosts = Ghosts()

    cdef void inserted(
        self, const int32_t *slots, Py_ssize_t n, int32_t parent, bint ends_chain
    ) noexcept nogil:
        cdef Py_ssize_t i
        cdef Record *record
        for i in range(n):
            if slots[i] >= 0:
                self.ghosts.prefetch(record_at(self.space, slots[i]).hash)
        for i in range(n - 1, -1, -1):
            if slots[i] < 0:
                continue
            record = record_at(self.space, slots[i])
            record.uses = 0
            if self.ghosts.take(record.hash):
                record.queue = MAIN
                chain_push(self.space, &self.queues[record.priority].main, slots[i], record)
            else:
                record.queue = SMALL
                chain_push(self.space, &self.queues[record.priority].small, slots[i], record)

    cdef void touched(self, const int32_t *slots, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        cdef Record *record
        for i in range(n):
            if slots[i] >= 0:
                record = record_at(self.space, slots[i])
                if record.uses < MOST_USES:
                    record.uses += 1

    cdef void removed(self, int32_t slot, Record *record, bint evicted) noexcept nogil:
        cdef Queues *queues = &self.queues[record.priority]
        if record.queue == MAIN:
            chain_unlink(self.space, &queues.main, slot, record)
            return
        chain_unlink(self.space, &queues.small, slot, record)
        if evicted:
            self.ghosts.put(record.hash)

    cdef void unpinned(self) noexcept nogil:
        cdef int i
        for i in range(PRIORITIES):
            self.queues[i].main.pinned_until = 0

    cdef void begin(self, int priority) noexcept nogil:
        cdef Queues *queues = &self.queues[priority]
        self.priority = priority
        self.small_at = queues.small.oldest
        self.main_at = chain_begin(&queues.main, self.now)
        self.small_left = queues.small.length
        self.small_target = max(1, (queues.small.length + queues.main.length) // SMALL_PARTS)

    cdef void start(self, uint32_t now) noexcept nogil:
        self.now = now
        self.begin(0)

    cdef void to_main(self, int32_t slot, Record *record) noexcept nogil:
        """Makes a block the main queue's newest."""
        cdef Queues *queues = &self.queues[record.priority]
        if record.queue == SMALL:
            chain_unlink(self.space, &queues.small, slot, record)
            record.queue = MAIN
            self.small_left -= 1
        else:
            chain_unlink(self.space, &queues.main, slot, record)
        chain_push(self.space, &queues.main, slot, record)
        if self.main_at == NONE:
            self.main_at = slot

    cdef int32_t next(self) noexcept nogil:
        cdef int32_t slot
        cdef Record *record
        while True:
            if self.small_at != NONE and (self.small_left >= self.small_target or self.main_at == NONE):
                slot = self.small_at
                record = record_at(self.space, slot)
                self.small_at = record.newer
            elif self.main_at != NONE:
                slot = self.main_at
                record = record_at(self.space, slot)
                self.main_at = record.newer
            elif self.priority + 1 < PRIORITIES:
                self.begin(self.priority + 1)
                continue
            else:
                return NONE
            if is_held(self.space, record, self.now):
                if record.queue == MAIN:
                    chain_pass(&self.queues[self.priority].main, slot, record, self.now)
                elif record.pin_until > self.now:
                    self.to_main(slot, record)
            elif record.queue == SMALL and record.uses > 1:
                record.uses = 0
                self.to_main(slot, record)
            elif record.queue == MAIN and record.uses > 0:
                record.uses -= 1
                self.to_main(slot, record)
            else:
                self.small_left -= record.queue == SMALL
                return slot

    cdef int32_t oldest(self) noexcept nogil:
        cdef Queues *queues
        cdef int i
        for i in range(PRIORITIES):
            queues = &self.queues[i]
            if queues.small.length * SMALL_PARTS >= queues.small.length + queues.main.length > 0:
                return queues.small.oldest
            if queues.main.oldest != NONE:
                return queues.main.oldest
        return NONE

    cdef void resized(self, Py_ssize_t slots) noexcept:
        self.ghosts.resize(slots)

    cdef Py_ssize_t nbytes(self) noexcept:
        return self.ghosts.nbytes()
