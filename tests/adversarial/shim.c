/* LD_PRELOAD shim of the campaign: counts libc calls on files below one folder, and lets one of them go wrong.
 *
 * A shared file, mapped by every process of a case, holds the orders (struct orders) and the counter. So one count runs through the
 * ranks and through what they start. tests/adversarial/shim.py compiles this, maps the file and knows the same struct.
 *
 * MUTATES are calls that change a file, a name or what is durable; READS are calls that read bytes. Calls inside of libc (opendir's
 * own open) and stores to mapped memory cannot be seen.
 *
 * With a trace, every file that was opened is written down by the path the kernel has for it, so links are resolved; and every program
 * that was started, and every address that was connected to. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum kind { MUTATES = 1, READS = 2 };
enum action { COUNT = 0, KILL = 1, KILL_ALL = 2, TORN = 3, FAIL = 4, SHORT = 5 };
enum verdict { GO_ON, FAILED, HALF, HALF_AND_DIE };

struct orders {
    _Atomic long count;   /* calls met so far */
    _Atomic long fired;   /* how often a call went wrong */
    long target;          /* number of the call that goes wrong, from 1; 0: none */
    int kinds, action, error;
    int lasts;            /* later calls fail, too, as on a full disk; those that take this much room: 2 data and new names, 1 renames, too */
    int group;            /* process group that KILL_ALL kills */
    long clock_offset_s;  /* added to the clock of day */
    char root[512], trace[512], fired_at[256];
};

static struct orders *orders;
static char watched[512]; /* this process's own: set by shim_use */

/* Use the orders in a file, or none: called after a fork, and by the constructor in a program that was started. */
void shim_use(const char *path) {
    orders = NULL;
    if (path == NULL || *path == 0) return;
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof(struct orders), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) return;
    memcpy(watched, ((struct orders *)mapped)->root, sizeof watched);
    orders = mapped;
}

__attribute__((constructor)) static void started(void) { shim_use(getenv("CKPT_SHIM")); }

#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static ssize_t path_of_fd(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, out, PATH_MAX - 1);
    out[size < 0 ? 0 : size] = 0;
    return size;
}

/* The path a call names; of a descriptor alone if path is NULL. */
static void full_path(int dirfd, const char *path, char *out) {
    if (path != NULL && *path == '/') { snprintf(out, PATH_MAX, "%s", path); return; }
    char base[PATH_MAX] = "";
    if (dirfd != AT_FDCWD) path_of_fd(dirfd, base);
    else if (getcwd(base, sizeof base) == NULL) base[0] = 0;
    if (path == NULL || *path == 0) snprintf(out, PATH_MAX, "%s", base);
    else if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) out[0] = 0;
}

static int is_below(const char *path) {
    size_t size = strlen(watched);
    return size != 0 && strncmp(path, watched, size) == 0 && (path[size] == '/' || path[size] == 0);
}

static void note(const char *what, const char *path) {
    char line[PATH_MAX + 64];
    int size = snprintf(line, sizeof line, "%s %s\n", what, path);
    int fd = syscall(SYS_openat, AT_FDCWD, orders->trace, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    syscall(SYS_write, fd, line, size < (int)sizeof line ? size : (int)sizeof line - 1);
    syscall(SYS_close, fd);
}

_Noreturn static void die(void) {
    if (orders->action == KILL_ALL && orders->group > 0) kill(-orders->group, SIGKILL);
    for (;;) kill(getpid(), SIGKILL);
}

/* Count a call on a file below the root, and say what becomes of it. errno is set if it fails. */
static enum verdict meets(int kind, const char *call, int room, int dirfd, const char *path) {
    if (orders == NULL || !(orders->kinds & kind)) return GO_ON;
    char full[PATH_MAX];
    int before = errno;
    full_path(dirfd, path, full);
    errno = before;
    if (!is_below(full)) return GO_ON;
    long number = atomic_fetch_add(&orders->count, 1) + 1;
    int is_later = orders->lasts && orders->target && number > orders->target && room >= orders->lasts;
    if (number != orders->target && !is_later) return GO_ON;
    atomic_fetch_add(&orders->fired, 1);
    if (!is_later) snprintf(orders->fired_at, sizeof orders->fired_at, "%s %s", call, full + strlen(watched));
    switch (orders->action) {
    case KILL: case KILL_ALL: die();
    case TORN: return HALF_AND_DIE;
    case SHORT: return HALF;
    case FAIL: errno = orders->error; return FAILED;
    default: return GO_ON;
    }
}

#define MEET(kind, room, dirfd, path, failure, half)                                                                      \
    switch (meets(kind, __func__, room, dirfd, path)) {                                                                   \
    case FAILED: return failure;                                                                                         \
    case HALF: return half;                                                                                              \
    case HALF_AND_DIE: { __typeof__(half) done = half; (void)done; die(); }                                              \
    default: break;                                                                                                      \
    }

/* Names */

#define TWO_NAMES(name, params, args, from_fd, from, to_fd, to)                                                           \
    int name params {                                                                                                     \
        NEXT(name);                                                                                                       \
        MEET(MUTATES, 1, to_fd, to, -1, next args);                                                                       \
        trace_change(#name, from_fd, from);                                                                               \
        trace_change(#name, to_fd, to);                                                                                   \
        return next args;                                                                                                 \
    }
#define ONE_NAME(name, room, params, args, dirfd, path)                                                                   \
    int name params {                                                                                                     \
        NEXT(name);                                                                                                       \
        MEET(MUTATES, room, dirfd, path, -1, next args);                                                                  \
        trace_change(#name, dirfd, path);                                                                                 \
        return next args;                                                                                                 \
    }

static void trace_change(const char *call, int dirfd, const char *path) {
    if (orders == NULL || orders->trace[0] == 0) return;
    char full[PATH_MAX];
    full_path(dirfd, path, full);
    char what[32];
    snprintf(what, sizeof what, "write:%s", call);
    note(what, full);
}

TWO_NAMES(rename, (const char *a, const char *b), (a, b), AT_FDCWD, a, AT_FDCWD, b)
TWO_NAMES(renameat, (int d, const char *a, int e, const char *b), (d, a, e, b), d, a, e, b)
TWO_NAMES(renameat2, (int d, const char *a, int e, const char *b, unsigned int f), (d, a, e, b, f), d, a, e, b)
TWO_NAMES(link, (const char *a, const char *b), (a, b), AT_FDCWD, a, AT_FDCWD, b)
TWO_NAMES(linkat, (int d, const char *a, int e, const char *b, int f), (d, a, e, b, f), d, a, e, b)
ONE_NAME(symlink, 2, (const char *a, const char *b), (a, b), AT_FDCWD, b)
ONE_NAME(symlinkat, 2, (const char *a, int d, const char *b), (a, d, b), d, b)
ONE_NAME(unlink, 0, (const char *a), (a), AT_FDCWD, a)
ONE_NAME(unlinkat, 0, (int d, const char *a, int f), (d, a, f), d, a)
ONE_NAME(rmdir, 0, (const char *a), (a), AT_FDCWD, a)
ONE_NAME(mkdir, 2, (const char *a, mode_t m), (a, m), AT_FDCWD, a)
ONE_NAME(mkdirat, 2, (int d, const char *a, mode_t m), (d, a, m), d, a)
ONE_NAME(truncate, 2, (const char *a, off_t n), (a, n), AT_FDCWD, a)
ONE_NAME(truncate64, 2, (const char *a, off_t n), (a, n), AT_FDCWD, a)
ONE_NAME(chmod, 0, (const char *a, mode_t m), (a, m), AT_FDCWD, a)
ONE_NAME(utimensat, 0, (int d, const char *a, const struct timespec t[2], int f), (d, a, t, f), d, a)

/* Descriptors */

#define OF_FD(type, name, kind, room, params, args, half)                                                                 \
    type name params {                                                                                                    \
        NEXT(name);                                                                                                       \
        MEET(kind, room, fd, NULL, -1, half);                                                                             \
        return next args;                                                                                                 \
    }

/* The first half of a vector of buffers: whole buffers, or half of the only one. */
static struct iovec *half_of(const struct iovec *v, int *count, struct iovec *one) {
    if (*count > 1) { *count /= 2; return (struct iovec *)v; }
    *one = v[0];
    one->iov_len = one->iov_len > 1 ? one->iov_len / 2 : one->iov_len;
    return one;
}
static size_t half(size_t size) { return size > 1 ? size / 2 : size; }

OF_FD(ssize_t, write, MUTATES, 2, (int fd, const void *b, size_t n), (fd, b, n), next(fd, b, half(n)))
OF_FD(ssize_t, pwrite, MUTATES, 2, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), next(fd, b, half(n), o))
OF_FD(ssize_t, pwrite64, MUTATES, 2, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), next(fd, b, half(n), o))
OF_FD(ssize_t, read, READS, 0, (int fd, void *b, size_t n), (fd, b, n), next(fd, b, half(n)))
OF_FD(ssize_t, pread, READS, 0, (int fd, void *b, size_t n, off_t o), (fd, b, n, o), next(fd, b, half(n), o))
OF_FD(ssize_t, pread64, READS, 0, (int fd, void *b, size_t n, off_t o), (fd, b, n, o), next(fd, b, half(n), o))

#define VECTORED(name, kind, room, params, rest)                                                                          \
    ssize_t name params {                                                                                                 \
        NEXT(name);                                                                                                       \
        int halved = count; struct iovec one, *first = count > 0 ? half_of(v, &halved, &one) : (struct iovec *)v;          \
        MEET(kind, room, fd, NULL, -1, next(fd, first, halved rest));                                                     \
        return next(fd, v, count rest);                                                                                   \
    }
#define COMMA ,
VECTORED(writev, MUTATES, 2, (int fd, const struct iovec *v, int count), )
VECTORED(pwritev, MUTATES, 2, (int fd, const struct iovec *v, int count, off_t o), COMMA o)
VECTORED(pwritev64, MUTATES, 2, (int fd, const struct iovec *v, int count, off_t o), COMMA o)
VECTORED(pwritev2, MUTATES, 2, (int fd, const struct iovec *v, int count, off_t o, int f), COMMA o COMMA f)
VECTORED(pwritev64v2, MUTATES, 2, (int fd, const struct iovec *v, int count, off_t o, int f), COMMA o COMMA f)
VECTORED(readv, READS, 0, (int fd, const struct iovec *v, int count), )
VECTORED(preadv, READS, 0, (int fd, const struct iovec *v, int count, off_t o), COMMA o)
VECTORED(preadv64, READS, 0, (int fd, const struct iovec *v, int count, off_t o), COMMA o)
VECTORED(preadv2, READS, 0, (int fd, const struct iovec *v, int count, off_t o, int f), COMMA o COMMA f)
VECTORED(preadv64v2, READS, 0, (int fd, const struct iovec *v, int count, off_t o, int f), COMMA o COMMA f)

OF_FD(int, fsync, MUTATES, 0, (int fd), (fd), next(fd))
OF_FD(int, fdatasync, MUTATES, 0, (int fd), (fd), next(fd))
OF_FD(int, syncfs, MUTATES, 0, (int fd), (fd), next(fd))
OF_FD(int, sync_file_range, MUTATES, 0, (int fd, off64_t o, off64_t n, unsigned int f), (fd, o, n, f), next(fd, o, n, f))
OF_FD(int, fallocate, MUTATES, 2, (int fd, int m, off_t o, off_t n), (fd, m, o, n), next(fd, m, o, n))
OF_FD(int, fallocate64, MUTATES, 2, (int fd, int m, off64_t o, off64_t n), (fd, m, o, n), next(fd, m, o, n))
OF_FD(int, ftruncate, MUTATES, 2, (int fd, off_t n), (fd, n), next(fd, n))
OF_FD(int, ftruncate64, MUTATES, 2, (int fd, off64_t n), (fd, n), next(fd, n))
OF_FD(int, fchmod, MUTATES, 0, (int fd, mode_t m), (fd, m), next(fd, m))
OF_FD(int, futimens, MUTATES, 0, (int fd, const struct timespec t[2]), (fd, t), next(fd, t))

int posix_fallocate(int fd, off_t o, off_t n) {
    NEXT(posix_fallocate);
    MEET(MUTATES, 2, fd, NULL, errno, next(fd, o, n));
    return next(fd, o, n);
}
int posix_fallocate64(int fd, off64_t o, off64_t n) {
    NEXT(posix_fallocate64);
    MEET(MUTATES, 2, fd, NULL, errno, next(fd, o, n));
    return next(fd, o, n);
}
ssize_t copy_file_range(int in, off64_t *i, int fd, off64_t *o, size_t n, unsigned int f) {
    NEXT(copy_file_range);
    MEET(MUTATES, 2, fd, NULL, -1, next(in, i, fd, o, half(n), f));
    return next(in, i, fd, o, n, f);
}
ssize_t sendfile(int fd, int in, off_t *o, size_t n) {
    NEXT(sendfile);
    MEET(MUTATES, 2, fd, NULL, -1, next(fd, in, o, half(n)));
    return next(fd, in, o, n);
}
ssize_t sendfile64(int fd, int in, off64_t *o, size_t n) {
    NEXT(sendfile64);
    MEET(MUTATES, 2, fd, NULL, -1, next(fd, in, o, half(n)));
    return next(fd, in, o, n);
}

/* Opening */

static int kind_of(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) ? MUTATES : READS; }

static int opened(int fd, int flags) {
    if (fd < 0 || orders == NULL || orders->trace[0] == 0 || flags & O_PATH) return fd;
    int before = errno;
    char full[PATH_MAX];
    path_of_fd(fd, full);
    note(flags & O_DIRECTORY ? "folder" : kind_of(flags) == MUTATES ? "write" : "read", full);
    errno = before;
    return fd;
}

#define MODE_OF(last) mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, last); mode = va_arg(rest, mode_t); va_end(rest); }
#define OPEN(name)                                                                                                        \
    int name(const char *path, int flags, ...) {                                                                          \
        NEXT(name); MODE_OF(flags)                                                                                        \
        MEET(kind_of(flags), flags & O_CREAT ? 2 : 0, AT_FDCWD, path, -1, next(path, flags, mode));                               \
        return opened(next(path, flags, mode), flags);                                                                    \
    }
#define OPENAT(name)                                                                                                      \
    int name(int dirfd, const char *path, int flags, ...) {                                                               \
        NEXT(name); MODE_OF(flags)                                                                                        \
        MEET(kind_of(flags), flags & O_CREAT ? 2 : 0, dirfd, path, -1, next(dirfd, path, flags, mode));                           \
        return opened(next(dirfd, path, flags, mode), flags);                                                             \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int __open_2(const char *path, int flags) { return open(path, flags); }
int __open64_2(const char *path, int flags) { return open64(path, flags); }
int __openat_2(int dirfd, const char *path, int flags) { return openat(dirfd, path, flags); }
int __openat64_2(int dirfd, const char *path, int flags) { return openat64(dirfd, path, flags); }
int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return open64(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

#define FOPEN(name)                                                                                                       \
    FILE *name(const char *path, const char *mode) {                                                                      \
        NEXT(name);                                                                                                       \
        int flags = mode[0] == 'r' && strchr(mode, '+') == NULL ? O_RDONLY : O_RDWR | O_CREAT;                            \
        MEET(kind_of(flags), flags & O_CREAT ? 2 : 0, AT_FDCWD, path, NULL, next(path, mode));                                    \
        FILE *file = next(path, mode);                                                                                    \
        if (file != NULL) opened(fileno(file), flags);                                                                    \
        return file;                                                                                                      \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* What has no name in libc: openat2 and others by number. */

struct how { unsigned long long flags, mode, resolve; };

long syscall(long number, ...) {
    static long (*next)(long, ...);
    if (!next) next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    va_list rest;
    va_start(rest, number);
    long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long), d = va_arg(rest, long),
         e = va_arg(rest, long), f = va_arg(rest, long);
    va_end(rest);
    if (orders == NULL) return next(number, a, b, c, d, e, f);
    if (number == 437 /* openat2 */) {
        int flags = ((const struct how *)c)->flags;
        MEET(kind_of(flags), flags & O_CREAT ? 2 : 0, (int)a, (const char *)b, -1, next(number, a, b, c, d, e, f));
        return opened(next(number, a, b, c, d, e, f), flags);
    }
    if (number == SYS_renameat2) {
        MEET(MUTATES, 1, (int)c, (const char *)d, -1, next(number, a, b, c, d, e, f));
        trace_change("renameat2", (int)a, (const char *)b);
        trace_change("renameat2", (int)c, (const char *)d);
    }
    return next(number, a, b, c, d, e, f);
}

/* What code that came with a checkpoint would do. */

int execve(const char *path, char *const argv[], char *const envp[]) {
    NEXT(execve);
    if (orders != NULL && orders->trace[0] != 0) note("exec", path);
    return next(path, argv, envp);
}

int connect(int fd, const struct sockaddr *address, socklen_t size) {
    NEXT(connect);
    if (orders != NULL && orders->trace[0] != 0) note("connect", address->sa_family == AF_UNIX ? ((const struct sockaddr_un *)address)->sun_path : "address");
    return next(fd, address, size);
}

/* The clock of day */

int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(clock_gettime);
    int outcome = next(clock, now);
    if (orders != NULL && clock == CLOCK_REALTIME) now->tv_sec += orders->clock_offset_s;
    return outcome;
}

int gettimeofday(struct timeval *now, void *zone) {
    NEXT(gettimeofday);
    int outcome = next(now, zone);
    if (orders != NULL) now->tv_sec += orders->clock_offset_s;
    return outcome;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out != NULL) *out = now.tv_sec;
    return now.tv_sec;
}
