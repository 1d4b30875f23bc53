# Which READY block goes next: the eviction policies, behind one interface.
#
# A policy keeps order, nothing else: the index owns the records, tells the policy what happens to READY blocks, and
# asks it whom to evict. A policy has `newer` and `older` of READY records (two list links), `queue` and `uses` (two
# bytes), `slot_bytes` more beside the records of each segment if it asks for them, reads the rest (tick, rank, hash,
# priority), and must keep one promise: a walk returns every block that is not held, those of a lower priority before
# those of a higher one. No method fails, and none but `resized` allocates.
# To add a policy, write its class in a file of its own; include and name it at the foot of this file.


cdef class Policy:
    """How a policy is told and asked. The index calls; one thread; nothing blocks."""

    cdef Space *space
    cdef Py_ssize_t slot_bytes  # a multiple of 8

    cdef void inserted(
        self, const int32_t *slots, Py_ssize_t n, int32_t parent, bint ends_chain
    ) noexcept nogil:
        """Blocks became READY: those of one request, the head of the chain first; negative entries are no blocks.

        Their tick, rank and priority are set; their links are not. ``parent``: the READY block before the first of them
        in its chain, NONE if there is none or it is not known. ``ends_chain``: the last of ``slots`` ends its chain.
        """

    cdef void touched(self, const int32_t *slots, Py_ssize_t n) noexcept nogil:
        """READY blocks were used by one request; as for inserted. A slot may be named twice."""

    cdef void restored(self, int32_t slot) noexcept nogil:
        """A block of a recovered index became READY; as for inserted, and nothing else is known of it."""
        self.inserted(&slot, 1, NONE, False)

    cdef void removed(self, int32_t slot, Record *record, bint evicted) noexcept nogil:
        """A READY block goes: evicted by this policy's choice, or deleted, expired, replaced, its segment detached."""

    cdef void start(self, uint32_t now) noexcept nogil:
        """Begins a walk over the blocks to evict; until the last next() all that happens to the index is that blocks
        next() returned are removed, or not."""

    cdef int32_t next(self) noexcept nogil:
        """The walk's next block to evict, never one that is held; NONE: there is no more."""

    cdef int32_t oldest(self) noexcept nogil:
        """A block by whose tick namespaces can be compared when one has to give way; NONE: no block.

        Of those of the lowest priority, held or not, the least recently used or the one that would go next.
        """

    cdef void unpinned(self) noexcept nogil:
        """Pins ended before their time."""

    cdef void resized(self, Py_ssize_t slots) noexcept:
        """The index has this many slots now."""

    cdef Py_ssize_t nbytes(self) noexcept:
        """Bytes of memory beyond the object itself."""
        return 0


cdef struct Chain:
    # READY blocks in an order, linked through their records.
    int32_t newest
    int32_t oldest
    Py_ssize_t length
    # Every block older than `unpinned_from` (NONE: every block) is pinned until `pinned_until` at least, so that pinned
    # blocks which have come to the old end are not walked over by every eviction.
    int32_t unpinned_from
    uint32_t pinned_until


cdef inline void chain_clear(Chain *chain) noexcept nogil:
    chain.newest = chain.oldest = chain.unpinned_from = NONE
    chain.length = 0
    chain.pinned_until = 0


cdef inline void chain_push(Space *space, Chain *chain, int32_t slot, Record *record) noexcept nogil:
    record.newer = NONE
    record.older = chain.newest
    if chain.newest == NONE:
        chain.oldest = slot
    else:
        record_at(space, chain.newest).newer = slot
    chain.newest = slot
    chain.length += 1
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
    chain.length -= 1


cdef inline uint32_t pinned_until(Record *record) noexcept nogil:
    """When a block that is pinned can be evicted at the earliest."""
    return record.pin_until if record.expires == 0 else min(record.pin_until, record.expires)


cdef inline int32_t chain_begin(Chain *chain, uint32_t now) noexcept nogil:
    """The oldest block that may not be pinned, NONE when all are: where a walk begins."""
    if chain.pinned_until <= now:
        chain.unpinned_from = chain.oldest
        chain.pinned_until = 0xFFFFFFFF
    return chain.unpinned_from


cdef inline void chain_pass(Chain *chain, int32_t slot, Record *record, uint32_t now) noexcept nogil:
    """A walk passes over a block that is held: if all before it were pinned, and it is, the next walk begins behind."""
    if chain.unpinned_from == slot and record.pin_until > now:
        chain.unpinned_from = record.newer
        chain.pinned_until = min(chain.pinned_until, pinned_until(record))


include "ghosts.pxi"
include "lru.pxi"
include "s3fifo.pxi"
include "seen.pxi"
include "reuse.pxi"
include "aging.pxi"
include "adaptive.pxi"

cdef dict _POLICIES = {"lru": Lru, "s3fifo": S3Fifo, "default": Adaptive}
