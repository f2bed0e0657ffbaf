/* The Python type `Mailbox` (mailbox_object.h): how an end is made and closed. */
#include "mailbox_type.h"

#include "mailbox_object.h"

#define MOST_SLOT_BYTES (1 << 30)

void allred_mailbox_release(Mailbox *self) {
  while (self->view_count) PyBuffer_Release(&self->views[--self->view_count]);
}

int allred_mailbox_is_open(const Mailbox *self) {
  if (!self->open) PyErr_SetString(PyExc_ValueError, "the mailbox is closed");
  return self->open;
}

int allred_mailbox_is_free(const Mailbox *self) {
  if (!allred_mailbox_is_open(self)) return 0;
  if (self->inside) PyErr_SetString(PyExc_ValueError, "another thread is in this mailbox");
  return !self->inside;
}

int allred_mailbox_record(PyObject *record, char **bytes, Py_ssize_t *length) {
  if (PyBytes_AsStringAndSize(record, bytes, length) < 0) return -1;
  if (*length <= ALLRED_RECORD_BYTES) return 0;
  PyErr_Format(PyExc_ValueError, "a record has at most %d bytes, not %zd", ALLRED_RECORD_BYTES, *length);
  return -1;
}

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
  allred_mailbox_release(self);
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
    {"begin", METHOD(allred_python_mailbox_begin), METH_FASTCALL,
     "begin(record, up, up_cells, down, shard, down_cells): start a request; if it is complete within a millisecond."},
    {"done", METHOD(allred_python_mailbox_done), METH_NOARGS, "done(): what can be done without waiting; if complete."},
    {"linger", METHOD(allred_python_mailbox_linger), METH_NOARGS, "linger(): the same, waiting for a millisecond."},
    {"poll", METHOD(allred_python_mailbox_poll), METH_NOARGS, "poll(): the record of a new request, once; or None."},
    {"cell", METHOD(allred_python_mailbox_cell), METH_NOARGS,
     "cell(): the next cell, as a memoryview of its slot; or None."},
    {"linger_cell", METHOD(allred_python_mailbox_linger_cell), METH_NOARGS,
     "linger_cell(): the same, waiting for a millisecond."},
    {"take", METHOD(allred_python_mailbox_take), METH_FASTCALL, "take(n=1): so many cells are done with."},
    {"give", METHOD(allred_python_mailbox_give), METH_FASTCALL,
     "give(n=1): so many cells more of the shard may be read."},
    {"answer", METHOD(allred_python_mailbox_answer), METH_O, "answer(record): end the request."},
    {"wait_any", METHOD(allred_python_mailbox_wait_any), METH_FASTCALL | METH_CLASS,
     "wait_any(boxes, limit_us, first=0): a box with a new request, looked for from `first` on; or -1."},
    {"close", METHOD(close_mailbox), METH_NOARGS, "close(): tell the other side, and let go of the memory."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {
    {"reply", (getter)allred_python_mailbox_reply, NULL, "the server's record, of the request that is complete", NULL},
    {"moves", (getter)allred_python_mailbox_moves, NULL, "steps that the worker has taken in this request", NULL},
    {"pending", (getter)allred_python_mailbox_pending, NULL, "whether the worker's request is under way", NULL},
    {"peers", (getter)allred_python_mailbox_peers, NULL, "False: it waits for no other worker", NULL},
    {"read", (getter)allred_python_mailbox_read, NULL,
     "how many cells the worker has copied, in the request that was last polled", NULL},
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
