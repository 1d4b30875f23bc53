# Reading an index by slot number.


cdef int check_held(Blocks blocks, const int32_t *slots, Py_ssize_t n) except -1:
    cdef Py_ssize_t i
    for i in range(n):
        if slots[i] >= 0 and (not blocks.exists(slots[i]) or blocks.record(slots[i]).state == FREE):
            raise blocks.complaint(slots[i], "a block")
    return 0


cdef object column_of(Blocks blocks, slots, int field, dtype):
    """Returns one field of the record of each slot that holds a block, and 0 for negative slots."""
    cdef _Buffers held = _Buffers(2)
    cdef Py_ssize_t n = open_slots(slots, &held.views[0]), i
    held.count = 1
    cdef const int32_t *slot = <const int32_t *>held.views[0].buf
    cdef Record *record
    cdef void *out
    check_held(blocks, slot, n)
    answer = np.zeros(n, dtype)
    out = held.take(answer, PyBUF_WRITABLE, "answer").buf
    for i in range(n):
        if slot[i] < 0:
            continue
        record = blocks.record(slot[i])
        if field == CHECKSUM:
            (<uint64_t *>out)[i] = record.checksum
        elif field == TICK:
            (<uint64_t *>out)[i] = record.tick
        elif field == EXPIRES:
            (<double *>out)[i] = record.expires / 8.0
        elif field == READS:
            (<uint8_t *>out)[i] = record.reads
        else:
            (<uint8_t *>out)[i] = record.priority
    return answer


cdef object states_at(Blocks blocks, slots):
    cdef Py_buffer view, result
    cdef Py_ssize_t n = open_slots(slots, &view), i
    cdef const int32_t *slot = <const int32_t *>view.buf
    try:
        answer = np.empty(n, np.uint8)
        PyObject_GetBuffer(answer, &result, PyBUF_WRITABLE)
        for i in range(n):
            (<uint8_t *>result.buf)[i] = blocks.record(slot[i]).state if blocks.exists(slot[i]) else FREE
        PyBuffer_Release(&result)
        return answer
    finally:
        PyBuffer_Release(&view)


cdef bytes keys_at(Blocks blocks, slots):
    cdef Py_buffer view
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, n = open_slots(slots, &view), i
    cdef const int32_t *slot = <const int32_t *>view.buf
    cdef char *key
    try:
        check_held(blocks, slot, n)
        answer = PyBytes_FromStringAndSize(NULL, n * key_bytes)
        key = PyBytes_AS_STRING(answer)
        memset(key, 0, n * key_bytes)
        for i in range(n):
            if slot[i] >= 0:
                memcpy(key + i * key_bytes, record_key(blocks.record(slot[i])), key_bytes)
        return answer
    finally:
        PyBuffer_Release(&view)


cdef object slots_before(Blocks blocks, slots):
    cdef _Buffers held = _Buffers(2)
    cdef Py_ssize_t n = open_slots(slots, &held.views[0]), i
    held.count = 1
    cdef const int32_t *slot = <const int32_t *>held.views[0].buf
    cdef int32_t *out
    check_held(blocks, slot, n)
    answer = np.full(n, NONE, np.int32)
    out = <int32_t *>held.take(answer, PyBUF_WRITABLE, "answer").buf
    for i in range(n):
        if slot[i] >= 0 and blocks.record(slot[i]).linked & FOLLOWS:
            out[i] = link_at(&blocks.space, slot[i]).before
    return answer


cdef object slots_used_since(Blocks blocks, uint64_t since, bint every):
    cdef Space *space = &blocks.space
    cdef Py_buffer result
    cdef Py_ssize_t count = 0, ordinal, slot
    cdef Record *record
    answer = np.empty(blocks.ready, np.int32)
    PyObject_GetBuffer(answer, &result, PyBUF_WRITABLE)
    for ordinal in range(space.ordinals):
        if space.segment[ordinal].records == NULL or (space.segment[ordinal].used >= 0 and not every):
            continue
        for slot in range(ordinal * space.slots_per_segment, (ordinal + 1) * space.slots_per_segment):
            record = blocks.record(<int32_t>slot)
            if record.state == READY and record.tick >= since and (every or not is_expired(space, record)):
                (<int32_t *>result.buf)[count] = <int32_t>slot
                count += 1
    PyBuffer_Release(&result)
    return answer[:count]
