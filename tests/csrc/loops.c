/*
 * The library's allreduce against loops written by hand for exactly two ranks: float32, sum, in place; two processes.
 * `make loops`.
 *
 *   ring      private arrays. For each chunk, in slots in turn: copy it to this rank's slot, publish it, wait for the
 *             slot of the other rank, add that to the array
 *   in place  arrays in memory that both ranks map. Meet, add half of the arrays and write it to both, meet
 *
 * Nothing else: no header, no check, no table of tensors, no limit on a wait but alarm().
 *
 *   loops [ROUNDS]   so many rounds, loops and library in turn; the medians of the times per operation are printed
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS, sched_yield, clock_gettime */
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "operation.h"

#define SLOT_BYTES ((size_t)128 << 10)
#define SLOTS ALLRED_RING_CHUNKS /* as long as the library's: with 2, 256 KiB to 4 MiB take 2.5 times as long */
#define LARGEST ((size_t)64 << 20)
#define ROUND_NS 4000000 /* what an operation is repeated for in a round */
#define MAX_ROUNDS 101
#define LIMIT_S 300
#define SPINS 40 /* then yield */

#if defined __x86_64__ && defined __GNUC__
#define VECTORS __attribute__((target_clones("avx2", "default")))
#define PAUSE __builtin_ia32_pause()
#else
#define VECTORS
#define PAUSE (void)0
#endif

/* Up to INLINE bytes travel in the line of the flag. */
#define INLINE (ALLRED_LINE - sizeof(uint64_t))
typedef struct {
  _Alignas(ALLRED_LINE) _Atomic uint64_t flag;
  char few[INLINE];
  char data[SLOT_BYTES];
  char apart[ALLRED_LINE];
} slot;

typedef struct {
  slot slots[2][SLOTS]; /* of each rank, in turn */
  _Atomic uint64_t met[2][8], begun[2][8], ended[2][8];
} shared;

static int rank;
static shared *common;
static uint64_t chunks; /* since the start */

/* ---- the loop */

static void wait_for(_Atomic uint64_t *flag, uint64_t value) {
  for (int spins = 0; atomic_load_explicit(flag, memory_order_acquire) < value; spins++)
    if (spins < SPINS)
      PAUSE;
    else
      sched_yield();
}

VECTORS static void add(float *restrict to, const float *restrict from, size_t count) {
  for (size_t i = 0; i < count; i++) to[i] += from[i];
}

static void loop(float *array, size_t bytes) {
  for (size_t at = 0; at < bytes; at += SLOT_BYTES) {
    const size_t length = bytes - at < SLOT_BYTES ? bytes - at : SLOT_BYTES;
    const uint64_t chunk = ++chunks;
    slot *mine = &common->slots[rank][chunk % SLOTS], *other = &common->slots[!rank][chunk % SLOTS];
    float *part = array + at / sizeof *array;
    memcpy(length <= INLINE ? mine->few : mine->data, part, length);
    atomic_store_explicit(&mine->flag, chunk, memory_order_release);
    wait_for(&other->flag, chunk);
    add(part, (const float *)(const void *)(length <= INLINE ? other->few : other->data), length / sizeof *array);
  }
}

static char *arenas[2]; /* of each rank: LARGEST bytes, and the arrays of `in place` */

VECTORS static void add_to_both(float *a, float *b, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; i++) a[i] = b[i] = a[i] + b[i];
}

static void loop_in_place(float *array, size_t bytes) {
  static uint64_t calls;
  const size_t count = bytes / sizeof *array, half = count / 2 / 16 * 16;
  const size_t start = rank ? half : 0, end = rank ? count : half;
  atomic_store_explicit(common->begun[rank], ++calls, memory_order_release);
  wait_for(common->begun[!rank], calls);
  add_to_both((float *)(void *)arenas[0] + start, (float *)(void *)arenas[1] + start, end - start);
  atomic_store_explicit(common->ended[rank], calls, memory_order_release);
  wait_for(common->ended[!rank], calls);
}

/* ---- the library */

static allred_segment segment;

static void library(float *array, size_t bytes) {
  allred_tensor tensor = {(const char *)array, (char *)array, bytes, ALLRED_FLOAT32, 0, 0, 0};
  const allred_header header = {.dtype = ALLRED_FLOAT32, .count = bytes / sizeof *array, .root = -1};
  allred_operation operation;
  allred_begin_allreduce(&operation, &segment, &header, &tensor, 1, allred_variants() - 1, ALLRED_SUM, 2);
  int status;
  while ((status = allred_run(&operation, (int64_t)LIMIT_S * 1000000000)) == ALLRED_PENDING) continue;
  if (status != ALLRED_DONE) exit(1);
}

/* ---- measurement */

static double now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static void meet(void) {
  static uint64_t times;
  atomic_store_explicit(common->met[rank], ++times, memory_order_release);
  wait_for(common->met[!rank], times);
}

typedef void (*way)(float *, size_t);

static int verified(way reduce, float *array, size_t bytes) {
  const size_t count = bytes / sizeof *array;
  for (size_t i = 0; i < count; i++) array[i] = (float)(i % 1000 + (size_t)rank * 7);
  reduce(array, bytes);
  for (size_t i = 0; i < count; i++)
    if (array[i] != (float)(2 * (i % 1000) + 7)) {
      fprintf(stderr, "rank %d: wrong number at %zu of %zu\n", rank, i, count);
      return 0;
    }
  memset(array, 0, bytes); /* what is timed stays 0, and warm */
  return 1;
}

static double time_us(way reduce, float *array, size_t bytes, int repeats) {
  meet();
  const double start = now_ns();
  for (int i = 0; i < repeats; i++) reduce(array, bytes);
  return (now_ns() - start) / repeats / 1e3;
}

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *times, int count) {
  qsort(times, (size_t)count, sizeof *times, ascending);
  return times[count / 2];
}

typedef struct {
  const char *name;
  way loop;
  int in_place;
} comparison;

static int measure(const comparison *comparison, int rounds) {
  static const size_t sizes[] = {4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, LARGEST};
  double loop_us[MAX_ROUNDS], library_us[MAX_ROUNDS];
  float *array = (float *)(void *)(comparison->in_place ? arenas[rank] : aligned_alloc(4096, LARGEST));
  const way loop = comparison->loop;
  segment.arenas = (allred_arenas){comparison->in_place ? arenas : NULL, LARGEST, ALLRED_IN_PLACE_BYTES};
  if (rank == 0) printf("%-9s %12s %12s %12s %8s\n", comparison->name, "bytes", "loop us", "library us", "ratio");
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    if (!verified(loop, array, sizes[i]) || !verified(library, array, sizes[i])) return 1;
    /* About 10 GB/s, and a microsecond for each operation; both ranks must repeat alike. */
    const int repeats = 1 + (int)(ROUND_NS / (1000 + sizes[i] / 10)) / (rounds == 1 ? 100 : 1);
    for (int round = 0; round < rounds; round++) {
      loop_us[round] = time_us(loop, array, sizes[i], repeats);
      library_us[round] = time_us(library, array, sizes[i], repeats);
    }
    const double a = median(loop_us, rounds), b = median(library_us, rounds);
    if (rank == 0) printf("%9s %12zu %12.2f %12.2f %8.2f\n", "", sizes[i], a, b, b / a);
    fflush(stdout);
  }
  return 0;
}

int main(int count, char **arguments) {
  const int rounds = count > 1 ? atoi(arguments[1]) : 21;
  if (rounds < 1 || rounds > MAX_ROUNDS) return fprintf(stderr, "1 to %d rounds\n", MAX_ROUNDS), 2;
  const size_t bytes = allred_segment_bytes(2, SLOT_BYTES);
  common = mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  segment = (allred_segment){.ranks = 2, .chunk_bytes = SLOT_BYTES};
  segment.memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  arenas[0] = mmap(NULL, 2 * LARGEST, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  arenas[1] = arenas[0] + LARGEST;
  if (common == MAP_FAILED || segment.memory == MAP_FAILED || arenas[0] == MAP_FAILED) return perror("mmap"), 2;
  const pid_t child = fork();
  if (child < 0) return perror("fork"), 2;
  rank = segment.rank = child == 0;
  if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(LIMIT_S);
  static const comparison ring = {"ring", loop, 0}, in_place = {"in place", loop_in_place, 1};
  const int failed = measure(&ring, rounds) || measure(&in_place, rounds);
  if (child == 0 && failed) kill(getppid(), SIGTERM); /* it would wait */
  if (child == 0) return failed;
  int status = 1;
  if (failed) kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return failed || status != 0;
}
