# Which READY block goes next: the eviction policies, behind one interface.
#
# A policy keeps order, nothing else: the index owns the records, tells the policy what happens to READY blocks, and
# asks it whom to evict. A policy has `newer` and `older` of READY records (two list links), and `slot_bytes` more
# beside the records of each segment if it asks for them; it reads the rest (tick, rank, hash, priority), and must keep
# one promise: a walk returns every block that is not held, those of a lower priority before those of a higher one.
# No method fails, and none but `resized` allocates.
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
        """The least recently used block of the lowest priority, held or not; NONE: no block.

        Namespaces are compared by its tick when one has to give way.
        """

    cdef void resized(self, Py_ssize_t slots) noexcept:
        """The index has this many slots now."""

    cdef Py_ssize_t nbytes(self) noexcept:
        """Bytes of memory beyond the object itself."""
        return 0


cdef inline uint32_t pinned_until(Record *record) noexcept nogil:
    """When a block that is pinned can be evicted at the earliest."""
    return record.pin_until if record.expires == 0 else min(record.pin_until, record.expires)


include "lru.pxi"
include "seen.pxi"
include "reuse.pxi"
include "lists.pxi"
include "default.pxi"

cdef dict _POLICIES = {"lru": Lru, "default": Adaptive}
