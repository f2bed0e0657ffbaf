/* A warning, and an end, for a wait that nobody can look into: MPI's start holds the GIL. */
#ifndef ALLRED_ALARM_H
#define ALLRED_ALARM_H

/*
 * After `warn_s` seconds, and again after 4 times as long and so on, a thread writes a line to stderr:
 * "allred: <who> has waited for 30 s <what>". After `limit_s` it says so too, and ends the process with code 1.
 * The thread takes no signals and needs no GIL. One at a time. Returns 0, or -1 if there is no thread to be had.
 */
int allred_alarm_set(double warn_s, double limit_s, const char *who, const char *what);

/* Take it away, if there is one. */
void allred_alarm_cancel(void);

#endif
