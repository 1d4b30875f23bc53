# Where slots come from: segments attached and detached, and what all of it takes.


cdef class _Segments(_Table):
    """The part of an index that is about segments."""

    @cython.final
    cdef object complaint(self, int32_t slot, str expected):
        """Says why a slot number was refused."""
        if not self.exists(slot):
            return ValueError(f"slot {slot} is in no attached segment of {self.slots_per_segment} slots")
        return ValueError(f"slot {slot} is {STATE_NAMES[self.record(slot).state]}, expected {expected}")

    @cython.final
    cdef inline Py_ssize_t segment_record_bytes(self) noexcept:
        return self.slots_per_segment * (self.space.stride + self.policy.slot_bytes)

    def attach(self) -> int:
        """Adds a segment of free slots and returns its ordinal, the lowest that is detached if one is."""
        cdef Py_ssize_t ordinal = self.lowest_detached, capacity = <Py_ssize_t>self.mask + 1, count, i
        cdef void *memory
        while ordinal < self.space.ordinals and self.space.segment[ordinal].records != NULL:
            ordinal += 1
        count = (ordinal + 1) * self.slots_per_segment
        if count > MAX_SLOTS:
            raise OverflowError(f"segment {ordinal} would number slots up to {count}, at most {MAX_SLOTS}")
        while (self.slots + self.slots_per_segment) * 10 > capacity * 7:
            capacity *= 2
        if capacity > <Py_ssize_t>self.mask + 1 and not self.resize_table(capacity):
            raise MemoryError(f"no memory for an index table of {capacity} entries")
        if (count + 63) // 64 > self.words:
            memory = realloc(self.bitmap, (count + 63) // 64 * 8)
            if memory == NULL:
                raise MemoryError(f"no memory for a bitmap of {count} slots")
            self.bitmap = <uint64_t *>memory
            memset(self.bitmap + self.words, 0, ((count + 63) // 64 - self.words) * 8)
            self.words = (count + 63) // 64
        if ordinal == self.space.ordinals:
            memory = realloc(self.space.segment, (ordinal + 1) * sizeof(Segment))
            if memory == NULL:
                raise MemoryError(f"no memory for {ordinal + 1} segments")
            self.space.segment = <Segment *>memory
            self.space.segment[ordinal].records = NULL
            self.space.ordinals = ordinal + 1
        if posix_memalign(&memory, 64, self.segment_record_bytes()) != 0:
            raise MemoryError(f"no memory for the records of {self.slots_per_segment} slots")
        memset(memory, 0, self.segment_record_bytes())
        self.space.segment[ordinal].records = <char *>memory
        self.space.segment[ordinal].latest_pin = 0
        for i in range(count - self.slots_per_segment, count):
            self.bitmap[i >> 6] |= <uint64_t>1 << (i & 63)
        self.free += self.slots_per_segment
        self.slots += self.slots_per_segment
        self.segments += 1
        self.lowest_detached = ordinal + 1
        self.policy.resized(self.slots)
        self.cursor = count - self.slots_per_segment  # the longest run of free slots there is
        return ordinal

    @cython.final
    cdef Py_ssize_t first_slot(self, Py_ssize_t ordinal) except -1:
        if not 0 <= ordinal < self.space.ordinals or self.space.segment[ordinal].records == NULL:
            raise ValueError(f"segment {ordinal} is not attached")
        return ordinal * self.slots_per_segment

    def detach(self, Py_ssize_t ordinal) -> int:
        """Drops a segment and the READY blocks in it, pinned ones too, and returns their number.

        ValueError, with nothing changed, while a slot of it is being written or read.
        """
        cdef Py_ssize_t first = self.first_slot(ordinal), slot, dropped = 0, capacity
        cdef Record *record
        for slot in range(first, first + self.slots_per_segment):
            record = self.record(<int32_t>slot)
            if record.state == WRITING or record.refs != 0:
                raise ValueError(
                    f"segment {ordinal} is in use: slot {slot} is {STATE_NAMES[record.state]} "
                    f"with {record.refs} readers"
                )
        for slot in range(first, first + self.slots_per_segment):
            record = self.record(<int32_t>slot)
            if record.state == READY:
                self.forget(<int32_t>slot, record, False)
                dropped += 1
            self.bitmap[slot >> 6] &= ~(<uint64_t>1 << (slot & 63))
        free(self.space.segment[ordinal].records)
        self.space.segment[ordinal].records = NULL
        self.free -= self.slots_per_segment
        self.slots -= self.slots_per_segment
        self.segments -= 1
        self.lowest_detached = min(self.lowest_detached, ordinal)
        self.policy.resized(self.slots)
        capacity = <Py_ssize_t>self.mask + 1
        while capacity > 8 and self.slots * 6 < capacity:
            capacity //= 2
        if capacity <= <Py_ssize_t>self.mask:
            self.resize_table(capacity)  # without memory for it the larger table stays
        return dropped

    def segment_recency(self, Py_ssize_t ordinal, double now) -> tuple[int, bool]:
        """The highest tick of its READY blocks (0: none), and whether it is being written, read or pinned."""
        cdef Py_ssize_t first = self.first_slot(ordinal), slot
        cdef uint64_t newest = 0
        cdef uint32_t time = self.advance(now)
        cdef bint busy = False
        cdef Record *record
        for slot in range(first, first + self.slots_per_segment):
            record = self.record(<int32_t>slot)
            if record.state == READY:
                busy = busy or is_held(&self.space, record, time)
                if not is_expired(&self.space, record):
                    newest = max(newest, record.tick)
            elif record.state != FREE:
                busy = True
        return newest, busy

    def oldest_tick(self) -> int:
        """The tick of the least recently used READY block of the lowest priority, held or not; 2**63 - 1 without any.

        Namespaces are compared by it when one has to give way.
        """
        cdef int32_t slot = self.policy.oldest()
        return NO_TICK if slot == NONE else self.record(slot).tick

    @property
    def nbytes(self) -> int:
        """Bytes of memory the index holds."""
        return (
            self.__sizeof__() + self.policy.__sizeof__() + self.policy.nbytes()
            + self.segments * self.segment_record_bytes() + self.space.ordinals * sizeof(Segment)
            + self.words * sizeof(uint64_t) + (<Py_ssize_t>self.mask + 1) * sizeof(Entry)
        )
