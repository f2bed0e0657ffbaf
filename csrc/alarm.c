#define _DEFAULT_SOURCE /* dprintf */
#include "alarm.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define AGAIN_FACTOR 4

/* Process-wide, as the wait is. */
static struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pthread_t thread;
  int set, cancelled;
  double warn_s, limit_s;
  char who[128], what[512];
} alarm_state = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct timespec after(struct timespec begun, double seconds) {
  begun.tv_sec += (time_t)seconds;
  begun.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
  if (begun.tv_nsec >= 1000000000) begun.tv_sec++, begun.tv_nsec -= 1000000000;
  return begun;
}

static void *wait_and_tell(void *unused) {
  (void)unused;
  struct timespec begun;
  clock_gettime(CLOCK_MONOTONIC, &begun);
  double next_s = alarm_state.warn_s;
  pthread_mutex_lock(&alarm_state.lock);
  while (!alarm_state.cancelled) {
    const double until_s = next_s < alarm_state.limit_s ? next_s : alarm_state.limit_s;
    const struct timespec until = after(begun, until_s);
    if (pthread_cond_timedwait(&alarm_state.changed, &alarm_state.lock, &until) != ETIMEDOUT) continue;
    const int over = until_s >= alarm_state.limit_s;
    dprintf(STDERR_FILENO, "allred: %s has waited for %g s %s%s\n", alarm_state.who, until_s, alarm_state.what,
            over ? "; that is the limit, and it ends" : "");
    if (over) _exit(1);
    next_s *= AGAIN_FACTOR;
  }
  pthread_mutex_unlock(&alarm_state.lock);
  return NULL;
}

int allred_alarm_set(double warn_s, double limit_s, const char *who, const char *what) {
  allred_alarm_cancel();
  pthread_condattr_t monotonic;
  sigset_t all, before;
  alarm_state.warn_s = warn_s;
  alarm_state.limit_s = limit_s;
  alarm_state.cancelled = 0;
  snprintf(alarm_state.who, sizeof alarm_state.who, "%s", who);
  snprintf(alarm_state.what, sizeof alarm_state.what, "%s", what);
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&alarm_state.changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* which the thread inherits */
  alarm_state.set = pthread_create(&alarm_state.thread, NULL, wait_and_tell, NULL) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return alarm_state.set ? 0 : -1;
}

void allred_alarm_cancel(void) {
  if (!alarm_state.set) return;
  pthread_mutex_lock(&alarm_state.lock);
  alarm_state.cancelled = 1;
  pthread_cond_signal(&alarm_state.changed);
  pthread_mutex_unlock(&alarm_state.lock);
  pthread_join(alarm_state.thread, NULL);
  pthread_cond_destroy(&alarm_state.changed);
  alarm_state.set = 0;
}
