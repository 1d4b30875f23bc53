# The records of an index: one for each slot, in segments.
#
# A record (48 bytes, then the key) has the whole state of a slot, so that a hit costs one cache line if keys have 16
# bytes. Records are allocated and freed by segment. Times in records are eighths of a second of the monotonic clock.
# End times are rounded up and the present time is rounded down, so that nothing ends early. A pin or a block ends
# exactly at its end time.

cdef extern from *:
    """
    #include <stdint.h>
    #include <stdlib.h>
    #include <string.h>

    #define KV_ROTL(x, b) (((x) << (b)) | ((x) >> (64 - (b))))
    #define KV_SIPROUND \\
        v0 += v1; v1 = KV_ROTL(v1, 13); v1 ^= v0; v0 = KV_ROTL(v0, 32); \\
        v2 += v3; v3 = KV_ROTL(v3, 16); v3 ^= v2; \\
        v0 += v3; v3 = KV_ROTL(v3, 21); v3 ^= v0; \\
        v2 += v1; v1 = KV_ROTL(v1, 17); v1 ^= v2; v2 = KV_ROTL(v2, 32)

    /* SipHash-1-3 (Aumasson and Bernstein, 2012), a keyed hash. Without the key, collisions cannot be constructed. */
    static inline uint32_t kv_siphash(const unsigned char *key, size_t size, uint64_t k0, uint64_t k1) {
        uint64_t v0 = k0 ^ 0x736f6d6570736575ULL, v1 = k1 ^ 0x646f72616e646f6dULL;
        uint64_t v2 = k0 ^ 0x6c7967656e657261ULL, v3 = k1 ^ 0x7465646279746573ULL;
        uint64_t word;
        size_t i = 0;
        for (; i + 8 <= size; i += 8) {
            memcpy(&word, key + i, 8);
            v3 ^= word; KV_SIPROUND; v0 ^= word;
        }
        word = 0;
        memcpy(&word, key + i, size - i);
        word |= (uint64_t)size << 56;
        v3 ^= word; KV_SIPROUND; v0 ^= word;
        v2 ^= 0xff; KV_SIPROUND; KV_SIPROUND; KV_SIPROUND;
        return (uint32_t)(v0 ^ v1 ^ v2 ^ v3);
    }

    /* n / d for 32-bit n and d > 1, with magic = 2**64 / d + 1 (Lemire, 2019). It multiplies instead of dividing. */
    static inline uint32_t kv_divide(uint32_t n, uint64_t magic) {
        return (uint32_t)(((unsigned __int128)magic * n) >> 64);
    }
    static inline int kv_lowest_bit(uint64_t word) { return __builtin_ctzll(word); }
    static inline void kv_prefetch(const void *address) { __builtin_prefetch(address); }
    """
    uint32_t kv_siphash(const unsigned char *key, size_t size, uint64_t k0, uint64_t k1) noexcept nogil
    uint32_t kv_divide(uint32_t n, uint64_t magic) noexcept nogil
    int kv_lowest_bit(uint64_t word) noexcept nogil
    void kv_prefetch(const void *address) noexcept nogil
    int posix_memalign(void **memory, size_t alignment, size_t size) noexcept nogil


cdef enum:
    FREE = 0
    WRITING = 1
    READY = 2
    GONE = 3
    CHOSEN = 4  # marks a WRITING slot during a commit or abort, to detect slots that occur twice

    NONE = -1
    ABSENT = -1  # the result of a look-up
    COMING = -2
    EXISTED = -1  # the result of a reservation
    DUPLICATE = -2
    NO_SPACE = -3
    FOUND = -4  # FOUND - slot: a key of a reserve() whose READY slot must still be touched

    PRIORITIES = 4
    MOST_READS = 255
    LOOKAHEAD = 32  # the number of keys whose cache lines are prefetched together
    MAX_SLOTS = 0x7FFFFFC0

    FOLLOWS = 1   # the block is linked to the block before it in its chain
    FOLLOWED = 2  # other blocks are linked to it
    KEPT = 4      # the policy has put it aside, because it was FOLLOWED when it would have been evicted
    IN_CALL = 8   # its Link says in which call the block was set

    CHECKSUM = 0  # the fields of a record that `column_of` can read
    TICK = 1
    EXPIRES = 2
    PRIORITY = 3
    READS = 4

cdef uint64_t NO_TICK = 0x7FFFFFFFFFFFFFFF
cdef tuple COLUMNS = ("slots", "sums", "ticks", "expires", "priorities")
cdef tuple STATE_NAMES = ("free", "writing", "ready", "gone", "named twice")


cdef struct Record:
    uint64_t checksum
    uint64_t tick       # the tick of its last use
    uint32_t pin_until  # eighths of a second; 0: never pinned
    uint32_t expires    # eighths of a second; 0: never
    int32_t refs
    int32_t newer       # READY: a link of the policy's list
    int32_t older       # READY: a link of the policy's list; WRITING: the READY slot that it will replace
    uint32_t hash
    uint32_t rank       # how many blocks followed it in the batch that last touched it; tick - rank tells the batch
    uint8_t state
    uint8_t priority    # 0 to PRIORITIES - 1; blocks of a higher priority stay longer
    uint8_t linked      # flags FOLLOWS to IN_CALL: the valid fields of its Link, and whether the policy put it aside
    uint8_t reads       # how often a transient block may still be read; 0 for an ordinary block


cdef struct Link:
    # A block's place in the tree of chains (see links.pxi). It is stored behind the records of its segment.
    uint64_t call       # IN_CALL: the number of the call that set the block, which is the same on all shards
    uint32_t offset     # IN_CALL: the place of its key among the keys of that call
    int32_t before      # FOLLOWS: the block before it in its chain
    int32_t next        # FOLLOWS: the neighbours among the blocks that follow the same one
    int32_t previous
    int32_t first       # FOLLOWED: one of the blocks that follow it
    int32_t followers   # FOLLOWED: the number of blocks that follow it
    int32_t chosen      # the number of followers that a walk chose without removing them; 0 between walks


cdef struct Segment:
    char *records           # NULL if detached; behind the records: the links, then the policy's data, of all slots
    uint32_t latest_pin     # no pin in the segment ends later, which makes counting pins cheap
    int32_t used            # slots that are not free, in a segment for transient blocks; -1 in others


cdef struct Space:
    # The records of one index by slot. Slots are numbered ordinal * slots_per_segment + i.
    Segment *segment        # by ordinal
    Py_ssize_t ordinals
    Py_ssize_t slots_per_segment
    Py_ssize_t stride       # the bytes from one record to the next
    Py_ssize_t links_at     # the bytes from the records to the links
    Py_ssize_t policy_at    # the bytes from the records to the policy's data
    uint64_t magic          # divides by slots_per_segment
    uint32_t clock          # the latest time that a call was given


cdef inline unsigned char *record_key(Record *record) noexcept nogil:
    return <unsigned char *>record + sizeof(Record)


cdef inline uint32_t segment_of(Space *space, int32_t slot) noexcept nogil:
    """Returns the ordinal of a slot's segment."""
    return <uint32_t>slot if space.magic == 0 else kv_divide(<uint32_t>slot, space.magic)


cdef inline Record *record_at(Space *space, int32_t slot) noexcept nogil:
    cdef uint32_t ordinal = segment_of(space, slot)
    return <Record *>(
        space.segment[ordinal].records + (slot - <Py_ssize_t>ordinal * space.slots_per_segment) * space.stride
    )


cdef inline Link *link_at(Space *space, int32_t slot) noexcept nogil:
    cdef uint32_t ordinal = segment_of(space, slot)
    return <Link *>(space.segment[ordinal].records + space.links_at) + (
        slot - <Py_ssize_t>ordinal * space.slots_per_segment
    )


cdef inline bint is_expired(Space *space, Record *record) noexcept nogil:
    return record.expires != 0 and record.expires <= space.clock


cdef inline bint is_held(Space *space, Record *record, uint32_t now) noexcept nogil:
    """Returns whether a block may not be evicted, because it is being written or read, or pinned, or transient."""
    return record.state != READY or record.refs != 0 or ((record.pin_until > now or record.reads != 0) and not is_expired(space, record))


cdef inline uint32_t eighths_down(double seconds) noexcept nogil:
    """Converts the present time to eighths of a second, rounded down."""
    return <uint32_t>(seconds * 8) if 0 < seconds < 0x1FFFFFFF else 0 if not seconds > 0 else 0xFFFFFFF8


cdef inline uint32_t eighths_up(double seconds) noexcept nogil:
    """Converts an end time to eighths of a second, rounded up. Returns 0 for a time that is not positive."""
    cdef uint32_t eighths = eighths_down(seconds)
    return eighths + (eighths < seconds * 8)
