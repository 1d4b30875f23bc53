# Memory of this process that is used again when no view of it is left.

cdef extern from *:
    """
    #include <sys/mman.h>

    #define KV_HUGE_BYTES ((size_t)4 << 20)

    static void *kv_map(size_t size) {
        void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return NULL;
        if (size >= KV_HUGE_BYTES) madvise(memory, size, MADV_HUGEPAGE);
        return memory;
    }
    """
    void *kv_map(size_t size) nogil
    int munmap(void *memory, size_t size) nogil
    int madvise(void *memory, size_t size, int advice) nogil
    int MADV_FREE

cdef enum:
    # Where the bytes begin in their first page. If a copy reads at a slightly lower offset in its page than it writes,
    # the copy waits for its own writes. It then took three times as long. Arrays begin at 0, 16 or 64.
    IN_PAGE = 1024


cdef class ReusableMemory:
    """``nbytes`` writable bytes of any content, for arrays and memoryviews on them.

    The kernel must clear new memory, which takes half as long as filling the memory with blocks from a socket. So keep
    this object, and use it again when it is not ``in_use``. ``lend``: whether the kernel may take its pages, while it
    is not in use, if the kernel is short of memory. No Python code runs when the last view is released. Thread-safe,
    because the GIL is held. Raises MemoryError.
    """

    cdef char *memory
    cdef Py_ssize_t size, views
    cdef bint lends

    def __cinit__(self, Py_ssize_t nbytes, bint lend=False):
        self.size, self.lends = max(nbytes, 1), lend
        self.memory = <char *>kv_map(IN_PAGE + self.size)
        if self.memory == NULL:
            raise MemoryError(f"{nbytes} bytes for blocks")

    def __dealloc__(self):
        if self.memory != NULL:
            munmap(self.memory, IN_PAGE + self.size)

    def __len__(self):
        return self.size

    @property
    def in_use(self):
        """Returns whether anything refers to the bytes, even indirectly, such as an array made from a memoryview."""
        return self.views > 0

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.memory + IN_PAGE, self.size, 0, flags)
        self.views += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.views -= 1
        if self.lends and not self.views:
            madvise(self.memory, IN_PAGE + self.size, MADV_FREE)
