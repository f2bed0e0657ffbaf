/*
 * The floor of a step with a parameter server, as loops written by hand: 25.6 M float32 (ResNet-50), SGD, one worker
 * and one server, two processes. `make loops`. Compare with `python -m allred bench ps`.
 *
 *   slots      as allred does outside of the worker's arena: the worker copies the gradient, cell by cell, into 8
 *              slots; the server updates its parameters from the slots; the worker copies each updated cell
 *   in place   as allred does in the arena: the server reads the gradient there; the worker only copies parameters
 *
 *   check      nothing; "worker", as allred does: the worker looks for NaN in the whole gradient before anything is
 *              applied; "both": each process looks in one half, which takes a gradient that both map
 *
 * No header, no table of tensors, no limit on a wait but alarm(). The gradient is rewritten before each step.
 *
 *   ps_loops [ROUNDS]   so many rounds, all loops in turn; the medians of the worker's times per step are printed
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

#include "copy.h"
#include "reduce.h"
#include "scan.h"

#define ELEMENTS ((size_t)25557032)
#define CELL ((size_t)131072) /* elements; CELL_BYTES of ps/shard.py */
#define CELLS ((ELEMENTS + CELL - 1) / CELL)
#define SLOTS 8
#define LR 0.5f
#define LARGEST_FINITE 0x7f7fffff
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

typedef struct {
  _Alignas(128) _Atomic uint64_t count; /* grows over all steps */
} counter;

typedef struct {
  counter met[2], begun, checked, sent, given;
} shared;

typedef struct {
  const char *name, *check;
  int in_place, checkers; /* processes that look for NaN */
} variant;

static const variant variants[] = {{"slots", "-", 0, 0},
                                   {"slots", "worker", 0, 1},
                                   {"in place", "-", 1, 0},
                                   {"in place", "worker", 1, 1},
                                   {"in place", "both", 1, 2}};
#define VARIANTS (sizeof variants / sizeof *variants)

static shared *common;
static float *gradient, *shard, *slots, *params; /* params: the worker's */

static int reached(const counter *counter, uint64_t value) {
  return atomic_load_explicit(&counter->count, memory_order_acquire) >= value;
}

static void wait_for(const counter *counter, uint64_t value) {
  for (int spins = 0; !reached(counter, value); spins++)
    if (spins < SPINS)
      PAUSE;
    else
      sched_yield();
}

static void publish(counter *counter, uint64_t value) {
  atomic_store_explicit(&counter->count, value, memory_order_release);
}

static size_t length(size_t cell) { return cell == CELLS - 1 ? ELEMENTS - cell * CELL : CELL; }

VECTORS static void update(float *restrict param, const float *restrict grad, size_t count) {
  for (size_t i = 0; i < count; i++) param[i] -= grad[i] * LR;
}

static void check(size_t start, size_t end) {
  if (allred_exceeds(gradient + start, (end - start) * sizeof *gradient, 4, LARGEST_FINITE, allred_variants() - 1))
    exit(1);
}

/* `before`: the cells of all steps before. */
static void work(const variant *variant, uint64_t step, uint64_t before) {
  allred_copy_policy streaming = {.streaming = 1 << 30}, plain = {0};
  size_t sent = 0, read = 0;
  if (variant->checkers) check(0, ELEMENTS / (size_t)variant->checkers);
  publish(&common->checked, step);
  while (read < CELLS) {
    if (reached(&common->given, before + read + 1)) {
      const size_t at = read * CELL;
      allred_copy(&streaming, (char *)(params + at), (const char *)(shard + at), length(read) * sizeof *params);
      read++;
    } else if (!variant->in_place && sent < CELLS && sent - read < SLOTS) {
      const size_t bytes = length(sent) * sizeof *gradient;
      allred_copy(&plain, (char *)(slots + sent % SLOTS * CELL), (const char *)(gradient + sent * CELL), bytes);
      publish(&common->sent, before + ++sent);
    } else
      sched_yield();
  }
  allred_copy_end(&streaming, 0, ELEMENTS * sizeof *params);
}

static void serve(const variant *variant, uint64_t step, uint64_t before) {
  if (variant->checkers == 2) check(ELEMENTS / 2, ELEMENTS);
  wait_for(&common->checked, step);
  for (size_t cell = 0; cell < CELLS; cell++) {
    if (!variant->in_place) wait_for(&common->sent, before + cell + 1);
    const float *source = variant->in_place ? gradient + cell * CELL : slots + cell % SLOTS * CELL;
    update(shard + cell * CELL, source, length(cell));
    publish(&common->given, before + cell + 1);
  }
}

static double now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static int right(uint64_t steps) {
  for (size_t i = 0; i < ELEMENTS; i++)
    if (params[i] != -LR * (float)steps) return fprintf(stderr, "wrong number at %zu\n", i), 0;
  return 1;
}

static int measure(int is_worker, int rounds) {
  static double times_ms[VARIANTS][MAX_ROUNDS];
  uint64_t step = 0;
  for (int round = 0; round < rounds; round++)
    for (size_t v = 0; v < VARIANTS; v++) {
      const uint64_t before = step++ * CELLS;
      for (size_t i = 0; is_worker && i < ELEMENTS; i++) gradient[i] = 1;
      publish(&common->met[is_worker], step);
      wait_for(&common->met[!is_worker], step);
      const double start = now_ms();
      (is_worker ? work : serve)(&variants[v], step, before);
      times_ms[v][round] = now_ms() - start;
      if (is_worker && !right(step)) return 1;
    }
  if (is_worker) printf("%-10s %-8s %10s\n", "ps", "check", "loop ms");
  for (size_t v = 0; is_worker && v < VARIANTS; v++) {
    qsort(times_ms[v], (size_t)rounds, sizeof **times_ms, ascending);
    printf("%-10s %-8s %10.2f\n", variants[v].name, variants[v].check, times_ms[v][rounds / 2]);
  }
  fflush(stdout);
  return 0;
}

static float *share(size_t elements) {
  float *memory =
      mmap(NULL, elements * sizeof *memory, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) perror("mmap"), exit(2);
  return memory;
}

int main(int count, char **arguments) {
  const int rounds = count > 1 ? atoi(arguments[1]) : 21;
  if (rounds < 1 || rounds > MAX_ROUNDS) return fprintf(stderr, "1 to %d rounds\n", MAX_ROUNDS), 2;
  common = (shared *)(void *)share(sizeof *common / sizeof(float));
  gradient = share(ELEMENTS), shard = share(ELEMENTS), params = share(ELEMENTS), slots = share(SLOTS * CELL);
  const pid_t child = fork();
  if (child < 0) return perror("fork"), 2;
  if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(LIMIT_S);
  const int failed = measure(child != 0, rounds);
  if (child == 0) return failed;
  int status = 1;
  if (failed) kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return failed || status != 0;
}
