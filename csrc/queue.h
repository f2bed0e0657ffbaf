/*
 * The operations of one rank on one segment that are not complete, oldest first, and who takes steps with them.
 *
 * One at a time does, the driver: a caller that waits (allred_queue_run), or the queue's own thread, if it was started.
 * Whoever finds that somebody drives leaves it to them. A caller that waits is there with a core of its own, so the
 * thread stays away from the wheel as long as one does. Otherwise it goes on with what there is, and sleeps
 *
 *   without limit      while there is nothing, or nothing that may go on
 *   ever longer naps   while the peers have not come, an eighth of the time that it has waited, 1 ms at most:
 *                      its core is somebody else's meanwhile
 *
 * An operation stops the queue behind it when its headers differ, and when it `holds`: more belongs to it, which only
 * its owner knows. What the owner then gives with allred_queue_continue goes first, until allred_queue_release.
 *
 * All functions may be called by any thread. The thread takes no signals, and knows nothing of Python.
 */
#ifndef ALLRED_QUEUE_H
#define ALLRED_QUEUE_H

#include <pthread.h>

#include "operation.h"

typedef struct {
  pthread_mutex_t mutex; /* of all that is not atomic */
  pthread_cond_t news;   /* for the thread */
  allred_operation *_Atomic first, *last;
  const allred_operation *_Atomic holder;
  int driven, halted;
  _Atomic int threaded; /* whether there is a thread */
  _Atomic int waiting;  /* callers that wait, or want everybody else to leave */
  pthread_t thread;
} allred_queue;

/* 0, or an error number. */
int allred_queue_open(allred_queue *queue);

/* Whether nothing is under way, and nothing holds the queue. */
int allred_queue_idle(allred_queue *queue);

/* Let an operation that was prepared come behind all others; or before them, as a part of the one that holds them up.
 */
void allred_queue_put(allred_queue *queue, allred_operation *op);
void allred_queue_continue(allred_queue *queue, allred_operation *op);

/* The operation, which was not in the queue, is complete, and holds it. */
void allred_queue_hold(allred_queue *queue, allred_operation *op, int status);

/* The operation does not hold the queue any more, if it did. */
void allred_queue_release(allred_queue *queue, const allred_operation *op);

/* Whether an operation is complete; what the operation left can then be read by this thread. */
int allred_queue_settled(const allred_operation *op);

/* The same, after taking steps, or letting others take them, for as long as there is progress but about 20 ms at most,
 * and for `patience_ns` without. */
int allred_queue_run(allred_queue *queue, allred_operation *op, int64_t patience_ns);

/* Have a thread see to it that there is progress; once. 0, or an error number. */
int allred_queue_attend(allred_queue *queue);

/* Nobody takes a step from now on, and there is no thread. What is under way stays so for ever. */
void allred_queue_halt(allred_queue *queue);

#endif
