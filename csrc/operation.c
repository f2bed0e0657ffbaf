#define _GNU_SOURCE /* clock_gettime, sched_yield */
#include "operation.h"

#include <sched.h>
#include <time.h>

enum { FILL, MEET, MELD, MEET_MELDED, DRAIN };

/* A spin takes 30 to 70 ns (a pause, and a look at a flag in this core's cache); a yield, 500. */
#define SPINS 40

/* An operation may take seconds, and the caller wants to look at signals and time limits in between. */
#define LONGEST_NS 20000000
#define MOVES_A_LOOK 64

void allred_begin_exchange(allred_operation *op, allred_segment *segment, const allred_header *header) {
  static const allred_transfer nothing = {NULL, NULL, NULL};
  *op = (allred_operation){.segment = segment,
                           .transfer = &nothing,
                           .header = *header,
                           .rounds = 1,
                           .on_card = 1,
                           .status = ALLRED_PENDING,
                           .settled = ALLRED_PENDING};
}

/* Its turn has come. */
static void enter(allred_operation *op) {
  op->header.sequence = op->number = ++op->segment->operation;
  op->first_tick = op->segment->ticks;
}

static int arrived(const allred_operation *op, int rank) {
  const allred_segment *segment = op->segment;
  if (op->phase == MEET_MELDED) return allred_segment_has(segment, rank, op->first_tick, 2 * op->round + 1);
  if (op->round > 0) return allred_segment_has(segment, rank, op->first_tick, 2 * op->round);
  return allred_segment_has_header(segment, rank, op->number);
}

/* Whether all ranks are there. Each is asked until it is, and then no more. */
static int met(allred_operation *op) {
  for (; op->met < op->segment->ranks; op->met++)
    if (op->met != op->segment->rank && !arrived(op, op->met)) return 0;
  op->met = 0;
  return 1;
}

static int headers_agree(const allred_operation *op) {
  for (int rank = 0; rank < op->segment->ranks; rank++)
    if (!allred_headers_agree(&op->header, allred_segment_header(op->segment, rank, op->number))) return 0;
  return 1;
}

char *allred_operation_chunk(const allred_operation *op, int rank) {
  if (op->on_card) return allred_segment_card(op->segment, rank, op->number);
  return allred_segment_chunk(op->segment, rank, allred_segment_place(op->segment));
}

static char *own_chunk(const allred_operation *op) { return allred_operation_chunk(op, op->segment->rank); }

static int end(allred_operation *op, int status) {
  op->segment->ticks += 2 * (status == ALLRED_DONE ? op->rounds : 1); /* the same where ranks differ in their rounds */
  op->status = status;
  return status;
}

int allred_step(allred_operation *op) {
  if (op->status != ALLRED_PENDING) return op->status;
  const allred_transfer *transfer = op->transfer;
  switch (op->phase) {
  case FILL:
    if (op->round == 0) enter(op);
    if (transfer->fill) transfer->fill(op, own_chunk(op));
    if (op->round == 0)
      allred_segment_publish_header(op->segment, &op->header);
    else
      allred_segment_publish(op->segment, op->first_tick, 2 * op->round);
    op->phase = MEET;
    break;
  case MEET:
    if (!met(op)) return ALLRED_PENDING;
    if (op->round == 0 && !headers_agree(op)) return end(op, ALLRED_DIFFER);
    op->phase = transfer->meld ? MELD : DRAIN;
    break;
  case MELD:
    transfer->meld(op, own_chunk(op));
    allred_segment_publish(op->segment, op->first_tick, 2 * op->round + 1);
    op->phase = MEET_MELDED;
    break;
  case MEET_MELDED:
    if (!met(op)) return ALLRED_PENDING;
    op->phase = DRAIN;
    break;
  case DRAIN:
    if (transfer->drain) transfer->drain(op);
    if (!op->on_card) allred_segment_advance(op->segment, op->chunk_bytes);
    if (++op->round == op->rounds) return end(op, ALLRED_DONE);
    op->phase = FILL;
  }
  atomic_store_explicit(&op->moves, atomic_load_explicit(&op->moves, memory_order_relaxed) + 1, memory_order_relaxed);
  return ALLRED_MOVED;
}

static void pause_core(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int allred_run(allred_operation *op, int64_t patience_ns) {
  static const _Atomic int stay = 0;
  return allred_run_unless(op, patience_ns, &stay);
}

int allred_run_unless(allred_operation *op, int64_t patience_ns, const _Atomic int *leave) {
  int64_t begun = 0, since = 0;
  for (int spins = 0;; spins++) {
    int status, moved = 0;
    while ((status = allred_step(op)) == ALLRED_MOVED) {
      moved = 1;
      if (atomic_load_explicit(leave, memory_order_relaxed)) return ALLRED_PENDING;
      if (atomic_load_explicit(&op->moves, memory_order_relaxed) % MOVES_A_LOOK) continue;
      if (!begun) begun = now_ns();
      if (now_ns() - begun > LONGEST_NS) return ALLRED_PENDING;
    }
    if (status != ALLRED_PENDING) return status;
    if (moved) spins = 0, since = 0;
    if (spins < SPINS) {
      pause_core();
      continue;
    }
    const int64_t now = now_ns();
    if (!since) since = now;
    if (now - since >= patience_ns || atomic_load_explicit(leave, memory_order_relaxed)) return ALLRED_PENDING;
    sched_yield();
  }
}
