#include "distinct_ids.h"

#include <stdlib.h>
#include <string.h>

#include "reduce.h"
#include "row_table.h"

#define AHEAD ((size_t)16) /* rows that are fetched before they are used */

/* Group the distinct ids by owner. Each keeps its place within its group. */
static int group(uint32_t owners, uint64_t *distinct, size_t found, uint32_t *positions, size_t count,
                 uint64_t *counts) {
  uint64_t *copy = malloc((found + 1) * sizeof *copy), *next = calloc(owners + 1, sizeof *next);
  uint32_t *place = malloc((found + 1) * sizeof *place);
  if (copy && next && place) {
    memcpy(copy, distinct, found * sizeof *copy);
    for (size_t i = 0; i < found; i++) counts[allred_row_owner(allred_row_hash(copy[i]), owners)]++;
    for (uint32_t owner = 0; owner < owners; owner++) next[owner + 1] = next[owner] + counts[owner];
    for (size_t i = 0; i < found; i++) {
      place[i] = (uint32_t)next[allred_row_owner(allred_row_hash(copy[i]), owners)]++;
      distinct[place[i]] = copy[i];
    }
    for (size_t i = 0; i < count; i++) positions[i] = place[positions[i]];
  }
  const int failed = !copy || !next || !place;
  free(copy), free(next), free(place);
  return failed;
}

size_t allred_distinct_ids(const uint64_t *ids, size_t count, uint32_t owners, uint64_t *distinct, uint32_t *positions,
                           uint64_t *counts) {
  size_t places = 64, found = 0;
  while (places < 2 * count) places *= 2;
  uint32_t *set = calloc(places, sizeof *set); /* 1 + the number of an id in `distinct` */
  if (!set) return SIZE_MAX;
  for (size_t i = 0; i < count; i++) {
    size_t place = allred_row_hash(ids[i]) & (places - 1);
    while (set[place] && distinct[set[place] - 1] != ids[i]) place = (place + 1) & (places - 1);
    if (!set[place]) {
      distinct[found++] = ids[i];
      set[place] = (uint32_t)found;
    }
    positions[i] = set[place] - 1;
  }
  free(set);
  memset(counts, 0, owners * sizeof *counts);
  if (owners == 1) return counts[0] = found;
  return group(owners, distinct, found, positions, count, counts) ? SIZE_MAX : found;
}

/* ---- rows */

static void copy_row(float *out, const char *row, int half, size_t dim) {
  const void *from = row;
  if (half)
    allred_wide_kernel(allred_variants() - 1, ALLRED_FLOAT16, ALLRED_FLOAT32, ALLRED_SUM)(out, &from, 1, dim, 1);
  else
    memcpy(out, row, dim * sizeof *out);
}

static void fetch(const char *rows, size_t row_bytes, const uint32_t *positions, size_t i, size_t count) {
  if (i + AHEAD >= count) return;
  const char *row = rows + positions[i + AHEAD] * row_bytes;
  for (size_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(row + byte);
}

void allred_spread_rows(float *out, const void *rows, int half, const uint32_t *positions, size_t count, size_t dim) {
  const size_t row_bytes = dim * (half ? sizeof(uint16_t) : sizeof(float));
  for (size_t i = 0; i < count; i++) {
    fetch(rows, row_bytes, positions, i, count);
    copy_row(out + i * dim, (const char *)rows + positions[i] * row_bytes, half, dim);
  }
}

static void add(float *restrict out, const float *restrict in, size_t dim) {
  for (size_t i = 0; i < dim; i++) out[i] += in[i];
}

static void add_row(float *out, const char *row, int half, size_t dim) {
  if (!half) return add(out, (const float *)(const void *)row, dim);
  float piece[64];
  const size_t most = sizeof piece / sizeof *piece;
  for (size_t i = 0; i < dim; i += most) {
    const size_t size = dim - i < most ? dim - i : most;
    copy_row(piece, row + i * sizeof(uint16_t), half, size);
    add(out + i, piece, size);
  }
}

void allred_pool_rows(float *out, const void *rows, int half, const uint32_t *positions, const uint64_t *offsets,
                      size_t bags, size_t dim, int mean) {
  const size_t row_bytes = dim * (half ? sizeof(uint16_t) : sizeof(float)), count = bags ? offsets[bags] : 0;
  for (size_t bag = 0; bag < bags; bag++, out += dim) {
    const size_t first = offsets[bag], end = offsets[bag + 1];
    if (first == end) memset(out, 0, dim * sizeof *out);
    for (size_t i = first; i < end; i++) {
      fetch(rows, row_bytes, positions, i, count);
      (i == first ? copy_row : add_row)(out, (const char *)rows + positions[i] * row_bytes, half, dim);
    }
    if (mean && end - first > 1)
      for (size_t i = 0; i < dim; i++) out[i] /= (float)(end - first);
  }
}

/* ---- gradients */

void allred_sum_gradients(float *out, size_t distinct, const float *gradients, const uint32_t *positions, size_t count,
                          size_t dim) {
  memset(out, 0, distinct * dim * sizeof *out);
  for (size_t i = 0; i < count; i++) {
    fetch((const char *)out, dim * sizeof *out, positions, i, count);
    add(out + positions[i] * dim, gradients + i * dim, dim);
  }
}

void allred_sum_pooled_gradients(float *out, size_t distinct, const float *gradients, const uint32_t *positions,
                                 const uint64_t *offsets, size_t bags, size_t dim, int mean) {
  const size_t count = bags ? offsets[bags] : 0;
  memset(out, 0, distinct * dim * sizeof *out);
  for (size_t bag = 0; bag < bags; bag++, gradients += dim)
    for (size_t i = offsets[bag]; i < offsets[bag + 1]; i++) {
      const float size = (float)(offsets[bag + 1] - offsets[bag]);
      float *sum = out + positions[i] * dim;
      fetch((const char *)out, dim * sizeof *out, positions, i, count);
      for (size_t j = 0; j < dim; j++) sum[j] += mean ? gradients[j] / size : gradients[j];
    }
}
