# The arguments of an index: keys, slots, and numbers that are either one for all blocks or one for each block.

cdef Py_ssize_t open_keys(object keys, Py_ssize_t key_bytes, Py_buffer *view) except -1:
    """Fills ``view`` with concatenated keys and returns their count."""
    PyObject_GetBuffer(keys, view, PyBUF_SIMPLE)
    cdef Py_ssize_t size = view.len
    if size % key_bytes != 0 or size // key_bytes > MAX_SLOTS:
        PyBuffer_Release(view)
        raise ValueError(
            f"keys are {size} bytes, expected a multiple of key_bytes={key_bytes}, at most {MAX_SLOTS} of them"
        )
    return size // key_bytes


cdef bint is_vector(Py_buffer *view, Py_ssize_t itemsize, char format, char other) noexcept:
    return (
        view.ndim == 1 and view.itemsize == itemsize and view.format != NULL and view.format[0] != 0
        and view.format[1] == 0 and (view.format[0] == format or view.format[0] == other)
        and (view.shape[0] < 2 or view.strides[0] == itemsize)
    )


cdef Py_ssize_t open_slots(object slots, Py_buffer *view) except -1:
    """Fills ``view`` with int32 slot numbers and returns their count. Other integers are converted, and never wrap
    around.
    """
    if PyObject_CheckBuffer(slots):
        PyObject_GetBuffer(slots, view, PyBUF_FULL_RO)
        if is_vector(view, 4, b"i", b"i"):
            return view.shape[0]
        PyBuffer_Release(view)
    array = np.asarray(slots)
    if array.size == 0:
        array = np.empty(0, np.int32)
    elif array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"slots must be a vector of int32, not {array.ndim}-dimensional {array.dtype}")
    elif array.min() < -MAX_SLOTS or array.max() > MAX_SLOTS:
        raise ValueError(f"slots range from {array.min()} to {array.max()}, expected numbers of int32")
    PyObject_GetBuffer(np.require(array, np.int32, "CA"), view, PyBUF_FULL_RO)
    return view.shape[0]


cdef Py_ssize_t open_sums(object sums, Py_buffer *view, str name) except -1:
    """Fills ``view`` with uint64 numbers, such as checksums, and returns their count. A sequence of integers is
    converted.
    """
    if PyObject_CheckBuffer(sums):
        PyObject_GetBuffer(sums, view, PyBUF_FULL_RO)
        if is_vector(view, 8, b"L", b"Q"):
            return view.shape[0]
        PyBuffer_Release(view)
        if np.asarray(sums).dtype.kind != "u":
            raise TypeError(f"{name} must be a vector of uint64, not {np.asarray(sums).dtype}")
    array = np.array(sums, dtype=np.uint64, order="C")
    if array.ndim != 1:
        raise TypeError(f"{name} must be a vector of uint64, not {array.ndim}-dimensional")
    PyObject_GetBuffer(array, view, PyBUF_FULL_RO)
    return view.shape[0]


cdef int check_priorities(object lowest, object highest) except -1:
    if not 0 <= lowest <= highest < PRIORITIES:
        which = f"priority is {lowest}" if lowest == highest else f"priorities range from {lowest} to {highest}"
        raise ValueError(f"{which}, expected 0 to {PRIORITIES - 1}")
    return 0


cdef const uint8_t *open_priorities(_Buffers held, object priorities, Py_ssize_t count, uint8_t *same) except? NULL:
    """Returns the priority of each of ``count`` blocks. If ``priorities`` is one number for all blocks, returns NULL
    and sets ``same`` to the number."""
    if isinstance(priorities, int):
        check_priorities(priorities, priorities)
        same[0] = priorities
        return NULL
    array = np.asarray(priorities)
    if array.size:
        check_priorities(array.min(), array.max())
    return <const uint8_t *>one_each(held, array, count, np.uint8, "priorities")


cdef const double *open_times(_Buffers held, object times, Py_ssize_t count, double *same, str name) except? NULL:
    """Returns the time of each of ``count`` blocks. If ``times`` is one number for all blocks, returns NULL and sets
    ``same`` to the number."""
    if isinstance(times, (int, float)):
        same[0] = times
        return NULL
    return <const double *>one_each(held, np.asarray(times), count, np.float64, name)


cdef void *one_each(_Buffers held, array, Py_ssize_t count, dtype, str name) except NULL:
    if array.ndim != 1 or array.shape[0] != count:
        raise ValueError(f"{count} blocks with {name} of shape {array.shape}, expected one number, or as many")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be numbers, not {array.dtype}")
    return held.take(np.ascontiguousarray(array, dtype), PyBUF_FULL_RO, name).buf
