/* Segment.begin_allgather, begin_broadcast, begin_alltoall and begin_reducescatter. */
#include "segment_object.h"

/* Turn a list of byte counts, one per rank, into offsets. Return whether it is valid. */
static int read_counts(const Segment *self, PyObject *counts, uint64_t *starts) {
  const int ranks = allred_all_ranks(self);
  if (!PyList_Check(counts) || PyList_Size(counts) != ranks)
    return PyErr_Format(PyExc_ValueError, "counts must be a list of %d numbers of bytes", ranks), 0;
  starts[0] = 0;
  for (int rank = 0; rank < ranks; rank++) {
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
  const int rank = allred_own_rank(self);
  return starts[rank + 1] - starts[rank];
}

static uint64_t all_bytes(const Segment *self, const uint64_t *starts) { return starts[allred_all_ranks(self)]; }

PyObject *allred_segment_begin_allgather(Segment *self, PyObject *args) {
  PyObject *record, *send, *receive, *counts;
  if (!PyArg_ParseTuple(args, "OOOO:begin_allgather", &record, &send, &receive, &counts)) return NULL;
  Operation *operation = allred_segment_prepare(self, record, 1);
  if (!operation) return NULL;
  uint64_t *starts = operation->receive_starts;
  const Py_buffer *from, *to;
  const int prepared = read_counts(self, counts, starts) &&
                       (from = hold_send(operation, send, own_bytes(self, starts))) &&
                       (to = hold_receive(operation, receive, all_bytes(self, starts)));
  if (prepared)
    allred_begin_allgather(&operation->operation, &self->segment, &operation->operation.header, from->buf, to->buf,
                           starts);
  return allred_segment_begin(self, operation, record, prepared);
}

/* An allgather to which only the root contributes. Nothing is written to the root's memory, which may be read-only. */
PyObject *allred_segment_begin_broadcast(Segment *self, PyObject *args) {
  PyObject *record, *data;
  int root;
  if (!PyArg_ParseTuple(args, "OOi:begin_broadcast", &record, &data, &root)) return NULL;
  if (root < 0 || root >= allred_all_ranks(self)) return PyErr_Format(PyExc_ValueError, "root %d is not a rank", root);
  Operation *operation = allred_segment_prepare(self, record, 1);
  if (!operation) return NULL;
  const Py_buffer *view = allred_hold(operation, data, root == allred_own_rank(self) ? PyBUF_CONTIG_RO : PyBUF_CONTIG);
  if (!view) return allred_segment_begin(self, operation, record, 0);
  for (int rank = 0; rank <= allred_all_ranks(self); rank++)
    operation->receive_starts[rank] = rank > root ? (uint64_t)view->len : 0;
  allred_begin_allgather(&operation->operation, &self->segment, &operation->operation.header, view->buf, view->buf,
                         operation->receive_starts);
  return allred_segment_begin(self, operation, record, 1);
}

PyObject *allred_segment_begin_alltoall(Segment *self, PyObject *args) {
  PyObject *record, *send, *receive, *send_counts, *receive_counts;
  Py_ssize_t largest;
  if (!PyArg_ParseTuple(args, "OOOOOn:begin_alltoall", &record, &send, &receive, &send_counts, &receive_counts,
                        &largest))
    return NULL;
  if (self->segment.network) return PyErr_Format(PyExc_ValueError, "the segment has a network");
  Operation *operation = allred_segment_prepare(self, record, 1);
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
  return allred_segment_begin(self, operation, record, prepared);
}

PyObject *allred_segment_begin_reducescatter(Segment *self, PyObject *args) {
  PyObject *record, *send, *receive, *counts;
  int dtype, op;
  if (!PyArg_ParseTuple(args, "OOOOii:begin_reducescatter", &record, &send, &receive, &counts, &dtype, &op))
    return NULL;
  if (!allred_segment_kernel_exists(self, dtype, op)) return NULL;
  Operation *operation = allred_segment_prepare(self, record, 1);
  if (!operation) return NULL;
  uint64_t *starts = operation->send_starts;
  const Py_buffer *from, *to;
  int prepared = read_counts(self, counts, starts) && (from = hold_send(operation, send, all_bytes(self, starts))) &&
                 (to = hold_receive(operation, receive, own_bytes(self, starts)));
  for (int rank = 1; rank <= allred_all_ranks(self) && prepared; rank++) {
    prepared = starts[rank] % allred_dtype_bytes(dtype) == 0;
    if (!prepared) PyErr_Format(PyExc_ValueError, "counts must be whole elements");
  }
  if (prepared)
    allred_begin_reducescatter(&operation->operation, &self->segment, &operation->operation.header, from->buf, to->buf,
                               starts, dtype, self->variant, op, allred_all_ranks(self));
  return allred_segment_begin(self, operation, record, prepared);
}
