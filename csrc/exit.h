/* What a rank does as its very last act: finalize MPI if it ended well, abort the job if it did not. */
#ifndef ALLRED_EXIT_H
#define ALLRED_EXIT_H

#include <stdint.h>

/* MPI's own functions. `comm` is a handle of MPI's C binding, an int (MPICH) or a pointer (Open MPI), passed as
 * intptr_t: both travel in the same register on the 64-bit ABIs that this library supports. */
typedef struct {
  int (*finalized)(int *flag);
  int (*finalize)(void);
  int (*abort)(intptr_t comm, int status);
  intptr_t comm;
} allred_exit_mpi;

/*
 * Arm the handler for this process, or change what is armed. It runs inside libc's exit(), after Python has shut down:
 *
 *   1. MPI is finalized already: nothing is left to do;
 *   2. status 0 and nothing is stuck: finalize(), which waits for the other ranks as MPI does;
 *   3. else: a line on stderr that names `rank` and `host`, then abort(comm, status), which ends the other ranks too.
 *      Finalizing would wait for them for ever, since they wait for this rank in a collective.
 *
 * `stuck` says that an MPI operation of this process will never complete, so that MPI cannot be finalized.
 * A forked child inherits the handler; it does nothing there. Python alone cannot do this: its atexit functions are not
 * told the exit status. Returns 0, or -1 where libc has no on_exit().
 */
int allred_exit_arm(allred_exit_mpi mpi, int rank, const char *host, int stuck);

#endif
