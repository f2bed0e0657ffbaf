/* The server's side of the Python type `Mailbox`. Its calls take no more than a look at a flag and keep the GIL; those
 * that wait give it away. */
#include "mailbox_object.h"

#define MOST_BOXES 1024
#define LONGEST_WAIT_US 20000

PyObject *allred_python_mailbox_poll(Mailbox *self, PyObject *unused) {
  (void)unused;
  allred_record record;
  if (!allred_mailbox_is_open(self)) return NULL;
  if (!allred_service_poll(&self->service, &self->box, &record)) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize(record.record, (Py_ssize_t)record.bytes);
}

static int serves(const Mailbox *self) {
  if (!allred_mailbox_is_open(self)) return 0;
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

PyObject *allred_python_mailbox_cell(Mailbox *self, PyObject *unused) {
  (void)unused;
  if (!serves(self)) return NULL;
  const int closed = allred_mailbox_closed(&self->box); /* before the look at the cells */
  return allred_service_cells(&self->service, &self->box) ? view_slot(self) : no_cell(self, closed);
}

PyObject *allred_python_mailbox_linger_cell(Mailbox *self, PyObject *unused) {
  if (!serves(self)) return NULL;
  if (!allred_service_cells(&self->service, &self->box)) {
    self->inside++;
    Py_BEGIN_ALLOW_THREADS;
    allred_service_wait(&self->service, &self->box, ALLRED_PATIENCE_NS);
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
  const Py_ssize_t cells = get_count(args, count, "give");
  if (cells < 0 || !serves(self)) return NULL;
  if ((size_t)cells > ALLRED_MOST_CELLS - self->service.given)
    return PyErr_Format(PyExc_ValueError, "give(%zd) is more than %d cells in all", cells, ALLRED_MOST_CELLS);
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
  (void)unused;
  if (!allred_mailbox_is_open(self)) return NULL;
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

PyObject *allred_python_mailbox_wait_any(PyObject *type, PyObject *const *args, Py_ssize_t given) {
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
    if (!allred_mailbox_is_open(held[i])) return NULL;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    const Py_ssize_t at = (first % count + i) % count;
    if (!allred_service_asked(&held[at]->service, &held[at]->box)) continue;
    held[0]->service.idle_from = 0;
    return PyLong_FromSsize_t(at);
  }
  const int64_t limit_ns = (limit_us < LONGEST_WAIT_US ? limit_us : LONGEST_WAIT_US) * 1000;
  for (Py_ssize_t i = 0; i < count; i++) Py_INCREF((PyObject *)held[i]);
  const int found = limit_ns ? wait_outside(held, (int)count, (int)(first % count), limit_ns) : -1;
  for (Py_ssize_t i = 0; i < count; i++) Py_DECREF((PyObject *)held[i]);
  return PyLong_FromLong(found);
}
