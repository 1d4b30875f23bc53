# The chains of an index: which block follows which one.
#
# Blocks that were set as a chain are linked, each to the nearest block before it that this index has. So they form
# trees: prompts with a common beginning branch where they differ. A block is not evicted before the blocks that follow
# it. So the head of every chain stays longest, whichever clients and calls set its blocks. When a followed block would
# be evicted next, the policy puts it aside (KEPT). It can be evicted when the last block that followed it is gone.
#
# Several clients may write a chain at once. So a block is also linked to a WRITING block, which keeps its place in the
# tree when it becomes READY. If its write is given up, the blocks that follow it are linked to the block before it. A
# block that replaces another one takes over its place.
#
# What must hold: only READY and WRITING blocks are linked, and no transient ones. If a WRITING block will replace an
# ordinary one, only the old block is linked. A tree has no circle, because no block in a circle could ever be evicted.
# `followers` is the length of the list that begins at `first`. A linked block is linked to another one only if that
# comes between the block and the one that it follows, because the gap between these two is being filled. Otherwise it
# keeps its place until the block itself, or the block before it, is removed. Blocks that followed a removed block begin
# trees of their own, because blocks behind a gap are useless until the gap is filled. Then a set or the next link() of
# the chain joins them again.


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


cdef inline bint is_between(Space *space, int32_t slot, int32_t above, Py_ssize_t *steps) noexcept nogil:
    """Returns whether ``above`` comes between a linked block and the block that it follows. Returns False if the
    ``steps`` are used up."""
    cdef int32_t top = link_at(space, slot).before
    if above == top:
        return False
    while above != top:
        steps[0] -= 1
        if steps[0] < 0 or above == slot or not record_at(space, above).linked & FOLLOWS:
            return False
        above = link_at(space, above).before
    return True


cdef inline void links_leave(Space *space, int32_t slot) noexcept nogil:
    """Takes a linked block out of the list of those that follow the same one. Does not change their flags."""
    cdef Link *link = link_at(space, slot)
    cdef Link *link_before = link_at(space, link.before)
    if link.previous == NONE:
        link_before.first = link.next
    else:
        link_at(space, link.previous).next = link.next
    if link.next != NONE:
        link_at(space, link.next).previous = link.previous
    link_before.followers -= 1


cdef inline bint links_join(Space *space, int32_t above, int32_t slot, Py_ssize_t *steps) noexcept nogil:
    """Links a block to the block ``above``. Returns False if it keeps its place or must not be linked."""
    cdef Record *record = record_at(space, slot)
    if slot == above:
        return False
    if record.linked & FOLLOWS:
        if not is_between(space, slot, above, steps):
            return False
    elif record.linked & FOLLOWED and is_above(space, slot, above, steps):
        return False
    return links_put(space, above, slot)


cdef bint links_put(Space *space, int32_t above, int32_t slot) noexcept nogil:
    """Links a block to the block ``above``, which does not come after it. Returns False if too many blocks follow
    ``above``. The block that it followed until now, if any, keeps the flag FOLLOWED."""
    cdef Record *record = record_at(space, slot)
    cdef Record *record_above = record_at(space, above)
    cdef Link *link = link_at(space, slot)
    cdef Link *link_above = link_at(space, above)
    if not record_above.linked & FOLLOWED:
        link_above.first = NONE
        link_above.followers = link_above.chosen = 0
    elif link_above.followers >= MOST_FOLLOWERS:
        return False
    if record.linked & FOLLOWS:
        links_leave(space, slot)
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
    cdef Record *record_before
    cdef int32_t follower
    if record.linked & FOLLOWED:
        follower = link.first
        while follower != NONE:
            record_at(space, follower).linked &= ~<uint8_t>FOLLOWS
            follower = link_at(space, follower).next
    if record.linked & FOLLOWS:
        links_leave(space, slot)
        record_before = record_at(space, link.before)
        if link_at(space, link.before).followers == 0:
            record_before.linked &= ~<uint8_t>FOLLOWED
            if record_before.linked & KEPT:
                policy.bared(link.before, record_before)
    record.linked = 0


cdef void links_pass_on(Space *space, Policy policy, int32_t slot, Record *record) noexcept nogil:
    """Takes a block whose write is given up out of its tree, and links the blocks that followed it to the block before
    it. Those for which there is no place begin trees of their own."""
    cdef Link *link = link_at(space, slot)
    cdef int32_t follower, following
    if record.linked & FOLLOWS and record.linked & FOLLOWED:
        follower = link.first
        while follower != NONE:
            following = link_at(space, follower).next
            links_put(space, link.before, follower)
            follower = following
        if link.followers == 0:
            record.linked &= ~<uint8_t>FOLLOWED
    links_cut(space, policy, slot, record)


cdef void links_inherit(Space *space, int32_t slot, Record *record, int32_t heir) noexcept nogil:
    """Gives the place of a block in its tree to the block that replaces it, which has no place yet."""
    cdef Link *link = link_at(space, slot)
    cdef Link *link_heir = link_at(space, heir)
    cdef uint8_t places = FOLLOWS | FOLLOWED
    cdef int32_t follower
    if record.linked & FOLLOWS:
        link_heir.before, link_heir.previous, link_heir.next = link.before, link.previous, link.next
        if link.previous == NONE:
            link_at(space, link.before).first = heir
        else:
            link_at(space, link.previous).next = heir
        if link.next != NONE:
            link_at(space, link.next).previous = heir
    if record.linked & FOLLOWED:
        link_heir.first, link_heir.followers, link_heir.chosen = link.first, link.followers, 0
        follower = link.first
        while follower != NONE:
            link_at(space, follower).before = heir
            follower = link_at(space, follower).next
    record_at(space, heir).linked |= record.linked & places
    record.linked &= ~places
