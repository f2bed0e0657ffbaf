#define _DEFAULT_SOURCE /* on_exit, dprintf, usleep */
#include "exit.h"

#include "alarm.h"
#include "doorbell.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#ifdef __GLIBC__

/* A launcher reads the output of ranks from pipes, and MPICH's drops what is still in them when a rank aborts: without
 * a pause a few of a hundred tracebacks were lost. */
#define DRAIN_US 200000

/* Longer than the watcher's grace period, and than the exit handlers of the rank that failed. */
#define RELEASE_LIMIT_NS 10000000000

/* Process-wide, as libc's exit() is. */
static struct {
  allred_exit_plan plan;
  char who[128], reason[1024];
  pid_t pid;
} armed;

static void tell(const char *event, int status) {
  char text[128];
  const int length = snprintf(text, sizeof text,
                              "{\"event\": \"%s\", \"code\": %d, \"words\": \"\", \"traceback\": \"\"}", event, status);
  if (armed.plan.watcher_fd >= 0) (void)!send(armed.plan.watcher_fd, text, (size_t)length, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* Wait until the watcher releases this rank to end the job, or is gone. Another rank's end may end the job before.
 * `forever`: without limit until there is a verdict, because the job continues. */
static void await_release(int forever) {
  int64_t until = allred_now_ns() + RELEASE_LIMIT_NS;
  struct pollfd watcher = {.fd = armed.plan.watcher_fd, .events = POLLIN};
  while (armed.plan.watcher_fd >= 0) {
    const int64_t left_ns = until - allred_now_ns();
    char kind;
    if (!forever && left_ns <= 0) return;
    if (poll(&watcher, 1, forever ? -1 : (int)(left_ns / 1000000)) <= 0) continue;
    if (recv(armed.plan.watcher_fd, &kind, 1, MSG_DONTWAIT) <= 0 || kind == 'r') return; /* gone, or "release" */
    if (kind == 'l') forever = 1;                                                        /* "linger" */
    if (kind == 'h') until = allred_now_ns() + RELEASE_LIMIT_NS;                         /* "hold" */
    if (kind == 'v') {                                                                   /* "verdict" */
      tell("unwound", 0);
      forever = 0;
      until = allred_now_ns() + RELEASE_LIMIT_NS;
    }
  }
}

/* Without a launcher: end the process, without other exit handlers. */
static void leave(int status) {
  fflush(NULL);
  _exit(status);
}

/* Without a launcher: whether the rendezvous process is gone. Without it MPICH's MPI_Finalize can crash. */
static int is_closed(int fd) {
  char byte;
  const ssize_t got = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN);
}

static void finalize(int status) {
  const int fd = armed.plan.rendezvous_fd;
  if (!armed.plan.mpi.finalize) return;
  if (fd >= 0) {
    if (is_closed(fd)) leave(status);
    allred_alarm_set(ALLRED_ALARM_NEVER, ALLRED_ALARM_NEVER, "", "", fd, status);
    (void)!send(fd, "left\n", 5, MSG_NOSIGNAL);
  }
  armed.plan.mpi.finalize();
  if (fd >= 0) leave(status);
}

/* Do what exit.h says at the end with this status. late: in the thread, not in libc's exit(). */
static void end_with(int status, int late) {
  const allred_exit_plan *plan = &armed.plan;
  int already = 0;
  if (plan->mpi.finalized) plan->mpi.finalized(&already);
  status &= 0xff; /* as the parent process sees it */
  const int good = status == 0 && !plan->stuck, alone = plan->rendezvous_fd >= 0;
  const int stays = plan->duty == ALLRED_EXIT_STAY && good && !alone;
  if (plan->duty == ALLRED_EXIT_TELL || plan->duty == ALLRED_EXIT_STAY)
    tell(good ? "left" : "failed", status ? status : 1);
  if (already) return;
  if (good && (plan->duty == ALLRED_EXIT_TELL || (plan->duty == ALLRED_EXIT_STAY && alone))) return finalize(status);
  if (plan->duty != ALLRED_EXIT_RELEASED) await_release(stays || plan->duty == ALLRED_EXIT_LINGER);
  const int code = plan->duty == ALLRED_EXIT_STAY && !good ? 0 : plan->code;
  if (code)
    dprintf(STDERR_FILENO, "allred: %s ends%s: %s\n", armed.who, alone ? "" : " the job", armed.reason);
  else
    dprintf(STDERR_FILENO, "allred: %s %s with exit code %d%s%s%s\n", armed.who, late ? "failed" : "left", status,
            plan->stuck ? " and an operation that never completed" : "",
            late ? " but has not left after its grace period: atexit functions or __del__ methods run" : "",
            alone ? "" : "; ending the job");
  if (alone) leave(code ? code : status ? status : 1);
  usleep(DRAIN_US);
  plan->mpi.abort(plan->mpi.comm, code ? code : status ? status : 1);
}

static void at_exit(int status, void *unused) {
  (void)unused;
  if (getpid() != armed.pid) return;
  allred_alarm_cancel(); /* waits for end_late, if that has begun: it ends the process */
  end_with(status, 0);
}

static void end_late(void) { end_with(armed.plan.status, 1); }

int allred_exit_arm(const allred_exit_plan *plan) {
  const int first = armed.pid != getpid();
  armed.plan = *plan;
  snprintf(armed.who, sizeof armed.who, "%s", plan->who);
  snprintf(armed.reason, sizeof armed.reason, "%s", plan->reason);
  armed.pid = getpid();
  if (plan->grace_s >= 0) (void)allred_alarm_call(plan->grace_s, end_late);
  return first ? on_exit(at_exit, NULL) : 0;
}

void allred_exit_run(int status) {
  at_exit(status, NULL);
  armed.pid = 0;
}

#else

void allred_exit_run(int status) { (void)status; }

int allred_exit_arm(const allred_exit_plan *plan) {
  (void)plan;
  return -1;
}

#endif
