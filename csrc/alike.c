/* Thousands of arrays are looked at in each step. Read as numpy_array.h has them a pair of vectors takes 23 ns; Python
 * takes 415 for it. */
#include "alike.h"

#include "numpy_array.h"

PyObject *allred_python_reads_arrays(PyObject *module, PyObject *array) {
  (void)module;
  return PyBool_FromLong(allred_array_is_as_here(array));
}

/* Whether it is an exact numpy array of this shape and dtype, with these flags. */
static int is_like(PyObject *object, PyObject *type, PyObject *shape, PyObject *dtype, int flags) {
  if ((PyObject *)Py_TYPE(object) != type) return 0;
  const allred_array *array = allred_as_array(object);
  if (array->descr != dtype || array->nd != PyTuple_Size(shape) || (array->flags & flags) != flags) return 0;
  for (int i = 0; i < array->nd; i++)
    if (array->dimensions[i] != PyLong_AsSsize_t(PyTuple_GetItem(shape, i))) return 0;
  return 1;
}

PyObject *allred_python_alike(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  (void)module;
  if (count != 4 || !PyList_Check(args[1]) || !PyList_Check(args[2]) || !PyList_Check(args[3]))
    return PyErr_Format(PyExc_TypeError, "alike(array_type, tensors: list, params: list, grads: list)");
  const Py_ssize_t tensors = PyList_Size(args[1]);
  if (PyList_Size(args[2]) != tensors || PyList_Size(args[3]) != tensors) Py_RETURN_FALSE;
  const int param_flags = ALLRED_ARRAY_C_CONTIGUOUS | ALLRED_ARRAY_WRITEABLE;
  int alike = 1;
  for (Py_ssize_t i = 0; i < tensors && alike; i++) {
    PyObject *tensor = PyList_GetItem(args[1], i);
    PyObject *shape = PyTuple_Check(tensor) && PyTuple_Size(tensor) == 3 ? PyTuple_GetItem(tensor, 1) : NULL;
    if (!shape || !PyTuple_Check(shape))
      return PyErr_Format(PyExc_TypeError, "tensor %zd is not (name, shape, dtype)", i);
    PyObject *dtype = PyTuple_GetItem(tensor, 2);
    alike = is_like(PyList_GetItem(args[2], i), args[0], shape, dtype, param_flags) &&
            is_like(PyList_GetItem(args[3], i), args[0], shape, dtype, ALLRED_ARRAY_C_CONTIGUOUS);
  }
  return PyErr_Occurred() ? NULL : PyBool_FromLong(alike); /* of a shape that is not of numbers */
}
