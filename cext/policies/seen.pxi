# How often evicted blocks had been used: a bounded table of hashes, with four bits for each hash.
#
# The table has buckets of eight words, which is half a cache line. Each hash belongs to one bucket. A word is 28 bits
# of the hash and the class of uses, or 0 if it is empty. A put inserts its word as the first of the bucket and drops
# the last one, so a bucket holds its latest eight words. A wrong answer needs two equal 32-bit hashes: with a million
# blocks, that is one look-up in 2000. The table is only a hint, so if there is no memory to resize the table, it stays
# unchanged.


cdef enum:
    SEEN_WAYS = 8
    SEEN_TAG = 0x0FFFFFFF


@cython.final
cdef class Seen:
    """The class of uses, from 1 to 15, of about the last ``capacity`` blocks that were added. 4 bytes per block."""

    cdef uint32_t *words
    cdef uint32_t buckets

    def __dealloc__(self):
        free(self.words)

    cdef inline uint32_t *bucket(self, uint32_t hash) noexcept nogil:
        return self.words + SEEN_WAYS * ((<uint64_t>hash * self.buckets) >> 32)

    cdef inline void prefetch(self, uint32_t hash) noexcept nogil:
        """Prefetches the memory of a look-up."""
        kv_prefetch(self.bucket(hash))

    cdef void put(self, uint32_t hash, int uses_class) noexcept nogil:
        cdef uint32_t *words
        cdef int i
        if self.buckets:
            words = self.bucket(hash)
            for i in range(SEEN_WAYS - 1, 0, -1):
                words[i] = words[i - 1]
            words[0] = hash << 4 | <uint32_t>uses_class

    cdef int take(self, uint32_t hash) noexcept nogil:
        """Removes the class of a hash and returns it, or returns 0 if the table does not have the hash."""
        cdef uint32_t *words = self.bucket(hash)
        cdef uint32_t word
        cdef int i
        if self.buckets:
            for i in range(SEEN_WAYS):
                word = words[i]
                if word != 0 and word >> 4 == (hash & SEEN_TAG):
                    words[i] = 0
                    return <int>(word & 15)
        return 0

    cdef void resize(self, Py_ssize_t capacity) noexcept nogil:
        """Changes the capacity, and keeps the words that fit. Takes O(capacity)."""
        cdef uint32_t *old = self.words
        cdef Py_ssize_t old_buckets = self.buckets, row, buckets = max(<Py_ssize_t>1, capacity // SEEN_WAYS)
        cdef int i
        cdef uint32_t first, word
        cdef uint32_t *words = <uint32_t *>calloc(buckets, SEEN_WAYS * sizeof(uint32_t))
        if words == NULL:
            return
        self.words = words
        self.buckets = <uint32_t>buckets
        for row in range(old_buckets):
            # The lowest hash of the bucket. If there are 16 or more buckets, this hash and the 28 bits of a word
            # determine the other four bits.
            first = <uint32_t>(((<uint64_t>row << 32) + old_buckets - 1) // old_buckets)
            for i in range(SEEN_WAYS - 1, -1, -1):
                word = old[row * SEEN_WAYS + i]
                if word != 0:
                    self.put(first + (((word >> 4) - first) & SEEN_TAG), <int>(word & 15))
        free(old)

    cdef Py_ssize_t nbytes(self) noexcept:
        return self.__sizeof__() + <Py_ssize_t>self.buckets * SEEN_WAYS * sizeof(uint32_t)
