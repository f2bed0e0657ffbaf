/*
 * The Python binding, the only file that includes Python.h. Limited API of 3.11: one build serves every later Python.
 * Arguments are checked here, completely, before the GIL is released; the C below it trusts them.
 */
#include <Python.h>

#include "exit.h"
#include "fuse.h"

/* Buffers of a list of tensors, held while C works on them. */
typedef struct {
  Py_buffer *views;
  allred_piece *pieces;
  Py_ssize_t count;
} tensor_list;

static void release_tensors(tensor_list *list) {
  for (Py_ssize_t i = 0; i < list->count; i++) PyBuffer_Release(&list->views[i]);
  PyMem_Free(list->views);
  PyMem_Free(list->pieces);
}

static int acquire_tensors(PyObject *tensors, int flags, tensor_list *list) {
  *list = (tensor_list){NULL, NULL, 0};
  if (!PyList_Check(tensors)) {
    PyErr_SetString(PyExc_TypeError, "tensors must be a list of contiguous buffers");
    return -1;
  }
  const Py_ssize_t count = PyList_Size(tensors);
  list->views = PyMem_Calloc(count ? count : 1, sizeof *list->views);
  list->pieces = PyMem_Calloc(count ? count : 1, sizeof *list->pieces);
  if (!list->views || !list->pieces) {
    release_tensors(list);
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    if (PyObject_GetBuffer(PyList_GetItem(tensors, i), &list->views[i], flags) < 0) {
      release_tensors(list);
      return -1;
    }
    list->pieces[i] = (allred_piece){list->views[i].buf, (size_t)list->views[i].len};
    list->count = i + 1;
  }
  return 0;
}

static int check_size(const tensor_list *list, const Py_buffer *buffer) {
  const size_t needed = allred_pieces_bytes(list->pieces, (size_t)list->count);
  if (needed <= (size_t)buffer->len) return 0;
  PyErr_Format(PyExc_ValueError, "the tensors take %zu bytes but the fusion buffer has %zd", needed, buffer->len);
  return -1;
}

/* Both directions differ only in who must be writable and who is copied to whom. */
static PyObject *copy(PyObject *args, int packing) {
  PyObject *tensors, *target;
  Py_buffer buffer;
  tensor_list list;
  if (!PyArg_ParseTuple(args, packing ? "OO:pack" : "OO:unpack", &tensors, &target)) return NULL;
  if (PyObject_GetBuffer(target, &buffer, packing ? PyBUF_CONTIG : PyBUF_CONTIG_RO) < 0) return NULL;
  if (acquire_tensors(tensors, packing ? PyBUF_CONTIG_RO : PyBUF_CONTIG, &list) < 0) {
    PyBuffer_Release(&buffer);
    return NULL;
  }
  const int status = check_size(&list, &buffer);
  if (status == 0) {
    Py_BEGIN_ALLOW_THREADS;
    if (packing)
      allred_pack(list.pieces, (size_t)list.count, buffer.buf);
    else
      allred_unpack(list.pieces, (size_t)list.count, buffer.buf);
    Py_END_ALLOW_THREADS;
  }
  release_tensors(&list);
  PyBuffer_Release(&buffer);
  if (status < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *pack(PyObject *self, PyObject *args) {
  (void)self;
  return copy(args, 1);
}

static PyObject *unpack(PyObject *self, PyObject *args) {
  (void)self;
  return copy(args, 0);
}

static PyObject *arm_exit(PyObject *self, PyObject *args) {
  (void)self;
  Py_ssize_t finalized, finalize, abort, comm;
  int rank, stuck;
  const char *host;
  if (!PyArg_ParseTuple(args, "nnnnisp:arm_exit", &finalized, &finalize, &abort, &comm, &rank, &host, &stuck))
    return NULL;
  const allred_exit_mpi mpi = {(int (*)(int *))finalized, (int (*)(void))finalize, (int (*)(intptr_t, int))abort,
                               (intptr_t)comm};
  return PyBool_FromLong(allred_exit_arm(mpi, rank, host, stuck) == 0);
}

static PyMethodDef methods[] = {
    {"pack", pack, METH_VARARGS, "pack(tensors, buffer): copy the tensors' bytes, in order, to the buffer."},
    {"unpack", unpack, METH_VARARGS, "unpack(tensors, buffer): fill the tensors, in order, from the buffer."},
    {"arm_exit", arm_exit, METH_VARARGS,
     "arm_exit(finalized, finalize, abort, comm, rank, host, stuck): what this process does last; False where libc "
     "cannot."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT,
                                        .m_name = "allred.native._kernels",
                                        .m_doc = "The compiled kernels of allred (csrc/).",
                                        .m_size = 0,
                                        .m_methods = methods};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
