/* Makes the calls that read or write files below a folder fail or take long, as soon as a trigger file exists.

   Preloaded into a server: IO_ERRORS_FOLDER is the folder, IO_ERRORS_TRIGGER the file. The trigger's first bytes say
   which calls fail with EIO: "read", "write", "sync" or "all". Or "full": what writes fails with ENOSPC. Or "slow":
   every call takes 50 ms longer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SLOW = -1 };

/* The error that calls of this kind fail with, SLOW, or 0. */
static int triggered(const char *kind)
{
    const char *trigger = getenv("IO_ERRORS_TRIGGER");
    char what[16] = "";
    int fd, saved = errno, error = 0;
    if (trigger == NULL)
        return 0;
    fd = (int)syscall(SYS_openat, AT_FDCWD, trigger, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (syscall(SYS_read, fd, what, sizeof what - 1) > 0) {
            if (strncmp(what, "all", 3) == 0 || strncmp(what, kind, strlen(kind)) == 0)
                error = EIO;
            else if (strncmp(what, "full", 4) == 0 && strcmp(kind, "write") == 0)
                error = ENOSPC;
            else if (strncmp(what, "slow", 4) == 0)
                error = SLOW;
        }
        syscall(SYS_close, fd);
    }
    errno = saved;
    return error;
}

static int fails(int fd, const char *kind)
{
    const char *folder = getenv("IO_ERRORS_FOLDER");
    char link[64], path[PATH_MAX];
    int saved = errno, error;
    ssize_t size;
    if (folder == NULL || (error = triggered(kind)) == 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    size = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (size <= 0)
        return 0;
    path[size] = 0;
    if (strncmp(path, folder, strlen(folder)) != 0)
        return 0;
    if (error == SLOW) {
        usleep(50000);
        errno = saved;
        return 0;
    }
    errno = error;
    return 1;
}

#define WRAP(result, name, kind, parameters, arguments)             \
    result name parameters                                         \
    {                                                               \
        static result(*next) parameters;                            \
        if (next == NULL)                                           \
            next = (result(*) parameters)dlsym(RTLD_NEXT, #name);   \
        return fails(fd, kind) ? (result)-1 : next arguments;       \
    }

WRAP(ssize_t, pread, "read", (int fd, void *to, size_t size, off_t at), (fd, to, size, at))
WRAP(ssize_t, pread64, "read", (int fd, void *to, size_t size, off64_t at), (fd, to, size, at))
WRAP(ssize_t, preadv, "read", (int fd, const struct iovec *to, int count, off_t at), (fd, to, count, at))
WRAP(ssize_t, preadv64, "read", (int fd, const struct iovec *to, int count, off64_t at), (fd, to, count, at))
WRAP(ssize_t, pwrite, "write", (int fd, const void *from, size_t size, off_t at), (fd, from, size, at))
WRAP(ssize_t, pwrite64, "write", (int fd, const void *from, size_t size, off64_t at), (fd, from, size, at))
WRAP(ssize_t, pwritev, "write", (int fd, const struct iovec *from, int count, off_t at), (fd, from, count, at))
WRAP(ssize_t, pwritev64, "write", (int fd, const struct iovec *from, int count, off64_t at), (fd, from, count, at))
WRAP(ssize_t, write, "write", (int fd, const void *from, size_t size), (fd, from, size))
WRAP(ssize_t, writev, "write", (int fd, const struct iovec *from, int count), (fd, from, count))
WRAP(int, fdatasync, "sync", (int fd), (fd))
WRAP(int, fsync, "sync", (int fd), (fd))
WRAP(int, fallocate, "write", (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
WRAP(int, fallocate64, "write", (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size))
