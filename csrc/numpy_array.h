/*
 * What numpy promises of its arrays to programs that were compiled earlier: the fields of PyArrayObject_fields, of its
 * ndarraytypes.h, at the same places in numpy 1 and 2. To read them takes less than to ask for a buffer. It is done
 * only where an array was found to be so (allred_array_is_as_here).
 */
#ifndef ALLRED_NUMPY_ARRAY_H
#define ALLRED_NUMPY_ARRAY_H

#include <Python.h>

#define ALLRED_ARRAY_C_CONTIGUOUS 0x0001
#define ALLRED_ARRAY_WRITEABLE 0x0400

typedef struct {
  PyObject_HEAD char *data;
  int nd;
  Py_ssize_t *dimensions, *strides; /* nd of each; strides in bytes */
  PyObject *base, *descr;
  int flags;
} allred_array;

static inline const allred_array *allred_as_array(PyObject *object) {
  return (const allred_array *)(const void *)object;
}

/* Whether the fields of this array, a C-contiguous and writable one of at least two dimensions, are what its buffer and
 * its dtype are. 0 too if it is none. */
static inline int allred_array_is_as_here(PyObject *object) {
  const allred_array *array = allred_as_array(object);
  const int wanted = ALLRED_ARRAY_C_CONTIGUOUS | ALLRED_ARRAY_WRITEABLE;
  Py_buffer view = {0};
  PyObject *dtype = PyObject_GetAttrString(object, "dtype");
  int is = dtype && PyObject_GetBuffer(object, &view, PyBUF_STRIDES | PyBUF_WRITABLE) == 0;
  is = is && view.ndim > 1 && array->data == view.buf && array->nd == view.ndim && array->descr == dtype &&
       (array->flags & wanted) == wanted;
  for (int i = 0; is && i < view.ndim; i++)
    is = array->dimensions[i] == view.shape[i] && array->strides[i] == view.strides[i];
  if (view.obj) PyBuffer_Release(&view);
  Py_XDECREF(dtype);
  PyErr_Clear();
  return is;
}

#endif
