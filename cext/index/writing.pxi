# Adding blocks to an index: they are reserved and then committed or aborted, or restored from a recovered index.


cdef object reserve_keys(Blocks blocks, keys, bint force, uint64_t tick, priorities, int reads):
    cdef Py_buffer view, result
    cdef _Buffers held = _Buffers(1)
    cdef const uint8_t *each
    cdef uint8_t priority = 0
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, n = open_keys(keys, key_bytes, &view), i
    cdef const unsigned char *key = <const unsigned char *>view.buf
    cdef Batch batch
    cdef Entry *entry
    cdef int32_t *out
    cdef int32_t slot, old
    cdef FreeSlots *unused = &blocks.spare if reads != 0 else &blocks.unused
    if not 0 <= reads <= MOST_READS or (force and reads != 0):
        raise ValueError(f"reads is {reads}, expected 0 to {MOST_READS}, and 0 with force")
    memset(&batch, 0, sizeof(Batch))
    try:
        each = open_priorities(held, priorities, n, &priority)
        open_batch(&batch, n)
        answer = np.empty(n, np.int32)
        PyObject_GetBuffer(answer, &result, PyBUF_WRITABLE)
        out = <int32_t *>result.buf
        for i in range(n):
            batch.hashes[i] = table_hash(&blocks.table, key + i * key_bytes)
            kv_prefetch(&blocks.table.entries[batch.hashes[i] & blocks.table.mask])
        for i in range(n):
            if not is_first(&batch, key, key_bytes, i):
                out[i] = DUPLICATE
                continue
            entry = blocks.look_up(key + i * key_bytes, batch.hashes[i])
            old = NONE
            if entry != NULL:
                old = blocks.readable(entry.slot)
                if old != entry.slot or not (force or (reads == 0 and is_passing(blocks, entry))):
                    out[i] = EXISTED if old == NONE else FOUND - old
                    continue
            slot = free_take(unused)
            if slot == NONE:
                out[i] = NO_SPACE
                continue
            if entry == NULL:
                table_insert(&blocks.table, batch.hashes[i], slot)
            else:
                entry.slot = slot
            if each != NULL:
                priority = each[i]
            blocks.fill(slot, WRITING, key + i * key_bytes, batch.hashes[i], priority, <uint8_t>reads)
            blocks.record(slot).older = old
            blocks.writing += 1
            out[i] = slot
        for i in range(n):
            batch.heads[i] = NONE
            if out[i] <= FOUND:
                batch.heads[i] = FOUND - out[i]
                out[i] = EXISTED
            elif out[i] >= 0:
                batch.heads[i] = blocks.record(out[i]).older
        blocks.touch(batch.heads, n, n, tick)
        PyBuffer_Release(&result)
        return answer
    finally:
        free(batch.heads)
        PyBuffer_Release(&view)


cdef int choose(Blocks blocks, const int32_t *slots, Py_ssize_t n) except -1:
    """Marks the WRITING slots CHOSEN. If one of the slots is not WRITING, raises ValueError and marks none."""
    cdef Py_ssize_t i, j
    for i in range(n):
        if slots[i] < 0:
            continue
        if not blocks.exists(slots[i]) or blocks.record(slots[i]).state != WRITING:
            error = blocks.complaint(slots[i], "writing")
            for j in range(i):
                if slots[j] >= 0:
                    blocks.record(slots[j]).state = WRITING
            raise error
        blocks.record(slots[i]).state = CHOSEN
    return 0


cdef Py_ssize_t commit_slots(
    Blocks blocks, slots, sums, uint64_t tick, expires, parent, bint ends_chain, bint behind
) except -1:
    cdef _Buffers held = _Buffers(1)
    cdef const double *each
    cdef double same = 0
    cdef Py_buffer view, sums_view
    cdef int32_t before = slot_of(blocks, parent, "parent", 0)
    cdef Py_ssize_t n = open_slots(slots, &view), count = 0, i, m
    cdef const int32_t *slot = <const int32_t *>view.buf
    cdef Record *record
    cdef Record *replaced
    cdef uint32_t until
    cdef bint transient = False
    if before != NONE and (blocks.record(before).state != READY or blocks.record(before).reads != 0):
        before = NONE
    try:
        m = open_sums(sums, &sums_view, "sums")
        try:
            if m != n:
                raise ValueError(f"{n} slots with {m} sums, expected as many")
            each = open_times(held, expires, n, &same, "expires")
            until = eighths_up(same)
            choose(blocks, slot, n)
            for i in range(n - 1, -1, -1):
                if slot[i] < 0:
                    continue
                record = blocks.record(slot[i])
                if each != NULL:
                    until = eighths_up(each[i])
                if record.older != NONE:
                    replaced = blocks.record(record.older)
                    blocks.pin(slot[i], replaced.pin_until)
                    if replaced.linked:
                        links_inherit(&blocks.space, record.older, replaced, slot[i])
                    blocks.retire(record.older, replaced, False)
                record.state = READY
                record.checksum = (<const uint64_t *>sums_view.buf)[i]
                record.rank = <uint32_t>(n - 1 - i)
                record.tick = tick + record.rank
                record.expires = until
                blocks.expiring += until != 0
                count += 1
                if record.reads != 0:
                    transient = True
                    blocks.soonest = min(blocks.soonest, until)
            if transient:  # all blocks are transient, because one call has reserved them
                blocks.transient += count
            else:
                blocks.policy.inserted(slot, n, before, ends_chain, behind)
            blocks.writing -= count
            blocks.ready += count
            return count
        finally:
            PyBuffer_Release(&sums_view)
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t renew_keys(Blocks blocks, keys, int reads, double now, double expires) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, n = open_keys(keys, key_bytes, &view), count = 0, i
    cdef int32_t slot
    cdef Record *record
    try:
        if not 1 <= reads <= MOST_READS:
            raise ValueError(f"reads is {reads}, expected 1 to {MOST_READS}")
        blocks.advance(now)
        for i in range(n):
            blocks.find(<const unsigned char *>view.buf + i * key_bytes, 1, &slot)
            slot = blocks.readable(slot)
            if slot != NONE and blocks.record(slot).reads != 0:
                record = blocks.record(slot)
                record.reads = <uint8_t>max(<int>record.reads, reads)
                record.expires = max(record.expires, eighths_up(expires))
                count += 1
        return count
    finally:
        PyBuffer_Release(&view)


cdef bytes set_expiry_keys(Blocks blocks, keys, double now, double expires):
    cdef Py_buffer view
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, n = open_keys(keys, key_bytes, &view), i
    cdef int32_t slot
    cdef uint32_t until
    cdef Record *record
    cdef bytearray there
    try:
        there = bytearray(n)
        until = eighths_up(expires)
        blocks.advance(now)
        for i in range(n):
            blocks.find(<const unsigned char *>view.buf + i * key_bytes, 1, &slot)
            slot = blocks.readable(slot)
            if slot == NONE or blocks.record(slot).reads != 0:
                continue
            record = blocks.record(slot)
            blocks.expiring += (until != 0) - (record.expires != 0)
            record.expires = until
            there[i] = 1
        return bytes(there)
    finally:
        PyBuffer_Release(&view)


cdef void unname(Blocks blocks, int32_t slot, Record *record) noexcept nogil:
    """Takes a WRITING slot out of the table and out of its chain. A block that it would have replaced returns to the
    table."""
    cdef Entry *entry = table_find_slot(&blocks.table, &blocks.space, slot, record.hash)
    if record.linked:
        links_pass_on(&blocks.space, blocks.policy, slot, record)
    if record.older != NONE:
        entry.slot = record.older
    else:
        table_remove(&blocks.table, entry)
    blocks.writing -= 1


cdef Py_ssize_t disown_slots(Blocks blocks, slots) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t n = open_slots(slots, &view), count = 0, i
    cdef const int32_t *slot = <const int32_t *>view.buf
    cdef Record *record
    try:
        for i in range(n):
            if slot[i] < 0 or not blocks.exists(slot[i]) or blocks.record(slot[i]).state != WRITING:
                continue
            record = blocks.record(slot[i])
            unname(blocks, slot[i], record)
            record.state = GONE
            record.refs = 1
            blocks.gone += 1
            count += 1
        return count
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t abort_slots(Blocks blocks, slots) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t n = open_slots(slots, &view), count = 0, i
    cdef const int32_t *slot = <const int32_t *>view.buf
    cdef Record *record
    try:
        choose(blocks, slot, n)
        for i in range(n):
            if slot[i] >= 0:
                record = blocks.record(slot[i])
                unname(blocks, slot[i], record)
                blocks.put_free(slot[i], record)
                count += 1
        return count
    finally:
        PyBuffer_Release(&view)


cdef object restore_blocks(Blocks blocks, keys, slots, sums, ticks, expires, priorities):
    cdef Py_ssize_t key_bytes = blocks.table.key_bytes, n, i
    cdef const unsigned char *key
    cdef uint32_t hash
    cdef int32_t slot
    cdef int32_t *out
    cdef Record *record
    cdef _Buffers held = _Buffers(7)
    cdef Py_buffer *view = held.views  # keys, slots, sums, ticks, expires, priorities
    n = open_keys(keys, key_bytes, &view[0])
    held.count = 1
    expires = np.ascontiguousarray(expires, np.float64)
    priorities = np.asarray(priorities)
    if priorities.size and not 0 <= priorities.min() <= priorities.max() < PRIORITIES:
        raise ValueError(
            f"priorities range from {priorities.min()} to {priorities.max()}, expected 0 to {PRIORITIES - 1}"
        )
    priorities = np.ascontiguousarray(priorities, np.uint8)
    open_slots(slots, &view[1])
    held.count = 2
    open_sums(sums, &view[2], "sums")
    held.count = 3
    open_sums(ticks, &view[3], "ticks")
    held.count = 4
    held.take(expires, PyBUF_FULL_RO, "expires")
    held.take(priorities, PyBUF_FULL_RO, "priorities")
    for i in range(1, 6):
        if view[i].ndim != 1 or view[i].shape[0] != n:
            raise ValueError(f"{n} keys with {view[i].len // view[i].itemsize} {COLUMNS[i - 1]}, expected as many")
    answer = np.full(n, NONE, np.int32)
    out = <int32_t *>held.take(answer, PyBUF_WRITABLE, "answer").buf
    for i in range(n):
        key = <const unsigned char *>view[0].buf + i * key_bytes
        slot = (<const int32_t *>view[1].buf)[i]
        hash = table_hash(&blocks.table, key)
        if not blocks.exists(slot) or blocks.record(slot).state != FREE or blocks.look_up(key, hash) != NULL:
            continue
        if blocks.space.segment[segment_of(&blocks.space, slot)].used >= 0:
            continue
        free_remove(&blocks.unused, slot)
        table_insert(&blocks.table, hash, slot)
        blocks.fill(slot, READY, key, hash, (<const uint8_t *>view[5].buf)[i], 0)
        record = blocks.record(slot)
        record.checksum = (<const uint64_t *>view[2].buf)[i]
        record.tick = (<const uint64_t *>view[3].buf)[i]
        record.expires = eighths_up((<const double *>view[4].buf)[i])
        blocks.ready += 1
        blocks.expiring += record.expires != 0
        blocks.policy.restored(slot)
        out[i] = slot
    return answer
