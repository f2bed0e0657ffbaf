/*
 * Explores all orders in which ranks can take the steps of operation.h, on the real code.
 *
 * One thread plays all ranks. A state is the shared memory, and each rank's operation and arrays; from each state every
 * rank that can move does, depth first, and what it changed (its own part of all that, and arrays in the arenas of all
 * ranks) is put back. A state seen before
 * is not entered again. (It is known by a hash of 64 bits: of a million states two are taken for one with a probability
 * of 3e-8.)
 * Checked: every number that an operation leaves, and that in every state some rank can move until all have ended.
 *
 * Why whole steps are enough. Let one rank write to a place while another reads it. Whether a rank may take a step is
 * decided by flags alone, and a rank raises its flag at the end of a step: nobody can tell that the reader has begun.
 * So the writer could as well have written before the reader began, and that is an order of whole steps. Here no two
 * chunks hold the same numbers, so the reader's result is wrong in it. Turned around: where all orders give right
 * results, flags lead from each reading to the writing that follows it; they are released and acquired, and so is the
 * order of the memory behind them (driver.c runs under ThreadSanitizer to show that).
 *
 * The library's ring is longer than it needs to be; here it has two places, and then three (mutations.h). In the end
 * one rule of the protocol is broken at a time, and the checks must notice.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mutations.h"
#include "operation.h"

/* ..._PRIVATE: one rank holds its data in private memory, so all pass it through the ring after the first round. */
enum {
  EXCHANGE,
  ONE_PHASE,
  TWO_PHASES,
  ALLGATHER,
  BROADCAST,
  ALLTOALL,
  REDUCESCATTER,
  MISMATCH,
  IN_PLACE,
  IN_PLACE_PRIVATE,
  UNEVEN_STEP,
  ALLGATHER_IN_PLACE,
  ALLGATHER_PRIVATE,
  REDUCESCATTER_IN_PLACE,
  KINDS
};
static const char *const kind_names[] = {"exchange",
                                         "one-phase allreduce",
                                         "two-phase allreduce",
                                         "allgather",
                                         "broadcast",
                                         "alltoall",
                                         "reducescatter",
                                         "mismatch",
                                         "allreduce in place",
                                         "allreduce of a private tensor",
                                         "step with uneven samples",
                                         "allgather in place",
                                         "allgather of private data",
                                         "reducescatter in place"};

/* Whether this rank holds its data in its arena. */
static int in_arena(int kind, int rank) {
  if (kind == IN_PLACE_PRIVATE || kind == ALLGATHER_PRIVATE) return rank == 0;
  return kind == IN_PLACE || kind == ALLGATHER_IN_PLACE || kind == REDUCESCATTER_IN_PLACE;
}

static int is_allgather(int kind) {
  return kind == ALLGATHER || kind == ALLGATHER_IN_PLACE || kind == ALLGATHER_PRIVATE;
}

static int is_reducescatter(int kind) { return kind == REDUCESCATTER || kind == REDUCESCATTER_IN_PLACE; }

#define MAX_RANKS 3
#define MAX_ROUNDS 4
#define OPERATIONS 3
#define CHUNK_BYTES(ranks) ((size_t)(ranks) * ALLRED_LINE)
#define GIVEN_BYTES (MAX_ROUNDS * CHUNK_BYTES(MAX_RANKS))
#define MEMORY_BYTES (MAX_RANKS * 16384)
/* Moves of all ranks: a round has up to five steps, and each of its two waits can advance by one rank. */
#define MAX_MOVES (MAX_RANKS * OPERATIONS * (MAX_ROUNDS + 1) * (5 + 2 * MAX_RANKS))
#define TABLE (1 << 20)

typedef struct {
  _Alignas(32) allred_segment segment; /* a multiple of what hash() takes at once */
  allred_operation operation;
  allred_tensor tensor;
  int ended; /* operations */
  uint64_t starts[MAX_RANKS + 1], receive_starts[MAX_RANKS + 1];
  uint64_t given[GIVEN_BYTES / 8], got[MAX_RANKS * GIVEN_BYTES / 8];
} player;

static struct {
  int ranks, kinds[OPERATIONS], rounds[OPERATIONS];
} config;
static player players[MAX_RANKS];
static _Alignas(4096) char memory[MEMORY_BYTES];
static _Alignas(64) char arenas[MAX_RANKS][GIVEN_BYTES];
static char *const arena_base[MAX_RANKS] = {arenas[0], arenas[1], arenas[2]};
static size_t area_bytes;
static const char *failure;

static struct {
  player player;
  char arenas[MAX_RANKS][GIVEN_BYTES];
  char area[MEMORY_BYTES / MAX_RANKS];
} saved[MAX_MOVES + 1];

/* ---- operations */

/* What a rank gives: different at every position of every rank in every operation. */
static uint64_t number(int operation, int rank, size_t i) {
  return allred_mix(allred_mix(allred_mix(0, (uint64_t)operation), (uint64_t)rank), i);
}

/* Four in all, so weights are exact; the last rank has more than the others. */
static uint64_t samples_of(int rank) { return rank < config.ranks - 1 ? 1 : (uint64_t)(5 - config.ranks); }

static uint64_t sum(int operation, size_t i) {
  uint64_t all = 0;
  for (int rank = 0; rank < config.ranks; rank++) all += number(operation, rank, i);
  return all;
}

/* As `number` and `sum`, in a step. */
static double step_number(int operation, int rank, size_t i) { return (double)(number(operation, rank, i) % 1024 * 4); }

static double step_mean(int operation, size_t i) {
  double all = 0;
  for (int rank = 0; rank < config.ranks; rank++) all += step_number(operation, rank, i) * (double)samples_of(rank) / 4;
  return all;
}

/* The last round is not full, by one number. */
static size_t bytes_of(int operation, size_t chunk) { return (size_t)config.rounds[operation] * chunk - 8; }

static const allred_transfer *transfer_of(int ranks, size_t bytes) {
  allred_segment segment = {.ranks = ranks, .chunk_bytes = CHUNK_BYTES(ranks)};
  allred_tensor tensor = {.bytes = bytes, .dtype = ALLRED_INT64};
  allred_operation operation;
  allred_begin_allreduce(&operation, &segment, &(allred_header){0}, &tensor, 1, 0, ALLRED_SUM, 1);
  return operation.transfer;
}

static void begin(player *me) {
  static const allred_transfer *one_phase, *two_phases;
  const int operation = me->ended, ranks = config.ranks, rank = me->segment.rank;
  if (operation == OPERATIONS) return;
  const int kind = config.kinds[operation];
  const size_t chunk = me->segment.chunk_bytes, bytes = bytes_of(operation, chunk),
               part = bytes_of(operation, ALLRED_LINE);
  const int in_place = kind == TWO_PHASES || kind == MISMATCH;
  allred_header header = {.kind = (uint8_t)kind, .problem = kind == MISMATCH && rank == ranks - 1};
  if (kind == UNEVEN_STEP) header.kind = ALLRED_KIND_STEP_ALLREDUCE, header.note = samples_of(rank);
  if (!one_phase) one_phase = transfer_of(2, 8), two_phases = transfer_of(MAX_RANKS, (size_t)1 << 40);
  if (one_phase->reduce || !two_phases->reduce) exit((fprintf(stderr, "model: which allreduce is which?\n"), 2));
  for (size_t i = 0; i < GIVEN_BYTES / 8; i++) {
    const double in_step = step_number(operation, rank, i);
    me->given[i] = number(operation, rank, i);
    if (kind == UNEVEN_STEP) memcpy(&me->given[i], &in_step, sizeof in_step);
  }
  memset(me->got, 0, sizeof me->got);
  me->tensor =
      (allred_tensor){(char *)me->given, (char *)(in_place ? me->given : me->got), bytes, ALLRED_INT64, 0, 0, 0};
  memcpy(arenas[rank], me->given, sizeof me->given);
  if (in_arena(kind, rank)) me->tensor.in = me->tensor.out = arenas[rank];
  me->segment.arenas = (allred_arenas){in_arena(kind, 0) ? arena_base : NULL, GIVEN_BYTES, 1};
  for (int r = 0; r < ranks; r++) {
    const size_t share = kind == BROADCAST ? (r == 0) * bytes : is_allgather(kind) ? bytes : part;
    me->starts[r + 1] = me->receive_starts[r + 1] = me->starts[r] + share;
  }
  const char *send = in_arena(kind, rank) ? arenas[rank] : (const char *)me->given;
  char *receive = (char *)me->got;
  allred_operation *op = &me->operation;
  switch (kind) {
  case EXCHANGE:
    allred_begin_exchange(op, &me->segment, &header);
    break;
  case ONE_PHASE:
  case TWO_PHASES:
  case MISMATCH:
    allred_begin_allreduce(op, &me->segment, &header, &me->tensor, 1, 0, ALLRED_SUM, 1);
    op->transfer = kind == ONE_PHASE ? one_phase : two_phases;
    break;
  case IN_PLACE:
  case IN_PLACE_PRIVATE:
    allred_begin_allreduce(op, &me->segment, &header, &me->tensor, 1, 0, ALLRED_SUM, 1);
    break;
  case UNEVEN_STEP: /* a divisor of 1: the mean is a sum of weighted numbers */
    me->tensor.dtype = ALLRED_FLOAT64;
    allred_begin_allreduce(op, &me->segment, &header, &me->tensor, 1, 0, ALLRED_AVERAGE, 1);
    break;
  case ALLTOALL:
    allred_begin_alltoall(op, &me->segment, &header, send, receive, me->starts, me->receive_starts, part);
    break;
  case REDUCESCATTER:
  case REDUCESCATTER_IN_PLACE:
    allred_begin_reducescatter(op, &me->segment, &header, send, receive, me->starts, ALLRED_INT64, 0, ALLRED_SUM, 1);
    break;
  default:
    allred_begin_allgather(op, &me->segment, &header, send, receive, me->starts);
  }
}

static int right(const player *me, int status) {
  const int operation = me->ended, kind = config.kinds[operation], ranks = config.ranks, rank = me->segment.rank;
  const size_t all = bytes_of(operation, me->segment.chunk_bytes) / 8, part = bytes_of(operation, ALLRED_LINE) / 8;
  if (status != (kind == MISMATCH ? ALLRED_DIFFER : ALLRED_DONE)) return 0;
  if (kind == ONE_PHASE || kind == TWO_PHASES || kind == IN_PLACE || kind == IN_PLACE_PRIVATE)
    for (size_t i = 0; i < all; i++)
      if (((const uint64_t *)(const void *)me->tensor.out)[i] != sum(operation, i)) return 0;
  if (kind == UNEVEN_STEP)
    for (size_t i = 0; i < all; i++)
      if (((const double *)(const void *)me->tensor.out)[i] != step_mean(operation, i)) return 0;
  if (is_reducescatter(kind))
    for (size_t i = 0; i < part; i++)
      if (me->got[i] != sum(operation, me->starts[rank] / 8 + i)) return 0;
  for (int r = 0; r < (kind == BROADCAST ? 1 : ranks); r++) {
    if (is_allgather(kind) || kind == BROADCAST)
      for (size_t i = 0; i < all; i++)
        if (me->got[me->starts[r] / 8 + i] != number(operation, r, i)) return 0;
    if (kind == ALLTOALL)
      for (size_t i = 0; i < part; i++)
        if (me->got[me->starts[r] / 8 + i] != number(operation, r, me->starts[rank] / 8 + i)) return 0;
  }
  return 1;
}

/* One step of a rank, and the next operation begun if it was the last; whether anything changed. */
static int move(player *me) {
  if (me->ended == OPERATIONS) return 0;
  const int met = me->operation.ready_ranks, status = allred_step(&me->operation);
  me->operation.waited_ns = 0; /* a time is no part of a state */
  if (status == ALLRED_PENDING) return me->operation.ready_ranks != met;
  if (status == ALLRED_PROGRESSED) return 1;
  if (!right(me, status)) failure = "wrong result";
  me->ended++;
  begin(me);
  return 1;
}

/* ---- the search */

static struct {
  uint64_t key;
  double orders;
} table[TABLE];
static size_t used[TABLE], known; /* positions in the table */
static uint64_t states, edges;

static uint64_t hash(uint64_t start, const void *data, size_t bytes) {
  uint64_t lanes[4] = {start, 1, 2, 3}, words[4];
  for (size_t at = 0; at + sizeof words <= bytes; at += sizeof words) {
    memcpy(words, (const char *)data + at, sizeof words);
    for (int lane = 0; lane < 4; lane++) lanes[lane] = allred_mix(lanes[lane], words[lane]);
  }
  return allred_mix(allred_mix(allred_mix(lanes[0], lanes[1]), lanes[2]), lanes[3]);
}

static uint64_t hash_rank(int rank) {
  const uint64_t own = hash((uint64_t)rank, memory + (size_t)rank * area_bytes, area_bytes);
  return hash(hash(own, arenas[rank], GIVEN_BYTES), &players[rank], sizeof(player));
}

/* In how many orders things can go on from this state. hashes: of each rank's part of it. */
static double explore(int depth, const uint64_t *hashes) {
  uint64_t key = 0;
  for (int rank = 0; rank < config.ranks; rank++) key = allred_mix(key, hashes[rank]);
  size_t at = key % TABLE;
  while (table[at].key && table[at].key != key) at = (at + 1) % TABLE;
  if (table[at].key) return table[at].orders;
  if (known == TABLE / 2) exit((fprintf(stderr, "model: TABLE is too small\n"), 2));
  table[at].key = key;
  used[known++] = at;
  double orders = 0;
  int ended = 0;
  for (int rank = 0; rank < config.ranks && !failure; rank++) {
    player *me = &players[rank];
    char *area = memory + (size_t)rank * area_bytes;
    ended += me->ended == OPERATIONS;
    memcpy(&saved[depth].player, me, sizeof *me);
    memcpy(saved[depth].area, area, area_bytes);
    memcpy(saved[depth].arenas, arenas, sizeof arenas);
    const int writes_to_all = me->ended < OPERATIONS && config.kinds[me->ended] == IN_PLACE;
    if (!move(me)) continue;
    edges++;
    uint64_t next[MAX_RANKS];
    memcpy(next, hashes, sizeof next);
    next[rank] = hash_rank(rank);
    for (int other = 0; writes_to_all && other < config.ranks; other++) next[other] = hash_rank(other);
    if (!failure) orders += explore(depth + 1, next);
    memcpy(me, &saved[depth].player, sizeof *me);
    memcpy(area, saved[depth].area, area_bytes);
    memcpy(arenas, saved[depth].arenas, sizeof arenas);
  }
  if (ended == config.ranks)
    orders = 1;
  else if (orders == 0 && !failure)
    failure = "no rank can move";
  for (int rank = 0; ended == config.ranks && rank < config.ranks; rank++)
    if (hash_rank(rank) != hashes[rank]) failure = "written to another rank's area";
  return table[at].orders = orders;
}

/* Go through all orders of one configuration; in how many ways it can go. */
static double search(int ranks, const int *kinds, const int *rounds) {
  const allred_segment segment = {.memory = memory, .ranks = ranks, .chunk_bytes = CHUNK_BYTES(ranks)};
  uint64_t hashes[MAX_RANKS] = {0};
  config.ranks = ranks;
  memcpy(config.kinds, kinds, sizeof config.kinds);
  memcpy(config.rounds, rounds, sizeof config.rounds);
  area_bytes = allred_segment_bytes(1, segment.chunk_bytes);
  if (area_bytes > MEMORY_BYTES / MAX_RANKS) exit((fprintf(stderr, "model: MEMORY_BYTES is too small\n"), 2));
  memset(memory, 0, sizeof memory);
  memset(players, 0, sizeof players);
  memset(arenas, 0, sizeof arenas);
  for (int rank = 0; rank < ranks; rank++) {
    players[rank].segment = segment;
    players[rank].segment.rank = rank;
    begin(&players[rank]);
    hashes[rank] = hash_rank(rank);
  }
  const double orders = explore(0, hashes);
  states += known;
  while (known) table[used[--known]].key = 0;
  return orders;
}

/* Every so many of all sequences of three kinds, with some choices of the rounds; the most orders of one. */
static double search_all(int ranks, int every, int choices) {
  double most = 0;
  for (int i = 0; i < KINDS * KINDS * KINDS; i += every)
    for (int choice = 0; choice < choices && !failure; choice++) {
      const uint64_t dice = allred_mix(allred_mix(0, (uint64_t)i), (uint64_t)choice);
      const int kinds[] = {i % KINDS, i / KINDS % KINDS, i / KINDS / KINDS};
      int rounds[OPERATIONS];
      for (int k = 0; k < OPERATIONS; k++)
        rounds[k] = kinds[k] == EXCHANGE ? 1 : 1 + (int)(dice >> 8 * k & 255) % MAX_ROUNDS;
      const double orders = search(ranks, kinds, rounds);
      if (orders > most) most = orders;
    }
  return most;
}

static void show_failure(void) {
  printf("%s; %d ranks", failure, config.ranks);
  for (int i = 0; i < OPERATIONS; i++) printf(", %s (%d)", kind_names[config.kinds[i]], config.rounds[i]);
  puts("");
}

int main(void) {
  for (places = 2; places <= 3; places++)
    for (int ranks = 2; ranks <= MAX_RANKS; ranks++) {
      states = edges = 0;
      const double most = search_all(ranks, places == 2 ? 1 : 5, ranks == 2 ? 4 : 1);
      if (failure) return show_failure(), 1;
      printf("model, %d ranks, %d places: %llu states, %llu steps, up to %.0e orders of them: all right\n", ranks,
             places, (unsigned long long)states, (unsigned long long)edges, most);
    }
  places = 2;
  for (mutation = 1; mutation < MUTATIONS; mutation++) {
    for (int ranks = 2; ranks <= MAX_RANKS && !failure; ranks++) search_all(ranks, 1, 1);
    printf("  mutation, %s: ", mutation_names[mutation]);
    if (!failure) return puts("NOT NOTICED"), 1;
    show_failure();
    failure = NULL;
  }
  static const int in_place[] = {IN_PLACE, ALLGATHER_IN_PLACE, REDUCESCATTER_IN_PLACE}, rounds[] = {2, 1, 3};
  static const int noticed[] = {NO_FIRST_WAIT, NO_REDUCE_WAIT, ONLY_NEIGHBOURS_WAIT};
  for (size_t i = 0; i < 9; i++) {
    const int kind = in_place[i / 3], kinds[] = {kind, kind, kind};
    mutation = noticed[i % 3];
    search(MAX_RANKS, kinds, rounds);
    printf("  mutation, %s, %s: ", kind_names[kind], mutation_names[mutation]);
    if (!failure) return puts("NOT NOTICED"), 1;
    show_failure();
    failure = NULL;
  }
}
