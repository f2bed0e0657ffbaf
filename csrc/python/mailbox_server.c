/* The server's methods of `Mailbox`. Only the methods that wait release the GIL; the others access a flag. */
#include "mailbox_object.h"

#define MAX_BOXES 1024
#define MAX_WAIT_US 20000

PyObject *allred_python_mailbox_poll(Mailbox *self, PyObject *unused) {
  allred_record record;
  if (!allred_mailbox_is_open(self)) return NULL;
  if (!allred_service_poll(&self->service, &self->box, &record)) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize(record.record, (Py_ssize_t)record.bytes);
}

static int serves(const Mailbox *self) {
  if (!allred_mailbox_is_open(self)) return 0;
  if (!self->service.open) PyErr_SetString(PyExc_ValueError, "no request is being served: call poll() first");
  return self->service.open;
}

/* Return a slot as a memoryview: the last one if it fits, because most cells have one size. */
static PyObject *view_slot(Mailbox *self, size_t slot, Py_ssize_t bytes) {
  if (!self->slots[slot] || self->slots_bytes[slot] != bytes) {
    const Py_ssize_t start = self->slots_start + (Py_ssize_t)(slot * self->box.slot_bytes);
    PyObject *view = PySequence_GetSlice(self->whole, start, start + bytes), *before = self->slots[slot];
    if (!view) return NULL;
    self->slots[slot] = view;
    self->slots_bytes[slot] = bytes;
    Py_XDECREF(before);
  }
  return Py_NewRef(self->slots[slot]);
}

/* Return the data of the next cell as a memoryview. */
static PyObject *view_cell(Mailbox *self) {
  size_t bytes;
  const char *data = allred_service_data(&self->service, &self->box, self->buffer, &bytes);
  if (!data)
    return PyErr_Format(
        PyExc_ValueError,
        "the worker states a wrong size or place of a cell: %zu bytes; a slot has %zu, and its arena %zu", bytes,
        self->box.slot_bytes, self->box.arena_bytes);
  if (data == self->buffer) return PySequence_GetSlice(self->buffer_view, 0, (Py_ssize_t)bytes);
  if (self->box.arena && data >= self->box.arena && data < self->box.arena + self->box.arena_bytes) {
    const Py_ssize_t start = data - self->box.arena;
    return PySequence_GetSlice(self->arena_view, start, start + (Py_ssize_t)bytes);
  }
  return view_slot(self, self->service.taken % self->box.slots, (Py_ssize_t)bytes);
}

static PyObject *no_cell(const Mailbox *self, int closed) {
  if (self->open && !closed) Py_RETURN_NONE;
  return PyErr_Format(PyExc_ConnectionResetError, "the worker closed the mailbox during a request");
}

PyObject *allred_python_mailbox_cell(Mailbox *self, PyObject *unused) {
  if (!serves(self)) return NULL;
  const int closed = allred_mailbox_closed(&self->box); /* read before the cells: a worker may send and then close */
  return allred_service_cells(&self->service, &self->box) ? view_cell(self) : no_cell(self, closed);
}

PyObject *allred_python_mailbox_spin_wait_cell(Mailbox *self, PyObject *unused) {
  if (!serves(self)) return NULL;
  if (!allred_service_cells(&self->service, &self->box)) {
    self->inside++;
    Py_BEGIN_ALLOW_THREADS;
    allred_service_wait(&self->service, &self->box, ALLRED_SPIN_WAIT_NS);
    Py_END_ALLOW_THREADS;
    self->inside--;
  }
  return allred_python_mailbox_cell(self, unused);
}

static Py_ssize_t get_count(PyObject *const *args, Py_ssize_t count, const char *name) {
  if (count == 0) return 1;
  const Py_ssize_t cells = count == 1 ? PyLong_AsSsize_t(args[0]) : -1;
  if (cells < 0 && !PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%s(n) takes a number of cells", name);
  return cells;
}

PyObject *allred_python_mailbox_take(Mailbox *self, PyObject *const *args, Py_ssize_t count) {
  const Py_ssize_t cells = get_count(args, count, "take");
  if (cells < 0 || !serves(self)) return NULL;
  const size_t there = allred_service_cells(&self->service, &self->box);
  if ((size_t)cells > there)
    return PyErr_Format(PyExc_ValueError, "take(%zd), but %zu cells are in the ring", cells, there);
  allred_service_take(&self->service, &self->box, (size_t)cells);
  Py_RETURN_NONE;
}

PyObject *allred_python_mailbox_give(Mailbox *self, PyObject *const *args, Py_ssize_t count) {
  const int gives_vectors = count == 2 ? PyObject_IsTrue(args[1]) : 0;
  const Py_ssize_t cells = get_count(args, count == 2 ? 1 : count, "give");
  if (gives_vectors < 0 || cells < 0 || !serves(self)) return NULL;
  if ((size_t)cells > ALLRED_MAX_CELLS - self->service.given)
    return PyErr_Format(PyExc_ValueError, "give(%zd) makes more than %d cells in this request", cells,
                        ALLRED_MAX_CELLS);
  self->service.gives_vectors = gives_vectors;
  allred_service_give(&self->service, &self->box, (size_t)cells);
  Py_RETURN_NONE;
}

PyObject *allred_python_mailbox_answer(Mailbox *self, PyObject *reply) {
  char *record;
  Py_ssize_t bytes;
  if (!serves(self) || allred_mailbox_record(reply, &record, &bytes) < 0) return NULL;
  allred_service_answer(&self->service, &self->box, record, (size_t)bytes);
  Py_RETURN_NONE;
}

PyObject *allred_python_mailbox_read(Mailbox *self, void *unused) {
  if (!allred_mailbox_is_open(self)) return NULL;
  return PyLong_FromSize_t(allred_service_read(&self->service, &self->box));
}

/* Wait without the GIL. The mailboxes are held meanwhile and cannot be closed. */
static int wait_without_gil(Mailbox **held, int count, int first, int64_t limit_ns) {
  allred_service *services[MAX_BOXES];
  const allred_mailbox *boxes[MAX_BOXES];
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

PyObject *allred_python_mailbox_wait_any(PyObject *type, PyObject *const *args, Py_ssize_t given) {
  Mailbox *held[MAX_BOXES];
  const Py_ssize_t count = given >= 2 && PyList_Check(args[0]) ? PyList_Size(args[0]) : -1;
  if (given > 3 || count < 1 || count > MAX_BOXES)
    return PyErr_Format(PyExc_TypeError, "wait_any(boxes: list of 1 to %d, limit_us[, first])", MAX_BOXES);
  const Py_ssize_t limit_us = PyLong_AsSsize_t(args[1]), first = given == 3 ? PyLong_AsSsize_t(args[2]) : 0;
  if (PyErr_Occurred()) return NULL;
  if (limit_us < 0 || first < 0)
    return PyErr_Format(PyExc_ValueError, "wait_any: limit_us is %zd and first is %zd; neither may be negative",
                        limit_us, first);
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *box = PyList_GetItem(args[0], i);
    if (!PyObject_TypeCheck(box, (PyTypeObject *)type))
      return PyErr_Format(PyExc_TypeError, "box %zd is not a Mailbox", i);
    held[i] = (Mailbox *)box;
    if (!allred_mailbox_is_open(held[i])) return NULL;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    const Py_ssize_t at = (first % count + i) % count;
    if (!allred_service_has_request(&held[at]->service, &held[at]->box)) continue;
    held[0]->service.idle_from = 0;
    return PyLong_FromSsize_t(at);
  }
  const int64_t limit_ns = (limit_us < MAX_WAIT_US ? limit_us : MAX_WAIT_US) * 1000;
  for (Py_ssize_t i = 0; i < count; i++) Py_INCREF((PyObject *)held[i]);
  const int found = limit_ns ? wait_without_gil(held, (int)count, (int)(first % count), limit_ns) : -1;
  for (Py_ssize_t i = 0; i < count; i++) Py_DECREF((PyObject *)held[i]);
  return PyLong_FromLong(found);
}
