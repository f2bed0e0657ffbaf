#define _GNU_SOURCE /* sched_yield */
#include "chaos.h"

#ifdef ALLRED_CHAOS
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LONG_PAUSE_SHARE 256 /* one pause in 256 takes up to 10 ms */

static uint64_t mix(uint64_t state) {
  state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
  state = (state ^ state >> 27) * 0x94d049bb133111ebu;
  return state ^ state >> 31;
}

static uint64_t hash_text(uint64_t state, const char *text) {
  for (; text && *text; text++) state = mix(state + (unsigned char)*text);
  return state;
}

/* The rank, as the launcher says it: before MPI is initialized, and without it. */
static const char *rank_text(void) {
  const char *names[] = {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "ALLRED_RANK"}, *found = NULL;
  for (size_t i = 0; i < sizeof names / sizeof *names && !found; i++) found = getenv(names[i]);
  return found;
}

uint64_t allred_chaos_fires(allred_chaos_point *point) {
  static _Atomic uint64_t known_seed, known_rank; /* hashes of the seed and the rank; known_seed 0: not known yet */
  uint64_t seed = atomic_load(&known_seed);
  if (!seed) { /* read once: another thread may call setenv() later */
    seed = hash_text(1, getenv("CHAOS_SEED")) | 1;
    atomic_store(&known_rank, hash_text(1, rank_text()));
    atomic_store(&known_seed, seed);
  }
  const char *name = strrchr(point->file, '/') ? strrchr(point->file, '/') + 1 : point->file;
  const uint64_t here = hash_text(mix(seed + (uint64_t)point->line), name);
  if (here % 2) return 0;
  const uint64_t hit = atomic_fetch_add_explicit(&point->hits, 1, memory_order_relaxed);
  const uint64_t found = mix(mix(here + atomic_load(&known_rank)) + hit * 0x9e3779b97f4a7c15u);
  return found % 4 ? 0 : found | 1;
}

void allred_chaos_pause(allred_chaos_point *point) {
  const uint64_t found = allred_chaos_fires(point) >> 8;
  if (!found) return;
  if (found % 2) {
    sched_yield();
    return;
  }
  const int is_long = found / 2 % LONG_PAUSE_SHARE == 0;
  const struct timespec pause = {0, (long)(found >> 16) % (is_long ? 10000000 : 100000)};
  nanosleep(&pause, NULL);
}

size_t allred_chaos_fewer(allred_chaos_point *point, size_t bytes) {
  const uint64_t found = allred_chaos_fires(point) >> 8;
  return found && bytes > 1 ? 1 + found % (bytes - 1) : bytes;
}
#endif
