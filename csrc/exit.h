/* What a rank does as its very last act: finalize MPI if it ended well, abort the job if it did not. */
#ifndef ALLRED_EXIT_H
#define ALLRED_EXIT_H

#include <stdint.h>

typedef int (*allred_finalize_fn)(void);
typedef int (*allred_abort_fn)(intptr_t comm, int status);

/*
 * Arm the handler for this process; it runs inside libc's exit(), after Python has shut down:
 *
 *   1. status 0: finalize(), which waits for the other ranks as MPI does;
 *   2. any other status: a line on stderr that names `rank` and `host`, then abort(comm, status), which ends the other
 *      ranks too. Finalizing would wait for them for ever, since they wait for this rank in a collective.
 *
 * A forked child inherits the handler; it does nothing there. Calling arm again replaces what was armed.
 * Python alone cannot do this: its atexit functions are not told the exit status.
 *
 * `comm` is a handle of MPI's C binding, an int (MPICH) or a pointer (Open MPI), passed as intptr_t: both travel in
 * the same register on the 64-bit ABIs this library supports. Returns 0, or -1 where libc has no on_exit().
 */
int allred_exit_arm(allred_finalize_fn finalize, allred_abort_fn abort, intptr_t comm, int rank, const char *host);

#endif
