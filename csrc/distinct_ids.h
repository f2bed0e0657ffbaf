/*
 * The ids of one lookup. Each distinct id is sent once to its owner, which sends the row back; later the sum of its
 * gradients is sent to the owner once.
 *
 * `positions[i]` says where the row of ids[i] lies among the rows of the distinct ids. Bags are ranges of ids whose
 * rows are added, or averaged: bag b has the ids from offsets[b] to offsets[b + 1]. No Python.
 */
#ifndef ALLRED_DISTINCT_IDS_H
#define ALLRED_DISTINCT_IDS_H

#include <stddef.h>
#include <stdint.h>

#define ALLRED_MAX_IDS ((size_t)1 << 30) /* of one lookup */

/*
 * Write the distinct ids, grouped by their owners (allred_row_owner), each group in the order of first occurrence; and
 * how many each owner has. Return how many there are, or SIZE_MAX if memory is exhausted. distinct, positions: room for
 * `count` entries.
 */
size_t allred_distinct_ids(const uint64_t *ids, size_t count, uint32_t owners, uint64_t *distinct, uint32_t *positions,
                           uint64_t *counts);

/* out[i] = rows[positions[i]], as float32. half: the rows are float16. */
void allred_spread_rows(float *out, const void *rows, int half, const uint32_t *positions, size_t count, size_t dim);

/* out[b] = the sum of the rows of a bag in order, divided by their number if `mean`; zeros for an empty bag. */
void allred_pool_rows(float *out, const void *rows, int half, const uint32_t *positions, const uint64_t *offsets,
                      size_t bags, size_t dim, int mean);

/* out[positions[i]] += gradients[i], in the order of i. out: `distinct` rows; it need not be initialized. */
void allred_sum_gradients(float *out, size_t distinct, const float *gradients, const uint32_t *positions, size_t count,
                          size_t dim);

/* The same, where ids[i] is in bag b: its gradient is gradients[b], divided by the number of the bag's ids if `mean`.
 */
void allred_sum_pooled_gradients(float *out, size_t distinct, const float *gradients, const uint32_t *positions,
                                 const uint64_t *offsets, size_t bags, size_t dim, int mean);

#endif
