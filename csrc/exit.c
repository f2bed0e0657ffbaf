#define _DEFAULT_SOURCE /* on_exit, dprintf, usleep */
#include "exit.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef __GLIBC__

/* Launchers pass on what ranks print through pipes, and MPICH's drops what is still in them when a rank aborts: without
 * a pause a few tracebacks of a hundred were lost. */
#define DRAIN_US 200000

/* The one process-wide state of the extension: libc's exit() is process-wide too. */
static struct {
  allred_exit_mpi mpi;
  char host[64];
  int rank, stuck;
  pid_t pid;
} armed;

static void at_exit(int status, void *unused) {
  (void)unused;
  int over = 0;
  if (getpid() != armed.pid) return;
  armed.mpi.finalized(&over);
  if (over) return;
  status &= 0xff; /* all that a parent sees of it */
  if (status == 0 && !armed.stuck) {
    armed.mpi.finalize();
    return;
  }
  dprintf(STDERR_FILENO, "allred: rank %d on %s left with exit code %d%s; ending the job\n", armed.rank, armed.host,
          status, armed.stuck ? " and an operation that never completed" : "");
  usleep(DRAIN_US);
  armed.mpi.abort(armed.mpi.comm, status ? status : 1);
}

int allred_exit_arm(allred_exit_mpi mpi, int rank, const char *host, int stuck) {
  const int first = armed.pid != getpid();
  armed.mpi = mpi;
  armed.rank = rank;
  armed.stuck = stuck;
  snprintf(armed.host, sizeof armed.host, "%s", host);
  armed.pid = getpid();
  return first ? on_exit(at_exit, NULL) : 0;
}

#else

int allred_exit_arm(allred_exit_mpi mpi, int rank, const char *host, int stuck) {
  (void)mpi, (void)rank, (void)host, (void)stuck;
  return -1;
}

#endif
