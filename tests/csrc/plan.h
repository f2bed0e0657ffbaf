/*
 * What an operation of driver.c is, what each rank gives to it and what must come out: closed forms of its seed, the
 * rank, and the position of an element.
 */
#ifndef PLAN_H
#define PLAN_H

#include <string.h>

#include "operation.h"

enum { EXCHANGE, ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, KINDS };
static const char *const kind_names[] = {"exchange",  "allreduce", "allgather",
                                         "broadcast", "alltoall",  "reducescatter"};

#define MAX_RANKS 8
#define MAX_TENSORS 40
#define ARENA_BYTES ((size_t)4 << 20)
#define MIN_IN_PLACE_BYTES 200
#define LARGE_BYTES 40000 /* given by all ranks together: an allreduce then has them reduce for each other */

typedef struct {
  int ranks, operations;
  size_t chunk_bytes;
  uint64_t seed;
  char *memory;
  char *arenas[MAX_RANKS]; /* ARENA_BYTES each */
} scene;

static uint64_t draw(uint64_t seed, uint64_t a, uint64_t b) {
  return allred_mix(allred_mix(allred_mix(0, seed), a), b);
}

typedef struct {
  uint64_t seed;
  int kind, op, in_place, root, odd; /* odd: the rank whose header differs, or -1 */
  int wire;                          /* what wide floats of an allreduce travel as; 0: as they are */
  int arenas;                        /* 0: there are none; 1: all arrays lie in them; 2: some do */
  int weighted;                      /* ranks have weights: 0 or 1, or with floats only, 0 to 2 */
  int is_step;                       /* an average whose headers have numbers of samples; weighted: these differ */
  int has_integers;
  size_t tensors, counts[MAX_TENSORS];
  int dtypes[MAX_TENSORS];
  int checks_finite, nan_tensor, nan_rank; /* nan_tensor: in which this rank has a NaN, or -1 */
  size_t nan_at;
} plan;

static size_t some_count(uint64_t dice, size_t chunk, int ranks) {
  const uint64_t rest = dice / 16;
  switch (dice % 16) {
  case 0:
    return 0;
  case 1:
    return 1;
  case 2:
  case 3:
    return chunk;
  case 4:
    return chunk + 1;
  case 5:
    return 2 * chunk + rest % (3 * chunk);
  case 6:
    return rest % 4 ? 7 : (size_t)(LARGE_BYTES / ranks);
  case 7:
    return ALLRED_INLINE_BYTES;
  case 8:
    return ALLRED_INLINE_BYTES + 1;
  case 9:
    return ALLRED_INLINE_BYTES / 8 + rest % 2; /* an inline slot of the widest elements */
  default:
    return rest % 40;
  }
}

static int wire_of(const plan *p, int dtype) {
  return p->kind == ALLREDUCE && allred_narrows(dtype, p->wire) ? p->wire : 0;
}

/* The mean of all is 1, and the weighted average is a whole number, as `given` is made. */
static uint64_t samples_of(const plan *p, int ranks, int rank) {
  if (!p->weighted || ranks == 1) return 1;
  if (ranks == 3) return rank == 2 ? 3 : 0;
  return rank % 2 ? 2 : 0;
}

static double weight_of(const plan *p, int ranks, int rank) {
  if (p->is_step) return (double)samples_of(p, ranks, rank);
  return p->weighted ? (double)(draw(p->seed, 19, (uint64_t)rank) % (p->has_integers ? 2 : 3)) : 1;
}

static int is_unsigned(int dtype) {
  return dtype == ALLRED_UINT8 || (dtype >= ALLRED_UINT16 && dtype <= ALLRED_UINT64);
}

static int is_integer(int dtype) { return dtype < ALLRED_FLOAT16 || is_unsigned(dtype); } /* or bool */

static plan make_plan(const scene *scene, uint64_t seed) {
  plan p = {.seed = seed, .kind = (int)(draw(seed, 1, 0) % (KINDS + 3)), .in_place = (int)(draw(seed, 2, 0) & 1)};
  if (p.kind >= KINDS) p.kind = ALLREDUCE;
  p.root = (int)(draw(seed, 3, 0) % (uint64_t)scene->ranks);
  p.odd = draw(seed, 4, 0) % 12 ? -1 : (int)(draw(seed, 5, 0) % (uint64_t)scene->ranks);
  p.wire = (int[]){0, ALLRED_FLOAT16, ALLRED_BFLOAT16}[draw(seed, 15, 0) % 3];
  p.arenas = (int)(draw(seed, 16, 0) % 3);
  p.tensors = draw(seed, 6, 0) % (draw(seed, 6, 1) % 4 ? 4 : MAX_TENSORS + 1);
  uint64_t dice = seed;
  p.op = 1 + (int)(draw(seed, 7, 0) % (ALLRED_OPS - 1));
  int dtypes[2];
  for (int i = 0; i < 2;) {
    dtypes[i] = (int)((dice = allred_mix(dice, 2)) % ALLRED_DTYPES);
    i += allred_reduce_kernel(0, dtypes[i], p.op) != NULL;
  }
  p.dtypes[0] = dtypes[0]; /* of a reducescatter */
  p.is_step = p.kind == ALLREDUCE && p.op == ALLRED_AVERAGE && draw(seed, 20, 0) % 3;
  p.weighted = p.kind == ALLREDUCE && (p.op == ALLRED_SUM || p.is_step) && draw(seed, 19, MAX_RANKS) % 3;
  for (size_t t = 0; t < p.tensors; t++) {
    p.dtypes[t] = dtypes[draw(seed, 8, t) % 4 == 0];
    p.has_integers |= is_integer(p.dtypes[t]);
    p.weighted &= allred_can_weigh(p.dtypes[t], 1);
    const size_t item = allred_dtype_bytes(wire_of(&p, p.dtypes[t]) ? p.wire : p.dtypes[t]);
    p.counts[t] = some_count(draw(seed, 9, t), scene->chunk_bytes / item, scene->ranks);
  }
  p.checks_finite = draw(seed, 18, 0) % 2;
  p.nan_tensor = p.checks_finite && p.tensors ? (int)(draw(seed, 18, 1) % p.tensors) : -1;
  if (p.nan_tensor >= 0 && (is_integer(p.dtypes[p.nan_tensor]) || !p.counts[p.nan_tensor])) p.nan_tensor = -1;
  p.nan_at = p.nan_tensor < 0 ? 0 : draw(seed, 18, 2) % p.counts[p.nan_tensor];
  p.nan_rank = (int)(draw(seed, 18, 3) % (uint64_t)scene->ranks);
  if (weight_of(&p, scene->ranks, p.nan_rank) == 0) p.nan_tensor = -1;
  return p;
}

static void write_nan(int dtype, char *to) {
  dtype = allred_part_dtype(dtype);
  const uint64_t bits = dtype == ALLRED_FLOAT64   ? UINT64_C(0x7ff8) << 48
                        : dtype == ALLRED_FLOAT32 ? 0x7fc00000
                        : dtype == ALLRED_FLOAT16 ? 0x7e00
                                                  : 0x7fc0;
  memcpy(to, &bits, allred_dtype_bytes(dtype));
}

/* What a rank gives. Sums are exact in every dtype, even in bfloat16's 8 bits; the average of all is a whole number. */
static int64_t given(const plan *p, int dtype, size_t tensor, size_t i, int rank) {
  const int64_t base = (int64_t)(draw(p->seed, 100 + tensor, i) % 13);
  if (dtype == ALLRED_BOOL) return base < 4 ? 0 : base > 8 ? 1 : (base + rank) & 1;
  if (p->op == ALLRED_PRODUCT) return 1 + ((base + rank) & 1);
  return base + 2 * rank - (is_unsigned(dtype) ? 0 : 6);
}

static int64_t reduced(const plan *p, int ranks, int dtype, size_t tensor, size_t i) {
  int64_t all = given(p, dtype, tensor, i, 0) * (int64_t)weight_of(p, ranks, 0);
  for (int rank = 1; rank < ranks; rank++) {
    const int64_t next = given(p, dtype, tensor, i, rank) * (int64_t)weight_of(p, ranks, rank);
    if (p->op == ALLRED_MIN)
      all = next < all ? next : all;
    else if (p->op == ALLRED_MAX)
      all = next > all ? next : all;
    else if (p->op == ALLRED_PRODUCT)
      all *= next;
    else
      all += next;
  }
  return p->op == ALLRED_AVERAGE ? all / ranks : all;
}

/* A small whole number as an element; integers wrap around. The imaginary part of a complex number is 0. */
static void encode(int64_t value, int dtype, char *to) {
  memset(to, 0, allred_dtype_bytes(dtype));
  dtype = allred_part_dtype(dtype);
  const double wide = (double)value;
  const float single = (float)value;
  uint64_t bits = (uint64_t)value;
  if (dtype == ALLRED_FLOAT64) memcpy(&bits, &wide, sizeof wide);
  if (dtype == ALLRED_FLOAT32 || dtype == ALLRED_BFLOAT16 || dtype == ALLRED_FLOAT16) {
    bits = 0;
    memcpy(&bits, &single, sizeof single);
  }
  if (dtype == ALLRED_BFLOAT16) bits >>= 16;
  if (dtype == ALLRED_FLOAT16 && value) /* 5 bits of exponent for 8, biased by 15 instead of 127 */
    bits = (bits >> 16 & 0x8000) | ((bits & 0x7fffffff) - ((127 - 15) << 23)) >> 13;
  memcpy(to, &bits, allred_dtype_bytes(dtype));
}

/* Numbers of a reduction: what `rank` gives, or what all must get if it is negative. */
static void write_numbers(const scene *scene, const plan *p, int rank, size_t tensor, int dtype, size_t from,
                          size_t count, char *to) {
  for (size_t i = 0; i < count; i++)
    encode(rank < 0 ? reduced(p, scene->ranks, dtype, tensor, from + i) : given(p, dtype, tensor, from + i, rank),
           dtype, to + i * allred_dtype_bytes(dtype));
}

static void write_bytes(const plan *p, int from, int to, size_t count, char *into) {
  for (size_t i = 0; i < count; i++) into[i] = (char)draw(p->seed, 1000 + (uint64_t)(from * MAX_RANKS + to), i);
}

#endif
