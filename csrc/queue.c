#define _GNU_SOURCE /* pthread_condattr_setclock, pthread_setname_np, sched_yield */
#include "queue.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>

#include "chaos.h"
#include "doorbell.h"

#define MAX_RUN_NS 20000000  /* as in allred_run */
#define THREAD_SPIN_NS 20000 /* how long the thread spins and yields without progress before it sleeps */
#define MAX_SLEEP_NS 1000000 /* of the thread, while peers have not begun */
#define LINK_SLEEP_NS 500000 /* of the thread, at least, while bytes of another host arrive slowly: see pause_ns */
#define STAND_BY_NS 2000000  /* interval at which the thread checks whether callers still wait */

int allred_queue_open(allred_queue *queue) {
  pthread_condattr_t clock;
  *queue = (allred_queue){.halted = 1};
  int problem = pthread_condattr_init(&clock);
  if (problem) return problem;
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  problem = pthread_mutex_init(&queue->mutex, NULL);
  if (!problem) problem = pthread_cond_init(&queue->wakeup, &clock);
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

/* Needs no lock: settle() sets the holder before it removes the operation. */
int allred_queue_idle(allred_queue *queue) { return !first(queue) && !holder(queue); }

/* Call this when an operation can continue that could not before. One that is put behind others cannot. */
static void wake_thread(allred_queue *queue) {
  if (queue->threaded) pthread_cond_signal(&queue->wakeup);
}

void allred_queue_put(allred_queue *queue, allred_operation *op) {
  lock(queue);
  op->next = NULL;
  if (first(queue)) {
    queue->last->next = op;
  } else {
    set_first(queue, op);
    wake_thread(queue);
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
  wake_thread(queue);
  unlock(queue);
}

int allred_queue_settled(const allred_operation *op) {
  return atomic_load_explicit(&op->settled, memory_order_acquire) != ALLRED_PENDING;
}

/* Remove a completed operation; `rest` are those behind it. After this the owner may free it. */
static void settle(allred_queue *queue, allred_operation *op, allred_operation *rest, int status) {
  if (!op->continues && (op->holds || status == ALLRED_DIFFER)) set_holder(queue, op);
  CHAOS_PAUSE();
  set_first(queue, rest);
  CHAOS_PAUSE();
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
    wake_thread(queue);
  }
  unlock(queue);
}

void allred_queue_withdraw(allred_queue *queue, allred_operation *op) {
  lock(queue);
  allred_operation *before = NULL, *each = first(queue);
  for (; each && each != op; each = each->next) before = each;
  if (each) {
    if (before)
      before->next = op->next;
    else
      set_first(queue, op->next);
    if (queue->last == op) queue->last = before;
    atomic_store_explicit(&op->settled, ALLRED_DIFFER, memory_order_release);
  }
  unlock(queue);
}

/* Return the operation that can continue, or NULL. */
static allred_operation *next(allred_queue *queue) {
  allred_operation *op = queue->halted ? NULL : first(queue);
  return op && (op->continues || !holder(queue)) ? op : NULL;
}

static int claim(allred_queue *queue) {
  lock(queue);
  const int claimed = !queue->claimed && next(queue) != NULL;
  if (claimed) queue->claimed = 1;
  unlock(queue);
  return claimed;
}

static void unclaim(allred_queue *queue) {
  lock(queue);
  queue->claimed = 0;
  unlock(queue);
}

/* Take steps until `until` is complete. Return whether there was progress. */
static int make_progress(allred_queue *queue, const allred_operation *until, const allred_wait_policy *policy) {
  const int64_t begun = allred_now_ns();
  for (int moved = 0;; moved = 1) {
    lock(queue);
    allred_operation *op = next(queue);
    unlock(queue);
    if (!op || allred_now_ns() - begun > MAX_RUN_NS || atomic_load_explicit(policy->stop, memory_order_relaxed))
      return moved;
    const uint64_t before = atomic_load_explicit(&op->progress_count, memory_order_relaxed);
    const int status = allred_run_with(op, policy);
    if (status == ALLRED_PENDING)
      return moved || atomic_load_explicit(&op->progress_count, memory_order_relaxed) != before;
    lock(queue);
    settle(queue, op, op->next, status); /* only the thread that has claimed the queue removes operations */
    unlock(queue);
    if (op == until) return 1;
  }
}

int allred_queue_run(allred_queue *queue, allred_operation *op, int64_t idle_limit_ns) {
  const allred_wait_policy policy = allred_caller_policy(op->segment, idle_limit_ns);
  const int64_t begun = allred_now_ns();
  atomic_fetch_add_explicit(&queue->waiting, 1, memory_order_relaxed);
  while (!allred_queue_settled(op)) {
    if (claim(queue)) {
      make_progress(queue, op, &policy);
      unclaim(queue);
    }
    if (allred_queue_settled(op) || allred_now_ns() - begun >= idle_limit_ns) break;
    sched_yield();
  }
  atomic_fetch_sub_explicit(&queue->waiting, 1, memory_order_relaxed);
  return allred_queue_settled(op);
}

/* ---- the progress thread */

static void sleep_for(allred_queue *queue, int64_t ns) {
  const int64_t until = allred_now_ns() + ns;
  const struct timespec limit = {until / 1000000000, until % 1000000000};
  if (CHAOS_FIRES()) return; /* a spurious wake-up */
  pthread_cond_timedwait(&queue->wakeup, &queue->mutex, &limit);
}

/* Return how long the thread sleeps. Bytes of another host arrive in small packets, and each wakeup takes time from the
 * threads that compute: so it lets them gather, unless it was busy for a long time with those of the last sleep. */
static int64_t pause_ns(const allred_operation *op, int64_t busy_ns, int64_t idle_ns) {
  if (op->segment && op->segment->across && busy_ns < LINK_SLEEP_NS / 4) return LINK_SLEEP_NS;
  return idle_ns / 8 < MAX_SLEEP_NS ? idle_ns / 8 : MAX_SLEEP_NS;
}

static void *progress_thread(void *argument) {
  allred_queue *queue = argument;
  int64_t last_progress = 0; /* a time; 0 before there is an operation */
  lock(queue);
  while (!queue->halted) {
    if (!next(queue)) {
      if (!CHAOS_FIRES()) pthread_cond_wait(&queue->wakeup, &queue->mutex);
      last_progress = 0;
    } else if (queue->claimed || atomic_load_explicit(&queue->waiting, memory_order_relaxed)) {
      sleep_for(queue, STAND_BY_NS);
    } else {
      queue->claimed = 1;
      unlock(queue);
      const int64_t begun = allred_now_ns();
      const allred_wait_policy policy = {THREAD_SPIN_NS, &queue->waiting, NULL};
      const int moved = make_progress(queue, NULL, &policy);
      const int64_t now = allred_now_ns();
      lock(queue);
      queue->claimed = 0;
      if (moved || !last_progress) last_progress = now;
      const allred_operation *op = next(queue);
      if (!moved && op && !queue->halted) sleep_for(queue, pause_ns(op, now - begun, now - last_progress));
    }
  }
  unlock(queue);
  return NULL;
}

int allred_queue_start_thread(allred_queue *queue) {
  sigset_t all, before;
  if (queue->threaded) return 0;
  if (queue->halted) return ECANCELED;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int problem = pthread_create(&queue->thread, NULL, progress_thread, queue);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (problem) return problem;
  pthread_setname_np(queue->thread, "allred-progress");
  lock(queue);
  queue->threaded = 1;
  unlock(queue);
  return 0;
}

void allred_queue_halt(allred_queue *queue) {
  atomic_fetch_add_explicit(&queue->waiting, 1, memory_order_relaxed); /* so that the thread stops taking steps */
  lock(queue);
  const int threaded = queue->threaded;
  queue->halted = 1;
  queue->threaded = 0;
  pthread_cond_signal(&queue->wakeup);
  while (queue->claimed) {
    unlock(queue);
    sched_yield();
    lock(queue);
  }
  unlock(queue);
  if (threaded) pthread_join(queue->thread, NULL);
}
