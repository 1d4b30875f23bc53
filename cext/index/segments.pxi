# The segments of an index: how they are attached and detached, their recency, and the memory of the index.


cdef inline Py_ssize_t segment_record_bytes(Blocks blocks) noexcept:
    return blocks.space.slots_per_segment * (blocks.space.stride + sizeof(Link) + blocks.policy.slot_bytes)


cdef Py_ssize_t attach_segment(Blocks blocks, bint transient) except -1:
    cdef Space *space = &blocks.space
    cdef Py_ssize_t ordinal = blocks.lowest_detached, capacity = table_capacity(&blocks.table), first, end, slot
    cdef void *memory
    while ordinal < space.ordinals and space.segment[ordinal].records != NULL:
        ordinal += 1
    first = ordinal * space.slots_per_segment
    end = first + space.slots_per_segment
    if end > MAX_SLOTS:
        raise OverflowError(f"segment {ordinal} would number slots up to {end}, at most {MAX_SLOTS}")
    while (blocks.slots + space.slots_per_segment) * 10 > capacity * 7:
        capacity *= 2
    if capacity > table_capacity(&blocks.table) and not table_resize(&blocks.table, capacity):
        raise MemoryError(f"no memory for an index table of {capacity} entries")
    if not free_reach(&blocks.unused, end) or (transient and not free_reach(&blocks.spare, end)):
        raise MemoryError(f"no memory for a bitmap of {end} slots")
    if ordinal == space.ordinals:
        memory = realloc(space.segment, (ordinal + 1) * sizeof(Segment))
        if memory == NULL:
            raise MemoryError(f"no memory for {ordinal + 1} segments")
        space.segment = <Segment *>memory
        space.segment[ordinal].records = NULL
        space.ordinals = ordinal + 1
    if posix_memalign(&memory, 64, segment_record_bytes(blocks)) != 0:
        raise MemoryError(f"no memory for the records of {space.slots_per_segment} slots")
    memset(memory, 0, segment_record_bytes(blocks))
    space.segment[ordinal].records = <char *>memory
    space.segment[ordinal].latest_pin = 0
    space.segment[ordinal].used = 0 if transient else -1
    cdef FreeSlots *unused = &blocks.spare if transient else &blocks.unused
    for slot in range(first, end):
        free_put(unused, <int32_t>slot)
    blocks.slots += space.slots_per_segment
    blocks.transient_slots += space.slots_per_segment if transient else 0
    blocks.segments += 1
    blocks.lowest_detached = ordinal + 1
    blocks.policy.resized(blocks.slots - blocks.transient_slots)
    unused.cursor = first  # the new segment is the longest run of free slots
    return ordinal


cdef Py_ssize_t first_slot(Blocks blocks, Py_ssize_t ordinal) except -1:
    if not 0 <= ordinal < blocks.space.ordinals or blocks.space.segment[ordinal].records == NULL:
        raise ValueError(f"segment {ordinal} is not attached")
    return ordinal * blocks.space.slots_per_segment


cdef Py_ssize_t detach_segment(Blocks blocks, Py_ssize_t ordinal) except -1:
    cdef Space *space = &blocks.space
    cdef Py_ssize_t first = first_slot(blocks, ordinal), slot, dropped = 0, capacity
    cdef bint transient = space.segment[ordinal].used >= 0
    cdef Record *record
    for slot in range(first, first + space.slots_per_segment):
        record = blocks.record(<int32_t>slot)
        if record.state == WRITING or record.refs != 0:
            raise ValueError(
                f"segment {ordinal} is in use: slot {slot} is {STATE_NAMES[record.state]} with {record.refs} readers"
            )
    for slot in range(first, first + space.slots_per_segment):
        record = blocks.record(<int32_t>slot)
        if record.state == READY:
            blocks.forget(<int32_t>slot, record, False)
            dropped += 1
        free_remove(&blocks.spare if transient else &blocks.unused, <int32_t>slot)
    free(space.segment[ordinal].records)
    space.segment[ordinal].records = NULL
    blocks.slots -= space.slots_per_segment
    blocks.transient_slots -= space.slots_per_segment if transient else 0
    blocks.segments -= 1
    blocks.lowest_detached = min(blocks.lowest_detached, ordinal)
    blocks.policy.resized(blocks.slots - blocks.transient_slots)
    capacity = table_capacity(&blocks.table)
    while capacity > 8 and blocks.slots * 6 < capacity:
        capacity //= 2
    if capacity < table_capacity(&blocks.table):
        table_resize(&blocks.table, capacity)  # if there is no memory for a smaller table, the larger one stays
    return dropped


cdef tuple recency_of_segment(Blocks blocks, Py_ssize_t ordinal, double now):
    cdef Py_ssize_t first = first_slot(blocks, ordinal), slot
    cdef uint64_t newest = 0
    cdef uint32_t time = blocks.advance(now)
    cdef bint busy = False
    cdef Record *record
    for slot in range(first, first + blocks.space.slots_per_segment):
        record = blocks.record(<int32_t>slot)
        if record.state == READY:
            busy = busy or is_held(&blocks.space, record, time)
            if not is_expired(&blocks.space, record):
                newest = max(newest, record.tick)
        elif record.state != FREE:
            busy = True
    return newest, busy


cdef Py_ssize_t unused_transient_segment(Blocks blocks) noexcept:
    cdef Py_ssize_t ordinal
    for ordinal in range(blocks.space.ordinals if blocks.transient_slots != 0 else 0):
        if blocks.space.segment[ordinal].records != NULL and blocks.space.segment[ordinal].used == 0:
            return ordinal
    return -1


cdef Py_ssize_t index_bytes(Blocks blocks) except -1:
    return (
        blocks.__sizeof__() + blocks.policy.__sizeof__() + blocks.policy.nbytes()
        + blocks.segments * segment_record_bytes(blocks) + blocks.space.ordinals * sizeof(Segment)
        + (blocks.unused.words + blocks.spare.words) * sizeof(uint64_t) + table_capacity(&blocks.table) * sizeof(Entry)
    )
