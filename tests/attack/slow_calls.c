/* Delays calls on files below a folder, once a trigger file exists.

   Preloaded into a server: SLOW_CALLS_FOLDER is the folder, SLOW_CALLS_TRIGGER the file, whose content says which calls
   are delayed ("fallocate", "open", "pread" or "unlink"), SLOW_CALLS_MS for how long. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static void delay(const char *call, const char *path)
{
    const char *trigger = getenv("SLOW_CALLS_TRIGGER"), *folder = getenv("SLOW_CALLS_FOLDER");
    const char *milliseconds = getenv("SLOW_CALLS_MS");
    char what[32] = "";
    int fd, saved = errno;
    if (trigger == NULL || folder == NULL || milliseconds == NULL || strncmp(path, folder, strlen(folder)) != 0)
        return;
    fd = (int)syscall(SYS_openat, AT_FDCWD, trigger, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (syscall(SYS_read, fd, what, sizeof what - 1) > 0 && strcmp(what, call) == 0) {
            struct timespec pause = {atol(milliseconds) / 1000, atol(milliseconds) % 1000 * 1000000};
            nanosleep(&pause, NULL);
        }
        syscall(SYS_close, fd);
    }
    errno = saved;
}

static void delay_fd(const char *call, int fd)
{
    char link[64], path[PATH_MAX] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) > 0)
        delay(call, path);
}

int fallocate(int fd, int mode, off_t offset, off_t size)
{
    static int (*next)(int, int, off_t, off_t);
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "fallocate");
    delay_fd("fallocate", fd);
    return next(fd, mode, offset, size);
}

ssize_t pread(int fd, void *to, size_t size, off_t at)
{
    static ssize_t (*next)(int, void *, size_t, off_t);
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "pread");
    delay_fd("pread", fd);
    return next(fd, to, size, at);
}

ssize_t pread64(int fd, void *to, size_t size, off64_t at) { return pread(fd, to, size, at); }

int fallocate64(int fd, int mode, off64_t offset, off64_t size) { return fallocate(fd, mode, offset, size); }

int unlink(const char *path)
{
    static int (*next)(const char *);
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "unlink");
    delay("unlink", path);
    return next(path);
}

#define OPEN(name)                                                   \
    int name(const char *path, int flags, ...)                       \
    {                                                                \
        static int (*next)(const char *, int, mode_t);               \
        mode_t mode = 0;                                             \
        va_list arguments;                                           \
        if (next == NULL)                                            \
            *(void **)&next = dlsym(RTLD_NEXT, #name);               \
        if (flags & O_CREAT) {                                       \
            va_start(arguments, flags);                              \
            mode = va_arg(arguments, mode_t);                        \
            va_end(arguments);                                       \
        }                                                            \
        delay("open", path);                                         \
        return next(path, flags, mode);                              \
    }

OPEN(open)
OPEN(open64)
