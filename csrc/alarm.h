/* Warnings and time limits without Python: MPI's start holds the GIL, and no thread of Python runs while the
 * interpreter deletes its objects, or after it. */
#ifndef ALLRED_ALARM_H
#define ALLRED_ALARM_H

/*
 * Start a thread. After `warn_s` seconds, and again each time after 4 times as long, it writes a line to stderr:
 * "allred: <who> has waited for 30 s <what>". After `limit_s` it writes this too, and ends the process with code 1.
 *
 * rendezvous_fd: a descriptor, or -1. When it has data or is closed, the thread prints the line that it reads, if any,
 * and ends the process with `status`.
 *
 * The thread takes no signals and needs no GIL. A process has at most one. Returns 0, or -1 if the thread cannot start.
 */
int allred_alarm_set(double warn_s, double limit_s, const char *who, const char *what, int rendezvous_fd, int status);

/* As allred_alarm_set: after `limit_s` the thread calls `function` once. */
int allred_alarm_call(double limit_s, void (*function)(void));

#define ALLRED_ALARM_NEVER 1e9 /* seconds: about thirty years */

/* End the thread, if there is one. */
void allred_alarm_cancel(void);

#endif
