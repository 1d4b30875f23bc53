# The distinct keys of one batch: an open-addressing table of positions. It finds keys that occur twice.


cdef struct Batch:
    int32_t *heads      # one allocation, whose second part is `hashes`
    uint32_t *hashes    # one per key; the caller fills it in
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
