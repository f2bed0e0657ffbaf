/*
 * Ranks that start operations ahead, with the queue's thread and without, and wait for them in any order. Run by
 * `make sanitize` under AddressSanitizer and ThreadSanitizer.
 *
 *   queue [TURNS]   so many batches of operations with each number of ranks
 *
 * Every rank is a thread that puts a batch of allreduces into its queue, some of which are held up by headers that
 * differ or by a second part, and then looks at them, or waits, at a pace of its own. In some turns a rank lets its
 * queue be halted with operations under way: nothing may be written after that.
 */
#define _GNU_SOURCE /* usleep */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "doorbell.h"
#include "queue.h"

#define MAX_RANKS 4
#define BATCH 12
#define MOST 3000 /* numbers of an operation: several chunks */
#define CHUNK_BYTES 4096
#define PATIENCE_S 60

typedef struct {
  allred_operation operation, part;
  allred_tensor tensor;
  int64_t numbers[MOST], more;
  uint64_t starts[MAX_RANKS + 1];
  int64_t all[MAX_RANKS];
} entry;

typedef struct {
  int rank, ranks, turns;
  char *memory;
  uint64_t dice;
  entry entries[BATCH];
} player;

static player players[MAX_RANKS];
static _Atomic int halted_ranks;

static uint64_t mix(uint64_t a, uint64_t b) { return allred_mix(allred_mix(1, a), b); }

static void fail(const player *me, int turn, int i, const char *what) {
  fprintf(stderr, "%d ranks, rank %d, turn %d, operation %d: %s\n", me->ranks, me->rank, turn, i, what);
  _exit(1);
}

static void wait_for(allred_queue *queue, allred_operation *op, player *me, int turn, int i) {
  const int64_t until = allred_now_ns() + (int64_t)PATIENCE_S * 1000000000;
  for (;;) {
    me->dice = mix(me->dice, 1);
    if (me->dice % 3 == 0 ? allred_queue_settled(op) : allred_queue_run(queue, op, (int64_t)(me->dice % 5) * 100000))
      return;
    if (me->dice % 7 == 0) usleep(50);
    if (allred_now_ns() > until) fail(me, turn, i, "does not end");
  }
}

enum { PLAIN, DIFFERS, IN_PARTS };

static int kind_of(const player *me, uint64_t seed) {
  return seed % 8 == 0 && me->ranks > 1 ? DIFFERS : seed % 8 == 1 ? IN_PARTS : PLAIN;
}

static void put(allred_queue *queue, allred_segment *segment, player *me, uint64_t seed, int i) {
  entry *e = &me->entries[i];
  const size_t count = seed % 5 == 0 ? 0 : seed % 5 == 1 ? MOST : seed % 200;
  const allred_header header = {.kind = (uint8_t)i, .name = seed + (kind_of(me, seed) == DIFFERS && me->rank == 1)};
  for (size_t n = 0; n < count; n++) e->numbers[n] = (int64_t)n + me->rank;
  e->tensor = (allred_tensor){(char *)e->numbers, (char *)e->numbers, count * 8, ALLRED_INT64, 0, 0, 0};
  if (kind_of(me, seed) == IN_PARTS) {
    allred_begin_exchange(&e->operation, segment, &header);
    e->operation.holds = 1;
  } else {
    allred_begin_allreduce(&e->operation, segment, &header, &e->tensor, 1, 0, ALLRED_SUM, 1);
  }
  allred_queue_put(queue, &e->operation);
}

/* What the owner of an operation that holds the queue does with it. */
static void go_on(allred_queue *queue, allred_segment *segment, player *me, int turn, int i) {
  entry *e = &me->entries[i];
  e->more = 100 + me->rank;
  for (int rank = 0; rank < me->ranks; rank++) e->starts[rank + 1] = (uint64_t)(rank + 1) * 8;
  allred_begin_allgather(&e->part, segment, &(allred_header){0}, (char *)&e->more, (char *)e->all, e->starts);
  allred_queue_continue(queue, &e->part);
  wait_for(queue, &e->part, me, turn, i);
  for (int rank = 0; rank < me->ranks; rank++)
    if (e->all[rank] != 100 + rank) fail(me, turn, i, "wrong number in the second part");
  allred_queue_release(queue, &e->operation);
}

static void check(player *me, uint64_t seed, int turn, int i) {
  const entry *e = &me->entries[i];
  const int status = atomic_load_explicit(&e->operation.settled, memory_order_acquire);
  if (status != (kind_of(me, seed) == DIFFERS ? ALLRED_DIFFER : ALLRED_DONE)) fail(me, turn, i, "wrong status");
  if (kind_of(me, seed) == IN_PARTS) return;
  const int64_t ranks = status == ALLRED_DIFFER ? 1 : me->ranks;
  const int64_t added = status == ALLRED_DIFFER ? me->rank : me->ranks * (me->ranks - 1) / 2;
  for (size_t n = 0; n < e->tensor.bytes / 8; n++)
    if (e->numbers[n] != ranks * (int64_t)n + added) fail(me, turn, i, "wrong number");
}

static void *play(void *argument) {
  player *me = argument;
  allred_segment segment = {
      .may_sleep = 1, .memory = me->memory, .rank = me->rank, .ranks = me->ranks, .chunk_bytes = CHUNK_BYTES};
  allred_queue queue;
  if (allred_queue_open(&queue)) fail(me, 0, 0, "no queue");
  for (int turn = 0; turn < me->turns; turn++) {
    const uint64_t seed = mix((uint64_t)me->ranks, (uint64_t)turn);
    const int count = 1 + (int)(seed % BATCH);
    me->dice = mix(me->dice, 2);
    if (me->dice % 4 == 0 && allred_queue_start_thread(&queue)) fail(me, turn, 0, "no thread");
    for (int i = 0; i < count; i++) {
      put(&queue, &segment, me, mix(seed, (uint64_t)i), i);
      if (me->dice % 5 == 0) usleep(20);
    }
    for (int i = 0; i < count; i++) {
      if (kind_of(me, mix(seed, (uint64_t)i)) == PLAIN && (me->dice >> i & 1)) continue; /* a later wait includes it */
      wait_for(&queue, &me->entries[i].operation, me, turn, i);
      if (kind_of(me, mix(seed, (uint64_t)i)) != PLAIN) go_on(&queue, &segment, me, turn, i);
    }
    for (int i = count - 1; i >= 0; i--) {
      wait_for(&queue, &me->entries[i].operation, me, turn, i);
      check(me, mix(seed, (uint64_t)i), turn, i);
    }
    if (!allred_queue_idle(&queue)) fail(me, turn, count, "not idle after all");
  }
  /* Under way for ever: rank 0 does not come. Halted, nobody writes to the numbers. */
  for (int i = 0; i < 3 && me->rank; i++) put(&queue, &segment, me, 3, i);
  allred_queue_halt(&queue);
  for (int i = 0; i < 3 && me->rank; i++) memset(me->entries[i].numbers, 0, sizeof me->entries[i].numbers);
  atomic_fetch_add(&halted_ranks, 1);
  while (atomic_load(&halted_ranks) % me->ranks) usleep(100);
  return NULL;
}

int main(int count, char **arguments) {
  const int turns = count > 1 ? atoi(arguments[1]) : 200;
  for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
    pthread_t threads[MAX_RANKS];
    const size_t bytes = allred_segment_bytes(ranks, CHUNK_BYTES);
    char *memory = aligned_alloc(4096, bytes);
    memset(memory, 0, bytes);
    atomic_store(&halted_ranks, 0);
    for (int rank = 0; rank < ranks; rank++) {
      players[rank].rank = rank, players[rank].ranks = ranks, players[rank].turns = turns;
      players[rank].memory = memory, players[rank].dice = mix((uint64_t)rank, 7);
      if (pthread_create(&threads[rank], NULL, play, &players[rank])) return 2;
    }
    for (int rank = 0; rank < ranks; rank++) pthread_join(threads[rank], NULL);
    free(memory);
  }
  printf("queue: %d batches of 1, 2, 3 and 4 ranks checked\n", turns);
}
