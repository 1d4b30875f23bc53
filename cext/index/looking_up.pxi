# Look-ups by key, which touch and pin the blocks that they find, and the references of readers.


cdef inline void use(
    Blocks blocks, int32_t *slots, Py_ssize_t n, Py_ssize_t batch, double now, bint refresh, uint64_t tick,
    double pin_until,
) noexcept nogil:
    """Pins and touches the first n slots of a batch, like `Blocks.pin` and `touch`, in one pass over their records."""
    cdef uint32_t until = eighths_up(pin_until) if pin_until > now else 0
    cdef Py_ssize_t i
    cdef int32_t slot
    cdef Record *record
    for i in range(n - 1, -1, -1):
        slot = slots[i]
        if slot == NONE:
            continue
        record = blocks.record(slot)
        if record.state != READY and record.older != NONE:
            slots[i] = slot = record.older
            record = blocks.record(slot)
        if until != 0:
            blocks.pin(slot, until)
        if record.state != READY:
            slots[i] = NONE
        elif refresh:
            record.rank = <uint32_t>(batch - 1 - i)
            record.tick = tick + record.rank
    if refresh:
        blocks.touched(slots, n)


cdef bytes present_keys(Blocks blocks, keys, double now, bint refresh, uint64_t tick, double pin_until):
    cdef Py_buffer view
    cdef Py_ssize_t n = open_keys(keys, blocks.table.key_bytes, &view), i
    cdef int32_t *slots = <int32_t *>malloc(n * sizeof(int32_t) + 1)
    cdef char *present
    try:
        if slots == NULL:
            raise MemoryError(f"no memory to look {n} keys up")
        blocks.advance(now)
        answer = PyBytes_FromStringAndSize(NULL, n)
        present = PyBytes_AS_STRING(answer)
        blocks.find(<const unsigned char *>view.buf, n, slots)
        for i in range(n):
            present[i] = slots[i] != NONE
        if refresh or pin_until > now:
            use(blocks, slots, n, n, now, refresh, tick, pin_until)
        return answer
    finally:
        free(slots)
        PyBuffer_Release(&view)


cdef Py_ssize_t leading_run(
    Blocks blocks, keys, double now, bint refresh, uint64_t tick, double pin_until
) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t n = open_keys(keys, blocks.table.key_bytes, &view), i = 0, base = 0, count
    cdef const unsigned char *key = <const unsigned char *>view.buf
    cdef int32_t *slots = <int32_t *>malloc(n * sizeof(int32_t) + 1)
    try:
        if slots == NULL:
            raise MemoryError(f"no memory to look {n} keys up")
        blocks.advance(now)
        while i == base and base < n:
            count = min(n - base, base + LOOKAHEAD)  # batches double: the look-ups after a miss at most double the cost
            blocks.find(key + base * blocks.table.key_bytes, count, slots + base)
            base += count
            while i < base and slots[i] != NONE:
                i += 1
        if refresh or pin_until > now:
            use(blocks, slots, i, n, now, refresh, tick, pin_until)
        return i
    finally:
        free(slots)
        PyBuffer_Release(&view)


cdef Py_ssize_t count_missing(Blocks blocks, keys, int reads) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, n = open_keys(keys, key_bytes, &view), i, count = 0
    cdef const unsigned char *key = <const unsigned char *>view.buf
    cdef Batch batch
    cdef Entry *entry
    memset(&batch, 0, sizeof(Batch))
    try:
        open_batch(&batch, n)
        for i in range(n):
            batch.hashes[i] = table_hash(&blocks.table, key + i * key_bytes)
            kv_prefetch(&blocks.table.entries[batch.hashes[i] & blocks.table.mask])
        for i in range(n):
            entry = blocks.look_up(key + i * key_bytes, batch.hashes[i])
            if entry == NULL or (reads == 0 and is_passing(blocks, entry)):
                count += is_first(&batch, key, key_bytes, i)
        return count
    finally:
        free(batch.heads)
        PyBuffer_Release(&view)


cdef inline bint is_passing(Blocks blocks, Entry *entry) noexcept nogil:
    """Returns whether the entry belongs to a READY transient block that no write will replace yet."""
    return blocks.transient != 0 and blocks.record(entry.slot).reads != 0 and blocks.record(entry.slot).state == READY


cdef int32_t slot_of(Blocks blocks, key, str name, Py_ssize_t least) except -2:
    """Returns the slot of one key in the table, or NONE. If ``least`` is 0, ``key`` may be empty, which gives NONE."""
    cdef Py_buffer view
    cdef Py_ssize_t n = open_keys(key, blocks.table.key_bytes, &view)
    cdef int32_t slot = NONE
    try:
        if not least <= n <= 1:
            raise ValueError(
                f"{name} is {n} keys of key_bytes={blocks.table.key_bytes}, expected one{'' if least else ' or none'}"
            )
        if n == 1:
            blocks.find(<const unsigned char *>view.buf, 1, &slot)
        return slot
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t count_pinned(Blocks blocks, double now) noexcept:
    cdef Space *space = &blocks.space
    cdef Py_ssize_t ordinal, i, count = 0
    cdef uint32_t time = blocks.advance(now)
    cdef Record *record
    for ordinal in range(space.ordinals):
        if space.segment[ordinal].records == NULL or space.segment[ordinal].latest_pin <= time:
            continue
        for i in range(space.slots_per_segment):
            record = <Record *>(space.segment[ordinal].records + i * space.stride)
            count += record.state == READY and record.pin_until > time and not is_expired(space, record)
    return count


# -- readers ---------------------------------------------------------------------------------------------------------


cdef object acquire_keys(Blocks blocks, keys, double now, uint64_t tick, bint refresh, bint reading):
    cdef Py_buffer view, result
    cdef Py_ssize_t n = open_keys(keys, blocks.table.key_bytes, &view), i
    cdef int32_t *out
    cdef int32_t slot
    cdef Record *record
    try:
        answer = np.empty(n, np.int32)
        PyObject_GetBuffer(answer, &result, PyBUF_WRITABLE)
        out = <int32_t *>result.buf
        blocks.advance(now)
        blocks.find(<const unsigned char *>view.buf, n, out)
        for i in range(n):
            slot = blocks.readable(out[i])
            if slot != NONE:
                record = blocks.record(slot)
                if reading and record.reads != 0 and record.refs >= record.reads:
                    out[i] = ABSENT
                    continue
                record.refs += 1
                out[i] = slot
            elif out[i] != NONE:
                out[i] = COMING
        if refresh:
            blocks.touch(out, n, n, tick)
        PyBuffer_Release(&result)
        return answer
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t acquire_slots(Blocks blocks, slots) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t n = open_slots(np.atleast_1d(slots), &view), count = 0, i
    cdef const int32_t *slot = <const int32_t *>view.buf
    try:
        for i in range(n):
            if slot[i] >= 0 and not (blocks.exists(slot[i]) and blocks.record(slot[i]).state >= READY):
                raise blocks.complaint(slot[i], "ready")
        for i in range(n):
            if slot[i] >= 0:
                blocks.record(slot[i]).refs += 1
                count += 1
        return count
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t release_slots(Blocks blocks, slots, bint read) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t n = open_slots(slots, &view), count = 0, i, j
    cdef const int32_t *slot = <const int32_t *>view.buf
    cdef Record *record
    try:
        for i in range(n):
            if slot[i] < 0:
                continue
            if not blocks.exists(slot[i]) or blocks.record(slot[i]).refs == 0:
                error = blocks.complaint(slot[i], "one more reader")
                for j in range(i):
                    if slot[j] >= 0:
                        blocks.record(slot[j]).refs += 1
                raise error
            blocks.record(slot[i]).refs -= 1
        for i in range(n):
            if slot[i] < 0:
                continue
            record = blocks.record(slot[i])
            if read and record.reads != 0 and record.state == READY:
                if record.reads > 1:
                    record.reads -= 1
                else:
                    count += blocks.forget(slot[i], record, False)
                continue
            if record.state == GONE and record.refs == 0:
                blocks.put_free(slot[i], record)
                blocks.gone -= 1
                count += 1
        return count
    finally:
        PyBuffer_Release(&view)
