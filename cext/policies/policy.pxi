# The eviction policies: which READY block is evicted next.
#
# A policy only keeps an order. The index owns the records, reports all events of READY blocks to the policy, and asks
# it which block to evict. A policy owns `newer` and `older` of READY records (two list links), and, if it sets
# `slot_bytes`, so many bytes a slot beside the records of each segment. It may read the other fields (tick, rank, hash,
# priority). It must keep one rule: a walk returns every block that is neither held nor kept, all blocks of a lower
# priority before those of a higher one. No method fails, and only `resized` allocates memory.
# To add a policy, write its class in a new file, which is named as the policy: `setup.py` lists them in `all.pxi`. What a
# policy is made of is in files beside it, which its file includes.


cdef class Policy:
    """The interface of a policy. Only the index calls it; one thread; nothing blocks."""

    cdef Space *space
    cdef Py_ssize_t slot_bytes  # a multiple of 8

    cdef void inserted(
        self, const int32_t *slots, Py_ssize_t n, int32_t parent, bint ends_chain, bint behind
    ) noexcept nogil:
        """Blocks of one request became READY: a chain, head first; negative slots are to be skipped.

        Their tick, rank and priority are set; their links are not. ``parent``: the READY block before the first one in
        its chain, NONE if there is none or it is not known. ``ends_chain``: the last of ``slots`` ends its chain, as
        far as is known: a later call may name it as ``parent``.
        ``behind``: the first of ``slots`` does not begin it, even if ``parent`` is not known.
        """

    cdef void touched(self, const int32_t *slots, Py_ssize_t n) noexcept nogil:
        """One request used these READY blocks; ``slots`` as for inserted, but a slot may occur twice."""

    cdef void restored(self, int32_t slot) noexcept nogil:
        """A block of a recovered index became READY. Like inserted, but without knowledge of its chain."""
        self.inserted(&slot, 1, NONE, False, False)

    cdef void removed(self, int32_t slot, Record *record, bint evicted) noexcept nogil:
        """A READY block is removed. ``evicted``: by this policy's choice; otherwise it was deleted, expired or
        replaced, or its segment is detached."""

    cdef void start(self, uint32_t now) noexcept nogil:
        """Begins a walk over the blocks to evict. Until the last next(), the only changes to the index are removals of
        blocks that next() has returned."""

    cdef int32_t next(self) noexcept nogil:
        """Returns the walk's next block to evict, never one that is held; NONE at the end."""

    cdef void kept(self, int32_t slot, Record *record) noexcept nogil:
        """The walk returned this block, but others of its chain follow it: walks leave it out until it is touched or
        bared(). Sets the block's flag KEPT, which a touch, bared() and removed() clear."""

    cdef void bared(self, int32_t slot, Record *record) noexcept nogil:
        """No block follows this KEPT block any more: it is the next one to be evicted."""

    cdef int32_t first_kept(self, int priority) noexcept nogil:
        """Returns the block of this priority that was KEPT first; the others follow by `newer`. NONE: there is none."""

    cdef int32_t oldest(self) noexcept nogil:
        """Returns the least recently used block of the lowest priority, even if it is held; NONE: there is no block.

        Kept blocks do not count: blocks that follow them do. Namespaces are compared by its tick when one of them must give back a segment.
        """

    cdef void resized(self, Py_ssize_t slots) noexcept:
        """The number of slots in the index has changed to ``slots``."""

    cdef Py_ssize_t nbytes(self) noexcept:
        """Returns the bytes of memory beyond the object itself."""
        return 0


cdef inline uint32_t pinned_until(Record *record) noexcept nogil:
    """Returns the earliest time at which a pinned block can be evicted."""
    return record.pin_until if record.expires == 0 else min(record.pin_until, record.expires)


include "all.pxi"
