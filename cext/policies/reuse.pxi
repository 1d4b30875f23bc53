# Learns from a sample of block uses how likely blocks are to be used again.
#
# A block has a class and an age, which is the number of block references since its last use. Ages fall into bins. The
# edges of the bins begin at a sixteenth of the cache and grow by a factor of the square root of 2. A sample is one use
# of one block. It is followed until the block's next use, even while the block is not in the cache. A policy that
# learns only from blocks that it keeps would learn that it was right to keep them. For each (class, bin) we count the
# samples that reached the bin, and the samples that were used again in it. Their ratio is the hazard: the chance that a
# block that reaches the bin is used again in it. worth.pxi ranks the lists by these counts.
#
# All uses are sampled as long as there is room. If the room is full and the oldest sample is younger than HORIZON
# caches of references, only every second use is sampled from then on. Every second old sample is then dropped, a few
# for each new sample. This is repeated when the room is full again. Uses are sampled rather than keys, because sampling
# keys can miss the few prompts that are half the traffic.


cdef enum:
    CLASSES = 18
    BINS = 26               # the last bin begins at 256 caches of references
    LISTS = 468             # CLASSES * BINS
    VACANT = 0xFF           # the class of an entry without a sample
    HORIZON = 64            # a sample is followed for at least this many caches of references; 32 to 128 work as well
    BLOCKS_PER_SAMPLE = 2   # one sample for this many blocks of the cache; 1 to 4 work as well
    MIN_SAMPLES = 4096      # but at least this many, because learning depends on their number and not on their share
    MOST_PER_BLOCK = 8      # and at most this many per block
    MOST_SAMPLES = 32768    # and at most this many in all; 8192 taught as much, and each sample costs time and memory
    THINNED_AT_ONCE = 4     # the entries checked for each new sample during a thinning, which drops every second sample
    MAX_AGE = 0x80000000    # ages are differences of 32-bit counts; older blocks are in the last bin, not compared

cdef double FIRST_EDGE = 1.0 / 16.0     # as a share of the cache; 1/8 to 1/32 work as well, 1/2 does not
cdef double FINER = 0.70710678118654752 # the ratio of an edge to the next one


cdef struct Sample:
    uint32_t hash
    uint32_t stamp      # the time of the use
    int32_t newer       # the neighbour in the sample's bin
    int32_t older
    int32_t next        # the next sample in the bucket, or the next one in the list of vacant entries
    uint8_t kind        # the class
    uint8_t bin
    uint8_t epoch       # the last thinning that has checked the sample


cdef inline Py_ssize_t samples_for(Py_ssize_t capacity) noexcept nogil:
    """Returns the number of samples for a cache of ``capacity`` blocks."""
    cdef Py_ssize_t least = min(<Py_ssize_t>MIN_SAMPLES, MOST_PER_BLOCK * capacity)
    return min(max(capacity // BLOCKS_PER_SAMPLE, least), <Py_ssize_t>MOST_SAMPLES)


@cython.final
cdef class Reuse:
    """Statistics of reuse, and the ranking of the lists of blocks by these statistics. 28 bytes per sample."""

    cdef double[CLASSES][BINS] entered      # the samples that reached a bin
    cdef double[CLASSES][BINS] reused       # the samples that were used again in the bin
    cdef int32_t[LISTS] order               # class * BINS + bin of each list; the list of lowest worth comes first
    cdef double[BINS + 1] edges             # the edges of the bins, in references
    cdef uint32_t[BINS + 1] ages            # the edges for comparison with ages: rounded up, and at most MAX_AGE
    cdef double unit                        # the size of the cache for which the edges were made
    cdef Sample *samples
    cdef int32_t *buckets                   # the first sample of each bucket, plus one; as many buckets as samples
    cdef int32_t[BINS] newest
    cdef int32_t[BINS] oldest
    cdef uint32_t capacity, used            # the number of entries, and the number of entries that were ever used
    cdef int32_t vacant
    cdef uint32_t rate, gap                 # one use in `rate` is sampled; `gap`: the uses until the next sample
    cdef uint32_t hand                      # the position of the thinning; `capacity` if no thinning is in progress
    cdef uint8_t epoch
    cdef uint64_t random
    cdef uint64_t taken                     # the samples since the last halving; 0 if there never was a sample

    def __cinit__(self):
        self.rate = self.gap = 1
        self.random = 88172645463325252
        self.vacant = NONE
        memset(self.newest, 0xFF, sizeof(self.newest))
        memset(self.oldest, 0xFF, sizeof(self.oldest))

    def __dealloc__(self):
        free(self.samples)
        free(self.buckets)

    # -- samples ---------------------------------------------------------------------------------------------

    cdef inline int32_t *bucket(self, uint32_t hash) noexcept nogil:
        return &self.buckets[(<uint64_t>hash * self.capacity) >> 32]

    cdef inline void prefetch(self, uint32_t hash) noexcept nogil:
        """Prefetches the memory of a look-up."""
        kv_prefetch(self.bucket(hash))

    cdef inline int bin_of(self, uint32_t age) noexcept nogil:
        cdef int bin = 0
        while bin < BINS - 1 and age >= self.ages[bin + 1]:
            bin += 1
        return bin

    cdef inline void push(self, int32_t i, int bin) noexcept nogil:
        cdef Sample *sample = &self.samples[i]
        sample.bin = <uint8_t>bin
        sample.newer = NONE
        sample.older = self.newest[bin]
        if sample.older == NONE:
            self.oldest[bin] = i
        else:
            self.samples[sample.older].newer = i
        self.newest[bin] = i

    cdef inline void unlink(self, Sample *sample) noexcept nogil:
        if sample.newer == NONE:
            self.newest[sample.bin] = sample.older
        else:
            self.samples[sample.newer].older = sample.older
        if sample.older == NONE:
            self.oldest[sample.bin] = sample.newer
        else:
            self.samples[sample.older].newer = sample.newer

    cdef void file(self, int32_t i, uint32_t hash) noexcept nogil:
        """Puts an entry into its bucket."""
        cdef int32_t *bucket = self.bucket(hash)
        self.samples[i].hash = hash
        self.samples[i].next = bucket[0] - 1
        bucket[0] = i + 1

    cdef void drop(self, int32_t i) noexcept nogil:
        cdef Sample *sample = &self.samples[i]
        cdef int32_t *bucket = self.bucket(sample.hash)
        cdef int32_t other = bucket[0] - 1
        self.unlink(sample)
        if other == i:
            bucket[0] = sample.next + 1
        else:
            while self.samples[other].next != i:
                other = self.samples[other].next
            self.samples[other].next = sample.next
        sample.kind = VACANT
        sample.next = self.vacant
        self.vacant = i

    cdef inline uint64_t draw(self) noexcept nogil:
        """Returns a random number by Xorshift (Marsaglia, 2003). The sequence is the same in every process."""
        self.random ^= self.random << 13
        self.random ^= self.random >> 7
        self.random ^= self.random << 17
        return self.random >> 16

    cdef void make_vacant(self, uint32_t now) noexcept nogil:
        """Makes an entry vacant, and continues a thinning that is in progress. Begins a thinning if all samples are too
        young to be dropped."""
        cdef int32_t oldest = NONE
        cdef int bin = BINS - 1
        cdef Py_ssize_t left = THINNED_AT_ONCE
        cdef Sample *sample
        if self.vacant == NONE and self.used == self.capacity:
            while self.oldest[bin] == NONE:
                bin -= 1
            oldest = self.oldest[bin]
            if bin == BINS - 1 or now - self.samples[oldest].stamp >= min(HORIZON * self.unit, <double>MAX_AGE):
                self.drop(oldest)
            elif self.hand == self.capacity:
                self.hand = 0
                self.epoch ^= 1
                self.rate *= 2
        while self.hand < self.capacity and (left > 0 or self.vacant == NONE):
            sample = &self.samples[self.hand]
            if sample.kind != VACANT and sample.epoch != self.epoch:
                sample.epoch = self.epoch
                if self.draw() & 1:
                    self.drop(<int32_t>self.hand)
            self.hand += 1
            left -= 1
        if self.vacant == NONE and self.used == self.capacity:
            self.drop(oldest)

    cdef bint used_again(self, uint32_t hash, uint32_t now) noexcept nogil:
        """Ends the sample of a block's last use, because the block was used again. Returns whether there was a
        sample."""
        cdef int32_t i = self.find(hash)
        cdef int bin
        cdef Sample *sample
        if i == NONE:
            return False
        sample = &self.samples[i]
        bin = sample.bin
        while bin < BINS - 1 and now - sample.stamp >= self.ages[bin + 1]:
            bin += 1
            self.entered[sample.kind][bin] += 1
        self.reused[sample.kind][bin] += 1
        self.drop(i)
        return True

    cdef inline int32_t find(self, uint32_t hash) noexcept nogil:
        """Returns the sample with a hash, or NONE."""
        cdef int32_t i = NONE
        if self.capacity:
            i = self.bucket(hash)[0] - 1
        while i != NONE and self.samples[i].hash != hash:
            i = self.samples[i].next
        return i

    cdef void reclass(self, uint32_t hash, int kind) noexcept nogil:
        """Moves a block's sample, if it has one, to another class, because the block was put into the wrong one."""
        cdef int32_t i = self.find(hash)
        cdef int bin
        if i == NONE:
            return
        for bin in range(self.samples[i].bin + 1):
            self.entered[self.samples[i].kind][bin] = max(0.0, self.entered[self.samples[i].kind][bin] - 1)
            self.entered[kind][bin] += 1
        self.samples[i].kind = <uint8_t>kind

    cdef bint take(self, uint32_t hash, int kind, uint32_t now) noexcept nogil:
        """Notes the use of a block whose class is ``kind`` from now on. Returns whether this use becomes a sample."""
        cdef int32_t i
        self.gap -= 1
        if self.gap > 0 or not self.capacity:
            self.gap = max(<uint32_t>1, self.gap)
            return False
        self.gap = <uint32_t>(1 + self.draw() % (2 * self.rate - 1))
        self.make_vacant(now)
        i = self.vacant
        if i == NONE:
            i = <int32_t>self.used
            self.used += 1
        else:
            self.vacant = self.samples[i].next
        self.file(i, hash)
        self.samples[i].stamp = now
        self.samples[i].kind = <uint8_t>kind
        self.samples[i].epoch = self.epoch
        self.push(i, 0)
        self.entered[kind][0] += 1
        self.taken += 1
        return True

    cdef Py_ssize_t age(self, int bin, uint32_t now, Py_ssize_t limit) noexcept nogil:
        """Moves up to ``limit`` samples that are too old for their bin to the next bin. Returns the number of moved
        samples."""
        cdef int32_t i = self.oldest[bin]
        cdef Py_ssize_t count = 0
        while i != NONE and count < limit and now - self.samples[i].stamp >= self.ages[bin + 1]:
            self.unlink(&self.samples[i])
            self.push(i, bin + 1)
            self.entered[self.samples[i].kind][bin + 1] += 1
            count += 1
            i = self.oldest[bin]
        return count

    # -- the size of the cache -------------------------------------------------------------------------------

    cdef bint resize(self, Py_ssize_t capacity, uint32_t now) noexcept nogil:
        """Sets the number of slots of the cache. Returns whether the edges of the bins changed, which takes
        O(samples)."""
        cdef double coarser = 1 / FINER, unit = self.unit
        cdef int bin
        if not self.taken:
            unit = capacity
        while unit < capacity * FINER:
            unit *= coarser
            self.shift_down()
        while unit * FINER > capacity:
            unit *= FINER
            self.shift_up()
        if unit == self.unit:
            return False
        self.unit = unit
        for bin in range(1, BINS + 1):
            self.edges[bin] = unit * FIRST_EDGE if bin == 1 else self.edges[bin - 1] * coarser
            self.ages[bin] = <uint32_t>min(self.edges[bin], <double>MAX_AGE)
            self.ages[bin] += self.ages[bin] < min(self.edges[bin], <double>MAX_AGE)
        self.rebuild(<uint32_t>samples_for(capacity), now)
        return True

    cdef void shift_down(self) noexcept nogil:
        """Adapts the counts to a cache that grew by the factor of one bin. Age bin k becomes bin k - 1."""
        cdef int kind, bin
        for kind in range(CLASSES):
            self.reused[kind][0] += self.reused[kind][1]
            for bin in range(1, BINS - 1):
                self.entered[kind][bin] = self.entered[kind][bin + 1]
                self.reused[kind][bin] = self.reused[kind][bin + 1]
            self.entered[kind][BINS - 1] = self.reused[kind][BINS - 1] = 0

    cdef void shift_up(self) noexcept nogil:
        """Adapts the counts to a cache that shrank by the factor of one bin. The first bin is split, on the assumption
        that reuse is evenly distributed in it."""
        cdef int kind, bin
        for kind in range(CLASSES):
            self.reused[kind][BINS - 1] += self.reused[kind][BINS - 2]
            self.entered[kind][BINS - 1] = self.entered[kind][BINS - 2]
            for bin in range(BINS - 2, 1, -1):
                self.entered[kind][bin] = self.entered[kind][bin - 1]
                self.reused[kind][bin] = self.reused[kind][bin - 1]
            self.reused[kind][1] = self.reused[kind][0] * (1 - FINER)
            self.reused[kind][0] *= FINER
            self.entered[kind][1] = self.entered[kind][0] - self.reused[kind][0]

    cdef void rebuild(self, uint32_t capacity, uint32_t now) noexcept nogil:
        """Moves the samples to new memory for ``capacity`` samples. The oldest ones may not fit. Changes nothing if
        there is no memory."""
        cdef Sample *old = self.samples
        cdef Sample *samples = <Sample *>calloc(capacity, sizeof(Sample))
        cdef int32_t *buckets = <int32_t *>calloc(capacity, sizeof(int32_t))
        cdef int32_t[BINS] oldest
        cdef int32_t i, made
        cdef int bin
        cdef Py_ssize_t surplus = <Py_ssize_t>self.used - capacity
        if samples == NULL or buckets == NULL:
            free(samples)
            free(buckets)
            return
        i = self.vacant
        while i != NONE:
            i = old[i].next
            surplus -= 1
        memcpy(oldest, self.oldest, sizeof(oldest))
        memset(self.newest, 0xFF, sizeof(self.newest))
        memset(self.oldest, 0xFF, sizeof(self.oldest))
        free(self.buckets)
        self.samples, self.buckets = samples, buckets
        self.capacity = self.hand = capacity
        self.used = 0
        self.vacant = NONE
        for bin in range(BINS - 1, -1, -1):
            i = oldest[bin]
            while i != NONE:
                if surplus > 0:
                    surplus -= 1
                else:
                    made = <int32_t>self.used
                    self.used += 1
                    samples[made] = old[i]
                    samples[made].epoch = self.epoch
                    self.file(made, old[i].hash)
                    self.push(made, self.bin_of(now - old[i].stamp))
                i = old[i].newer
        free(old)

    cdef Py_ssize_t nbytes(self) noexcept:
        return self.__sizeof__() + <Py_ssize_t>self.capacity * (sizeof(Sample) + sizeof(int32_t))
