/*
 * Operations as Python prepares them: Segment's begin_...(record, ...) take flat contiguous buffers, and give an
 * Operation, which comes behind all others. record: its header, 64 bytes; or None for a part of the operation that
 * holds the queue up, which goes before all others.
 */
#define _GNU_SOURCE /* SSIZE_MAX */
#include <string.h>

#include "segment_object.h"

/* A new operation with room for so many tensors and the header of a record; NULL with an exception set. */
static Operation *prepare(Segment *self, PyObject *record, Py_ssize_t tensors, allred_header *header) {
  char *bytes;
  Py_ssize_t length;
  *header = (allred_header){0};
  if (!self->open) return PyErr_SetString(PyExc_ValueError, "the segment is closed"), NULL;
  if (record != Py_None) {
    if (PyBytes_AsStringAndSize(record, &bytes, &length) < 0) return NULL;
    if (length != sizeof *header) {
      PyErr_Format(PyExc_ValueError, "a header has %zu bytes, not %zd", sizeof *header, length);
      return NULL;
    }
    memcpy(header, bytes, sizeof *header);
  }
  Operation *operation = allred_new_operation(tensors);
  if (operation && allred_make_starts(operation, self->segment.ranks) < 0) Py_CLEAR(operation);
  return operation;
}

/* It is prepared, or an exception is set. */
static PyObject *begin(Segment *self, Operation *operation, PyObject *record, int prepared) {
  if (!prepared) return Py_DECREF((PyObject *)operation), NULL;
  allred_under_way(operation, self);
  if (record == Py_None)
    allred_queue_continue(&self->queue, &operation->operation);
  else
    allred_queue_put(&self->queue, &operation->operation);
  return (PyObject *)operation;
}

PyObject *allred_segment_begin_exchange(Segment *self, PyObject *args) {
  PyObject *record;
  int holds;
  allred_header header;
  if (!PyArg_ParseTuple(args, "Op:begin_exchange", &record, &holds)) return NULL;
  Operation *operation = prepare(self, record, 1, &header);
  if (!operation) return NULL;
  allred_begin_exchange(&operation->operation, &self->segment, &header);
  operation->operation.holds = holds;
  return begin(self, operation, record, 1);
}

static int kernel_exists(const Segment *self, int dtype, int op) {
  if (dtype >= 0 && dtype < ALLRED_DTYPES && op >= 0 && op < ALLRED_OPS &&
      allred_reduce_kernel(self->variant, dtype, op))
    return 1;
  PyErr_Format(PyExc_ValueError, "operator %d is not defined for dtype %d", op, dtype);
  return 0;
}

Py_ssize_t allred_by_dtype(allred_tensor *tensors, Py_ssize_t count) {
  Py_ssize_t alike = 0;
  while (alike < count && tensors[alike].bytes && tensors[alike].dtype == tensors->dtype) alike++;
  if (alike == count) return count;
  allred_tensor *sorted = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *sorted);
  Py_ssize_t kept = 0;
  if (!sorted) return PyErr_NoMemory(), -1;
  for (int dtype = 0; dtype < ALLRED_DTYPES; dtype++)
    for (Py_ssize_t i = 0; i < count; i++)
      if (tensors[i].dtype == dtype && tensors[i].bytes) sorted[kept++] = tensors[i];
  memcpy(tensors, sorted, (size_t)kept * sizeof *sorted);
  PyMem_Free(sorted);
  return kept;
}

/* One tensor as an entry of the table, its dtype given by number. */
static int enter(const Segment *self, Operation *operation, PyObject *source, PyObject *target, long dtype, int op,
                 int wire, allred_tensor *tensor) {
  if (!kernel_exists(self, (int)dtype, op)) return -1;
  const Py_buffer *in = allred_hold(operation, source, PyBUF_CONTIG_RO), *out;
  if (!in || !(out = allred_hold(operation, target, PyBUF_CONTIG))) return -1;
  if (in->len != out->len || (size_t)in->len % allred_dtype_bytes((int)dtype)) {
    PyErr_Format(PyExc_ValueError, "%zd bytes cannot be reduced into %zd", in->len, out->len);
    return -1;
  }
  *tensor = (allred_tensor){in->buf, out->buf, (size_t)in->len, (int)dtype, allred_wire_of((int)dtype, wire)};
  return 0;
}

PyObject *allred_segment_begin_allreduce(Segment *self, PyObject *args) {
  PyObject *record, *sources, *targets, *dtypes;
  allred_header header;
  int op, wire = 0;
  if (!PyArg_ParseTuple(args, "OOOOi|i:begin_allreduce", &record, &sources, &targets, &dtypes, &op, &wire)) return NULL;
  const Py_ssize_t count = PyList_Check(sources) ? PyList_Size(sources) : -1;
  if (count < 0 || !PyList_Check(targets) || !PyList_Check(dtypes) || PyList_Size(targets) != count ||
      PyList_Size(dtypes) != count)
    return PyErr_Format(PyExc_TypeError, "sources, targets and dtypes must be lists of one length");
  if (op <= 0 || op >= ALLRED_OPS) return PyErr_Format(PyExc_ValueError, "operator %d does not exist", op);
  if (wire && !allred_narrows(ALLRED_FLOAT32, wire))
    return PyErr_Format(PyExc_ValueError, "dtype %d is no wire type; float16 and bfloat16 are", wire);
  Operation *operation = prepare(self, record, count ? count : 1, &header);
  if (!operation) return NULL;
  Py_ssize_t kept = 0;
  for (Py_ssize_t i = 0; i < count && kept == 0; i++) {
    const long dtype = PyLong_AsLong(PyList_GetItem(dtypes, i));
    kept = enter(self, operation, PyList_GetItem(sources, i), PyList_GetItem(targets, i), dtype, op, wire,
                 &operation->tensors[i]);
  }
  if (kept == 0) kept = allred_by_dtype(operation->tensors, count);
  if (kept >= 0) allred_start_allreduce(self, operation, &header, kept, op);
  return begin(self, operation, record, kept >= 0);
}

/* Offsets in bytes from a list of byte counts, one a rank: their sum, or -1. */
static Py_ssize_t read_counts(const Segment *self, PyObject *counts, uint64_t *starts) {
  if (!PyList_Check(counts) || PyList_Size(counts) != self->segment.ranks) {
    PyErr_Format(PyExc_ValueError, "counts must be a list of %d numbers of bytes", self->segment.ranks);
    return -1;
  }
  starts[0] = 0;
  for (int rank = 0; rank < self->segment.ranks; rank++) {
    const Py_ssize_t bytes = PyLong_AsSsize_t(PyList_GetItem(counts, rank));
    if (PyErr_Occurred()) return -1;
    if (bytes < 0 || starts[rank] + (uint64_t)bytes > PY_SSIZE_T_MAX) {
      PyErr_Format(PyExc_ValueError, "%zd is not a count", bytes);
      return -1;
    }
    starts[rank + 1] = starts[rank] + (uint64_t)bytes;
  }
  return (Py_ssize_t)starts[self->segment.ranks];
}

static int check_length(const char *what, const Py_buffer *view, uint64_t needed) {
  if ((uint64_t)view->len == needed) return 0;
  PyErr_Format(PyExc_ValueError, "%s has %zd bytes, and the counts say %llu", what, view->len,
               (unsigned long long)needed);
  return -1;
}

static uint64_t share(const Segment *self, const uint64_t *starts) {
  return starts[self->segment.rank + 1] - starts[self->segment.rank];
}

PyObject *allred_segment_begin_allgather(Segment *self, PyObject *args) {
  PyObject *record, *send, *receive, *counts;
  allred_header header;
  const Py_buffer *from, *to;
  if (!PyArg_ParseTuple(args, "OOOO:begin_allgather", &record, &send, &receive, &counts)) return NULL;
  Operation *operation = prepare(self, record, 1, &header);
  if (!operation) return NULL;
  uint64_t *starts = operation->receive_starts;
  const Py_ssize_t total = read_counts(self, counts, starts);
  if (total < 0 || !(from = allred_hold(operation, send, PyBUF_CONTIG_RO)) ||
      !(to = allred_hold(operation, receive, PyBUF_CONTIG)) || check_length("send", from, share(self, starts)) < 0 ||
      check_length("receive", to, (uint64_t)total) < 0)
    return begin(self, operation, record, 0);
  allred_begin_allgather(&operation->operation, &self->segment, &header, from->buf, to->buf, starts);
  return begin(self, operation, record, 1);
}

/* To which the root alone gives something: nothing is written to its memory, which may be read-only. */
PyObject *allred_segment_begin_broadcast(Segment *self, PyObject *args) {
  PyObject *record, *data;
  int root;
  allred_header header;
  if (!PyArg_ParseTuple(args, "OOi:begin_broadcast", &record, &data, &root)) return NULL;
  if (root < 0 || root >= self->segment.ranks) return PyErr_Format(PyExc_ValueError, "root %d is not a rank", root);
  Operation *operation = prepare(self, record, 1, &header);
  if (!operation) return NULL;
  const Py_buffer *view = allred_hold(operation, data, root == self->segment.rank ? PyBUF_CONTIG_RO : PyBUF_CONTIG);
  if (!view) return begin(self, operation, record, 0);
  for (int rank = 0; rank <= self->segment.ranks; rank++)
    operation->receive_starts[rank] = rank > root ? (uint64_t)view->len : 0;
  allred_begin_allgather(&operation->operation, &self->segment, &header, view->buf, view->buf,
                         operation->receive_starts);
  return begin(self, operation, record, 1);
}

PyObject *allred_segment_begin_alltoall(Segment *self, PyObject *args) {
  PyObject *record, *send, *receive, *send_counts, *receive_counts;
  Py_ssize_t largest;
  allred_header header;
  const Py_buffer *from, *to;
  if (!PyArg_ParseTuple(args, "OOOOOn:begin_alltoall", &record, &send, &receive, &send_counts, &receive_counts,
                        &largest))
    return NULL;
  Operation *operation = prepare(self, record, 1, &header);
  if (!operation) return NULL;
  uint64_t *out = operation->send_starts, *in = operation->receive_starts;
  const Py_ssize_t sent = read_counts(self, send_counts, out);
  const Py_ssize_t received = sent < 0 ? -1 : read_counts(self, receive_counts, in);
  if (received < 0 || !(from = allred_hold(operation, send, PyBUF_CONTIG_RO)) ||
      !(to = allred_hold(operation, receive, PyBUF_CONTIG)) || check_length("send", from, (uint64_t)sent) < 0 ||
      check_length("receive", to, (uint64_t)received) < 0)
    return begin(self, operation, record, 0);
  for (int rank = 0; rank < self->segment.ranks; rank++)
    if (largest < 0 || out[rank + 1] - out[rank] > (uint64_t)largest || in[rank + 1] - in[rank] > (uint64_t)largest) {
      PyErr_Format(PyExc_ValueError, "a count is larger than largest=%zd", largest);
      return begin(self, operation, record, 0);
    }
  allred_begin_alltoall(&operation->operation, &self->segment, &header, from->buf, to->buf, out, in, (size_t)largest);
  return begin(self, operation, record, 1);
}

PyObject *allred_segment_begin_reducescatter(Segment *self, PyObject *args) {
  PyObject *record, *send, *receive, *counts;
  int dtype, op;
  allred_header header;
  const Py_buffer *from, *to;
  if (!PyArg_ParseTuple(args, "OOOOii:begin_reducescatter", &record, &send, &receive, &counts, &dtype, &op))
    return NULL;
  if (!kernel_exists(self, dtype, op)) return NULL;
  Operation *operation = prepare(self, record, 1, &header);
  if (!operation) return NULL;
  uint64_t *starts = operation->send_starts;
  const Py_ssize_t total = read_counts(self, counts, starts);
  if (total < 0 || !(from = allred_hold(operation, send, PyBUF_CONTIG_RO)) ||
      !(to = allred_hold(operation, receive, PyBUF_CONTIG)) || check_length("send", from, (uint64_t)total) < 0 ||
      check_length("receive", to, share(self, starts)) < 0)
    return begin(self, operation, record, 0);
  for (int rank = 1; rank <= self->segment.ranks; rank++)
    if (starts[rank] % allred_dtype_bytes(dtype)) {
      PyErr_Format(PyExc_ValueError, "counts must be whole elements");
      return begin(self, operation, record, 0);
    }
  allred_begin_reducescatter(&operation->operation, &self->segment, &header, from->buf, to->buf, starts, dtype,
                             self->variant, op, self->segment.ranks);
  return begin(self, operation, record, 1);
}
