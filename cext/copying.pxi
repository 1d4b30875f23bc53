# Gather and scatter: blocks between the engine's layers (any strides) and rows of packed blocks.
#
# A layer is an array whose first axis is the block. Its inner axes are collapsed once per call. Beginning with the last
# axis, dense axes are joined into one *run*, which one memcpy copies. The axes outside the run are counted through like
# the digits of an odometer. So a contiguous block takes one copy, and a block with a moved axis a few. Only a block
# whose innermost axis is strided is copied item by item. The unit of work is one pair of row and layer: its bytes are
# packed at row * row_stride + layer * inner_bytes. Bytes are copied once, either from the layer to the row or back.
#
# With slots, the packed rows are scattered in a larger pool: row i is row slots[i] of the pool.
#
# What must hold: every block id and slot is checked, in a private copy, before the first byte is copied. There is no
# other check of bounds.

cdef extern from *:
    """
    #include <unistd.h>

    /* If a call copies at least this many bytes, its destination is no longer in the caches when it is next used.
     * Then the destination is written past the caches, which saves reading it first. The size is half of the last-level
     * cache, within bounds, because virtual machines report wrong sizes. */
    static size_t kv_copy_stream_bytes(void) {
        long cache = -1;
    #ifdef _SC_LEVEL3_CACHE_SIZE
        cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    #endif
        size_t half = cache > 0 ? (size_t)cache / 2 : (size_t)16 << 20;
        return half < ((size_t)4 << 20) ? (size_t)4 << 20 : half > ((size_t)32 << 20) ? (size_t)32 << 20 : half;
    }

    /* The number of bytes to prefetch. The hardware prefetcher stops at every page, and starts late in every block. */
    #define KV_COPY_AHEAD 1024
    static void kv_copy_prefetch(const char *src, size_t size) {
        for (size_t i = 0; i < size && i < KV_COPY_AHEAD; i += 64) __builtin_prefetch(src + i, 0, 3);
    }

    /* A memcpy that writes whole cache lines past the caches (with SSE2, which every x86-64 has). */
    static void kv_copy_stream(char *dst, const char *src, size_t size) {
    #if defined(__x86_64__)
        size_t head = -(size_t)dst & 63;
        if (size >= 1024) {
            memcpy(dst, src, head);
            dst += head, src += head, size -= head;
            for (; size >= 64; dst += 64, src += 64, size -= 64) {
                if (size > KV_COPY_AHEAD) __builtin_prefetch(src + KV_COPY_AHEAD, 0, 3);
                __m128i a = _mm_loadu_si128((const __m128i *)src), b = _mm_loadu_si128((const __m128i *)src + 1);
                __m128i c = _mm_loadu_si128((const __m128i *)src + 2), d = _mm_loadu_si128((const __m128i *)src + 3);
                _mm_stream_si128((__m128i *)dst, a), _mm_stream_si128((__m128i *)dst + 1, b);
                _mm_stream_si128((__m128i *)dst + 2, c), _mm_stream_si128((__m128i *)dst + 3, d);
            }
        }
    #endif
        memcpy(dst, src, size);
    }

    /* Streamed stores are weakly ordered, so a fence is needed before another thread may read the bytes. */
    static void kv_copy_fence(void) {
    #if defined(__x86_64__)
        _mm_sfence();
    #endif
    }

    /* Copies count runs between strided and packed memory. For a constant run the compiler uses a plain move. */
    #define KV_COPY_RUNS(RUN) for (i = 0; i < count; i++, strided += stride, packed += (RUN)) \\
        memcpy(unpack ? strided : packed, unpack ? packed : strided, (RUN))
    static void kv_copy_runs(char *strided, char *packed, ptrdiff_t stride, ptrdiff_t count, size_t run, int unpack,
                             int stream) {
        ptrdiff_t i;
        switch (run) {
        case 1: if (unpack) KV_COPY_RUNS(1); else KV_COPY_RUNS(1); break;
        case 2: if (unpack) KV_COPY_RUNS(2); else KV_COPY_RUNS(2); break;
        case 4: if (unpack) KV_COPY_RUNS(4); else KV_COPY_RUNS(4); break;
        case 8: if (unpack) KV_COPY_RUNS(8); else KV_COPY_RUNS(8); break;
        default:
            if (!stream) KV_COPY_RUNS(run);
            else for (i = 0; i < count; i++, strided += stride, packed += run) {
                if (!unpack && i + 1 < count) kv_copy_prefetch(strided + stride, run);
                kv_copy_stream(unpack ? strided : packed, unpack ? packed : strided, run);
            }
        }
    }
    """
    size_t kv_copy_stream_bytes() nogil
    void kv_copy_prefetch(const char *src, size_t size) nogil
    void kv_copy_stream(char *dst, const char *src, size_t size) nogil
    void kv_copy_fence() nogil
    void kv_copy_runs(char *strided, char *packed, Py_ssize_t stride, Py_ssize_t count, size_t run, int unpack,
                      int stream) nogil

cdef enum:
    MAX_AXES = 64  # NumPy's own limit

cdef size_t _stream_bytes = kv_copy_stream_bytes()

# Up to this much is copied without releasing the GIL, because another thread may then keep the GIL for up to 5 ms.
cdef Py_ssize_t _locked_bytes = 512 << 10

cdef struct Layer:
    char *base
    Py_ssize_t block_stride
    Py_ssize_t run  # the size of the dense innermost part, in bytes
    int axes  # the number of axes outside the run; the outermost is first
    Py_ssize_t shape[MAX_AXES]
    Py_ssize_t stride[MAX_AXES]

cdef struct Copy:
    Layer *layers
    Py_ssize_t layer_count
    Py_ssize_t inner_bytes
    int64_t *ids
    int64_t *slots  # NULL if row i is at index i
    char *rows
    Py_ssize_t row_stride
    bint unpack  # copies rows to layers
    bint stream


cdef void _collapse(Layer *layer, Py_buffer *view) noexcept:
    cdef int axis, outer
    layer.base = <char *>view.buf
    layer.block_stride = view.strides[0]
    layer.run = view.itemsize
    layer.axes = 0
    for axis in range(1, view.ndim):
        if view.shape[axis] == 1:
            continue
        outer = layer.axes - 1
        if outer >= 0 and layer.stride[outer] == view.strides[axis] * view.shape[axis]:
            layer.shape[outer] *= view.shape[axis]
            layer.stride[outer] = view.strides[axis]
        else:
            layer.shape[layer.axes] = view.shape[axis]
            layer.stride[layer.axes] = view.strides[axis]
            layer.axes += 1
    if layer.axes and layer.stride[layer.axes - 1] == layer.run:
        layer.axes -= 1
        layer.run *= layer.shape[layer.axes]


cdef void _copy_block(Layer *layer, char *block, char *packed, bint unpack, bint stream) noexcept nogil:
    cdef char *dst
    cdef char *src
    cdef int axis
    cdef int last = layer.axes - 1
    cdef Py_ssize_t position[MAX_AXES]
    if last < 0:
        dst = block if unpack else packed
        src = packed if unpack else block
        if stream:
            kv_copy_stream(dst, src, layer.run)
        else:
            memcpy(dst, src, layer.run)
        return
    for axis in range(last):
        position[axis] = 0
    while True:
        kv_copy_runs(block, packed, layer.stride[last], layer.shape[last], layer.run, unpack, stream)
        packed += layer.run * layer.shape[last]
        axis = last - 1
        while axis >= 0:
            block += layer.stride[axis]
            position[axis] += 1
            if position[axis] < layer.shape[axis]:
                break
            block -= layer.stride[axis] * layer.shape[axis]
            position[axis] = 0
            axis -= 1
        if axis < 0:
            return


cdef void _run(Copy *copy, Py_ssize_t rows) noexcept nogil:
    cdef Py_ssize_t unit, units = rows * copy.layer_count, row = 0, index = 0
    cdef Layer *layer = &copy.layers[0]
    cdef char *block = layer.base + copy.ids[0] * layer.block_stride
    cdef Layer *next_layer = layer
    cdef char *next_block = block
    cdef char *packed
    copy.stream = <size_t>(units * copy.inner_bytes) >= _stream_bytes
    for unit in range(units):
        packed = copy.rows + (row if copy.slots == NULL else copy.slots[row]) * copy.row_stride
        packed += index * copy.inner_bytes
        index += 1
        if index == copy.layer_count:
            index = 0
            row += 1
        if unit + 1 < units:
            next_layer = &copy.layers[index]
            next_block = next_layer.base + copy.ids[row] * next_layer.block_stride
            if copy.stream and not copy.unpack:
                kv_copy_prefetch(next_block, next_layer.run)
        _copy_block(layer, block, packed, copy.unpack, copy.stream)
        layer = next_layer
        block = next_block
    if copy.stream:
        kv_copy_fence()


cdef object _inner(Py_buffer *view):
    return tuple([view.shape[axis] for axis in range(1, view.ndim)])


cdef Py_ssize_t _check_rows(Py_buffer *rows, Py_ssize_t *count, Py_ssize_t row_bytes, str name) except? -1:
    """Returns the row stride of ``rows``, which must be ``count`` dense rows of ``row_bytes`` bytes.

    If ``count`` is -1, there may be any number of rows, and ``count`` is set to this number.
    """
    cdef Py_ssize_t expected = rows.itemsize
    cdef int axis
    cdef bint dense = True
    for axis in range(rows.ndim - 1, 0, -1):
        dense = dense and (rows.shape[axis] == 1 or rows.strides[axis] == expected)
        expected *= rows.shape[axis]
    if rows.ndim and expected == row_bytes and (dense or not rows.len) and count[0] in (-1, rows.shape[0]):
        count[0] = rows.shape[0]
        return rows.strides[0]
    cdef Py_ssize_t flat = count[0] if count[0] >= 0 else rows.len // row_bytes if row_bytes else 0
    if rows.ndim == 1 and rows.len == flat * row_bytes and (rows.strides[0] == rows.itemsize or not rows.len):
        count[0] = flat
        return row_bytes
    shape = tuple([rows.shape[axis] for axis in range(rows.ndim)])
    wanted = "" if count[0] < 0 else f"{count[0]} "
    raise ValueError(f"{name} must be {wanted}rows of {row_bytes} bytes each, dense within a row; got shape {shape} "
                     f"of {rows.itemsize}-byte items{'' if dense else ', with strided rows'}")


cdef Py_ssize_t _copy_indices(int64_t *copied, Py_buffer *view, Py_ssize_t limit) noexcept:
    """Copies the indices, so that no other thread can change them. Returns the position of the first index outside 0 ..
    limit - 1, or -1 if there is none."""
    cdef Py_ssize_t i
    for i in range(view.shape[0]):
        memcpy(&copied[i], <char *>view.buf + i * view.strides[0], 8)
        if copied[i] < 0 or copied[i] >= limit:
            return i
    return -1


cdef object _copy_rows(object views, object block_ids, object rows, object slots, bint unpack):
    cdef list layers = list(views)
    cdef Py_ssize_t i, layer_count = len(layers), limit = -1, narrowest = 0
    if layer_count == 0:
        raise ValueError("views is empty; give one array for each layer")
    cdef _Buffers held = _Buffers(layer_count + 3)
    cdef int writable = PyBUF_WRITABLE
    cdef Py_buffer *first = NULL
    cdef Py_buffer *view
    for i in range(layer_count):
        view = held.take(layers[i], PyBUF_STRIDES | (writable if unpack else 0), f"views[{i}]")
        first = &held.views[0]
        if view.ndim < 1:
            raise ValueError(f"views[{i}] must have the block as its first axis; it has no axes")
        if view.itemsize != first.itemsize or _inner(view) != _inner(first):
            raise ValueError(f"views[{i}] has blocks of shape {_inner(view)} and {view.itemsize}-byte items, but "
                             f"views[0] has {_inner(first)} and {first.itemsize}; all layers must agree")
        if limit < 0 or view.shape[0] < limit:
            limit = view.shape[0]
            narrowest = i
    cdef Py_ssize_t inner_bytes = first.itemsize
    for i in range(1, first.ndim):
        inner_bytes *= first.shape[i]

    cdef Py_buffer *ids = _int64s(held, block_ids, "block_ids", False)
    cdef Py_ssize_t count = ids.shape[0]
    cdef Py_ssize_t row_count = count if slots is None else -1
    cdef Py_buffer *places = NULL
    if slots is not None:
        places = _int64s(held, slots, "slots", False)
        if places.shape[0] != count:
            raise ValueError(f"slots must give one row for each block: got {places.shape[0]} slots for {count} blocks")
    cdef str name = "src" if unpack else "out"
    cdef Py_buffer *packed = held.take(rows, PyBUF_STRIDES | (0 if unpack else writable), name)
    cdef Copy copy
    copy.row_stride = _check_rows(packed, &row_count, layer_count * inner_bytes, name)
    copy.rows = <char *>packed.buf
    copy.layer_count = layer_count
    copy.inner_bytes = inner_bytes
    copy.unpack = unpack
    copy.ids = <int64_t *>malloc(max(count, 1) * sizeof(int64_t))
    copy.slots = <int64_t *>malloc(max(count, 1) * sizeof(int64_t)) if places != NULL else NULL
    copy.layers = <Layer *>malloc(layer_count * sizeof(Layer))
    try:
        if copy.ids == NULL or copy.layers == NULL or (places != NULL and copy.slots == NULL):
            raise MemoryError()
        i = _copy_indices(copy.ids, ids, limit)
        if i >= 0:
            raise IndexError(f"block_ids[{i}] is {copy.ids[i]}, but views[{narrowest}] has {limit} blocks "
                             f"(0 .. {limit - 1}); nothing was copied")
        if places != NULL:
            i = _copy_indices(copy.slots, places, row_count)
            if i >= 0:
                raise IndexError(f"slots[{i}] is {copy.slots[i]}, but {name} has {row_count} rows "
                                 f"(0 .. {row_count - 1}); nothing was copied")
        for i in range(layer_count):
            _collapse(&copy.layers[i], &held.views[i])
        if count and inner_bytes:
            if count * layer_count * inner_bytes <= _locked_bytes:
                _run(&copy, count)
            else:
                with nogil:
                    _run(&copy, count)
    finally:
        free(copy.ids)
        free(copy.slots)
        free(copy.layers)


def gather(views, block_ids, out, slots=None):
    """Packs blocks of every layer into rows: ``out[i]`` is ``views[l][block_ids[i]]`` for each l, in C order.

    ``views``: L arrays of shape (blocks, *inner), of any strides, alignment and dtype. ``inner`` and the item size must
    be the same for all of them. Only bytes are copied, so an array without a buffer format, such as bfloat16, can be
    passed as a uint16 view.
    ``block_ids``: n ids, as a 1-D int64 array.
    ``out``: writable. Either n rows of L * inner bytes each, dense within a row and with any row stride, or one dense
    1-D buffer of the same number of bytes.
    ``slots``: n indices, as a 1-D int64 array, into an ``out`` with any number of rows. ``out[slots[i]]`` is filled,
    and the other rows are not changed. If a slot occurs twice, the last block wins.

    Raises IndexError for an id outside 0 .. blocks - 1 or a slot outside 0 .. rows - 1. Raises ValueError or TypeError
    for arrays that do not fit, or if ``out`` is read-only. All errors are raised before any byte is copied. ``out``
    must not overlap the views. Copies of more than 512 KiB release the GIL. Thread-safe as long as no other thread
    writes to the same memory.
    """
    _copy_rows(views, block_ids, out, slots, False)


def scatter(src, views, block_ids, slots=None):
    """Unpacks rows into blocks of every layer: ``views[l][block_ids[i]]`` from ``src[i]``, or from ``src[slots[i]]``.
    This is the inverse of ``gather``.
    ``src`` has the shape of ``out`` in ``gather`` and may be read-only. ``views`` must be writable. A slot may occur
    any number of times. If an id occurs twice, the last row wins. Errors and threads are as for ``gather``.
    """
    _copy_rows(views, block_ids, src, slots, True)
