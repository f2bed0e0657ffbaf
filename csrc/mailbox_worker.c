/* The worker's side of the Python type `Mailbox`. Tables of sizes are copied, buffers held until the request is over.
 */
#include "mailbox_object.h"

#include <string.h>

static int pending(const Mailbox *self) { return self->request.status == ALLRED_REQUEST_PENDING; }

/* ---- what a request is made of */

static int make_room(Mailbox *self, Py_ssize_t views) {
  if (views <= self->view_room) return 0;
  Py_buffer *grown = PyMem_Realloc(self->views, (size_t)views * sizeof *grown);
  if (grown) self->views = grown;
  allred_piece *pieces = PyMem_Realloc(self->pieces, (size_t)views * sizeof *pieces);
  if (pieces) self->pieces = pieces;
  if (!grown || !pieces) return PyErr_NoMemory(), -1;
  self->view_room = views;
  return 0;
}

static Py_buffer *hold(Mailbox *self, PyObject *object, int flags) {
  Py_buffer *view = &self->views[self->view_count];
  if (PyObject_GetBuffer(object, view, flags) < 0) return NULL;
  self->pieces[self->view_count] = (allred_piece){view->buf, (size_t)view->len};
  self->view_count++;
  return view;
}

/* Hold the tensors, as one stream; its bytes, or -1. */
static Py_ssize_t hold_stream(Mailbox *self, PyObject *tensors, int flags, allred_stream *stream) {
  const Py_ssize_t count = PyList_Size(tensors);
  size_t bytes = 0;
  *stream = (allred_stream){self->pieces + self->view_count, 0, 0};
  for (Py_ssize_t i = 0; i < count; i++) {
    const Py_buffer *view = hold(self, PyList_GetItem(tensors, i), flags);
    if (!view) return -1;
    bytes += (size_t)view->len;
  }
  return (Py_ssize_t)bytes;
}

/* A copy of a table of rows of int64, in place of `*table`. How many rows, or -1. */
static Py_ssize_t copy_table(PyObject *numbers, size_t row_bytes, void **table) {
  Py_buffer view;
  if (PyObject_GetBuffer(numbers, &view, PyBUF_CONTIG_RO) < 0) return -1;
  const size_t bytes = (size_t)view.len, rows = bytes / row_bytes;
  void *copy = NULL;
  if (bytes % row_bytes || rows > ALLRED_MOST_CELLS)
    PyErr_Format(PyExc_ValueError, "%zd bytes are not a table of at most %d cells of %zu bytes", view.len,
                 ALLRED_MOST_CELLS, row_bytes);
  else if (!(copy = PyMem_Realloc(*table, bytes + 1)))
    PyErr_NoMemory();
  if (copy) memcpy(*table = copy, view.buf, bytes);
  PyBuffer_Release(&view);
  return copy ? (Py_ssize_t)rows : -1;
}

static int add_up(const char *what, uint64_t cells, Py_ssize_t stream) {
  if (cells == (uint64_t)stream) return 0;
  PyErr_Format(PyExc_ValueError, "the buffers of `%s` have %zd bytes, and its cells %llu", what, stream,
               (unsigned long long)cells);
  return -1;
}

static int take_up(Mailbox *self, PyObject *tensors, PyObject *cells) {
  const Py_ssize_t stream = hold_stream(self, tensors, PyBUF_CONTIG_RO, &self->request.up);
  if (stream < 0) return -1;
  const Py_ssize_t count = copy_table(cells, sizeof *self->up_cells, (void **)&self->up_cells);
  if (count < 0) return -1;
  uint64_t sum = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    sum += self->up_cells[i];
    if (self->up_cells[i] <= self->box.slot_bytes) continue;
    PyErr_Format(PyExc_ValueError, "cell %zd of `up` has %lld bytes, and a slot %zu", i, (long long)self->up_cells[i],
                 self->box.slot_bytes);
    return -1;
  }
  self->request.up_cells = self->up_cells;
  self->request.up_count = (size_t)count;
  return add_up("up", sum, stream);
}

static int take_down(Mailbox *self, PyObject *tensors, PyObject *shard, PyObject *cells) {
  const Py_ssize_t stream = hold_stream(self, tensors, PyBUF_CONTIG, &self->request.down);
  if (stream < 0) return -1;
  const Py_ssize_t count = copy_table(cells, sizeof *self->down_cells, (void **)&self->down_cells);
  if (count < 0) return -1;
  const Py_buffer *memory = shard == Py_None ? NULL : hold(self, shard, PyBUF_CONTIG_RO);
  if (!memory && shard != Py_None) return -1;
  const uint64_t most = memory ? (uint64_t)memory->len : 0;
  uint64_t sum = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    const allred_cell *cell = &self->down_cells[i];
    sum += cell->bytes;
    if (cell->bytes <= most && cell->offset <= most - cell->bytes) continue;
    PyErr_Format(PyExc_ValueError, "cell %zd of `down` is %lld bytes at %lld, and the shard has %llu", i,
                 (long long)cell->bytes, (long long)cell->offset, (unsigned long long)most);
    return -1;
  }
  self->request.shard = memory ? memory->buf : NULL;
  self->request.down_cells = self->down_cells;
  self->request.down_count = (size_t)count;
  return add_up("down", sum, stream);
}

/* ---- progress */

static PyObject *run_for(Mailbox *self, int64_t patience_ns) {
  if (!allred_mailbox_is_free(self)) return NULL;
  if (self->request.status == ALLRED_REQUEST_NONE) return PyErr_Format(PyExc_ValueError, "no request was begun");
  if (pending(self)) {
    self->inside++;
    Py_BEGIN_ALLOW_THREADS;
    allred_request_run(&self->request, &self->box, patience_ns);
    Py_END_ALLOW_THREADS;
    self->inside--;
    if (!pending(self)) allred_mailbox_release(self);
  }
  if (self->request.status == ALLRED_REQUEST_BROKEN)
    return PyErr_Format(PyExc_ConnectionResetError, "the server closed the mailbox before it answered");
  return PyBool_FromLong(!pending(self));
}

PyObject *allred_python_mailbox_begin(Mailbox *self, PyObject *const *args, Py_ssize_t count) {
  char *record;
  Py_ssize_t bytes;
  if (count != 6 || !PyList_Check(args[1]) || !PyList_Check(args[3]))
    return PyErr_Format(PyExc_TypeError, "begin(record, up: list, up_cells, down: list, shard, down_cells)");
  if (!allred_mailbox_is_free(self) || allred_mailbox_record(args[0], &record, &bytes) < 0) return NULL;
  if (pending(self)) return PyErr_Format(PyExc_ValueError, "a request is under way");
  if (allred_mailbox_closed(&self->box))
    return PyErr_Format(PyExc_ConnectionResetError, "the server has closed the mailbox");
  if (make_room(self, PyList_Size(args[1]) + PyList_Size(args[3]) + 1) < 0) return NULL;
  if (take_up(self, args[1], args[2]) < 0 || take_down(self, args[3], args[4], args[5]) < 0) {
    allred_mailbox_release(self);
    return NULL;
  }
  allred_request_begin(&self->request, &self->box, record, (size_t)bytes);
  return run_for(self, ALLRED_PATIENCE_NS);
}

PyObject *allred_python_mailbox_done(Mailbox *self, PyObject *unused) {
  (void)unused;
  return run_for(self, 0);
}

PyObject *allred_python_mailbox_linger(Mailbox *self, PyObject *unused) {
  (void)unused;
  return run_for(self, ALLRED_PATIENCE_NS);
}

PyObject *allred_python_mailbox_reply(Mailbox *self, void *unused) {
  (void)unused;
  if (self->request.status != ALLRED_REQUEST_DONE) return PyErr_Format(PyExc_ValueError, "no request is complete");
  return PyBytes_FromStringAndSize(self->request.reply.record, (Py_ssize_t)self->request.reply.bytes);
}

PyObject *allred_python_mailbox_moves(Mailbox *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(self->request.moves);
}

PyObject *allred_python_mailbox_pending(Mailbox *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(pending(self));
}

PyObject *allred_python_mailbox_peers(Mailbox *self, void *unused) {
  (void)self, (void)unused;
  Py_RETURN_FALSE;
}
