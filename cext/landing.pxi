# Landing: the destinations of the blocks of a GET or a SET, and the header of the PART that announces blocks.
#
# Bytes from the network are not trusted. A part fits only if each of its blocks was requested and has not arrived yet.
# Everything in this file runs without the interpreter's lock.

# ---- the header of a PART, which is MessagePack ----

cdef struct PartHeader:
    uint64_t id
    const uint8_t *positions
    const uint8_t *sums
    Py_ssize_t count
    bint last
    uint64_t hit, miss, following


cdef struct Packed:
    const uint8_t *at
    const uint8_t *end


cdef inline bint _take_number(Packed *p, int width, uint64_t *value) noexcept nogil:
    """Takes the bytes of a big-endian number."""
    cdef int i
    if p.end - p.at < width:
        return False
    value[0] = 0
    for i in range(width):
        value[0] = (value[0] << 8) | p.at[i]
    p.at += width
    return True


cdef bint _take_uint(Packed *p, uint64_t *value) noexcept nogil:
    cdef uint8_t kind
    if p.at >= p.end:
        return False
    kind = p.at[0]
    p.at += 1
    if kind < 0x80:
        value[0] = kind
        return True
    if kind < 0xCC or kind > 0xCF:
        return False
    return _take_number(p, 1 << (kind - 0xCC), value)


cdef bint _take_bin(Packed *p, const uint8_t **data, Py_ssize_t *size) noexcept nogil:
    cdef uint8_t kind
    cdef uint64_t length
    if p.at >= p.end:
        return False
    kind = p.at[0]
    if kind < 0xC4 or kind > 0xC6:
        return False
    p.at += 1
    if not _take_number(p, 1 << (kind - 0xC4), &length) or length > <uint64_t>(p.end - p.at):
        return False
    data[0] = p.at
    size[0] = <Py_ssize_t>length
    p.at += size[0]
    return True


cdef bint _skip(Packed *p) noexcept nogil:
    """Skips one value, including everything in it."""
    cdef uint64_t left = 1, size, inside
    cdef int width
    cdef uint8_t kind
    while left:
        left -= 1
        if p.at >= p.end:
            return False
        kind = p.at[0]
        p.at += 1
        size, inside, width = 0, 0, 0
        if kind == 0xC1:
            return False
        if kind < 0x80 or kind >= 0xE0 or 0xC0 <= kind <= 0xC3:
            continue  # a small number, nil or a bool
        elif kind < 0x90:
            inside = 2 * (kind & 0x0F)
        elif kind < 0xA0:
            inside = kind & 0x0F
        elif kind < 0xC0:
            size = kind & 0x1F
        elif kind <= 0xC9:
            width = 1 << ((kind - 0xC4) % 3)  # bin and ext
        elif kind <= 0xCB:
            size = 4 << (kind - 0xCA)
        elif kind <= 0xD3:
            size = 1 << (kind & 3)
        elif kind <= 0xD8:
            size = 1 + (1 << (kind - 0xD4))
        elif kind <= 0xDB:
            width = 1 << (kind - 0xD9)
        else:
            width = 2 << (kind & 1)
        if width:
            if not _take_number(p, width, &size):
                return False
            if kind >= 0xDC:
                inside, size = size << (kind >= 0xDE), 0
            elif 0xC7 <= kind <= 0xC9:
                size += 1  # the type of the ext
        if size > <uint64_t>(p.end - p.at) or inside > <uint64_t>(p.end - p.at):
            return False
        p.at += size
        left += inside
    return True


cdef bint _take_array(Packed *p, uint64_t *fields) noexcept nogil:
    cdef uint8_t kind
    if p.at >= p.end:
        return False
    kind = p.at[0]
    p.at += 1
    if kind & 0xF0 == 0x90:
        fields[0] = kind & 0x0F
        return True
    if kind & 0xFE != 0xDC:
        return False
    return _take_number(p, 2 << (kind & 1), fields)


cdef bint _read_part(const uint8_t *data, Py_ssize_t size, PartHeader *part) noexcept nogil:
    """Returns whether this is the header of a PART that has payload or is the last one. The sink handles all other
    headers.

    As in `kvstore.wire.messages`, later fields may be missing, and fields of a later release may follow.
    """
    cdef Packed p
    cdef uint64_t fields, field, tag
    cdef const uint8_t *other
    cdef uint64_t *counts[3]
    cdef Py_ssize_t positions_size, sums_size, other_size
    p.at, p.end = data, data + size
    if not _take_array(&p, &fields) or fields < 5 or not _take_uint(&p, &tag) or tag != PART_TAG:
        return False
    if not (_take_uint(&p, &part.id) and _take_bin(&p, &part.positions, &positions_size)
            and _take_bin(&p, &part.sums, &sums_size)):
        return False
    if p.at >= p.end or p.at[0] & 0xFE != 0xC2:
        return False
    part.last = p.at[0] == 0xC3
    p.at += 1
    part.hit = part.miss = part.following = 0
    counts[0], counts[1], counts[2] = &part.hit, &part.miss, &part.following
    field = 5
    while field < fields:
        if field < 8:
            if not _take_uint(&p, counts[field - 5]):
                return False
        elif field < PART_FIELDS:  # attributes and references
            if not _take_bin(&p, &other, &other_size) or other_size:
                return False
        elif not _skip(&p):
            return False
        field += 1
    part.count = positions_size // 4
    return positions_size % 4 == 0 and sums_size == 8 * part.count and p.at == p.end


# ---- where blocks go ----

cdef enum:
    WANTED = 0
    BEGUN = 1
    RIGHT = 2
    WRONG = 3


cdef struct Ground:
    # A landing, in a form for code that runs without the GIL.
    uint64_t id
    Py_ssize_t count  # the number of requested blocks
    Py_ssize_t block_bytes
    Py_ssize_t most  # the most blocks in a part
    bint verify
    double began_at
    char **rows  # by position in the request, like the states
    uint8_t *states
    uint64_t *told  # by position: the checksums that came with the blocks; NULL if they are not kept
    # The part that is arriving:
    uint32_t *positions
    uint64_t *sums
    Py_ssize_t part_count
    Py_ssize_t arrived  # the number of whole blocks
    Py_ssize_t into  # the bytes of the next block that have arrived
    bint last


cdef bint _begin_part(Ground *ground, PartHeader *part) noexcept nogil:
    """Takes the header of a part. Returns whether it fits. If it does not fit, nothing is changed."""
    cdef Py_ssize_t i, j
    cdef uint32_t position
    if part.count > ground.most or (part.count == 0 and not part.last):
        return False
    for i in range(part.count):
        memcpy(&position, part.positions + 4 * i, 4)
        if position >= ground.count or ground.states[position] != WANTED:
            for j in range(i):
                ground.states[ground.positions[j]] = WANTED
            return False
        ground.states[position] = BEGUN
        ground.positions[i] = position
        if ground.told != NULL:
            memcpy(&ground.told[position], part.sums + 8 * i, 8)
    memcpy(ground.sums, part.sums, 8 * part.count)
    if ground.began_at == 0:
        ground.began_at = kv_now()
    ground.part_count, ground.arrived, ground.into, ground.last = part.count, 0, 0, part.last
    return True


cdef int _ground_pieces(Ground *ground, iovec *pieces) noexcept nogil:
    """Sets ``pieces`` to the memory for the next bytes of the part. Returns the number of pieces."""
    cdef Py_ssize_t at = ground.arrived, into = ground.into, total = 0
    cdef int n = 0
    while at < ground.part_count and n < KV_IOV and total < PIECE_BYTES:
        pieces[n].iov_base = ground.rows[ground.positions[at]] + into
        pieces[n].iov_len = ground.block_bytes - into
        total += ground.block_bytes - into
        into = 0
        at += 1
        n += 1
    return n


cdef void _ground_advance(Ground *ground, Py_ssize_t nbytes) noexcept nogil:
    """Counts ``nbytes`` bytes that have arrived, and checks the blocks that are complete."""
    cdef Py_ssize_t room
    cdef uint32_t position
    cdef bint right
    while nbytes > 0:
        room = ground.block_bytes - ground.into
        if nbytes < room:
            ground.into += nbytes
            return
        nbytes -= room
        ground.into = 0
        position = ground.positions[ground.arrived]
        right = (not ground.verify or xxh3_64(<uint8_t *>ground.rows[position], ground.block_bytes, 0, _best)
                 == ground.sums[ground.arrived])
        ground.states[position] = RIGHT if right else WRONG
        ground.arrived += 1


cdef void _ground_store(Ground *ground, const char *data, Py_ssize_t nbytes) noexcept nogil:
    """Copies bytes of the part that were received into other memory to their rows."""
    cdef Py_ssize_t size
    while nbytes > 0:
        size = min(nbytes, ground.block_bytes - ground.into)
        memcpy(ground.rows[ground.positions[ground.arrived]] + ground.into, data, size)
        _ground_advance(ground, size)
        data += size
        nbytes -= size


cdef class Landing:
    """The destination of the blocks of one GET: block i of the request goes to row ``places[i]`` of ``rows``.

    A ``Receiver`` fills it. The rows may be read after the sink's ``landed`` was called with the landing, or after the
    receiver has forgotten it.

    ``verify``: whether to check the blocks against their checksums. If not, every block that arrives counts as right,
    and ``sums`` has the checksums.
    ``most``: the most blocks in one part.

    Keeps ``rows`` exported. Raises ValueError or IndexError if a place is not a row.
    """

    cdef _Buffers held
    cdef Ground ground

    def __cinit__(self, uint64_t id, rows, places, Py_ssize_t block_bytes, bint verify, Py_ssize_t most):
        self.held = _Buffers(2)
        cdef Py_buffer *view = self.held.take(rows, PyBUF_STRIDES | PyBUF_WRITABLE, "rows")
        cdef Py_ssize_t i, row_count = -1
        cdef Py_ssize_t stride = _check_rows(view, &row_count, block_bytes, "rows")
        cdef Py_buffer *numbers = _int64s(self.held, places, "places", True)
        cdef const int64_t *place = <const int64_t *>numbers.buf
        cdef Ground *ground = &self.ground
        ground.id, ground.count, ground.block_bytes = id, numbers.shape[0], block_bytes
        ground.verify, ground.most = verify, most
        ground.rows = <char **>malloc(max(ground.count, 1) * sizeof(char *))
        ground.states = <uint8_t *>calloc(max(ground.count, 1), 1)
        ground.positions = <uint32_t *>malloc(max(most, 1) * sizeof(uint32_t))
        ground.sums = <uint64_t *>malloc(max(most, 1) * sizeof(uint64_t))
        if ground.rows == NULL or ground.states == NULL or ground.positions == NULL or ground.sums == NULL:
            raise MemoryError()
        if not verify:
            ground.told = <uint64_t *>calloc(max(ground.count, 1), sizeof(uint64_t))
            if ground.told == NULL:
                raise MemoryError()
        for i in range(ground.count):
            if not 0 <= place[i] < row_count:
                raise IndexError(f"places[{i}] is {place[i]}: expected 0 to {row_count - 1}")
            ground.rows[i] = <char *>view.buf + place[i] * stride

    def __dealloc__(self):
        free(self.ground.rows)
        free(self.ground.states)
        free(self.ground.positions)
        free(self.ground.sums)
        free(self.ground.told)

    @property
    def id(self):
        """The id of the GET."""
        return self.ground.id

    @property
    def began_at(self):
        """The time when the first part arrived, in seconds of the monotonic clock, or 0 if none has arrived."""
        return self.ground.began_at

    def outcomes(self):
        """Returns two bool arrays with one item for each requested block: whether it arrived with the right bytes,
        and whether it arrived with wrong bytes."""
        states = np.frombuffer(PyBytes_FromStringAndSize(<char *>self.ground.states, self.ground.count), dtype=np.uint8)
        return states == RIGHT, states == WRONG

    def sums(self):
        """Returns the checksum that came with each requested block, as uint64; 0 for blocks that did not arrive."""
        if self.ground.told == NULL:
            raise ValueError("this landing verifies its blocks: it keeps no checksums")
        told = PyBytes_FromStringAndSize(<char *>self.ground.told, 8 * self.ground.count)
        return np.frombuffer(told, dtype=np.uint64)


cdef class Payload:
    """The destination of a SET's payload: block i goes to byte ``offsets[i]`` of ``memory``. Each frame has
    ``per_frame`` blocks.

    A sink may give a payload to its ``Receiver`` instead of memory for one frame. The receiver then takes all payload
    frames of the message by itself, as long as each frame has the right size and comes in order. Keeps ``memory``
    exported. Raises ValueError, TypeError or IndexError if an argument is not as described.

    ``arrived``: the number of blocks whose frames are complete.
    """

    cdef _Buffers held
    cdef Ground ground
    cdef readonly Py_ssize_t arrived

    def __cinit__(self, memory, offsets, Py_ssize_t block_bytes, Py_ssize_t per_frame):
        self.held = _Buffers(2)
        cdef Py_buffer *view = self.held.take(memory, PyBUF_SIMPLE | PyBUF_WRITABLE, "memory")
        cdef Py_buffer *numbers = _int64s(self.held, offsets, "offsets", True)
        cdef const int64_t *offset = <const int64_t *>numbers.buf
        cdef Ground *ground = &self.ground
        cdef Py_ssize_t i
        if block_bytes < 1 or per_frame < 1:
            raise ValueError(f"blocks of {block_bytes} bytes, {per_frame} a frame: expected 1 at least")
        ground.count, ground.block_bytes, ground.most = numbers.shape[0], block_bytes, per_frame
        ground.rows = <char **>malloc(max(ground.count, 1) * sizeof(char *))
        ground.states = <uint8_t *>calloc(max(ground.count, 1), 1)
        ground.positions = <uint32_t *>malloc(per_frame * sizeof(uint32_t))
        if ground.rows == NULL or ground.states == NULL or ground.positions == NULL:
            raise MemoryError()
        for i in range(ground.count):
            if not 0 <= offset[i] <= view.len - block_bytes:
                raise IndexError(f"offsets[{i}] is {offset[i]}: a block of {block_bytes} bytes there is not within the "
                                 f"{view.len} bytes of memory")
            ground.rows[i] = <char *>view.buf + offset[i]

    def __dealloc__(self):
        free(self.ground.rows)
        free(self.ground.states)
        free(self.ground.positions)

    cdef bint begin_frame(self, uint64_t size) noexcept nogil:
        """Begins the next payload frame. Returns False if the frame must have another size."""
        cdef Ground *ground = &self.ground
        cdef Py_ssize_t i, n = min(ground.most, ground.count - self.arrived)
        if n < 1 or size != <uint64_t>(n * ground.block_bytes):
            return False
        for i in range(n):
            ground.positions[i] = <uint32_t>(self.arrived + i)
        ground.part_count, ground.arrived, ground.into = n, 0, 0
        return True

    cdef bint end_frame(self) noexcept nogil:
        """Ends a complete frame. Returns whether it was the last frame."""
        self.arrived += self.ground.part_count
        return self.arrived == self.ground.count
