/*
 * Random calls of a table of rows and of the functions of distinct_ids.h, compared with plain arrays, for the
 * sanitizers.
 *
 *   rows [ROUNDS]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "distinct_ids.h"
#include "row_table.h"

enum { DIM = 19, IDS = 3000, MOST = 700 };

static uint64_t state = 88172645463325252u;
static uint64_t below(uint64_t limit) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state % limit;
}

static float rows[IDS][DIM];
static int exists[IDS];
static uint32_t steps[IDS];
static uint64_t ids[MOST], distinct[MOST], counts[5];
static uint32_t positions[MOST], numbers[IDS];
static float gradients[MOST * DIM], sums[MOST * DIM], found[MOST * DIM];

static void expect(int holds, const char *what, int line) {
  if (holds) return;
  fprintf(stderr, "rows.c:%d: %s\n", line, what);
  exit(1);
}
#define EXPECT(condition) expect((condition) != 0, #condition, __LINE__)

static void check_rows(const allred_row_table *table) {
  const size_t count = allred_row_table_select(table, 0, numbers);
  size_t expected = 0;
  for (size_t i = 0; i < IDS; i++) expected += (size_t)exists[i];
  EXPECT(count == expected && count == allred_row_table_rows(table));
  for (size_t i = 0; i < count; i++) {
    uint64_t id;
    uint32_t step;
    float vector[DIM];
    allred_row_table_read(table, &numbers[i], 1, (allred_row_columns){.ids = &id, .steps = &step, .vectors = vector});
    EXPECT(id < IDS && exists[id] && steps[id] == step && memcmp(vector, rows[id], sizeof vector) == 0);
  }
}

/* Fill `ids`, find their distinct ones, and add up random gradients of them. Return the number of distinct ids. */
static size_t draw(size_t count) {
  for (size_t i = 0; i < count; i++) ids[i] = below(1 + below(IDS));
  for (size_t i = 0; i < count * DIM; i++) gradients[i] = (float)below(1000) * 1e-3f;
  const size_t owners = 1 + below(5),
               all = allred_distinct_ids(ids, count, (uint32_t)owners, distinct, positions, counts);
  size_t total = 0;
  for (size_t i = 0; i < owners; i++) total += counts[i];
  EXPECT(all <= count && total == all);
  for (size_t i = 0; i < count; i++) EXPECT(distinct[positions[i]] == ids[i]);
  allred_sum_gradients(sums, all, gradients, positions, count, DIM);
  return all;
}

int main(int argc, char **argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 100;
  const allred_update sgd = allred_update_kernel(allred_find_rule("sgd"), 4, 0);
  const double numbers_of_sgd[] = {0.5, 0, 0, 0};
  const allred_row_form form = {.dim = DIM, .slots = {0, DIM, 1}, .init = ALLRED_INIT_CONSTANT, .a = 1.0f};
  const allred_row_form form_of_sums = {.dim = DIM};
  allred_row_table *table = allred_row_table_new(&form), *totals = allred_row_table_new(&form_of_sums);
  EXPECT(table && totals);
  for (uint32_t step = 1; step <= (uint32_t)rounds; step++) {
    const size_t count = below(MOST + 1), all = draw(count), bags = below(20);
    EXPECT(allred_row_table_lookup(table, distinct, all, found, step) == 0);
    for (size_t i = 0; i < all; i++) {
      const uint64_t id = distinct[i];
      for (int j = 0; j < DIM && !exists[id]; j++) rows[id][j] = 1.0f;
      exists[id] = 1, steps[id] = step;
      EXPECT(memcmp(found + i * DIM, rows[id], sizeof rows[id]) == 0);
    }
    allred_spread_rows(gradients, found, 0, positions, count, DIM);
    for (size_t i = 0; i < count; i++) EXPECT(memcmp(gradients + i * DIM, rows[ids[i]], sizeof rows[0]) == 0);
    uint64_t offsets[21] = {0};
    for (size_t bag = 1; bag < bags; bag++) offsets[bag] = offsets[bag - 1] + below(count - offsets[bag - 1] + 1);
    offsets[bags] = bags ? count : 0;
    allred_pool_rows(gradients, found, 0, positions, offsets, bags, DIM, 1);
    if (bags) allred_sum_pooled_gradients(found, all, gradients, positions, offsets, bags, DIM, 1);
    const int averages = below(2) == 1;
    if (averages) {
      EXPECT(allred_row_table_add(totals, distinct, all, sums, 1.0f) == 0);
      EXPECT(allred_row_table_update_mean(table, totals, 1.0f, sgd, numbers_of_sgd, step) == all);
      allred_row_table_clear(totals);
    } else {
      EXPECT(allred_row_table_update(table, distinct, all, sums, sgd, numbers_of_sgd, step) == all);
    }
    for (size_t i = 0; i < all; i++)
      for (int j = 0; j < DIM; j++) rows[distinct[i]][j] -= sums[i * DIM + j] * 0.5f;
    if (below(4) == 0) {
      const uint32_t oldest = step - (uint32_t)below(step);
      size_t removed = 0;
      for (size_t id = 0; id < IDS; id++)
        if (exists[id] && steps[id] < oldest) exists[id] = 0, removed++;
      EXPECT(allred_row_table_remove_older(table, oldest) == removed);
    }
    check_rows(table);
  }
  allred_row_table_free(table);
  allred_row_table_free(totals);
  printf("rows: %d rounds\n", rounds);
  return 0;
}
