/*
 * A table of rows against a loop written by hand on one array: a lookup of 65 536 random ids of 4 M rows of 64 floats,
 * and row-wise Adagrad with a gradient for each. Medians of rounds in which the two take turns.
 *
 *   row_loops [ROUNDS [ROWS]]
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "reduce.h"
#include "row_table.h"

enum { DIM = 64, IDS = 65536, MOST_ROUNDS = 1000 };

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static uint64_t random_number(void) {
  static uint64_t state = 88172645463325252u;
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}

__attribute__((target("avx2"))) static void look_up(float *out, const float *rows, const uint64_t *ids) {
  for (size_t i = 0; i < IDS; i++) memcpy(out + i * DIM, rows + ids[i] * DIM, DIM * sizeof *out);
}

__attribute__((target("avx2"))) static void update(float *rows, float *sums, const float *gradients,
                                                   const uint64_t *ids) {
  for (size_t i = 0; i < IDS; i++) {
    float *row = rows + ids[i] * DIM, lanes[8] = {0};
    const float *gradient = gradients + i * DIM;
    for (size_t j = 0; j < DIM; j += 8)
      for (size_t lane = 0; lane < 8; lane++) lanes[lane] += gradient[j + lane] * gradient[j + lane];
    float sum = 0;
    for (size_t lane = 0; lane < 8; lane++) sum += lanes[lane];
    sum = sums[ids[i]] += sum / DIM;
    const float root = sqrtf(sum) + 1e-10f;
    for (size_t j = 0; j < DIM; j++) row[j] -= gradient[j] / root * 0.05f;
  }
}

static int by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *times, size_t count) {
  qsort(times, count, sizeof *times, by_size);
  return times[count / 2];
}

int main(int argc, char **argv) {
  const size_t rounds = argc > 1 ? (size_t)atoi(argv[1]) : 30, rows = argc > 2 ? (size_t)atoi(argv[2]) : 4000000;
  if (!rounds || rounds > MOST_ROUNDS || !rows) return 2;
  float *array = malloc(rows * DIM * sizeof *array), *sums = calloc(rows, sizeof *sums);
  float *out = malloc(IDS * DIM * sizeof *out), *gradients = malloc(IDS * DIM * sizeof *gradients);
  uint64_t *ids = malloc(IDS * sizeof *ids);
  const allred_row_form form = {.dim = DIM, .slots = {1}, .init = ALLRED_INIT_CONSTANT, .a = 0.5f};
  allred_row_table *table = allred_row_table_new(&form);
  if (!array || !sums || !out || !gradients || !ids || !table) return 1;
  for (size_t i = 0; i < rows * DIM; i++) array[i] = 0.5f;
  for (size_t i = 0; i < IDS * DIM; i++) gradients[i] = 1e-3f * (float)(random_number() % 1000);
  for (size_t start = 0; start < rows; start += IDS) {
    const size_t count = rows - start < IDS ? rows - start : IDS;
    for (size_t i = 0; i < count; i++) ids[i] = start + i;
    if (allred_row_table_lookup(table, ids, count, out, 1) < 0) return 1;
  }
  const allred_update kernel = allred_update_kernel(allred_find_rule("row_wise_adagrad"), 4, allred_variants() - 1);
  const double numbers[] = {0.05, 1e-10, 0.0};
  double times[4][MOST_ROUNDS];
  for (size_t round = 0; round < rounds; round++) {
    for (size_t i = 0; i < IDS; i++) ids[i] = random_number() % rows;
    double at = seconds(), end;
    look_up(out, array, ids);
    times[0][round] = (end = seconds()) - at, at = end;
    update(array, sums, gradients, ids);
    times[1][round] = (end = seconds()) - at;
    at = seconds();
    allred_row_table_lookup(table, ids, IDS, out, (uint32_t)round + 2);
    times[2][round] = (end = seconds()) - at, at = end;
    allred_row_table_update(table, ids, IDS, gradients, kernel, numbers, (uint32_t)round + 2);
    times[3][round] = seconds() - at;
  }
  double at[4];
  for (int i = 0; i < 4; i++) at[i] = median(times[i], rounds);
  printf("%zu rows, %d ids of %d floats, median of %zu rounds: by hand / table: lookup %.2f / %.2f ms (%.2f), "
         "row-wise Adagrad %.2f / %.2f ms (%.2f), both %.2f\n",
         rows, IDS, DIM, rounds, 1e3 * at[0], 1e3 * at[2], at[2] / at[0], 1e3 * at[1], 1e3 * at[3], at[3] / at[1],
         (at[2] + at[3]) / (at[0] + at[1]));
  allred_row_table_free(table);
  free(array), free(sums), free(out), free(gradients), free(ids);
  return 0;
}
