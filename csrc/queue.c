#define _GNU_SOURCE /* pthread_condattr_setclock, pthread_setname_np, sched_yield */
#include "queue.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>

#include "bell.h"

#define LONGEST_NS 20000000 /* as of allred_run */
#define BRIEF_NS 20000      /* how long the thread spins and yields for a peer before it takes a nap */
#define LONGEST_NAP_NS 1000000
#define STAND_BY_NS 2000000 /* how often it looks whether those who waited have left */

int allred_queue_open(allred_queue *queue) {
  pthread_condattr_t clock;
  *queue = (allred_queue){.halted = 1};
  int problem = pthread_condattr_init(&clock);
  if (problem) return problem;
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  problem = pthread_mutex_init(&queue->mutex, NULL);
  if (!problem) problem = pthread_cond_init(&queue->news, &clock);
  pthread_condattr_destroy(&clock);
  queue->halted = problem != 0;
  return problem;
}

static void lock(allred_queue *queue) { pthread_mutex_lock(&queue->mutex); }

static void unlock(allred_queue *queue) { pthread_mutex_unlock(&queue->mutex); }

static allred_operation *first(allred_queue *queue) {
  return atomic_load_explicit(&queue->first, memory_order_acquire);
}

static void set_first(allred_queue *queue, allred_operation *op) {
  atomic_store_explicit(&queue->first, op, memory_order_release);
}

static const allred_operation *holder(allred_queue *queue) {
  return atomic_load_explicit(&queue->holder, memory_order_relaxed);
}

static void set_holder(allred_queue *queue, const allred_operation *op) {
  atomic_store_explicit(&queue->holder, op, memory_order_relaxed);
}

/* Without the lock: whoever sees that the last one is out sees that it holds the queue. */
int allred_queue_idle(allred_queue *queue) { return !first(queue) && !holder(queue); }

/* Something may go on that could not before. What comes behind others is no news: they have to be through first. */
static void news(allred_queue *queue) {
  if (queue->threaded) pthread_cond_signal(&queue->news);
}

void allred_queue_put(allred_queue *queue, allred_operation *op) {
  lock(queue);
  op->next = NULL;
  if (first(queue)) {
    queue->last->next = op;
  } else {
    set_first(queue, op);
    news(queue);
  }
  queue->last = op;
  unlock(queue);
}

void allred_queue_continue(allred_queue *queue, allred_operation *op) {
  lock(queue);
  op->continues = 1;
  op->next = first(queue);
  if (!op->next) queue->last = op;
  set_first(queue, op);
  news(queue);
  unlock(queue);
}

int allred_queue_settled(const allred_operation *op) {
  return atomic_load_explicit(&op->settled, memory_order_acquire) != ALLRED_PENDING;
}

/* Out of the queue; `rest` is what is behind it. After this the owner may free it. */
static void settle(allred_queue *queue, allred_operation *op, allred_operation *rest, int status) {
  if (!op->continues && (op->holds || status == ALLRED_DIFFER)) set_holder(queue, op);
  set_first(queue, rest);
  atomic_store_explicit(&op->settled, status, memory_order_release);
}

void allred_queue_hold(allred_queue *queue, allred_operation *op, int status) {
  lock(queue);
  op->holds = 1;
  settle(queue, op, first(queue), status);
  unlock(queue);
}

void allred_queue_release(allred_queue *queue, const allred_operation *op) {
  lock(queue);
  if (holder(queue) == op) {
    set_holder(queue, NULL);
    news(queue);
  }
  unlock(queue);
}

/* The operation to take steps with, if there is one that may go on. */
static allred_operation *next(allred_queue *queue) {
  allred_operation *op = queue->halted ? NULL : first(queue);
  return op && (op->continues || !holder(queue)) ? op : NULL;
}

static int take_wheel(allred_queue *queue) {
  lock(queue);
  const int taken = !queue->driven && next(queue) != NULL;
  if (taken) queue->driven = 1;
  unlock(queue);
  return taken;
}

static void give_wheel(allred_queue *queue) {
  lock(queue);
  queue->driven = 0;
  unlock(queue);
}

/* Take steps until `until` is complete. Whether there was progress. */
static int drive(allred_queue *queue, const allred_operation *until, int64_t patience_ns, const _Atomic int *leave) {
  const int64_t begun = allred_now_ns();
  for (int moved = 0;; moved = 1) {
    lock(queue);
    allred_operation *op = next(queue);
    unlock(queue);
    if (!op || allred_now_ns() - begun > LONGEST_NS || atomic_load_explicit(leave, memory_order_relaxed)) return moved;
    const uint64_t moves = atomic_load_explicit(&op->moves, memory_order_relaxed);
    const int status = allred_run_unless(op, patience_ns, leave);
    if (status == ALLRED_PENDING) return moved || atomic_load_explicit(&op->moves, memory_order_relaxed) != moves;
    lock(queue);
    settle(queue, op, op->next, status); /* nobody but the driver takes one out */
    unlock(queue);
    if (op == until) return 1;
  }
}

int allred_queue_run(allred_queue *queue, allred_operation *op, int64_t patience_ns) {
  static const _Atomic int stay = 0;
  const int64_t begun = allred_now_ns();
  atomic_fetch_add_explicit(&queue->waiting, 1, memory_order_relaxed);
  while (!allred_queue_settled(op)) {
    if (take_wheel(queue)) {
      drive(queue, op, patience_ns, &stay);
      give_wheel(queue);
    }
    if (allred_queue_settled(op) || allred_now_ns() - begun >= patience_ns) break;
    sched_yield();
  }
  atomic_fetch_sub_explicit(&queue->waiting, 1, memory_order_relaxed);
  return allred_queue_settled(op);
}

/* ---- the thread */

static void nap(allred_queue *queue, int64_t ns) {
  const int64_t until = allred_now_ns() + ns;
  const struct timespec limit = {until / 1000000000, until % 1000000000};
  pthread_cond_timedwait(&queue->news, &queue->mutex, &limit);
}

static void *attend(void *argument) {
  allred_queue *queue = argument;
  int64_t waits_since = 0; /* when there was progress last */
  lock(queue);
  while (!queue->halted) {
    if (!next(queue)) {
      pthread_cond_wait(&queue->news, &queue->mutex);
      waits_since = 0;
    } else if (queue->driven || atomic_load_explicit(&queue->waiting, memory_order_relaxed)) {
      nap(queue, STAND_BY_NS);
    } else {
      queue->driven = 1;
      unlock(queue);
      const int moved = drive(queue, NULL, BRIEF_NS, &queue->waiting);
      const int64_t now = allred_now_ns();
      lock(queue);
      queue->driven = 0;
      if (moved || !waits_since) waits_since = now;
      const int64_t share = (now - waits_since) / 8;
      if (!moved && next(queue) && !queue->halted) nap(queue, share < LONGEST_NAP_NS ? share : LONGEST_NAP_NS);
    }
  }
  unlock(queue);
  return NULL;
}

int allred_queue_attend(allred_queue *queue) {
  sigset_t all, before;
  if (queue->threaded) return 0;
  if (queue->halted) return ECANCELED;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int problem = pthread_create(&queue->thread, NULL, attend, queue);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (problem) return problem;
  pthread_setname_np(queue->thread, "allred-progress");
  lock(queue);
  queue->threaded = 1;
  unlock(queue);
  return 0;
}

void allred_queue_halt(allred_queue *queue) {
  atomic_fetch_add_explicit(&queue->waiting, 1, memory_order_relaxed); /* the thread leaves its operation */
  lock(queue);
  const int threaded = queue->threaded;
  queue->halted = 1;
  queue->threaded = 0;
  pthread_cond_signal(&queue->news);
  while (queue->driven) {
    unlock(queue);
    sched_yield();
    lock(queue);
  }
  unlock(queue);
  if (threaded) pthread_join(queue->thread, NULL);
}
