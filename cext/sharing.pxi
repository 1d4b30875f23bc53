# Blocks between processes of one host: copied from memory that another process shares, and hashed on the way.
#
# Memory is read once: a piece is hashed, which brings it to the first cache, and copied from there. What is hashed is what
# is copied, as long as nobody writes to the source. Measured (917 504 bytes a block, 112 MiB, AVX-512 machine): with
# pieces of 2 KiB, written past the caches, copy and hash take 0.86 times as long as one memcpy of all the bytes; with 8
# KiB 1.4 times.

cdef extern from *:
    """
    #define KV_PIECE (2 * XXH3_BLOCK)

    /* Copies whole cache lines to a destination at the beginning of one. */
    static void kv_copy_lines(uint8_t *dst, const uint8_t *src, size_t size, int stream) {
    #if defined(__x86_64__)
        if (stream) {
            for (; size >= 64; dst += 64, src += 64, size -= 64) {
                __m128i a = _mm_loadu_si128((const __m128i *)src), b = _mm_loadu_si128((const __m128i *)src + 1);
                __m128i c = _mm_loadu_si128((const __m128i *)src + 2), d = _mm_loadu_si128((const __m128i *)src + 3);
                _mm_stream_si128((__m128i *)dst, a), _mm_stream_si128((__m128i *)dst + 1, b);
                _mm_stream_si128((__m128i *)dst + 2, c), _mm_stream_si128((__m128i *)dst + 3, d);
            }
            return;
        }
    #endif
        memcpy(dst, src, size);
    }

    /* Copies size bytes and returns their xxh3-64 with seed 0. stream: write past the caches. The copy lags behind the
     * hash, so that it always ends with a cache line of the destination: lines written in two parts cost a read. */
    static uint64_t kv_copy_and_hash(uint8_t *dst, const uint8_t *src, size_t size, int stream, const xxh3_variant *v) {
        if (size <= KV_PIECE) {
            memcpy(dst, src, size);
            return xxh3_64(src, size, 0, v);
        }
        uint64_t acc[8] __attribute__((aligned(64)));
        size_t blocks = (size - 1) / XXH3_BLOCK, hashed = 0, copied = -(size_t)dst & 63;
        memcpy(dst, src, copied);
        xxh3_start(acc);
        while (blocks > 0) {
            size_t n = blocks < KV_PIECE / XXH3_BLOCK ? blocks : KV_PIECE / XXH3_BLOCK;
            v->blocks(acc, src + hashed, n, xxh3_secret);
            hashed += n * XXH3_BLOCK;
            blocks -= n;
            size_t lines = (hashed - copied) & ~(size_t)63;
            kv_copy_lines(dst + copied, src + copied, lines, stream);
            copied += lines;
        }
        xxh3_tail(acc, src, size, xxh3_secret, v);
        memcpy(dst + copied, src + copied, size - copied);
        return xxh3_merge(acc, xxh3_secret + 11, size * XXH3_P64_1);
    }
    """
    uint64_t kv_copy_and_hash(uint8_t *dst, const uint8_t *src, size_t size, int stream, const xxh3_variant *v) nogil


def copy_blocks(sources, files, offsets, Py_ssize_t block_bytes, out, places, sums=None):
    """Copies n blocks to ``out`` and returns their xxh3-64 as (n,) uint64; memory is read once for both.

    Block i is the ``block_bytes`` bytes at ``offsets[i]`` of ``sources[files[i]]``. ``sources``: C-contiguous buffers,
    to which nobody writes meanwhile. ``files``, ``offsets``, ``places``: n numbers each, contiguous int64. ``out``:
    writable; either rows of ``block_bytes``, dense within a row, of which ``places[i]`` is the one for block i; or one
    contiguous vector of bytes, in which the block begins at byte ``places[i]``. ``sums``: where to write the result, n
    words of uint64; a new array by default.

    Raises ValueError, TypeError or IndexError, before any byte is copied, when an argument is not as described or a
    block does not lie within its source or in ``out``. Copies without the GIL; thread-safe as long as no other thread
    writes to the same memory. Large copies go past the caches.
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
    found = np.empty(count, dtype=np.uint64) if sums is None else sums
    cdef uint64_t *sum = _sums(held, found, count, True, "sums")
    cdef const char **from_ = <const char **>malloc(max(count, 1) * sizeof(char *))
    cdef char **to = <char **>malloc(max(count, 1) * sizeof(char *))
    try:
        if from_ == NULL or to == NULL:
            raise MemoryError()
        for i in range(count):  # the addresses are computed here, so that no thread can change what was checked
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
            _copy_and_hash(from_, to, count, block_bytes, sum)
    finally:
        free(from_)
        free(to)
    return found


cdef void _copy_and_hash(const char **from_, char **to, Py_ssize_t count, Py_ssize_t block_bytes,
                         uint64_t *sum) noexcept nogil:
    cdef Py_ssize_t i
    cdef bint stream = <size_t>(count * block_bytes) >= _stream_bytes
    for i in range(count):
        sum[i] = kv_copy_and_hash(<uint8_t *>to[i], <const uint8_t *>from_[i], block_bytes, stream, _best)
    if stream:
        kv_copy_fence()


cdef class LentBlock:
    """Bytes of a block that another process shares: read-only, through the buffer protocol, in any number of views.

    ``in_use``: whether a view of it exists, also an indirect one, such as an array made of a memoryview. The bytes must
    not change or go before then. Thread-safe while the GIL is held.
    """

    cdef object __weakref__
    cdef _Buffers held
    cdef char *start
    cdef Py_ssize_t nbytes
    cdef Py_ssize_t views

    def __cinit__(self, source, Py_ssize_t offset, Py_ssize_t nbytes):
        """The ``nbytes`` bytes at ``offset`` of ``source``, a C-contiguous buffer. Raises IndexError if they are not all
        within it."""
        self.held = _Buffers(1)
        cdef Py_buffer *view = self.held.take(source, PyBUF_SIMPLE, "source")
        if not (nbytes > 0 and 0 <= offset <= view.len - nbytes):
            raise IndexError(f"{nbytes} bytes at {offset}: not within the {view.len} bytes of the source")
        self.start = <char *>view.buf + offset
        self.nbytes = nbytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.start, self.nbytes, 1, flags)
        self.views += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.views -= 1

    @property
    def in_use(self):
        return self.views > 0
