#define _DEFAULT_SOURCE /* on_exit, dprintf, usleep */
#include "exit.h"
#include "alarm.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifdef __GLIBC__

/* Launchers pass on what ranks print through pipes, and MPICH's drops what is still in them when a rank aborts: without
 * a pause a few tracebacks of a hundred were lost. */
#define DRAIN_US 200000

/* Longer than the watcher's grace, and long enough for the exit handlers of the rank that failed. */
#define PATIENCE_MS 10000

/* The one process-wide state of the extension: libc's exit() is process-wide too. */
static struct {
  allred_exit_plan plan;
  char who[128], words[1024];
  pid_t pid;
} armed;

static void tell(const char *event, int status) {
  char text[128];
  const int length = snprintf(text, sizeof text,
                              "{\"event\": \"%s\", \"code\": %d, \"words\": \"\", \"traceback\": \"\"}", event, status);
  if (armed.plan.line >= 0) (void)!send(armed.plan.line, text, (size_t)length, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static long now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Until the watcher says that it is this rank's turn to end the job, or is gone. The job may rather end with another's.
 * `forever`: no limit until there is a verdict, for the others go on. */
static void await_release(int forever) {
  long until = now_ms() + PATIENCE_MS;
  struct pollfd watcher = {.fd = armed.plan.line, .events = POLLIN};
  while (armed.plan.line >= 0) {
    const long left = until - now_ms();
    char letter;
    if (!forever && left <= 0) return;
    if (poll(&watcher, 1, forever ? -1 : (int)left) <= 0) continue;
    if (recv(armed.plan.line, &letter, 1, MSG_DONTWAIT) <= 0 || letter == 'r') return; /* gone, or "release" */
    if (letter == 'l') forever = 1;                                                    /* "linger" */
    if (letter == 'h') until = now_ms() + PATIENCE_MS;                                 /* "hold" */
    if (letter == 'v') {                                                               /* "verdict" */
      tell("unwound", 0);
      forever = 0;
      until = now_ms() + PATIENCE_MS;
    }
  }
}

/* Without a launcher: leave, and nothing after it. */
static void leave(int status) {
  fflush(NULL);
  _exit(status);
}

/* Without a launcher: whether the process at which the tasks have met is gone. MPI_Finalize speaks to it, and MPICH's
 * was seen to crash where nobody answers. */
static int is_lost(int life) {
  char letter;
  const ssize_t got = recv(life, &letter, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN);
}

static void finalize(int status) {
  const int life = armed.plan.life;
  if (life >= 0) {
    if (is_lost(life)) leave(status);
    allred_alarm_set(ALLRED_ALARM_NEVER, ALLRED_ALARM_NEVER, "", "", life, status);
    (void)!send(life, "left\n", 5, MSG_NOSIGNAL);
  }
  armed.plan.mpi.finalize();
  if (life >= 0) leave(status);
}

static void at_exit(int status, void *unused) {
  (void)unused;
  const allred_exit_plan *plan = &armed.plan;
  int over = 0;
  if (getpid() != armed.pid) return;
  plan->mpi.finalized(&over);
  status &= 0xff; /* all that a parent sees of it */
  const int good = status == 0 && !plan->stuck, alone = plan->life >= 0;
  const int stays = plan->owed == ALLRED_EXIT_STAY && good && !alone;
  if (plan->owed == ALLRED_EXIT_TELL || plan->owed == ALLRED_EXIT_STAY)
    tell(good ? "left" : "failed", status ? status : 1);
  if (over) return;
  if (good && (plan->owed == ALLRED_EXIT_TELL || (plan->owed == ALLRED_EXIT_STAY && alone))) return finalize(status);
  if (plan->owed != ALLRED_EXIT_RELEASED) await_release(stays || plan->owed == ALLRED_EXIT_LINGER);
  const int code = plan->owed == ALLRED_EXIT_STAY && !good ? 0 : plan->code;
  if (code)
    dprintf(STDERR_FILENO, "allred: %s ends%s: %s\n", armed.who, alone ? "" : " the job", armed.words);
  else
    dprintf(STDERR_FILENO, "allred: %s left with exit code %d%s%s\n", armed.who, status,
            plan->stuck ? " and an operation that never completed" : "", alone ? "" : "; ending the job");
  if (alone) leave(code ? code : status ? status : 1);
  usleep(DRAIN_US);
  plan->mpi.abort(plan->mpi.comm, code ? code : status ? status : 1);
}

int allred_exit_arm(const allred_exit_plan *plan) {
  const int first = armed.pid != getpid();
  armed.plan = *plan;
  snprintf(armed.who, sizeof armed.who, "%s", plan->who);
  snprintf(armed.words, sizeof armed.words, "%s", plan->words);
  armed.pid = getpid();
  return first ? on_exit(at_exit, NULL) : 0;
}

#else

int allred_exit_arm(const allred_exit_plan *plan) {
  (void)plan;
  return -1;
}

#endif
