# Arguments that are blocks in memory, or vectors with one item for each block.

cdef Py_ssize_t _block_count(Py_buffer *base, Py_ssize_t block_bytes) except -1:
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be at least 1, got {block_bytes}")
    if base.len % block_bytes:
        raise ValueError(f"base holds {base.len} bytes, which is not a multiple of block_bytes={block_bytes}")
    return base.len // block_bytes


cdef bint _is_int(Py_buffer *view, Py_ssize_t itemsize, bint signed) except -1:
    """Returns whether the items are native integers of this size and signedness."""
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
    """Returns a view of a 1-D int64 array. The array may have any stride unless it must be ``contiguous``."""
    cdef int flags = PyBUF_FORMAT | (PyBUF_C_CONTIGUOUS if contiguous else PyBUF_STRIDES)
    cdef Py_buffer *view = held.take(numbers, flags, name)
    if view.ndim != 1 or not _is_int(view, 8, True):
        raise TypeError(f"{name} must be a 1-D int64 array, got {view.ndim}-D of format "
                        f"{(view.format or b'B').decode()!r}; np.asarray({name}, dtype=np.int64) makes one")
    return view


cdef const void *_column(_Buffers held, object source, Py_ssize_t count, bytes codes, str name) except NULL:
    """Returns the data of a contiguous vector of ``count`` items of 8 bytes, whose format is one of ``codes``."""
    cdef Py_buffer *view = _vector(held, source, 8, codes, name)
    if view.shape[0] != count:
        raise ValueError(f"{name} has {view.shape[0]} items, expected {count}")
    return view.buf
