# Arguments of callers: takes buffers and vectors of numbers, and checks them before they are used.
#
# Every function of the extension takes its buffers while it holds the GIL. They stay exported until it returns, so no
# other thread can free or resize them while the function works without the GIL. An argument that does not fit raises an
# error that says what was given and what is expected, before anything is changed.

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_FULL_RO, PyBUF_ND, PyBUF_SIMPLE, PyBUF_STRIDES, PyBUF_WRITABLE,
    PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.math cimport sqrt
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.string cimport memcmp, memcpy, memset

import os

import numpy as np


cdef class _Buffers:
    """The buffers of one call. They are released when this object is deallocated, also after an error."""

    cdef Py_buffer *views
    cdef Py_ssize_t count

    def __cinit__(self, Py_ssize_t capacity):
        self.count = 0
        self.views = <Py_buffer *>calloc(max(capacity, 1), sizeof(Py_buffer))
        if self.views == NULL:
            raise MemoryError()

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.count):
            PyBuffer_Release(&self.views[i])
        free(self.views)

    cdef Py_buffer *take(self, object source, int flags, str name) except NULL:
        cdef Py_buffer *view = &self.views[self.count]
        try:
            PyObject_GetBuffer(source, view, flags)
        except (BufferError, TypeError, ValueError) as error:
            raise _refusal(source, flags, name, error) from error
        self.count += 1
        return view


cdef object _refusal(object source, int flags, str name, object error):
    """Returns the exception for a buffer that could not be taken: what was given, what is needed."""
    kind = type(source).__name__
    try:
        view = memoryview(source)
    except (BufferError, TypeError, ValueError):
        return TypeError(f"{name} must give a buffer (bytes, memoryview, NumPy array), got {kind}: {error}")
    if flags & PyBUF_WRITABLE and view.readonly:
        return ValueError(f"{name} is read-only ({kind}); it is written to, so pass a writable buffer")
    return ValueError(f"{name} must be C-contiguous, got {kind} of shape {view.shape}, strides {view.strides}")


# ---- blocks in memory, and vectors with one item for each ----

cdef Py_ssize_t _block_count(Py_buffer *base, Py_ssize_t block_bytes) except -1:
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be at least 1, got {block_bytes}")
    if base.len % block_bytes:
        raise ValueError(f"base holds {base.len} bytes, which is not a multiple of block_bytes={block_bytes}")
    return base.len // block_bytes


cdef bint _is_int(Py_buffer *view, Py_ssize_t itemsize, bint signed) except -1:
    """Whether the items are native integers of this size and signedness."""
    cdef bytes codes = b"ilq" if signed else b"ILQ"
    cdef bytes code = view.format if view.format != NULL else b"B"
    return view.itemsize == itemsize and code.lstrip(b"@=<") in (codes[:1], codes[1:2], codes[2:])


cdef uint64_t *_sums(_Buffers held, object sums, Py_ssize_t count, bint writable, str name) except NULL:
    """Returns the uint64 words of ``sums``, which must be ``count`` words."""
    cdef int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0)
    cdef Py_buffer *view = held.take(sums, flags, name)
    if not _is_int(view, 8, False):
        raise TypeError(f"{name} must hold uint64, got {type(sums).__name__} of format "
                        f"{(view.format or b'B').decode()!r}, itemsize {view.itemsize}")
    if view.len != 8 * count:
        raise ValueError(f"{name} holds {view.len // 8} sums, expected one for each of {count} blocks")
    return <uint64_t *>view.buf


cdef Py_buffer *_int64s(_Buffers held, object numbers, str name, bint contiguous) except NULL:
    """Returns a view of a 1-D int64 array, of any stride unless it must be ``contiguous``."""
    cdef int flags = PyBUF_FORMAT | (PyBUF_C_CONTIGUOUS if contiguous else PyBUF_STRIDES)
    cdef Py_buffer *view = held.take(numbers, flags, name)
    if view.ndim != 1 or not _is_int(view, 8, True):
        raise TypeError(f"{name} must be a 1-D int64 array, got {view.ndim}-D of format "
                        f"{(view.format or b'B').decode()!r}; np.asarray({name}, dtype=np.int64) makes one")
    return view


cdef const void *_column(_Buffers held, object source, Py_ssize_t count, bytes codes, str name) except NULL:
    """Returns the data of a contiguous vector of ``count`` items of 8 bytes, whose format is one of ``codes``."""
    cdef Py_buffer *view = held.take(source, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT, name)
    cdef bytes code = view.format if view.format != NULL else b"B"
    if view.ndim != 1 or view.itemsize != 8 or code not in codes or view.shape[0] != count:
        shape = tuple([view.shape[i] for i in range(view.ndim)])
        raise ValueError(f"{name} must have {count} items of 8 bytes, of format {' or '.join(codes.decode())}; "
                         f"got shape {shape} of {view.itemsize}-byte items, of format {code.decode()!r}")
    return view.buf


# ---- keys and slots of an index ----

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
    """Fills ``view`` with int32 slot numbers and returns their count. Converts other integers; they never wrap around.
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
    """Fills ``view`` with uint64 numbers, such as checksums, and returns their count. Converts a sequence of integers.
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
    """Returns the priority of each of ``count`` blocks; NULL when ``priorities`` is one for all: it is in ``same``."""
    if isinstance(priorities, int):
        check_priorities(priorities, priorities)
        same[0] = priorities
        return NULL
    array = np.asarray(priorities)
    if array.size:
        check_priorities(array.min(), array.max())
    return <const uint8_t *>one_each(held, array, count, np.uint8, "priorities")


cdef const double *open_times(_Buffers held, object times, Py_ssize_t count, double *same, str name) except? NULL:
    """Returns the time of each of ``count`` blocks; NULL when ``times`` is one for all, which is then in ``same``."""
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
