# Linking blocks by key (see links.pxi).


cdef Py_ssize_t link_keys(Blocks blocks, keys, before, slots, uint64_t call, offsets) except -1:
    cdef _Buffers held = _Buffers(4)
    cdef Py_buffer *view = held.views  # keys, before, slots, offsets
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, n, m, i, count = 0, steps = MOST_STEPS
    cdef const unsigned char *key
    cdef int32_t *at
    cdef int32_t *above
    cdef int32_t last = NONE
    n = open_keys(keys, key_bytes, &view[0])
    held.count = 1
    m = open_keys(before, key_bytes, &view[1])
    held.count = 2
    if m != n and m > 1:
        raise ValueError(f"{n} keys with {m} keys before them, expected none, one, or as many")
    if slots is not None:
        i = open_slots(slots, &view[2])
        held.count = 3
        if i != n:
            raise ValueError(f"{n} keys with {i} slots, expected as many")
    if offsets is not None:
        if slots is None:
            raise ValueError("offsets need the slots of the blocks that were set")
        held.take(np.ascontiguousarray(offsets, np.uint32), PyBUF_FULL_RO, "offsets")
        if view[3].len != 4 * n:
            raise ValueError(f"{n} keys with {view[3].len // 4} offsets, expected as many")
    key = <const unsigned char *>view[0].buf
    at = <int32_t *>malloc(2 * n * sizeof(int32_t) + sizeof(int32_t))
    if at == NULL:
        raise MemoryError(f"no memory to link {n} keys")
    above = at + n
    if n != 0:
        blocks.find(<const unsigned char *>view[1].buf, m, above)
    if slots is None:
        blocks.find(key, n, at)
    else:
        memcpy(at, view[2].buf, n * sizeof(int32_t))
        for i in range(n):
            if at[i] < 0 or not blocks.exists(at[i]):
                blocks.find(key + i * key_bytes, 1, &at[i])
    for i in range(n):
        if at[i] != NONE:
            kv_prefetch(link_at(&blocks.space, at[i]))
    for i in range(n):
        if i < m:
            last = blocks.placed(above[i])
        at[i] = blocks.placed(at[i])
        if at[i] == NONE:
            continue
        if last != NONE:
            count += links_join(&blocks.space, last, at[i], &steps)
        last = at[i]
        if offsets is not None and (<const int32_t *>view[2].buf)[i] == last:
            blocks.record(last).linked |= IN_CALL
            link_at(&blocks.space, last).call = call
            link_at(&blocks.space, last).offset = (<const uint32_t *>view[3].buf)[i]
    free(at)
    return count


cdef tuple links_of(Blocks blocks, slots):
    cdef Py_buffer view
    cdef Space *space = &blocks.space
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, n = open_slots(slots, &view), count = 0, i
    cdef const int32_t *slot = <const int32_t *>view.buf
    cdef int32_t follower
    cdef Record *record
    cdef char *out
    cdef char *out_before
    try:
        check_held(blocks, slot, n)
        for i in range(n):
            if slot[i] >= 0:
                record = blocks.record(slot[i])
                count += (record.linked & FOLLOWS) != 0
                if record.linked & FOLLOWED:
                    count += link_at(space, slot[i]).followers
        keys = PyBytes_FromStringAndSize(NULL, count * key_bytes)
        before = PyBytes_FromStringAndSize(NULL, count * key_bytes)
        out, out_before = PyBytes_AS_STRING(keys), PyBytes_AS_STRING(before)
        for i in range(n):
            if slot[i] < 0:
                continue
            record = blocks.record(slot[i])
            if record.linked & FOLLOWS:
                memcpy(out, record_key(record), key_bytes)
                memcpy(out_before, record_key(blocks.record(link_at(space, slot[i]).before)), key_bytes)
                out += key_bytes
                out_before += key_bytes
            follower = link_at(space, slot[i]).first if record.linked & FOLLOWED else NONE
            while follower != NONE:
                memcpy(out, record_key(blocks.record(follower)), key_bytes)
                memcpy(out_before, record_key(record), key_bytes)
                out += key_bytes
                out_before += key_bytes
                follower = link_at(space, follower).next
        return keys, before
    finally:
        PyBuffer_Release(&view)
