# Linking of blocks by key: see links.pxi.


cdef Py_ssize_t link_keys(Blocks blocks, keys, before) except -1:
    cdef Py_buffer view, before_view
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, n = open_keys(keys, key_bytes, &view), m, i
    cdef Py_ssize_t count = 0, steps = MOST_STEPS
    cdef int32_t *slots = <int32_t *>malloc(2 * n * sizeof(int32_t) + 4)
    cdef int32_t *above
    cdef int32_t slot, last = NONE
    try:
        m = open_keys(before, key_bytes, &before_view)
        try:
            if m != n and m > 1:
                raise ValueError(f"{n} keys with {m} keys before them, expected none, one, or as many")
            if slots == NULL:
                raise MemoryError(f"no memory to link {n} keys")
            above = slots + n
            if n != 0 and m != 0:
                blocks.find(<const unsigned char *>before_view.buf, m, above)
            blocks.find(<const unsigned char *>view.buf, n, slots)
            for i in range(n):
                if i < m:
                    last = blocks.readable(above[i])
                slot = blocks.readable(slots[i])
                if slot == NONE:
                    continue
                if last != NONE:
                    count += links_join(&blocks.space, last, slot, &steps)
                last = slot
            return count
        finally:
            PyBuffer_Release(&before_view)
    finally:
        free(slots)
        PyBuffer_Release(&view)


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
