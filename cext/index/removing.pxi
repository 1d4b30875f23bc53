# Removal of blocks from an index: deletion, expiry, and eviction by the policy's choice.


cdef Py_ssize_t delete_keys(Blocks blocks, keys) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, n = open_keys(keys, key_bytes, &view), i, count = 0
    cdef int32_t slot
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


cdef Py_ssize_t evict_blocks(Blocks blocks, Py_ssize_t n, double now, bytearray keys) except -1:
    cdef uint32_t time = blocks.advance(now)
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, count = 0, before = 0
    cdef int32_t slot
    cdef Record *record
    n = min(n, blocks.ready)
    if keys is not None:
        before = len(keys)
        PyByteArray_Resize(keys, before + max(n, 0) * key_bytes)
    blocks.policy.start(time)
    while count < n:
        slot = blocks.policy.next()
        if slot == NONE:
            break
        record = blocks.record(slot)
        if keys is not None:
            memcpy(PyByteArray_AS_STRING(keys) + before + count * key_bytes, record_key(record), key_bytes)
        blocks.forget(slot, record, not is_expired(&blocks.space, record))
        count += 1
    if keys is not None:
        PyByteArray_Resize(keys, before + count * key_bytes)
    return count


cdef object next_victims(Blocks blocks, Py_ssize_t n, double now):
    cdef uint32_t time = blocks.advance(now)
    cdef Py_buffer result
    cdef Py_ssize_t count = 0
    cdef int32_t slot
    n = max(min(n, blocks.ready), 0)
    answer = np.empty(n, np.int32)
    PyObject_GetBuffer(answer, &result, PyBUF_WRITABLE)
    blocks.policy.start(time)
    while count < n:
        slot = blocks.policy.next()
        if slot == NONE:
            break
        if not is_expired(&blocks.space, blocks.record(slot)):
            (<int32_t *>result.buf)[count] = slot
            count += 1
    PyBuffer_Release(&result)
    return answer[:count]
