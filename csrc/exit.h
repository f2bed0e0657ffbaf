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

/* What is left to do with the watcher before the job is aborted. */
enum {
  ALLRED_EXIT_TELL,     /* say "left" if this is a good end; else say "failed", and await the release */
  ALLRED_EXIT_AWAIT,    /* it has been said: await the release, however well this process ends */
  ALLRED_EXIT_RELEASED, /* nothing */
  ALLRED_EXIT_STAY,     /* as TELL; but another rank is gone, while the job went on. So there is no MPI_Finalize for a
                         * good end either: await the release for as long as the others take, and end with `code` */
  ALLRED_EXIT_LINGER    /* as AWAIT, for as long as the others take: the job goes on without this rank */
};

typedef struct {
  allred_exit_mpi mpi;
  const char *who;   /* "rank 3 on host" */
  const char *words; /* what has ended the job, if it was not this process */
  int code;          /* the exit code to end the job with; 0: this process's own */
  int stuck;         /* an MPI operation of this process will never complete, so MPI cannot be finalized */
  int line;          /* the socket to the watcher; -1: there is none */
  int owed;
  int life; /* -1: a launcher has started this process, and ends the job. Else each process ends by itself, with its own
             * exit code, and this is its connection to where the others hear of that (allred/launch/process.py) */
} allred_exit_plan;

/*
 * Arm the handler for this process, or change what is armed. It runs inside libc's exit(), after Python has shut down:
 *
 *   1  MPI is finalized already: tell the watcher, and nothing else is left to do;
 *   2  status 0, nothing stuck, no verdict, no rank gone: tell it, and finalize(), which waits for all, as MPI does;
 *   3  else: do what is owed, print a line that says who, and abort(comm, code), which ends the other ranks too.
 *      Finalizing would wait for them for ever, since they wait for this rank in a collective.
 *
 * A launcher ends the job when its first rank goes: so a rank that has heard the verdict lingers, for the others to
 * unwind and for the one that failed to be the last to speak (allred/watch/job.py). Where the others go on without the
 * rank that failed (allred/watch/spares.py) that may take hours; it sleeps meanwhile, and hears when its watcher ends.
 * Without a launcher (`life`) nobody lingers for one: 2 holds for a good end also if a rank is gone, and 3 leaves by
 * _exit() instead of abort(). Finalizing might wait for a rank that dies meanwhile, so a thread (alarm.h) listens on
 * `life`, where a line says that nobody else will come. After it there is _exit(), too: MPICH's exit handlers were seen
 * to crash in processes that no launcher has started.
 * A forked child inherits the handler; it does nothing there. Python alone cannot do this: its atexit functions are not
 * told the exit status. Returns 0, or -1 where libc has no on_exit().
 */
int allred_exit_arm(const allred_exit_plan *plan);

#endif
