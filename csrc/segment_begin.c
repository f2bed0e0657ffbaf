/*
 * begin_...(record, ...) of Segment: flat contiguous buffers in, a queued Operation out.
 *
 * record: the header, 64 bytes; or None for a further part of the operation that blocks the queue, which goes first.
 */
#define _GNU_SOURCE /* SSIZE_MAX */
#include <string.h>

#include "segment_object.h"

/* Return a new operation with room for this many tensors, and with the header of a record; NULL with an exception set.
 */
static Operation *prepare(Segment *self, PyObject *record, Py_ssize_t tensors) {
  char *bytes = NULL;
  Py_ssize_t length = sizeof(allred_header);
  if (!self->open) return PyErr_SetString(PyExc_ValueError, "the segment is closed"), NULL;
  if (record != Py_None && PyBytes_AsStringAndSize(record, &bytes, &length) < 0) return NULL;
  if (length != sizeof(allred_header)) {
    PyErr_Format(PyExc_ValueError, "a header has %zu bytes, not %zd", sizeof(allred_header), length);
    return NULL;
  }
  Operation *operation = allred_new_operation(tensors);
  if (operation && allred_make_starts(operation, self->segment.ranks) < 0) Py_CLEAR(operation);
  if (operation && bytes) memcpy(&operation->operation.header, bytes, sizeof(allred_header));
  return operation;
}

/* Queue the operation. If it is not prepared, an exception is set. */
static PyObject *begin(Segment *self, Operation *operation, PyObject *record, int prepared) {
  if (!prepared) return Py_DECREF((PyObject *)operation), NULL;
  allred_attach(operation, self);
  if (record == Py_None)
    allred_queue_continue(&self->queue, &operation->operation);
  else
    allred_queue_put(&self->queue, &operation->operation);
  return (PyObject *)operation;
}

PyObject *allred_segment_begin_exchange(Segment *self, PyObject *args) {
  PyObject *record;
  int holds;
  if (!PyArg_ParseTuple(args, "Op:begin_exchange", &record, &holds)) return NULL;
  Operation *operation = prepare(self, record, 1);
  if (!operation) return NULL;
  allred_begin_exchange(&operation->operation, &self->segment, &operation->operation.header);
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

/* Make a table entry of a source and a target; 0, or -1 with an exception set. */
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
  int op, wire = 0;
  if (!PyArg_ParseTuple(args, "OOOOi|i:begin_allreduce", &record, &sources, &targets, &dtypes, &op, &wire)) return NULL;
  const Py_ssize_t count = PyList_Check(sources) ? PyList_Size(sources) : -1;
  if (count < 0 || !PyList_Check(targets) || !PyList_Check(dtypes) || PyList_Size(targets) != count ||
      PyList_Size(dtypes) != count)
    return PyErr_Format(PyExc_TypeError, "sources, targets and dtypes must be lists of one length");
  if (op <= 0 || op >= ALLRED_OPS) return PyErr_Format(PyExc_ValueError, "operator %d does not exist", op);
  if (wire && !allred_narrows(ALLRED_FLOAT32, wire))
    return PyErr_Format(PyExc_ValueError, "dtype %d is not a wire type; float16 and bfloat16 are", wire);
  Operation *operation = prepare(self, record, count ? count : 1);
  if (!operation) return NULL;
  Py_ssize_t kept = 0;
  for (Py_ssize_t i = 0; i < count && kept == 0; i++) {
    const long dtype = PyLong_AsLong(PyList_GetItem(dtypes, i));
    kept = enter(self, operation, PyList_GetItem(sources, i), PyList_GetItem(targets, i), dtype, op, wire,
                 &operation->tensors[i]);
  }
  if (kept == 0) kept = allred_group_by_dtype(operation->tensors, count);
  if (kept >= 0) allred_prepare_allreduce(self, operation, &operation->operation.header, kept, op);
  return begin(self, operation, record, kept >= 0);
}

/* Turn a list of byte counts, one per rank, into offsets. Return whether it is valid. */
static int read_counts(const Segment *self, PyObject *counts, uint64_t *starts) {
  if (!PyList_Check(counts) || PyList_Size(counts) != self->segment.ranks) {
    PyErr_Format(PyExc_ValueError, "counts must be a list of %d numbers of bytes", self->segment.ranks);
    return 0;
  }
  starts[0] = 0;
  for (int rank = 0; rank < self->segment.ranks; rank++) {
    const Py_ssize_t bytes = PyLong_AsSsize_t(PyList_GetItem(counts, rank));
    if (PyErr_Occurred()) return 0;
    if (bytes < 0 || starts[rank] + (uint64_t)bytes > PY_SSIZE_T_MAX)
      return PyErr_Format(PyExc_ValueError, "%zd is not a count", bytes), 0;
    starts[rank + 1] = starts[rank] + (uint64_t)bytes;
  }
  return 1;
}

/* Hold a buffer of exactly this many bytes; NULL with an exception set. */
static const Py_buffer *hold(Operation *operation, const char *what, PyObject *object, int flags, uint64_t bytes) {
  const Py_buffer *view = allred_hold(operation, object, flags);
  if (!view || (uint64_t)view->len == bytes) return view;
  PyErr_Format(PyExc_ValueError, "%s has %zd bytes, but the counts add up to %llu", what, view->len,
               (unsigned long long)bytes);
  return NULL;
}

static const Py_buffer *hold_send(Operation *operation, PyObject *object, uint64_t bytes) {
  return hold(operation, "send", object, PyBUF_CONTIG_RO, bytes);
}

static const Py_buffer *hold_receive(Operation *operation, PyObject *object, uint64_t bytes) {
  return hold(operation, "receive", object, PyBUF_CONTIG, bytes);
}

/* Bytes of this rank's part, and of all parts. */
static uint64_t own_bytes(const Segment *self, const uint64_t *starts) {
  return starts[self->segment.rank + 1] - starts[self->segment.rank];
}

static uint64_t all_bytes(const Segment *self, const uint64_t *starts) { return starts[self->segment.ranks]; }

PyObject *allred_segment_begin_allgather(Segment *self, PyObject *args) {
  PyObject *record, *send, *receive, *counts;
  if (!PyArg_ParseTuple(args, "OOOO:begin_allgather", &record, &send, &receive, &counts)) return NULL;
  Operation *operation = prepare(self, record, 1);
  if (!operation) return NULL;
  uint64_t *starts = operation->receive_starts;
  const Py_buffer *from, *to;
  const int prepared = read_counts(self, counts, starts) &&
                       (from = hold_send(operation, send, own_bytes(self, starts))) &&
                       (to = hold_receive(operation, receive, all_bytes(self, starts)));
  if (prepared)
    allred_begin_allgather(&operation->operation, &self->segment, &operation->operation.header, from->buf, to->buf,
                           starts);
  return begin(self, operation, record, prepared);
}

/* An allgather to which only the root contributes. Nothing is written to the root's memory, which may be read-only. */
PyObject *allred_segment_begin_broadcast(Segment *self, PyObject *args) {
  PyObject *record, *data;
  int root;
  if (!PyArg_ParseTuple(args, "OOi:begin_broadcast", &record, &data, &root)) return NULL;
  if (root < 0 || root >= self->segment.ranks) return PyErr_Format(PyExc_ValueError, "root %d is not a rank", root);
  Operation *operation = prepare(self, record, 1);
  if (!operation) return NULL;
  const Py_buffer *view = allred_hold(operation, data, root == self->segment.rank ? PyBUF_CONTIG_RO : PyBUF_CONTIG);
  if (!view) return begin(self, operation, record, 0);
  for (int rank = 0; rank <= self->segment.ranks; rank++)
    operation->receive_starts[rank] = rank > root ? (uint64_t)view->len : 0;
  allred_begin_allgather(&operation->operation, &self->segment, &operation->operation.header, view->buf, view->buf,
                         operation->receive_starts);
  return begin(self, operation, record, 1);
}

PyObject *allred_segment_begin_alltoall(Segment *self, PyObject *args) {
  PyObject *record, *send, *receive, *send_counts, *receive_counts;
  Py_ssize_t largest;
  if (!PyArg_ParseTuple(args, "OOOOOn:begin_alltoall", &record, &send, &receive, &send_counts, &receive_counts,
                        &largest))
    return NULL;
  Operation *operation = prepare(self, record, 1);
  if (!operation) return NULL;
  uint64_t *out = operation->send_starts, *in = operation->receive_starts;
  const Py_buffer *from, *to;
  int prepared = read_counts(self, send_counts, out) && read_counts(self, receive_counts, in) &&
                 (from = hold_send(operation, send, all_bytes(self, out))) &&
                 (to = hold_receive(operation, receive, all_bytes(self, in)));
  for (int rank = 0; rank < self->segment.ranks && prepared; rank++) {
    prepared =
        largest >= 0 && out[rank + 1] - out[rank] <= (uint64_t)largest && in[rank + 1] - in[rank] <= (uint64_t)largest;
    if (!prepared) PyErr_Format(PyExc_ValueError, "a count is larger than largest=%zd", largest);
  }
  if (prepared)
    allred_begin_alltoall(&operation->operation, &self->segment, &operation->operation.header, from->buf, to->buf, out,
                          in, (size_t)largest);
  return begin(self, operation, record, prepared);
}

PyObject *allred_segment_begin_reducescatter(Segment *self, PyObject *args) {
  PyObject *record, *send, *receive, *counts;
  int dtype, op;
  if (!PyArg_ParseTuple(args, "OOOOii:begin_reducescatter", &record, &send, &receive, &counts, &dtype, &op))
    return NULL;
  if (!kernel_exists(self, dtype, op)) return NULL;
  Operation *operation = prepare(self, record, 1);
  if (!operation) return NULL;
  uint64_t *starts = operation->send_starts;
  const Py_buffer *from, *to;
  int prepared = read_counts(self, counts, starts) && (from = hold_send(operation, send, all_bytes(self, starts))) &&
                 (to = hold_receive(operation, receive, own_bytes(self, starts)));
  for (int rank = 1; rank <= self->segment.ranks && prepared; rank++) {
    prepared = starts[rank] % allred_dtype_bytes(dtype) == 0;
    if (!prepared) PyErr_Format(PyExc_ValueError, "counts must be whole elements");
  }
  if (prepared)
    allred_begin_reducescatter(&operation->operation, &self->segment, &operation->operation.header, from->buf, to->buf,
                               starts, dtype, self->variant, op, self->segment.ranks);
  return begin(self, operation, record, prepared);
}
