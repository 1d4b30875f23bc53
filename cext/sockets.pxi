# Sockets: system calls for code that runs without the interpreter's lock, and the constants of ZMTP.

from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport (
    PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock, PyThread_release_lock, PyThread_type_lock,
    WAIT_LOCK,
)
from libc.string cimport memmove

cdef extern from *:
    """
    #include <errno.h>
    #include <poll.h>
    #include <sched.h>
    #include <sys/socket.h>
    #include <sys/uio.h>
    #include <time.h>
    #include <unistd.h>

    #define KV_IOV 512
    #define KV_MOST_DESCRIPTORS 253
    #define KV_LOOKING_S 100e-6

    static double kv_now(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
    }

    /* Receives into count pieces. Returns the number of bytes, 0 at the end of the stream, or -errno. fds: room for the
     * descriptors that come with the bytes, or NULL if the socket carries none. Their number is added to *fd_count. */
    static ssize_t kv_receive(int fd, struct iovec *pieces, int count, int *fds, int *fd_count) {
        ssize_t got;
        if (fds == NULL) {
            if (count == 1) got = recv(fd, pieces[0].iov_base, pieces[0].iov_len, 0);
            else got = readv(fd, pieces, count);
            return got < 0 ? -(ssize_t)errno : got;
        }
        union {
            char bytes[CMSG_SPACE(KV_MOST_DESCRIPTORS * sizeof(int))];
            struct cmsghdr align;
        } control;
        struct msghdr message;
        memset(&message, 0, sizeof message);
        message.msg_iov = pieces;
        message.msg_iovlen = count;
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        if (got < 0) return -(ssize_t)errno;
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c != NULL; c = CMSG_NXTHDR(&message, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
            size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < n; i++) {
                int one;
                memcpy(&one, CMSG_DATA(c) + i * sizeof(int), sizeof one);
                if (*fd_count < KV_MOST_DESCRIPTORS) fds[(*fd_count)++] = one;
                else close(one);
            }
        }
        return got;
    }

    /* Waits until fd can be read, until wake_fd can be read (an eventfd, which is then reset), or for ms milliseconds.
     * Polls for `looking_s` seconds before it sleeps, because waking up takes longer. Returns whether fd can be read,
     * or -1 if a signal came. */
    static int kv_await(int fd, int wake_fd, int ms, double looking_s) {
        struct pollfd polled[2] = {{fd, POLLIN, 0}, {wake_fd, POLLIN, 0}};
        int n = 0, count = wake_fd < 0 ? 1 : 2;
        for (double until = looking_s > 0 ? kv_now() + looking_s : 0; n == 0 && kv_now() < until; sched_yield())
            n = poll(polled, count, 0);
        if (n == 0) n = poll(polled, count, ms);
        if (n < 0) return -1;
        if (wake_fd >= 0 && polled[1].revents != 0) {
            uint64_t count;
            ssize_t got = read(wake_fd, &count, sizeof count);
            (void)got;
        }
        return n > 0 && polled[0].revents != 0;
    }
    """
    struct iovec:
        void *iov_base
        size_t iov_len
    double KV_LOOKING_S
    int KV_IOV, EAGAIN, EBADF, EINTR, SOL_SOCKET, SO_RCVLOWAT
    double kv_now() nogil
    Py_ssize_t kv_receive(int fd, iovec *pieces, int count, int *fds, int *fd_count) nogil
    int kv_await(int fd, int wake_fd, int ms, double looking_s) nogil
    int kv_close "close"(int fd) nogil
    int setsockopt(int fd, int level, int name, const void *value, unsigned int size) nogil

cdef extern from *:
    """
    /* Returns the number of bytes sent, or -errno. */
    static ssize_t kv_send(int fd, struct iovec *pieces, int count) {
        struct msghdr message;
        memset(&message, 0, sizeof message);
        message.msg_iov = pieces;
        message.msg_iovlen = count;
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        return sent < 0 ? -(ssize_t)errno : sent;
    }

    /* Waits until fd takes bytes, or for ms milliseconds. Returns whether it takes bytes, or -1 if a signal came. */
    static int kv_await_room(int fd, int ms) {
        struct pollfd polled = {fd, POLLOUT, 0};
        int n = poll(&polled, 1, ms);
        return n < 0 ? -1 : n;
    }
    """
    Py_ssize_t kv_send(int fd, iovec *pieces, int count) nogil
    int kv_await_room(int fd, int ms) nogil

cdef enum:
    MORE = 1
    LONG = 2
    COMMAND = 4
    BUFFER_BYTES = 16384
    READ_AHEAD_BYTES = 512  # read after a large frame: enough for the next header, and cheap to copy
    DIRECT_BYTES = 8192  # if more than this of a frame is missing, the rest is read straight into the frame's memory
    # The cost of a buffered byte in the budget of `receive`. A buffer full of the smallest messages is as much work as
    # a large frame.
    BUFFERED_COST = 256
    LOW_WATER_BYTES = 2097152  # the reader of large frames is woken when this much has arrived
    PIECE_BYTES = 1048576  # the part of a GET's blocks that is received at a time, and hashed while it is in the cache
    PART_TAG = 67
    PART_FIELDS = 10  # the fields that this release writes, and the tag; the reader accepts fewer, and skips more
    BRIEF_BYTES = 65536  # up to this is moved with the interpreter's lock held, because getting it back may take long
