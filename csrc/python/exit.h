/* The last act of a rank: finalize MPI if the process ended well, abort the job otherwise. */
#ifndef ALLRED_EXIT_H
#define ALLRED_EXIT_H

#include <stdint.h>

/* Functions of MPI; null without MPI. `comm` is a handle of MPI's C binding, an int (MPICH) or a pointer (Open MPI),
 * passed as intptr_t: on the supported 64-bit ABIs both travel in the same register. */
typedef struct {
  int (*finalized)(int *flag);
  int (*finalize)(void);
  int (*abort)(intptr_t comm, int status);
  intptr_t comm;
} allred_exit_mpi;

/* What this process must do with the watcher before it aborts the job. */
enum {
  ALLRED_EXIT_TELL,     /* send "left" after a good end; else send "failed", and wait for the release */
  ALLRED_EXIT_AWAIT,    /* the message was sent: wait for the release, even after a good end */
  ALLRED_EXIT_RELEASED, /* nothing */
  ALLRED_EXIT_STAY,     /* as TELL, but the job continues without another rank that has failed. MPI_Finalize would hang
                         * even after a good end: wait for the release without limit, and end with `code` */
  ALLRED_EXIT_LINGER    /* as AWAIT, without limit: the job continues without this rank */
};

typedef struct {
  allred_exit_mpi mpi;
  const char *who;    /* "rank 3 on host" */
  const char *reason; /* why the job ends, if another process ended it */
  int code;           /* the exit code of the job; 0: that of this process */
  int stuck;          /* an MPI operation of this process can never complete, so MPI cannot be finalized */
  int watcher_fd;     /* the socket to the watcher, or -1 */
  int duty;           /* one of ALLRED_EXIT_... */
  double grace_s;     /* after it a thread does what the handler does, with `status`, if the handler has not begun:
                       * deletion of Python's objects may take long. Negative: no thread, the status is not known */
  int status;         /* the exit status, if grace_s is not negative */
  int rendezvous_fd;  /* -1: a launcher has started this process, and ends the job. Otherwise each process ends by
                       * itself, with its own exit code, and this socket tells the others (allred/launch/process.py) */
} allred_exit_plan;

/*
 * Arm the exit handler of this process, or change its plan. It runs inside libc's exit(), after Python has shut down:
 *
 *   1  if MPI is already finalized: tell the watcher, and return;
 *   2  if the status is 0, nothing is stuck, and the job has not failed: tell the watcher; finalize(), which waits;
 *   3  else: do the duty, print a line with the reason, and call abort(comm, code), which ends the other ranks too. To
 *      finalize would hang, because the others wait for this rank in a collective.
 *
 * With a launcher: it ends the job when the first rank ends. So after a verdict a rank waits until the others have
 * unwound, and until the rank that failed has printed its error last (allred/watch/job_state.py). If the job continues
 * without the failed rank (allred/watch/records.py), this may take hours; the rank sleeps, and wakes if its watcher
 * ends.
 *
 * Without a launcher (rendezvous_fd >= 0), the only case without MPI: no rank waits for another. 2 applies to a good
 * end even if a rank has failed, and 3 calls _exit() instead of abort(). finalize() could wait for a rank that dies
 * meanwhile, so a thread (alarm.h) reads rendezvous_fd, where a line says that no other rank will arrive. After
 * finalize() comes _exit() too: MPICH's exit handlers can crash in processes that no launcher has started.
 *
 * A forked child inherits the handler, which does nothing there. Python alone cannot do this: its atexit functions do
 * not get the exit status. Returns 0, or -1 if libc has no on_exit().
 */
int allred_exit_arm(const allred_exit_plan *plan);

/* Do now what the handler does at the end of the process with this status, and disarm it: for a process that will leave
 * by _exit(). May end the process. */
void allred_exit_run(int status);

#endif
