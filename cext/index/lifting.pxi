# The order of a list of blocks by use. A block comes before the blocks that follow it in its chain.

cdef Py_ssize_t row_of(const int32_t *slots, Py_ssize_t n, int32_t slot) noexcept nogil:
    """Returns the row of a slot among ascending slots, or -1 if the slot is not there."""
    cdef Py_ssize_t low = 0, high = n, middle
    while low < high:
        middle = (low + high) // 2
        if slots[middle] < slot:
            low = middle + 1
        else:
            high = middle
    return low if low < n and slots[low] == slot else -1


def lift_ticks(slots, before, ticks) -> None:
    """Raises ticks in place, so that a block's tick is higher than the ticks of all blocks that follow it in its chain.

    ``slots``: int32, ascending.
    ``before``: int32, the slot of the block that each block follows, or -1 if there is none. The array is
    overwritten.
    ``ticks``: uint64. Any two must differ by at least the length of a chain.

    Takes O(n log n) time and 8 bytes of memory per block. Works without the GIL.
    """
    cdef _Buffers held = _Buffers(3)
    cdef Py_buffer *slot_view = _vector(held, slots, 4, b"i", "slots")
    cdef Py_buffer *above_view = _vector(held, before, 4, b"i", "before", True)
    cdef Py_buffer *tick_view = _vector(held, ticks, 8, b"LQ", "ticks", True)
    cdef const int32_t *slot = <const int32_t *>slot_view.buf
    cdef int32_t *above = <int32_t *>above_view.buf
    cdef uint64_t *tick = <uint64_t *>tick_view.buf
    cdef Py_ssize_t n = slot_view.shape[0], i, row, taken = 0, end = 0
    cdef int32_t *followers
    cdef int32_t *leaves
    if above_view.shape[0] != n or tick_view.shape[0] != n:
        raise ValueError(f"{n} slots with {above_view.shape[0]} before them and {tick_view.shape[0]} ticks, "
                         "expected as many")
    if n == 0:
        return
    followers = <int32_t *>calloc(2 * n, sizeof(int32_t))
    if followers == NULL:
        raise MemoryError(f"no memory to order {n} blocks")
    leaves = followers + n
    with nogil:
        for i in range(n):
            row = row_of(slot, n, above[i]) if above[i] >= 0 else -1
            above[i] = <int32_t>row
            if row >= 0:
                followers[row] += 1
        for i in range(n):
            if followers[i] == 0:
                leaves[end] = <int32_t>i
                end += 1
        while taken < end:  # a block is a leaf when all blocks that follow it have been taken
            i = leaves[taken]
            taken += 1
            row = above[i]
            if row < 0:
                continue
            if tick[row] <= tick[i]:
                tick[row] = tick[i] + 1
            followers[row] -= 1
            if followers[row] == 0:
                leaves[end] = <int32_t>row
                end += 1
        free(followers)
