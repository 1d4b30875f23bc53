# The removal of blocks from an index: deletion, expiry, and eviction by the policy's choice.


cdef Py_ssize_t delete_keys(Blocks blocks, keys, double now) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, n = open_keys(keys, key_bytes, &view), i, count = 0
    cdef int32_t slot
    blocks.advance(now)
    try:
        for i in range(n):
            blocks.find(<const unsigned char *>view.buf + i * key_bytes, 1, &slot)
            slot = blocks.readable(slot)
            if slot != NONE:
                blocks.forget(slot, blocks.record(slot), False)
                count += 1
        return count
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t drop_slots(Blocks blocks, slots) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t n = open_slots(slots, &view), i, count = 0
    cdef const int32_t *slot = <const int32_t *>view.buf
    try:
        for i in range(n):
            if slot[i] >= blocks.space.ordinals * blocks.space.slots_per_segment:
                raise blocks.complaint(slot[i], "ready")
        for i in range(n):
            if blocks.exists(slot[i]) and blocks.record(slot[i]).state == READY:
                blocks.forget(slot[i], blocks.record(slot[i]), False)
                count += 1
        return count
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t delete_all(Blocks blocks) noexcept:
    cdef Py_ssize_t count = blocks.ready
    cdef int32_t slot = blocks.policy.oldest()
    while slot != NONE:
        blocks.forget(slot, blocks.record(slot), False)
        slot = blocks.policy.oldest()
    drop_transient(blocks, True)
    return count


cdef Py_ssize_t drop_transient(Blocks blocks, bint every) noexcept:
    """Drops transient blocks, either expired ones or all. Returns their number. Takes O(slots of their
    segments)."""
    cdef Space *space = &blocks.space
    cdef Py_ssize_t count = 0, ordinal, i
    cdef int32_t slot
    cdef Record *record
    blocks.soonest = 0xFFFFFFFF
    for ordinal in range(space.ordinals):
        if space.segment[ordinal].records == NULL or space.segment[ordinal].used <= 0:
            continue
        for i in range(space.slots_per_segment):
            slot = <int32_t>(ordinal * space.slots_per_segment + i)
            record = blocks.record(slot)
            if record.state != READY:
                continue
            if is_expired(space, record):
                blocks.lapse(slot, record)
            elif every:
                blocks.forget(slot, record, False)
            else:
                blocks.soonest = min(blocks.soonest, record.expires)
                continue
            count += 1
    return count


# -- expiry ----------------------------------------------------------------------------------------------------------


cdef bytes lapsed_keys(Blocks blocks):
    keys = PyBytes_FromStringAndSize(<char *>blocks.lapsed, blocks.lapsed_count * blocks.table.key_bytes)
    blocks.lapsed_count = blocks.lapsed_capacity = 0
    free(blocks.lapsed)
    blocks.lapsed = NULL
    return keys


cdef Py_ssize_t drop_expired(Blocks blocks, double now, Py_ssize_t limit) noexcept:
    cdef Space *space = &blocks.space
    cdef Py_ssize_t count = 0, ordinal, passed = 0, end = space.ordinals * space.slots_per_segment
    cdef Record *record
    blocks.advance(now)
    while limit > 0 and blocks.expiring > 0 and passed < end:
        if blocks.hand >= end:
            blocks.hand = 0
        ordinal = blocks.hand // space.slots_per_segment
        if space.segment[ordinal].records == NULL:
            passed += space.slots_per_segment
            blocks.hand = (ordinal + 1) * space.slots_per_segment
            continue
        record = blocks.record(<int32_t>blocks.hand)
        if record.state == READY and is_expired(space, record):
            blocks.lapse(<int32_t>blocks.hand, record)
            count += 1
        blocks.hand += 1
        passed += 1
        limit -= 1
    return count


# -- eviction --------------------------------------------------------------------------------------------------------


cdef inline int32_t next_victim(Blocks blocks, int32_t bared, uint32_t time) noexcept nogil:
    """Returns the next block to evict, or NONE at the end. ``bared``: a block that a walk passed because others
    followed it, but that no block follows any more, or NONE if there is no such block."""
    cdef Record *record
    cdef Link *link
    cdef int32_t slot = bared
    if slot != NONE and not is_held(&blocks.space, blocks.record(slot), time):
        return slot
    while True:
        slot = blocks.policy.next()
        if slot == NONE:
            return NONE
        record = blocks.record(slot)
        if record.newer != NONE:  # the block that is probably the next one
            kv_prefetch(link_at(&blocks.space, record.newer))
        if not record.linked & FOLLOWED or is_expired(&blocks.space, record):
            return slot
        link = link_at(&blocks.space, slot)
        if link.chosen == link.followers:
            return slot
        blocks.policy.kept(slot, record)


cdef int32_t next_buried(Blocks blocks, uint32_t time, Py_ssize_t *steps) noexcept nogil:
    """Returns the next block to evict if all blocks that end a chain are held. It is the last block of its chain that
    can be evicted, and only held blocks follow it. Returns NONE if there is no such block, or if the ``steps`` are used
    up."""
    cdef int priority
    cdef int32_t top, slot, deepest
    for priority in range(PRIORITIES):
        top = blocks.policy.first_kept(priority)
        while top != NONE:
            slot, deepest = top, NONE
            while True:
                steps[0] -= 1
                if steps[0] < 0:
                    return NONE
                if slot == blocks.guarded:
                    deepest = NONE
                    break
                if not is_held(&blocks.space, blocks.record(slot), time):
                    deepest = slot
                if not blocks.record(slot).linked & FOLLOWED:
                    break
                slot = link_at(&blocks.space, slot).first
            if deepest != NONE:
                return deepest
            top = blocks.record(top).newer
    return NONE


cdef tuple cut_at(Blocks blocks, Link *link, int32_t before):
    cdef bytes key = b""
    if before != NONE:
        key = PyBytes_FromStringAndSize(<char *>record_key(blocks.record(before)), blocks.table.key_bytes)
    return link.call, link.offset, key


cdef tuple cut_chain(Blocks blocks, keys, uint64_t call, uint32_t offset, double now, Py_ssize_t limit):
    cdef Space *space = &blocks.space
    cdef uint32_t time = blocks.advance(now)
    cdef Py_ssize_t count = 0, steps = MOST_STEPS
    cdef int32_t slot = blocks.placed(slot_of(blocks, keys, "key", 1)), top = NONE, last = slot, below
    cdef Record *record
    cdef Link *link
    while slot != NONE and steps > 0:
        record, link = blocks.record(slot), link_at(space, slot)
        if not record.linked & IN_CALL or link.call != call or link.offset < offset:
            break
        steps -= 1
        top = slot
        slot = link.before if record.linked & FOLLOWS else NONE
    slot = top
    steps = MOST_STEPS + limit
    while slot != NONE and count < limit and steps > 0:
        record, link = blocks.record(slot), link_at(space, slot)
        steps -= 1
        if record.linked & FOLLOWED:
            slot = link.first
            continue
        if is_held(space, record, time):
            break
        below, slot = slot, NONE if slot == top else link.before
        if below == last:  # the last remaining block of the call is the one before it
            last = link.before if record.linked & FOLLOWS else NONE
        blocks.forget(below, record, True)
        count += 1
    if last == NONE:
        return count, b""
    return count, PyBytes_FromStringAndSize(<char *>record_key(blocks.record(last)), blocks.table.key_bytes)


cdef Py_ssize_t evict_blocks(Blocks blocks, Py_ssize_t n, double now, bytearray keys, list cuts) except -1:
    cdef uint32_t time = blocks.advance(now)
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, count = 0, start = 0, steps = MOST_STEPS
    cdef int32_t slot, before, bared = NONE
    cdef Record *record
    n = min(n, blocks.ready)
    if keys is not None:
        start = len(keys)
        PyByteArray_Resize(keys, start + max(n, 0) * key_bytes)
    blocks.policy.start(time)
    while count < n:
        slot = next_victim(blocks, bared, time)
        if slot == NONE:
            slot = next_buried(blocks, time, &steps)
        if slot == NONE:
            break
        record = blocks.record(slot)
        if keys is not None:
            memcpy(PyByteArray_AS_STRING(keys) + start + count * key_bytes, record_key(record), key_bytes)
        before = link_at(&blocks.space, slot).before if record.linked & FOLLOWS else NONE
        if cuts is not None and record.linked & IN_CALL:
            found = cut_at(blocks, link_at(&blocks.space, slot), before)
            if not cuts or cuts[len(cuts) - 1][0] != found[0]:
                cuts.append(found)
            elif found[1] < cuts[len(cuts) - 1][1]:  # the usual case, because the tail goes first
                cuts[len(cuts) - 1] = found
        if before != NONE and not blocks.record(before).linked & KEPT:
            before = NONE
        blocks.forget(slot, record, not is_expired(&blocks.space, record))
        bared = NONE if before == NONE or blocks.record(before).linked & FOLLOWED else before
        count += 1
    if keys is not None:
        PyByteArray_Resize(keys, start + count * key_bytes)
    return count


cdef object next_victims(Blocks blocks, Py_ssize_t n, double now):
    cdef uint32_t time = blocks.advance(now)
    cdef Py_buffer result
    cdef Py_ssize_t count = 0, i
    cdef int32_t slot, before, bared = NONE
    cdef int32_t *out
    cdef Link *link
    cdef Record *record
    n = max(min(n, blocks.ready), 0)
    answer = np.empty(n, np.int32)
    PyObject_GetBuffer(answer, &result, PyBUF_WRITABLE)
    out = <int32_t *>result.buf
    blocks.policy.start(time)
    while count < n:
        slot = next_victim(blocks, bared, time)
        if slot == NONE:
            break
        bared = NONE
        record = blocks.record(slot)
        if is_expired(&blocks.space, record):
            continue
        out[count] = slot
        count += 1
        if record.linked & FOLLOWS:  # treat this block as gone: the one before it may be next
            before = link_at(&blocks.space, slot).before
            link = link_at(&blocks.space, before)
            link.chosen += 1
            if link.chosen == link.followers and blocks.record(before).linked & KEPT:
                bared = before
    for i in range(count):
        if blocks.record(out[i]).linked & FOLLOWS:
            link_at(&blocks.space, link_at(&blocks.space, out[i]).before).chosen = 0
    PyBuffer_Release(&result)
    return answer[:count]
