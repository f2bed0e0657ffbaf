/*
 * The Python type `Segment`: one rank's view of a node's shared memory. segment_object.h says what is where.
 */
#define _GNU_SOURCE /* mmap, madvise */
#include "segment_type.h"

#include <sys/mman.h>

#include "numpy_array.h"
#include "segment_object.h"

#define MOST_CHUNK_BYTES (1 << 30)

void allred_start_allreduce(Segment *self, Operation *operation, const allred_header *header, Py_ssize_t count,
                            int op) {
  allred_begin_allreduce(&operation->operation, &self->segment, header, operation->tensors, (size_t)count,
                         self->variant, op, self->segment.ranks);
}

PyObject *allred_headers(const Segment *segment, uint64_t number) {
  PyObject *list = PyList_New(segment->segment.ranks);
  for (int rank = 0; list && rank < segment->segment.ranks; rank++) {
    const void *shown = allred_segment_header(&segment->segment, rank, number);
    PyObject *bytes = PyBytes_FromStringAndSize(shown, sizeof(allred_header));
    if (!bytes || PyList_SetItem(list, rank, bytes) < 0) Py_CLEAR(list);
  }
  return list;
}

/* The headers of the operation that was begun last. They stay until this rank begins another. */
static PyObject *headers(Segment *self, PyObject *unused) {
  (void)unused;
  if (!self->segment.operation || !allred_queue_idle(&self->queue))
    return PyErr_Format(PyExc_ValueError, "no operation is complete");
  return allred_headers(self, self->segment.operation);
}

static PyObject *get_number(Segment *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(self->segment.operation);
}

static PyObject *get_sent(Segment *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(self->segment.sent);
}

static PyObject *get_pending(Segment *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(!allred_queue_idle(&self->queue));
}

static PyObject *attend(Segment *self, PyObject *unused) {
  (void)unused;
  return PyBool_FromLong(allred_is_own(self) && allred_queue_attend(&self->queue) == 0);
}

static PyObject *halt(Segment *self, PyObject *unused) {
  (void)unused;
  if (allred_is_own(self)) {
    Py_BEGIN_ALLOW_THREADS;
    allred_queue_halt(&self->queue);
    Py_END_ALLOW_THREADS;
  }
  Py_RETURN_NONE;
}

static PyObject *over(Segment *self, PyObject *first) {
  if (allred_is_operation(first) && allred_is_own(self))
    allred_queue_release(&self->queue, &((Operation *)(void *)first)->operation);
  Py_RETURN_NONE;
}

static PyObject *get_attended(Segment *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(self->queue.threaded);
}

static PyObject *note(Segment *self, PyObject *wanted) {
  const int is = PyObject_IsTrue(wanted);
  if (is < 0) return NULL;
  self->notes.wanted = is;
  Py_RETURN_NONE;
}

static PyObject *noted(Segment *self, PyObject *unused) {
  (void)unused;
  return allred_notes_take(&self->notes);
}

/* ---- a lock that is never waited for: the interface of threading.Lock, and seen by the short way */

static PyObject *acquire(Segment *self, PyObject *unused) {
  (void)unused;
  const int free = !self->taken && (!self->finisher || self->finisher == PyThread_get_thread_ident());
  if (free) self->taken = 1, self->finisher = 0;
  return PyBool_FromLong(free);
}

static PyObject *release(Segment *self, PyObject *unused) {
  (void)unused;
  self->taken = 0;
  Py_RETURN_NONE;
}

/* ---- the type */

/* A page that the kernel shows to forked children as zeros: that this is a rank's own process can be seen for free. */
static const volatile char *own_process_page(void) {
  char *page = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return NULL;
  if (madvise(page, 1, MADV_WIPEONFORK) < 0) {
    munmap(page, 1);
    return NULL; /* Linux before 4.14: then there is no short way */
  }
  *page = 1;
  return page;
}

static int construct(Segment *self, PyObject *args, PyObject *unused) {
  (void)unused;
  PyObject *memory, *array;
  int rank, ranks;
  Py_ssize_t chunk_bytes;
  if (self->open) return PyErr_SetString(PyExc_TypeError, "it is constructed already"), -1;
  if (!PyArg_ParseTuple(args, "OiinOOO:Segment", &memory, &rank, &ranks, &chunk_bytes, &array, &self->dtypes,
                        &self->ops))
    return -1;
  Py_INCREF(self->dtypes), Py_INCREF(self->ops);
  if (allred_array_is_as_here(array)) self->array_type = PyObject_Type(array);
  if (ranks < 1 || ranks > ALLRED_MAX_RANKS || rank < 0 || rank >= ranks || chunk_bytes < ranks * ALLRED_LINE ||
      chunk_bytes > MOST_CHUNK_BYTES || chunk_bytes % ALLRED_LINE || !PyTuple_Check(self->dtypes) ||
      PyTuple_Size(self->dtypes) > ALLRED_DTYPES || !PyTuple_Check(self->ops) || PyTuple_Size(self->ops) > ALLRED_OPS)
    return PyErr_SetString(PyExc_ValueError, "no such rank, ranks or chunk_bytes"), -1;
  const size_t needed = allred_segment_bytes(ranks, (size_t)chunk_bytes);
  if (PyObject_GetBuffer(memory, &self->memory, PyBUF_CONTIG) < 0) return -1;
  if (allred_queue_open(&self->queue)) return PyErr_SetString(PyExc_OSError, "no lock is to be had"), -1;
  self->open = 1;
  self->pid = getpid();
  if ((size_t)self->memory.len < needed) {
    PyErr_Format(PyExc_ValueError, "the memory has %zd bytes, and the ranks take %zu", self->memory.len, needed);
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
  if (self->taken) return PyErr_Format(PyExc_ValueError, "another thread is in an operation on this segment");
  Py_XDECREF(halt(self, unused));
  self->open = 0;
  PyBuffer_Release(&self->memory);
  if (self->own_process) munmap((void *)self->own_process, 1);
  self->own_process = NULL;
  Py_RETURN_NONE;
}

static void destruct(Segment *self) {
  PyTypeObject *type = Py_TYPE((PyObject *)self);
  self->taken = 0; /* who is inside holds a reference */
  Py_XDECREF(close_segment(self, NULL));
  Py_XDECREF((PyObject *)self->spare);
  allred_notes_free(&self->notes);
  PyMem_Free(self->apart);
  Py_XDECREF(self->array_type), Py_XDECREF(self->dtypes), Py_XDECREF(self->ops);
  freefunc release_type = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release_type(self);
  Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"allreduce", (PyCFunction)(void (*)(void))allred_segment_allreduce, METH_FASTCALL,
     "allreduce(source, target, op, name, wire=0): True when it is done, an Operation when it was begun, None when it "
     "must go "
     "the long way."},
    {"grouped_allreduce", (PyCFunction)(void (*)(void))allred_segment_grouped_allreduce, METH_FASTCALL,
     "grouped_allreduce(sources, targets, op, name, wire=0): the same for lists."},
    {"begin_exchange", (PyCFunction)(void (*)(void))allred_segment_begin_exchange, METH_VARARGS,
     "begin_exchange(record, holds)"},
    {"begin_allreduce", (PyCFunction)(void (*)(void))allred_segment_begin_allreduce, METH_VARARGS,
     "begin_allreduce(record, sources, targets, dtypes, op, wire=0)"},
    {"begin_allgather", (PyCFunction)(void (*)(void))allred_segment_begin_allgather, METH_VARARGS,
     "begin_allgather(record, send, receive, counts)"},
    {"begin_broadcast", (PyCFunction)(void (*)(void))allred_segment_begin_broadcast, METH_VARARGS,
     "begin_broadcast(record, data, root)"},
    {"begin_alltoall", (PyCFunction)(void (*)(void))allred_segment_begin_alltoall, METH_VARARGS,
     "begin_alltoall(record, send, receive, send_counts, receive_counts, largest)"},
    {"begin_reducescatter", (PyCFunction)(void (*)(void))allred_segment_begin_reducescatter, METH_VARARGS,
     "begin_reducescatter(record, send, receive, counts, dtype, op)"},
    {"headers", (PyCFunction)(void (*)(void))headers, METH_NOARGS, "headers(): those of all ranks, when complete."},
    {"start_progress_thread", (PyCFunction)(void (*)(void))attend, METH_NOARGS,
     "start_progress_thread(): False if there can be none."},
    {"on_complete", (PyCFunction)(void (*)(void))over, METH_O,
     "on_complete(first): that operation is complete; the next ones may run."},
    {"halt", (PyCFunction)(void (*)(void))halt, METH_NOARGS, "halt(): nothing moves any more, and the thread ends."},
    {"note", (PyCFunction)(void (*)(void))note, METH_O, "note(wanted): from now on, what passes the short way."},
    {"noted", (PyCFunction)(void (*)(void))noted, METH_NOARGS, "noted(): what has come since the last time."},
    {"acquire", (PyCFunction)(void (*)(void))acquire, METH_O,
     "acquire(blocking): take the lock; False if it is taken."},
    {"release", (PyCFunction)(void (*)(void))release, METH_NOARGS, "release(): give the lock back."},
    {"close", (PyCFunction)(void (*)(void))close_segment, METH_NOARGS, "close(): let go of the memory."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {
    {"number", (getter)get_number, NULL, "of the operation that was begun last, counted from 1", NULL},
    {"sent", (getter)get_sent, NULL, "bytes that this rank has written for allreduces", NULL},
    {"pending", (getter)get_pending, NULL, "whether an operation is under way", NULL},
    {"has_progress_thread", (getter)get_attended, NULL, "whether a thread makes progress", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Segment(memory, rank, ranks, chunk_bytes, array, dtypes, ops): a rank's view of shared memory."},
    {Py_tp_init, construct},
    {Py_tp_dealloc, destruct},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL}};

static PyType_Spec spec = {.name = "allred.native._kernels.Segment",
                           .basicsize = sizeof(Segment),
                           .flags = Py_TPFLAGS_DEFAULT,
                           .slots = slots};

int allred_add_segment_type(PyObject *module) {
  PyObject *type = PyType_FromSpec(&spec);
  const int status = type ? PyModule_AddObjectRef(module, "Segment", type) : -1;
  Py_XDECREF(type);
  return status < 0 ? status : allred_add_operation_type(module);
}
