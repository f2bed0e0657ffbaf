/*
 * Threads play the ranks of a node on one piece of memory, and every number that an operation leaves is checked.
 * Run by `make sanitize` under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.
 *
 *   driver [OPERATIONS [SEED]]   so many operations in each case
 *   driver start                 nothing: whether the sanitizer can start
 *   driver overrun               memory is a byte too short: only AddressSanitizer can tell, and must
 *
 * What an operation is follows from its case and its number alone (`plan`), so all ranks agree on it without a word,
 * and any rank can compute what any other gave. Sizes are those at which chunks end: nothing, one element, a chunk
 * exactly, one element more, several chunks.
 */
#define _GNU_SOURCE /* usleep, sched_yield */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "plan.h"

#ifndef SANITIZER
#define SANITIZER "no"
#endif

#define PATIENCE_S 20 /* without any progress: far more than a sanitizer or a busy machine takes */
#define UNWRITTEN 0xA5

typedef struct {
  const scene *scene;
  allred_segment segment;
  allred_operation operation;
  const plan *plan;
  uint64_t dice;             /* of what is this rank's own: its pace */
  size_t arena_used;         /* bytes of its arena that hold arrays of this operation */
  _Atomic int number, ended; /* for whoever watches */
  int covered[ALLRED_DTYPES][ALLRED_OPS], two_phase_count, differed, nan_count;
  int weighted_count, weighted_steps;
  int narrowed[2]; /* operations with a tensor that travels as a narrower one: reduced by each rank, or in parts */
} player;

static player players[MAX_RANKS];
static size_t missing; /* bytes of all memory */

static uint64_t throw(player *me) { return me->dice = allred_mix(me->dice, 1); }

static void show_ranks(int ranks) {
  for (int rank = 0; rank < ranks; rank++) {
    const allred_operation *op = &players[rank].operation;
    fprintf(stderr, "  rank %d: operation %d, round %d of %d, phase %d, ready ranks %d, status %d\n", rank,
            atomic_load(&players[rank].number), (int)op->round, (int)op->rounds, op->phase, op->ready_ranks,
            op->status);
  }
}

static void wrong(const player *me, const char *what, size_t where, size_t element) {
  fprintf(stderr, "%d ranks, chunks of %zu bytes: rank %d, operation %d (%s, seed %llu), %zu, element %zu: %s\n",
          me->scene->ranks, me->scene->chunk_bytes, me->segment.rank, atomic_load(&me->number),
          kind_names[me->plan->kind], (unsigned long long)me->plan->seed, where, element, what);
  show_ranks(me->scene->ranks);
  _exit(1);
}

/* ---- one operation of one rank */

static char *allocate(size_t bytes) {
  char *memory = malloc(bytes > missing ? bytes - missing : bytes);
  if (bytes) memset(memory, UNWRITTEN, bytes);
  return memory;
}

/* Some arrays lie in the arena of the rank, at any address. */
static char *allocate_array(player *me, const plan *p, size_t tensor, int out, size_t bytes) {
  const uint64_t dice = draw(p->seed, 17 + (uint64_t)out, tensor * MAX_RANKS + (uint64_t)me->segment.rank);
  const size_t at = me->arena_used + dice % 3 * 4;
  if (!p->arenas || (p->arenas == 2 && dice % 8 == 0) || at + bytes > ARENA_BYTES) return allocate(bytes);
  me->arena_used = (at + bytes + 63) / 64 * 64;
  if (bytes) memset(me->scene->arenas[me->segment.rank] + at, UNWRITTEN, bytes);
  return me->scene->arenas[me->segment.rank] + at;
}

static void free_array(const player *me, char *array) {
  const char *arena = me->scene->arenas[me->segment.rank];
  if (array < arena || array >= arena + ARENA_BYTES) free(array);
}

/* Free `expected`. Where headers differ, `out` must be as before: `before`, or unwritten. */
static void check(player *me, int status, const char *out, const char *before, char *expected, size_t bytes,
                  size_t item, size_t where) {
  const char *right = status == ALLRED_DIFFER ? before : expected;
  for (size_t i = 0; i < bytes; i++)
    if (out[i] != (right ? right[i] : (char)UNWRITTEN))
      wrong(me, status == ALLRED_DIFFER ? "written to though the headers differ" : "wrong number", where, i / item);
  free(expected);
}

#define AT(field) offsetof(allred_header, field)
static const size_t differing[] = {AT(problem), AT(kind), AT(op), AT(dtype), AT(root), AT(name), AT(words), AT(count)};

/* Alone, a rank differs only by a problem of its own. */
static allred_header make_header(const player *me, int differs) {
  const plan *p = me->plan;
  const int rank = me->segment.rank;
  allred_header header = {.kind = (uint8_t)p->kind, .op = (uint8_t)p->op, .root = p->root, .name = p->seed};
  header.rows = (uint64_t)rank;
  header.note = p->seed + (uint64_t)rank; /* each rank's own */
  if (p->is_step) {
    header.kind = ALLRED_KIND_STEP_ALLREDUCE;
    header.note = samples_of(p, me->scene->ranks, rank);
  } else if (p->weighted) {
    const double weight = weight_of(p, me->scene->ranks, rank);
    header.op |= ALLRED_WEIGHTED;
    memcpy(&header.note, &weight, sizeof weight);
  }
  if (differs) ((char *)&header)[differing[me->scene->ranks == 1 ? 0 : draw(p->seed, 10, 0) % 8]] += 1;
  return header;
}

static void rest(player *me) {
  const uint64_t dice = throw(me) % 64;
  if (dice == 0)
    usleep(20);
  else if (dice < 32)
    sched_yield();
}

/* Take the steps in one of the ways a caller may, at a pace of this rank's own. */
static int advance(player *me) {
  int status;
  switch (throw(me) % 3) {
  case 0:
    for (uint64_t moves = -1; (status = allred_run(&me->operation, (int64_t)PATIENCE_S * 1000000000)) == ALLRED_PENDING;
         moves = me->operation.progress_count)
      if (moves == me->operation.progress_count) wrong(me, "no progress", 0, 0);
    return status;
  case 1:
    while ((status = allred_run(&me->operation, 0)) == ALLRED_PENDING) rest(me);
    return status;
  default:
    while ((status = allred_step(&me->operation)) == ALLRED_PENDING || status == ALLRED_PROGRESSED) rest(me);
    return status;
  }
}

/* Expect that the block of the NaN is as before; how far it reaches follows from `out`. */
static void accept_unwritten_blocks(const player *me, const char *before, char *expected, allred_tensor tensor) {
  const size_t item = allred_dtype_bytes(tensor.dtype);
  const size_t nan = me->plan->nan_at * item, reach = ALLRED_BLOCK_BYTES;
  for (size_t at = nan > reach ? nan - nan % item - reach : 0; at < tensor.bytes && at < nan + reach; at += item)
    if (at == nan || memcmp(tensor.out + at, before + at, item) == 0) memcpy(expected + at, before + at, item);
}

static int allreduce(player *me, const plan *p, const allred_header *header) {
  allred_tensor tensors[MAX_TENSORS], given[MAX_TENSORS];
  char *before[MAX_TENSORS];
  const int ranks = me->scene->ranks, variant = (int)(throw(me) % (uint64_t)allred_variants());
  for (size_t t = 0; t < p->tensors; t++) {
    const size_t bytes = p->counts[t] * allred_dtype_bytes(p->dtypes[t]);
    char *in = allocate_array(me, p, t, 0, bytes), *out = p->in_place ? in : allocate_array(me, p, t, 1, bytes);
    write_numbers(me->scene, p, me->segment.rank, t, p->dtypes[t], 0, p->counts[t], in);
    if ((int)t == p->nan_tensor && me->segment.rank == p->nan_rank)
      write_nan(p->dtypes[t], in + p->nan_at * allred_dtype_bytes(p->dtypes[t]));
    before[t] = allocate(bytes);
    if (bytes) memcpy(before[t], out, bytes);
    tensors[t] = (allred_tensor){in, out, bytes, p->dtypes[t], wire_of(p, p->dtypes[t]), (uint32_t)t, 0};
    me->covered[p->dtypes[t]][p->op] = 1;
  }
  memcpy(given, tensors, sizeof given);
  allred_begin_allreduce(&me->operation, &me->segment, header, tensors, p->tensors, variant, p->op, ranks);
  me->operation.checks_finite = p->checks_finite;
  const int two_phase = !p->arenas && me->operation.transfer->reduce != NULL;
  me->two_phase_count += two_phase;
  const uint64_t sent = me->segment.sent, in_place = me->segment.in_place;
  uint64_t travels = 0;
  const int status = advance(me);
  memcpy(tensors, given, sizeof given);
  for (size_t t = 0; t < p->tensors; t++) {
    const size_t item = allred_dtype_bytes(p->dtypes[t]);
    travels += p->counts[t] * allred_dtype_bytes(tensors[t].wire ? tensors[t].wire : p->dtypes[t]);
    me->narrowed[two_phase] += tensors[t].wire != 0;
    char *expected = allocate(tensors[t].bytes);
    write_numbers(me->scene, p, -1, t, p->dtypes[t], 0, p->counts[t], expected);
    if (status == ALLRED_DONE && (int)t == p->nan_tensor) accept_unwritten_blocks(me, before[t], expected, tensors[t]);
    check(me, status, tensors[t].out, before[t], expected, tensors[t].bytes, item, t);
    free(before[t]);
    free_array(me, tensors[t].out);
    if (!p->in_place) free_array(me, (char *)tensors[t].in);
  }
  if (status == ALLRED_DONE && (int)me->operation.nonfinite != p->nan_tensor + 1)
    wrong(me, "wrong tensor is said not to be finite", me->operation.nonfinite, p->nan_at);
  me->weighted_count += status == ALLRED_DONE && p->weighted && p->tensors;
  me->weighted_steps += status == ALLRED_DONE && p->weighted && p->is_step && p->tensors;
  if (status == ALLRED_DONE && me->operation.samples != (p->is_step ? (uint64_t)ranks : 0))
    wrong(me, "wrong number of samples", (size_t)me->operation.samples, 0);
  me->nan_count += status == ALLRED_DONE && p->nan_tensor >= 0;
  if (status == ALLRED_DONE && me->segment.sent - sent + me->segment.in_place - in_place != travels)
    wrong(me, "wrong number of bytes sent", (size_t)(me->segment.sent - sent), 0);
  return status;
}

static int allgather(player *me, const plan *p, const allred_header *header) {
  const int ranks = me->scene->ranks, rank = me->segment.rank;
  uint64_t starts[MAX_RANKS + 1] = {0};
  for (int r = 0; r < ranks; r++)
    starts[r + 1] = starts[r] + (p->kind == BROADCAST && r != p->root
                                     ? 0
                                     : some_count(draw(p->seed, 11, (uint64_t)r), me->scene->chunk_bytes, ranks));
  const size_t bytes = starts[ranks], own = starts[rank + 1] - starts[rank];
  char *receive = allocate_array(me, p, 0, 1, bytes);
  char *send = p->in_place ? receive + starts[rank] : allocate_array(me, p, 0, 0, own);
  char *before = allocate(bytes), *expected = allocate(bytes);
  write_bytes(p, rank, 0, own, send);
  if (bytes) memcpy(before, receive, bytes);
  allred_begin_allgather(&me->operation, &me->segment, header, send, receive, starts);
  const int status = advance(me);
  for (int r = 0; r < ranks; r++) write_bytes(p, r, 0, starts[r + 1] - starts[r], expected + starts[r]);
  check(me, status, receive, before, expected, bytes, 1, 0);
  if (!p->in_place) free_array(me, send);
  free(before);
  free_array(me, receive);
  return status;
}

static int alltoall(player *me, const plan *p, const allred_header *header) {
  const int ranks = me->scene->ranks, rank = me->segment.rank;
  uint64_t from[MAX_RANKS + 1] = {0}, to[MAX_RANKS + 1] = {0}, sizes[MAX_RANKS][MAX_RANKS], largest = 0;
  for (int r = 0; r < ranks; r++)
    for (int s = 0; s < ranks; s++) {
      const uint64_t dice = draw(p->seed, 12, (uint64_t)(r * MAX_RANKS + s));
      sizes[r][s] = some_count(dice, me->scene->chunk_bytes / (size_t)ranks, ranks * ranks);
      if (sizes[r][s] > largest) largest = sizes[r][s];
    }
  for (int r = 0; r < ranks; r++) {
    from[r + 1] = from[r] + sizes[rank][r];
    to[r + 1] = to[r] + sizes[r][rank];
  }
  char *send = allocate(from[ranks]), *receive = allocate(to[ranks]), *expected = allocate(to[ranks]);
  for (int r = 0; r < ranks; r++) write_bytes(p, rank, r, sizes[rank][r], send + from[r]);
  allred_begin_alltoall(&me->operation, &me->segment, header, send, receive, from, to, largest);
  const int status = advance(me);
  for (int r = 0; r < ranks; r++) write_bytes(p, r, rank, sizes[r][rank], expected + to[r]);
  check(me, status, receive, NULL, expected, to[ranks], 1, 0);
  free(send);
  free(receive);
  return status;
}

static int reducescatter(player *me, const plan *p, const allred_header *header) {
  const int ranks = me->scene->ranks, rank = me->segment.rank, dtype = p->dtypes[0];
  const size_t item = allred_dtype_bytes(dtype), chunk = me->scene->chunk_bytes / (size_t)ranks / item;
  const int variant = (int)(throw(me) % (uint64_t)allred_variants());
  uint64_t starts[MAX_RANKS + 1] = {0};
  for (int r = 0; r < ranks; r++)
    starts[r + 1] = starts[r] + item * some_count(draw(p->seed, 13, (uint64_t)r), chunk, ranks * ranks);
  const size_t own = starts[rank + 1] - starts[rank];
  char *send = allocate_array(me, p, 0, 0, starts[ranks]), *receive = allocate_array(me, p, 0, 1, own);
  char *expected = allocate(own);
  write_numbers(me->scene, p, rank, 0, dtype, 0, starts[ranks] / item, send);
  allred_begin_reducescatter(&me->operation, &me->segment, header, send, receive, starts, dtype, variant, p->op, ranks);
  const int status = advance(me);
  write_numbers(me->scene, p, -1, 0, dtype, starts[rank] / item, own / item, expected);
  check(me, status, receive, NULL, expected, own, item, 0);
  free_array(me, send);
  free_array(me, receive);
  return status;
}

/* All headers can be read until this rank begins its next operation, also where they differ: errors are made of them.
 */
static void check_headers(const player *me, const plan *p) {
  if (p->odd < 0 && p->kind != EXCHANGE) return;
  for (int rank = 0; rank < me->scene->ranks; rank++) {
    const allred_header *header = allred_segment_header(&me->segment, rank, me->operation.number);
    if (header->rows != (uint64_t)rank || (p->odd < 0 && header->note != p->seed + (uint64_t)rank))
      wrong(me, "another operation's header", (size_t)rank, 0);
  }
}

static void operate(player *me, uint64_t seed) {
  const int rank = me->segment.rank;
  const plan agreed = make_plan(me->scene, seed), other = make_plan(me->scene, ~seed);
  const plan *p = me->plan = rank == agreed.odd && seed & 1 ? &other : &agreed;
  const allred_header header = make_header(me, rank == agreed.odd);
  int status;
  me->segment.copy_policy.streaming = seed % 3 ? 0 : 4; /* both ways to copy */
  me->segment.arenas.base = agreed.arenas ? me->scene->arenas : NULL;
  me->arena_used = 0;
  rest(me);
  switch (p->kind) {
  case ALLREDUCE:
    status = allreduce(me, p, &header);
    break;
  case ALLTOALL:
    status = alltoall(me, p, &header);
    break;
  case REDUCESCATTER:
    status = reducescatter(me, p, &header);
    break;
  case EXCHANGE:
    allred_begin_exchange(&me->operation, &me->segment, &header);
    status = advance(me);
    break;
  default:
    status = allgather(me, p, &header);
  }
  check_headers(me, &agreed);
  if (status != (agreed.odd < 0 ? ALLRED_DONE : ALLRED_DIFFER)) wrong(me, "wrong status", (size_t)status, 0);
  me->differed += status == ALLRED_DIFFER;
}

/* ---- cases */

static void *play(void *argument) {
  player *me = argument;
  for (int number = 1; number <= me->scene->operations; number++) {
    atomic_store_explicit(&me->number, number, memory_order_relaxed);
    operate(me, draw(me->scene->seed, (uint64_t)number, 0));
  }
  atomic_store_explicit(&me->ended, 1, memory_order_relaxed);
  return NULL;
}

/* Return when all ranks have ended; end the program when none gets on. */
static void watch(int ranks) {
  for (int last = -1, idle_ms = 0;; idle_ms++) {
    int sum = 0, ended = 0;
    for (int rank = 0; rank < ranks; rank++) {
      sum += atomic_load_explicit(&players[rank].number, memory_order_relaxed);
      ended += atomic_load_explicit(&players[rank].ended, memory_order_relaxed);
    }
    if (ended == ranks) return;
    if (sum != last) last = sum, idle_ms = 0;
    if (idle_ms > 2 * PATIENCE_S * 1000) {
      fprintf(stderr, "%d ranks: none has got on for %d s\n", ranks, 2 * PATIENCE_S);
      show_ranks(ranks);
      abort();
    }
    usleep(1000);
  }
}

static void run_case(scene *scene) {
  const size_t bytes = allred_segment_bytes(scene->ranks, scene->chunk_bytes);
  pthread_t threads[MAX_RANKS];
  scene->memory = aligned_alloc(4096, bytes);
  memset(scene->memory, 0, bytes);
  for (int rank = 0; rank < scene->ranks; rank++) scene->arenas[rank] = malloc(ARENA_BYTES);
  for (int rank = 0; rank < scene->ranks; rank++) {
    player *me = &players[rank];
    me->scene = scene;
    me->segment = (allred_segment){
        .memory = scene->memory, .rank = rank, .ranks = scene->ranks, .chunk_bytes = scene->chunk_bytes};
    me->segment.arenas = (allred_arenas){scene->arenas, ARENA_BYTES, MIN_IN_PLACE_BYTES};
    me->segment.may_sleep = 1;
    if (draw(scene->seed, 15, (uint64_t)rank) % 2) me->segment.contended_until = INT64_MAX; /* every wait sleeps */
    me->dice = draw(scene->seed, 14, (uint64_t)rank);
    me->number = me->ended = 0;
    if (pthread_create(&threads[rank], NULL, play, me)) exit(2);
  }
  watch(scene->ranks);
  for (int rank = 0; rank < scene->ranks; rank++) pthread_join(threads[rank], NULL);
  for (int rank = 0; rank < scene->ranks; rank++) free(scene->arenas[rank]);
  free(scene->memory);
}

int main(int count, char **arguments) {
  static const int ranks[] = {1, 2, 3, 4, 8};
  static const size_t chunks[] = {0, 1024, 4096}; /* and no less than the smallest, 64 bytes a rank */
  if (count > 1 && strcmp(arguments[1], "start") == 0) return 0;
  missing = count > 1 && strcmp(arguments[1], "overrun") == 0;
  const int operations = count > 1 && !missing ? atoi(arguments[1]) : 200;
  const uint64_t seed = count > 2 ? strtoull(arguments[2], NULL, 0) : 1;
  long checked = 0;
  for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
    for (size_t j = 0; j < sizeof chunks / sizeof *chunks; j++) {
      const size_t smallest = (size_t)ranks[i] * ALLRED_LINE;
      scene scene = {ranks[i], operations, chunks[j] > smallest ? chunks[j] : smallest, draw(seed, i, j), NULL, {NULL}};
      run_case(&scene);
      checked += operations;
    }
  for (int dtype = 0; dtype < ALLRED_DTYPES; dtype++)
    for (int op = 1; op < ALLRED_OPS; op++)
      if (allred_reduce_kernel(0, dtype, op) && !players[0].covered[dtype][op])
        return fprintf(stderr, "too few operations: dtype %d with operator %d is not among them\n", dtype, op), 1;
  if (!players[0].narrowed[0] || !players[0].narrowed[1])
    return fprintf(stderr, "too few operations: none of some kind travels as a narrower one\n"), 1;
  if (!players[0].weighted_count || !players[0].weighted_steps)
    return fprintf(stderr, "too few operations: none of some kind has weights\n"), 1;
  if (!players[0].nan_count) return fprintf(stderr, "too few operations: none has a NaN\n"), 1;
  if (!players[0].segment.in_place) return fprintf(stderr, "too few operations: none is reduced in place\n"), 1;
  if (!players[0].segment.read_in_place) return fprintf(stderr, "too few operations: none reads from arenas\n"), 1;
  if (!players[0].two_phase_count) return fprintf(stderr, "no rank reduced for others: LARGE_BYTES is too small\n"), 1;
  printf("driver, %s sanitizer: %ld operations of 1, 2, 3, 4 and 8 ranks checked, %d with headers that differ; seed "
         "%llu\n",
         SANITIZER, checked, players[0].differed, (unsigned long long)seed);
}
