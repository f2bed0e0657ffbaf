/* RowTable, a type for row_table.h, and the functions of distinct_ids.h. Arrays are contiguous buffers. */
#include <float.h>
#include <math.h>

#include "binding.h"
#include "distinct_ids.h"
#include "reduce.h"
#include "row_table.h"

typedef struct {
  PyObject_HEAD allred_row_table *table;
  allred_row_form form;
  int busy; /* a thread uses the table without the GIL */
} RowTable;

/* ---- arguments */

/* Acquired buffers, with the error that was found first. */
typedef struct {
  Py_buffer views[5 + ALLRED_ROW_SLOTS];
  int count, failed;
} buffers;

/* Acquire an array with `rows` times `row_bytes` bytes. NULL with an exception set. */
static void *take(buffers *all, PyObject *object, const char *name, size_t rows, size_t row_bytes, int writable) {
  if (all->failed) return NULL;
  Py_buffer *view = &all->views[all->count];
  if (PyObject_GetBuffer(object, view, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) < 0) return all->failed = 1, NULL;
  all->count++;
  if ((size_t)view->len == rows * row_bytes) return view->buf;
  PyErr_Format(PyExc_ValueError, "%s has %zd bytes; %zu times %zu are needed", name, view->len, rows, row_bytes);
  return all->failed = 1, NULL;
}

/* Acquire an array of any number of rows, and return this number. */
static size_t take_any(buffers *all, PyObject *object, const char *name, size_t row_bytes, void **data, int writable) {
  Py_buffer *view = &all->views[all->count];
  *data = NULL;
  if (all->failed || PyObject_GetBuffer(object, view, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) < 0)
    return all->failed = 1, 0;
  all->count++;
  const size_t rows = (size_t)view->len / row_bytes;
  if ((size_t)view->len % row_bytes || rows > ALLRED_MAX_IDS) {
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes; it must be a multiple of %zu bytes, and at most %zu rows", name,
                 view->len, row_bytes, ALLRED_MAX_IDS);
    return all->failed = 1, 0;
  }
  *data = view->buf;
  return rows;
}

/* Release the buffers, and return a result: NULL if there was an error. */
static PyObject *finish(buffers *all, PyObject *result) {
  while (all->count) PyBuffer_Release(&all->views[--all->count]);
  if (!all->failed) return result;
  Py_XDECREF(result);
  return NULL;
}

static int check_free(const RowTable *self) {
  if (self->table && !self->busy) return 1;
  PyErr_Format(PyExc_ValueError, self->table ? "another thread uses this table" : "the table is not constructed");
  return 0;
}

/* Run a statement on tables without the GIL. */
#define ALONE(self, statement)                                                                                         \
  do {                                                                                                                 \
    (self)->busy = 1;                                                                                                  \
    Py_BEGIN_ALLOW_THREADS;                                                                                            \
    statement;                                                                                                         \
    Py_END_ALLOW_THREADS;                                                                                              \
    (self)->busy = 0;                                                                                                  \
  } while (0)

static PyObject *none_or_no_memory(buffers *all, int failed) {
  if (failed) all->failed = 1, PyErr_NoMemory();
  return finish(all, failed ? NULL : Py_NewRef(Py_None));
}

/* ---- construction */

static int construct(RowTable *self, PyObject *args, PyObject *unused) {
  Py_ssize_t dim, slots[ALLRED_ROW_SLOTS];
  allred_row_form *form = &self->form;
  unsigned long long seed;
  unsigned int admit_after;
  if (self->table) return PyErr_SetString(PyExc_TypeError, "the table is constructed already"), -1;
  if (!PyArg_ParseTuple(args, "np(nnn)(fff)iffKI:RowTable", &dim, &form->half, &slots[0], &slots[1], &slots[2],
                        &form->slot_values[0], &form->slot_values[1], &form->slot_values[2], &form->init, &form->a,
                        &form->b, &seed, &admit_after))
    return -1;
  if (dim < 1 || dim > 1 << 24 || form->init < 0 || form->init >= ALLRED_INITS)
    return PyErr_Format(PyExc_ValueError, "dim must be 1 to 2**24, and init 0 to %d", ALLRED_INITS - 1), -1;
  for (int i = 0; i < ALLRED_ROW_SLOTS; i++) {
    if (slots[i] != 0 && slots[i] != 1 && slots[i] != dim)
      return PyErr_Format(PyExc_ValueError, "a slot has 0, 1 or %zd elements, not %zd", dim, slots[i]), -1;
    form->slots[i] = (size_t)slots[i];
  }
  form->dim = (size_t)dim, form->seed = seed, form->admit_after = admit_after;
  if (!(self->table = allred_row_table_new(form))) return PyErr_NoMemory(), -1;
  return 0;
}

static void destruct(RowTable *self) {
  allred_row_table_free(self->table);
  allred_free_object(self);
}

static size_t vector_bytes(const RowTable *self) {
  return self->form.dim * (self->form.half ? sizeof(uint16_t) : sizeof(float));
}

/* ---- methods */

static PyObject *lookup(RowTable *self, PyObject *args) {
  PyObject *ids, *vectors;
  unsigned int step;
  buffers all = {.count = 0};
  void *id;
  int result = 0;
  if (!check_free(self) || !PyArg_ParseTuple(args, "OOI:lookup", &ids, &vectors, &step)) return NULL;
  const size_t count = take_any(&all, ids, "ids", sizeof(uint64_t), &id, 0);
  void *out = take(&all, vectors, "vectors", count, vector_bytes(self), 1);
  if (all.failed) return finish(&all, NULL);
  ALONE(self, result = allred_row_table_lookup(self->table, id, count, out, step));
  return none_or_no_memory(&all, result < 0);
}

typedef struct {
  allred_update kernel;
  double numbers[ALLRED_RULE_NUMBERS];
} row_rule;

/* Whether the rule exists, its numbers are floats in range, and the table has its slots; else an exception is set. */
static int read_rule(const RowTable *self, const char *name, PyObject *numbers, row_rule *to) {
  const allred_rule *rule = allred_find_rule(name);
  if (!rule) return PyErr_Format(PyExc_ValueError, "there is no rule '%s'; see csrc/update.h", name), 0;
  if (PyTuple_Size(numbers) != rule->numbers)
    return PyErr_Format(PyExc_ValueError, "%s takes %d numbers, got %zd", name, rule->numbers, PyTuple_Size(numbers)),
           0;
  for (int i = 0; i < rule->numbers; i++) {
    to->numbers[i] = PyFloat_AsDouble(PyTuple_GetItem(numbers, i));
    if (PyErr_Occurred()) return 0;
    if (!(fabs(to->numbers[i]) <= FLT_MAX))
      return PyErr_Format(PyExc_ValueError, "number %d of %s is not a finite float32", i, name), 0;
  }
  for (int i = 2; i < ALLRED_RULE_ARRAYS; i++) {
    const size_t slot = self->form.slots[i - 2], expected = rule->slot_per_row ? 1 : self->form.dim;
    if (i < rule->arrays ? (slot ? slot != expected : i < rule->needed) : slot != 0)
      return PyErr_Format(PyExc_ValueError, "slot %d of the table does not fit %s", i - 2, name), 0;
  }
  to->kernel = allred_update_kernel(rule, sizeof(float), allred_variants() - 1);
  return 1;
}

static PyObject *update(RowTable *self, PyObject *args) {
  PyObject *ids, *gradients, *numbers;
  const char *name;
  unsigned int step;
  buffers all = {.count = 0};
  void *id;
  row_rule rule;
  size_t updated = 0;
  if (!check_free(self) ||
      !PyArg_ParseTuple(args, "OOsO!I:update", &ids, &gradients, &name, &PyTuple_Type, &numbers, &step) ||
      !read_rule(self, name, numbers, &rule))
    return NULL;
  const size_t count = take_any(&all, ids, "ids", sizeof(uint64_t), &id, 0);
  const float *gradient = take(&all, gradients, "gradients", count, self->form.dim * sizeof(float), 0);
  if (all.failed) return finish(&all, NULL);
  ALONE(self, updated = allred_row_table_update(self->table, id, count, gradient, rule.kernel, rule.numbers, step));
  return finish(&all, PyLong_FromSize_t(updated));
}

static PyObject *add(RowTable *self, PyObject *args) {
  PyObject *ids, *gradients;
  float weight;
  buffers all = {.count = 0};
  void *id;
  int result = 0;
  if (!check_free(self) || !PyArg_ParseTuple(args, "OOf:add", &ids, &gradients, &weight)) return NULL;
  if (self->form.half) return PyErr_Format(PyExc_ValueError, "add() needs a table with float32 vectors");
  const size_t count = take_any(&all, ids, "ids", sizeof(uint64_t), &id, 0);
  const float *gradient = take(&all, gradients, "gradients", count, self->form.dim * sizeof(float), 0);
  if (all.failed) return finish(&all, NULL);
  ALONE(self, result = allred_row_table_add(self->table, id, count, gradient, weight));
  return none_or_no_memory(&all, result < 0);
}

static PyObject *update_mean(RowTable *self, PyObject *args) {
  PyObject *other, *numbers;
  const char *name;
  float divisor;
  unsigned int step;
  row_rule rule;
  size_t updated = 0;
  if (!check_free(self) || !PyArg_ParseTuple(args, "O!fsO!I:update_mean", Py_TYPE((PyObject *)self), &other, &divisor,
                                             &name, &PyTuple_Type, &numbers, &step))
    return NULL;
  RowTable *sums = (RowTable *)other;
  if (!check_free(sums) || !read_rule(self, name, numbers, &rule)) return NULL;
  if (sums->form.half || sums->form.dim != self->form.dim || sums == self)
    return PyErr_Format(PyExc_ValueError, "the table of sums needs float32 vectors of %zu elements", self->form.dim);
  sums->busy = 1;
  ALONE(self,
        updated = allred_row_table_update_mean(self->table, sums->table, divisor, rule.kernel, rule.numbers, step));
  sums->busy = 0;
  return PyLong_FromSize_t(updated);
}

static PyObject *clear(RowTable *self, PyObject *unused) {
  if (!check_free(self)) return NULL;
  allred_row_table_clear(self->table);
  Py_RETURN_NONE;
}

static PyObject *remove_older(RowTable *self, PyObject *args) {
  unsigned int step;
  size_t removed = 0;
  if (!check_free(self) || !PyArg_ParseTuple(args, "I:remove_older", &step)) return NULL;
  ALONE(self, removed = allred_row_table_remove_older(self->table, step));
  return PyLong_FromSize_t(removed);
}

static PyObject *select_rows(RowTable *self, PyObject *args) {
  PyObject *numbers;
  unsigned int since;
  buffers all = {.count = 0};
  size_t found = 0;
  if (!check_free(self) || !PyArg_ParseTuple(args, "IO:select", &since, &numbers)) return NULL;
  uint32_t *number = take(&all, numbers, "numbers", allred_row_table_rows(self->table), sizeof *number, 1);
  if (all.failed) return finish(&all, NULL);
  ALONE(self, found = allred_row_table_select(self->table, since, number));
  return finish(&all, PyLong_FromSize_t(found));
}

/* As `take`; NULL for None. */
static void *take_given(buffers *all, PyObject *object, const char *name, size_t rows, size_t row_bytes, int writable) {
  return object == Py_None ? NULL : take(all, object, name, rows, row_bytes, writable);
}

/* Acquire the columns of `rows` rows. */
static allred_row_columns take_columns(RowTable *self, buffers *all, size_t rows, PyObject *const *columns,
                                       PyObject *slots, int writable) {
  allred_row_columns to = {NULL};
  to.ids = take_given(all, columns[0], "ids", rows, sizeof *to.ids, writable);
  to.seen = take_given(all, columns[1], "seen", rows, sizeof *to.seen, writable);
  to.steps = take_given(all, columns[2], "steps", rows, sizeof *to.steps, writable);
  to.vectors = take_given(all, columns[3], "vectors", rows, self->form.dim * sizeof(float), writable);
  for (int i = 0; i < ALLRED_ROW_SLOTS && i < PyTuple_Size(slots); i++)
    to.slots[i] =
        take_given(all, PyTuple_GetItem(slots, i), "a slot", rows, self->form.slots[i] * sizeof(float), writable);
  return to;
}

static PyObject *read_rows(RowTable *self, PyObject *args) {
  PyObject *numbers, *columns[4], *slots;
  buffers all = {.count = 0};
  void *data;
  if (!check_free(self) || !PyArg_ParseTuple(args, "OOOOOO!:read", &numbers, &columns[0], &columns[1], &columns[2],
                                             &columns[3], &PyTuple_Type, &slots))
    return NULL;
  const size_t count = take_any(&all, numbers, "numbers", sizeof(uint32_t), &data, 0);
  const allred_row_columns to = take_columns(self, &all, count, columns, slots, 1);
  const uint32_t *number = data;
  for (size_t i = 0; i < count && !all.failed; i++)
    if (number[i] >= allred_row_table_rows(self->table))
      all.failed = 1, PyErr_Format(PyExc_ValueError, "there is no row %u", number[i]);
  if (all.failed) return finish(&all, NULL);
  ALONE(self, allred_row_table_read(self->table, number, count, to));
  return finish(&all, Py_NewRef(Py_None));
}

static PyObject *write_rows(RowTable *self, PyObject *args) {
  PyObject *columns[4], *slots;
  buffers all = {.count = 0};
  void *ids;
  int result = 0;
  if (!check_free(self) || !PyArg_ParseTuple(args, "OOOOO!:write", &columns[0], &columns[1], &columns[2], &columns[3],
                                             &PyTuple_Type, &slots))
    return NULL;
  const size_t count = take_any(&all, columns[0], "ids", sizeof(uint64_t), &ids, 0);
  columns[0] = Py_None;
  allred_row_columns from = take_columns(self, &all, count, columns, slots, 0);
  from.ids = ids;
  if (all.failed) return finish(&all, NULL);
  ALONE(self, result = allred_row_table_write(self->table, count, from));
  return none_or_no_memory(&all, result < 0);
}

static PyObject *get_rows(RowTable *self, void *unused) {
  return PyLong_FromSize_t(self->table ? allred_row_table_rows(self->table) : 0);
}

static PyObject *get_nbytes(RowTable *self, void *unused) {
  return PyLong_FromSize_t(self->table ? allred_row_table_bytes(self->table) : 0);
}

static PyMethodDef methods[] = {
    METHOD("lookup", lookup, METH_VARARGS, "Copy the vectors of ids; a step above 0 makes missing rows."),
    METHOD("update", update, METH_VARARGS, "Update the rows of ids with gradients; return how many."),
    METHOD("add", add, METH_VARARGS, "Add gradients, multiplied by a weight, to the rows of a table of sums."),
    METHOD("update_mean", update_mean, METH_VARARGS, "Update the rows with the sums divided by a number."),
    METHOD("clear", clear, METH_NOARGS, "Remove all rows."),
    METHOD("remove_older", remove_older, METH_VARARGS, "Remove the rows used before a step; return how many."),
    METHOD("select", select_rows, METH_VARARGS, "Write the numbers of the rows used since a step; return how many."),
    METHOD("read", read_rows, METH_VARARGS, "Copy rows by their numbers into columns."),
    METHOD("write", write_rows, METH_VARARGS, "Write rows by their ids from columns."),
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {ATTRIBUTE("rows", get_rows, "number of rows"),
                                   ATTRIBUTE("nbytes", get_nbytes, "bytes of memory"),
                                   {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, "RowTable(dim, half, slots, slot_values, init, a, b, seed, admit_after): see row_table.h."},
    {Py_tp_init, construct},
    {Py_tp_dealloc, destruct},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL}};

PyType_Spec allred_row_table_spec = {"allred.native._kernels.RowTable", sizeof(RowTable), 0, Py_TPFLAGS_DEFAULT,
                                     type_slots};

/* ---- the functions of distinct_ids.h */

PyObject *allred_python_distinct_ids(PyObject *module, PyObject *args) {
  PyObject *ids, *distinct, *positions, *counts;
  buffers all = {.count = 0};
  void *id, *owned;
  size_t found = 0;
  if (!PyArg_ParseTuple(args, "OOOO:distinct_ids", &ids, &distinct, &positions, &counts)) return NULL;
  const size_t count = take_any(&all, ids, "ids", sizeof(uint64_t), &id, 0);
  const size_t owners = take_any(&all, counts, "counts", sizeof(uint64_t), &owned, 1);
  uint64_t *to = take(&all, distinct, "distinct", count, sizeof *to, 1);
  uint32_t *position = take(&all, positions, "positions", count, sizeof *position, 1);
  if (!all.failed && (owners < 1 || owners > 1 << 20))
    all.failed = 1, PyErr_Format(PyExc_ValueError, "there must be 1 to 2**20 owners, not %zu", owners);
  if (all.failed) return finish(&all, NULL);
  Py_BEGIN_ALLOW_THREADS;
  found = allred_distinct_ids(id, count, (uint32_t)owners, to, position, owned);
  Py_END_ALLOW_THREADS;
  if (found == SIZE_MAX) all.failed = 1, PyErr_NoMemory();
  return finish(&all, PyLong_FromSize_t(found));
}

/* Acquire positions, each below `distinct`. */
static size_t take_positions(buffers *all, PyObject *object, size_t distinct, const uint32_t **positions) {
  void *data;
  const size_t count = take_any(all, object, "positions", sizeof(uint32_t), &data, 0);
  *positions = data;
  for (size_t i = 0; i < count; i++)
    if ((*positions)[i] >= distinct) {
      PyErr_Format(PyExc_ValueError, "position %u is not below %zu", (*positions)[i], distinct);
      return all->failed = 1, 0;
    }
  return count;
}

/* Acquire offsets of bags: they grow from 0 to `count`. Return the number of bags. */
static size_t take_offsets(buffers *all, PyObject *object, size_t count, const uint64_t **offsets) {
  void *data;
  const size_t entries = take_any(all, object, "offsets", sizeof(uint64_t), &data, 0);
  *offsets = data;
  if (all->failed) return 0;
  int grow = entries && (*offsets)[0] == 0 && (*offsets)[entries - 1] == count;
  for (size_t i = 1; grow && i < entries; i++) grow = (*offsets)[i - 1] <= (*offsets)[i];
  if (!grow) {
    PyErr_Format(PyExc_ValueError, "offsets must grow from 0 to %zu", count);
    return all->failed = 1, 0;
  }
  return entries - 1;
}

/* Where each id of a lookup is among the distinct ones, and its bags. */
typedef struct {
  const uint32_t *positions;
  const uint64_t *offsets; /* NULL without bags */
  size_t count, results;   /* ids; vectors of the result */
} id_places;

static id_places take_places(buffers *all, PyObject *positions, PyObject *offsets, size_t distinct) {
  id_places to = {NULL, NULL, 0, 0};
  to.count = to.results = take_positions(all, positions, distinct, &to.positions);
  if (offsets != Py_None) to.results = take_offsets(all, offsets, to.count, &to.offsets);
  return to;
}

static int check_dim(Py_ssize_t dim) {
  if (dim >= 1 && dim <= 1 << 24) return 1;
  return PyErr_Format(PyExc_ValueError, "dim must be 1 to 2**24, not %zd", dim), 0;
}

/* spread_rows(out, rows, half, positions, dim, offsets=None, mean=False) */
PyObject *allred_python_spread_rows(PyObject *module, PyObject *args) {
  PyObject *out, *rows, *positions, *offsets = Py_None;
  int half, mean = 0;
  Py_ssize_t dim;
  buffers all = {.count = 0};
  void *row;
  if (!PyArg_ParseTuple(args, "OOpOn|Op:spread_rows", &out, &rows, &half, &positions, &dim, &offsets, &mean) ||
      !check_dim(dim))
    return NULL;
  const size_t distinct = take_any(&all, rows, "rows", (size_t)dim * (half ? 2 : sizeof(float)), &row, 0);
  const id_places at = take_places(&all, positions, offsets, distinct);
  float *to = take(&all, out, "out", at.results, (size_t)dim * sizeof *to, 1);
  if (all.failed) return finish(&all, NULL);
  Py_BEGIN_ALLOW_THREADS;
  if (at.offsets)
    allred_pool_rows(to, row, half, at.positions, at.offsets, at.results, (size_t)dim, mean);
  else
    allred_spread_rows(to, row, half, at.positions, at.count, (size_t)dim);
  Py_END_ALLOW_THREADS;
  return finish(&all, Py_NewRef(Py_None));
}

/* sum_gradients(out, gradients, positions, dim, offsets=None, mean=False) */
PyObject *allred_python_sum_gradients(PyObject *module, PyObject *args) {
  PyObject *out, *gradients, *positions, *offsets = Py_None;
  int mean = 0;
  Py_ssize_t dim;
  buffers all = {.count = 0};
  void *sum;
  if (!PyArg_ParseTuple(args, "OOOn|Op:sum_gradients", &out, &gradients, &positions, &dim, &offsets, &mean) ||
      !check_dim(dim))
    return NULL;
  const size_t row_bytes = (size_t)dim * sizeof(float);
  const size_t distinct = take_any(&all, out, "out", row_bytes, &sum, 1);
  const id_places at = take_places(&all, positions, offsets, distinct);
  const float *gradient = take(&all, gradients, "gradients", at.results, row_bytes, 0);
  if (all.failed) return finish(&all, NULL);
  Py_BEGIN_ALLOW_THREADS;
  if (at.offsets)
    allred_sum_pooled_gradients(sum, distinct, gradient, at.positions, at.offsets, at.results, (size_t)dim, mean);
  else
    allred_sum_gradients(sum, distinct, gradient, at.positions, at.count, (size_t)dim);
  Py_END_ALLOW_THREADS;
  return finish(&all, Py_NewRef(Py_None));
}
