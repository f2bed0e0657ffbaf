#define _GNU_SOURCE /* MAP_ANONYMOUS, MADV_HUGEPAGE */
#include "row_table.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "reduce.h"

#define CHUNK_BYTES ((size_t)2 << 20)
#define LEAST_INDEX ((size_t)64)
#define AHEAD ((size_t)16) /* ids whose memory is fetched before it is used; a power of two */
#define NO_ROW UINT32_MAX
#define MOST_ROWS (UINT32_MAX - 1)

typedef struct {
  uint64_t id;
  uint32_t seen, step;
  char data[]; /* the vector, then the slots */
} row;

struct allred_row_table {
  allred_row_form form;
  size_t vector_bytes, slot_at[ALLRED_ROW_SLOTS], row_bytes, rows_per_chunk, chunk_bytes;
  char **chunks;
  size_t chunk_count, chunk_room; /* chunks; entries of the array */
  uint64_t *index;                /* upper half: of the hash; lower half: 1 + the number of the row; 0: free */
  size_t places, rows;
  allred_row_table *candidates; /* ids without a row: rows without a vector */
  float *scratch;               /* two vectors */
};

static row *row_of(const allred_row_table *table, size_t number) {
  char *chunk = table->chunks[number / table->rows_per_chunk];
  return (row *)(void *)(chunk + number % table->rows_per_chunk * table->row_bytes);
}

/* ---- memory */

static size_t aligned(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

/* Memory at a multiple of 2 MiB, so that the kernel can use one page for it. It is at the upper end of the mapping,
 * next to the chunk that was mapped before it: the kernel merges adjacent mappings, and limits the number of mappings.
 */
static char *map_chunk(size_t bytes) {
  const size_t room = bytes + CHUNK_BYTES;
  char *all = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return NULL;
  const size_t before = ((uintptr_t)all + CHUNK_BYTES) / CHUNK_BYTES * CHUNK_BYTES - (uintptr_t)all;
  if (before) munmap(all, before);
  if (room - before > bytes) munmap(all + before + bytes, room - before - bytes);
  madvise(all + before, bytes, MADV_HUGEPAGE);
  return all + before;
}

static void unmap_chunks(allred_row_table *table, size_t needed) {
  while (table->chunk_count > needed) munmap(table->chunks[--table->chunk_count], table->chunk_bytes);
}

static int add_chunk(allred_row_table *table) {
  if (table->chunk_count == table->chunk_room) {
    const size_t room = table->chunk_room ? 2 * table->chunk_room : 16;
    char **chunks = realloc(table->chunks, room * sizeof *chunks);
    if (!chunks) return -1;
    table->chunks = chunks, table->chunk_room = room;
  }
  char *chunk = map_chunk(table->chunk_bytes);
  if (!chunk) return -1;
  table->chunks[table->chunk_count++] = chunk;
  return 0;
}

allred_row_table *allred_row_table_new(const allred_row_form *form) {
  allred_row_table *table = calloc(1, sizeof *table);
  if (!table) return NULL;
  table->form = *form;
  table->vector_bytes = form->dim * (form->half ? sizeof(uint16_t) : sizeof(float));
  size_t at = aligned(table->vector_bytes, sizeof(float));
  for (int i = 0; i < ALLRED_ROW_SLOTS; at += form->slots[i++] * sizeof(float)) table->slot_at[i] = at;
  table->row_bytes = aligned(sizeof(row) + at, sizeof(uint64_t));
  table->rows_per_chunk = table->row_bytes < CHUNK_BYTES ? CHUNK_BYTES / table->row_bytes : 1;
  table->chunk_bytes = aligned(table->rows_per_chunk * table->row_bytes, CHUNK_BYTES);
  table->places = LEAST_INDEX;
  table->index = calloc(table->places, sizeof *table->index);
  table->scratch = malloc((2 * form->dim + 1) * sizeof *table->scratch);
  if (form->admit_after > 1) {
    allred_row_form counters = {.init = ALLRED_INIT_CONSTANT};
    table->candidates = allred_row_table_new(&counters);
  }
  if (!table->index || !table->scratch || (form->admit_after > 1 && !table->candidates))
    return allred_row_table_free(table), NULL;
  return table;
}

void allred_row_table_free(allred_row_table *table) {
  if (!table) return;
  allred_row_table_free(table->candidates);
  unmap_chunks(table, 0);
  free(table->chunks);
  free(table->index);
  free(table->scratch);
  free(table);
}

size_t allred_row_table_rows(const allred_row_table *table) { return table->rows; }

size_t allred_row_table_bytes(const allred_row_table *table) {
  const size_t own = table->chunk_count * table->chunk_bytes + table->places * sizeof *table->index;
  return own + (table->candidates ? allred_row_table_bytes(table->candidates) : 0);
}

/* ---- the index */

static size_t first_place(uint64_t hash, size_t places) { return (hash & UINT32_MAX) * places >> 32; }

static uint64_t entry_of(uint64_t hash, size_t number) { return (hash & ~(uint64_t)UINT32_MAX) | (number + 1); }

/* Return the place of the id, or the free place where it belongs. */
static size_t find_place(const allred_row_table *table, uint64_t id, uint64_t hash) {
  size_t place = first_place(hash, table->places);
  for (uint64_t entry; (entry = table->index[place]); place = place + 1 == table->places ? 0 : place + 1)
    if (entry >> 32 == hash >> 32 && row_of(table, (uint32_t)entry - 1)->id == id) break;
  return place;
}

static void fill_index(allred_row_table *table) {
  memset(table->index, 0, table->places * sizeof *table->index);
  for (size_t number = 0; number < table->rows; number++) {
    const uint64_t hash = allred_row_hash(row_of(table, number)->id);
    size_t place = first_place(hash, table->places);
    while (table->index[place]) place = place + 1 == table->places ? 0 : place + 1;
    table->index[place] = entry_of(hash, number);
  }
}

/* Make room for more rows in the index. */
static int reserve(allred_row_table *table, size_t more) {
  const size_t needed = (table->rows + more) * 4 / 3 + 1;
  if (table->rows + more > MOST_ROWS) return -1;
  if (needed <= table->places) return 0;
  const size_t grown = table->places + table->places / 2, places = needed > grown ? needed : grown;
  uint64_t *index = malloc(places * sizeof *index);
  if (!index) return -1;
  free(table->index);
  table->index = index, table->places = places;
  fill_index(table);
  return 0;
}

/* ---- first values */

static uint64_t random_bits(uint64_t state) {
  state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
  state = (state ^ state >> 27) * 0x94d049bb133111ebu;
  return state ^ state >> 31;
}

/* The inverse of the normal distribution: P. J. Acklam's rational approximation, relative error 1.2e-9. */
static double normal_quantile(double p) {
  static const double a[] = {-3.969683028665376e+01, 2.209460984245205e+02,  -2.759285104469687e+02,
                             1.383577518672690e+02,  -3.066479806614716e+01, 2.506628277459239e+00};
  static const double b[] = {-5.447609879822406e+01, 1.615858368580409e+02, -1.556989798598866e+02,
                             6.680131188771972e+01, -1.328068155288572e+01};
  static const double c[] = {-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e+00,
                             -2.549732539343734e+00, 4.374664141464968e+00,  2.938163982698783e+00};
  static const double d[] = {7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e+00,
                             3.754408661907416e+00};
  const double low = 0.02425;
  if (p >= low && p <= 1 - low) {
    const double q = p - 0.5, r = q * q;
    return (((((a[0] * r + a[1]) * r + a[2]) * r + a[3]) * r + a[4]) * r + a[5]) * q /
           (((((b[0] * r + b[1]) * r + b[2]) * r + b[3]) * r + b[4]) * r + 1);
  }
  const double q = sqrt(-2 * log(p < low ? p : 1 - p));
  const double z = (((((c[0] * q + c[1]) * q + c[2]) * q + c[3]) * q + c[4]) * q + c[5]) /
                   ((((d[0] * q + d[1]) * q + d[2]) * q + d[3]) * q + 1);
  return p < low ? z : -z;
}

static void first_vector(const allred_row_form *form, uint64_t id, float *vector) {
  if (form->init == ALLRED_INIT_CONSTANT) {
    for (size_t i = 0; i < form->dim; i++) vector[i] = form->a;
    return;
  }
  const uint64_t base = random_bits(form->seed + allred_row_hash(id));
  const float width = form->b - form->a;
  for (size_t i = 0; i < form->dim; i++) {
    const uint64_t bits = random_bits(base + (i + 1) * 0x9e3779b97f4a7c15u);
    if (form->init == ALLRED_INIT_UNIFORM)
      vector[i] = form->a + width * ((float)(bits >> 40) * 0x1p-24f);
    else
      vector[i] = (float)(form->a + form->b * normal_quantile(((double)(bits >> 11) + 0.5) * 0x1p-53));
  }
}

/* ---- conversion of vectors: float32 in memory that may hold float16 */

static void store_vector(const allred_row_form *form, void *to, const float *from) {
  if (form->half)
    allred_narrow_kernel(allred_variants() - 1, ALLRED_FLOAT32, ALLRED_FLOAT16)(to, from, form->dim);
  else
    memcpy(to, from, form->dim * sizeof *from);
}

static void load_vector(const allred_row_form *form, float *to, const void *from) {
  if (form->half)
    allred_wide_kernel(allred_variants() - 1, ALLRED_FLOAT16, ALLRED_FLOAT32, ALLRED_SUM)(to, &from, 1, form->dim, 1);
  else
    memcpy(to, from, form->dim * sizeof *to);
}

static float *slot_of(const allred_row_table *table, row *at, int slot) {
  return table->form.slots[slot] ? (float *)(void *)(at->data + table->slot_at[slot]) : NULL;
}

/* ---- rows */

/* Make the row of an id whose free place in the index is known. Return its number, or NO_ROW without memory. */
static uint32_t make_row(allred_row_table *table, uint64_t id, uint64_t hash, size_t place) {
  if (table->rows == table->chunk_count * table->rows_per_chunk && add_chunk(table) < 0) return NO_ROW;
  row *at = row_of(table, table->rows);
  at->id = id, at->seen = at->step = 0;
  if (table->form.dim) {
    first_vector(&table->form, id, table->scratch);
    store_vector(&table->form, at->data, table->scratch);
  }
  for (int slot = 0; slot < ALLRED_ROW_SLOTS; slot++)
    for (size_t i = 0; i < table->form.slots[slot]; i++) slot_of(table, at, slot)[i] = table->form.slot_values[slot];
  table->index[place] = entry_of(hash, table->rows);
  return (uint32_t)table->rows++;
}

static void fetch_row(const allred_row_table *table, size_t number) {
  const char *at = (const char *)row_of(table, number);
  for (size_t byte = 0; byte < table->row_bytes; byte += 64) __builtin_prefetch(at + byte);
}

/* Finds the rows of ids in order. It fetches memory of ids that follow, first of the index, then of the row: a lookup
 * is bound by the latency of memory. The index must not move meanwhile. */
typedef struct {
  const allred_row_table *table;
  const uint64_t *ids;
  size_t count, at;
  uint64_t hashes[4 * AHEAD]; /* a ring */
} row_finder;

static uint64_t *hash_of(row_finder *finder, size_t i) { return &finder->hashes[i % (4 * AHEAD)]; }

static void fetch_index(row_finder *finder, size_t i) {
  if (i >= finder->count) return;
  const allred_row_table *table = finder->table;
  *hash_of(finder, i) = allred_row_hash(finder->ids[i]);
  __builtin_prefetch(&table->index[first_place(*hash_of(finder, i), table->places)]);
}

static void fetch_found_row(row_finder *finder, size_t i) {
  if (i >= finder->count) return;
  const uint64_t hash = *hash_of(finder, i), entry = finder->table->index[first_place(hash, finder->table->places)];
  if (entry >> 32 == hash >> 32 && entry) fetch_row(finder->table, (uint32_t)entry - 1);
}

static row_finder begin_finding(const allred_row_table *table, const uint64_t *ids, size_t count) {
  row_finder finder = {.table = table, .ids = ids, .count = count};
  for (size_t i = 0; i < 2 * AHEAD; i++) fetch_index(&finder, i);
  for (size_t i = 0; i < AHEAD; i++) fetch_found_row(&finder, i);
  return finder;
}

/* Return the number of the row of the next id, or NO_ROW. */
static uint32_t find_next(row_finder *finder, uint64_t *hash) {
  const size_t i = finder->at++;
  fetch_index(finder, i + 2 * AHEAD);
  fetch_found_row(finder, i + AHEAD);
  *hash = *hash_of(finder, i);
  const uint64_t entry = finder->table->index[find_place(finder->table, finder->ids[i], *hash)];
  return entry ? (uint32_t)entry - 1 : NO_ROW;
}

/* Count a lookup of an id without a row. Return whether its row is to be made, or -1 without memory. */
static int admits(allred_row_table *table, uint64_t id, uint32_t step) {
  allred_row_table *candidates = table->candidates;
  if (!candidates) return 1;
  if (reserve(candidates, 1) < 0) return -1;
  const uint64_t hash = allred_row_hash(id);
  const size_t place = find_place(candidates, id, hash);
  const uint64_t entry = candidates->index[place];
  const uint32_t number = entry ? (uint32_t)entry - 1 : make_row(candidates, id, hash, place);
  if (number == NO_ROW) return -1;
  row *at = row_of(candidates, number);
  at->step = step;
  return ++at->seen >= table->form.admit_after;
}

/* Make the row of an id if it is admitted. Return its number, or NO_ROW; set `failed` without memory. */
static uint32_t admit(allred_row_table *table, uint64_t id, uint64_t hash, uint32_t step, int *failed) {
  const int admitted = admits(table, id, step);
  const uint32_t number = admitted > 0 ? make_row(table, id, hash, find_place(table, id, hash)) : NO_ROW;
  *failed = admitted < 0 || (admitted && number == NO_ROW);
  return number;
}

int allred_row_table_lookup(allred_row_table *table, const uint64_t *ids, size_t count, void *vectors, uint32_t step) {
  if (step && reserve(table, count) < 0) return -1;
  row_finder finder = begin_finding(table, ids, count);
  for (size_t i = 0; i < count; i++) {
    void *vector = (char *)vectors + i * table->vector_bytes;
    uint64_t hash;
    int failed = 0;
    uint32_t number = find_next(&finder, &hash);
    if (number == NO_ROW && step) number = admit(table, ids[i], hash, step, &failed);
    if (failed) return -1;
    if (number == NO_ROW) {
      first_vector(&table->form, ids[i], table->scratch);
      store_vector(&table->form, vector, table->scratch);
      continue;
    }
    row *at = row_of(table, number);
    if (step) at->seen += at->seen < UINT32_MAX, at->step = step;
    memcpy(vector, at->data, table->vector_bytes);
  }
  return 0;
}

/* ---- gradients */

static void update_row(allred_row_table *table, row *at, const float *gradient, allred_update kernel,
                       const double *numbers, uint32_t step) {
  const int half = table->form.half;
  float *vector = half ? table->scratch : (float *)(void *)at->data;
  if (half) load_vector(&table->form, vector, at->data);
  void *arrays[ALLRED_RULE_ARRAYS] = {vector, (void *)(uintptr_t)gradient};
  for (int slot = 0; slot < ALLRED_ROW_SLOTS; slot++) arrays[2 + slot] = slot_of(table, at, slot);
  kernel(arrays, numbers, table->form.dim);
  if (half) store_vector(&table->form, at->data, vector);
  at->step = step;
}

size_t allred_row_table_update(allred_row_table *table, const uint64_t *ids, size_t count, const float *gradients,
                               allred_update kernel, const double *numbers, uint32_t step) {
  row_finder finder = begin_finding(table, ids, count);
  size_t updated = 0;
  uint64_t hash;
  for (size_t i = 0; i < count; i++) {
    const uint32_t number = find_next(&finder, &hash);
    if (number == NO_ROW) continue;
    update_row(table, row_of(table, number), gradients + i * table->form.dim, kernel, numbers, step);
    updated++;
  }
  return updated;
}

int allred_row_table_add(allred_row_table *table, const uint64_t *ids, size_t count, const float *gradients,
                         float weight) {
  if (reserve(table, count) < 0) return -1;
  row_finder finder = begin_finding(table, ids, count);
  const size_t dim = table->form.dim;
  uint64_t hash;
  for (size_t i = 0; i < count; i++) {
    uint32_t number = find_next(&finder, &hash);
    if (number == NO_ROW) number = make_row(table, ids[i], hash, find_place(table, ids[i], hash));
    if (number == NO_ROW) return -1;
    float *sum = (float *)(void *)row_of(table, number)->data;
    const float *gradient = gradients + i * dim;
    for (size_t j = 0; j < dim; j++) sum[j] += gradient[j] * weight;
  }
  return 0;
}

size_t allred_row_table_update_mean(allred_row_table *table, const allred_row_table *sums, float divisor,
                                    allred_update kernel, const double *numbers, uint32_t step) {
  enum { BLOCK = 64 };
  uint64_t ids[BLOCK], hash;
  size_t updated = 0;
  float *mean = table->scratch + table->form.dim;
  for (size_t start = 0; start < sums->rows; start += BLOCK) {
    const size_t size = sums->rows - start < BLOCK ? sums->rows - start : BLOCK;
    for (size_t i = 0; i < size; i++) ids[i] = row_of(sums, start + i)->id;
    row_finder finder = begin_finding(table, ids, size);
    for (size_t i = 0; i < size; i++) {
      const uint32_t number = find_next(&finder, &hash);
      if (number == NO_ROW) continue;
      const float *sum = (const float *)(const void *)row_of(sums, start + i)->data;
      for (size_t j = 0; j < table->form.dim; j++) mean[j] = sum[j] / divisor;
      update_row(table, row_of(table, number), mean, kernel, numbers, step);
      updated++;
    }
  }
  return updated;
}

/* ---- all rows */

void allred_row_table_clear(allred_row_table *table) {
  if (table->candidates) allred_row_table_clear(table->candidates);
  table->rows = 0;
  memset(table->index, 0, table->places * sizeof *table->index);
}

size_t allred_row_table_remove_older(allred_row_table *table, uint32_t step) {
  if (table->candidates) allred_row_table_remove_older(table->candidates, step);
  const size_t before = table->rows;
  for (size_t number = 0; number < table->rows;) {
    if (row_of(table, number)->step >= step)
      number++;
    else if (number != --table->rows)
      memcpy(row_of(table, number), row_of(table, table->rows), table->row_bytes);
  }
  unmap_chunks(table, (table->rows + table->rows_per_chunk - 1) / table->rows_per_chunk);
  if (table->rows != before) fill_index(table);
  return before - table->rows;
}

size_t allred_row_table_select(const allred_row_table *table, uint32_t since, uint32_t *numbers) {
  size_t found = 0;
  for (size_t number = 0; number < table->rows; number++)
    if (row_of(table, number)->step >= since) numbers[found++] = (uint32_t)number;
  return found;
}

void allred_row_table_read(const allred_row_table *table, const uint32_t *numbers, size_t count,
                           allred_row_columns to) {
  const allred_row_form *form = &table->form;
  for (size_t i = 0; i < count; i++) {
    row *at = row_of(table, numbers[i]);
    if (to.ids) to.ids[i] = at->id;
    if (to.seen) to.seen[i] = at->seen;
    if (to.steps) to.steps[i] = at->step;
    if (to.vectors) load_vector(form, to.vectors + i * form->dim, at->data);
    for (int slot = 0; slot < ALLRED_ROW_SLOTS; slot++)
      if (to.slots[slot] && form->slots[slot])
        memcpy(to.slots[slot] + i * form->slots[slot], slot_of(table, at, slot), form->slots[slot] * sizeof(float));
  }
}

int allred_row_table_write(allred_row_table *table, size_t count, allred_row_columns from) {
  const allred_row_form *form = &table->form;
  for (size_t i = 0; i < count; i++) {
    if (reserve(table, 1) < 0) return -1;
    const uint64_t hash = allred_row_hash(from.ids[i]);
    const size_t place = find_place(table, from.ids[i], hash);
    const uint64_t entry = table->index[place];
    const uint32_t number = entry ? (uint32_t)entry - 1 : make_row(table, from.ids[i], hash, place);
    if (number == NO_ROW) return -1;
    row *at = row_of(table, number);
    if (from.seen) at->seen = from.seen[i];
    if (from.steps) at->step = from.steps[i];
    if (from.vectors) store_vector(form, at->data, from.vectors + i * form->dim);
    for (int slot = 0; slot < ALLRED_ROW_SLOTS; slot++)
      if (from.slots[slot] && form->slots[slot])
        memcpy(slot_of(table, at, slot), from.slots[slot] + i * form->slots[slot], form->slots[slot] * sizeof(float));
  }
  return 0;
}
