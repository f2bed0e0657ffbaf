/* The Python type `Mailbox`: construction, the methods of a worker, and close(). */
#include "mailbox_object.h"

#include <string.h>

#include "arena.h"

#define MAX_SLOT_BYTES (1 << 30)
#define MIN_FRAGMENT_BYTES 4096

static void release_request(Mailbox *self) {
  while (self->view_count) PyBuffer_Release(&self->views[--self->view_count]);
}

int allred_mailbox_is_open(const Mailbox *self) {
  if (!self->open) PyErr_SetString(PyExc_ValueError, "the mailbox is closed");
  return self->open;
}

int allred_mailbox_is_free(const Mailbox *self) {
  if (!allred_mailbox_is_open(self)) return 0;
  if (self->inside) PyErr_SetString(PyExc_ValueError, "another thread uses this mailbox");
  return !self->inside;
}

int allred_mailbox_record(PyObject *record, char **bytes, Py_ssize_t *length) {
  if (PyBytes_AsStringAndSize(record, bytes, length) < 0) return -1;
  if (*length <= ALLRED_RECORD_BYTES) return 0;
  PyErr_Format(PyExc_ValueError, "a record has at most %d bytes, not %zd", ALLRED_RECORD_BYTES, *length);
  return -1;
}

/* Check the number of slots and their size: 0, or -1 with an exception set. */
static int check_sizes(Py_ssize_t slots, Py_ssize_t slot_bytes) {
  if (slots >= 1 && slots <= ALLRED_MAX_SLOTS && slot_bytes >= 64 && slot_bytes <= MAX_SLOT_BYTES &&
      slot_bytes % 64 == 0)
    return 0;
  PyErr_Format(PyExc_ValueError, "%zd slots of %zd bytes: a mailbox has 1 to %d slots of a multiple of 64 bytes", slots,
               slot_bytes, ALLRED_MAX_SLOTS);
  return -1;
}

PyObject *allred_python_mailbox_bytes(PyObject *module, PyObject *args) {
  Py_ssize_t slots, slot_bytes;
  if (!PyArg_ParseTuple(args, "nn:mailbox_bytes", &slots, &slot_bytes) || check_sizes(slots, slot_bytes) < 0)
    return NULL;
  return PyLong_FromSize_t(allred_mailbox_bytes((size_t)slots, (size_t)slot_bytes));
}

/* Acquire memory that is large enough, and aligned for atomic flags. */
static int acquire_memory(PyObject *object, Py_buffer *view, const char *what, size_t needed) {
  if (PyObject_GetBuffer(object, view, PyBUF_CONTIG) < 0) return -1;
  if ((size_t)view->len >= needed && (uintptr_t)view->buf % sizeof(uint64_t) == 0) return 0;
  PyErr_Format(PyExc_ValueError,
               "the %s has %zd bytes at an address that ends in %d; it takes %zu bytes at a multiple of 8", what,
               view->len, (int)((uintptr_t)view->buf % 8), needed);
  return -1;
}

static int construct(Mailbox *self, PyObject *args, PyObject *unused) {
  PyObject *memory, *doorbell = Py_None;
  Py_ssize_t slots, slot_bytes;
  if (self->whole) return PyErr_SetString(PyExc_TypeError, "the mailbox is constructed already"), -1;
  if (!PyArg_ParseTuple(args, "Onn|O:Mailbox", &memory, &slots, &slot_bytes, &doorbell)) return -1;
  if (check_sizes(slots, slot_bytes) < 0) return -1;
  self->slots = PyMem_Calloc((size_t)slots, sizeof *self->slots);
  self->slots_bytes = PyMem_Calloc((size_t)slots, sizeof *self->slots_bytes);
  if (!self->slots || !self->slots_bytes) return PyErr_NoMemory(), -1;
  if (!(self->whole = PyMemoryView_FromObject(memory))) return -1;
  if (acquire_memory(memory, &self->memory, "memory", allred_mailbox_bytes((size_t)slots, (size_t)slot_bytes)) < 0 ||
      (doorbell != Py_None && acquire_memory(doorbell, &self->doorbell, "doorbell", sizeof(allred_doorbell)) < 0))
    return -1;
  self->box = (allred_mailbox){self->memory.buf, (size_t)slots, (size_t)slot_bytes, NULL};
  self->box.server_doorbell = self->doorbell.buf ? self->doorbell.buf : allred_mailbox_server_doorbell(&self->box);
  self->slots_start = allred_mailbox_slot(&self->box, 0) - self->box.memory;
  self->open = 1;
  self->process = getpid();
  return 0;
}

/* Let gradients of the worker be read from its arena. Called on both ends between requests. */
static PyObject *set_arena(Mailbox *self, PyObject *memory) {
  if (!allred_mailbox_is_free(self)) return NULL;
  if (self->arena.obj) return PyErr_Format(PyExc_ValueError, "the mailbox has an arena already");
  PyObject *buffer = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)self->box.slot_bytes);
  if (buffer) self->buffer_view = PyMemoryView_FromObject(buffer);
  if (self->buffer_view) self->buffer = PyByteArray_AsString(buffer);
  Py_XDECREF(buffer); /* the view has a reference */
  if (!self->buffer_view || !(self->arena_view = PyMemoryView_FromObject(memory)) ||
      PyObject_GetBuffer(memory, &self->arena, PyBUF_CONTIG) < 0)
    return NULL;
  self->box.arena = self->arena.buf, self->box.arena_bytes = (size_t)self->arena.len;
  self->box.min_fragment_bytes = MIN_FRAGMENT_BYTES;
  Py_RETURN_NONE;
}

static void release_arena(Mailbox *self) {
  self->box.arena = NULL, self->box.arena_bytes = 0;
  Py_CLEAR(self->arena_view);
  Py_CLEAR(self->buffer_view);
  self->buffer = NULL;
  if (self->arena.obj) PyBuffer_Release(&self->arena);
}

static void release_memory(Mailbox *self) {
  release_arena(self);
  release_request(self);
  for (size_t slot = 0; self->slots && slot < self->box.slots; slot++) Py_CLEAR(self->slots[slot]);
  Py_CLEAR(self->whole);
  if (self->doorbell.obj) PyBuffer_Release(&self->doorbell);
  if (self->memory.obj) PyBuffer_Release(&self->memory);
}

static int pending(const Mailbox *self) { return self->request.status == ALLRED_REQUEST_PENDING; }

static PyObject *close_mailbox(Mailbox *self, PyObject *unused) {
  if (!self->open) Py_RETURN_NONE;
  if (self->inside) return PyErr_Format(PyExc_ValueError, "another thread uses this mailbox");
  if (self->process == getpid()) {
    allred_mailbox_close(&self->box);
    if (self->arena.obj && pending(self) && allred_arena_contains(self->arena.buf))
      allred_arena_freeze(); /* the server may still read gradients */
  }
  self->open = 0;
  self->request.status = ALLRED_REQUEST_NONE;
  self->service.open = 0;
  release_memory(self);
  Py_RETURN_NONE;
}

static PyObject *get_closed(Mailbox *self, void *unused) {
  return PyBool_FromLong(!self->open || allred_mailbox_closed(&self->box));
}

static void destruct(Mailbox *self) {
  Py_XDECREF(close_mailbox(self, NULL)); /* a thread inside would hold a reference */
  release_memory(self);
  PyMem_Free(self->slots);
  PyMem_Free(self->slots_bytes);
  PyMem_Free(self->views);
  PyMem_Free(self->pieces);
  PyMem_Free(self->up_cells);
  PyMem_Free(self->down_cells);
  allred_free_object(self);
}

/* ---- a request of a worker: tables of cells are copied, buffers are held until the request is complete */

static int make_room(Mailbox *self, Py_ssize_t views) {
  if (views <= self->view_capacity) return 0;
  Py_buffer *grown = PyMem_Realloc(self->views, (size_t)views * sizeof *grown);
  if (grown) self->views = grown;
  allred_piece *pieces = PyMem_Realloc(self->pieces, (size_t)views * sizeof *pieces);
  if (pieces) self->pieces = pieces;
  if (!grown || !pieces) return PyErr_NoMemory(), -1;
  self->view_capacity = views;
  return 0;
}

static Py_buffer *hold(Mailbox *self, PyObject *object, int flags) {
  Py_buffer *view = &self->views[self->view_count];
  if (PyObject_GetBuffer(object, view, flags) < 0) return NULL;
  self->pieces[self->view_count] = (allred_piece){view->buf, (size_t)view->len};
  self->view_count++;
  return view;
}

/* Hold the buffers of the tensors as one stream. Return its bytes, or -1 with an exception set. */
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

/* Replace `*table` by a copy of a table of int64. Return its number of rows, or -1 with an exception set. */
static Py_ssize_t copy_table(PyObject *numbers, size_t row_bytes, void **table) {
  Py_buffer view;
  if (PyObject_GetBuffer(numbers, &view, PyBUF_CONTIG_RO) < 0) return -1;
  const size_t bytes = (size_t)view.len, rows = bytes / row_bytes;
  void *copy = NULL;
  if (bytes % row_bytes || rows > ALLRED_MAX_CELLS)
    PyErr_Format(PyExc_ValueError, "%zd bytes are not a table of at most %d cells of %zu bytes", view.len,
                 ALLRED_MAX_CELLS, row_bytes);
  else if (!(copy = PyMem_Realloc(*table, bytes + 1)))
    PyErr_NoMemory();
  if (copy) memcpy(*table = copy, view.buf, bytes);
  PyBuffer_Release(&view);
  return copy ? (Py_ssize_t)rows : -1;
}

static int check_sum(const char *what, uint64_t cells, Py_ssize_t stream) {
  if (cells == (uint64_t)stream) return 0;
  PyErr_Format(PyExc_ValueError, "the buffers of `%s` have %zd bytes, but its cells %llu", what, stream,
               (unsigned long long)cells);
  return -1;
}

static int read_up(Mailbox *self, PyObject *tensors, PyObject *cells) {
  const Py_ssize_t stream = hold_stream(self, tensors, PyBUF_CONTIG_RO, &self->request.up);
  if (stream < 0) return -1;
  const Py_ssize_t count = copy_table(cells, sizeof *self->up_cells, (void **)&self->up_cells);
  if (count < 0) return -1;
  uint64_t sum = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    sum += self->up_cells[i];
    if (self->up_cells[i] <= self->box.slot_bytes) continue;
    PyErr_Format(PyExc_ValueError, "cell %zd of `up` has %lld bytes, but a slot has %zu", i,
                 (long long)self->up_cells[i], self->box.slot_bytes);
    return -1;
  }
  self->request.up_cells = self->up_cells;
  self->request.up_count = (size_t)count;
  return check_sum("up", sum, stream);
}

static int read_down(Mailbox *self, PyObject *tensors, PyObject *shard, PyObject *cells) {
  const Py_ssize_t stream = hold_stream(self, tensors, PyBUF_CONTIG, &self->request.down);
  if (stream < 0) return -1;
  const Py_ssize_t count = copy_table(cells, sizeof *self->down_cells, (void **)&self->down_cells);
  if (count < 0) return -1;
  const Py_buffer *memory = shard == Py_None ? NULL : hold(self, shard, PyBUF_CONTIG_RO);
  if (!memory && shard != Py_None) return -1;
  const uint64_t shard_bytes = memory ? (uint64_t)memory->len : 0;
  uint64_t sum = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    const allred_cell *cell = &self->down_cells[i];
    sum += cell->bytes;
    if (cell->bytes <= shard_bytes && cell->offset <= shard_bytes - cell->bytes) continue;
    PyErr_Format(PyExc_ValueError, "cell %zd of `down` is %lld bytes at %lld, but the shard has %llu", i,
                 (long long)cell->bytes, (long long)cell->offset, (unsigned long long)shard_bytes);
    return -1;
  }
  self->request.shard = memory ? memory->buf : NULL;
  self->request.down_cells = self->down_cells;
  self->request.down_count = (size_t)count;
  return check_sum("down", sum, stream);
}

/* ---- progress */

static PyObject *run_for(Mailbox *self, int64_t idle_limit_ns) {
  if (!allred_mailbox_is_free(self)) return NULL;
  if (self->request.status == ALLRED_REQUEST_NONE) return PyErr_Format(PyExc_ValueError, "no request was begun");
  if (pending(self)) {
    self->inside++;
    Py_BEGIN_ALLOW_THREADS;
    allred_request_run(&self->request, &self->box, idle_limit_ns);
    Py_END_ALLOW_THREADS;
    self->inside--;
    if (!pending(self)) release_request(self);
  }
  if (self->request.status == ALLRED_REQUEST_BROKEN)
    return PyErr_Format(PyExc_ConnectionResetError, "the server closed the mailbox before it answered");
  return PyBool_FromLong(!pending(self));
}

static PyObject *begin(Mailbox *self, PyObject *const *args, Py_ssize_t count) {
  char *record;
  Py_ssize_t bytes;
  if (count < 6 || count > 7 || !PyList_Check(args[1]) || !PyList_Check(args[3]))
    return PyErr_Format(PyExc_TypeError, "begin(record, up: list, up_cells, down: list, shard, down_cells, wait=True)");
  if (!allred_mailbox_is_free(self) || allred_mailbox_record(args[0], &record, &bytes) < 0) return NULL;
  if (pending(self)) return PyErr_Format(PyExc_ValueError, "a request is pending");
  if (allred_mailbox_closed(&self->box))
    return PyErr_Format(PyExc_ConnectionResetError, "the server has closed the mailbox");
  if (make_room(self, PyList_Size(args[1]) + PyList_Size(args[3]) + 1) < 0) return NULL;
  if (read_up(self, args[1], args[2]) < 0 || read_down(self, args[3], args[4], args[5]) < 0) {
    release_request(self);
    return NULL;
  }
  allred_request_begin(&self->request, &self->box, record, (size_t)bytes);
  return run_for(self, count == 7 && args[6] == Py_False ? 0 : ALLRED_SPIN_WAIT_NS);
}

static PyObject *done(Mailbox *self, PyObject *unused) { return run_for(self, 0); }

static PyObject *spin_wait(Mailbox *self, PyObject *unused) { return run_for(self, ALLRED_SPIN_WAIT_NS); }

static PyObject *reply(Mailbox *self, void *unused) {
  if (self->request.status != ALLRED_REQUEST_DONE) return PyErr_Format(PyExc_ValueError, "no request is complete");
  return PyBytes_FromStringAndSize(self->request.reply.record, (Py_ssize_t)self->request.reply.bytes);
}

static PyObject *get_pending(Mailbox *self, void *unused) { return PyBool_FromLong(pending(self)); }

static PyObject *waits_for_peers(Mailbox *self, void *unused) { Py_RETURN_FALSE; }

/* ---- the type */

static PyMethodDef methods[] = {
    METHOD("set_arena", set_arena, METH_O, "Let gradients be read from this memory of the worker. Both ends call it."),
    METHOD("begin", begin, METH_FASTCALL, "Begin a request; whether it completes at once, or within a wait."),
    METHOD("done", done, METH_NOARGS, "Take the steps that need no waiting; whether complete."),
    METHOD("spin_wait", spin_wait, METH_NOARGS, "The same, until 1 ms passes without progress."),
    METHOD("poll", allred_python_mailbox_poll, METH_NOARGS, "Return the record of a new request, or None."),
    METHOD("cell", allred_python_mailbox_cell, METH_NOARGS, "Return the next cell as a memoryview, or None."),
    METHOD("spin_wait_cell", allred_python_mailbox_spin_wait_cell, METH_NOARGS, "The same, waiting up to 1 ms."),
    METHOD("take", allred_python_mailbox_take, METH_FASTCALL, "Give the slots of the next n cells back to the worker."),
    METHOD("give", allred_python_mailbox_give, METH_FASTCALL, "Let the worker read n more cells of the shard."),
    METHOD("answer", allred_python_mailbox_answer, METH_O, "End the request with this record."),
    METHOD("wait_any", allred_python_mailbox_wait_any, METH_FASTCALL | METH_CLASS,
           "Return the index of a mailbox with a new request, or -1."),
    METHOD("close", close_mailbox, METH_NOARGS, "Close the mailbox for both sides, and release the memory."),
    {NULL, NULL, 0, NULL}};

static PyMemberDef members[] = {{"progress_count", T_ULONGLONG, offsetof(Mailbox, request.progress_count), READONLY,
                                 "steps of the worker in this request"},
                                {"referenced", T_ULONGLONG, offsetof(Mailbox, request.referenced), READONLY,
                                 "bytes of gradients that the server has read from the arena"},
                                {NULL, 0, 0, 0, NULL}};

static PyGetSetDef attributes[] = {
    ATTRIBUTE("reply", reply, "the record with which the server ended the request"),
    ATTRIBUTE("pending", get_pending, "whether the worker's request is pending"),
    ATTRIBUTE("waits_for_peers", waits_for_peers, "False: a request waits for no other worker"),
    ATTRIBUTE("read", allred_python_mailbox_read, "cells of the last request that the worker has copied"),
    ATTRIBUTE("closed", get_closed, "whether either side has closed the mailbox"),
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     "Mailbox(memory, slots, slot_bytes, doorbell=None): an end of a worker's link to a server of its node."},
    {Py_tp_init, construct},
    {Py_tp_dealloc, destruct},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, attributes},
    {0, NULL}};

PyType_Spec allred_mailbox_spec = {"allred.native._kernels.Mailbox", sizeof(Mailbox), 0, Py_TPFLAGS_DEFAULT, slots};
