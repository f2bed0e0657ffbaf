/* Whether a step brings arrays like those of the step before it, for module.c. */
#ifndef ALLRED_ALIKE_H
#define ALLRED_ALIKE_H

#include <Python.h>

/* reads_arrays(array): whether alike() may be used here; array: C-contiguous, writable, of two dimensions or more. */
PyObject *allred_python_reads_arrays(PyObject *module, PyObject *array);

/* alike(array_type, tensors, params, grads) */
PyObject *allred_python_alike(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
