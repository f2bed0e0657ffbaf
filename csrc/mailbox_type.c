/*
 * The Python type `Mailbox`: one end of a link between a worker and a parameter server (mailbox.h). Limited API.
 *
 * A worker calls begin(), done() and linger(), and reads `reply`; a server wait_any(), poll(), cell(), take(), give()
 * and answer(). Sizes are checked here, completely, before C works with them; tables of sizes are copied, buffers held
 * until the request is over. A server's calls take no more than a look at a flag and keep the GIL.
 */
#include "mailbox_type.h"

#include <string.h>
#include <unistd.h>

#include "request.h"
#include "service.h"

#define PATIENCE_NS 1000000
#define MOST_SLOT_BYTES (1 << 30)
#define MOST_BOXES 1024
#define LONGEST_WAIT_US 20000

typedef struct {
  PyObject_HEAD Py_buffer memory, bell;
  allred_mailbox box;
  allred_request request;
  allred_service service;
  int open, inside; /* threads that work on it without the GIL */
  pid_t process;    /* that made it; a fork of that does not speak for it */
  Py_buffer *views; /* of the present request: up, down, shard */
  allred_piece *pieces;
  Py_ssize_t view_count, view_room;
  uint64_t *up_cells;
  allred_cell *down_cells;
  PyObject *whole;         /* a memoryview of the memory */
  PyObject **slots;        /* of each slot, of as many bytes as it last had */
  Py_ssize_t *slots_bytes; /* how many that were */
  Py_ssize_t slots_start;  /* in the memory */
} Mailbox;

static void release_views(Mailbox *self) {
  while (self->view_count) PyBuffer_Release(&self->views[--self->view_count]);
}

static int pending(const Mailbox *self) { return self->request.status == ALLRED_REQUEST_PENDING; }

static int is_open(const Mailbox *self) {
  if (!self->open) PyErr_SetString(PyExc_ValueError, "the mailbox is closed");
  return self->open;
}

/* For one thread at a time. */
static int is_free(const Mailbox *self) {
  if (!is_open(self)) return 0;
  if (self->inside) PyErr_SetString(PyExc_ValueError, "another thread is in this mailbox");
  return !self->inside;
}

static int get_record(PyObject *record, char **bytes, Py_ssize_t *length) {
  if (PyBytes_AsStringAndSize(record, bytes, length) < 0) return -1;
  if (*length <= ALLRED_RECORD_BYTES) return 0;
  PyErr_Format(PyExc_ValueError, "a record has at most %d bytes, not %zd", ALLRED_RECORD_BYTES, *length);
  return -1;
}

/* ---- the worker: what a request is made of */

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

/* ---- the worker: progress */

static PyObject *run_for(Mailbox *self, int64_t patience_ns) {
  if (!is_free(self)) return NULL;
  if (self->request.status == ALLRED_REQUEST_NONE) return PyErr_Format(PyExc_ValueError, "no request was begun");
  if (pending(self)) {
    self->inside++;
    Py_BEGIN_ALLOW_THREADS;
    allred_request_run(&self->request, &self->box, patience_ns);
    Py_END_ALLOW_THREADS;
    self->inside--;
    if (!pending(self)) release_views(self);
  }
  if (self->request.status == ALLRED_REQUEST_BROKEN)
    return PyErr_Format(PyExc_ConnectionResetError, "the server closed the mailbox before it answered");
  return PyBool_FromLong(!pending(self));
}

static PyObject *begin(Mailbox *self, PyObject *const *args, Py_ssize_t count) {
  char *record;
  Py_ssize_t bytes;
  if (count != 6 || !PyList_Check(args[1]) || !PyList_Check(args[3]))
    return PyErr_Format(PyExc_TypeError, "begin(record, up: list, up_cells, down: list, shard, down_cells)");
  if (!is_free(self) || get_record(args[0], &record, &bytes) < 0) return NULL;
  if (pending(self)) return PyErr_Format(PyExc_ValueError, "a request is under way");
  if (allred_mailbox_closed(&self->box))
    return PyErr_Format(PyExc_ConnectionResetError, "the server has closed the mailbox");
  if (make_room(self, PyList_Size(args[1]) + PyList_Size(args[3]) + 1) < 0) return NULL;
  if (take_up(self, args[1], args[2]) < 0 || take_down(self, args[3], args[4], args[5]) < 0) {
    release_views(self);
    return NULL;
  }
  allred_request_begin(&self->request, &self->box, record, (size_t)bytes);
  return run_for(self, PATIENCE_NS);
}

static PyObject *done(Mailbox *self, PyObject *unused) {
  (void)unused;
  return run_for(self, 0);
}

static PyObject *linger(Mailbox *self, PyObject *unused) {
  (void)unused;
  return run_for(self, PATIENCE_NS);
}

static PyObject *get_reply(Mailbox *self, void *unused) {
  (void)unused;
  if (self->request.status != ALLRED_REQUEST_DONE) return PyErr_Format(PyExc_ValueError, "no request is complete");
  return PyBytes_FromStringAndSize(self->request.reply.record, (Py_ssize_t)self->request.reply.bytes);
}

static PyObject *get_moves(Mailbox *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(self->request.moves);
}

static PyObject *get_pending(Mailbox *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(pending(self));
}

static PyObject *get_peers(Mailbox *self, void *unused) {
  (void)self, (void)unused;
  Py_RETURN_FALSE;
}

/* ---- the server */

static PyObject *poll(Mailbox *self, PyObject *unused) {
  (void)unused;
  allred_record record;
  if (!is_open(self)) return NULL;
  if (!allred_service_poll(&self->service, &self->box, &record)) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize(record.record, (Py_ssize_t)record.bytes);
}

static int serves(const Mailbox *self) {
  if (!is_open(self)) return 0;
  if (!self->service.open) PyErr_SetString(PyExc_ValueError, "no request is being served: poll() one first");
  return self->service.open;
}

/* The slot of the next cell as a memoryview. Most cells are of one size, so the last one of the slot will often do. */
static PyObject *view_slot(Mailbox *self) {
  size_t bytes;
  const size_t slot = allred_service_slot(&self->service, &self->box, &bytes);
  if (bytes > self->box.slot_bytes)
    return PyErr_Format(PyExc_ValueError, "the worker says that a cell has %zu bytes, and a slot has %zu", bytes,
                        self->box.slot_bytes);
  if (!self->slots[slot] || self->slots_bytes[slot] != (Py_ssize_t)bytes) {
    const Py_ssize_t start = self->slots_start + (Py_ssize_t)(slot * self->box.slot_bytes);
    PyObject *view = PySequence_GetSlice(self->whole, start, start + (Py_ssize_t)bytes), *before = self->slots[slot];
    if (!view) return NULL;
    self->slots[slot] = view;
    self->slots_bytes[slot] = (Py_ssize_t)bytes;
    Py_XDECREF(before);
  }
  return Py_NewRef(self->slots[slot]);
}

static PyObject *no_cell(const Mailbox *self, int closed) {
  if (self->open && !closed) Py_RETURN_NONE;
  return PyErr_Format(PyExc_ConnectionResetError, "the worker closed the mailbox within a request");
}

static PyObject *cell(Mailbox *self, PyObject *unused) {
  (void)unused;
  if (!serves(self)) return NULL;
  const int closed = allred_mailbox_closed(&self->box); /* before the look at the cells */
  return allred_service_cells(&self->service, &self->box) ? view_slot(self) : no_cell(self, closed);
}

static PyObject *linger_cell(Mailbox *self, PyObject *unused) {
  if (!serves(self)) return NULL;
  if (!allred_service_cells(&self->service, &self->box)) {
    self->inside++;
    Py_BEGIN_ALLOW_THREADS;
    allred_service_wait(&self->service, &self->box, PATIENCE_NS);
    Py_END_ALLOW_THREADS;
    self->inside--;
  }
  return cell(self, unused);
}

static Py_ssize_t get_count(PyObject *const *args, Py_ssize_t count, const char *name) {
  if (count == 0) return 1;
  const Py_ssize_t cells = count == 1 ? PyLong_AsSsize_t(args[0]) : -1;
  if (cells < 0 && !PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%s(n) takes a number of cells", name);
  return cells;
}

static PyObject *take(Mailbox *self, PyObject *const *args, Py_ssize_t count) {
  const Py_ssize_t cells = get_count(args, count, "take");
  if (cells < 0 || !serves(self)) return NULL;
  const size_t there = allred_service_cells(&self->service, &self->box);
  if ((size_t)cells > there)
    return PyErr_Format(PyExc_ValueError, "take(%zd), but %zu cells are in the ring", cells, there);
  allred_service_take(&self->service, &self->box, (size_t)cells);
  Py_RETURN_NONE;
}

static PyObject *give(Mailbox *self, PyObject *const *args, Py_ssize_t count) {
  const Py_ssize_t cells = get_count(args, count, "give");
  if (cells < 0 || !serves(self)) return NULL;
  if ((size_t)cells > ALLRED_MOST_CELLS - self->service.given)
    return PyErr_Format(PyExc_ValueError, "give(%zd) is more than %d cells in all", cells, ALLRED_MOST_CELLS);
  allred_service_give(&self->service, &self->box, (size_t)cells);
  Py_RETURN_NONE;
}

static PyObject *answer(Mailbox *self, PyObject *reply) {
  char *record;
  Py_ssize_t bytes;
  if (!serves(self) || get_record(reply, &record, &bytes) < 0) return NULL;
  allred_service_answer(&self->service, &self->box, record, (size_t)bytes);
  Py_RETURN_NONE;
}

static PyObject *get_read(Mailbox *self, void *unused) {
  (void)unused;
  if (!is_open(self)) return NULL;
  return PyLong_FromSize_t(allred_service_read(&self->service, &self->box));
}

/* Wait without the GIL; the boxes are held meanwhile, and cannot be closed. */
static int wait_outside(Mailbox **held, int count, int first, int64_t limit_ns) {
  allred_service *services[MOST_BOXES];
  const allred_mailbox *boxes[MOST_BOXES];
  int found;
  for (int i = 0; i < count; i++) {
    services[i] = &held[i]->service;
    boxes[i] = &held[i]->box;
    held[i]->inside++;
  }
  Py_BEGIN_ALLOW_THREADS;
  found = allred_mailbox_wait_any(services, boxes, count, first, limit_ns);
  Py_END_ALLOW_THREADS;
  for (int i = 0; i < count; i++) held[i]->inside--;
  return found;
}

static PyObject *wait_any(PyObject *type, PyObject *const *args, Py_ssize_t given) {
  Mailbox *held[MOST_BOXES];
  const Py_ssize_t count = given >= 2 && PyList_Check(args[0]) ? PyList_Size(args[0]) : -1;
  if (given > 3 || count < 1 || count > MOST_BOXES)
    return PyErr_Format(PyExc_TypeError, "wait_any(boxes: list of 1 to %d, limit_us[, first])", MOST_BOXES);
  const Py_ssize_t limit_us = PyLong_AsSsize_t(args[1]), first = given == 3 ? PyLong_AsSsize_t(args[2]) : 0;
  if (PyErr_Occurred()) return NULL;
  if (limit_us < 0 || first < 0)
    return PyErr_Format(PyExc_ValueError, "wait_any: limit_us is %zd and first %zd; neither may be negative", limit_us,
                        first);
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *box = PyList_GetItem(args[0], i);
    if (!PyObject_TypeCheck(box, (PyTypeObject *)type)) return PyErr_Format(PyExc_TypeError, "box %zd is none", i);
    held[i] = (Mailbox *)box;
    if (!is_open(held[i])) return NULL;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    const Py_ssize_t at = (first % count + i) % count;
    if (!allred_service_asked(&held[at]->service, &held[at]->box)) continue;
    held[0]->service.idle_from = 0;
    return PyLong_FromSsize_t(at);
  }
  const int64_t limit_ns = (limit_us < LONGEST_WAIT_US ? limit_us : LONGEST_WAIT_US) * 1000;
  for (Py_ssize_t i = 0; i < count; i++) Py_INCREF(held[i]);
  const int found = limit_ns ? wait_outside(held, (int)count, (int)(first % count), limit_ns) : -1;
  for (Py_ssize_t i = 0; i < count; i++) Py_DECREF(held[i]);
  return PyLong_FromLong(found);
}

/* ---- the type */

/* A number of slots and their bytes, from Python; -1 with an exception set if they cannot be. */
static int check_sizes(Py_ssize_t slots, Py_ssize_t slot_bytes) {
  if (slots >= 1 && slots <= ALLRED_MOST_SLOTS && slot_bytes >= 64 && slot_bytes <= MOST_SLOT_BYTES &&
      slot_bytes % 64 == 0)
    return 0;
  PyErr_Format(PyExc_ValueError, "%zd slots of %zd bytes: there are 1 to %d slots of a multiple of 64 bytes", slots,
               slot_bytes, ALLRED_MOST_SLOTS);
  return -1;
}

PyObject *allred_python_mailbox_bytes(PyObject *module, PyObject *args) {
  (void)module;
  Py_ssize_t slots, slot_bytes;
  if (!PyArg_ParseTuple(args, "nn:mailbox_bytes", &slots, &slot_bytes) || check_sizes(slots, slot_bytes) < 0)
    return NULL;
  return PyLong_FromSize_t(allred_mailbox_bytes((size_t)slots, (size_t)slot_bytes));
}

/* Flags need aligned memory, and enough of it. */
static int take_memory(PyObject *object, Py_buffer *view, const char *what, size_t needed) {
  if (PyObject_GetBuffer(object, view, PyBUF_CONTIG) < 0) return -1;
  if ((size_t)view->len >= needed && (uintptr_t)view->buf % sizeof(uint64_t) == 0) return 0;
  PyErr_Format(PyExc_ValueError, "the %s has %zd bytes at an address that ends in %d; it takes %zu at a multiple of 8",
               what, view->len, (int)((uintptr_t)view->buf % 8), needed);
  return -1;
}

static int construct(Mailbox *self, PyObject *args, PyObject *unused) {
  (void)unused;
  PyObject *memory, *bell = Py_None;
  Py_ssize_t slots, slot_bytes;
  if (self->whole) return PyErr_SetString(PyExc_TypeError, "it is constructed already"), -1;
  if (!PyArg_ParseTuple(args, "Onn|O:Mailbox", &memory, &slots, &slot_bytes, &bell)) return -1;
  if (check_sizes(slots, slot_bytes) < 0) return -1;
  self->slots = PyMem_Calloc((size_t)slots, sizeof *self->slots);
  self->slots_bytes = PyMem_Calloc((size_t)slots, sizeof *self->slots_bytes);
  if (!self->slots || !self->slots_bytes) return PyErr_NoMemory(), -1;
  if (!(self->whole = PyMemoryView_FromObject(memory))) return -1;
  if (take_memory(memory, &self->memory, "memory", allred_mailbox_bytes((size_t)slots, (size_t)slot_bytes)) < 0 ||
      (bell != Py_None && take_memory(bell, &self->bell, "bell", sizeof(allred_bell)) < 0))
    return -1;
  self->box = (allred_mailbox){self->memory.buf, (size_t)slots, (size_t)slot_bytes, NULL};
  self->box.server_bell = self->bell.buf ? self->bell.buf : allred_mailbox_server_bell(&self->box);
  self->slots_start = allred_mailbox_slot(&self->box, 0) - self->box.memory;
  self->open = 1;
  self->process = getpid();
  return 0;
}

static void let_go(Mailbox *self) {
  release_views(self);
  for (size_t slot = 0; self->slots && slot < self->box.slots; slot++) Py_CLEAR(self->slots[slot]);
  Py_CLEAR(self->whole);
  if (self->bell.obj) PyBuffer_Release(&self->bell);
  if (self->memory.obj) PyBuffer_Release(&self->memory);
}

static PyObject *close_mailbox(Mailbox *self, PyObject *unused) {
  (void)unused;
  if (!self->open) Py_RETURN_NONE;
  if (self->inside) return PyErr_Format(PyExc_ValueError, "another thread is in this mailbox");
  if (self->process == getpid()) allred_mailbox_close(&self->box);
  self->open = 0;
  self->request.status = ALLRED_REQUEST_NONE;
  self->service.open = 0;
  let_go(self);
  Py_RETURN_NONE;
}

static PyObject *get_closed(Mailbox *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(!self->open || allred_mailbox_closed(&self->box));
}

static void destruct(Mailbox *self) {
  PyTypeObject *type = Py_TYPE((PyObject *)self);
  Py_XDECREF(close_mailbox(self, NULL)); /* who is inside holds a reference */
  let_go(self);
  PyMem_Free(self->slots);
  PyMem_Free(self->slots_bytes);
  PyMem_Free(self->views);
  PyMem_Free(self->pieces);
  PyMem_Free(self->up_cells);
  PyMem_Free(self->down_cells);
  freefunc release_type = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release_type(self);
  Py_DECREF(type);
}

#define METHOD(function) ((PyCFunction)(void (*)(void))function)

static PyMethodDef methods[] = {
    {"begin", METHOD(begin), METH_FASTCALL,
     "begin(record, up, up_cells, down, shard, down_cells): start a request; if it is complete within a millisecond."},
    {"done", METHOD(done), METH_NOARGS, "done(): what can be done without waiting; if complete."},
    {"linger", METHOD(linger), METH_NOARGS, "linger(): the same, waiting for a millisecond."},
    {"poll", METHOD(poll), METH_NOARGS, "poll(): the record of a new request, once; or None."},
    {"cell", METHOD(cell), METH_NOARGS, "cell(): the next cell, as a memoryview of its slot; or None."},
    {"linger_cell", METHOD(linger_cell), METH_NOARGS, "linger_cell(): the same, waiting for a millisecond."},
    {"take", METHOD(take), METH_FASTCALL, "take(n=1): so many cells are done with."},
    {"give", METHOD(give), METH_FASTCALL, "give(n=1): so many cells more of the shard may be read."},
    {"answer", METHOD(answer), METH_O, "answer(record): end the request."},
    {"wait_any", METHOD(wait_any), METH_FASTCALL | METH_CLASS,
     "wait_any(boxes, limit_us, first=0): a box with a new request, looked for from `first` on; or -1."},
    {"close", METHOD(close_mailbox), METH_NOARGS, "close(): tell the other side, and let go of the memory."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {
    {"reply", (getter)get_reply, NULL, "the server's record, of the request that is complete", NULL},
    {"moves", (getter)get_moves, NULL, "steps that the worker has taken in this request", NULL},
    {"pending", (getter)get_pending, NULL, "whether the worker's request is under way", NULL},
    {"peers", (getter)get_peers, NULL, "False: it waits for no other worker", NULL},
    {"read", (getter)get_read, NULL, "how many cells the worker has copied, in the request that was last polled", NULL},
    {"closed", (getter)get_closed, NULL, "whether either side has closed it", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Mailbox(memory, slots, slot_bytes, bell=None): one end of a worker's link to a server of its node."},
    {Py_tp_init, construct},
    {Py_tp_dealloc, destruct},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL}};

static PyType_Spec spec = {.name = "allred.native._kernels.Mailbox",
                           .basicsize = sizeof(Mailbox),
                           .flags = Py_TPFLAGS_DEFAULT,
                           .slots = slots};

int allred_add_mailbox_type(PyObject *module) {
  PyObject *type = PyType_FromSpec(&spec);
  const int status = type ? PyModule_AddObjectRef(module, "Mailbox", type) : -1;
  Py_XDECREF(type);
  return status;
}
