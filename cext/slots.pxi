# What is asked of an index by slot number: readers' references, what a slot holds, and the end of blocks.


cdef class _Slots(_Segments):
    """The part of an index that is given slots."""

    cdef Py_ssize_t hand     # of the sweep for what has expired

    def acquire_slot(self, slots) -> int:
        """Takes one more reference on slots (one, or many) that are READY or still read; returns how many."""
        cdef Py_buffer view
        cdef Py_ssize_t n = open_slots(_numpy.atleast_1d(slots), &view), count = 0, i
        cdef const int32_t *slot = <const int32_t *>view.buf
        try:
            for i in range(n):
                if slot[i] >= 0 and not (self.exists(slot[i]) and self.record(slot[i]).state >= READY):
                    raise self.complaint(slot[i], "ready")
            for i in range(n):
                if slot[i] >= 0:
                    self.record(slot[i]).refs += 1
                    count += 1
            return count
        finally:
            PyBuffer_Release(&view)

    def release(self, slots) -> int:
        """Gives references back, negative slots skipped; returns how many slots that freed.

        ValueError names a slot released more often than it was acquired, and then nothing is released.
        """
        cdef Py_buffer view
        cdef Py_ssize_t n = open_slots(slots, &view), count = 0, i, j
        cdef const int32_t *slot = <const int32_t *>view.buf
        cdef Record *record
        try:
            for i in range(n):
                if slot[i] < 0:
                    continue
                if not self.exists(slot[i]) or self.record(slot[i]).refs == 0:
                    error = self.complaint(slot[i], "one more reader")
                    for j in range(i):
                        if slot[j] >= 0:
                            self.record(slot[j]).refs += 1
                    raise error
                self.record(slot[i]).refs -= 1
            for i in range(n):
                if slot[i] < 0:
                    continue
                record = self.record(slot[i])
                if record.state == GONE and record.refs == 0:
                    self.put_free(slot[i], record)
                    self.gone -= 1
                    count += 1
            return count
        finally:
            PyBuffer_Release(&view)

    @cython.final
    cdef int check_held(self, const int32_t *slots, Py_ssize_t n) except -1:
        cdef Py_ssize_t i
        for i in range(n):
            if slots[i] >= 0 and (not self.exists(slots[i]) or self.record(slots[i]).state == FREE):
                raise self.complaint(slots[i], "a block")
        return 0

    @cython.final
    cdef object column(self, slots, int field, dtype):
        """One field of the record of each slot that holds a block; 0 for negative slots."""
        cdef _Buffers held = _Buffers(2)
        cdef Py_ssize_t n = open_slots(slots, &held.views[0]), i
        held.count = 1
        cdef const int32_t *slot = <const int32_t *>held.views[0].buf
        cdef Record *record
        cdef void *out
        self.check_held(slot, n)
        answer = _numpy.zeros(n, dtype)
        out = held.take(answer, PyBUF_WRITABLE, "answer").buf
        for i in range(n):
            if slot[i] < 0:
                continue
            record = self.record(slot[i])
            if field == CHECKSUM:
                (<uint64_t *>out)[i] = record.checksum
            elif field == TICK:
                (<uint64_t *>out)[i] = record.tick
            elif field == EXPIRES:
                (<double *>out)[i] = record.expires / 8.0
            else:
                (<uint8_t *>out)[i] = record.priority
        return answer

    def checksums(self, slots):
        """The checksum of each slot that holds a block, uint64; 0 for negative slots and those being written."""
        return self.column(slots, CHECKSUM, _numpy.uint64)

    def ticks_of(self, slots):
        """The tick of each slot that holds a block, uint64; 0 for negative slots and those being written."""
        return self.column(slots, TICK, _numpy.uint64)

    def expires_of(self, slots):
        """When the block of each slot expires, float64; 0: never, a negative slot, or being written."""
        return self.column(slots, EXPIRES, _numpy.float64)

    def priorities_of(self, slots):
        """The priority of each slot that holds a block, uint8; 0 for negative slots."""
        return self.column(slots, PRIORITY, _numpy.uint8)

    def states_of(self, slots):
        """The state of each slot, uint8: FREE, WRITING, READY or GONE; FREE for slots that do not exist."""
        cdef Py_buffer view, result
        cdef Py_ssize_t n = open_slots(slots, &view), i
        cdef const int32_t *slot = <const int32_t *>view.buf
        try:
            answer = _numpy.empty(n, _numpy.uint8)
            PyObject_GetBuffer(answer, &result, PyBUF_WRITABLE)
            for i in range(n):
                (<uint8_t *>result.buf)[i] = self.record(slot[i]).state if self.exists(slot[i]) else FREE
            PyBuffer_Release(&result)
            return answer
        finally:
            PyBuffer_Release(&view)

    def ready_slots(self, uint64_t since=0):
        """The READY slots, int32, ascending, whose tick is at least ``since``; none that has expired."""
        cdef Py_buffer result
        cdef Py_ssize_t count = 0, ordinal, slot
        cdef Record *record
        answer = _numpy.empty(self.ready, _numpy.int32)
        PyObject_GetBuffer(answer, &result, PyBUF_WRITABLE)
        for ordinal in range(self.space.ordinals):
            if self.space.segment[ordinal].records == NULL:
                continue
            for slot in range(ordinal * self.slots_per_segment, (ordinal + 1) * self.slots_per_segment):
                record = self.record(<int32_t>slot)
                if record.state == READY and record.tick >= since and not is_expired(&self.space, record):
                    (<int32_t *>result.buf)[count] = <int32_t>slot
                    count += 1
        PyBuffer_Release(&result)
        return answer[:count]

    def keys_of(self, slots) -> bytes:
        """The key of each slot that holds a block, end to end; zeros for negative slots."""
        cdef Py_buffer view
        cdef Py_ssize_t n = open_slots(slots, &view), i
        cdef const int32_t *slot = <const int32_t *>view.buf
        cdef char *key
        try:
            self.check_held(slot, n)
            answer = PyBytes_FromStringAndSize(NULL, n * self.key_bytes)
            key = PyBytes_AS_STRING(answer)
            memset(key, 0, n * self.key_bytes)
            for i in range(n):
                if slot[i] >= 0:
                    memcpy(key + i * self.key_bytes, record_key(self.record(slot[i])), self.key_bytes)
            return answer
        finally:
            PyBuffer_Release(&view)

    def drop(self, slots) -> int:
        """Deletes the blocks in these slots, for instance corrupt ones; slots that are not READY are ignored."""
        cdef Py_buffer view
        cdef Py_ssize_t n = open_slots(slots, &view), i, count = 0
        cdef const int32_t *slot = <const int32_t *>view.buf
        try:
            for i in range(n):
                if slot[i] >= self.space.ordinals * self.slots_per_segment:
                    raise self.complaint(slot[i], "ready")
            for i in range(n):
                if self.exists(slot[i]) and self.record(slot[i]).state == READY:
                    self.forget(slot[i], self.record(slot[i]), False)
                    count += 1
            return count
        finally:
            PyBuffer_Release(&view)

    def take_lapsed(self) -> bytes:
        """The keys, end to end, of blocks dropped since the last call because they had expired (`keep_lapsed`)."""
        keys = PyBytes_FromStringAndSize(<char *>self.lapsed, self.lapsed_count * self.key_bytes)
        self.lapsed_count = self.lapsed_capacity = 0
        free(self.lapsed)
        self.lapsed = NULL
        return keys

    def expire(self, double now, Py_ssize_t limit) -> int:
        """Drops what has expired among the next ``limit`` slots, over calls all of them; returns how many.

        Costs nothing while no block is to expire.
        """
        cdef Py_ssize_t count = 0, ordinal, passed = 0, end = self.space.ordinals * self.slots_per_segment
        cdef Record *record
        self.advance(now)
        while limit > 0 and self.expiring > 0 and passed < end:
            if self.hand >= end:
                self.hand = 0
            ordinal = self.hand // self.slots_per_segment
            if self.space.segment[ordinal].records == NULL:
                passed += self.slots_per_segment
                self.hand = (ordinal + 1) * self.slots_per_segment
                continue
            record = self.record(<int32_t>self.hand)
            if record.state == READY and is_expired(&self.space, record):
                self.lapse(<int32_t>self.hand, record)
                count += 1
            self.hand += 1
            passed += 1
            limit -= 1
        return count
