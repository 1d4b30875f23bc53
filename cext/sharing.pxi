# Blocks between processes of one host: they are copied from memory that another process shares, and hashed on the way.
#
# Memory is read only once. Each cache line is hashed and stored while it is in the first cache. Large copies
# bypass the caches when they are stored. The hashed bytes are the copied ones, as long as no process writes to the
# source.

cdef extern from *:
    """
    /* Copies size bytes and returns their xxh3-64 with seed 0. stream: whether to write past the caches. The copy first
     * fills the destination's first cache line, and stays that far ahead of the hash, because a line that is written in
     * two parts costs a read. */
    static uint64_t kv_copy_and_hash(uint8_t *dst, const uint8_t *src, size_t size, int stream, const xxh3_variant *v) {
        size_t shift = -(size_t)dst & 63;
        if (size <= 2 * XXH3_BLOCK) {
            memcpy(dst, src, size);
            return xxh3_64(src, size, 0, v);
        }
        uint64_t acc[8] __attribute__((aligned(64)));
        size_t blocks = (size - 1) / XXH3_BLOCK, together = (size - shift) / XXH3_BLOCK;
        if (together > blocks) together = blocks;
        memcpy(dst, src, shift);
        xxh3_start(acc);
        v->copy(acc, src, together, xxh3_secret, dst + shift, shift, stream);
        v->blocks(acc, src + together * XXH3_BLOCK, blocks - together, xxh3_secret);
        xxh3_tail(acc, src, size, xxh3_secret, v);
        size_t copied = shift + together * XXH3_BLOCK;
        memcpy(dst + copied, src + copied, size - copied);
        return xxh3_merge(acc, xxh3_secret + 11, size * XXH3_P64_1);
    }
    """
    uint64_t kv_copy_and_hash(uint8_t *dst, const uint8_t *src, size_t size, int stream, const xxh3_variant *v) nogil


def copy_blocks(sources, files, offsets, Py_ssize_t block_bytes, out, places, Py_ssize_t in_all=0):
    """Copies n blocks to ``out`` and returns their xxh3-64 as (n,) uint64. Memory is read once for both.

    Block i is the ``block_bytes`` bytes at ``offsets[i]`` of ``sources[files[i]]``.
    ``sources``: C-contiguous buffers, which must not change meanwhile.
    ``files``, ``offsets``, ``places``: contiguous int64 arrays of n numbers each.
    ``out``: writable. It is either rows of ``block_bytes``, dense within a row, or one contiguous vector of bytes.
    Block i goes to row ``places[i]``, or begins at byte ``places[i]``.
    ``in_all``: the number of bytes that this call and the other calls for the same transfer copy together.

    Raises ValueError, TypeError or IndexError, before any byte is copied, if an argument is not as described or a block
    does not lie within its source or in ``out``. Copies without the GIL. Thread-safe as long as no other thread writes
    to the same memory. Large copies bypass the caches.
    """
    cdef list given = list(sources)
    cdef Py_ssize_t i, source_count = len(given)
    cdef _Buffers held = _Buffers(source_count + 5)
    for i in range(source_count):
        held.take(given[i], PyBUF_SIMPLE, f"sources[{i}]")
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be at least 1, got {block_bytes}")
    cdef Py_buffer *view = _int64s(held, files, "files", True)
    cdef const int64_t *file = <const int64_t *>view.buf
    cdef Py_ssize_t count = view.shape[0]
    view = _int64s(held, offsets, "offsets", True)
    cdef const int64_t *offset = <const int64_t *>view.buf
    if view.shape[0] != count:
        raise ValueError(f"{count} files and {view.shape[0]} offsets: expected as many")
    view = _int64s(held, places, "places", True)
    cdef const int64_t *place = <const int64_t *>view.buf
    if view.shape[0] != count:
        raise ValueError(f"{count} files and {view.shape[0]} places: expected as many")
    cdef Py_buffer *target = held.take(out, PyBUF_STRIDES | PyBUF_WRITABLE, "out")
    cdef Py_ssize_t stride = 1, places_end, rows = -1
    if target.ndim == 1 and target.itemsize == 1 and (target.strides[0] == 1 or not target.len):
        places_end = target.len - block_bytes
    else:
        stride = _check_rows(target, &rows, block_bytes, "out")
        places_end = rows - 1
    found = np.empty(count, dtype=np.uint64)
    cdef uint64_t *sum = _sums(held, found, count, True, "found")
    cdef const char **from_ = <const char **>malloc(max(count, 1) * sizeof(char *))
    cdef char **to = <char **>malloc(max(count, 1) * sizeof(char *))
    try:
        if from_ == NULL or to == NULL:
            raise MemoryError()
        for i in range(count):  # addresses are computed in this loop, so that no thread can change them after the check
            if not 0 <= file[i] < source_count:
                raise IndexError(f"files[{i}] is {file[i]}, but there are {source_count} sources")
            if not 0 <= offset[i] <= held.views[file[i]].len - block_bytes:
                raise IndexError(f"offsets[{i}] is {offset[i]}: a block of {block_bytes} bytes there is not within the "
                                 f"{held.views[file[i]].len} bytes of its source")
            if not 0 <= place[i] <= places_end:
                raise IndexError(f"places[{i}] is {place[i]}: expected 0 to {places_end}")
            from_[i] = <const char *>held.views[file[i]].buf + offset[i]
            to[i] = <char *>target.buf + place[i] * stride
        with nogil:
            _copy_and_hash(from_, to, count, block_bytes, max(in_all, count * block_bytes), sum)
    finally:
        free(from_)
        free(to)
    return found


cdef void _copy_and_hash(const char **from_, char **to, Py_ssize_t count, Py_ssize_t block_bytes, Py_ssize_t in_all,
                         uint64_t *sum) noexcept nogil:
    cdef Py_ssize_t i
    cdef bint stream = <size_t>in_all >= _stream_bytes
    for i in range(count):
        sum[i] = kv_copy_and_hash(<uint8_t *>to[i], <const uint8_t *>from_[i], block_bytes, stream, _best)
    if stream:
        kv_copy_fence()


def _copy_and_hash_with(source, out, Py_ssize_t place, bint stream, str variant):
    """For the tests: copies ``source`` to byte ``place`` of ``out`` with the given variant. Returns the checksum."""
    cdef _Buffers held = _Buffers(2)
    cdef Py_buffer *given = held.take(source, PyBUF_SIMPLE, "source")
    cdef Py_buffer *target = held.take(out, PyBUF_SIMPLE | PyBUF_WRITABLE, "out")
    if not 0 <= place <= target.len - given.len:
        raise IndexError(f"place is {place}: expected 0 to {target.len - given.len}")
    return kv_copy_and_hash(<uint8_t *>target.buf + place, <const uint8_t *>given.buf, given.len, stream,
                            _variant(variant))


def distinct_files(numbers):
    """Returns the distinct values of ``numbers``, in the order of their first occurrence, as a list of int. Returns
    also the place of each number in that list, as int64.

    ``numbers``: n numbers, uint64. There should be only a few distinct values, because each number is compared with all
    of them.
    """
    cdef _Buffers held = _Buffers(2)
    cdef Py_buffer *view = _vector(held, np.ascontiguousarray(numbers, dtype=np.uint64), 8, b"LQ", "numbers")
    cdef const uint64_t *given = <const uint64_t *>view.buf
    cdef Py_ssize_t i, j = 0, count = view.shape[0]
    found = np.empty(count, dtype=np.int64)
    cdef int64_t *places = <int64_t *>_vector(held, found, 8, b"lq", "places", True).buf
    cdef list distinct = []
    for i in range(count):
        if not distinct or given[i] != <uint64_t>distinct[j]:
            for j in range(len(distinct)):
                if <uint64_t>distinct[j] == given[i]:
                    break
            else:
                j = len(distinct)
                distinct.append(given[i])
        places[i] = j
    return distinct, found


def outcomes_of(slots, bytes codes):
    """Returns one byte per item: ``codes[0]`` for a slot, and ``codes[-verdict]`` for a negative verdict.

    ``slots``: contiguous int32. Raises IndexError for a verdict that has no code.
    """
    cdef _Buffers held = _Buffers(1)
    cdef Py_buffer *view = _vector(held, slots, 4, b"i", "slots")
    cdef const int32_t *given = <const int32_t *>view.buf
    cdef Py_ssize_t i, count = view.shape[0], known = len(codes)
    cdef const char *code = codes
    cdef bytes outcomes = PyBytes_FromStringAndSize(NULL, count)
    cdef char *out = PyBytes_AS_STRING(outcomes)
    for i in range(count):
        if given[i] <= -known:
            raise IndexError(f"slots[{i}] is {given[i]}: expected a slot or a verdict above {-known}")
        out[i] = code[0] if given[i] >= 0 else code[-given[i]]
    return outcomes


def slot_offsets(slots, starts, Py_ssize_t slots_per_segment, Py_ssize_t block_bytes):
    """Returns where the blocks in ``slots`` begin, as int64. Segment ``slot // slots_per_segment`` begins at
    ``starts[segment]``, and its slots follow one another.

    ``slots``: contiguous int32. ``starts``: contiguous int64. Raises IndexError for a slot outside the segments.
    """
    cdef _Buffers held = _Buffers(3)
    cdef Py_buffer *view = _vector(held, slots, 4, b"i", "slots")
    cdef Py_buffer *segments = _vector(held, starts, 8, b"lq", "starts")
    cdef const int32_t *given = <const int32_t *>view.buf
    cdef const int64_t *begins = <const int64_t *>segments.buf
    cdef Py_ssize_t i, segment, count = view.shape[0]
    found = np.empty(count, dtype=np.int64)
    cdef int64_t *offsets = <int64_t *>_vector(held, found, 8, b"lq", "offsets", True).buf
    for i in range(count):
        segment = given[i] // slots_per_segment
        if given[i] < 0 or segment >= segments.shape[0]:
            raise IndexError(f"slots[{i}] is {given[i]}: expected one of {segments.shape[0]} segments")
        offsets[i] = begins[segment] + (given[i] - segment * slots_per_segment) * block_bytes
    return found


def references_to(offsets, Py_ssize_t segment_bytes, numbers, told):
    """Returns references to the blocks at ``offsets`` of an arena of segments of ``segment_bytes``, and the segments to
    report. These are the segments whose number is 0 or differs from the number in ``told``. Each is listed once.

    ``offsets``: contiguous int64. ``numbers``, ``told``: contiguous uint64, by segment. A reference is the segment's
    number and the offset within the segment, so references have the shape (n, 2), uint64. Raises IndexError for an
    offset outside the segments.
    """
    cdef _Buffers held = _Buffers(4)
    cdef Py_buffer *view = _vector(held, offsets, 8, b"lq", "offsets")
    cdef Py_buffer *every = _vector(held, numbers, 8, b"LQ", "numbers")
    cdef Py_buffer *before = _vector(held, told, 8, b"LQ", "told")
    cdef const int64_t *given = <const int64_t *>view.buf
    cdef const uint64_t *number = <const uint64_t *>every.buf
    cdef const uint64_t *known = <const uint64_t *>before.buf
    cdef Py_ssize_t i, segment, last = -1, count = view.shape[0], segments = min(every.shape[0], before.shape[0])
    cdef list strange = []
    found = np.empty(2 * count, dtype=np.uint64)
    cdef uint64_t *references = <uint64_t *>_vector(held, found, 8, b"LQ", "references", True).buf
    for i in range(count):
        segment = given[i] // segment_bytes
        if given[i] < 0 or segment >= segments:
            raise IndexError(f"offsets[{i}] is {given[i]}: expected one in {segments} segments of {segment_bytes} bytes")
        references[2 * i] = number[segment]
        references[2 * i + 1] = <uint64_t>(given[i] - segment * segment_bytes)
        if segment != last and (number[segment] == 0 or known[segment] != number[segment]) and segment not in strange:
            strange.append(segment)
        last = segment
    return found.reshape(count, 2), strange


def all_inside(offsets, int64_t size, which, pieces) -> bool:
    """Returns whether all blocks of ``size`` bytes at these offsets lie within their pieces. Block i must lie in piece
    ``which[i]``, which has ``pieces[which[i]]`` bytes. All arrays are contiguous int64. Raises IndexError if there is
    no such piece."""
    cdef _Buffers held = _Buffers(3)
    cdef Py_buffer *view = _vector(held, offsets, 8, b"lq", "offsets")
    cdef Py_buffer *sizes = _vector(held, pieces, 8, b"lq", "pieces")
    cdef Py_ssize_t i, count = view.shape[0], piece_count = sizes.shape[0]
    cdef const int64_t *offset = <const int64_t *>view.buf
    cdef const int64_t *piece = <const int64_t *>_column(held, which, count, b"lq", "which")
    cdef const int64_t *nbytes = <const int64_t *>sizes.buf
    for i in range(count):
        if not 0 <= piece[i] < piece_count:
            raise IndexError(f"which[{i}] is {piece[i]}, but there are {piece_count} pieces")
        if not 0 <= offset[i] <= nbytes[piece[i]] - size:
            return False
    return True


cdef class LentBlocks:
    """Blocks that another process shares: block i is the ``block_bytes`` bytes at ``offsets[i]`` of
    ``sources[files[i]]``. ``sources`` are contiguous buffers. ``files`` and ``offsets`` are contiguous int64 arrays of
    n numbers each.

    The object lives as long as any view of a block, even an indirect one, such as an array made from a memoryview.
    Until then the bytes must neither change nor vanish. Raises ValueError, TypeError or IndexError if an argument is
    not as described. Thread-safe, because the GIL is held.
    """

    cdef object __weakref__
    cdef _Buffers held
    cdef char **starts
    cdef Py_ssize_t count, block_bytes
    cdef char *next  # the block of which a view is now made

    def __cinit__(self, sources, files, offsets, Py_ssize_t block_bytes):
        cdef list given = list(sources)
        cdef Py_ssize_t i, source_count = len(given)
        cdef _Buffers numbers = _Buffers(2)
        cdef Py_buffer *view = _int64s(numbers, files, "files", True)
        cdef const int64_t *file = <const int64_t *>view.buf
        self.count, self.block_bytes = view.shape[0], block_bytes
        view = _int64s(numbers, offsets, "offsets", True)
        cdef const int64_t *offset = <const int64_t *>view.buf
        if view.shape[0] != self.count or block_bytes < 1:
            raise ValueError(f"{self.count} files and {view.shape[0]} offsets of blocks of {block_bytes} bytes: expected "
                             "as many, of at least a byte")
        self.held = _Buffers(source_count)
        for i in range(source_count):
            self.held.take(given[i], PyBUF_SIMPLE, f"sources[{i}]")
        self.starts = <char **>malloc(max(self.count, 1) * sizeof(char *))
        if self.starts == NULL:
            raise MemoryError()
        for i in range(self.count):
            if not 0 <= file[i] < source_count:
                raise IndexError(f"files[{i}] is {file[i]}, but there are {source_count} sources")
            view = &self.held.views[file[i]]
            if not 0 <= offset[i] <= view.len - block_bytes:
                raise IndexError(f"offsets[{i}] is {offset[i]}: a block of {block_bytes} bytes there is not within the "
                                 f"{view.len} bytes of its source")
            self.starts[i] = <char *>view.buf + offset[i]

    def __dealloc__(self):
        free(self.starts)

    def views(self):
        """Returns a read-only memoryview of each block."""
        cdef Py_ssize_t i
        cdef list made = []
        try:
            for i in range(self.count):
                self.next = self.starts[i]
                made.append(memoryview(self))
        finally:
            self.next = NULL
        return made

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.next == NULL:
            raise BufferError("blocks that were lent: only `views` makes views of them")
        PyBuffer_FillInfo(view, self, self.next, self.block_bytes, 1, flags)


cdef extern from *:
    """
    enum { KV_RING_IDS = 496 };
    struct kv_ring {  /* the fields of the two sides are in different cache lines */
        uint64_t put, unused_1[7];  /* ids put there since the beginning; written by the writer */
        uint64_t taken, waits, unused_2[6];  /* ids taken, and whether the reader waits; written by the reader */
        uint64_t ids[KV_RING_IDS];
    };

    /* Returns 1 if the id is in the ring and the reader does not wait for a message. */
    static int kv_ring_put(struct kv_ring *ring, uint64_t *put, uint64_t id) {
        uint64_t in_it = *put - __atomic_load_n(&ring->taken, __ATOMIC_ACQUIRE);
        if (in_it >= KV_RING_IDS) return 0;
        __atomic_store_n(&ring->ids[*put % KV_RING_IDS], id, __ATOMIC_RELAXED);
        __atomic_store_n(&ring->put, ++*put, __ATOMIC_SEQ_CST);
        return !__atomic_load_n(&ring->waits, __ATOMIC_SEQ_CST);
    }

    /* Returns the number of ids copied to `ids`, or -1 if the writer wrote nonsense, which is then skipped. */
    static int kv_ring_take(struct kv_ring *ring, uint64_t *taken, int waits, uint64_t *ids) {
        __atomic_store_n(&ring->waits, (uint64_t)waits, __ATOMIC_SEQ_CST);
        uint64_t put = __atomic_load_n(&ring->put, __ATOMIC_SEQ_CST), count = put - *taken;
        int found = count > KV_RING_IDS ? -1 : (int)count;
        for (int i = 0; i < found; i++)
            ids[i] = __atomic_load_n(&ring->ids[(*taken + i) % KV_RING_IDS], __ATOMIC_RELAXED);
        *taken = put;
        __atomic_store_n(&ring->taken, put, __ATOMIC_RELEASE);
        return found;
    }
    """
    enum:
        KV_RING_IDS
    struct kv_ring:
        pass
    int kv_ring_put(kv_ring *ring, uint64_t *put, uint64_t id) nogil
    int kv_ring_take(kv_ring *ring, uint64_t *taken, int waits, uint64_t *ids) nogil


cdef class IdRing:
    """Numbers that one process puts into shared memory and another process takes from there. These messages wake no
    process. Neither side trusts what the other side writes there.

    ``memory``: ``IdRing.NBYTES`` writable bytes at a multiple of 8, which are zeros before the first use. Each side has
    an object of its own. Each object is thread-safe, because the GIL is held.
    """

    NBYTES = sizeof(kv_ring)

    cdef _Buffers held
    cdef kv_ring *ring
    cdef uint64_t count  # the number of ids that this side has put or taken

    def __cinit__(self, memory):
        self.held = _Buffers(1)
        cdef Py_buffer *view = self.held.take(memory, PyBUF_SIMPLE | PyBUF_WRITABLE, "memory")
        if view.len != sizeof(kv_ring) or <size_t>view.buf % 8:
            raise ValueError(f"{view.len} bytes of memory: expected {sizeof(kv_ring)}, at a multiple of 8")
        self.ring = <kv_ring *>view.buf

    def put(self, uint64_t id):
        """Puts a number into the ring. Returns False if there is no room for it, or if the other side waits for a
        message. Then the other side must be informed in another way."""
        return bool(kv_ring_put(self.ring, &self.count, id))

    def take(self, bint waits=False):
        """Returns the numbers that were put into the ring since the last call, in order. ``waits``: the other side's
        `put` returns False from now on, until the next call without ``waits``."""
        cdef uint64_t[496] ids
        cdef int i, found = kv_ring_take(self.ring, &self.count, waits, ids)
        return [ids[i] for i in range(found)]


cdef extern from *:
    """
    static inline void kv_memory_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    """
    void kv_memory_fence() nogil


def memory_fence():
    """Orders memory accesses between processes that share memory without a common lock. If a reader sees a write that
    this thread made after the fence, it also sees the writes that the thread made before the fence. Reads after the
    fence are at least as new as those before it. A writer calls this before it sets a flag, and a reader calls it
    after it has seen the flag."""
    kv_memory_fence()
