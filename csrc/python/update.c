/*
 * update() and update_group(): the optimizers' updates of numpy arrays. Arguments that no kernel supports are not an
 * error: nothing has changed then, and the caller uses numpy.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "binding.h"
#include "numpy_array.h"
#include "reduce.h"
#include "update.h"

#define SMALL_BYTES (1 << 14) /* below this a kernel takes less time than releasing the GIL */

/* Whether all numbers are exact Python floats within the range of the elements: else numpy rounds otherwise, or warns.
 */
static int read_numbers(PyObject *tuple, int element_bytes, double *numbers) {
  const double largest = element_bytes == 4 ? FLT_MAX : DBL_MAX;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
    PyObject *number = PyTuple_GetItem(tuple, i);
    if (!PyFloat_CheckExact(number)) return 0;
    numbers[i] = PyFloat_AsDouble(number);
    if (!(fabs(numbers[i]) <= largest)) return 0;
  }
  return 1;
}

/* Whether `view` is an array of native floats or doubles with the type and shape of `first`, and overlaps none of the
 * views before it. 0-d arrays are left to numpy: versions before 2 compute those in double. */
static int is_supported(const Py_buffer *view, const Py_buffer *first) {
  const char *format = view->format ? view->format : "";
  format += *format == '='; /* numpy's mark of misaligned memory */
  if (strcmp(format, view->itemsize == 4 ? "f" : "d") != 0 || view->ndim < 1) return 0;
  if (view->itemsize != first->itemsize || view->ndim != first->ndim) return 0;
  for (int axis = 0; axis < view->ndim; axis++)
    if (view->shape[axis] != first->shape[axis]) return 0;
  for (const Py_buffer *other = first; other < view; other++) {
    const uintptr_t a = (uintptr_t)other->buf, b = (uintptr_t)view->buf;
    if (a < b + (size_t)view->len && b < a + (size_t)view->len) return 0;
  }
  return 1;
}

PyObject *allred_python_update(PyObject *module, PyObject *args) {
  const char *name;
  PyObject *arrays, *values;
  int variant = allred_variants() - 1;
  if (!PyArg_ParseTuple(args, "sO!O!|O&:update", &name, &PyTuple_Type, &arrays, &PyTuple_Type, &values,
                        allred_named_variant, &variant))
    return NULL;
  const allred_rule *rule = allred_find_rule(name);
  if (!rule) return PyErr_Format(PyExc_ValueError, "there is no rule '%s'; see csrc/update.h", name);
  if (PyTuple_Size(arrays) != rule->arrays || PyTuple_Size(values) != rule->numbers)
    return PyErr_Format(PyExc_ValueError, "%s takes %d arrays and %d numbers, got %zd and %zd", name, rule->arrays,
                        rule->numbers, PyTuple_Size(arrays), PyTuple_Size(values));
  Py_buffer views[ALLRED_RULE_ARRAYS];
  void *addresses[ALLRED_RULE_ARRAYS] = {NULL};
  double numbers[ALLRED_RULE_NUMBERS];
  int held = 0, supported = !rule->slot_per_row; /* an array may have several rows */
  for (int i = 0; i < rule->arrays && supported; i++) {
    PyObject *array = PyTuple_GetItem(arrays, i);
    if (array == Py_None && i >= rule->needed) continue;
    const int flags = PyBUF_ND | PyBUF_FORMAT | (i == 1 ? 0 : PyBUF_WRITABLE); /* array 1 is the gradient */
    supported =
        Py_TYPE(array) == Py_TYPE(PyTuple_GetItem(arrays, 0)) && PyObject_GetBuffer(array, &views[held], flags) == 0;
    if (!supported) break;
    addresses[i] = views[held++].buf;
    supported = is_supported(&views[held - 1], views);
  }
  PyErr_Clear(); /* the error of PyObject_GetBuffer */
  supported = supported && read_numbers(values, (int)views->itemsize, numbers);
  if (supported) {
    const allred_update kernel = allred_update_kernel(rule, (int)views->itemsize, variant);
    PyThreadState *state = views->len > SMALL_BYTES ? PyEval_SaveThread() : NULL;
    kernel(addresses, numbers, (size_t)(views->len / views->itemsize));
    if (state) PyEval_RestoreThread(state);
  }
  while (held) PyBuffer_Release(&views[--held]);
  return PyBool_FromLong(supported);
}

/* ---- update_group */

/* The arrays of one tensor: the parameter, the gradient and the slots, as in update.h. `held`: references to them. */
typedef struct {
  PyObject *held[ALLRED_RULE_ARRAYS];
  void *addresses[ALLRED_RULE_ARRAYS];
  size_t elements, bytes;
} tensor_row;

/* The arguments of update_group(). */
typedef struct {
  const allred_rule *rule;
  PyObject *array_type, *dtypes, *params, *grads, *slots, *slot_names, *numbers;
  int in_range[2];                       /* whether the numbers suit elements of 4 and of 8 bytes */
  double values[2][ALLRED_RULE_NUMBERS]; /* the same numbers twice */
} group;

/* Return array `i` of a tensor, a borrowed reference; NULL if there is none. */
static PyObject *array_of(const group *all, Py_ssize_t tensor, int i) {
  if (i < 2) return PyList_GetItem(i == 0 ? all->params : all->grads, tensor);
  PyObject *slots = PyList_GetItem(all->slots, tensor);
  return PyDict_CheckExact(slots) ? PyDict_GetItemWithError(slots, PyTuple_GetItem(all->slot_names, i - 2)) : NULL;
}

/* Whether `array` has the dtype and shape of `first`, is contiguous, and writable if it is changed. */
static int has_form_of(const allred_array *array, const allred_array *first, int changed) {
  const int flags = ALLRED_ARRAY_C_CONTIGUOUS | (changed ? ALLRED_ARRAY_WRITEABLE : 0);
  if (array->descr != first->descr || array->nd != first->nd || (array->flags & flags) != flags) return 0;
  for (int axis = 0; axis < array->nd; axis++)
    if (array->dimensions[axis] != first->dimensions[axis]) return 0;
  return 1;
}

static int overlaps(const tensor_row *row, int i) {
  const uintptr_t b = (uintptr_t)row->addresses[i];
  for (int j = 0; j < i; j++) {
    const uintptr_t a = (uintptr_t)row->addresses[j];
    if (row->addresses[j] && a < b + row->bytes && b < a + row->bytes) return 1;
  }
  return 0;
}

static void release_row(tensor_row *row) {
  for (int i = 0; i < ALLRED_RULE_ARRAYS; i++) Py_CLEAR(row->held[i]);
}

/* Fill a row that is all zeros. Return 0 if no kernel supports the tensor; is_supported() has the same conditions. */
static int fill_row(const group *all, Py_ssize_t tensor, tensor_row *row) {
  const allred_array *first = NULL;
  if (all->rule->slot_per_row) return 0;
  for (int i = 0; i < all->rule->arrays; i++) {
    if (i > 1 && PyTuple_GetItem(all->slot_names, i - 2) == Py_None) continue;
    PyObject *object = array_of(all, tensor, i);
    if (!object || (PyObject *)Py_TYPE(object) != all->array_type) return 0;
    row->held[i] = Py_NewRef(object);
    const allred_array *array = allred_as_array(object);
    if (i == 0) {
      const int is_double = array->descr == PyTuple_GetItem(all->dtypes, 1);
      if (!is_double && array->descr != PyTuple_GetItem(all->dtypes, 0)) return 0;
      if (array->nd < 1 || !all->in_range[is_double]) return 0;
      first = array, row->elements = 1;
      for (int axis = 0; axis < array->nd; axis++) row->elements *= (size_t)array->dimensions[axis];
      row->bytes = row->elements * (is_double ? sizeof(double) : sizeof(float));
    }
    row->addresses[i] = array->data;
    if (!has_form_of(array, first, i != 1) || overlaps(row, i)) return 0;
  }
  return 1;
}

static void run_rows(const group *all, const tensor_row *rows, Py_ssize_t count, size_t bytes) {
  PyThreadState *state = bytes > SMALL_BYTES ? PyEval_SaveThread() : NULL;
  for (Py_ssize_t i = 0; i < count; i++) {
    const size_t element = rows[i].elements ? rows[i].bytes / rows[i].elements : sizeof(float);
    const allred_update kernel = allred_update_kernel(all->rule, (int)element, allred_variants() - 1);
    kernel(rows[i].addresses, all->values[element == sizeof(double)], rows[i].elements);
  }
  if (state) PyEval_RestoreThread(state);
}

/* Update tensors from `start` up to the first one that no kernel supports. Return its position; -1 with an exception.
 */
static Py_ssize_t update_rows(const group *all, Py_ssize_t start) {
  const Py_ssize_t tensors = PyList_Size(all->params);
  if (start >= tensors) return tensors;
  tensor_row *rows = PyMem_Calloc((size_t)(tensors - start), sizeof *rows);
  if (!rows) return PyErr_NoMemory(), -1;
  Py_ssize_t filled = 0, held = 0;
  size_t bytes = 0;
  while (start + filled < tensors) {
    held = filled + 1;
    if (!fill_row(all, start + filled, &rows[filled])) break;
    bytes += rows[filled++].bytes;
  }
  const int failed = PyErr_Occurred() != NULL;
  if (!failed) run_rows(all, rows, filled, bytes);
  while (held) release_row(&rows[--held]);
  PyMem_Free(rows);
  return failed ? -1 : start + filled;
}

static int check_group(const group *all, const char *name) {
  if (!all->rule) return PyErr_Format(PyExc_ValueError, "there is no rule '%s'; see csrc/update.h", name), 0;
  const int slots = all->rule->arrays - 2;
  if (PyTuple_Size(all->slot_names) != slots || PyTuple_Size(all->numbers) != all->rule->numbers) {
    PyErr_Format(PyExc_ValueError, "%s takes %d slots and %d numbers, got %zd and %zd", name, slots, all->rule->numbers,
                 PyTuple_Size(all->slot_names), PyTuple_Size(all->numbers));
    return 0;
  }
  for (int i = 0; i < slots; i++)
    if (i + 2 < all->rule->needed && PyTuple_GetItem(all->slot_names, i) == Py_None)
      return PyErr_Format(PyExc_ValueError, "%s needs slot %d", name, i), 0;
  const Py_ssize_t tensors = PyList_Size(all->params);
  if (PyTuple_Size(all->dtypes) != 2 || PyList_Size(all->grads) != tensors || PyList_Size(all->slots) != tensors)
    return PyErr_Format(PyExc_ValueError, "as many gradients and slots as parameters, and two dtypes"), 0;
  return 1;
}

PyObject *allred_python_update_group(PyObject *module, PyObject *args) {
  const char *name;
  Py_ssize_t start = 0;
  group all = {NULL};
  if (!PyArg_ParseTuple(args, "OO!sO!O!O!O!O!|n:update_group", &all.array_type, &PyTuple_Type, &all.dtypes, &name,
                        &PyList_Type, &all.params, &PyList_Type, &all.grads, &PyList_Type, &all.slots, &PyTuple_Type,
                        &all.slot_names, &PyTuple_Type, &all.numbers, &start))
    return NULL;
  all.rule = allred_find_rule(name);
  if (!check_group(&all, name)) return NULL;
  if (start < 0) return PyErr_Format(PyExc_ValueError, "start must not be negative, got %zd", start);
  for (int wide = 0; wide < 2; wide++) all.in_range[wide] = read_numbers(all.numbers, wide ? 8 : 4, all.values[wide]);
  const Py_ssize_t done = update_rows(&all, start);
  return done < 0 ? NULL : PyLong_FromSsize_t(done);
}
