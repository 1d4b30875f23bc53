# The chains of an index: which block follows which one.
#
# READY blocks that were set as a chain are linked, each to the nearest block before it that this index has. So they
# form trees: prompts with a common beginning branch where they differ. A block is not evicted before the blocks that
# follow it. So the head of every chain stays longest, whichever clients and calls set its blocks. When a followed block
# would be evicted next, the policy puts it aside (KEPT). It can be evicted when the last block that followed it is
# gone.
#
# What must hold: only READY blocks are linked. A tree has no circle, because no block in a circle could ever be
# evicted. `followers` is the length of the list that begins at `first`. A block is linked only once: it keeps its place
# until the block itself, or the block before it, is removed. Blocks that followed a removed block begin trees of their
# own, because blocks behind a gap are useless until the gap is filled. Then a set or the next link() of the chain joins
# them again.


cdef enum:
    MOST_FOLLOWERS = 4096   # followers of one block; no more are linked, so that the time to remove a block is bounded
    MOST_STEPS = 16384      # steps of a search for circles or for blocks to evict, for all blocks of one call together


cdef inline bint is_above(Space *space, int32_t slot, int32_t above, Py_ssize_t *steps) noexcept nogil:
    """Returns whether ``slot`` is ``above`` or a block before it. Also returns True if the ``steps`` are used up."""
    while above != slot:
        steps[0] -= 1
        if steps[0] < 0:
            return True
        if not record_at(space, above).linked & FOLLOWS:
            return False
        above = link_at(space, above).before
    return True


cdef inline bint links_join(Space *space, int32_t above, int32_t slot, Py_ssize_t *steps) noexcept nogil:
    """Links a READY block to the READY block ``above``. Returns False if it is linked already or must not be linked."""
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
    """Takes a removed block out of its tree. If it was the last follower, the policy's bared() is called for the block
    before it."""
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
