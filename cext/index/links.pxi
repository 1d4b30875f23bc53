# The chains of an index: which block follows which.
#
# READY blocks that were set as a chain are linked, each to the nearest block before it that this index has. So they
# form trees: prompts with a common beginning branch where they part. A block that others follow is not evicted before
# these, so that of every chain the head stays longest, whoever set its blocks, in whatever calls. When such a block's
# turn comes, the policy puts it aside (KEPT); it is the next one when the last block that followed it is gone.
#
# What must hold: only READY blocks are linked; a tree has no circle, because nothing in a circle could ever be evicted;
# `followers` counts the list that begins at `first`. A block is linked once: it keeps its place until it, or the block
# before it, is removed. Blocks that followed a removed one begin trees of their own: what is behind a gap is useless
# until the gap is filled, and then a set or the next link() of the chain joins it again.


cdef enum:
    MOST_FOLLOWERS = 4096   # of one block; more are not linked, so that the removal of a block takes a bounded time
    MOST_STEPS = 16384      # in search of circles, or of blocks to evict, for all blocks of one call


cdef inline bint is_above(Space *space, int32_t slot, int32_t above, Py_ssize_t *steps) noexcept nogil:
    """Whether ``slot`` is ``above`` or one of the blocks before it. Also true when ``steps`` are used up."""
    while above != slot:
        steps[0] -= 1
        if steps[0] < 0:
            return True
        if not record_at(space, above).linked & FOLLOWS:
            return False
        above = link_at(space, above).before
    return True


cdef inline bint links_join(Space *space, int32_t above, int32_t slot, Py_ssize_t *steps) noexcept nogil:
    """Links a READY block to the READY block ``above``. False: it is linked already, or must not be."""
    cdef Record *record = record_at(space, slot)
    cdef Record *record_above = record_at(space, above)
    cdef Link *link
    cdef Link *link_above
    if record.linked & FOLLOWS or slot == above:
        return False
    if record.linked & FOLLOWED and is_above(space, slot, above, steps):
        return False
    link = link_at(space, slot)
    link_above = link_at(space, above)
    if not record_above.linked & FOLLOWED:
        link_above.first = NONE
        link_above.followers = link_above.chosen = 0
    elif link_above.followers >= MOST_FOLLOWERS:
        return False
    link.before = above
    link.previous = NONE
    link.next = link_above.first
    if link.next != NONE:
        link_at(space, link.next).previous = slot
    link_above.first = slot
    link_above.followers += 1
    record.linked |= FOLLOWS
    record_above.linked |= FOLLOWED
    return True


cdef void links_cut(Space *space, Policy policy, int32_t slot, Record *record) noexcept nogil:
    """Takes a block that is removed out of its tree. The block before it is bared when it was the last follower."""
    cdef Link *link = link_at(space, slot)
    cdef Link *link_before
    cdef Record *record_before
    cdef int32_t follower
    if record.linked & FOLLOWED:
        follower = link.first
        while follower != NONE:
            record_at(space, follower).linked &= ~<uint8_t>FOLLOWS
            follower = link_at(space, follower).next
    if record.linked & FOLLOWS:
        link_before = link_at(space, link.before)
        record_before = record_at(space, link.before)
        if link.previous == NONE:
            link_before.first = link.next
        else:
            link_at(space, link.previous).next = link.next
        if link.next != NONE:
            link_at(space, link.next).previous = link.previous
        link_before.followers -= 1
        if link_before.followers == 0:
            record_before.linked &= ~<uint8_t>FOLLOWED
            if record_before.linked & KEPT:
                policy.bared(link.before, record_before)
    record.linked = 0
