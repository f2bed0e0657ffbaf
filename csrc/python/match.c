/*
 * Checks of lists of numpy arrays: equal shapes and dtypes as in the step before, disjoint memory, a hash of some
 * elements.
 *
 * Each step checks thousands of arrays. A parameter and its gradient take 23 ns by numpy_array.h, 415 ns in Python.
 */
#include <stdlib.h>

#include "binding.h"
#include "header.h"
#include "numpy_array.h"
#include "scan.h"

int allred_array_layout_is_known(PyObject *object) {
  const allred_array *array = allred_as_array(object);
  const int flags = ALLRED_ARRAY_C_CONTIGUOUS | ALLRED_ARRAY_WRITEABLE;
  Py_buffer view = {0};
  PyObject *dtype = PyObject_GetAttrString(object, "dtype");
  int same = dtype && PyObject_GetBuffer(object, &view, PyBUF_STRIDES | PyBUF_WRITABLE) == 0;
  same = same && view.ndim > 1 && array->data == view.buf && array->nd == view.ndim && array->descr == dtype &&
         (array->flags & flags) == flags;
  for (int i = 0; same && i < view.ndim; i++)
    same = array->dimensions[i] == view.shape[i] && array->strides[i] == view.strides[i];
  if (view.obj) PyBuffer_Release(&view);
  Py_XDECREF(dtype);
  PyErr_Clear();
  return same;
}

PyObject *allred_python_reads_arrays(PyObject *module, PyObject *array) {
  return PyBool_FromLong(allred_array_layout_is_known(array));
}

/* Whether `object` is of exactly this array type, shape and dtype, and has these flags. */
static int has_layout(PyObject *object, PyObject *type, PyObject *shape, PyObject *dtype, int flags) {
  if ((PyObject *)Py_TYPE(object) != type) return 0;
  const allred_array *array = allred_as_array(object);
  if (array->descr != dtype || array->nd != PyTuple_Size(shape) || (array->flags & flags) != flags) return 0;
  for (int i = 0; i < array->nd; i++)
    if (array->dimensions[i] != PyLong_AsSsize_t(PyTuple_GetItem(shape, i))) return 0;
  return 1;
}

PyObject *allred_python_match(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  if (count != 4 || !PyList_Check(args[1]) || !PyList_Check(args[2]) || !PyList_Check(args[3]))
    return PyErr_Format(PyExc_TypeError, "match(array_type, tensors: list, params: list, grads: list)");
  const Py_ssize_t tensors = PyList_Size(args[1]);
  if (PyList_Size(args[2]) != tensors || PyList_Size(args[3]) != tensors) Py_RETURN_FALSE;
  const int param_flags = ALLRED_ARRAY_C_CONTIGUOUS | ALLRED_ARRAY_WRITEABLE;
  int matches = 1;
  for (Py_ssize_t i = 0; i < tensors && matches; i++) {
    PyObject *tensor = PyList_GetItem(args[1], i);
    PyObject *shape = PyTuple_Check(tensor) && PyTuple_Size(tensor) == 3 ? PyTuple_GetItem(tensor, 1) : NULL;
    if (!shape || !PyTuple_Check(shape))
      return PyErr_Format(PyExc_TypeError, "tensor %zd is not (name, shape, dtype)", i);
    PyObject *dtype = PyTuple_GetItem(tensor, 2);
    matches = has_layout(PyList_GetItem(args[2], i), args[0], shape, dtype, param_flags) &&
              has_layout(PyList_GetItem(args[3], i), args[0], shape, dtype, ALLRED_ARRAY_C_CONTIGUOUS);
  }
  return PyErr_Occurred() ? NULL : PyBool_FromLong(matches); /* the error of a shape that has no integers */
}

/* Add an address to a table of 2^bits slots, which has free ones. Return 0 if it is there already. */
static int add_address(uintptr_t *table, int bits, uintptr_t address) {
  const size_t mask = ((size_t)1 << bits) - 1;
  size_t at = (size_t)((uint64_t)address * UINT64_C(0x9E3779B97F4A7C15) >> (64 - bits));
  while (table[at] && table[at] != address) at = (at + 1) & mask;
  if (table[at]) return 0;
  table[at] = address;
  return 1;
}

/* Return whether the arrays, which own their memory, have different addresses; -1 if allocation fails. */
static int addresses_differ(PyObject *list, Py_ssize_t arrays) {
  int bits = 1, found = 1;
  while ((Py_ssize_t)1 << bits < 2 * arrays) bits++;
  uintptr_t *table = PyMem_Calloc((size_t)1 << bits, sizeof *table);
  if (!table) return -1;
  for (Py_ssize_t i = 0; i < arrays && found; i++)
    found = add_address(table, bits, (uintptr_t)allred_as_array(PyList_GetItem(list, i))->data);
  PyMem_Free(table);
  return found;
}

typedef struct {
  uintptr_t start, stop;
} memory_range;

static int compare_starts(const void *a, const void *b) {
  const uintptr_t first = ((const memory_range *)a)->start, second = ((const memory_range *)b)->start;
  return first < second ? -1 : first > second;
}

static int ranges_are_disjoint(memory_range *ranges, Py_ssize_t count) {
  Py_ssize_t ascending = 1;
  while (ascending < count && ranges[ascending].start >= ranges[ascending - 1].stop) ascending++;
  if (ascending >= count) return 1;
  qsort(ranges, (size_t)count, sizeof *ranges, compare_starts);
  for (Py_ssize_t i = 1; i < count; i++)
    if (ranges[i].start < ranges[i - 1].stop) return 0;
  return 1;
}

/* Return the bytes of an element; -1 with an error. known: the dtype of the last array, and its result. */
static Py_ssize_t element_bytes(const allred_array *array, PyObject **known, Py_ssize_t last) {
  if (array->descr == *known) return last;
  static PyObject *name;
  if (!name && !(name = PyUnicode_InternFromString("itemsize"))) return -1;
  PyObject *size = PyObject_GetAttr(array->descr, name);
  const Py_ssize_t bytes = size ? PyLong_AsSsize_t(size) : -1;
  Py_XDECREF(size);
  *known = array->descr;
  return bytes;
}

static Py_ssize_t count_elements(const allred_array *array) {
  Py_ssize_t count = 1;
  for (int axis = 0; axis < array->nd; axis++) count *= array->dimensions[axis];
  return count;
}

/* Return whether the memory of contiguous arrays is disjoint; -1 if allocation fails, or with an error set. */
static int memory_is_disjoint(PyObject *list, Py_ssize_t arrays) {
  memory_range *ranges = PyMem_Malloc((size_t)arrays * sizeof *ranges);
  PyObject *dtype = NULL;
  Py_ssize_t kept = 0, itemsize = 0;
  for (Py_ssize_t i = 0; i < arrays && ranges && itemsize >= 0; i++) {
    const allred_array *array = allred_as_array(PyList_GetItem(list, i));
    itemsize = element_bytes(array, &dtype, itemsize);
    const uintptr_t start = (uintptr_t)array->data;
    const Py_ssize_t bytes = count_elements(array) * itemsize;
    if (bytes > 0) ranges[kept++] = (memory_range){start, start + (size_t)bytes};
  }
  const int disjoint = !ranges || itemsize < 0 ? -1 : ranges_are_disjoint(ranges, kept);
  PyMem_Free(ranges);
  return disjoint;
}

PyObject *allred_python_disjoint(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(args[1])) return PyErr_Format(PyExc_TypeError, "disjoint(array_type, arrays: list)");
  const Py_ssize_t arrays = PyList_Size(args[1]);
  int owned = ALLRED_ARRAY_OWNDATA;
  for (Py_ssize_t i = 0; i < arrays; i++) {
    PyObject *object = PyList_GetItem(args[1], i);
    if ((PyObject *)Py_TYPE(object) != args[0]) Py_RETURN_FALSE;
    const int flags = allred_as_array(object)->flags;
    if (!(flags & ALLRED_ARRAY_WRITEABLE)) Py_RETURN_FALSE;
    if (!(flags & (ALLRED_ARRAY_C_CONTIGUOUS | ALLRED_ARRAY_F_CONTIGUOUS))) Py_RETURN_FALSE;
    owned &= flags;
  }
  const int disjoint = owned ? addresses_differ(args[1], arrays) : memory_is_disjoint(args[1], arrays);
  if (disjoint < 0) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
  return PyBool_FromLong(disjoint);
}

#define WINDOW_ELEMENTS 1024 /* _ELEMENTS in modes/detect/drift_window.py */

static Py_ssize_t start_at(const char *starts, Py_ssize_t index) {
  int64_t start;
  memcpy(&start, starts + index * (Py_ssize_t)sizeof start, sizeof start);
  return (Py_ssize_t)start;
}

/* Return the last index whose start is <= at, 0 if there is none. The starts ascend. */
static Py_ssize_t last_start(const char *starts, Py_ssize_t count, Py_ssize_t at) {
  Py_ssize_t low = 0;
  for (Py_ssize_t high = count; high - low > 1;) {
    const Py_ssize_t middle = low + (high - low) / 2;
    if (start_at(starts, middle) <= at)
      low = middle;
    else
      high = middle;
  }
  return low;
}

PyObject *allred_python_hash_window(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  if (count != 4 || !PyList_Check(args[1]))
    return PyErr_Format(PyExc_TypeError, "hash_window(array_type, arrays: list, starts: bytes, step)");
  const Py_ssize_t arrays = PyList_Size(args[1]), step = PyLong_AsSsize_t(args[3]);
  if (PyErr_Occurred()) return NULL;
  if (step < 0 || PyBytes_Size(args[2]) != (arrays + 1) * (Py_ssize_t)sizeof(int64_t))
    return PyErr_Format(PyExc_ValueError, "step must be >= 0, and starts have one int64 more than there are arrays");
  const char *starts = PyBytes_AsString(args[2]);
  const Py_ssize_t windows = (start_at(starts, arrays) + WINDOW_ELEMENTS - 1) / WINDOW_ELEMENTS;
  const Py_ssize_t at = windows > 0 ? step % windows * WINDOW_ELEMENTS : 0;
  const Py_ssize_t first = last_start(starts, arrays + 1, at);
  Py_ssize_t start = at - start_at(starts, first), left = WINDOW_ELEMENTS;
  PyObject *dtype = NULL;
  Py_ssize_t itemsize = 0;
  uint64_t hash = 0;
  for (Py_ssize_t i = first; i < arrays && left > 0; i++, start = 0) {
    PyObject *object = PyList_GetItem(args[1], i);
    const allred_array *array = allred_as_array(object);
    if ((PyObject *)Py_TYPE(object) != args[0] || !(array->flags & ALLRED_ARRAY_C_CONTIGUOUS)) Py_RETURN_NONE;
    if ((itemsize = element_bytes(array, &dtype, itemsize)) < 0) return NULL;
    const Py_ssize_t behind = count_elements(array) - start, taken = behind < left ? behind : left;
    if (taken <= 0) continue;
    const uint64_t found = allred_hash(array->data + start * itemsize, (size_t)(taken * itemsize));
    hash = allred_mix(hash, found);
    left -= taken;
  }
  return PyLong_FromUnsignedLongLong(hash >> 16 << 16);
}
