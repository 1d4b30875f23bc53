# Weighted rendezvous hashing, and grouping of a batch's keys by owner. kvstore/cluster/placement.py has the formula.
#
# For each key, every shard draws a number u in (0, 1), and its score is weight / -ln(u). The logarithms would be most
# of the cost, but few of them are needed. Because 1 - u <= -ln(u) <= (1 - u) / u, a shard's *floor* (1 - u) / weight
# bounds its score from both sides. So usually only one shard can have the highest score.

from libc.math cimport INFINITY, fabs, log

cdef enum:
    NO_SHARD = -1

cdef double _SLACK = 1.0 + 2.0 ** -40               # more than the rounding errors of a score and a floor
cdef double _GREATEST_HANDICAP = 2.0 ** 960         # so that every floor is finite
cdef double _GREATEST_FLOOR = 2.0 ** 1020


# The shards of a placement, and scratch memory for one key at a time.
cdef struct Shards:
    Py_ssize_t count
    const uint64_t *seeds
    const double *weights
    const int64_t *ranks    # of shards with equal scores, the one with the lowest rank wins
    const int64_t *nodes
    const int64_t *zones
    double *handicaps       # the greatest weight divided by this shard's weight, in units of 2**-53
    double handicap         # the greatest of the handicaps
    uint64_t *draws
    double *floors          # multiplied by the greatest weight, at most one handicap too low; INFINITY: node taken
    double *apart           # like floors, but also INFINITY if the zone is taken


cdef inline uint64_t _mix(uint64_t value) noexcept nogil:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    value = (value ^ (value >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * <uint64_t>0x94D049BB133111EB
    return value ^ (value >> 31)


cdef inline double _cost(uint64_t drawn) noexcept nogil:
    """Returns -ln(u), or 0 for the one draw in 2**53 whose u is rounded to 1."""
    return fabs(log((<double><int64_t>(drawn >> 11) + 0.5) * 2.0 ** -53))


cdef inline void _draw(const Shards *shards, uint64_t word) noexcept nogil:
    """Computes every shard's draw and floor for a key."""
    cdef uint64_t mixed = _mix(word)
    cdef Py_ssize_t i
    for i in range(shards.count):
        shards.draws[i] = _mix(mixed ^ shards.seeds[i])
        shards.floors[i] = <double><int64_t>(~shards.draws[i] >> 11) * shards.handicaps[i]


cdef inline double _lowest(const double *floors, Py_ssize_t count) noexcept nogil:
    """Returns the lowest floor. Keeps four minima, because with only one each comparison would wait for the comparison
    before it."""
    cdef double a = INFINITY, b = INFINITY, c = INFINITY, d = INFINITY
    cdef Py_ssize_t i = 0
    while i + 4 <= count:
        a = floors[i] if floors[i] < a else a
        b = floors[i + 1] if floors[i + 1] < b else b
        c = floors[i + 2] if floors[i + 2] < c else c
        d = floors[i + 3] if floors[i + 3] < d else d
        i += 4
    while i < count:
        a = floors[i] if floors[i] < a else a
        i += 1
    return min(min(a, b), min(c, d))


cdef inline Py_ssize_t _winner(const Shards *shards, const double *floors) noexcept nogil:
    """Returns the shard with the highest score among those with a finite floor, or NO_SHARD if there is none."""
    cdef Py_ssize_t i, best = NO_SHARD
    cdef double low = _lowest(floors, shards.count), limit = _GREATEST_FLOOR, score = 0.0, other
    low += shards.handicap
    if low < 1.0:
        limit = low / (1.0 - low) * _SLACK
    for i in range(shards.count):
        if floors[i] <= limit:
            if best == NO_SHARD:
                best = i
                continue
            if score == 0.0:
                score = shards.weights[best] / _cost(shards.draws[best])
            other = shards.weights[i] / _cost(shards.draws[i])
            if other > score or (other == score and shards.ranks[i] < shards.ranks[best]):
                score = other
                best = i
    return best


cdef bint _choose_replicas(const Shards *shards, int64_t *chosen, Py_ssize_t columns) noexcept nogil:
    """Fills columns 1 .. columns - 1 for a key whose owner is in column 0. Returns whether there were enough nodes."""
    cdef Py_ssize_t i, column
    cdef int64_t before
    if columns == 1:
        return True
    memcpy(shards.apart, shards.floors, shards.count * sizeof(double))
    for column in range(1, columns):
        before = chosen[column - 1]
        for i in range(shards.count):
            if shards.nodes[i] == shards.nodes[before]:
                shards.floors[i] = shards.apart[i] = INFINITY
            elif shards.zones[i] == shards.zones[before]:
                shards.apart[i] = INFINITY
        chosen[column] = _winner(shards, shards.apart)
        if chosen[column] == NO_SHARD:
            chosen[column] = _winner(shards, shards.floors)
        if chosen[column] == NO_SHARD:
            return False
    return True


def rendezvous(keys, seeds, weights, ranks, nodes, zones, Py_ssize_t columns):
    """Returns the numbers of the shards that hold each key, as `(n, columns)` int64. The owner is in column 0.

    ``keys``: `(n, key_bytes)` uint8 of any strides, key_bytes >= 8. The first 8 bytes of a key decide its place.
    ``seeds`` (uint64), ``weights`` (float64, > 0 and finite), ``ranks``, ``nodes``, ``zones`` (int64): one item per
    shard.
    ``columns``: at most the number of nodes.

    If scores are equal, the lowest rank wins. Each next column is the shard with the best score on a node and in a zone
    that no earlier column has. If no unused zone is left, only the node must differ.

    Raises ValueError for arrays that do not fit. Works without the GIL. Thread-safe as long as no thread writes to the
    arrays.
    """
    cdef _Buffers held = _Buffers(7)
    cdef Py_buffer *view = held.take(keys, PyBUF_STRIDES, "keys")
    if view.ndim != 2 or view.itemsize != 1 or view.shape[1] < 8:
        shape = tuple([view.shape[i] for i in range(view.ndim)])
        raise ValueError(f"keys must be an (n, key_bytes) array of uint8 with key_bytes >= 8; got shape {shape} of "
                         f"{view.itemsize}-byte items")
    cdef Shards shards
    shards.count = len(seeds)
    if shards.count < 1 or columns < 1:
        raise ValueError(f"{shards.count} shards and {columns} columns: expected at least 1 of each")
    shards.seeds = <const uint64_t *>_column(held, seeds, shards.count, b"LQ", "seeds")
    shards.weights = <const double *>_column(held, weights, shards.count, b"d", "weights")
    shards.ranks = <const int64_t *>_column(held, ranks, shards.count, b"lq", "ranks")
    shards.nodes = <const int64_t *>_column(held, nodes, shards.count, b"lq", "nodes")
    shards.zones = <const int64_t *>_column(held, zones, shards.count, b"lq", "zones")
    cdef Py_ssize_t count = view.shape[0], i
    found = np.empty((count, columns), dtype=np.int64)
    cdef int64_t *chosen = <int64_t *>held.take(found, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE, "found").buf
    cdef double *scratch = <double *>malloc(4 * shards.count * sizeof(double))
    if scratch == NULL:
        raise MemoryError(f"no memory to place keys among {shards.count} shards")
    shards.handicaps, shards.floors, shards.apart = scratch, scratch + shards.count, scratch + 2 * shards.count
    shards.draws = <uint64_t *>(scratch + 3 * shards.count)
    cdef const char *key = <const char *>view.buf
    cdef Py_ssize_t row_stride = view.strides[0], stride = view.strides[1], at
    cdef uint64_t word
    cdef double greatest = 0.0
    cdef bint enough = True
    shards.handicap = 0.0
    with nogil:
        for i in range(shards.count):
            greatest = max(greatest, shards.weights[i])
        for i in range(shards.count):
            shards.handicaps[i] = min(greatest / shards.weights[i], _GREATEST_HANDICAP) * 2.0 ** -53
            shards.handicap = max(shards.handicap, shards.handicaps[i])
        for i in range(count):
            word = 0
            for at in range(8):
                word |= <uint64_t><uint8_t>key[at * stride] << (8 * at)
            key += row_stride
            _draw(&shards, word)
            chosen[0] = _winner(&shards, shards.floors)
            if not _choose_replicas(&shards, chosen, columns):
                enough = False
                break
            chosen += columns
        free(scratch)
    if not enough:
        raise ValueError(f"columns is {columns}, but the shards are on fewer nodes: each column is another node")
    return found


def group_by_owner(owners, Py_ssize_t count):
    """Groups positions by owner. Returns `(order, bounds)`, both as int64.

    The positions of owner i are ``order[bounds[i] : bounds[i + 1]]``, in ascending order. ``owners``: 1-D int64, each
    from 0 to count - 1; otherwise raises IndexError. This is a counting sort. Thread-safe.
    """
    if count < 1:
        raise ValueError(f"count is {count}: expected at least 1 owner")
    cdef _Buffers held = _Buffers(3)
    cdef Py_ssize_t n = len(owners), i
    cdef const int64_t *owner = <const int64_t *>_column(held, owners, n, b"lq", "owners")
    order, bounds = np.empty(n, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    cdef int64_t *positions = <int64_t *>held.take(order, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE, "order").buf
    cdef int64_t *ends = <int64_t *>held.take(bounds, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE, "bounds").buf
    for i in range(n):
        if not 0 <= owner[i] < count:
            raise IndexError(f"owners[{i}] is {owner[i]}: expected 0 to {count - 1}")
        ends[owner[i] + 1] += 1
    for i in range(count):
        ends[i + 1] += ends[i]
    for i in range(n):
        positions[ends[owner[i]]] = i
        ends[owner[i]] += 1
    for i in range(count, 0, -1):
        ends[i] = ends[i - 1]
    ends[0] = 0
    return order, bounds


def first_of_each(keys):
    """Returns the position of each key's first occurrence, as int64.

    ``keys``: (n, key_bytes) uint8, C-contiguous. Thread-safe.
    """
    cdef _Buffers held = _Buffers(2)
    cdef Py_buffer *view = held.take(keys, PyBUF_ND | PyBUF_C_CONTIGUOUS, "keys")
    if view.ndim != 2 or view.itemsize != 1:
        raise ValueError(f"keys must be a 2-D array of bytes, got {view.ndim}-D of {view.itemsize}-byte items")
    cdef Py_ssize_t n = view.shape[0], size = view.shape[1], i, at, room = 16
    cdef const uint8_t *data = <const uint8_t *>view.buf
    cdef int64_t other
    first = np.empty(n, dtype=np.int64)
    cdef int64_t *found = <int64_t *>held.take(first, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE, "first").buf
    while room < 2 * n:
        room *= 2
    # A table with open addressing: each item is the position of a first occurrence, or -1.
    cdef int64_t *table = <int64_t *>malloc(room * sizeof(int64_t))
    if table == NULL:
        raise MemoryError()
    memset(table, 0xFF, room * sizeof(int64_t))
    for i in range(n):  # this takes microseconds, which is too short to release the GIL
        at = <Py_ssize_t>(xxh3_64(data + i * size, size, 0, _best) & <uint64_t>(room - 1))
        while True:
            other = table[at]
            if other < 0:
                table[at] = found[i] = i
                break
            if memcmp(data + other * size, data + i * size, size) == 0:
                found[i] = other
                break
            at = (at + 1) & (room - 1)
    free(table)
    return first
