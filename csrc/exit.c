#define _DEFAULT_SOURCE /* on_exit, dprintf */
#include "exit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __GLIBC__

/* Launchers pass on what ranks print through pipes, and MPICH's drops what is still in them when a rank aborts: without
 * a pause a few tracebacks of a hundred were lost. */
#define DRAIN_US 200000

/* The one process-wide state of the extension: libc's exit() is process-wide too. */
static struct {
  allred_finalize_fn finalize;
  allred_abort_fn abort;
  intptr_t comm;
  int rank;
  char host[64];
  pid_t pid;
} armed;

static void at_exit(int status, void *unused) {
  (void)unused;
  if (getpid() != armed.pid) return;
  if (status == 0) {
    armed.finalize();
    return;
  }
  dprintf(STDERR_FILENO, "allred: rank %d on %s left with exit code %d; ending the job\n", armed.rank, armed.host,
          status & 0xff);
  usleep(DRAIN_US);
  armed.abort(armed.comm, status & 0xff);
}

int allred_exit_arm(allred_finalize_fn finalize, allred_abort_fn abort, intptr_t comm, int rank, const char *host) {
  const int first = armed.pid != getpid();
  armed.finalize = finalize;
  armed.abort = abort;
  armed.comm = comm;
  armed.rank = rank;
  strncpy(armed.host, host, sizeof armed.host - 1);
  armed.pid = getpid();
  return first ? on_exit(at_exit, NULL) : 0;
}

#else

int allred_exit_arm(allred_finalize_fn finalize, allred_abort_fn abort, intptr_t comm, int rank, const char *host) {
  (void)finalize, (void)abort, (void)comm, (void)rank, (void)host;
  return -1;
}

#endif
