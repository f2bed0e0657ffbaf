/* A library for LD_PRELOAD that makes one call of the C library fail.
 *
 * Variables:
 *
 * NTH_CALL: the call: malloc, mmap, ftruncate, memfd_create, open, read, write, fsync, rename, socket, connect, accept,
 * send, recv, fork, pidfd_open, thread (pthread_create); or `all`: see note_made. Calls that do the same count as the
 * same: calloc as malloc, posix_fallocate as ftruncate, sendmsg as send.
 *
 * NTH_NUMBER: which of these calls, from 1. NTH_ERRNO: the error. NTH_LATER=1: all later calls fail too.
 *
 * NTH_PROCESS: text in the command line of a process that counts from its first call of socket() on. Without it, a
 * process counts from its call of failing_calls_begin() on.
 *
 * NTH_REPORT: a file, to which the process with a failing call appends a line and the stack of Python.
 *
 * Only calls by Python, its modules and allred's C extension count, not those of MPI and of the C library itself. These
 * do not count either: a write to stdout, stderr, a pipe or an eventfd, because it cannot fail with ENOSPC; and mmap by
 * the allocator of Python, because it is a failed allocation, as malloc.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static const char *chosen = "";
static long number = 1;
static int error = EIO, later, waits_for_socket;
static atomic_long counted;
static atomic_int counts;
static char report[4096];

__attribute__((constructor)) static void read_variables(void) {
  const char *call = getenv("NTH_CALL"), *nth = getenv("NTH_NUMBER"), *code = getenv("NTH_ERRNO"),
             *path = getenv("NTH_REPORT");
  const char *process = getenv("NTH_PROCESS"), *all = getenv("NTH_LATER");
  if (!call || !nth || !code || !path) return;
  chosen = call, number = atol(nth), error = atoi(code), later = all && *all == '1';
  snprintf(report, sizeof report, "%s", path);
  if (!process || !*process) return;
  char command[8192];
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  const ssize_t bytes = fd < 0 ? 0 : syscall(SYS_read, fd, command, sizeof command - 1);
  if (fd >= 0) syscall(SYS_close, fd);
  for (ssize_t i = 0; i < bytes; i++)
    if (!command[i]) command[i] = ' ';
  command[bytes > 0 ? bytes : 0] = 0;
  waits_for_socket = strstr(command, process) && !strstr(command, "mpirun") && !strstr(command, "hydra");
}

/* Begins to count in this process. */
void failing_calls_begin(void) { atomic_store(&counts, 1); }

/* Appends `made: CALL` to the report at the first call, and makes none fail: NTH_CALL=all. */
static void note_made(const char *call) {
  static const char *noted[64];
  static atomic_int count;
  char line[64];
  for (int i = 0; i < atomic_load(&count); i++)
    if (noted[i] && !strcmp(noted[i], call)) return;
  const int at = atomic_fetch_add(&count, 1);
  if (at >= 64) return;
  noted[at] = call;
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, report, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return;
  syscall(SYS_write, fd, line, (size_t)snprintf(line, sizeof line, "made: %s\n", call));
  syscall(SYS_close, fd);
}

static void write_report(const char *call, long nth, const char *caller) {
  char line[512];
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, report, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return;
  const int length =
      snprintf(line, sizeof line, "failed: %s number %ld in process %d, called by %s\n", call, nth, getpid(), caller);
  syscall(SYS_write, fd, line, (size_t)length);
  void (*dump)(int, void *) = (void (*)(int, void *))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
  void *(*state)(void) = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
  void *mine = state ? state() : NULL;
  if (dump && mine) dump(fd, mine);
  syscall(SYS_close, fd);
}

/* Whether this call has to fail; then errno is set. */
static int fails(const char *call, void *from) {
  static _Thread_local int inside;
  if (waits_for_socket && !strcmp(call, "socket")) atomic_store(&counts, 1);
  if (!atomic_load_explicit(&counts, memory_order_relaxed) || inside) return 0;
  const int notes = !strcmp(chosen, "all");
  if (!notes && strcmp(call, chosen)) return 0;
  inside = 1;
  const int saved = errno;
  Dl_info caller = {0};
  int fail = 0;
  const char *path = dladdr(from, &caller) && caller.dli_fname ? caller.dli_fname : "";
  const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
  const int is_python = strstr(name, "python") && !strstr(name, "mpi"); /* or a module of it, which is not mpi4py */
  if ((is_python || strstr(name, "_kernels")) && !(!strcmp(call, "mmap") && strstr(name, "libpython"))) {
    if (notes) {
      note_made(call), errno = saved, inside = 0;
      return 0;
    }
    const long mine = atomic_fetch_add(&counted, 1) + 1;
    fail = mine == number || (later && mine > number);
    if (mine == number) write_report(call, mine, path);
  }
  errno = fail ? error : saved;
  inside = 0;
  return fail;
}

#define FROM __builtin_return_address(0)
#define NEXT(name) ((__typeof__(&name))next(#name, &name##_next))

static void *next(const char *name, void **kept) {
  if (!*kept) *kept = dlsym(RTLD_NEXT, name);
  return *kept;
}

/* A function that returns `failed` instead of calling the real one. */
#define WRAP(call, type, name, failed, parameters, arguments)                                                          \
  static void *name##_next;                                                                                            \
  type name parameters { return fails(#call, FROM) ? (failed) : NEXT(name) arguments; }

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

void *malloc(size_t size) { return fails("malloc", FROM) ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return fails("malloc", FROM) ? NULL : __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { return fails("malloc", FROM) ? NULL : __libc_realloc(old, size); }

WRAP(mmap, void *, mmap, MAP_FAILED, (void *at, size_t size, int protection, int flags, int fd, off_t offset),
     (at, size, protection, flags, fd, offset))
WRAP(mmap, void *, mmap64, MAP_FAILED, (void *at, size_t size, int protection, int flags, int fd, off64_t offset),
     (at, size, protection, flags, fd, offset))
WRAP(ftruncate, int, ftruncate, -1, (int fd, off_t size), (fd, size))
WRAP(ftruncate, int, ftruncate64, -1, (int fd, off64_t size), (fd, size))
WRAP(ftruncate, int, posix_fallocate, error, (int fd, off_t from, off_t size), (fd, from, size))
WRAP(ftruncate, int, posix_fallocate64, error, (int fd, off64_t from, off64_t size), (fd, from, size))
WRAP(ftruncate, int, fallocate, -1, (int fd, int mode, off_t from, off_t size), (fd, mode, from, size))
WRAP(memfd_create, int, memfd_create, -1, (const char *name, unsigned flags), (name, flags))
WRAP(read, ssize_t, read, -1, (int fd, void *to, size_t size), (fd, to, size))
WRAP(read, ssize_t, pread, -1, (int fd, void *to, size_t size, off_t at), (fd, to, size, at))
WRAP(read, ssize_t, pread64, -1, (int fd, void *to, size_t size, off64_t at), (fd, to, size, at))
WRAP(write, ssize_t, pwrite, -1, (int fd, const void *from, size_t size, off_t at), (fd, from, size, at))
WRAP(write, ssize_t, pwrite64, -1, (int fd, const void *from, size_t size, off64_t at), (fd, from, size, at))
WRAP(write, ssize_t, writev, -1, (int fd, const struct iovec *parts, int count), (fd, parts, count))
WRAP(fsync, int, fsync, -1, (int fd), (fd))
WRAP(fsync, int, fdatasync, -1, (int fd), (fd))
WRAP(rename, int, rename, -1, (const char *from, const char *to), (from, to))
WRAP(rename, int, renameat, -1, (int source, const char *from, int target, const char *to), (source, from, target, to))
WRAP(socket, int, socket, -1, (int family, int type, int protocol), (family, type, protocol))
WRAP(socket, int, socketpair, -1, (int family, int type, int protocol, int ends[2]), (family, type, protocol, ends))
WRAP(connect, int, connect, -1, (int fd, const struct sockaddr *to, socklen_t size), (fd, to, size))
WRAP(accept, int, accept, -1, (int fd, struct sockaddr *from, socklen_t *size), (fd, from, size))
WRAP(accept, int, accept4, -1, (int fd, struct sockaddr *from, socklen_t *size, int flags), (fd, from, size, flags))
WRAP(send, ssize_t, send, -1, (int fd, const void *from, size_t size, int flags), (fd, from, size, flags))
WRAP(send, ssize_t, sendto, -1,
     (int fd, const void *from, size_t size, int flags, const struct sockaddr *to, socklen_t length),
     (fd, from, size, flags, to, length))
WRAP(send, ssize_t, sendmsg, -1, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
WRAP(recv, ssize_t, recv, -1, (int fd, void *to, size_t size, int flags), (fd, to, size, flags))
WRAP(recv, ssize_t, recvfrom, -1, (int fd, void *to, size_t size, int flags, struct sockaddr *from, socklen_t *length),
     (fd, to, size, flags, from, length))
WRAP(recv, ssize_t, recvmsg, -1, (int fd, struct msghdr *message, int flags), (fd, message, flags))
WRAP(fork, pid_t, fork, -1, (void), ())
WRAP(thread, int, pthread_create, error,
     (pthread_t * thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument),
     (thread, attributes, run, argument))

static int is_pipe(int fd) {
  char path[64], target[64];
  if (!counts) return 0;
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(path, target, sizeof target - 1);
  target[length > 0 ? length : 0] = 0;
  return !strncmp(target, "anon_inode:", 11) || !strncmp(target, "pipe:", 5);
}

static void *write_next;
ssize_t write(int fd, const void *from, size_t size) {
  return fd > 2 && !is_pipe(fd) && fails("write", FROM) ? -1 : NEXT(write)(fd, from, size);
}

/* Not vfork: a child that returns from this function would change the stack of its parent. */
pid_t vfork(void) { return fails("fork", FROM) ? -1 : (pid_t)syscall(SYS_fork); }

#define MODE(flags, last) ((flags) & (O_CREAT | O_TMPFILE) ? va_arg(last, mode_t) : 0)
#define OPEN(name, parameters, arguments)                                                                              \
  static void *name##_next;                                                                                            \
  int name parameters {                                                                                                \
    va_list last;                                                                                                      \
    va_start(last, flags);                                                                                             \
    const mode_t mode = MODE(flags, last);                                                                             \
    va_end(last);                                                                                                      \
    return fails("open", FROM) ? -1 : NEXT(name) arguments;                                                            \
  }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))

static void *syscall_next;
long syscall(long which, ...) {
  va_list last;
  va_start(last, which);
  long a[6];
  for (int i = 0; i < 6; i++) a[i] = va_arg(last, long);
  va_end(last);
  if (which == SYS_pidfd_open && fails("pidfd_open", FROM)) return -1;
  return NEXT(syscall)(which, a[0], a[1], a[2], a[3], a[4], a[5]);
}
