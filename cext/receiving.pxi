# Receiving: the bytes of a ZMTP connection are turned into frames, and the blocks of GETs are put where they belong.
#
# A ``Receiver`` gets the memory for each frame from its sink (a Python object, see ``kvstore.wire.zmtp.FrameSink``),
# and calls the sink when the frame is complete. The PARTs of a GET with a ``Landing`` never reach the sink. The
# receiver reads their headers itself. It receives their blocks at their destinations and hashes them there, while they
# are in the cache. So the interpreter's lock is taken once, at the end of the GET, and not for every few megabytes.
# Each time, the receiver may wait milliseconds for the lock, because another thread computes in Python.
#
# Over 400 lines because the state of a connection is one idea: the bytes that have arrived, their meaning, and the
# sink's calls.

# The reasons to end a run without the GIL.
cdef enum Stop:
    DRAINED  # nothing more can be read now, or the budget or the time is used up
    CLOSED
    FAILED  # the reason is in `errno_`
    INTERRUPTED
    DESCRIPTORS
    FRAME  # a frame begins, for which the sink must give memory
    MESSAGE  # a small message has arrived as a whole
    ENDED  # the sink's frame is complete
    LANDED  # the last part of a GET is complete
    PAID  # the last frame of a payload is complete, or the payload's message has ended
    PAUSED  # the sink's time slice has ended
    BULKY  # a large frame is arriving
    ARRIVED  # more bytes have arrived, so go on
    MISPLACED  # another frame came instead of the payload of the PART before it


# ---- the connection ----

cdef char _scratch[262144]  # for bytes that are discarded

cdef class Receiver:
    """Reads frames from a non-blocking socket. Large frames are read straight into the memory that the sink gives.

    Only one thread may use it at a time. Other threads may call ``land`` and ``forget`` meanwhile, but ``forget`` only
    while no thread is in ``receive``. A receiver keeps references to the sink's views until their frame is complete.

    If the sink has a method ``message``, it gets each small message of one or two frames that has arrived as a whole.

    ``on_descriptors``: a function that is called with a list of the descriptors that came with bytes, and that owns
    them from then on. It is None if the socket carries no descriptors.
    ``paused``: whether the sink did not want to continue. Received frames then wait in the buffer. Poll does not report
    them, and the next ``receive`` dispatches them.
    ``received``: the number of bytes read since the connection began.
    """

    cdef object sock, sink, on_descriptors
    cdef object on_message  # the sink's `message`; None if the sink takes all frames one by one
    cdef bint takes_messages
    cdef readonly bint paused
    cdef readonly uint64_t received
    cdef char *buffer
    cdef Py_ssize_t start, end
    cdef bint unparsed  # bytes in the buffer have not been parsed yet
    cdef bint told  # the sink was called in this `receive`
    cdef bint short  # the last read did not fill its room, so no more bytes had arrived
    cdef bint has_descriptors
    cdef int fds[253]
    cdef int fd_count
    cdef int errno_
    cdef int low_water
    cdef int looking_pays  # above 0 if bytes recently came soon enough for polling to save time
    cdef Py_ssize_t coming  # the bytes that were certain to come when `arm` was called, less those that have come since
    # The frame that is arriving:
    cdef bint in_frame, more, is_command
    cdef bint begins  # the next frame begins a message
    cdef bint native  # the message belongs to a landing, perhaps to a forgotten one, and its payload must come next
    cdef bint lands  # the frame is that payload; otherwise it belongs to the sink
    cdef bint to_scratch  # the bytes of the sink's frame are discarded
    cdef Py_ssize_t left  # the bytes of the frame that are still to come
    cdef uint64_t size  # the size of the frame
    cdef Py_ssize_t head  # the size of its head
    cdef Py_ssize_t second_head, second_size  # of a whole message's second frame; 0: none
    cdef int flags
    cdef _Buffers views  # the sink's memory for the frame
    cdef Py_buffer *view_table  # of `views`
    cdef Py_ssize_t view_at, view_into  # the first view that is not full, and the number of bytes in it
    cdef object collected  # a bytearray, if the sink wants the bytes themselves
    # GETs whose parts are read here:
    cdef dict landings  # by id
    cdef PyThread_type_lock lock  # guards the table
    cdef Ground **table
    cdef int table_size, table_room
    cdef Ground *ground  # the landing whose part is arriving; NULL if it is no longer wanted
    cdef Py_ssize_t part_bytes  # the bytes of the payload that must come next
    cdef uint64_t following  # the bytes of payload that are certain to come after that part
    cdef bint following_is_known  # the last message belonged to a landing; if not, ask the sink
    # The payload of a SET that is received here:
    cdef Payload payload
    cdef bint pays  # the arriving frame belongs to it
    cdef public double slice_end  # monotonic time; from then on, ask the sink between frames whether to go on; 0: never

    def __cinit__(self, sock, sink, on_descriptors=None):
        self.sock, self.sink, self.on_descriptors = sock, sink, on_descriptors
        self.on_message = getattr(sink, "message", None)
        self.takes_messages = self.on_message is not None
        self.has_descriptors = on_descriptors is not None
        self.landings = {}
        self.buffer = <char *>malloc(BUFFER_BYTES)
        self.lock = PyThread_allocate_lock()
        if self.buffer == NULL or self.lock == NULL:
            raise MemoryError()
        self.low_water, self.begins = 1, True

    def __dealloc__(self):
        cdef int i
        for i in range(self.fd_count):
            kv_close(self.fds[i])
        free(self.table)
        free(self.buffer)
        if self.lock != NULL:
            PyThread_free_lock(self.lock)

    # ---- landings ----

    def land(self, Landing landing not None):
        """From now on, receive the parts of the landing's GET there. Call this before the request is sent."""
        cdef Ground **table
        self.landings[landing.ground.id] = landing
        PyThread_acquire_lock(self.lock, WAIT_LOCK)
        try:
            if self.table_size == self.table_room:
                table = <Ground **>realloc(self.table, (self.table_room + 16) * sizeof(Ground *))
                if table == NULL:
                    raise MemoryError()
                self.table = table
                self.table_room += 16
            self.table[self.table_size] = &landing.ground
            self.table_size += 1
        finally:
            PyThread_release_lock(self.lock)

    @property
    def landing(self):
        """Returns whether there is a landing of an incomplete GET."""
        return self.table_size > 0

    def forget(self, uint64_t id):
        """Write nothing more for this GET. Blocks that still arrive are discarded."""
        if self.ground != NULL and self.ground.id == id:
            self.ground = NULL  # a payload of the GET that is arriving, or comes next, is discarded
        self.following = 0
        self._drop(id)

    cdef object _drop(self, uint64_t id):
        """Removes the landing from the table and returns it, or None if it was not there."""
        cdef int i
        PyThread_acquire_lock(self.lock, WAIT_LOCK)
        for i in range(self.table_size):
            if self.table[i].id == id:
                self.table_size -= 1
                self.table[i] = self.table[self.table_size]
                break
        PyThread_release_lock(self.lock)
        return self.landings.pop(id, None)

    cdef Ground *_find(self, uint64_t id) noexcept nogil:
        cdef int i
        cdef Ground *found = NULL
        PyThread_acquire_lock(self.lock, WAIT_LOCK)
        for i in range(self.table_size):
            if self.table[i].id == id:
                found = self.table[i]
                break
        PyThread_release_lock(self.lock)
        return found

    # ---- receiving ----

    def receive(self, Py_ssize_t budget, int wake_fd=-1, double wait_s=0.0):
        """Read and dispatch the bytes that have arrived, about ``budget`` at most. Returns False if the peer has
        closed.

        With ``wait_s``, it also waits for more bytes, for at most this time in all. The wait ends early when the sink
        has been called, or when ``wake_fd`` can be read. Only bytes after the wait count against ``budget``. Raises
        ``ZMTPError``, the ``OSError`` of the socket, and the exceptions of the sink.
        """
        cdef Stop stop
        cdef int fd
        cdef double until = kv_now() + wait_s if wait_s > 0 else 0.0
        self.told = self.short = False
        if self.paused:
            self.paused = False
            self.unparsed = True
        while True:
            fd = self.sock.fileno()
            if fd < 0:
                raise OSError(EBADF, os.strerror(EBADF))
            if until or (self.in_frame and self.left > BRIEF_BYTES):
                with nogil:
                    stop = self._run(fd, &budget, wake_fd, until, False)
            else:  # small messages: releasing the interpreter's lock may take longer than reading them
                stop = self._run(fd, &budget, wake_fd, until, True)
            if stop == BULKY:
                pass
            elif stop == MESSAGE:
                self._take_message()
            elif stop == FRAME:
                self._begin_frame()
            elif stop == ENDED:
                self._end_frame()
            elif stop == LANDED:
                self.told = True
                self._landed()
            elif stop == PAID:
                self.payload = None
                if not self.more:
                    self._deliver(None)
            elif stop == PAUSED:
                self.paused = True
            elif stop == DESCRIPTORS:
                self._hand_over_descriptors()
            elif stop == DRAINED:
                break
            elif stop == CLOSED:
                return False
            elif stop == INTERRUPTED:
                PyErr_CheckSignals()
            elif stop == MISPLACED:
                self.sink.misplaced(self.size, self.part_bytes)
            else:
                raise OSError(self.errno_, os.strerror(self.errno_))
            if self.paused:
                break
            if self.told and until:
                until = 0.0  # the caller checks whether that was everything
        self.arm()
        return True

    def discard_rest(self):
        """Discard the rest of the sink's frame that is arriving."""
        if self.in_frame and not self.lands and self.collected is None:
            self.views, self.to_scratch = None, True

    def arm(self):
        """Set the socket's low-water mark, so that poll wakes the reader for large pieces and not for every TCP
        segment.

        Waking up for a small piece costs more than reading it.
        """
        cdef int fd = self.sock.fileno()
        self.coming = self.left if self.in_frame else 0
        if self.payload is not None:
            self.coming += self._left_of_payload()
        elif self.following_is_known:
            self.coming += self.following
        else:
            self.coming += self.sink.bytes_after_frame()
        if fd >= 0:
            self._set_low_water(fd, self.coming)

    cdef Py_ssize_t _left_of_payload(self) noexcept nogil:
        """Returns the number of payload bytes in the frames after the one that is arriving."""
        cdef Py_ssize_t begun = self.payload.ground.part_count if self.pays else 0
        return (self.payload.ground.count - self.payload.arrived - begun) * self.payload.ground.block_bytes

    cdef void _set_low_water(self, int fd, Py_ssize_t coming) noexcept nogil:
        cdef int low_water = 1
        if coming > DIRECT_BYTES:
            low_water = min(coming, LOW_WATER_BYTES)
        if low_water != self.low_water:
            setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &low_water, sizeof(low_water))
            self.low_water = low_water

    cdef Stop _run(self, int fd, Py_ssize_t *budget, int wake_fd, double until, bint brief) noexcept nogil:
        """Reads and dispatches bytes. ``brief``: return BULKY rather than receive a large frame."""
        cdef Stop stop
        cdef Py_ssize_t got, placed, wanted
        cdef bint direct
        cdef int i, n
        cdef iovec[513] pieces
        while True:
            if self.unparsed or self.fd_count:
                if self.fd_count:
                    return DESCRIPTORS
                stop = self._parse()
                if stop != DRAINED:
                    return stop
                self.unparsed = False
            if budget[0] <= 0:
                return DRAINED
            if self.short:  # because waking up for one large piece is cheaper than reading many small ones
                self.short = False
                stop = self._await(fd, wake_fd, until)
                if stop != ARRIVED:
                    return stop
            direct = self.in_frame and self.left > DIRECT_BYTES
            if brief and direct and self.left > BRIEF_BYTES:
                return BULKY
            wanted = 0
            if direct:
                n = self._pieces(pieces)
                for i in range(n):
                    wanted += pieces[i].iov_len
                if wanted == self.left:
                    pieces[n].iov_base, pieces[n].iov_len = self.buffer, READ_AHEAD_BYTES
                    n += 1
            else:
                if self.start == self.end:
                    self.start = self.end = 0
                elif self.end > BUFFER_BYTES // 2:
                    memmove(self.buffer, self.buffer + self.start, self.end - self.start)
                    self.start, self.end = 0, self.end - self.start
                wanted = BUFFER_BYTES - self.end
                pieces[0].iov_base, pieces[0].iov_len = self.buffer + self.end, wanted
                n = 1
            got = kv_receive(fd, pieces, n, self.fds if self.has_descriptors else NULL, &self.fd_count)
            if got == 0:
                return CLOSED
            if got < 0:
                if got == -EINTR:
                    return INTERRUPTED
                if got != -EAGAIN:
                    self.errno_ = <int>-got
                    return FAILED
                self.short = True
                continue
            self.received += got
            self.coming -= got
            self.short = got < wanted
            if direct:
                if not until:  # with `until`, the time is limited
                    budget[0] -= got
                placed = min(got, self.left)
                self._advance(placed)
                self.start, self.end = 0, got - placed
            else:
                if not until:
                    budget[0] -= got * BUFFERED_COST
                self.end += got
            self.unparsed = True
            if until and kv_now() >= until:
                budget[0] = 0

    cdef Stop _await(self, int fd, int wake_fd, double until) noexcept nogil:
        """Wait for more bytes. Returns ARRIVED if some have come, or DRAINED if the time is over."""
        cdef double left_s = until - kv_now() if until else 0.0
        cdef Py_ssize_t coming = self.left if self.in_frame else 0
        cdef int ready
        cdef bint looks
        cdef double began
        if left_s <= 0:
            return DRAINED
        if self.following_is_known:
            coming += self.following
        self._set_low_water(fd, max(coming, self.coming))
        if coming or self.coming:  # the thread is woken when many bytes have come
            ready = kv_await(fd, wake_fd, <int>(left_s * 1000) + 1, 0)
        else:
            looks = self.looking_pays > 0
            began = kv_now()
            ready = kv_await(fd, wake_fd, <int>(left_s * 1000) + 1, KV_LOOKING_S if looks else 0)
            # If the thread slept, polling would have seen the bytes earlier than the thread was woken.
            if kv_now() - began < (KV_LOOKING_S if looks else 2 * KV_LOOKING_S):
                self.looking_pays = min(8, self.looking_pays + 1)
            else:
                self.looking_pays = max(-8, self.looking_pays - 1)
        if ready < 0:
            return INTERRUPTED
        return ARRIVED if ready else DRAINED

    cdef int _pieces(self, iovec *pieces) noexcept nogil:
        """Set ``pieces`` to the memory for the next bytes of the frame, at most `left` bytes. Returns the number of
        pieces."""
        cdef Py_ssize_t left = self.left, at, into, size
        cdef Py_buffer *view
        cdef int n = 0
        if self.lands and self.ground != NULL:
            return _ground_pieces(self.ground, pieces)
        if self.lands or self.to_scratch:
            while left > 0 and n < KV_IOV:
                size = min(left, <Py_ssize_t>sizeof(_scratch))
                pieces[n].iov_base, pieces[n].iov_len = _scratch, size
                left -= size
                n += 1
            return n
        at, into = self.view_at, self.view_into
        while left > 0 and n < KV_IOV:
            view = &self.view_table[at]
            size = min(left, view.len - into)
            if size:
                pieces[n].iov_base, pieces[n].iov_len = <char *>view.buf + into, size
                n += 1
            left -= size
            into = 0
            at += 1
        return n

    cdef void _advance(self, Py_ssize_t count) noexcept nogil:
        """Count the next ``count`` bytes of the frame, which are in their place already."""
        cdef Py_ssize_t size
        self.left -= count
        if self.lands:
            if self.ground != NULL:
                _ground_advance(self.ground, count)
            return
        if self.to_scratch:
            return
        while count > 0:
            size = min(count, self.view_table[self.view_at].len - self.view_into)
            self.view_into += size
            count -= size
            if self.view_into == self.view_table[self.view_at].len:
                self.view_at += 1
                self.view_into = 0

    cdef void _store(self, Py_ssize_t count) noexcept nogil:
        """Take the next ``count`` bytes of the frame from the buffer."""
        cdef const char *data = self.buffer + self.start
        cdef Py_ssize_t size
        self.start += count
        if self.lands:
            self.left -= count
            if self.ground != NULL:
                _ground_store(self.ground, data, count)
        elif self.to_scratch:
            self.left -= count
        else:
            while count > 0:
                size = min(count, self.view_table[self.view_at].len - self.view_into)
                memcpy(<char *>self.view_table[self.view_at].buf + self.view_into, data, size)
                self._advance(size)
                data += size
                count -= size

    cdef Stop _parse(self) noexcept nogil:
        """Dispatch the bytes in the buffer as far as possible without the sink. Returns DRAINED when none are left."""
        cdef Stop stop
        while True:
            if self.in_frame:
                if self.left and self.start < self.end:
                    self._store(min(self.left, self.end - self.start))
                if self.left:
                    return DRAINED
                if not self.lands:
                    return ENDED
                self.in_frame = self.lands = self.native = False
                if self.pays:
                    self.pays, self.ground = False, NULL
                    if self.payload.end_frame() or not self.more:
                        return PAID
                    if self.slice_end and kv_now() >= self.slice_end:
                        return PAUSED
                    continue
                self.begins = True
                if self.ground != NULL and self.ground.last:
                    return LANDED
                self.ground = NULL
            stop = self._take_head()
            if stop != ENDED:
                return stop

    cdef Stop _take_head(self) noexcept nogil:
        """Begin the next frame. Returns ENDED if it has begun, or DRAINED if its head has not arrived yet."""
        cdef Py_ssize_t available = self.end - self.start
        cdef const uint8_t *data = <const uint8_t *>self.buffer + self.start
        cdef uint64_t size
        cdef int i
        if available < 2:
            return DRAINED
        self.flags = data[0]
        if self.flags & ~(MORE | LONG | COMMAND):
            return FRAME
        if data[0] & LONG:
            if available < 9:
                return DRAINED
            size = 0
            for i in range(8):
                size = (size << 8) | data[1 + i]
            self.head = 9
        else:
            size = data[1]
            self.head = 2
        self.more = data[0] & MORE
        self.is_command = (data[0] & COMMAND) != 0
        self.size = size
        if self.is_command:
            return FRAME
        if self.native:  # the header of the payload has arrived before
            if self.more or size != <uint64_t>self.part_bytes:
                return MISPLACED
            self.start += self.head
            self.left, self.in_frame, self.lands = self.part_bytes, True, True
            return ENDED
        if self.payload is not None:
            if not self.payload.begin_frame(size):
                return FRAME  # the sink reports what is wrong with the frame
            self._begin_payload_frame()
            return ENDED
        if self.begins and self.takes_messages and size <= <uint64_t>(available - self.head):
            if self._is_whole(data + self.head + size, available - self.head - <Py_ssize_t>size):
                return MESSAGE
        if self.begins and self.table_size:
            if size <= <uint64_t>(available - self.head):
                return self._take_part(data + self.head)
            if size <= <uint64_t>(BUFFER_BYTES // 2 - self.head):
                return DRAINED  # it may be the header of a PART, so the rest goes into the buffer, too
        return FRAME

    cdef bint _is_whole(self, const uint8_t *rest, Py_ssize_t available) noexcept nogil:
        """Returns whether all of a message is in the buffer. The message's first frame is complete, and ``rest`` has
        the ``available`` bytes after that frame."""
        cdef uint64_t size = 0
        cdef int i
        self.second_head = self.second_size = 0
        if not self.more:
            return True
        if available < 2 or rest[0] & ~LONG or (rest[0] and available < 9):
            return False
        if rest[0]:
            for i in range(8):
                size = (size << 8) | rest[1 + i]
        else:
            size = rest[1]
        self.second_head = 9 if rest[0] else 2
        if size > <uint64_t>(available - self.second_head):
            return False
        self.second_size = <Py_ssize_t>size
        return True

    cdef void _begin_payload_frame(self) noexcept nogil:
        self.start += self.head
        self.left, self.in_frame, self.lands, self.pays = <Py_ssize_t>self.size, True, True, True
        self.ground = &self.payload.ground

    cdef Stop _take_part(self, const uint8_t *data) noexcept nogil:
        """Read the header of a PART of a GET with a landing. Returns FRAME if it is another message or not valid."""
        cdef PartHeader part
        cdef Ground *found
        if not _read_part(data, <Py_ssize_t>self.size, &part):
            return FRAME
        found = self._find(part.id)
        if found == NULL or self.more != (part.count > 0) or not _begin_part(found, &part):
            return FRAME
        self.start += self.head + <Py_ssize_t>self.size
        self.ground = found
        self.following, self.following_is_known = part.following, True
        if part.count:
            self.native = True
            self.part_bytes = part.count * found.block_bytes
            return ENDED
        return LANDED

    # ---- calls of the sink ----

    cdef _take_message(self):
        cdef const char *data = self.buffer + self.start + self.head
        header, second = PyBytes_FromStringAndSize(data, self.size), None
        self.start += self.head + <Py_ssize_t>self.size
        if self.second_head:
            data = self.buffer + self.start + self.second_head
            second = PyBytes_FromStringAndSize(data, self.second_size)
            self.start += self.second_head + self.second_size
        self.following_is_known = False
        self.on_message(header, second)
        self._ask()

    cdef _ask(self):
        """After each call of the sink, ask the sink whether to go on, if anything is left to do."""
        self.told = True
        if self.start < self.end or not self.short:
            self.paused = not self.sink.go_on()

    cdef _begin_frame(self):
        """Begin a frame whose head is in the buffer and whose memory the sink must give."""
        cdef uint64_t total = 0
        if self.flags & ~(MORE | LONG | COMMAND):
            from kvstore.wire.zmtp import ZMTPError

            raise ZMTPError(f"frame flags {self.flags:#04x}: reserved bits are set")
        views = None
        if self.is_command:
            from kvstore.wire.zmtp import MAX_COMMAND_BYTES, ZMTPError

            if self.size > MAX_COMMAND_BYTES:
                raise ZMTPError(f"a command of {self.size} bytes: expected at most {MAX_COMMAND_BYTES}")
        else:
            self.following_is_known = False
            self.payload = None  # the payload that the sink has given does not fit this frame
            views = self.sink.begin_frame(self.size, self.more)
            if isinstance(views, Payload):
                self.payload = views
                if not self.payload.begin_frame(self.size):
                    raise ValueError(f"begin_frame gave a payload whose next frame does not have {self.size} bytes")
                self._begin_payload_frame()
                return
        self.start += self.head
        self.to_scratch = False
        if views is None:
            if self.size <= <uint64_t>(self.end - self.start):  # the usual case: all of a small frame is in the buffer
                data = PyBytes_FromStringAndSize(self.buffer + self.start, self.size)
                self.start += self.size
                self._deliver(data)
                return
            self.collected = bytearray(self.size)
            views = [self.collected]
        self.views = _Buffers(len(views))
        for view in views:
            total += <uint64_t>self.views.take(view, PyBUF_SIMPLE | PyBUF_WRITABLE, "a view of begin_frame").len
        if total != self.size:
            raise ValueError(f"begin_frame gave {total} bytes of memory for a frame of {self.size}")
        self.view_table, self.view_at, self.view_into = self.views.views, 0, 0
        self.left, self.in_frame = self.size, True

    cdef _end_frame(self):
        data, self.collected, self.views = self.collected, None, None
        self.in_frame = self.to_scratch = False
        self._deliver(data)

    cdef _deliver(self, data):
        if self.is_command:
            data = bytes(data or b"")
            from kvstore.wire.zmtp import split_command

            self.sink.command(*split_command(data))
        else:
            self.begins = not self.more
            self.sink.end_frame(data, self.more)
        self._ask()

    cdef _landed(self):
        cdef uint64_t id = self.ground.id
        self.ground = NULL
        self.sink.landed(self._drop(id))

    cdef _hand_over_descriptors(self):
        cdef int i, count = self.fd_count
        self.fd_count = 0
        self.on_descriptors([self.fds[i] for i in range(count)])
