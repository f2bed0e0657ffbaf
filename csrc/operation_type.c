/* The Python type `Operation`: one that is under way on a Segment, and the buffers that it holds until it is complete.
 */
#include <string.h>

#include "segment_object.h"

static PyTypeObject *operation_type; /* for good, once the module is there */

int allred_is_operation(PyObject *object) { return Py_TYPE(object) == operation_type; }

Operation *allred_new_operation(Py_ssize_t tensors) {
  allocfunc allocate = (allocfunc)PyType_GetSlot(operation_type, Py_tp_alloc);
  Operation *self = (Operation *)(void *)allocate(operation_type, 0);
  if (self && allred_make_room(self, tensors) < 0) Py_CLEAR(self);
  return self;
}

int allred_make_room(Operation *self, Py_ssize_t tensors) {
  if (2 * tensors > self->view_room) {
    Py_buffer *views = PyMem_Realloc(self->views, (size_t)tensors * 2 * sizeof *views);
    if (!views) return PyErr_NoMemory(), -1;
    self->views = views;
    PyObject **arrays = PyMem_Realloc(self->arrays, (size_t)tensors * 2 * sizeof *arrays);
    if (!arrays) return PyErr_NoMemory(), -1;
    self->arrays = arrays;
    self->view_room = 2 * tensors;
  }
  if (tensors > self->tensor_room) {
    allred_tensor *table = PyMem_Realloc(self->tensors, (size_t)tensors * sizeof *table);
    if (!table) return PyErr_NoMemory(), -1;
    self->tensors = table;
    self->tensor_room = tensors;
  }
  return 0;
}

int allred_make_starts(Operation *self, int ranks) {
  self->send_starts = PyMem_Calloc((size_t)ranks + 1, sizeof *self->send_starts);
  self->receive_starts = PyMem_Calloc((size_t)ranks + 1, sizeof *self->receive_starts);
  if (!self->send_starts || !self->receive_starts) return PyErr_NoMemory(), -1;
  return 0;
}

Py_buffer *allred_hold(Operation *self, PyObject *object, int flags) {
  Py_buffer *view = &self->views[self->view_count];
  if (PyObject_GetBuffer(object, view, flags) < 0) return NULL;
  self->view_count++;
  return view;
}

void allred_hold_array(Operation *self, PyObject *array) {
  Py_INCREF(array);
  self->arrays[self->array_count++] = array;
}

void allred_release(Operation *self) {
  while (self->view_count) PyBuffer_Release(&self->views[--self->view_count]);
  while (self->array_count) Py_DECREF(self->arrays[--self->array_count]);
}

void allred_under_way(Operation *self, Segment *segment) {
  Py_INCREF((PyObject *)segment);
  self->segment = segment;
}

static int settled(Operation *self) {
  const int is = allred_queue_settled(&self->operation);
  if (is) allred_release(self);
  return is;
}

static PyObject *run_for(Operation *self, int64_t patience_ns) {
  if (!settled(self) && self->segment->open) {
    Py_BEGIN_ALLOW_THREADS;
    allred_queue_run(&self->segment->queue, &self->operation, patience_ns);
    Py_END_ALLOW_THREADS;
  }
  return PyBool_FromLong(settled(self));
}

/* Where a thread sees to progress, looking is all. */
static PyObject *done(Operation *self, PyObject *unused) {
  (void)unused;
  return self->segment->queue.threaded ? PyBool_FromLong(settled(self)) : run_for(self, 0);
}

static PyObject *linger(Operation *self, PyObject *unused) {
  (void)unused;
  return run_for(self, ALLRED_PATIENCE_NS);
}

static PyObject *headers(Operation *self, PyObject *unused) {
  (void)unused;
  if (!settled(self)) return PyErr_Format(PyExc_ValueError, "the operation is not complete");
  return allred_headers(self->segment, self->operation.number);
}

static PyObject *get_agreed(Operation *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(atomic_load_explicit(&self->operation.settled, memory_order_acquire) != ALLRED_DIFFER);
}

static uint64_t moves_of(const Operation *self) {
  return atomic_load_explicit(&self->operation.moves, memory_order_relaxed);
}

/* Whether what it waits for is that the others begin the operation at all: it has taken one step, or none. */
static PyObject *get_peers(Operation *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(moves_of(self) < 2 && !allred_queue_settled(&self->operation));
}

static PyObject *get_moves(Operation *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(moves_of(self));
}

/* Whoever lets go of an operation that is under way, with buffers that the peers' numbers are written to, has lost it
 * by an exception at a wrong moment: the queue cannot go on without it. */
static void destruct(Operation *self) {
  PyTypeObject *type = Py_TYPE((PyObject *)self);
  Segment *segment = self->segment;
  if (segment && allred_is_own(segment)) {
    if (!allred_queue_settled(&self->operation)) {
      Py_BEGIN_ALLOW_THREADS;
      allred_queue_halt(&segment->queue);
      Py_END_ALLOW_THREADS;
    }
    allred_queue_release(&segment->queue, &self->operation);
  }
  allred_release(self);
  PyMem_Free(self->views);
  PyMem_Free(self->arrays);
  PyMem_Free(self->tensors);
  PyMem_Free(self->send_starts);
  PyMem_Free(self->receive_starts);
  Py_XDECREF((PyObject *)segment);
  freefunc release_type = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release_type(self);
  Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"done", (PyCFunction)(void (*)(void))done, METH_NOARGS, "done(): what can be done without waiting; if complete."},
    {"linger", (PyCFunction)(void (*)(void))linger, METH_NOARGS, "linger(): the same, waiting for a millisecond."},
    {"headers", (PyCFunction)(void (*)(void))headers, METH_NOARGS, "headers(): those of all ranks, while it holds."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {
    {"agreed", (getter)get_agreed, NULL, "whether the headers agreed", NULL},
    {"moves", (getter)get_moves, NULL, "steps taken", NULL},
    {"peers", (getter)get_peers, NULL, "whether it waits for ranks that have not begun the operation", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {{Py_tp_doc, "One that is under way; Segment makes it."},
                              {Py_tp_dealloc, destruct},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, attributes},
                              {0, NULL}};

static PyType_Spec spec = {.name = "allred.native._kernels.Operation",
                           .basicsize = sizeof(Operation),
                           .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                           .slots = slots};

int allred_add_operation_type(PyObject *module) {
  if (!operation_type) operation_type = (PyTypeObject *)PyType_FromSpec(&spec);
  return operation_type ? PyModule_AddObjectRef(module, "Operation", (PyObject *)operation_type) : -1;
}
