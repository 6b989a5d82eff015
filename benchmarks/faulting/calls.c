/* Notes, in the order in which they took effect, what all ranks do to files under a folder.

   Loaded before all libraries (LD_PRELOAD), so that calls of C++ and Rust are seen too; `faults_begin` switches it on in
   a process. A note is one line (call, path, other path, offset or inode, bytes) and, of data, the bytes. The inode shows
   a rename that a library made without the C library (Rust's, in safetensors). */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static int notes = -1;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

long faults_begin(const char *folder, const char *file) {
    snprintf(root, sizeof root, "%s", folder);
    notes = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    return notes;
}

static const char *whole(int at, const char *path, char *out) {
    char held[PATH_MAX] = "", name[64];
    if (path[0] != '/') {
        snprintf(name, sizeof name, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
        ssize_t n = readlink(name, held, sizeof held - 2);
        held[n > 0 ? n : 0] = 0;
        strcat(held, "/");
    }
    snprintf(out, PATH_MAX, "%s%s", held, path);
    return out;
}

static const char *opened(int fd, char *out) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = notes < 0 ? -1 : readlink(name, out, PATH_MAX - 1);
    out[n > 0 ? n : 0] = 0;
    return out;
}

static long inode(const char *path) {
    struct stat found;
    return lstat(path, &found) ? 0 : (long)found.st_ino;
}

/* Whether a call is noted; if so, no other is made by any rank until `leave`. */
static int enter(const char *path) {
    size_t n = strlen(root);
    if (notes < 0 || strncmp(path, root, n) || (path[n] && path[n] != '/')) return 0;
    pthread_mutex_lock(&turn);
    flock(notes, LOCK_EX);
    return 1;
}

static void leave(long result, const char *call, const char *path, const char *other, long offset, int fd, long size) {
    int error = errno;
    if (result >= 0) {
        char line[3 * PATH_MAX], *data = NULL;
        if (fd >= 0) {
            char name[64];
            snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
            int in = syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC);
            data = malloc(size + 1);
            if (in < 0 || pread(in, data, size, offset) != size) abort();
            close(in);
        }
        long n = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%ld\n", call, path, other, offset, data ? size : 0);
        if (syscall(SYS_write, notes, line, n) != n || (data && syscall(SYS_write, notes, data, size) != size)) abort();
        free(data);
    }
    flock(notes, LOCK_UN), pthread_mutex_unlock(&turn);
    errno = error;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

/* ---- names ---- */

#define OPENS(name, open_it, flags, ...) \
    char path[PATH_MAX]; \
    int is_new = (flags) & (O_CREAT | O_TRUNC) ? enter(whole(at, file, path)) : 0; \
    const char *call = is_new && access(path, F_OK) ? "create" : (flags) & O_TRUNC ? "length" : "open"; \
    __auto_type result = open_it; \
    if (is_new) leave(result == FAILED ? -1 : 0, call, path, "", *call == 'c' ? inode(path) : 0, -1, 0); \
    return result

#define FAILED -1
#define OPEN(name) \
    int name(const char *file, int flags, ...) { \
        va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
        int at = AT_FDCWD; REAL(int, name, const char *, int, ...); OPENS(name, real(file, flags, mode), flags); }
#define OPENAT(name) \
    int name(int at, const char *file, int flags, ...) { \
        va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
        REAL(int, name, int, const char *, int, ...); OPENS(name, real(at, file, flags, mode), flags); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
#undef FAILED
#define FAILED NULL
#define FOPEN(name) \
    FILE *name(const char *file, const char *mode) { \
        int at = AT_FDCWD, flags = *mode == 'w' ? O_CREAT | O_TRUNC : *mode == 'a' ? O_CREAT : 0; \
        REAL(FILE *, name, const char *, const char *); OPENS(name, real(file, mode), flags); }
FOPEN(fopen) FOPEN(fopen64)

#define ONE(call, at, file, open_it) \
    char path[PATH_MAX]; \
    int is_noted = enter(whole(at, file, path)); \
    long which = is_noted ? inode(path) : 0; \
    int result = open_it; \
    if (is_noted) leave(result, call, path, "", which, -1, 0); \
    return result
#define TWO(call, at, file, to_at, to, do_it) \
    char path[PATH_MAX], other[PATH_MAX]; \
    whole(at, file, path); \
    int is_noted = enter(whole(to_at, to, other)); \
    long which = is_noted ? inode(path) : 0; \
    int result = do_it; \
    if (is_noted) leave(result, call, path, other, which, -1, 0); \
    return result

int mkdir(const char *f, mode_t m) { REAL(int, mkdir, const char *, mode_t); ONE("mkdir", AT_FDCWD, f, real(f, m)); }
int mkdirat(int at, const char *f, mode_t m) { REAL(int, mkdirat, int, const char *, mode_t); ONE("mkdir", at, f, real(at, f, m)); }
int rmdir(const char *f) { REAL(int, rmdir, const char *); ONE("remove", AT_FDCWD, f, real(f)); }
int unlink(const char *f) { REAL(int, unlink, const char *); ONE("remove", AT_FDCWD, f, real(f)); }
int unlinkat(int at, const char *f, int x) { REAL(int, unlinkat, int, const char *, int); ONE("remove", at, f, real(at, f, x)); }
int rename(const char *f, const char *t) { REAL(int, rename, const char *, const char *); TWO("rename", AT_FDCWD, f, AT_FDCWD, t, real(f, t)); }
int renameat(int a, const char *f, int b, const char *t) { REAL(int, renameat, int, const char *, int, const char *); TWO("rename", a, f, b, t, real(a, f, b, t)); }
int renameat2(int a, const char *f, int b, const char *t, unsigned x) {
    REAL(int, renameat2, int, const char *, int, const char *, unsigned);
    TWO(x & 2 ? "exchange" : "rename", a, f, b, t, real(a, f, b, t, x)); }
int link(const char *f, const char *t) { REAL(int, link, const char *, const char *); TWO("link", AT_FDCWD, f, AT_FDCWD, t, real(f, t)); }
int linkat(int a, const char *f, int b, const char *t, int x) { REAL(int, linkat, int, const char *, int, const char *, int); TWO("link", a, f, b, t, real(a, f, b, t, x)); }

static int note_symlink(int result, const char *to, const char *path) { leave(result, "symlink", to, path, 0, -1, 0); return result; }
#define SYMLINK(at, do_it) char path[PATH_MAX]; int is_noted = enter(whole(at, f, path)); \
    return is_noted ? note_symlink(do_it, to, path) : do_it
int symlink(const char *to, const char *f) { REAL(int, symlink, const char *, const char *); SYMLINK(AT_FDCWD, real(to, f)); }
int symlinkat(const char *to, int at, const char *f) { REAL(int, symlinkat, const char *, int, const char *); SYMLINK(at, real(to, at, f)); }

/* ---- data ---- */

#define DATA(fd, start, do_it) \
    char path[PATH_MAX]; \
    int is_noted = enter(opened(fd, path)); \
    ssize_t result = do_it; \
    if (is_noted) leave(result, "write", path, "", start, fd, result); \
    return result
#define HERE (lseek(fd, 0, SEEK_CUR) - result)

ssize_t write(int fd, const void *p, size_t n) { REAL(ssize_t, write, int, const void *, size_t); DATA(fd, HERE, real(fd, p, n)); }
ssize_t writev(int fd, const struct iovec *v, int n) { REAL(ssize_t, writev, int, const struct iovec *, int); DATA(fd, HERE, real(fd, v, n)); }
ssize_t sendfile(int fd, int in, off_t *o, size_t n) { REAL(ssize_t, sendfile, int, int, off_t *, size_t); DATA(fd, HERE, real(fd, in, o, n)); }
ssize_t sendfile64(int fd, int in, off_t *o, size_t n) { REAL(ssize_t, sendfile64, int, int, off_t *, size_t); DATA(fd, HERE, real(fd, in, o, n)); }
ssize_t copy_file_range(int in, off_t *i, int fd, off_t *o, size_t n, unsigned x) {
    REAL(ssize_t, copy_file_range, int, off_t *, int, off_t *, size_t, unsigned); DATA(fd, o ? *o - result : HERE, real(in, i, fd, o, n, x)); }
#define PWRITE(name) ssize_t name(int fd, const void *p, size_t n, off_t o) { REAL(ssize_t, name, int, const void *, size_t, off_t); DATA(fd, o, real(fd, p, n, o)); }
#define PWRITEV(name) ssize_t name(int fd, const struct iovec *v, int n, off_t o) { REAL(ssize_t, name, int, const struct iovec *, int, off_t); DATA(fd, o, real(fd, v, n, o)); }
#define PWRITEV2(name) ssize_t name(int fd, const struct iovec *v, int n, off_t o, int x) { REAL(ssize_t, name, int, const struct iovec *, int, off_t, int); DATA(fd, o, real(fd, v, n, o, x)); }
PWRITE(pwrite) PWRITE(pwrite64) PWRITEV(pwritev) PWRITEV(pwritev64) PWRITEV2(pwritev2) PWRITEV2(pwritev64v2)

#define OF_FILE(call, length, do_it) \
    char path[PATH_MAX]; \
    int is_noted = enter(opened(fd, path)); \
    int result = do_it; \
    if (is_noted) leave(result, call, path, "", length, -1, 0); \
    return result
#define FTRUNCATE(name) int name(int fd, off_t n) { REAL(int, name, int, off_t); OF_FILE("length", n, real(fd, n)); }
#define FALLOCATE(name) int name(int fd, int x, off_t o, off_t n) { REAL(int, name, int, int, off_t, off_t); OF_FILE("reserve", o + n, real(fd, x, o, n)); }
#define SYNC(name) int name(int fd) { REAL(int, name, int); OF_FILE("sync", inode(path), real(fd)); }
FTRUNCATE(ftruncate) FTRUNCATE(ftruncate64) FALLOCATE(fallocate) FALLOCATE(fallocate64) SYNC(fsync) SYNC(fdatasync)
