/*
 * The Python binding; it, alike.c, notes.c and the files of segment_object.h and mailbox_object.h alone include
 * Python.h. Limited API of 3.11: one build serves every later Python. Arguments are checked here, completely, before
 * the GIL is released; the C below it trusts them.
 */
#include <Python.h>

#include <float.h>
#include <math.h>
#include <string.h>

#include "alarm.h"
#include "alike.h"
#include "exit.h"
#include "fuse.h"
#include "mailbox_type.h"
#include "reduce.h"
#include "scan.h"
#include "segment.h"
#include "segment_type.h"
#include "update.h"

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

/* The variant of this name, "" the best; -1 with an error set where there is none. */
static int find_variant(const char *name) {
  int variant = allred_variants() - 1;
  if (*name)
    while (variant >= 0 && strcmp(name, allred_variant_name(variant)) != 0) variant--;
  if (variant < 0) PyErr_Format(PyExc_ValueError, "this CPU has no kernels named '%s'; see native.variants", name);
  return variant;
}

/* into: the dtype of what is written, if it is not that of the sources. */
static allred_reduce find_kernel(int dtype, int op, const char *name, int into) {
  const int variant = find_variant(name);
  allred_reduce kernel = NULL;
  if (variant < 0) return NULL;
  if (dtype >= 0 && dtype < ALLRED_DTYPES && op > 0 && op < ALLRED_OPS) {
    if (into == dtype) kernel = allred_reduce_kernel(variant, dtype, op);
    if (allred_narrows(into, dtype)) kernel = allred_wide_kernel(variant, dtype, into, op);
  }
  if (!kernel && into == dtype) PyErr_Format(PyExc_ValueError, "operator %d is not defined for dtype %d", op, dtype);
  if (!kernel && into != dtype)
    PyErr_Format(PyExc_ValueError, "operator %d is not defined from dtype %d into dtype %d", op, dtype, into);
  return kernel;
}

static int check_sources(const tensor_list *sources, const Py_buffer *out, int dtype, int into) {
  const size_t element = allred_dtype_bytes(dtype), out_element = allred_dtype_bytes(into);
  const size_t needed = (size_t)out->len / out_element * element;
  if (sources->count == 0) {
    PyErr_SetString(PyExc_ValueError, "there is no source to reduce");
    return -1;
  }
  if ((size_t)out->len % out_element) {
    PyErr_Format(PyExc_ValueError, "out has %zd bytes, not a multiple of its elements' %zu", out->len, out_element);
    return -1;
  }
  for (Py_ssize_t i = 0; i < sources->count; i++) {
    const Py_buffer *source = &sources->views[i];
    const uintptr_t a = (uintptr_t)source->buf, b = (uintptr_t)out->buf;
    if ((size_t)source->len != needed) {
      PyErr_Format(PyExc_ValueError, "source %zd has %zd bytes but out has %zd", i, source->len, out->len);
      return -1;
    }
    if ((a != b || into != dtype) && a < b + (size_t)out->len && b < a + (size_t)source->len) {
      PyErr_Format(PyExc_ValueError, "out overlaps source %zd; it must be that source's memory or none of it", i);
      return -1;
    }
  }
  return 0;
}

static PyObject *reduce(PyObject *self, PyObject *args) {
  (void)self;
  PyObject *list, *target;
  int dtype, op, divisor, into = -1;
  const char *variant = "";
  Py_buffer out;
  tensor_list sources;
  if (!PyArg_ParseTuple(args, "OOiii|si:reduce", &list, &target, &dtype, &op, &divisor, &variant, &into)) return NULL;
  if (into < 0) into = dtype;
  const allred_reduce kernel = find_kernel(dtype, op, variant, into);
  if (!kernel) return NULL;
  if (divisor < 1 || divisor > 1 << 24)
    return PyErr_Format(PyExc_ValueError, "the divisor must be from 1 to 2**24, got %d", divisor);
  if (PyObject_GetBuffer(target, &out, PyBUF_CONTIG) < 0) return NULL;
  if (acquire_tensors(list, PyBUF_CONTIG_RO, &sources) < 0) {
    PyBuffer_Release(&out);
    return NULL;
  }
  const void **addresses = PyMem_Calloc((size_t)sources.count + 1, sizeof *addresses);
  int status = check_sources(&sources, &out, dtype, into);
  if (!addresses) PyErr_NoMemory(), status = -1;
  if (status == 0) {
    for (Py_ssize_t i = 0; i < sources.count; i++) addresses[i] = sources.views[i].buf;
    Py_BEGIN_ALLOW_THREADS;
    kernel(out.buf, addresses, (int)sources.count, (size_t)out.len / allred_dtype_bytes(into), divisor);
    Py_END_ALLOW_THREADS;
  }
  PyMem_Free(addresses);
  release_tensors(&sources);
  PyBuffer_Release(&out);
  if (status < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *narrow(PyObject *self, PyObject *args) {
  (void)self;
  PyObject *source, *target;
  int dtype, wire;
  const char *name = "";
  Py_buffer in, out;
  if (!PyArg_ParseTuple(args, "OOii|s:narrow", &source, &target, &dtype, &wire, &name)) return NULL;
  const int variant = find_variant(name);
  if (variant < 0) return NULL;
  if (!allred_narrows(dtype, wire))
    return PyErr_Format(PyExc_ValueError, "dtype %d does not travel as dtype %d", dtype, wire);
  if (PyObject_GetBuffer(source, &in, PyBUF_CONTIG_RO) < 0) return NULL;
  if (PyObject_GetBuffer(target, &out, PyBUF_CONTIG) < 0) {
    PyBuffer_Release(&in);
    return NULL;
  }
  const size_t count = (size_t)in.len / allred_dtype_bytes(dtype);
  const int fits = (size_t)in.len == count * allred_dtype_bytes(dtype) && (size_t)out.len == count * sizeof(uint16_t);
  if (fits) {
    Py_BEGIN_ALLOW_THREADS;
    allred_narrow_kernel(variant, dtype, wire)(out.buf, in.buf, count);
    Py_END_ALLOW_THREADS;
  } else {
    PyErr_Format(PyExc_ValueError, "%zd bytes cannot be rounded into %zd", in.len, out.len);
  }
  PyBuffer_Release(&in);
  PyBuffer_Release(&out);
  if (!fits) return NULL;
  Py_RETURN_NONE;
}

/* ---- update: what is not for a kernel is no error, numpy does it */

#define SMALL_BYTES (1 << 14) /* a parameter up to here is done sooner than the GIL is given away and taken again */

/* Whether all are Python's own floats, which numpy rounds to the array's type, and fit into it: else numpy warns. */
static int take_numbers(PyObject *tuple, int element_bytes, double *numbers) {
  const double most = element_bytes == 4 ? FLT_MAX : DBL_MAX;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
    PyObject *number = PyTuple_GetItem(tuple, i);
    if (!PyFloat_CheckExact(number)) return 0;
    numbers[i] = PyFloat_AsDouble(number);
    if (!(fabs(numbers[i]) <= most)) return 0;
  }
  return 1;
}

/* Whether `view` is a contiguous array of native floats or doubles, and of the shape and type of `first`, and apart
 * from all the views before it. A 0-d array is left to numpy, which before its version 2 computes those in double. */
static int suits(const Py_buffer *view, const Py_buffer *first) {
  const char *format = view->format ? view->format : "";
  format += *format == '='; /* numpy marks misaligned memory so */
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

static PyObject *update(PyObject *self, PyObject *args) {
  (void)self;
  const char *name, *variant_name = "";
  PyObject *arrays, *values;
  if (!PyArg_ParseTuple(args, "sO!O!|s:update", &name, &PyTuple_Type, &arrays, &PyTuple_Type, &values, &variant_name))
    return NULL;
  const allred_rule *rule = allred_find_rule(name);
  const int variant = find_variant(variant_name);
  if (variant < 0) return NULL;
  if (!rule) return PyErr_Format(PyExc_ValueError, "there is no rule '%s'; see csrc/update.h", name);
  if (PyTuple_Size(arrays) != rule->arrays || PyTuple_Size(values) != rule->numbers)
    return PyErr_Format(PyExc_ValueError, "%s takes %d arrays and %d numbers, got %zd and %zd", name, rule->arrays,
                        rule->numbers, PyTuple_Size(arrays), PyTuple_Size(values));
  Py_buffer views[ALLRED_RULE_ARRAYS];
  void *addresses[ALLRED_RULE_ARRAYS] = {NULL};
  double numbers[ALLRED_RULE_NUMBERS];
  int held = 0, fits = 1;
  for (int i = 0; i < rule->arrays && fits; i++) {
    PyObject *array = PyTuple_GetItem(arrays, i);
    if (array == Py_None && i >= rule->needed) continue;
    const int flags = PyBUF_ND | PyBUF_FORMAT | (i == 1 ? 0 : PyBUF_WRITABLE); /* 1 is the gradient */
    fits = Py_TYPE(array) == Py_TYPE(PyTuple_GetItem(arrays, 0)) && PyObject_GetBuffer(array, &views[held], flags) == 0;
    if (!fits) break;
    addresses[i] = views[held++].buf;
    fits = suits(&views[held - 1], views);
  }
  PyErr_Clear(); /* of a buffer that there is not */
  if (fits && take_numbers(values, (int)views->itemsize, numbers)) {
    const allred_update kernel = allred_update_kernel(rule, (int)views->itemsize, variant);
    PyThreadState *state = views->len > SMALL_BYTES ? PyEval_SaveThread() : NULL;
    kernel(addresses, numbers, (size_t)(views->len / views->itemsize));
    if (state) PyEval_RestoreThread(state);
  } else {
    fits = 0;
  }
  while (held) PyBuffer_Release(&views[--held]);
  return PyBool_FromLong(fits);
}

static PyObject *hashes(PyObject *self, PyObject *tensors) {
  (void)self;
  tensor_list list;
  if (acquire_tensors(tensors, PyBUF_CONTIG_RO, &list) < 0) return NULL;
  uint64_t *found = PyMem_Calloc((size_t)list.count + 1, sizeof *found);
  PyObject *result = found ? PyList_New(list.count) : PyErr_NoMemory();
  if (result) {
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < list.count; i++) found[i] = allred_hash(list.pieces[i].data, list.pieces[i].bytes);
    Py_END_ALLOW_THREADS;
  }
  for (Py_ssize_t i = 0; result && i < list.count; i++) {
    PyObject *hash = PyLong_FromUnsignedLongLong(found[i]);
    if (!hash || PyList_SetItem(result, i, hash) < 0) Py_CLEAR(result);
  }
  PyMem_Free(found);
  release_tensors(&list);
  return result;
}

static PyObject *exceeds(PyObject *self, PyObject *args) {
  (void)self;
  PyObject *tensors;
  const char *variant_name = "";
  tensor_list list;
  int element_bytes, found = 0;
  unsigned int limit;
  if (!PyArg_ParseTuple(args, "OiI|s:exceeds", &tensors, &element_bytes, &limit, &variant_name)) return NULL;
  if (element_bytes != 2 && element_bytes != 4 && element_bytes != 8)
    return PyErr_Format(PyExc_ValueError, "elements must have 2, 4 or 8 bytes, got %d", element_bytes);
  if (limit > (element_bytes == 2 ? INT16_MAX : INT32_MAX))
    return PyErr_Format(PyExc_ValueError, "the limit %u has the sign's bit or more", limit);
  const int variant = find_variant(variant_name);
  if (variant < 0) return NULL;
  if (acquire_tensors(tensors, PyBUF_ANY_CONTIGUOUS, &list) < 0) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  for (Py_ssize_t i = 0; i < list.count && !found; i++)
    found = allred_exceeds(list.pieces[i].data, list.pieces[i].bytes, element_bytes, limit, variant);
  Py_END_ALLOW_THREADS;
  release_tensors(&list);
  return PyBool_FromLong(found);
}

static PyObject *variants(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  const int count = allred_variants();
  PyObject *names = PyTuple_New(count);
  for (int i = 0; names && i < count; i++) {
    PyObject *name = PyUnicode_FromString(allred_variant_name(i));
    if (!name || PyTuple_SetItem(names, i, name) < 0) Py_CLEAR(names);
  }
  return names;
}

static PyObject *segment_bytes(PyObject *self, PyObject *args) {
  (void)self;
  int ranks;
  Py_ssize_t chunk_bytes;
  if (!PyArg_ParseTuple(args, "in:segment_bytes", &ranks, &chunk_bytes)) return NULL;
  if (ranks < 1 || chunk_bytes < 1) return PyErr_Format(PyExc_ValueError, "ranks and chunk_bytes must be positive");
  return PyLong_FromSize_t(allred_segment_bytes(ranks, (size_t)chunk_bytes));
}

static PyObject *arm_exit(PyObject *self, PyObject *args) {
  (void)self;
  Py_ssize_t finalized, finalize, abort, comm;
  allred_exit_plan plan;
  if (!PyArg_ParseTuple(args, "(nnnn)ssipiii:arm_exit", &finalized, &finalize, &abort, &comm, &plan.who, &plan.words,
                        &plan.code, &plan.stuck, &plan.line, &plan.owed, &plan.life))
    return NULL;
  plan.mpi = (allred_exit_mpi){(int (*)(int *))finalized, (int (*)(void))finalize, (int (*)(intptr_t, int))abort,
                               (intptr_t)comm};
  return PyBool_FromLong(allred_exit_arm(&plan) == 0);
}

static PyObject *set_alarm(PyObject *self, PyObject *args) {
  (void)self;
  double warn_s, limit_s;
  const char *who, *what;
  int life;
  if (!PyArg_ParseTuple(args, "ddssi:alarm", &warn_s, &limit_s, &who, &what, &life)) return NULL;
  return PyBool_FromLong(allred_alarm_set(warn_s, limit_s, who, what, life, 1) == 0);
}

static PyObject *cancel_alarm(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  allred_alarm_cancel();
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"pack", pack, METH_VARARGS, "pack(tensors, buffer): copy the tensors' bytes, in order, to the buffer."},
    {"unpack", unpack, METH_VARARGS, "unpack(tensors, buffer): fill the tensors, in order, from the buffer."},
    {"reduce", reduce, METH_VARARGS,
     "reduce(sources, out, dtype_code, op_code, divisor, variant='', into=-1): see reduce.h; '' is the CPU's best "
     "variant; into: the dtype of out, if it is a wider one."},
    {"narrow", narrow, METH_VARARGS,
     "narrow(source, out, dtype_code, wire_code, variant=''): rounded to what travels; see reduce.h."},
    {"update", update, METH_VARARGS,
     "update(rule, arrays, numbers, variant=''): whether a kernel did it; else nothing is changed. See update.h."},
    {"reads_arrays", allred_python_reads_arrays, METH_O,
     "reads_arrays(array): whether alike may be used with arrays of this one's kind."},
    {"alike", (PyCFunction)(void (*)(void))allred_python_alike, METH_FASTCALL,
     "alike(array_type, tensors, params, grads): whether these are plain arrays as the tensors say."},
    {"hashes", hashes, METH_O, "hashes(tensors): a 64-bit hash of each tensor's bytes; see scan.h."},
    {"exceeds", exceeds, METH_VARARGS,
     "exceeds(tensors, element_bytes, limit, variant=''): whether a float's magnitude, as bits, is above the limit; "
     "see scan.h."},
    {"variants", variants, METH_NOARGS, "variants(): the names of the kernels that this CPU runs, the best last."},
    {"segment_bytes", segment_bytes, METH_VARARGS, "segment_bytes(ranks, chunk_bytes): what a Segment needs."},
    {"mailbox_bytes", allred_python_mailbox_bytes, METH_VARARGS,
     "mailbox_bytes(slots, slot_bytes): what a Mailbox needs."},
    {"alarm", set_alarm, METH_VARARGS,
     "alarm(warn_s, limit_s, who, what, life): say so on stderr after so many seconds, and end the process (alarm.h)."},
    {"cancel_alarm", cancel_alarm, METH_NOARGS, "cancel_alarm(): take it away."},
    {"arm_exit", arm_exit, METH_VARARGS,
     "arm_exit((finalized, finalize, abort, comm), who, words, code, stuck, line, owed, life): what this process does "
     "last "
     "(exit.h); False where libc cannot."},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, allred_add_segment_type}, {Py_mod_exec, allred_add_mailbox_type}, {0, NULL}};

static struct PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT,
                                        .m_name = "allred.native._kernels",
                                        .m_doc = "The compiled kernels of allred (csrc/).",
                                        .m_size = 0,
                                        .m_methods = methods,
                                        .m_slots = slots};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
