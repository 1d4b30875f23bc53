# The buffers that callers pass, which are taken and checked before they are used.
#
# Every function of the extension takes its buffers while it holds the GIL. The buffers stay exported until the function
# returns, so no other thread can free or resize them while the function works without the GIL. An argument that does
# not fit raises an error before anything is changed. The error says what was given and what is expected.
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
    """The buffers of one call. They are released when this object is deallocated, even after an error."""

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
    """Returns the exception for a buffer that could not be taken. It says what was given and what is needed."""
    kind = type(source).__name__
    try:
        view = memoryview(source)
    except (BufferError, TypeError, ValueError):
        return TypeError(f"{name} must give a buffer (bytes, memoryview, NumPy array), got {kind}: {error}")
    if flags & PyBUF_WRITABLE and view.readonly:
        return ValueError(f"{name} is read-only ({kind}); it is written to, so pass a writable buffer")
    return ValueError(f"{name} must be C-contiguous, got {kind} of shape {view.shape}, strides {view.strides}")


cdef Py_buffer *_vector(_Buffers held, object source, Py_ssize_t itemsize, bytes codes, str name,
                        bint writable=False) except NULL:
    """Returns a view of a contiguous vector of items of this size, whose format is one of ``codes``."""
    cdef int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0)
    cdef Py_buffer *view = held.take(source, flags, name)
    cdef bytes code = (<bytes>view.format).lstrip(b"@=<") if view.format != NULL else b"B"
    if view.ndim != 1 or view.itemsize != itemsize or len(code) != 1 or code not in codes:
        shape = tuple([view.shape[i] for i in range(view.ndim)])
        raise ValueError(f"{name} must be a vector of {itemsize}-byte items, of format {' or '.join(codes.decode())}; "
                         f"got shape {shape} of {view.itemsize}-byte items, of format {code.decode()!r}")
    return view
