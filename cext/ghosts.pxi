# What was evicted lately: a bounded table of hashes.
#
# Buckets of eight places; a hash has one bucket. Each entry carries the number of the put that made it, and is alive
# while fewer than `capacity` puts came after it, so nothing is ever moved or swept: a put takes its bucket's oldest
# place. A bucket that gets more than its share forgets its oldest early: twice as many places as `capacity` keep that to
# few. A wrong answer needs two equal 32-bit hashes: one look-up in 4000 at a million
# entries. Memory for it is a hint like all of it: without, the table stays as it was.


cdef enum:
    WAYS = 8
    LONG_AGO = 0x80000000  # an age that is not alive


cdef struct Bucket:
    uint32_t[WAYS] hashes
    uint32_t[WAYS] puts         # the number of the put


@cython.final
cdef class Ghosts:
    """The hashes of the last ``capacity`` puts. 16 to 20 bytes an entry of capacity."""

    cdef Bucket *buckets
    cdef uint32_t count         # of buckets
    cdef uint32_t capacity
    cdef uint32_t put_number

    def __cinit__(self):
        self.put_number = <uint32_t>LONG_AGO

    def __dealloc__(self):
        free(self.buckets)

    cdef inline Bucket *bucket(self, uint32_t hash) noexcept nogil:
        return &self.buckets[(<uint64_t>hash * self.count) >> 32]

    cdef inline void prefetch(self, uint32_t hash) noexcept nogil:
        """Asks for the memory a look-up will need."""
        if self.count:
            kv_prefetch(self.bucket(hash))
            kv_prefetch(&self.bucket(hash).puts[WAYS - 1])

    cdef void place(self, uint32_t hash, uint32_t put_number) noexcept nogil:
        cdef Bucket *bucket = self.bucket(hash)
        cdef int i, best = 0
        for i in range(WAYS):
            if bucket.hashes[i] == hash:
                best = i
                break
            if self.put_number - bucket.puts[i] > self.put_number - bucket.puts[best]:
                best = i
        bucket.hashes[best] = hash
        bucket.puts[best] = put_number

    cdef void put(self, uint32_t hash) noexcept nogil:
        """Remembers a hash; one that is there is made the newest."""
        if self.count:
            self.put_number += 1
            self.place(hash, self.put_number)

    cdef bint take(self, uint32_t hash) noexcept nogil:
        """Whether a hash is remembered; if so it is forgotten."""
        cdef Bucket *bucket
        cdef int i
        if not self.count:
            return False
        bucket = self.bucket(hash)
        for i in range(WAYS):
            if bucket.hashes[i] == hash and self.put_number - bucket.puts[i] < self.capacity:
                bucket.puts[i] = self.put_number - <uint32_t>LONG_AGO
                return True
        return False

    cdef void resize(self, Py_ssize_t capacity) noexcept nogil:
        """Remembers this many from now on. Rebuilds, in O(capacity), when it grew or shrank by a good part."""
        cdef Bucket *old = self.buckets
        cdef Bucket *buckets = NULL
        cdef Py_ssize_t places = <Py_ssize_t>self.count * WAYS, old_count = self.count, count = 0, i
        cdef int way
        self.capacity = <uint32_t>capacity
        if capacity * 2 <= places <= capacity * 3:
            return
        if capacity != 0:
            count = (capacity * 5 // 2 if places else capacity * 2) // WAYS + 1
            buckets = <Bucket *>malloc(count * sizeof(Bucket))
            if buckets == NULL:
                return
        for i in range(count):
            memset(&buckets[i], 0, sizeof(Bucket))
            for way in range(WAYS):
                buckets[i].puts[way] = self.put_number - <uint32_t>LONG_AGO
        self.buckets = buckets
        self.count = <uint32_t>count
        for i in range(old_count if count else 0):
            for way in range(WAYS):
                if self.put_number - old[i].puts[way] < self.capacity:
                    self.place(old[i].hashes[way], old[i].puts[way])
        free(old)

    cdef Py_ssize_t nbytes(self) noexcept:
        return self.__sizeof__() + <Py_ssize_t>self.count * sizeof(Bucket)
