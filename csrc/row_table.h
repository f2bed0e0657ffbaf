/*
 * Rows by id: an embedding table, or the part of one that a process holds.
 *
 * Each row is stored contiguously: its id, the number of its lookups, the last step that used it, its vector, and the
 * optimizer's slots. Rows lie in chunks of 2 MiB, so that a table grows without a copy. The index is a hash table with
 * open addressing, at most three quarters full. An entry has 32 bits of the hash, to reject most other rows without
 * reading them, and the number of the row: 8 bytes.
 *
 * A row is made when its id is looked up for training. Its initial values follow from the seed and the id only: they
 * depend neither on the order of lookups nor on the number of processes.
 *
 * One thread at a time uses a table. No Python.
 */
#ifndef ALLRED_ROW_TABLE_H
#define ALLRED_ROW_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "update.h"

enum { ALLRED_ROW_SLOTS = ALLRED_RULE_ARRAYS - 2 };
enum { ALLRED_INIT_CONSTANT, ALLRED_INIT_UNIFORM, ALLRED_INIT_NORMAL, ALLRED_INITS };

/*
 * The form of a table. half: vectors are stored as float16; else as float32, as slots are. slots: the elements of each,
 * in the order of the optimizer's rule: `dim`, 1, or 0 for a slot that it does not use. slot_values: their initial
 * values. init, a, b: the initial vector: constant a; uniform in [a, b); or normal with mean a and standard deviation
 * b. admit_after: the lookups for training of an id before its row is made.
 */
typedef struct {
  size_t dim;
  int half;
  size_t slots[ALLRED_ROW_SLOTS];
  float slot_values[ALLRED_ROW_SLOTS];
  int init;
  float a, b;
  uint64_t seed;
  uint32_t admit_after;
} allred_row_form;

typedef struct allred_row_table allred_row_table;

/* Columns of rows: arrays with one entry for each row, NULL if not wanted. vectors: float32, `dim` for each row. */
typedef struct {
  uint64_t *ids;
  uint32_t *seen, *steps;
  float *vectors, *slots[ALLRED_ROW_SLOTS];
} allred_row_columns;

/* A hash of an id. The upper half chooses the process that owns it (allred_row_owner), the lower half its place. */
static inline uint64_t allred_row_hash(uint64_t id) {
  id = (id ^ id >> 33) * 0xff51afd7ed558ccdu;
  id = (id ^ id >> 33) * 0xc4ceb9fe1a85ec53u;
  return id ^ id >> 33;
}

static inline uint32_t allred_row_owner(uint64_t hash, uint32_t owners) {
  return (uint32_t)((hash >> 32) * owners >> 32);
}

/* Return NULL if memory is exhausted. The functions below that make rows return -1 then; the rows made before stay. */
allred_row_table *allred_row_table_new(const allred_row_form *);
void allred_row_table_free(allred_row_table *);

size_t allred_row_table_rows(const allred_row_table *);
size_t allred_row_table_bytes(const allred_row_table *); /* of memory, with the index */

/*
 * Copy the vector of each id, in the type in which it is stored. With `step` above 0, a lookup for training in this
 * step: it makes missing rows. Otherwise it changes nothing. A row that does not exist has its initial vector.
 */
int allred_row_table_lookup(allred_row_table *, const uint64_t *ids, size_t count, void *vectors, uint32_t step);

/*
 * Update the row of each id with a gradient (float32, `dim` for each id), in order; skip ids without a row. Return the
 * number of updated rows. kernel: an update kernel of float32. numbers: the hyperparameters of its rule.
 */
size_t allred_row_table_update(allred_row_table *, const uint64_t *ids, size_t count, const float *gradients,
                               allred_update kernel, const double *numbers, uint32_t step);

/* Add gradients, multiplied by a weight, to rows, which are made if they are missing: for a table of sums, whose
 * vectors are float32 and begin with 0. */
int allred_row_table_add(allred_row_table *, const uint64_t *ids, size_t count, const float *gradients, float weight);

/* Update the rows with the sums, divided by `divisor`, in the order in which the rows of `sums` were made. */
size_t allred_row_table_update_mean(allred_row_table *, const allred_row_table *sums, float divisor,
                                    allred_update kernel, const double *numbers, uint32_t step);

/* Remove all rows, and the counts of ids without a row. The memory is kept. */
void allred_row_table_clear(allred_row_table *);

/* Remove the rows that were last used before `step`, and free their memory. The index keeps its size. The numbers of
 * other rows change. Return the number of removed rows. */
size_t allred_row_table_remove_older(allred_row_table *, uint32_t step);

/* Write the numbers of the rows used in `since` or later; return how many. numbers: room for all rows. */
size_t allred_row_table_select(const allred_row_table *, uint32_t since, uint32_t *numbers);

/* Copy rows by their numbers; write rows by their ids, making those that are missing. */
void allred_row_table_read(const allred_row_table *, const uint32_t *numbers, size_t count, allred_row_columns);
int allred_row_table_write(allred_row_table *, size_t count, allred_row_columns);

#endif
