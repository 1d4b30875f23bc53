# Checksums of blocks, and prefix hash chains over tokens. Both use XXH3 (``xxh3.h``).
#
# The functions hash without the GIL and keep no state, so all of them are thread-safe.

cdef extern from "xxh3.h" nogil:
    ctypedef struct xxh3_u128:
        uint64_t low, high
    ctypedef struct xxh3_variant:
        const char *name
    int xxh3_variants(xxh3_variant *table)
    void xxh3_canonical(uint8_t *out, xxh3_u128 h)
    uint64_t xxh3_64(const uint8_t *data, size_t size, uint64_t seed, const xxh3_variant *variant)
    xxh3_u128 xxh3_128(const uint8_t *data, size_t size, uint64_t seed, const xxh3_variant *variant)

cdef xxh3_variant _variants[4]
cdef int _variant_count = xxh3_variants(_variants)
cdef const xxh3_variant *_best = &_variants[_variant_count - 1]


def checksum(buffer):
    """Returns the xxh3-64 (seed 0) of a C-contiguous buffer, as an int.

    The buffer may be read-only. Raises TypeError if it is not a buffer and ValueError if it is not C-contiguous.
    Thread-safe. Hashes without the GIL. Equal to ``xxhash.xxh3_64_intdigest(buffer)``.
    """
    cdef _Buffers held = _Buffers(1)
    cdef Py_buffer *view = held.take(buffer, PyBUF_SIMPLE, "buffer")
    cdef uint64_t value
    with nogil:
        value = xxh3_64(<uint8_t *>view.buf, view.len, 0, _best)
    return value


def checksum_into(buffers, out):
    """Writes the xxh3-64 of ``buffers[i]`` to ``out[i]``.

    ``buffers``: a sequence of C-contiguous buffers of any sizes.
    ``out``: a writable, contiguous uint64 array with one word for each buffer.

    Raises TypeError or ValueError, before anything is written, if an argument is not as described. Thread-safe as long
    as no other thread writes to these buffers. Releases the GIL once, for all of them.
    """
    cdef list sources = list(buffers)
    cdef Py_ssize_t i, count = len(sources)
    cdef _Buffers held = _Buffers(count + 1)
    for i in range(count):
        held.take(sources[i], PyBUF_SIMPLE, "a buffer of buffers")
    cdef uint64_t *sums = _sums(held, out, count, True, "out")
    cdef Py_buffer *views = held.views
    with nogil:
        for i in range(count):
            sums[i] = xxh3_64(<uint8_t *>views[i].buf, views[i].len, 0, _best)


def checksum_blocks(base, Py_ssize_t block_bytes, out):
    """Writes the xxh3-64 of each block of ``base`` to ``out``.

    ``base``: one C-contiguous buffer of n * ``block_bytes`` bytes.
    ``out``: a writable, contiguous uint64 array of n words.

    Raises TypeError or ValueError, before anything is written, if the arguments do not fit. Thread-safe. Hashes without
    the GIL.
    """
    cdef _Buffers held = _Buffers(2)
    cdef Py_buffer *view = held.take(base, PyBUF_SIMPLE, "base")
    cdef Py_ssize_t i, count = _block_count(view, block_bytes)
    cdef uint64_t *sums = _sums(held, out, count, True, "out")
    cdef uint8_t *data = <uint8_t *>view.buf
    with nogil:
        for i in range(count):
            sums[i] = xxh3_64(data + i * block_bytes, block_bytes, 0, _best)


def checksum_at(base, offsets, Py_ssize_t block_bytes):
    """Returns the xxh3-64 of n blocks as (n,) uint64. Block i is the ``block_bytes`` bytes at ``offsets[i]`` of
    ``base``.

    ``base``: one C-contiguous buffer.
    ``offsets``: a contiguous int64 array of n numbers.

    Raises TypeError, ValueError or IndexError, before anything is hashed, if an argument is not as described or a block
    does not lie within ``base``. Thread-safe as long as no other thread writes to the blocks. Hashes without the GIL.
    """
    cdef _Buffers held = _Buffers(3)
    cdef Py_buffer *view = held.take(base, PyBUF_SIMPLE, "base")
    cdef Py_buffer *numbers = _int64s(held, offsets, "offsets", True)
    cdef Py_ssize_t i, count = numbers.shape[0]
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be at least 1, got {block_bytes}")
    found = np.empty(count, dtype=np.uint64)
    cdef uint64_t *sums = _sums(held, found, count, True, "found")
    cdef const uint8_t **blocks = <const uint8_t **>malloc(max(count, 1) * sizeof(uint8_t *))
    try:
        if blocks == NULL:
            raise MemoryError()
        for i in range(count):  # checked in this loop, so that no thread can change the offsets after the check
            if not 0 <= (<const int64_t *>numbers.buf)[i] <= view.len - block_bytes:
                raise IndexError(f"offsets[{i}] is {(<const int64_t *>numbers.buf)[i]}: a block of {block_bytes} bytes "
                                 f"there is not within the {view.len} bytes of base")
            blocks[i] = <const uint8_t *>view.buf + (<const int64_t *>numbers.buf)[i]
        with nogil:
            for i in range(count):
                sums[i] = xxh3_64(blocks[i], block_bytes, 0, _best)
    finally:
        free(blocks)
    return found


# ---- prefix hash chains ----

cdef Py_ssize_t _pack_tokens(uint32_t *dst, const char *src, Py_ssize_t stride, Py_ssize_t itemsize,
                             Py_ssize_t count) noexcept nogil:
    """Narrows tokens to uint32. Returns the position of the first token that does not fit, or -1 if all fit."""
    cdef Py_ssize_t i
    cdef uint64_t misfit = 0
    cdef int32_t narrow
    cdef int64_t wide
    cdef const int64_t *words
    if itemsize == 4 and stride == 4:
        memcpy(dst, src, 4 * count)
        for i in range(count):
            misfit |= dst[i] >> 31
    elif itemsize == 8 and stride == 8 and <size_t>src % 8 == 0:
        words = <const int64_t *>src
        for i in range(count):
            dst[i] = <uint32_t>words[i]
            misfit |= (<uint64_t>words[i]) >> 32
    else:
        misfit = 1
    if not misfit:
        return -1
    for i in range(count):
        if itemsize == 4:
            memcpy(&narrow, src + i * stride, 4)
            wide = narrow
        else:
            memcpy(&wide, src + i * stride, 8)
        if <uint64_t>wide >> 32:
            return i
        dst[i] = <uint32_t>wide
    return -1


def prefix_keys(tokens, Py_ssize_t block_tokens, bytes seed not None=b"", parent=None):
    """Returns the chain of prefix keys of a token sequence: row i is the key of block i and of all blocks before it.

    ``tokens``: 1-D int32 or int64 array of n tokens, with any stride. Returns an (n // block_tokens, 16) uint8 array. A
    trailing partial block is ignored (and not read). The layout, for other implementations (always XXH3-128 with seed
    0, canonical digest: 16 bytes, big-endian, high half first)::

        key[-1] = xxh3_128(seed)                                            # the root; or ``parent``
        key[i]  = xxh3_128(key[i-1] + tokens of block i, each as 4 bytes little-endian unsigned)

    So int32 and int64 arrays of the same tokens give the same keys. ``parent``, the last key of an earlier call,
    continues the chain of that call. If ``len(a)`` is a multiple of ``block_tokens``, the keys of ``a + b`` are the
    keys of ``a`` followed by the keys of ``b`` with ``parent=keys_of_a[-1]``. With ``parent``, ``seed`` is not used.

    Raises TypeError if ``tokens`` is another kind of array. Raises ValueError if ``block_tokens`` < 1, if ``parent`` is
    not exactly 16 bytes, or if a token is negative or >= 2**32 (the message names the first such token). Thread-safe.
    Hashes without the GIL.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    cdef _Buffers held = _Buffers(3)
    cdef Py_buffer *view = held.take(tokens, PyBUF_STRIDES | PyBUF_FORMAT, "tokens")
    if view.ndim != 1 or not (_is_int(view, 4, True) or _is_int(view, 8, True)):
        raise TypeError(f"tokens must be a 1-D int32 or int64 array, got {view.ndim}-D of format "
                        f"{(view.format or b'B').decode()!r}; np.asarray(tokens, dtype=np.int64) makes one")
    cdef uint8_t root[16]
    cdef Py_buffer *given
    if parent is None:
        xxh3_canonical(root, xxh3_128(<const uint8_t *><const char *>seed, len(seed), 0, _best))
    else:
        given = held.take(parent, PyBUF_SIMPLE, "parent")
        if given.len != 16:
            raise ValueError(f"parent must be a key of exactly 16 bytes, got {given.len}")
        memcpy(root, given.buf, 16)

    cdef Py_ssize_t count = view.shape[0] // block_tokens
    keys = np.empty((count, 16), dtype=np.uint8)
    if count == 0:
        return keys
    cdef uint8_t *key = <uint8_t *>held.take(keys, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE, "keys").buf
    cdef uint8_t on_stack[4096 + 16]  # the message to hash: the parent's key, followed by one block's tokens
    cdef uint8_t *message = on_stack
    if block_tokens > 1024:
        message = <uint8_t *>malloc(16 + 4 * block_tokens)
        if message == NULL:
            raise MemoryError()
    cdef Py_ssize_t i, bad = -1, stride = view.strides[0], itemsize = view.itemsize
    cdef const char *source = <const char *>view.buf
    with nogil:
        memcpy(message, root, 16)
        for i in range(count):
            bad = _pack_tokens(<uint32_t *>(message + 16), source, stride, itemsize, block_tokens)
            if bad >= 0:
                bad += i * block_tokens
                break
            xxh3_canonical(message, xxh3_128(message, 16 + 4 * block_tokens, 0, _best))
            memcpy(key + 16 * i, message, 16)
            source += block_tokens * stride
        if message != on_stack:
            free(message)
    if bad >= 0:
        raise ValueError(f"tokens[{bad}] is {tokens[bad]}; a token must be in 0 .. 2**32 - 1")
    return keys


# ---- for the tests: each variant that this CPU can run, by name ----

cdef const xxh3_variant *_variant(str name) except NULL:
    cdef int i
    for i in range(_variant_count):
        if _variants[i].name.decode() == name:
            return &_variants[i]
    raise ValueError(f"variant is {name!r}, expected one that this CPU runs: {_xxh3_variants()}")


def _xxh3_variants():
    """Returns the names of the variants that this CPU can run, the slowest first. The last one is in use."""
    return [_variants[i].name.decode() for i in range(_variant_count)]


def _xxh3_64(buffer, uint64_t seed, str variant):
    cdef _Buffers held = _Buffers(1)
    cdef Py_buffer *view = held.take(buffer, PyBUF_SIMPLE, "buffer")
    return xxh3_64(<uint8_t *>view.buf, view.len, seed, _variant(variant))


def _xxh3_128(buffer, uint64_t seed, str variant):
    cdef _Buffers held = _Buffers(1)
    cdef Py_buffer *view = held.take(buffer, PyBUF_SIMPLE, "buffer")
    cdef uint8_t digest[16]
    xxh3_canonical(digest, xxh3_128(<uint8_t *>view.buf, view.len, seed, _variant(variant)))
    return digest[:16]

