# Streaming: the parts of the reply to a GET. They are made for a group of blocks in one call, and sent one by one.
#
# The header of a PART (see ``kvstore.wire.messages``) is MessagePack, with the same bytes that msgspec would write.
# Blocks go from the shard's memory to the kernel without Python objects.

cdef uint8_t *_put_bytes_big(uint8_t *to, uint8_t tag, uint64_t value, int size) noexcept nogil:
    cdef int i
    to[0] = tag
    for i in range(size):
        to[1 + i] = <uint8_t>(value >> (8 * (size - 1 - i)))
    return to + 1 + size

cdef uint8_t *_put_uint(uint8_t *to, uint64_t value) noexcept nogil:
    if value < 128:
        to[0] = <uint8_t>value
        return to + 1
    if value < 1 << 8:
        return _put_bytes_big(to, 0xCC, value, 1)
    if value < 1 << 16:
        return _put_bytes_big(to, 0xCD, value, 2)
    if value < <uint64_t>1 << 32:
        return _put_bytes_big(to, 0xCE, value, 4)
    return _put_bytes_big(to, 0xCF, value, 8)

cdef uint8_t *_put_bin(uint8_t *to, const void *data, Py_ssize_t size) noexcept nogil:
    if size < 1 << 8:
        to = _put_bytes_big(to, 0xC4, size, 1)
    elif size < 1 << 16:
        to = _put_bytes_big(to, 0xC5, size, 2)
    else:
        to = _put_bytes_big(to, 0xC6, size, 4)
    memcpy(to, data, size)
    return to + size

cdef uint8_t *_put_frame_head(uint8_t *to, uint64_t size, bint more) noexcept nogil:
    if size > 255:
        return _put_bytes_big(to, (LONG | MORE) if more else LONG, size, 8)
    to[0], to[1] = MORE if more else 0, <uint8_t>size
    return to + 2


cdef class Parts:
    """A group of blocks of GET ``id``, as PARTs of ``per_part`` blocks each.

    ``positions``: u32, the position of each block in the request.
    ``sums``: u64, the checksum of each block.
    ``offsets``: int64, where each block of ``block_bytes`` begins in ``memory``, which is a contiguous buffer.
    ``last``: whether the last part ends the reply.
    ``hit``: the number of blocks sent before these.
    ``miss``: the number of blocks that will not come.
    ``attributes``: the concatenated attributes of the blocks; each block has the same number of bytes.
    ``part_sent``: whether the last call of ``send`` ended a part.

    Raises ValueError, TypeError or IndexError if an argument is not as described. Only one thread may use it at a time.
    Keeps ``memory`` exported.
    """

    cdef _Buffers held
    cdef const char *memory
    cdef int64_t *offsets
    cdef uint8_t *heads  # the heads of all parts, one after the other
    cdef Py_ssize_t *head_ends
    cdef Py_ssize_t count, per_part, block_bytes, parts
    cdef Py_ssize_t part  # the part that is being sent; below: the sent bytes of its head and of its blocks
    cdef Py_ssize_t head_sent, block, into
    cdef readonly bint part_sent

    def __cinit__(self, uint64_t id, positions, sums, memory, offsets, Py_ssize_t block_bytes, Py_ssize_t per_part,
                  bint last, uint64_t hit, uint64_t miss, bytes attributes not None=b""):
        cdef _Buffers given = _Buffers(3)
        cdef Py_buffer *position = given.take(positions, PyBUF_C_CONTIGUOUS, "positions")
        cdef Py_buffer *sum = given.take(sums, PyBUF_C_CONTIGUOUS, "sums")
        cdef Py_buffer *place = _int64s(given, offsets, "offsets", True)
        cdef Py_ssize_t i, n, first, size, per_block
        cdef uint8_t *to
        cdef uint8_t *header
        self.count, self.per_part, self.block_bytes = place.shape[0], per_part, block_bytes
        if position.len != 4 * self.count or sum.len != 8 * self.count:
            raise ValueError(f"{position.len} bytes of positions and {sum.len} of sums for {self.count} blocks")
        if not (0 < self.count and 0 < per_part < KV_IOV + 1 and 0 < block_bytes) or len(attributes) % self.count:
            raise ValueError(f"{self.count} blocks of {block_bytes} bytes, {per_part} a part, with {len(attributes)} bytes "
                             "of attributes")
        per_block = len(attributes) // self.count
        self.held = _Buffers(1)
        cdef Py_buffer *view = self.held.take(memory, PyBUF_SIMPLE, "memory")
        self.memory = <const char *>view.buf
        self.parts = (self.count + per_part - 1) // per_part
        self.offsets = <int64_t *>malloc(8 * self.count)
        self.head_ends = <Py_ssize_t *>malloc(sizeof(Py_ssize_t) * self.parts)
        self.heads = <uint8_t *>malloc(self.parts * 128 + self.count * (12 + per_block))
        header = <uint8_t *>malloc(128 + per_part * (12 + per_block))
        try:
            if self.offsets == NULL or self.head_ends == NULL or self.heads == NULL or header == NULL:
                raise MemoryError()
            memcpy(self.offsets, place.buf, 8 * self.count)
            for i in range(self.count):
                if not 0 <= self.offsets[i] <= view.len - block_bytes:
                    raise IndexError(f"offsets[{i}] is {self.offsets[i]}: a block of {block_bytes} bytes there is not "
                                     f"within the {view.len} bytes of memory")
            to = self.heads
            for i in range(self.parts):
                first = i * per_part
                n = min(per_part, self.count - first)
                hit += n
                size = _part_header(header, id, n, <uint8_t *>position.buf + 4 * first, <uint8_t *>sum.buf + 8 * first,
                                    last and i == self.parts - 1, hit, miss, (self.count - first - n) * block_bytes,
                                    <const uint8_t *><const char *>attributes + first * per_block, per_block)
                to = _put_frame_head(to, size, True)
                memcpy(to, header, size)
                to = _put_frame_head(to + size, n * block_bytes, False)
                self.head_ends[i] = to - self.heads
        finally:
            free(header)

    def __dealloc__(self):
        free(self.offsets)
        free(self.heads)
        free(self.head_ends)

    def send(self, sock):
        """Sends as much of the next part as the non-blocking socket takes. Returns the number of bytes sent. Raises
        OSError, which is a BlockingIOError if the socket has no room. Raises ValueError after the last part."""
        cdef int fd = sock.fileno()
        cdef Py_ssize_t sent
        if fd < 0:
            raise OSError(EBADF, os.strerror(EBADF))
        if self.part == self.parts:
            raise ValueError("all parts are sent")
        with nogil:
            sent = self._send(fd)
        if sent < 0:
            raise OSError(-sent, os.strerror(-sent))
        return sent

    cdef Py_ssize_t _send(self, int fd) noexcept nogil:
        cdef iovec[514] pieces
        cdef Py_ssize_t first = self.part * self.per_part, end = min(self.count, first + self.per_part)
        cdef Py_ssize_t head_start = self.head_ends[self.part - 1] if self.part else 0
        cdef Py_ssize_t head_size = self.head_ends[self.part] - head_start, at, sent, size
        cdef int n = 0
        if self.head_sent < head_size:
            pieces[0].iov_base, pieces[0].iov_len = self.heads + head_start + self.head_sent, head_size - self.head_sent
            n = 1
        for at in range(first + self.block, end):
            if n > 0 and <const char *>pieces[n - 1].iov_base + pieces[n - 1].iov_len == self.memory + self.offsets[at]:
                pieces[n - 1].iov_len += self.block_bytes  # this block adjoins the block before it
                continue
            pieces[n].iov_base, pieces[n].iov_len = <void *>(self.memory + self.offsets[at]), self.block_bytes
            if at == first + self.block:
                pieces[n].iov_base = <char *>pieces[n].iov_base + self.into
                pieces[n].iov_len -= self.into
            n += 1
        sent = kv_send(fd, pieces, n)
        if sent < 0:
            return sent
        size = min(sent, head_size - self.head_sent)
        self.head_sent += size
        self.into += sent - size
        self.block += self.into // self.block_bytes
        self.into %= self.block_bytes
        self.part_sent = self.head_sent == head_size and first + self.block == end
        if self.part_sent:
            self.part += 1
            self.head_sent = self.block = self.into = 0
        return sent


cdef Py_ssize_t _part_header(uint8_t *header, uint64_t id, Py_ssize_t count, const uint8_t *positions, const uint8_t *sums,
                             bint last, uint64_t hit, uint64_t miss, uint64_t following, const uint8_t *attributes,
                             Py_ssize_t per_block) noexcept nogil:
    """Writes the header of a PART. Returns its size."""
    cdef uint8_t *to = header
    to[0], to[1] = 0x90 | PART_FIELDS, PART_TAG
    to = _put_uint(to + 2, id)
    to = _put_bin(to, positions, 4 * count)
    to = _put_bin(to, sums, 8 * count)
    to[0] = 0xC3 if last else 0xC2
    to = _put_uint(to + 1, hit)
    to = _put_uint(to, miss)
    to = _put_uint(to, following)
    to = _put_bin(to, attributes, count * per_block)
    return _put_bin(to, b"", 0) - header
