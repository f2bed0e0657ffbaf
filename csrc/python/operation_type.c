/* The Python type `Operation`: a pending operation on a Segment. It holds its buffers until it is complete. */
#include <string.h>

#include "arena.h"
#include "network.h"
#include "segment_object.h"

PyTypeObject *allred_operation_type;

Operation *allred_new_operation(Py_ssize_t tensors) {
  allocfunc allocate = (allocfunc)PyType_GetSlot(allred_operation_type, Py_tp_alloc);
  Operation *self = (Operation *)(void *)allocate(allred_operation_type, 0);
  if (self && allred_make_room(self, tensors) < 0) Py_CLEAR(self);
  return self;
}

int allred_make_room(Operation *self, Py_ssize_t tensors) {
  if (tensors <= self->capacity) return 0;
  Py_buffer *views = PyMem_Realloc(self->views, ((size_t)tensors * 2 + 1) * sizeof *views); /* and a residual */
  if (views) self->views = views;
  PyObject **arrays = PyMem_Realloc(self->arrays, (size_t)tensors * 2 * sizeof *arrays);
  if (arrays) self->arrays = arrays;
  allred_tensor *table = PyMem_Realloc(self->tensors, (size_t)tensors * sizeof *table);
  if (table) self->tensors = table;
  if (!views || !arrays || !table) return PyErr_NoMemory(), -1;
  self->capacity = tensors;
  return 0;
}

Py_buffer *allred_hold(Operation *self, PyObject *object, int flags) {
  Py_buffer *view = &self->views[self->view_count];
  if (PyObject_GetBuffer(object, view, flags) < 0) return NULL;
  self->view_count++;
  return view;
}

void allred_hold_array(Operation *self, PyObject *array) { self->arrays[self->array_count++] = Py_NewRef(array); }

void allred_release(Operation *self) {
  while (self->view_count) PyBuffer_Release(&self->views[--self->view_count]);
  while (self->array_count) Py_DECREF(self->arrays[--self->array_count]);
}

void allred_attach(Operation *self, Segment *segment) {
  Py_INCREF((PyObject *)segment);
  self->segment = segment;
}

PyObject *allred_headers(const Segment *segment, uint64_t number) {
  PyObject *list = PyList_New(0);
  const allred_header *header;
  uint64_t ranks;
  for (int run = 0; list && (header = allred_header_run(&segment->segment, number, run, &ranks)); run++) {
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)header, sizeof *header);
    for (uint64_t rank = 0; list && rank < ranks; rank++)
      if (!bytes || PyList_Append(list, bytes) < 0) Py_CLEAR(list);
    Py_XDECREF(bytes);
  }
  return list;
}

void allred_prepare_allreduce(Segment *self, Operation *operation, const allred_header *header, Py_ssize_t count,
                              int op) {
  allred_begin_allreduce(&operation->operation, &self->segment, header, operation->tensors, (size_t)count,
                         self->variant, op, allred_all_ranks(self));
}

int allred_keep_errors(Operation *self, PyObject *residual) {
  const allred_operation *op = &self->operation;
  size_t elements = 0;
  if (residual == Py_None) return 0;
  const Py_buffer *view = allred_hold(self, residual, PyBUF_CONTIG | PyBUF_FORMAT);
  if (!view) return -1;
  for (size_t i = 0; i < op->tensor_count; i++)
    elements += op->tensors[i].bytes / allred_dtype_bytes(op->tensors[i].dtype);
  if (!view->format || strcmp(view->format, "f") != 0 || (size_t)view->len < elements * sizeof(float))
    return PyErr_Format(PyExc_ValueError, "the residual is no buffer of %zu float32", elements), -1;
  self->operation.residual = view->buf;
  return 0;
}

Py_ssize_t allred_group_by_dtype(allred_tensor *tensors, Py_ssize_t count) {
  Py_ssize_t same = 0;
  while (same < count && tensors[same].bytes && tensors[same].dtype == tensors->dtype &&
         tensors[same].wire == tensors->wire)
    same++;
  if (same == count) return count;
  allred_tensor *sorted = PyMem_Malloc((size_t)count * sizeof *sorted);
  Py_ssize_t kept = 0;
  if (!sorted) return PyErr_NoMemory(), -1;
  for (int dtype = 0; dtype < ALLRED_DTYPES; dtype++)
    for (int travels_as_is = 0; travels_as_is < 2; travels_as_is++)
      for (Py_ssize_t i = 0; i < count; i++)
        if (tensors[i].dtype == dtype && !tensors[i].wire == travels_as_is && tensors[i].bytes)
          sorted[kept++] = tensors[i];
  memcpy(tensors, sorted, (size_t)kept * sizeof *sorted);
  PyMem_Free(sorted);
  return kept;
}

/* Whether the operation is complete. If so, its buffers are released. */
static int settled(Operation *self) {
  const int is = allred_queue_settled(&self->operation);
  if (is) allred_release(self);
  return is;
}

static PyObject *run_for(Operation *self, int64_t idle_limit_ns) {
  if (!settled(self) && self->segment->open) {
    Py_BEGIN_ALLOW_THREADS;
    allred_queue_run(&self->segment->queue, &self->operation, idle_limit_ns);
    Py_END_ALLOW_THREADS;
  }
  return PyBool_FromLong(settled(self));
}

/* If the queue has a progress thread, this only looks. */
static PyObject *done(Operation *self, PyObject *unused) {
  return self->segment->queue.threaded ? PyBool_FromLong(settled(self)) : run_for(self, 0);
}

static PyObject *spin_wait(Operation *self, PyObject *unused) { return run_for(self, ALLRED_SPIN_WAIT_NS); }

static PyObject *withdraw(Operation *self, PyObject *unused) {
  allred_queue_withdraw(&self->segment->queue, &self->operation);
  return PyBool_FromLong(settled(self));
}

static PyObject *headers(Operation *self, PyObject *unused) {
  if (!settled(self)) return PyErr_Format(PyExc_ValueError, "the operation is not complete");
  return allred_headers(self->segment, self->operation.number);
}

static PyObject *get_headers_agree(Operation *self, void *unused) {
  return PyBool_FromLong(atomic_load_explicit(&self->operation.settled, memory_order_acquire) != ALLRED_DIFFER);
}

static uint64_t progress_of(const Operation *self) {
  return atomic_load_explicit(&self->operation.progress_count, memory_order_relaxed);
}

/* After at most one step the operation waits for the headers of the other ranks. */
static PyObject *get_waits_for_peers(Operation *self, void *unused) {
  return PyBool_FromLong(progress_of(self) < 2 && !allred_queue_settled(&self->operation));
}

/* Also after all have arrived: a rank that was interrupted takes no further step. Across hosts a rank may have ended
 * with its last step, while others still receive what it has sent. */
static PyObject *get_needs_all_ranks(Operation *self, void *unused) {
  return PyBool_FromLong(!self->segment->segment.across && !allred_queue_settled(&self->operation));
}

static PyObject *get_nonfinite(Operation *self, void *unused) {
  return PyLong_FromLong((long)self->operation.nonfinite - 1);
}

static PyObject *get_progress_count(Operation *self, void *unused) {
  return PyLong_FromUnsignedLongLong(progress_of(self));
}

/* If the operation is freed in flight (an exception), stop the queue. */
static void destruct(Operation *self) {
  Segment *segment = self->segment;
  if (segment && allred_is_own(segment)) {
    if (!allred_queue_settled(&self->operation)) {
      Py_BEGIN_ALLOW_THREADS;
      allred_queue_halt(&segment->queue);
      Py_END_ALLOW_THREADS;
      if (segment->segment.arenas.base) allred_arena_freeze(); /* another rank may still write to these arrays */
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
  allred_free_object(self);
}

static PyMethodDef methods[] = {
    METHOD("done", done, METH_NOARGS, "Take the steps that need no waiting; whether the operation is complete."),
    METHOD("spin_wait", spin_wait, METH_NOARGS, "The same, until 1 ms passes without progress."),
    METHOD("withdraw", withdraw, METH_NOARGS, "Remove it from the queue. Only while another one holds the queue."),
    METHOD("headers", headers, METH_NOARGS, "Return the headers of all ranks."),
    {NULL, NULL, 0, NULL}};

static PyMemberDef members[] = {
    {"samples", T_ULONGLONG, offsetof(Operation, operation.samples), READONLY, "samples of all ranks in a step"},
    {"waited_ns", T_LONGLONG, offsetof(Operation, operation.waited_ns), READONLY,
     "ns that a step waited for the headers of other ranks"},
    {NULL, 0, 0, 0, NULL}};

static PyGetSetDef attributes[] = {
    ATTRIBUTE("headers_agree", get_headers_agree, "False if the headers of the ranks differ"),
    ATTRIBUTE("progress_count", get_progress_count, "steps taken"),
    ATTRIBUTE("nonfinite", get_nonfinite, "position of the first array that was not finite, or -1"),
    ATTRIBUTE("waits_for_peers", get_waits_for_peers, "whether some ranks have not begun the operation"),
    ATTRIBUTE("needs_all_ranks", get_needs_all_ranks, "whether it cannot complete if a rank has ended"),
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {{Py_tp_doc, "A pending operation, made by Segment."},
                              {Py_tp_dealloc, destruct},
                              {Py_tp_methods, methods},
                              {Py_tp_members, members},
                              {Py_tp_getset, attributes},
                              {0, NULL}};

PyType_Spec allred_operation_spec = {"allred.native._kernels.Operation", sizeof(Operation), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
