# The eviction policies: which READY block is evicted next.
#
# A policy only keeps an order. The index owns the records, reports all events of READY blocks to the policy, and asks
# the policy which block to evict. A policy owns `newer` and `older` of READY records (two list links). If it sets
# `slot_bytes`, it also owns that many bytes per slot behind the records of each segment. It may read the other fields
# (tick, rank, hash, priority). It must keep one rule: a walk returns every block that is neither held nor kept, and
# returns all blocks of a lower priority before those of a higher one. No method fails, and only `resized` allocates
# memory. To add a policy, write its class in a new file with the policy's name: `setup.py` lists these files in
# `all.pxi`. The parts of a policy are in other files here, which the policy's file includes.


cdef class Policy:
    """The interface of a policy. Only the index calls it, on one thread. No method blocks."""

    cdef Space *space
    cdef Py_ssize_t slot_bytes  # a multiple of 8

    cdef void inserted(
        self, const int32_t *slots, Py_ssize_t n, int32_t parent, bint ends_chain, bint behind
    ) noexcept nogil:
        """Blocks of one request became READY. They are a chain, head first. Negative slots must be skipped.

        Their tick, rank and priority are set, but their links may not be. ``parent``: the READY block before the first one
        in its chain, or NONE if there is none or it is unknown. ``ends_chain``: whether the last of ``slots`` ends its
        chain, as far as is known. A later call may name it as ``parent``. ``behind``: whether the chain begins
        before the first of ``slots``, even if ``parent`` is not known.
        """

    cdef void touched(self, const int32_t *slots, Py_ssize_t n) noexcept nogil:
        """One request used these READY blocks. ``slots`` is as for inserted(), but a slot may occur twice."""

    cdef void restored(self, int32_t slot) noexcept nogil:
        """A block of a recovered index became READY. This is like inserted(), but the block's chain is unknown."""
        self.inserted(&slot, 1, NONE, False, False)

    cdef void removed(self, int32_t slot, Record *record, bint evicted) noexcept nogil:
        """A READY block is removed. ``evicted``: whether this policy chose it. If not, the block was deleted, expired
        or replaced, or its segment is detached."""

    cdef void start(self, uint32_t now) noexcept nogil:
        """Begins a walk over the blocks to evict. Until the last next(), the index only changes by the removal of
        blocks that next() has returned."""

    cdef int32_t next(self) noexcept nogil:
        """Returns the next block of the walk to evict, or NONE at the end. It never returns a held block."""

    cdef void kept(self, int32_t slot, Record *record) noexcept nogil:
        """The walk returned this block, but others of its chain follow it. So walks leave it out until it is touched or
        bared(). Sets the block's flag KEPT, which a touch, bared() and removed() clear."""

    cdef void bared(self, int32_t slot, Record *record) noexcept nogil:
        """No block follows this KEPT block any more, so it is the next block to be evicted."""

    cdef int32_t first_kept(self, int priority) noexcept nogil:
        """Returns the block of this priority that was KEPT first, or NONE. The other KEPT blocks follow by `newer`."""

    cdef int32_t oldest(self) noexcept nogil:
        """Returns the least recently used block of the lowest priority, even if it is held, or NONE if there is no
        block.

        Kept blocks do not count, but blocks that follow them do. When a namespace must give back a segment, namespaces
        are compared by the tick of this block.
        """

    cdef void resized(self, Py_ssize_t slots) noexcept:
        """The number of slots in the index has changed to ``slots``."""

    cdef Py_ssize_t nbytes(self) noexcept:
        """Returns the bytes of memory that are used in addition to the object itself."""
        return 0


cdef inline uint32_t pinned_until(Record *record) noexcept nogil:
    """Returns the earliest time at which a pinned block can be evicted."""
    return record.pin_until if record.expires == 0 else min(record.pin_until, record.expires)


include "all.pxi"
