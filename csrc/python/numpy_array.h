/*
 * The fields of a numpy array: those of PyArrayObject_fields in numpy's ndarraytypes.h, which numpy 1 and 2 keep at the
 * same places for programs compiled earlier. To read them is faster than to request a buffer. They are read only after
 * allred_array_layout_is_known() has found them to be correct for an array of the same type.
 */
#ifndef ALLRED_NUMPY_ARRAY_H
#define ALLRED_NUMPY_ARRAY_H

#include <Python.h>

#define ALLRED_ARRAY_C_CONTIGUOUS 0x0001
#define ALLRED_ARRAY_F_CONTIGUOUS 0x0002
#define ALLRED_ARRAY_OWNDATA 0x0004
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

/* Whether the fields of this array (C-contiguous, writable, two dimensions or more) equal those of its buffer and its
 * dtype. 0 also if the object is not an array. Defined in match.c. */
int allred_array_layout_is_known(PyObject *object);

#endif
