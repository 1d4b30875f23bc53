# What callers hand in: vectors of slots and of numbers, and batches of keys.


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


cdef Py_ssize_t open_sums(object sums, Py_buffer *view, str name) except -1:
    """A view of uint64 numbers, checksums for instance, and their count."""
    if PyObject_CheckBuffer(sums):
        PyObject_GetBuffer(sums, view, PyBUF_FULL_RO)
        if is_vector(view, 8, b"L", b"Q"):
            return view.shape[0]
        PyBuffer_Release(view)
        if _numpy.asarray(sums).dtype.kind != "u":
            raise TypeError(f"{name} must be a vector of uint64, not {_numpy.asarray(sums).dtype}")
    array = _numpy.array(sums, dtype=_numpy.uint64, order="C")
    if array.ndim != 1:
        raise TypeError(f"{name} must be a vector of uint64, not {array.ndim}-dimensional")
    PyObject_GetBuffer(array, view, PyBUF_FULL_RO)
    return view.shape[0]


cdef int check_priority(Py_ssize_t priority) except -1:
    if not 0 <= priority < PRIORITIES:
        raise ValueError(f"priority is {priority}, expected 0 to {PRIORITIES - 1}")
    return 0
