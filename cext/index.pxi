# What callers use of an index: what is asked by key, and who goes when room is needed.


@cython.final
cdef class BlockIndex(_Slots):
    """The key -> slot index of one namespace on one shard: states, readers, pins, expiry, and who goes first.

    Slots are numbered ``ordinal * slots_per_segment + i``. ``keys`` is always one contiguous buffer of
    n * key_bytes bytes, a prefix chain with its head first. A call that touches n keys takes the ticks
    ``tick`` to ``tick + n - 1``, the head's the highest; the caller adds n before the next call. Times are
    monotonic seconds, kept to an eighth of one: pins and expiry are rounded up. Malformed arguments raise
    ValueError or TypeError and change nothing.

    ``policy`` says in which order blocks are evicted: see policy.pxi. An expired block is as if deleted for every
    call that is given keys; the index knows the time from the calls that are given it.

    Not thread-safe: one thread, the shard's loop, uses an index.
    """

    FREE = 0
    WRITING = 1
    READY = 2
    GONE = 3
    EXISTED = -1
    DUPLICATE = -2
    NO_SPACE = -3
    POLICIES = tuple(_POLICIES)

    def __cinit__(self, key_bytes: int, slots_per_segment: int, policy: str = "lru"):
        if not 8 <= key_bytes <= 64:
            raise ValueError(f"key_bytes is {key_bytes}, expected 8 to 64")
        if not 1 <= slots_per_segment <= MAX_SLOTS:
            raise ValueError(f"slots_per_segment is {slots_per_segment}, expected 1 to {MAX_SLOTS}")
        if policy not in _POLICIES:
            raise ValueError(f"policy is {policy!r}, expected one of {', '.join(_POLICIES)}")
        self.key_bytes = key_bytes
        self.slots_per_segment = self.space.slots_per_segment = slots_per_segment
        self.space.stride = (sizeof(Record) + key_bytes + 7) & ~7
        self.space.magic = 0 if slots_per_segment == 1 else <uint64_t>-1 // <uint64_t>slots_per_segment + 1
        self.k0 = int.from_bytes(_os.urandom(8), "little")
        self.k1 = int.from_bytes(_os.urandom(8), "little")
        self.policy = _POLICIES[policy]()
        self.policy.space = &self.space
        if not self.resize_table(8):
            raise MemoryError("no memory for an index table of 8 entries")

    # -- arguments -------------------------------------------------------------------------------------------

    cdef Py_ssize_t open_keys(self, object keys, Py_buffer *view) except -1:
        PyObject_GetBuffer(keys, view, PyBUF_SIMPLE)
        cdef Py_ssize_t size = view.len
        if size % self.key_bytes != 0 or size // self.key_bytes > MAX_SLOTS:
            PyBuffer_Release(view)
            raise ValueError(
                f"keys are {size} bytes, expected a multiple of key_bytes={self.key_bytes}, "
                f"at most {MAX_SLOTS} of them"
            )
        return size // self.key_bytes

    # -- questions -------------------------------------------------------------------------------------------

    cdef inline void pin(self, int32_t slot, uint32_t until) noexcept nogil:
        cdef Record *record = self.record(slot)
        cdef Segment *segment = &self.space.segment[slot // self.slots_per_segment]
        record.pin_until = max(record.pin_until, until)
        segment.latest_pin = max(segment.latest_pin, until)

    cdef void use(
        self, int32_t *slots, Py_ssize_t n, Py_ssize_t batch, double now, bint refresh, uint64_t tick,
        double pin_until,
    ) noexcept nogil:
        """Pins and touches the first n slots of a batch. A pin only ever grows."""
        cdef uint32_t until = eighths_up(pin_until) if pin_until > now else 0
        cdef Py_ssize_t i
        cdef int32_t slot
        for i in range(n):
            slot = self.readable(slots[i])
            if slots[i] != NONE and until != 0:
                self.pin(slots[i] if slot == NONE else slot, until)
            slots[i] = slot
        if refresh:
            self.touch(slots, n, batch, tick)

    def contains(self, keys, double now, bint refresh, uint64_t tick, double pin_until=0.0) -> bytes:
        """One byte a key: 1 when it is READY or WRITING. ``refresh`` touches, ``pin_until > now`` pins those."""
        cdef Py_buffer view
        cdef Py_ssize_t n = self.open_keys(keys, &view), i
        cdef int32_t *slots = <int32_t *>malloc(n * sizeof(int32_t) + 1)
        cdef char *present
        try:
            if slots == NULL:
                raise MemoryError(f"no memory to look {n} keys up")
            self.advance(now)
            answer = PyBytes_FromStringAndSize(NULL, n)
            present = PyBytes_AS_STRING(answer)
            self.find(<const unsigned char *>view.buf, n, slots)
            for i in range(n):
                present[i] = slots[i] != NONE
            if refresh or pin_until > now:
                self.use(slots, n, n, now, refresh, tick, pin_until)
            return answer
        finally:
            free(slots)
            PyBuffer_Release(&view)

    def match_prefix(self, keys, double now, bint refresh, uint64_t tick, double pin_until=0.0) -> int:
        """The length of the leading run that is READY or WRITING; only that run is touched and pinned."""
        cdef Py_buffer view
        cdef Py_ssize_t n = self.open_keys(keys, &view), i = 0, base = 0, count
        cdef const unsigned char *key = <const unsigned char *>view.buf
        cdef int32_t *slots = <int32_t *>malloc(n * sizeof(int32_t) + 1)
        try:
            if slots == NULL:
                raise MemoryError(f"no memory to look {n} keys up")
            self.advance(now)
            while i == base and base < n:
                count = min(n - base, base + LOOKAHEAD)  # doubling: a miss costs at most as much again
                self.find(key + base * self.key_bytes, count, slots + base)
                base += count
                while i < base and slots[i] != NONE:
                    i += 1
            if refresh or pin_until > now:
                self.use(slots, i, n, now, refresh, tick, pin_until)
            return i
        finally:
            free(slots)
            PyBuffer_Release(&view)

    def missing(self, keys) -> int:
        """How many distinct keys of the batch are neither READY nor WRITING."""
        cdef Py_buffer view
        cdef Py_ssize_t n = self.open_keys(keys, &view), i, count = 0
        cdef const unsigned char *key = <const unsigned char *>view.buf
        cdef Batch batch
        memset(&batch, 0, sizeof(Batch))
        try:
            open_batch(&batch, n)
            for i in range(n):
                batch.hashes[i] = self.hash_key(key + i * self.key_bytes)
                kv_prefetch(&self.table[batch.hashes[i] & self.mask])
            for i in range(n):
                if self.look_up(key + i * self.key_bytes, batch.hashes[i]) == NULL:
                    count += is_first(&batch, key, self.key_bytes, i)
            return count
        finally:
            free(batch.heads)
            PyBuffer_Release(&view)

    def state_of(self, key) -> int:
        """FREE (absent), WRITING or READY; a key being replaced is READY."""
        cdef Py_buffer view
        cdef Py_ssize_t n = self.open_keys(key, &view)
        cdef int32_t slot
        try:
            if n != 1:
                raise ValueError(f"key is {n} keys of key_bytes={self.key_bytes}, expected one")
            self.find(<const unsigned char *>view.buf, 1, &slot)
            return FREE if slot == NONE else WRITING if self.readable(slot) == NONE else READY
        finally:
            PyBuffer_Release(&view)

    def pinned(self, double now) -> int:
        """The number of READY slots whose pin has not expired. O(slots of the segments with such a pin)."""
        cdef Py_ssize_t ordinal, i, count = 0
        cdef uint32_t time = self.advance(now)
        cdef Record *record
        for ordinal in range(self.space.ordinals):
            if self.space.segment[ordinal].records == NULL or self.space.segment[ordinal].latest_pin <= time:
                continue
            for i in range(self.slots_per_segment):
                record = <Record *>(self.space.segment[ordinal].records + i * self.space.stride)
                count += record.state == READY and record.pin_until > time and not is_expired(&self.space, record)
        return count

    # -- writers ---------------------------------------------------------------------------------------------

    def reserve(self, keys, bint force, uint64_t tick, Py_ssize_t priority=0):
        """Gives absent keys a slot to be written: int32, one per key, a slot now WRITING or a negative verdict.

        EXISTED: READY, or WRITING by someone. DUPLICATE: earlier in this batch. NO_SPACE: no slot is free.
        ``force`` gives READY keys a new slot too; the old one stays readable until the commit. READY keys of the
        batch are touched. ``priority``, 0 to 3, is that of the slots given: a block is evicted only when nothing
        evictable of a lower one is left.
        """
        cdef Py_buffer view, result
        cdef Py_ssize_t n = self.open_keys(keys, &view), i
        cdef const unsigned char *key = <const unsigned char *>view.buf
        cdef Batch batch
        cdef Entry *entry
        cdef int32_t *out
        cdef int32_t slot, old
        memset(&batch, 0, sizeof(Batch))
        try:
            check_priority(priority)
            open_batch(&batch, n)
            answer = _numpy.empty(n, _numpy.int32)
            PyObject_GetBuffer(answer, &result, PyBUF_WRITABLE)
            out = <int32_t *>result.buf
            for i in range(n):
                batch.hashes[i] = self.hash_key(key + i * self.key_bytes)
                kv_prefetch(&self.table[batch.hashes[i] & self.mask])
            for i in range(n):
                if not is_first(&batch, key, self.key_bytes, i):
                    out[i] = DUPLICATE
                    continue
                entry = self.look_up(key + i * self.key_bytes, batch.hashes[i])
                old = NONE
                if entry != NULL:
                    old = self.readable(entry.slot)
                    if not force or old != entry.slot:
                        out[i] = EXISTED if old == NONE else FOUND - old
                        continue
                slot = self.take_free()
                if slot == NONE:
                    out[i] = NO_SPACE
                    continue
                if entry == NULL:
                    self.insert(batch.hashes[i], slot)
                else:
                    entry.slot = slot
                self.fill(slot, WRITING, key + i * self.key_bytes, batch.hashes[i], <uint8_t>priority)
                self.record(slot).older = old
                self.writing += 1
                out[i] = slot
            for i in range(n):
                batch.heads[i] = NONE
                if out[i] <= FOUND:
                    batch.heads[i] = FOUND - out[i]
                    out[i] = EXISTED
                elif out[i] >= 0:
                    batch.heads[i] = self.record(out[i]).older
            self.touch(batch.heads, n, n, tick)
            PyBuffer_Release(&result)
            return answer
        finally:
            free(batch.heads)
            PyBuffer_Release(&view)

    cdef void fill(
        self, int32_t slot, uint8_t state, const unsigned char *key, uint32_t hash, uint8_t priority
    ) noexcept nogil:
        """Begins a block in a slot."""
        cdef Record *record = self.record(slot)
        memset(record, 0, sizeof(Record))
        record.state = state
        record.newer = record.older = NONE
        record.hash = hash
        record.priority = priority
        memcpy(record_key(record), key, self.key_bytes)

    cdef int32_t ready_slot(self, key) except -2:
        """The slot of a key that is READY and not being replaced; NONE for others, and for no key."""
        cdef Py_buffer view
        cdef Py_ssize_t n = self.open_keys(key, &view)
        cdef int32_t slot = NONE
        try:
            if n > 1:
                raise ValueError(f"parent is {n} keys of key_bytes={self.key_bytes}, expected one or none")
            if n == 1:
                self.find(<const unsigned char *>view.buf, 1, &slot)
            return slot if slot != NONE and self.record(slot).state == READY else NONE
        finally:
            PyBuffer_Release(&view)

    cdef int choose(self, const int32_t *slots, Py_ssize_t n) except -1:
        """Marks the WRITING slots CHOSEN, or raises with none marked."""
        cdef Py_ssize_t i, j
        for i in range(n):
            if slots[i] < 0:
                continue
            if not self.exists(slots[i]) or self.record(slots[i]).state != WRITING:
                error = self.complaint(slots[i], "writing")
                for j in range(i):
                    if slots[j] >= 0:
                        self.record(slots[j]).state = WRITING
                raise error
            self.record(slots[i]).state = CHOSEN
        return 0

    def commit(
        self, slots, sums, uint64_t tick, double expires=0.0, parent=b"", bint ends_chain=False
    ) -> int:
        """Makes written slots READY with their checksums, those of a chain, head first; negative slots are skipped.

        What is known of the chain helps the policy: ``parent`` is the key of the block before the first slot (empty:
        none, or unknown; it need not be there), ``ends_chain`` says that the last slot is where the chain ends. A
        slot that is skipped because its block existed does not end the run: what follows it counts as behind what is
        before it, until a refresh of the whole chain tells its place.

        They are gone at the time ``expires``; 0: never. A block that was replaced is retired: its slot is free
        once no reader holds it, its pin holds for the new one. Returns the number committed. ValueError names a slot
        that is not WRITING, and then nothing is committed.
        """
        cdef Py_buffer view, sums_view
        cdef int32_t before = self.ready_slot(parent)
        cdef Py_ssize_t n = open_slots(slots, &view), count = 0, i, m
        cdef const int32_t *slot = <const int32_t *>view.buf
        cdef Record *record
        cdef Record *replaced
        cdef uint32_t until = eighths_up(expires)
        try:
            m = open_sums(sums, &sums_view, "sums")
            try:
                if m != n:
                    raise ValueError(f"{n} slots with {m} sums, expected as many")
                self.choose(slot, n)
                for i in range(n - 1, -1, -1):
                    if slot[i] < 0:
                        continue
                    record = self.record(slot[i])
                    if record.older != NONE:
                        replaced = self.record(record.older)
                        self.pin(slot[i], replaced.pin_until)
                        self.retire(record.older, replaced, False)
                    record.state = READY
                    record.checksum = (<const uint64_t *>sums_view.buf)[i]
                    record.rank = <uint32_t>(n - 1 - i)
                    record.tick = tick + record.rank
                    record.expires = until
                    count += 1
                self.policy.inserted(slot, n, before, ends_chain)
                self.writing -= count
                self.ready += count
                if until != 0:
                    self.expiring += count
                return count
            finally:
                PyBuffer_Release(&sums_view)
        finally:
            PyBuffer_Release(&view)

    def disown(self, slots) -> int:
        """Takes WRITING slots away from their keys, which are then as absent as if never reserved: others may set them.

        The writer keeps its slots, one reference on each, and gives them back with release(). Slots that are not
        WRITING, and negative ones, are skipped. Returns how many were taken away.
        """
        cdef Py_buffer view
        cdef Py_ssize_t n = open_slots(slots, &view), count = 0, i
        cdef const int32_t *slot = <const int32_t *>view.buf
        cdef Record *record
        cdef Entry *entry
        try:
            for i in range(n):
                if slot[i] < 0 or not self.exists(slot[i]) or self.record(slot[i]).state != WRITING:
                    continue
                record = self.record(slot[i])
                entry = self.entry_of_slot(slot[i], record.hash)
                if record.older != NONE:
                    entry.slot = record.older
                else:
                    self.remove(entry)
                record.state = GONE
                record.refs = 1
                self.writing -= 1
                self.gone += 1
                count += 1
            return count
        finally:
            PyBuffer_Release(&view)

    def abort(self, slots) -> int:
        """Frees WRITING slots; a block one was to replace stays. Errors and negative slots as for commit."""
        cdef Py_buffer view
        cdef Py_ssize_t n = open_slots(slots, &view), count = 0, i
        cdef const int32_t *slot = <const int32_t *>view.buf
        cdef Record *record
        cdef Entry *entry
        try:
            self.choose(slot, n)
            for i in range(n):
                if slot[i] < 0:
                    continue
                record = self.record(slot[i])
                entry = self.entry_of_slot(slot[i], record.hash)
                if record.older != NONE:
                    entry.slot = record.older
                else:
                    self.remove(entry)
                self.put_free(slot[i], record)
                count += 1
            self.writing -= count
            return count
        finally:
            PyBuffer_Release(&view)

    def restore(self, keys, slots, sums, ticks, expires, priorities):
        """Puts the blocks of a recovered index into given slots: int32, the slot, or -1 where that cannot be.

        It cannot where the slot is not free or not attached, or the key is there already. Rows come in ascending order
        of tick, each a request of its own. ``slots`` are int32, ``sums`` and ``ticks`` uint64, ``expires`` float64,
        ``priorities`` uint8, as many as keys.
        """
        cdef Py_ssize_t n, i
        cdef const unsigned char *key
        cdef uint32_t hash
        cdef int32_t slot
        cdef int32_t *out
        cdef Record *record
        cdef _Buffers held = _Buffers(7)
        cdef Py_buffer *view = held.views  # keys, slots, sums, ticks, expires, priorities
        n = self.open_keys(keys, &view[0])
        held.count = 1
        expires = _numpy.ascontiguousarray(expires, _numpy.float64)
        priorities = _numpy.asarray(priorities)
        if priorities.size and not 0 <= priorities.min() <= priorities.max() < PRIORITIES:
            raise ValueError(
                f"priorities range from {priorities.min()} to {priorities.max()}, expected 0 to {PRIORITIES - 1}"
            )
        priorities = _numpy.ascontiguousarray(priorities, _numpy.uint8)
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
        answer = _numpy.full(n, NONE, _numpy.int32)
        out = <int32_t *>held.take(answer, PyBUF_WRITABLE, "answer").buf
        for i in range(n):
            key = <const unsigned char *>view[0].buf + i * self.key_bytes
            slot = (<const int32_t *>view[1].buf)[i]
            hash = self.hash_key(key)
            if not self.exists(slot) or self.record(slot).state != FREE or self.look_up(key, hash) != NULL:
                continue
            self.bitmap[slot >> 6] &= ~(<uint64_t>1 << (slot & 63))
            self.free -= 1
            self.insert(hash, slot)
            self.fill(slot, READY, key, hash, (<const uint8_t *>view[5].buf)[i])
            record = self.record(slot)
            record.checksum = (<const uint64_t *>view[2].buf)[i]
            record.tick = (<const uint64_t *>view[3].buf)[i]
            record.expires = eighths_up((<const double *>view[4].buf)[i])
            self.ready += 1
            self.expiring += record.expires != 0
            self.policy.restored(slot)
            out[i] = slot
        return answer

    # -- readers ---------------------------------------------------------------------------------------------

    def acquire(self, keys, double now, uint64_t tick, bint refresh=True):
        """Takes a reader's reference on every READY key: int32, its slot, -1 absent, -2 WRITING."""
        cdef Py_buffer view, result
        cdef Py_ssize_t n = self.open_keys(keys, &view), i
        cdef int32_t *out
        cdef int32_t slot
        try:
            answer = _numpy.empty(n, _numpy.int32)
            PyObject_GetBuffer(answer, &result, PyBUF_WRITABLE)
            out = <int32_t *>result.buf
            self.advance(now)
            self.find(<const unsigned char *>view.buf, n, out)
            for i in range(n):
                slot = self.readable(out[i])
                if slot != NONE:
                    self.record(slot).refs += 1
                    out[i] = slot
                elif out[i] != NONE:
                    out[i] = -2
            if refresh:
                self.touch(out, n, n, tick)
            PyBuffer_Release(&result)
            return answer
        finally:
            PyBuffer_Release(&view)

    # -- removal ---------------------------------------------------------------------------------------------

    def delete(self, keys) -> int:
        """Deletes READY blocks, pinned ones too; returns their number. A slot being read is free once released."""
        cdef Py_buffer view
        cdef Py_ssize_t n = self.open_keys(keys, &view), i, count = 0
        cdef int32_t slot
        try:
            for i in range(n):
                self.find(<const unsigned char *>view.buf + i * self.key_bytes, 1, &slot)
                slot = self.readable(slot)
                if slot != NONE:
                    self.forget(slot, self.record(slot), False)
                    count += 1
            return count
        finally:
            PyBuffer_Release(&view)

    def clear(self) -> int:
        """Deletes every READY block; returns their number."""
        cdef Py_ssize_t count = self.ready
        cdef int32_t slot = self.policy.oldest()
        while slot != NONE:
            self.forget(slot, self.record(slot), False)
            slot = self.policy.oldest()
        return count

    # -- eviction --------------------------------------------------------------------------------------------

    def evict(self, Py_ssize_t n, double now, keys=None) -> int:
        """Frees up to n slots of READY blocks, as the policy chooses; returns how many.

        Blocks being read or pinned stay, and so do those of a higher priority while one of a lower can go. The keys
        of the blocks are appended to ``keys``, a bytearray. What had expired may be among them.
        """
        cdef uint32_t time = self.advance(now)
        cdef Py_ssize_t count = 0, before = 0
        cdef int32_t slot
        cdef Record *record
        cdef bytearray out = keys
        n = min(n, self.ready)
        if out is not None:
            before = len(out)
            PyByteArray_Resize(out, before + max(n, 0) * self.key_bytes)
        self.policy.start(time)
        while count < n:
            slot = self.policy.next()
            if slot == NONE:
                break
            record = self.record(slot)
            if out is not None:
                memcpy(PyByteArray_AS_STRING(out) + before + count * self.key_bytes, record_key(record), self.key_bytes)
            self.forget(slot, record, not is_expired(&self.space, record))
            count += 1
        if out is not None:
            PyByteArray_Resize(out, before + count * self.key_bytes)
        return count

    def victims(self, Py_ssize_t n, double now):
        """The slots, int32, of up to n blocks that evict() would take next, in that order; none is expired."""
        cdef uint32_t time = self.advance(now)
        cdef Py_buffer result
        cdef Py_ssize_t count = 0
        cdef int32_t slot
        n = max(min(n, self.ready), 0)
        answer = _numpy.empty(n, _numpy.int32)
        PyObject_GetBuffer(answer, &result, PyBUF_WRITABLE)
        self.policy.start(time)
        while count < n:
            slot = self.policy.next()
            if slot == NONE:
                break
            if not is_expired(&self.space, self.record(slot)):
                (<int32_t *>result.buf)[count] = slot
                count += 1
        PyBuffer_Release(&result)
        return answer[:count]
