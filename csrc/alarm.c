#define _DEFAULT_SOURCE /* dprintf */
#include "alarm.h"

#include "doorbell.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define AGAIN_FACTOR 4

/* Process-wide: MPI starts and ends once in a process. */
static struct {
  pthread_t thread;
  int set, cancel; /* cancel: an eventfd */
  int rendezvous_fd, status;
  void (*function)(void); /* or NULL */
  double warn_s, limit_s;
  char who[128], what[512];
} alarm_state;

static double now_s(void) { return (double)allred_now_ns() / 1e9; }

/* The rendezvous process has sent a line, or is gone. */
static void end(void) {
  char text[1024];
  const ssize_t length = read(alarm_state.rendezvous_fd, text, sizeof text);
  if (length > 1) dprintf(STDERR_FILENO, "allred: %.*s", (int)length, text);
  if (length <= 0 && alarm_state.status)
    dprintf(STDERR_FILENO, "allred: %s ends: the rendezvous process of the job has ended\n", alarm_state.who);
  _exit(alarm_state.status);
}

static void *wait_and_warn(void *unused) {
  const double begun_s = now_s();
  double next_s = alarm_state.warn_s;
  for (;;) {
    const double until_s = next_s < alarm_state.limit_s ? next_s : alarm_state.limit_s;
    const double left_s = begun_s + until_s - now_s();
    struct pollfd files[] = {{.fd = alarm_state.cancel, .events = POLLIN},
                             {.fd = alarm_state.rendezvous_fd, .events = POLLIN}};
    const int ready = poll(files, 2, left_s > 86400 ? 86400000 : left_s > 0 ? (int)(1000 * left_s) + 1 : 0);
    if (ready > 0 && files[0].revents) return NULL;
    if (ready > 0 && files[1].revents) end();
    if (now_s() < begun_s + until_s) continue;
    const int over = until_s >= alarm_state.limit_s;
    if (over && alarm_state.function) {
      alarm_state.function();
      return NULL;
    }
    dprintf(STDERR_FILENO, "allred: %s has waited for %g s %s%s\n", alarm_state.who, until_s, alarm_state.what,
            over ? "; time limit reached, it exits" : "");
    if (over) _exit(1);
    next_s *= AGAIN_FACTOR;
  }
}

static int start(void) {
  sigset_t all, before;
  alarm_state.cancel = eventfd(0, EFD_CLOEXEC);
  if (alarm_state.cancel < 0) return -1;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* the thread inherits the mask */
  alarm_state.set = pthread_create(&alarm_state.thread, NULL, wait_and_warn, NULL) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!alarm_state.set) close(alarm_state.cancel);
  return alarm_state.set ? 0 : -1;
}

int allred_alarm_set(double warn_s, double limit_s, const char *who, const char *what, int rendezvous_fd, int status) {
  allred_alarm_cancel();
  alarm_state.warn_s = warn_s;
  alarm_state.limit_s = limit_s;
  alarm_state.rendezvous_fd = rendezvous_fd;
  alarm_state.status = status;
  alarm_state.function = NULL;
  snprintf(alarm_state.who, sizeof alarm_state.who, "%s", who);
  snprintf(alarm_state.what, sizeof alarm_state.what, "%s", what);
  return start();
}

int allred_alarm_call(double limit_s, void (*function)(void)) {
  allred_alarm_cancel();
  alarm_state.warn_s = ALLRED_ALARM_NEVER;
  alarm_state.limit_s = limit_s;
  alarm_state.rendezvous_fd = -1;
  alarm_state.function = function;
  return start();
}

void allred_alarm_cancel(void) {
  if (!alarm_state.set) return;
  const uint64_t one = 1;
  (void)!write(alarm_state.cancel, &one, sizeof one);
  pthread_join(alarm_state.thread, NULL);
  close(alarm_state.cancel);
  alarm_state.set = 0;
}
