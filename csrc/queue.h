/*
 * The pending operations of one rank on one segment, oldest first, and which thread takes their steps.
 *
 *   1  One thread at a time takes steps: a caller that waits (allred_queue_run), or the progress thread, if it was
 *      started. It claims the queue for that; other threads leave the steps to it.
 *   2  A caller that waits occupies a core of its own, so the progress thread does not claim the queue meanwhile.
 *   3  Otherwise the progress thread takes steps, and sleeps
 *        without limit         while no operation can continue
 *        for growing intervals while the peers have not begun: an eighth of the time waited so far, 1 ms at most,
 *                              because another process may need its core
 *
 * An operation blocks the operations behind it if its headers differ, or if it `holds` the queue: it has further parts,
 * which only its owner knows. The parts that it adds by allred_queue_continue go first, until allred_queue_release.
 *
 * Any thread may call these functions. The progress thread takes no signals, and does not use Python.
 */
#ifndef ALLRED_QUEUE_H
#define ALLRED_QUEUE_H

#include <pthread.h>

#include "operation.h"

typedef struct {
  pthread_mutex_t mutex; /* of all fields that are not atomic */
  pthread_cond_t wakeup; /* of the progress thread */
  allred_operation *_Atomic first, *last;
  const allred_operation *_Atomic holder; /* the operation that blocks the queue */
  int claimed, halted;
  _Atomic int threaded; /* whether the progress thread runs */
  _Atomic int waiting;  /* callers that wait, or that want other threads to stop taking steps */
  pthread_t thread;
} allred_queue;

/* 0, or an error number. */
int allred_queue_open(allred_queue *queue);

/* Whether no operation is pending, and none holds the queue. */
int allred_queue_idle(allred_queue *queue);

/* Add a prepared operation behind all others; or before them, as a part of the operation that holds the queue. */
void allred_queue_put(allred_queue *queue, allred_operation *op);
void allred_queue_continue(allred_queue *queue, allred_operation *op);

/* An operation that was not in the queue is complete, and holds the queue. */
void allred_queue_hold(allred_queue *queue, allred_operation *op, int status);

/* If the operation holds the queue, let the others continue. */
void allred_queue_release(allred_queue *queue, const allred_operation *op);

/* Remove an operation that has taken no step, because another one before it holds the queue. It is settled then, as one
 * whose headers differ. */
void allred_queue_withdraw(allred_queue *queue, allred_operation *op);

/* Whether an operation is complete. If so, this thread may read its results. */
int allred_queue_settled(const allred_operation *op);

/* The same, after taking steps for about 20 ms at most, until `idle_limit_ns` pass without progress. */
int allred_queue_run(allred_queue *queue, allred_operation *op, int64_t idle_limit_ns);

/* Start the progress thread, if it does not run. 0, or an error number. */
int allred_queue_start_thread(allred_queue *queue);

/* Stop all progress, for good, and end the thread. Pending operations stay pending. */
void allred_queue_halt(allred_queue *queue);

#endif
