/* A warning, and an end, for a wait that nobody can look into: MPI's start and its end hold the GIL, or come after
 * Python. */
#ifndef ALLRED_ALARM_H
#define ALLRED_ALARM_H

/*
 * After `warn_s` seconds, and again after 4 times as long and so on, a thread writes a line to stderr:
 * "allred: <who> has waited for 30 s <what>". After `limit_s` it says so too, and ends the process with code 1.
 *
 * `life`: a descriptor; -1: none. As soon as a line comes on it, or its end, the thread prints the line, if it is not
 * empty, and ends the process with `status`.
 *
 * The thread takes no signals and needs no GIL. One at a time. Returns 0, or -1 if there is no thread to be had.
 */
int allred_alarm_set(double warn_s, double limit_s, const char *who, const char *what, int life, int status);

#define ALLRED_ALARM_NEVER 1e9 /* seconds: about thirty years */

/* Take it away, if there is one. */
void allred_alarm_cancel(void);

#endif
