# Sending: the blocks of a SET, frame by frame. Each block is hashed just before it is sent.
#
# The bytes go from the caller's memory to the kernel. They are hashed a megabyte at a time, so that they are still in
# the cache when the kernel copies them. Meanwhile the interpreter's lock is released, until the socket is full or
# everything is sent.

def send_views(sock, views):
    """Sends the bytes of buffers on a non-blocking socket. Returns the number of bytes sent. Raises OSError, which is a
    BlockingIOError if the socket has no room."""
    cdef list given = list(views[:KV_IOV])
    cdef Py_ssize_t i, sent, total = 0
    cdef int count = <int>len(given), fd = sock.fileno()
    cdef _Buffers held = _Buffers(count)
    cdef iovec[512] pieces
    if fd < 0:
        raise OSError(EBADF, os.strerror(EBADF))
    for i in range(count):
        view = held.take(given[i], PyBUF_SIMPLE, "a view")
        pieces[i].iov_base, pieces[i].iov_len = view.buf, view.len
        total += view.len
    if total <= BRIEF_BYTES:
        sent = kv_send(fd, pieces, count)
    else:
        with nogil:
            sent = kv_send(fd, pieces, count)
    if sent < 0:
        raise OSError(-sent, os.strerror(-sent))
    return sent


cdef class BlockFrames:
    """The payload of a SET: ZMTP frames of ``per_frame`` blocks each, and a last frame with the blocks' checksums.

    ``numbers``: an int64 array of the rows of ``blocks`` to send. ``blocks`` is then one buffer of rows of
    ``block_bytes`` bytes. With None, ``blocks`` are buffers of one block each.
    ``sums``: a uint64 array with one checksum per block, or None if the blocks must be hashed.
    ``head``: bytes to send first.
    ``sent``: the number of bytes sent so far.

    Keeps the blocks exported. They must not change before everything is sent. Raises ValueError if the size of a block
    is not ``block_bytes``, and IndexError if a row does not exist. Only one thread may use it at a time.
    """

    cdef _Buffers held
    cdef bytes before
    cdef Py_ssize_t count, block_bytes, per_frame
    cdef uint8_t **where  # the blocks
    cdef uint64_t *sums
    cdef Py_ssize_t at  # the block that is sent next, and the number of its bytes that are sent
    cdef Py_ssize_t into
    cdef Py_ssize_t hashed  # the number of hashed blocks
    cdef Py_ssize_t frame_end  # the blocks before this one belong to frames that have begun
    cdef uint8_t *head  # bytes to send before the next block
    cdef Py_ssize_t head_size, head_sent
    cdef bint ending  # the last frame has begun
    cdef readonly uint64_t sent  # bytes sent so far

    def __cinit__(
        self, bytes head not None, blocks, Py_ssize_t block_bytes, Py_ssize_t per_frame, sums=None, numbers=None
    ):
        cdef list given = list(blocks) if numbers is None else []
        cdef _Buffers made
        self.count = len(given) if numbers is None else len(numbers)
        if self.count < 1 or block_bytes < 1 or per_frame < 1:
            raise ValueError(f"{self.count} blocks of {block_bytes} bytes, {per_frame} a frame: expected 1 at least")
        self.block_bytes, self.per_frame = block_bytes, per_frame
        self.where = <uint8_t **>malloc(self.count * sizeof(uint8_t *))
        self.sums = <uint64_t *>malloc(self.count * sizeof(uint64_t))
        self.head = <uint8_t *>malloc(len(head) + 16)
        if self.where == NULL or self.sums == NULL or self.head == NULL:
            raise MemoryError()
        if numbers is None:
            self._take_blocks(given)
        else:
            self._take_rows(blocks, numbers)
        memcpy(self.head, <const char *>head, len(head))
        self.head_size = len(head)
        if sums is not None:
            made = _Buffers(1)
            memcpy(self.sums, _sums(made, sums, self.count, False, "sums"), self.count * sizeof(uint64_t))
            self.hashed = self.count

    cdef int _take_blocks(self, list given) except -1:
        cdef Py_ssize_t i
        cdef Py_buffer *view
        self.held = _Buffers(self.count)
        for i in range(self.count):
            view = self.held.take(given[i], PyBUF_SIMPLE, "a block")
            if view.len != self.block_bytes:
                raise ValueError(f"block {i} holds {view.len} bytes: expected {self.block_bytes}")
            self.where[i] = <uint8_t *>view.buf
        return 0

    cdef int _take_rows(self, object rows, object numbers) except -1:
        cdef _Buffers given = _Buffers(1)
        cdef Py_buffer *view = _int64s(given, numbers, "numbers", True)
        cdef int64_t *number = <int64_t *>view.buf
        cdef Py_ssize_t i
        self.held = _Buffers(1)
        view = self.held.take(rows, PyBUF_SIMPLE, "blocks")
        for i in range(self.count):
            if number[i] < 0 or number[i] >= view.len // self.block_bytes:
                raise IndexError(f"row {number[i]}: expected one of {view.len // self.block_bytes}")
            self.where[i] = <uint8_t *>view.buf + number[i] * self.block_bytes
        return 0

    def __dealloc__(self):
        free(self.where)
        free(self.sums)
        free(self.head)

    def send(self, sock, double wait_s=0.0):
        """Sends as much as the non-blocking socket takes, and waits for room for at most ``wait_s`` seconds. Returns
        whether everything is sent. If not, call it again. Raises OSError."""
        cdef int fd = sock.fileno(), outcome
        if fd < 0:
            raise OSError(EBADF, os.strerror(EBADF))
        with nogil:
            outcome = self._send(fd, kv_now() + wait_s if wait_s > 0 else 0.0)
        if outcome == -EINTR:
            PyErr_CheckSignals()
            return False
        if outcome < 0:
            raise OSError(-outcome, os.strerror(-outcome))
        return outcome == 1

    cdef int _send(self, int fd, double until) noexcept nogil:
        """Returns 1 if everything is sent, 0 if the socket is full or the time is over, or -errno."""
        cdef iovec[514] pieces
        cdef int n, ready
        cdef Py_ssize_t sent, at, into, size, total
        while True:
            if self.at == self.frame_end and not self.ending:
                self._begin_frame()
            n = 0
            if self.head_sent < self.head_size:
                pieces[0].iov_base = self.head + self.head_sent
                pieces[0].iov_len = self.head_size - self.head_sent
                n = 1
            if self.ending:
                pieces[n].iov_base = <uint8_t *>self.sums + self.into
                pieces[n].iov_len = 8 * self.count - self.into
                n += 1
            else:
                at, into, total = self.at, self.into, 0
                while at < self.frame_end and n < KV_IOV and total < PIECE_BYTES:
                    if at == self.hashed:
                        self.sums[at] = xxh3_64(self.where[at], self.block_bytes, 0, _best)
                        self.hashed += 1
                    pieces[n].iov_base = self.where[at] + into
                    pieces[n].iov_len = self.block_bytes - into
                    total += self.block_bytes - into
                    into = 0
                    at += 1
                    n += 1
            sent = kv_send(fd, pieces, n)
            if sent == -EAGAIN:
                if until == 0 or kv_now() >= until:
                    return 0
                ready = kv_await_room(fd, <int>((until - kv_now()) * 1000) + 1)
                if ready < 0:
                    return -EINTR
                if ready == 0:
                    return 0
                continue
            if sent < 0:
                return <int>sent
            self.sent += sent
            size = min(sent, self.head_size - self.head_sent)
            self.head_sent += size
            sent -= size
            if self.ending:
                self.into += sent
                if self.into == 8 * self.count and self.head_sent == self.head_size:
                    return 1
            else:
                self.into += sent
                self.at += self.into // self.block_bytes
                self.into %= self.block_bytes
            if until and kv_now() >= until:
                return 0

    cdef void _begin_frame(self) noexcept nogil:
        """Begins the next frame. Its head follows any bytes that are left of the head before."""
        cdef Py_ssize_t i, size
        cdef uint8_t *to
        if self.head_sent == self.head_size:
            self.head_sent = self.head_size = 0
        to = self.head + self.head_size
        if self.at == self.count:
            self.ending, self.into = True, 0
            size = 8 * self.count
        else:
            self.frame_end = min(self.count, self.at + self.per_frame)
            size = (self.frame_end - self.at) * self.block_bytes
        if size > 255:
            to[0] = LONG if self.ending else LONG | MORE
            for i in range(8):
                to[1 + i] = (size >> (8 * (7 - i))) & 0xFF
            self.head_size += 9
        else:
            to[0] = 0 if self.ending else MORE
            to[1] = <uint8_t>size
            self.head_size += 2
