# One namespace's index on one shard: key -> slot, each slot's state, and who goes first under pressure.
#
# Three structures over one set of records. A record (48 bytes, then the key) holds all there is to say about a
# slot, so that at 16-byte keys a hit costs one cache line; records are allocated a segment at a time and given
# back with it. The table (open addressing, linear probing, backward-shift deletion, at most 70 % full) holds
# (hash, slot) pairs; it is grown by attach(), so no later call can run out of memory half way. A bitmap says
# which slots are free; a cursor moves over it, so batches land on ascending slots. READY blocks form one list,
# most recently used first.
#
# What must hold. A key has at most one table entry: its READY slot, or its WRITING slot, whose `older` then
# names the READY slot it will replace (NONE: nothing). Only READY slots are in the list. GONE slots have
# refs > 0 and are in neither. Keys come from the network, so the hash is SipHash-1-3 under a random key.
# Every call checks all its arguments before it changes anything. One thread uses an index (the shard's loop).

cimport cython
from cpython.buffer cimport (
    PyBUF_FULL_RO, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

import os as _os

import numpy as _numpy


cdef extern from *:
    """
    #include <stdint.h>
    #include <stdlib.h>
    #include <string.h>

    #define KV_ROTL(x, b) (((x) << (b)) | ((x) >> (64 - (b))))
    #define KV_SIPROUND \\
        v0 += v1; v1 = KV_ROTL(v1, 13); v1 ^= v0; v0 = KV_ROTL(v0, 32); \\
        v2 += v3; v3 = KV_ROTL(v3, 16); v3 ^= v2; \\
        v0 += v3; v3 = KV_ROTL(v3, 21); v3 ^= v0; \\
        v2 += v1; v1 = KV_ROTL(v1, 17); v1 ^= v2; v2 = KV_ROTL(v2, 32)

    /* SipHash-1-3 (Aumasson and Bernstein, 2012): a keyed hash whose collisions cannot be found from outside. */
    static inline uint32_t kv_siphash(const unsigned char *key, size_t size, uint64_t k0, uint64_t k1) {
        uint64_t v0 = k0 ^ 0x736f6d6570736575ULL, v1 = k1 ^ 0x646f72616e646f6dULL;
        uint64_t v2 = k0 ^ 0x6c7967656e657261ULL, v3 = k1 ^ 0x7465646279746573ULL;
        uint64_t word;
        size_t i = 0;
        for (; i + 8 <= size; i += 8) {
            memcpy(&word, key + i, 8);
            v3 ^= word; KV_SIPROUND; v0 ^= word;
        }
        word = 0;
        memcpy(&word, key + i, size - i);
        word |= (uint64_t)size << 56;
        v3 ^= word; KV_SIPROUND; v0 ^= word;
        v2 ^= 0xff; KV_SIPROUND; KV_SIPROUND; KV_SIPROUND;
        return (uint32_t)(v0 ^ v1 ^ v2 ^ v3);
    }

    /* n / d for 32-bit n and d > 1, with magic = 2**64 / d + 1 (Lemire, 2019): a multiplication, no division. */
    static inline uint32_t kv_divide(uint32_t n, uint64_t magic) {
        return (uint32_t)(((unsigned __int128)magic * n) >> 64);
    }
    static inline int kv_lowest_bit(uint64_t word) { return __builtin_ctzll(word); }
    static inline void kv_prefetch(const void *address) { __builtin_prefetch(address); }
    """
    uint32_t kv_siphash(const unsigned char *key, size_t size, uint64_t k0, uint64_t k1) noexcept nogil
    uint32_t kv_divide(uint32_t n, uint64_t magic) noexcept nogil
    int kv_lowest_bit(uint64_t word) noexcept nogil
    void kv_prefetch(const void *address) noexcept nogil
    int posix_memalign(void **memory, size_t alignment, size_t size) noexcept nogil


cdef enum:
    FREE = 0
    WRITING = 1
    READY = 2
    GONE = 3
    CHOSEN = 4  # a WRITING slot inside one commit or abort, so that a slot named twice is noticed

    NONE = -1
    EXISTED = -1
    DUPLICATE = -2
    NO_SPACE = -3
    FOUND = -4  # FOUND - slot: inside reserve, a key whose READY slot is yet to be touched

    LOOKAHEAD = 32  # keys whose cache lines are requested together
    MAX_SLOTS = 0x7FFFFFC0

cdef uint64_t NO_TICK = 0x7FFFFFFFFFFFFFFF
cdef tuple STATE_NAMES = ("free", "writing", "ready", "gone", "named twice")


cdef struct Record:
    uint64_t checksum
    double pin_until
    uint64_t tick
    int32_t refs
    int32_t newer
    int32_t older
    uint32_t hash
    uint32_t rank       # blocks below it in the batch that last touched it: tick - rank names that batch
    uint8_t state


cdef struct Segment:
    char *records       # NULL when detached
    double latest_pin   # no pin in it ends later: what makes counting pins cheap


cdef struct Entry:
    uint32_t hash
    int32_t slot


cdef inline unsigned char *record_key(Record *record) noexcept nogil:
    return <unsigned char *>record + sizeof(Record)


# The distinct keys of one batch: an open-addressing table of positions, so that a key given twice is noticed.
cdef struct Batch:
    int32_t *heads      # one allocation, of which hashes is the second part
    uint32_t *hashes    # of each key; the caller fills it in
    uint32_t mask


cdef int open_batch(Batch *batch, Py_ssize_t n) except -1:
    cdef Py_ssize_t capacity = 8
    while capacity < 2 * n:
        capacity *= 2
    batch.heads = <int32_t *>malloc((capacity + n) * 4)
    if batch.heads == NULL:
        raise MemoryError(f"no memory for a batch of {n} keys")
    memset(batch.heads, 0xFF, capacity * 4)
    batch.hashes = <uint32_t *>batch.heads + capacity
    batch.mask = <uint32_t>(capacity - 1)
    return 0


cdef inline bint is_first(
    Batch *batch, const unsigned char *keys, Py_ssize_t key_bytes, Py_ssize_t i
) noexcept nogil:
    cdef uint32_t at = batch.hashes[i] & batch.mask
    cdef Py_ssize_t other
    while batch.heads[at] != NONE:
        other = batch.heads[at]
        if batch.hashes[other] == batch.hashes[i]:
            if memcmp(keys + other * key_bytes, keys + i * key_bytes, key_bytes) == 0:
                return False
        at = (at + 1) & batch.mask
    batch.heads[at] = <int32_t>i
    return True


cdef bint is_vector(Py_buffer *view, Py_ssize_t itemsize, char format, char other) noexcept:
    return (
        view.ndim == 1 and view.itemsize == itemsize and view.format != NULL and view.format[0] != 0
        and view.format[1] == 0 and (view.format[0] == format or view.format[0] == other)
        and (view.shape[0] < 2 or view.strides[0] == itemsize)
    )


cdef Py_ssize_t open_slots(object slots, Py_buffer *view) except -1:
    """A view of int32 slot numbers, and their count; other integers are converted, never wrapped around."""
    if PyObject_CheckBuffer(slots):
        PyObject_GetBuffer(slots, view, PyBUF_FULL_RO)
        if is_vector(view, 4, b"i", b"i"):
            return view.shape[0]
        PyBuffer_Release(view)
    array = _numpy.asarray(slots)
    if array.size == 0:
        array = _numpy.empty(0, _numpy.int32)
    elif array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"slots must be a vector of int32, not {array.ndim}-dimensional {array.dtype}")
    elif array.min() < -MAX_SLOTS or array.max() > MAX_SLOTS:
        raise ValueError(f"slots range from {array.min()} to {array.max()}, beyond int32")
    PyObject_GetBuffer(_numpy.require(array, _numpy.int32, "CA"), view, PyBUF_FULL_RO)
    return view.shape[0]


cdef Py_ssize_t open_sums(object sums, Py_buffer *view) except -1:
    """A view of uint64 checksums, and their count."""
    if PyObject_CheckBuffer(sums):
        PyObject_GetBuffer(sums, view, PyBUF_FULL_RO)
        if is_vector(view, 8, b"L", b"Q"):
            return view.shape[0]
        PyBuffer_Release(view)
        if _numpy.asarray(sums).dtype.kind != "u":
            raise TypeError(f"sums must be a vector of uint64, not {_numpy.asarray(sums).dtype}")
    array = _numpy.array(sums, dtype=_numpy.uint64, order="C")
    if array.ndim != 1:
        raise TypeError(f"sums must be a vector of uint64, not {array.ndim}-dimensional")
    PyObject_GetBuffer(array, view, PyBUF_FULL_RO)
    return view.shape[0]


@cython.final
cdef class BlockIndex:
    """The key -> slot index of one namespace on one shard, with states, readers, pins and recency.

    Slots are numbered ``ordinal * slots_per_segment + i``. ``keys`` is always one contiguous buffer of
    n * key_bytes bytes, a prefix chain with its head first. A call that touches n keys takes the ticks
    ``tick`` to ``tick + n - 1``, the head's the highest; the caller adds n before the next call. Times are
    monotonic seconds. Malformed arguments raise ValueError or TypeError and change nothing.

    Not thread-safe: one thread, the shard's loop, uses an index.
    """

    FREE = 0
    WRITING = 1
    READY = 2
    GONE = 3
    EXISTED = -1
    DUPLICATE = -2
    NO_SPACE = -3

    cdef readonly Py_ssize_t key_bytes, slots_per_segment
    cdef readonly Py_ssize_t ready, writing, free, gone, segments, slots
    cdef Py_ssize_t stride
    cdef uint64_t magic, k0, k1
    cdef Segment *segment           # by ordinal
    cdef Py_ssize_t ordinals, lowest_detached
    cdef uint64_t *bitmap           # 1: free
    cdef Py_ssize_t words, cursor
    cdef Entry *table
    cdef uint32_t mask
    cdef int32_t newest, oldest

    def __cinit__(self, key_bytes: int, slots_per_segment: int):
        if not 8 <= key_bytes <= 64:
            raise ValueError(f"key_bytes is {key_bytes}, expected 8 to 64")
        if not 1 <= slots_per_segment <= MAX_SLOTS:
            raise ValueError(f"slots_per_segment is {slots_per_segment}, expected 1 to {MAX_SLOTS}")
        self.key_bytes = key_bytes
        self.slots_per_segment = slots_per_segment
        self.stride = (sizeof(Record) + key_bytes + 7) & ~7
        self.magic = 0 if slots_per_segment == 1 else <uint64_t>-1 // <uint64_t>slots_per_segment + 1
        self.k0 = int.from_bytes(_os.urandom(8), "little")
        self.k1 = int.from_bytes(_os.urandom(8), "little")
        self.newest = self.oldest = NONE
        if not self.resize_table(8):
            raise MemoryError("no memory for an index table of 8 entries")

    def __dealloc__(self):
        cdef Py_ssize_t ordinal
        for ordinal in range(self.ordinals):
            free(self.segment[ordinal].records)
        free(self.segment)
        free(self.bitmap)
        free(self.table)

    # -- records, free slots, list ---------------------------------------------------------------------------

    cdef inline Record *record(self, int32_t slot) noexcept nogil:
        cdef uint32_t ordinal = <uint32_t>slot
        if self.magic != 0:
            ordinal = kv_divide(ordinal, self.magic)
        return <Record *>(
            self.segment[ordinal].records + (slot - <Py_ssize_t>ordinal * self.slots_per_segment) * self.stride
        )

    cdef inline bint exists(self, int32_t slot) noexcept nogil:
        return (
            0 <= slot < self.ordinals * self.slots_per_segment
            and self.segment[slot // self.slots_per_segment].records != NULL
        )

    cdef int32_t take_free(self) noexcept nogil:
        """The next free slot at or after the cursor, or NONE."""
        cdef Py_ssize_t word = self.cursor >> 6
        cdef uint64_t bits
        if self.free == 0:
            return NONE
        if word >= self.words:
            word = 0
            bits = self.bitmap[0]
        else:
            bits = self.bitmap[word] & (<uint64_t>-1 << (self.cursor & 63))
        while bits == 0:
            word += 1
            if word == self.words:
                word = 0
            bits = self.bitmap[word]
        cdef int32_t slot = <int32_t>(word * 64 + kv_lowest_bit(bits))
        self.bitmap[word] &= ~(<uint64_t>1 << (slot & 63))
        self.free -= 1
        self.cursor = slot + 1
        return slot

    cdef inline void put_free(self, int32_t slot, Record *record) noexcept nogil:
        record.state = FREE
        self.bitmap[slot >> 6] |= <uint64_t>1 << (slot & 63)
        self.free += 1

    cdef inline void unlink(self, Record *record) noexcept nogil:
        if record.newer == NONE:
            self.newest = record.older
        else:
            self.record(record.newer).older = record.older
        if record.older == NONE:
            self.oldest = record.newer
        else:
            self.record(record.older).newer = record.newer

    cdef inline void link_newest(self, int32_t slot, Record *record) noexcept nogil:
        record.newer = NONE
        record.older = self.newest
        if self.newest == NONE:
            self.oldest = slot
        else:
            self.record(self.newest).newer = slot
        self.newest = slot

    cdef void touch(self, const int32_t *slots, Py_ssize_t n, Py_ssize_t batch, uint64_t tick) noexcept nogil:
        """Makes the first n of a batch, tail first, the newest; negative entries are skipped."""
        cdef Py_ssize_t i
        cdef Record *record
        for i in range(n - 1, -1, -1):
            if slots[i] < 0:
                continue
            record = self.record(slots[i])
            record.rank = <uint32_t>(batch - 1 - i)
            record.tick = tick + record.rank
            if self.newest != slots[i]:
                self.unlink(record)
                self.link_newest(slots[i], record)

    # -- table -----------------------------------------------------------------------------------------------

    cdef bint resize_table(self, Py_ssize_t capacity) noexcept nogil:
        cdef Entry *old = self.table
        cdef Py_ssize_t i, count = 0 if old == NULL else <Py_ssize_t>self.mask + 1
        cdef Entry *table = <Entry *>malloc(capacity * sizeof(Entry))
        if table == NULL:
            return False
        memset(table, 0xFF, capacity * sizeof(Entry))  # every slot NONE
        self.table = table
        self.mask = <uint32_t>(capacity - 1)
        for i in range(count):
            if old[i].slot != NONE:
                self.insert(old[i].hash, old[i].slot)
        free(old)
        return True

    cdef inline uint32_t hash_key(self, const unsigned char *key) noexcept nogil:
        return kv_siphash(key, self.key_bytes, self.k0, self.k1)

    cdef inline Entry *entry_of(self, const unsigned char *key, uint32_t hash) noexcept nogil:
        cdef uint32_t i = hash & self.mask
        while self.table[i].slot != NONE:
            if self.table[i].hash == hash:
                if memcmp(record_key(self.record(self.table[i].slot)), key, self.key_bytes) == 0:
                    return &self.table[i]
            i = (i + 1) & self.mask
        return NULL

    cdef inline Entry *entry_of_slot(self, int32_t slot, uint32_t hash) noexcept nogil:
        """The entry that names a slot, or the WRITING slot that is to replace it."""
        cdef uint32_t i = hash & self.mask
        cdef Record *record
        while True:
            if self.table[i].slot == slot:
                return &self.table[i]
            if self.table[i].hash == hash:
                record = self.record(self.table[i].slot)
                if record.state != READY and record.older == slot:
                    return &self.table[i]
            i = (i + 1) & self.mask

    cdef inline void insert(self, uint32_t hash, int32_t slot) noexcept nogil:
        cdef uint32_t i = hash & self.mask
        while self.table[i].slot != NONE:
            i = (i + 1) & self.mask
        self.table[i].hash = hash
        self.table[i].slot = slot

    cdef void remove(self, Entry *entry) noexcept nogil:
        cdef uint32_t hole = <uint32_t>(entry - self.table), i = hole
        while True:
            i = (i + 1) & self.mask
            if self.table[i].slot == NONE:
                break
            # An entry may move back into the hole unless its home lies between the two.
            if ((i - self.table[i].hash) & self.mask) >= ((i - hole) & self.mask):
                self.table[hole] = self.table[i]
                hole = i
        self.table[hole].slot = NONE

    cdef void find(self, const unsigned char *keys, Py_ssize_t n, int32_t *slots) noexcept nogil:
        """The slot of each key, or NONE. Requests memory for many keys at once: a cold index is all latency."""
        cdef uint32_t[64] hashes  # a ring of two groups
        cdef uint32_t at
        cdef Py_ssize_t base = -LOOKAHEAD, i
        cdef Entry *entry
        while base < n:
            for i in range(base + LOOKAHEAD, min(base + 2 * LOOKAHEAD, n)):
                hashes[i & 63] = self.hash_key(keys + i * self.key_bytes)
                kv_prefetch(&self.table[hashes[i & 63] & self.mask])
            for i in range(max(base, 0), min(base + LOOKAHEAD, n)):
                at = hashes[i & 63] & self.mask
                while self.table[at].slot != NONE and self.table[at].hash != hashes[i & 63]:
                    at = (at + 1) & self.mask
                if self.table[at].slot != NONE:
                    kv_prefetch(self.record(self.table[at].slot))
            for i in range(max(base, 0), min(base + LOOKAHEAD, n)):
                entry = self.entry_of(keys + i * self.key_bytes, hashes[i & 63])
                slots[i] = NONE if entry == NULL else entry.slot
            base += LOOKAHEAD

    cdef inline int32_t readable(self, int32_t slot) noexcept nogil:
        """The READY slot behind a table entry's slot: itself, what it is to replace, or NONE."""
        cdef Record *record
        if slot == NONE:
            return NONE
        record = self.record(slot)
        return slot if record.state == READY else record.older

    cdef bint retire(self, int32_t slot, Record *record) noexcept nogil:
        """Takes a READY slot, no longer named by the table, out of use; true when that frees it."""
        self.unlink(record)
        self.ready -= 1
        if record.refs == 0:
            self.put_free(slot, record)
            return True
        record.state = GONE
        self.gone += 1
        return False

    cdef bint forget(self, int32_t slot, Record *record) noexcept nogil:
        """Deletes a READY block; a write that was to replace it goes on. True when that frees its slot."""
        cdef Entry *entry = self.entry_of_slot(slot, record.hash)
        if entry.slot == slot:
            self.remove(entry)
        else:
            self.record(entry.slot).older = NONE
        return self.retire(slot, record)

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

    cdef object complaint(self, int32_t slot, str expected):
        """Says why a slot number was refused."""
        if not self.exists(slot):
            return ValueError(f"slot {slot} is in no attached segment of {self.slots_per_segment} slots")
        return ValueError(f"slot {slot} is {STATE_NAMES[self.record(slot).state]}, expected {expected}")

    # -- segments --------------------------------------------------------------------------------------------

    def attach(self) -> int:
        """Adds a segment of free slots and returns its ordinal, the lowest that is detached if one is."""
        cdef Py_ssize_t ordinal = self.lowest_detached, capacity = <Py_ssize_t>self.mask + 1, count, i
        cdef void *memory
        while ordinal < self.ordinals and self.segment[ordinal].records != NULL:
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
        if ordinal == self.ordinals:
            memory = realloc(self.segment, (ordinal + 1) * sizeof(Segment))
            if memory == NULL:
                raise MemoryError(f"no memory for {ordinal + 1} segments")
            self.segment = <Segment *>memory
            self.segment[ordinal].records = NULL
            self.ordinals = ordinal + 1
        if posix_memalign(&memory, 64, self.slots_per_segment * self.stride) != 0:
            raise MemoryError(f"no memory for the records of {self.slots_per_segment} slots")
        memset(memory, 0, self.slots_per_segment * self.stride)
        self.segment[ordinal].records = <char *>memory
        self.segment[ordinal].latest_pin = 0
        for i in range(count - self.slots_per_segment, count):
            self.bitmap[i >> 6] |= <uint64_t>1 << (i & 63)
        self.free += self.slots_per_segment
        self.slots += self.slots_per_segment
        self.segments += 1
        self.lowest_detached = ordinal + 1
        self.cursor = count - self.slots_per_segment  # the longest run of free slots there is
        return ordinal

    cdef Py_ssize_t first_slot(self, Py_ssize_t ordinal) except -1:
        if not 0 <= ordinal < self.ordinals or self.segment[ordinal].records == NULL:
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
                self.forget(<int32_t>slot, record)
                dropped += 1
            self.bitmap[slot >> 6] &= ~(<uint64_t>1 << (slot & 63))
        free(self.segment[ordinal].records)
        self.segment[ordinal].records = NULL
        self.free -= self.slots_per_segment
        self.slots -= self.slots_per_segment
        self.segments -= 1
        self.lowest_detached = min(self.lowest_detached, ordinal)
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
        cdef bint busy = False
        cdef Record *record
        for slot in range(first, first + self.slots_per_segment):
            record = self.record(<int32_t>slot)
            if record.state == READY:
                newest = max(newest, record.tick)
                busy = busy or record.refs != 0 or record.pin_until > now
            elif record.state != FREE:
                busy = True
        return newest, busy

    def oldest_tick(self) -> int:
        """The tick of the least recently used READY block; 2**63 - 1 without any."""
        return NO_TICK if self.oldest == NONE else self.record(self.oldest).tick

    # -- questions -------------------------------------------------------------------------------------------

    cdef inline void pin(self, int32_t slot, double until) noexcept nogil:
        cdef Record *record = self.record(slot)
        cdef Segment *segment = &self.segment[slot // self.slots_per_segment]
        record.pin_until = max(record.pin_until, until)
        segment.latest_pin = max(segment.latest_pin, until)

    cdef void use(
        self, int32_t *slots, Py_ssize_t n, Py_ssize_t batch, double now, bint refresh, uint64_t tick,
        double pin_until,
    ) noexcept nogil:
        """Pins and touches the first n slots of a batch. A pin only ever grows."""
        cdef Py_ssize_t i
        cdef int32_t slot
        for i in range(n):
            slot = self.readable(slots[i])
            if slots[i] != NONE and pin_until > now:
                self.pin(slots[i] if slot == NONE else slot, pin_until)
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
                if self.entry_of(key + i * self.key_bytes, batch.hashes[i]) == NULL:
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
        cdef Record *record
        for ordinal in range(self.ordinals):
            if self.segment[ordinal].records == NULL or not self.segment[ordinal].latest_pin > now:
                continue
            for i in range(self.slots_per_segment):
                record = <Record *>(self.segment[ordinal].records + i * self.stride)
                count += record.state == READY and record.pin_until > now
        return count

    def unpin(self, keys) -> int:
        """Ends the pins of the keys, expired or not; returns how many had one."""
        cdef Py_buffer view
        cdef Py_ssize_t n = self.open_keys(keys, &view), i, count = 0
        cdef int32_t slot
        cdef int32_t old
        cdef bint had
        try:
            for i in range(n):
                self.find(<const unsigned char *>view.buf + i * self.key_bytes, 1, &slot)
                if slot == NONE:
                    continue
                old = self.readable(slot)
                had = self.record(slot).pin_until > 0
                self.record(slot).pin_until = 0
                if old != NONE:
                    had = had or self.record(old).pin_until > 0
                    self.record(old).pin_until = 0
                count += had
            return count
        finally:
            PyBuffer_Release(&view)

    @property
    def nbytes(self) -> int:
        """Bytes of memory the index holds."""
        return (
            self.__sizeof__() + self.slots * self.stride + self.ordinals * sizeof(Segment)
            + self.words * sizeof(uint64_t) + (<Py_ssize_t>self.mask + 1) * sizeof(Entry)
        )

    # -- writers ---------------------------------------------------------------------------------------------

    def reserve(self, keys, bint force, uint64_t tick):
        """Gives absent keys a slot to be written: int32, one per key, a slot now WRITING or a negative verdict.

        EXISTED: READY, or WRITING by someone. DUPLICATE: earlier in this batch. NO_SPACE: no slot is free.
        ``force`` gives READY keys a new slot too; the old one stays readable until the commit. READY keys of the
        batch are touched.
        """
        cdef Py_buffer view, result
        cdef Py_ssize_t n = self.open_keys(keys, &view), i
        cdef const unsigned char *key = <const unsigned char *>view.buf
        cdef Batch batch
        cdef Entry *entry
        cdef Record *record
        cdef int32_t *out
        cdef int32_t slot, old
        memset(&batch, 0, sizeof(Batch))
        try:
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
                entry = self.entry_of(key + i * self.key_bytes, batch.hashes[i])
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
                record = self.record(slot)
                memset(record, 0, sizeof(Record))
                record.state = WRITING
                record.newer = NONE
                record.older = old
                record.hash = batch.hashes[i]
                memcpy(record_key(record), key + i * self.key_bytes, self.key_bytes)
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

    def commit(self, slots, sums, uint64_t tick) -> int:
        """Makes written slots READY with their checksums, touched tail first; negative slots are skipped.

        A block that was replaced is retired: its slot is free once no reader holds it. Returns the number
        committed. ValueError names a slot that is not WRITING, and then nothing is committed.
        """
        cdef Py_buffer view, sums_view
        cdef Py_ssize_t n = open_slots(slots, &view), count = 0, i, m
        cdef const int32_t *slot = <const int32_t *>view.buf
        cdef Record *record
        cdef Record *replaced
        try:
            m = open_sums(sums, &sums_view)
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
                        self.retire(record.older, replaced)
                    record.state = READY
                    record.checksum = (<const uint64_t *>sums_view.buf)[i]
                    record.rank = <uint32_t>(n - 1 - i)
                    record.tick = tick + record.rank
                    self.link_newest(slot[i], record)
                    count += 1
                self.writing -= count
                self.ready += count
                return count
            finally:
                PyBuffer_Release(&sums_view)
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

    cdef int check_held(self, const int32_t *slots, Py_ssize_t n) except -1:
        cdef Py_ssize_t i
        for i in range(n):
            if slots[i] >= 0 and (not self.exists(slots[i]) or self.record(slots[i]).state == FREE):
                raise self.complaint(slots[i], "a block")
        return 0

    def checksums(self, slots):
        """The checksum of each slot that holds a block, uint64; 0 for negative slots and those being written."""
        cdef Py_buffer view, result
        cdef Py_ssize_t n = open_slots(slots, &view), i
        cdef const int32_t *slot = <const int32_t *>view.buf
        try:
            self.check_held(slot, n)
            answer = _numpy.empty(n, _numpy.uint64)
            PyObject_GetBuffer(answer, &result, PyBUF_WRITABLE)
            for i in range(n):
                (<uint64_t *>result.buf)[i] = self.record(slot[i]).checksum if slot[i] >= 0 else 0
            PyBuffer_Release(&result)
            return answer
        finally:
            PyBuffer_Release(&view)

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
                    self.forget(slot, self.record(slot))
                    count += 1
            return count
        finally:
            PyBuffer_Release(&view)

    def drop(self, slots) -> int:
        """Deletes the blocks in these slots, for instance corrupt ones; slots that are not READY are ignored."""
        cdef Py_buffer view
        cdef Py_ssize_t n = open_slots(slots, &view), i, count = 0
        cdef const int32_t *slot = <const int32_t *>view.buf
        try:
            for i in range(n):
                if slot[i] >= self.ordinals * self.slots_per_segment:
                    raise self.complaint(slot[i], "ready")
            for i in range(n):
                if self.exists(slot[i]) and self.record(slot[i]).state == READY:
                    self.forget(slot[i], self.record(slot[i]))
                    count += 1
            return count
        finally:
            PyBuffer_Release(&view)

    def clear(self) -> int:
        """Deletes every READY block; returns their number."""
        cdef Py_ssize_t count = self.ready
        while self.oldest != NONE:
            self.forget(self.oldest, self.record(self.oldest))
        return count

    cdef Py_ssize_t evict_pass(self, Py_ssize_t n, double now, bint spare, bint *spared) noexcept nogil:
        cdef int32_t slot = self.oldest, newer
        cdef Record *record
        cdef uint64_t batch, held_batch = 0
        cdef bint held = False
        cdef Py_ssize_t count = 0
        while slot != NONE and count < n:
            record = self.record(slot)
            newer = record.newer
            batch = record.tick - record.rank
            if record.refs != 0 or record.pin_until > now:
                held = True
                held_batch = batch
            elif spare and held and batch == held_batch:
                spared[0] = True
            else:
                self.forget(slot, record)
                count += 1
            slot = newer
        return count

    def evict(self, Py_ssize_t n, double now) -> int:
        """Frees up to n slots from the least recently used end, tails before heads; returns how many.

        Blocks being read or pinned stay. So do the blocks above one in the chain it was last touched with, which
        it would be useless without, unless there is nothing else to evict. O(n + blocks passed over).
        """
        cdef bint spared = False
        cdef Py_ssize_t count = self.evict_pass(n, now, True, &spared)
        if spared and count < n:
            count += self.evict_pass(n - count, now, False, &spared)
        return count
