/* The Python type `Segment`: one rank's view of the shared memory of its node. segment_object.h lists its files. */
#define _GNU_SOURCE /* mmap, madvise, SSIZE_MAX */
#include <string.h>
#include <sys/mman.h>

#include "arena.h"
#include "numpy_array.h"
#include "segment_object.h"

#define MAX_CHUNK_BYTES (1 << 30)

/* The headers of the last operation stay readable until this rank begins another. */
static PyObject *headers(Segment *self, PyObject *unused) {
  if (!self->segment.operation || !allred_queue_idle(&self->queue))
    return PyErr_Format(PyExc_ValueError, "no operation is complete");
  return allred_headers(self, self->segment.operation);
}

static PyObject *get_nonfinite(Segment *self, void *unused) { return PyLong_FromLong((long)self->nonfinite - 1); }

static PyObject *get_pending(Segment *self, void *unused) { return PyBool_FromLong(!allred_queue_idle(&self->queue)); }

static PyObject *let_callers_sleep(Segment *self, PyObject *unused) {
  self->segment.may_sleep = 1;
  Py_RETURN_NONE;
}

static PyObject *get_has_progress_thread(Segment *self, void *unused) { return PyBool_FromLong(self->queue.threaded); }

static PyObject *start_progress_thread(Segment *self, PyObject *unused) {
  return PyBool_FromLong(allred_is_own(self) && allred_queue_start_thread(&self->queue) == 0);
}

static PyObject *halt(Segment *self, PyObject *unused) {
  if (allred_is_own(self)) {
    const int was_halted = self->queue.halted; /* then operations in the queue may be freed already */
    Py_BEGIN_ALLOW_THREADS;
    allred_queue_halt(&self->queue);
    Py_END_ALLOW_THREADS;
    const allred_operation *op = was_halted ? NULL : atomic_load_explicit(&self->queue.first, memory_order_acquire);
    for (; op && self->segment.arenas.base; op = op->next)
      if (op->tensors || op->ring) allred_arena_freeze(); /* another rank may still use these arrays */
  }
  Py_RETURN_NONE;
}

static PyObject *on_complete(Segment *self, PyObject *first) {
  if (Py_TYPE(first) == allred_operation_type && allred_is_own(self))
    allred_queue_release(&self->queue, &((Operation *)(void *)first)->operation);
  Py_RETURN_NONE;
}

static PyObject *set_tracing(Segment *self, PyObject *enabled) {
  const int is = PyObject_IsTrue(enabled);
  if (is < 0) return NULL;
  self->trace.enabled = is;
  Py_RETURN_NONE;
}

static PyObject *take_trace(Segment *self, PyObject *unused) { return allred_trace_take(&self->trace); }

/* ---- a try-lock with the interface of threading.Lock, which the fast path checks too */

static PyObject *acquire(Segment *self, PyObject *unused) {
  const int free = !self->locked && (!self->finishing_thread || self->finishing_thread == PyThread_get_thread_ident());
  if (free) self->locked = 1, self->finishing_thread = 0;
  return PyBool_FromLong(free);
}

static PyObject *release(Segment *self, PyObject *unused) {
  self->locked = 0;
  Py_RETURN_NONE;
}

/*
 * ---- begin_...(record, ...): flat contiguous buffers in, a queued Operation out
 *
 * record: the header, 64 bytes; or None for a further part of the operation that holds the queue, which goes first.
 */

/* Return a new operation with room for this many tensors and the header of a record; NULL: an exception. */
Operation *allred_segment_prepare(Segment *self, PyObject *record, Py_ssize_t tensors) {
  char *bytes = NULL;
  Py_ssize_t length = sizeof(allred_header);
  if (!self->open) return PyErr_SetString(PyExc_ValueError, "the segment is closed"), NULL;
  if (record != Py_None && PyBytes_AsStringAndSize(record, &bytes, &length) < 0) return NULL;
  if (length != sizeof(allred_header)) {
    PyErr_Format(PyExc_ValueError, "a header has %zu bytes, not %zd", sizeof(allred_header), length);
    return NULL;
  }
  Operation *operation = allred_new_operation(tensors);
  if (!operation) return NULL;
  operation->send_starts = PyMem_Calloc((size_t)allred_all_ranks(self) + 1, sizeof(uint64_t));
  operation->receive_starts = PyMem_Calloc((size_t)allred_all_ranks(self) + 1, sizeof(uint64_t));
  if (!operation->send_starts || !operation->receive_starts)
    return Py_DECREF((PyObject *)operation), (Operation *)(void *)PyErr_NoMemory();
  if (bytes) memcpy(&operation->operation.header, bytes, sizeof(allred_header));
  return operation;
}

/* Queue the operation. If it is not prepared, an exception is set. */
PyObject *allred_segment_begin(Segment *self, Operation *operation, PyObject *record, int prepared) {
  if (!prepared) return Py_DECREF((PyObject *)operation), NULL;
  allred_attach(operation, self);
  if (record == Py_None)
    allred_queue_continue(&self->queue, &operation->operation);
  else
    allred_queue_put(&self->queue, &operation->operation);
  return (PyObject *)operation;
}

static PyObject *begin_exchange(Segment *self, PyObject *args) {
  PyObject *record;
  int holds;
  if (!PyArg_ParseTuple(args, "Op:begin_exchange", &record, &holds)) return NULL;
  Operation *operation = allred_segment_prepare(self, record, 1);
  if (!operation) return NULL;
  allred_begin_exchange(&operation->operation, &self->segment, &operation->operation.header);
  operation->operation.holds = holds;
  return allred_segment_begin(self, operation, record, 1);
}

int allred_segment_kernel_exists(const Segment *self, int dtype, int op) {
  if (dtype >= 0 && dtype < ALLRED_DTYPES && op >= 0 && op < ALLRED_OPS &&
      allred_reduce_kernel(self->variant, dtype, op))
    return 1;
  PyErr_Format(PyExc_ValueError, "operator %d is not defined for dtype %d", op, dtype);
  return 0;
}

/* Make a table entry of a source and a target; 0, or -1 with an exception set. */
static int enter(const Segment *self, Operation *operation, PyObject *source, PyObject *target, long dtype, int op,
                 long wire, allred_tensor *tensor) {
  if (!allred_segment_kernel_exists(self, (int)dtype, op)) return -1;
  const allred_header *header = &operation->operation.header;
  if (header->op & ALLRED_WEIGHTED && !allred_can_weigh((int)dtype, allred_header_weight(header))) {
    PyErr_Format(PyExc_ValueError, "dtype %ld cannot be multiplied by this weight", dtype);
    return -1;
  }
  const Py_buffer *in = allred_hold(operation, source, PyBUF_CONTIG_RO), *out;
  if (!in || !(out = allred_hold(operation, target, PyBUF_CONTIG))) return -1;
  if (in->len != out->len || (size_t)in->len % allred_dtype_bytes((int)dtype)) {
    PyErr_Format(PyExc_ValueError, "%zd bytes cannot be reduced into %zd", in->len, out->len);
    return -1;
  }
  if (wire && (wire < 0 || !(self->segment.network ? allred_encodes : allred_narrows)((int)dtype, (int)wire))) {
    PyErr_Format(PyExc_ValueError, "dtype %ld does not travel as type %ld", dtype, wire);
    return -1;
  }
  *tensor = (allred_tensor){in->buf, out->buf, (size_t)in->len, (int)dtype, (int)wire, 0, 0};
  return 0;
}

static PyObject *begin_allreduce(Segment *self, PyObject *args) {
  PyObject *record, *sources, *targets, *dtypes, *wires, *residual = Py_None;
  int op, checks_finite = 0;
  if (!PyArg_ParseTuple(args, "OOOOOi|pO:begin_allreduce", &record, &sources, &targets, &dtypes, &wires, &op,
                        &checks_finite, &residual))
    return NULL;
  const Py_ssize_t count = PyList_Check(sources) ? PyList_Size(sources) : -1;
  if (count < 0 || !PyList_Check(targets) || !PyList_Check(dtypes) || PyList_Size(targets) != count ||
      PyList_Size(dtypes) != count || !PyList_Check(wires) || PyList_Size(wires) != count)
    return PyErr_Format(PyExc_TypeError, "sources, targets, dtypes and wires must be lists of one length");
  if (op <= 0 || op >= ALLRED_OPS) return PyErr_Format(PyExc_ValueError, "operator %d does not exist", op);
  Operation *operation = allred_segment_prepare(self, record, count ? count : 1);
  if (!operation) return NULL;
  Py_ssize_t kept = 0;
  for (Py_ssize_t i = 0; i < count && kept == 0; i++) {
    const long dtype = PyLong_AsLong(PyList_GetItem(dtypes, i)), wire = PyLong_AsLong(PyList_GetItem(wires, i));
    kept = enter(self, operation, PyList_GetItem(sources, i), PyList_GetItem(targets, i), dtype, op, wire,
                 &operation->tensors[i]);
    operation->tensors[i].index = (uint32_t)i;
  }
  if (kept == 0) kept = allred_group_by_dtype(operation->tensors, count);
  if (kept >= 0) allred_prepare_allreduce(self, operation, &operation->operation.header, kept, op);
  operation->operation.checks_finite = checks_finite;
  return allred_segment_begin(self, operation, record, kept >= 0 && allred_keep_errors(operation, residual) == 0);
}

/* ---- the type */

/* Return a page that the kernel fills with zeros in forked children: the fast path recognizes a child without a system
 * call. NULL on Linux before 4.14: then there is no fast path. */
static const volatile char *own_process_page(void) {
  char *page = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return NULL;
  if (madvise(page, 1, MADV_WIPEONFORK) < 0) {
    munmap(page, 1);
    return NULL;
  }
  *page = 1;
  return page;
}

static int construct(Segment *self, PyObject *args, PyObject *unused) {
  PyObject *memory, *array;
  int rank, ranks;
  Py_ssize_t chunk_bytes;
  if (self->open) return PyErr_SetString(PyExc_TypeError, "the segment is constructed already"), -1;
  if (!PyArg_ParseTuple(args, "OiinOO!O!:Segment", &memory, &rank, &ranks, &chunk_bytes, &array, &PyTuple_Type,
                        &self->dtypes, &PyTuple_Type, &self->ops))
    return self->dtypes = self->ops = NULL, -1;
  Py_INCREF(self->dtypes), Py_INCREF(self->ops);
  if (allred_array_layout_is_known(array)) self->array_type = PyObject_Type(array);
  if (ranks < 1 || ranks > ALLRED_MAX_RANKS || rank < 0 || rank >= ranks || chunk_bytes < ranks * ALLRED_LINE ||
      chunk_bytes > MAX_CHUNK_BYTES || chunk_bytes % ALLRED_LINE || PyTuple_Size(self->dtypes) > ALLRED_DTYPES ||
      PyTuple_Size(self->ops) > ALLRED_OPS)
    return PyErr_SetString(PyExc_ValueError, "no such rank, ranks or chunk_bytes"), -1;
  const size_t needed = allred_segment_bytes(ranks, (size_t)chunk_bytes);
  if (PyObject_GetBuffer(memory, &self->memory, PyBUF_CONTIG) < 0) return -1;
  if (allred_queue_open(&self->queue)) return PyErr_SetString(PyExc_OSError, "cannot create the queue mutex"), -1;
  self->open = 1;
  self->pid = getpid();
  if ((size_t)self->memory.len < needed) {
    PyErr_Format(PyExc_ValueError, "the memory has %zd bytes, but the ranks need %zu", self->memory.len, needed);
    return -1;
  }
  self->variant = allred_variants() - 1;
  self->own_process = own_process_page();
  self->segment =
      (allred_segment){.memory = self->memory.buf, .rank = rank, .ranks = ranks, .chunk_bytes = (size_t)chunk_bytes};
  return 0;
}

static PyObject *close_segment(Segment *self, PyObject *unused) {
  if (!self->open) Py_RETURN_NONE;
  if (self->locked) return PyErr_Format(PyExc_ValueError, "another thread is in an operation on this segment");
  Py_XDECREF(halt(self, unused));
  self->open = 0;
  allred_segment_release_arenas(self);
  allred_segment_release_network(self);
  PyBuffer_Release(&self->memory);
  if (self->own_process) munmap((void *)self->own_process, 1);
  self->own_process = NULL;
  Py_RETURN_NONE;
}

static void destruct(Segment *self) {
  self->locked = 0; /* a thread inside would hold a reference */
  Py_XDECREF(close_segment(self, NULL));
  Py_XDECREF((PyObject *)self->spare);
  allred_trace_free(&self->trace);
  PyMem_Free(self->disjoint);
  Py_XDECREF(self->array_type), Py_XDECREF(self->dtypes), Py_XDECREF(self->ops);
  allred_free_object(self);
}

static PyMethodDef methods[] = {
    METHOD("allreduce", allred_segment_allreduce, METH_FASTCALL,
           "Reduce by the fast path: True if done, an Operation if begun, None if the fast path is not possible."),
    METHOD("start_allreduce", allred_segment_start_allreduce, METH_FASTCALL, "Begin an allreduce of plain arrays."),
    METHOD("grouped_allreduce", allred_segment_grouped_allreduce, METH_FASTCALL, "The same for lists of arrays."),
    METHOD("step_allreduce", allred_segment_step_allreduce, METH_FASTCALL, "The same for the gradients of a step."),
    METHOD("begin_exchange", begin_exchange, METH_VARARGS, "Begin a barrier."),
    METHOD("begin_allreduce", begin_allreduce, METH_VARARGS, "Begin an allreduce."),
    METHOD("begin_allgather", allred_segment_begin_allgather, METH_VARARGS, "Begin an allgather."),
    METHOD("begin_broadcast", allred_segment_begin_broadcast, METH_VARARGS, "Begin a broadcast."),
    METHOD("begin_alltoall", allred_segment_begin_alltoall, METH_VARARGS, "Begin an alltoall."),
    METHOD("begin_reducescatter", allred_segment_begin_reducescatter, METH_VARARGS, "Begin a reducescatter."),
    METHOD("headers", headers, METH_NOARGS, "Return the headers of all ranks in the last operation."),
    METHOD("start_progress_thread", start_progress_thread, METH_NOARGS, "Start the thread; False if it cannot start."),
    METHOD("let_callers_sleep", let_callers_sleep, METH_NOARGS, "Each rank of the node has a core (operation.h)."),
    METHOD("on_complete", on_complete, METH_O, "Let the queue go on after this operation."),
    METHOD("halt", halt, METH_NOARGS, "Stop all progress, for good, and end the thread."),
    METHOD("set_arenas", allred_segment_set_arenas, METH_O,
           "From now on, reduce arrays that lie in these buffers in place. Called on all ranks between operations."),
    METHOD("set_network", allred_segment_set_network, METH_VARARGS,
           "From now on, operations include the ranks of other hosts. Called on all ranks between operations."),
    METHOD("begin_host_exchange", allred_segment_begin_host_exchange, METH_VARARGS, "Exchange bytes between hosts."),
    METHOD("set_tracing", set_tracing, METH_O, "Whether to record the calls of the fast path from now on."),
    METHOD("take_trace", take_trace, METH_NOARGS, "Return and remove the recorded calls."),
    METHOD("acquire", acquire, METH_O, "Take the lock; False if another thread has it. Never waits."),
    METHOD("release", release, METH_NOARGS, "Release the lock."),
    METHOD("close", close_segment, METH_NOARGS, "Release the memory."),
    {NULL, NULL, 0, NULL}};

static PyMemberDef members[] = {
    {"number", T_ULONGLONG, offsetof(Segment, segment.operation), READONLY, "number of the last operation, from 1"},
    {"sent", T_ULONGLONG, offsetof(Segment, segment.sent), 0, "bytes that this rank has written for allreduces"},
    {"generation", T_ULONGLONG, offsetof(Segment, generation), 0, "generation of the world, in the headers of C"},
    {"samples", T_ULONGLONG, offsetof(Segment, samples), READONLY, "samples of all ranks in the last step"},
    {"waited_ns", T_LONGLONG, offsetof(Segment, waited_ns), READONLY, "ns that the last step waited for other ranks"},
    {"in_place", T_ULONGLONG, offsetof(Segment, segment.in_place), READONLY, "bytes of arrays reduced in place"},
    {"read_in_place", T_ULONGLONG, offsetof(Segment, segment.read_in_place), READONLY,
     "bytes that this rank has read from arenas, except by allreduces"},
    {NULL, 0, 0, 0, NULL}};

static PyGetSetDef attributes[] = {
    ATTRIBUTE("nonfinite", get_nonfinite, "position of the first array that was not finite, or -1"),
    ATTRIBUTE("outside", allred_segment_get_outside, "by rank: (arrays, bytes) that its arena lacked"),
    ATTRIBUTE("lost_host", allred_segment_get_lost_host, "the first host whose connection was lost, or -1"),
    ATTRIBUTE("pending", get_pending, "whether an operation is pending"),
    ATTRIBUTE("has_progress_thread", get_has_progress_thread, "whether a thread makes progress"),
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Segment(memory, rank, ranks, chunk_bytes, array, dtypes, ops): a rank's view of shared memory."},
    {Py_tp_init, construct},
    {Py_tp_dealloc, destruct},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, attributes},
    {0, NULL}};

PyType_Spec allred_segment_spec = {"allred.native._kernels.Segment", sizeof(Segment), 0, Py_TPFLAGS_DEFAULT, slots};
