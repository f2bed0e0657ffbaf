#define _GNU_SOURCE /* sched_yield */
#include "operation.h"

#include <sched.h>

#include "doorbell.h"

enum { FILL, WAIT_FILLED, REDUCE, WAIT_REDUCED, DRAIN };

/* Then yield. A spin (a pause, and a load from this core's cache) takes 30 to 70 ns; a yield takes 500 ns. */
#define SPINS 40

#define LONG_YIELD_NS 50000   /* after a longer yield the core counts as contended */
#define CONTENDED_NS 10000000 /* for this long */

/* An operation may take seconds; in between the caller checks signals and time limits. */
#define MAX_RUN_NS 20000000
#define STEPS_PER_CHECK 64

void allred_begin_exchange(allred_operation *op, allred_segment *segment, const allred_header *header) {
  static const allred_transfer nothing = {.fill = NULL};
  *op = (allred_operation){.segment = segment,
                           .transfer = &nothing,
                           .header = *header,
                           .rounds = 1,
                           .is_inline = 1,
                           .status = ALLRED_PENDING,
                           .settled = ALLRED_PENDING};
  if (segment->across) segment->across->begin(op);
}

static void assign_number(allred_operation *op) {
  op->header.sequence = op->number = ++op->segment->operation;
  op->first_tick = op->segment->tick_count;
}

static int is_ready(const allred_operation *op, int rank) {
  const allred_segment *segment = op->segment;
  if (op->phase == WAIT_REDUCED) return allred_segment_has(segment, rank, op->first_tick, 2 * op->round + 1);
  if (op->round > 0) return allred_segment_has(segment, rank, op->first_tick, 2 * op->round);
  return allred_segment_has_header(segment, rank, op->number);
}

/* Whether all ranks have reached the phase. A rank that has is not checked again. */
static int all_ready(allred_operation *op) {
  for (; op->ready_ranks < op->segment->ranks; op->ready_ranks++)
    if (op->ready_ranks != op->segment->rank && !is_ready(op, op->ready_ranks)) return 0;
  op->ready_ranks = 0;
  return 1;
}

const allred_header *allred_header_run(const allred_segment *segment, uint64_t operation, int index, uint64_t *ranks) {
  if (segment->across) return segment->across->header_run(segment, operation, index, ranks);
  *ranks = 1;
  return index < segment->ranks ? allred_segment_header(segment, index, operation) : NULL;
}

/* Whether the headers of all ranks agree. */
static int agree(allred_operation *op) {
  const allred_header *header;
  uint64_t ranks;
  for (int run = 0; (header = allred_header_run(op->segment, op->number, run, &ranks)); run++)
    if (!allred_headers_agree(&op->header, header)) return 0;
  if (op->header.kind == ALLRED_KIND_STEP_ALLREDUCE) {
    op->waited_ns += allred_now_ns();
    allred_count_samples(op);
  }
  return 1;
}

char *allred_operation_chunk(const allred_operation *op, int rank) {
  if (op->is_inline) return allred_segment_inline_slot(op->segment, rank, op->number);
  return allred_segment_chunk(op->segment, rank, allred_segment_place(op->segment));
}

static char *own_chunk(const allred_operation *op) { return allred_operation_chunk(op, op->segment->rank); }

static int end(allred_operation *op, int status) {
  op->segment->tick_count +=
      2 * (status == ALLRED_DONE ? op->rounds : 1); /* 1 if headers differ: then ranks may differ in rounds */
  op->status = status;
  return status;
}

static int progressed(allred_operation *op) {
  const uint64_t steps = atomic_load_explicit(&op->progress_count, memory_order_relaxed);
  atomic_store_explicit(&op->progress_count, steps + 1, memory_order_relaxed);
  return ALLRED_PROGRESSED;
}

int allred_step(allred_operation *op) {
  if (op->status != ALLRED_PENDING) return op->status;
  const allred_transfer *transfer = op->transfer;
  switch (op->phase) {
  case FILL:
    if (op->round == 0) assign_number(op);
    if (transfer->fill) transfer->fill(op, own_chunk(op));
    if (op->round == 0) {
      if (op->header.kind == ALLRED_KIND_STEP_ALLREDUCE) op->waited_ns = -allred_now_ns();
      allred_segment_publish_header(op->segment, &op->header);
    } else
      allred_segment_publish(op->segment, op->first_tick, 2 * op->round);
    op->phase = WAIT_FILLED;
    break;
  case WAIT_FILLED:
    if (!all_ready(op)) return ALLRED_PENDING;
    if (op->round == 0 && !op->segment->across && !agree(op)) return end(op, ALLRED_DIFFER);
    if (transfer->agreed) transfer->agreed(op);
    op->phase = op->transfer->reduce ? REDUCE : DRAIN;
    break;
  case REDUCE:
    switch (transfer->reduce(op, own_chunk(op))) {
    case ALLRED_PENDING:
      return ALLRED_PENDING;
    case ALLRED_PROGRESSED:
      return progressed(op);
    }
    allred_segment_publish(op->segment, op->first_tick, 2 * op->round + 1);
    op->phase = WAIT_REDUCED;
    break;
  case WAIT_REDUCED:
    if (!all_ready(op)) return ALLRED_PENDING;
    if (op->round == 0 && op->compares_board && !agree(op)) return end(op, ALLRED_DIFFER);
    op->phase = DRAIN;
    break;
  case DRAIN:
    if (transfer->drain) transfer->drain(op);
    if (!op->is_inline) allred_segment_advance(op->segment, op->chunk_bytes);
    if (transfer->next) transfer->next(op);
    if (++op->round == op->rounds) return end(op, ALLRED_DONE);
    op->phase = FILL;
  }
  return progressed(op);
}

allred_wait_policy allred_caller_policy(allred_segment *segment, int64_t idle_limit_ns) {
  static const _Atomic int never = 0;
  return (allred_wait_policy){idle_limit_ns, &never, segment->may_sleep ? &segment->contended_until : NULL};
}

int allred_run(allred_operation *op, int64_t idle_limit_ns) {
  const allred_wait_policy policy = allred_caller_policy(op->segment, idle_limit_ns);
  return allred_run_with(op, &policy);
}

/* Whether a pending operation waits for the rank `ready_ranks`. */
static int waits_for_rank(const allred_operation *op) { return op->phase == WAIT_FILLED || op->phase == WAIT_REDUCED; }

static int rank_is_ready(const void *operation) {
  const allred_operation *op = operation;
  return is_ready(op, op->ready_ranks);
}

int allred_run_with(allred_operation *op, const allred_wait_policy *policy) {
  allred_segment *segment = op->segment;
  int64_t begun = 0, since = 0;
  for (int spins = 0;; spins++) {
    int status, moved = 0;
    while ((status = allred_step(op)) == ALLRED_PROGRESSED) {
      moved = 1;
      if (atomic_load_explicit(policy->stop, memory_order_relaxed)) return ALLRED_PENDING;
      if (atomic_load_explicit(&op->progress_count, memory_order_relaxed) % STEPS_PER_CHECK) continue;
      if (!begun) begun = allred_now_ns();
      if (allred_now_ns() - begun > MAX_RUN_NS) return ALLRED_PENDING;
    }
    if (status != ALLRED_PENDING) return status;
    if (moved) spins = 0, since = 0;
    if (spins < SPINS) {
      allred_pause();
      continue;
    }
    const int64_t now = allred_now_ns();
    if (!since) since = now;
    const int64_t left_ns = policy->idle_limit_ns - (now - since);
    if (left_ns <= 0 || atomic_load_explicit(policy->stop, memory_order_relaxed)) return ALLRED_PENDING;
    if (segment->across && segment->across->wait(segment, left_ns)) continue;
    const int can_sleep = policy->contended_until && waits_for_rank(op);
    if (can_sleep && now < *policy->contended_until) {
      allred_segment_sleep(segment, op->ready_ranks, left_ns, rank_is_ready, op);
      continue;
    }
    sched_yield();
    const int64_t returned = can_sleep ? allred_now_ns() : now;
    if (returned - now > LONG_YIELD_NS) *policy->contended_until = returned + CONTENDED_NS;
  }
}
