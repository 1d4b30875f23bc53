# Blocks between memory and a segment file: the loops around pread and pwrite, with the GIL released.
#
# Blocks that are adjacent both in memory and in the file are moved by one system call, so that small blocks do not cost
# one call each. A block that was read is checked against its checksum while it is still in the processor's cache.
# Invariant: during the call the caller owns the memory (slots that are being written, or that are referenced).

from libc.errno cimport EINTR, EIO, errno
from posix.types cimport off_t
from posix.unistd cimport pread, pwrite


cdef enum:
    CORRUPT_BLOCK = -1
    RUN_BYTES = 4 << 20  # the most bytes that one system call moves


cdef class _Blocks:
    """The arguments of one call: the place of each block in memory and its offset in the file."""

    cdef _Buffers held
    cdef char *base
    cdef const int64_t *places
    cdef const int64_t *offsets
    cdef Py_ssize_t count, block_bytes

    def __cinit__(self, memory, places, offsets, Py_ssize_t block_bytes, bint writable):
        cdef Py_buffer *view
        cdef Py_ssize_t i
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be at least 1, got {block_bytes}")
        self.held = _Buffers(3)
        view = self.held.take(memory, PyBUF_WRITABLE if writable else PyBUF_SIMPLE, "memory")
        self.base = <char *>view.buf
        self.block_bytes = block_bytes
        self.places = self.numbers(places, "places")
        self.offsets = self.numbers(offsets, "offsets")
        for i in range(self.count):
            if not 0 <= self.places[i] <= view.len - block_bytes:
                raise ValueError(f"places[{i}] is {self.places[i]}: a block of {block_bytes} bytes there is not in a "
                                 f"memory of {view.len} bytes")
            if self.offsets[i] < 0:
                raise ValueError(f"offsets[{i}] is {self.offsets[i]}, expected 0 or more")

    cdef const int64_t *numbers(self, array, str name) except NULL:
        cdef Py_buffer *view = _int64s(self.held, array, name, True)
        if name == "places":
            self.count = view.shape[0]
        elif view.shape[0] != self.count:
            raise ValueError(f"{self.count} places with {view.shape[0]} offsets, expected as many")
        return <const int64_t *>view.buf

    cdef Py_ssize_t run(self, Py_ssize_t first) noexcept nogil:
        """Returns the end of the run of blocks that begins at `first` and is contiguous in memory and in the file."""
        cdef Py_ssize_t i = first + 1, size = self.block_bytes
        while (
            i < self.count and (i - first + 1) * size <= RUN_BYTES
            and self.places[i] == self.places[i - 1] + size and self.offsets[i] == self.offsets[i - 1] + size
        ):
            i += 1
        return i


cdef Py_ssize_t _move(int fd, char *memory, Py_ssize_t size, off_t offset, bint write, int *error) noexcept nogil:
    """Returns the number of bytes moved. There are fewer than `size` at the file's end, or if `error` is set."""
    cdef Py_ssize_t done = 0, moved
    error[0] = 0
    while done < size:
        if write:
            moved = pwrite(fd, memory + done, size - done, offset + done)
        else:
            moved = pread(fd, memory + done, size - done, offset + done)
        if moved < 0:
            if errno == EINTR:
                continue
            error[0] = errno
            break
        if moved == 0:
            break
        done += moved
    return done


def read_blocks(int fd, memory, places, offsets, Py_ssize_t block_bytes, sums, found=None):
    """Reads block i from ``offsets[i]`` of the file into ``memory[places[i]:][:block_bytes]`` and checks it.

    ``places``, ``offsets``: int64 arrays, in bytes.
    ``sums``: a uint64 array of the xxh3-64 that each block must have, or None if the caller checks the blocks.
    ``found``: a writable uint64 array for the checksums that were found, or None if they are not needed.

    Returns one int32 per block: 0 if its checksum is right, -1 if it is wrong or the file ends too early, or the errno
    if the read failed. Blocks, without the GIL. Raises TypeError or ValueError before anything is read.
    """
    cdef _Blocks blocks = _Blocks(memory, places, offsets, block_bytes, True)
    cdef _Buffers held = _Buffers(3)
    cdef const uint64_t *sum = NULL
    cdef uint64_t *of_it = NULL
    if sums is not None:
        sum = _sums(held, sums, blocks.count, False, "sums")
    if found is not None:
        of_it = _sums(held, found, blocks.count, True, "found")
    result = np.empty(blocks.count, dtype=np.int32)
    cdef int32_t *status = <int32_t *>held.take(result, PyBUF_WRITABLE, "result").buf
    cdef Py_ssize_t i, first = 0, end, done
    cdef uint64_t hashed
    cdef int error
    with nogil:
        while first < blocks.count:
            end = blocks.run(first)
            done = _move(fd, blocks.base + blocks.places[first], (end - first) * block_bytes, blocks.offsets[first],
                         False, &error)
            for i in range(first, end):
                if (i - first + 1) * block_bytes > done:
                    status[i] = error if error != 0 else CORRUPT_BLOCK
                    continue
                status[i] = 0
                if sum == NULL and of_it == NULL:
                    continue
                hashed = xxh3_64(<uint8_t *>blocks.base + blocks.places[i], block_bytes, 0, _best)
                if of_it != NULL:
                    of_it[i] = hashed
                if sum != NULL and hashed != sum[i]:
                    status[i] = CORRUPT_BLOCK
            first = end
    return result


def write_blocks(int fd, memory, places, offsets, Py_ssize_t block_bytes):
    """Writes ``memory[places[i]:][:block_bytes]`` to ``offsets[i]`` of the file, in order.

    ``places``, ``offsets``: int64 arrays, in bytes. Returns 0, or the errno of the first write that failed. The blocks
    after that write were not written. Blocks, without the GIL. Raises TypeError or ValueError before anything is
    written.
    """
    cdef _Blocks blocks = _Blocks(memory, places, offsets, block_bytes, False)
    cdef Py_ssize_t first = 0, end, size
    cdef int error = 0
    with nogil:
        while first < blocks.count:
            end = blocks.run(first)
            size = (end - first) * block_bytes
            if _move(fd, blocks.base + blocks.places[first], size, blocks.offsets[first], True, &error) < size:
                if error == 0:
                    error = EIO
                break
            first = end
    return error
