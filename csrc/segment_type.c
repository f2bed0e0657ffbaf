/*
 * The Python type `Segment`: one rank's view of a node's shared memory, and the operation that it is in. Limited API.
 *
 * There are two ways in. The begin_... methods take flat contiguous buffers and a header made in Python, and return at
 * once; done() and linger() then take steps. allreduce() and grouped_allreduce() are the short way for arrays that can
 * be taken as they are: they check and hash them here, make the very same header, and usually come back complete. Ranks
 * of one operation may take different ways.
 */
#define _GNU_SOURCE /* mmap, madvise */
#include "segment_type.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "operation.h"

enum { ALREADY_DONE = 0, STARTED = 1, NOT_TAKEN = 2 };

/* Up to so many bytes the first look is taken without giving the GIL away: that alone takes 50 ns. */
#define BRIEF_BYTES 32768
#define PATIENCE_NS 1000000
#define MOST_CHUNK_BYTES (1 << 30)

typedef struct {
  PyObject_HEAD Py_buffer memory;
  allred_segment segment;
  allred_operation operation;
  int open, taken, variant;
  unsigned long finisher;           /* the thread that has to finish what its short way began; 0 if there is none */
  const volatile char *own_process; /* a page that reads 0 in a forked child */
  Py_buffer *views;                 /* of the present operation */
  Py_ssize_t view_count, view_room;
  allred_tensor *tensors;
  Py_ssize_t tensor_room;
  uint64_t *send_starts, *receive_starts;
  PyObject *array_type, *dtypes, *ops, *dtype_name;
  PyObject *last_dtype; /* most arrays are of the dtype of the one before */
  int last_code;
} Segment;

static void release_views(Segment *self) {
  while (self->view_count) PyBuffer_Release(&self->views[--self->view_count]);
}

/* Room for the views and the table of so many tensors. */
static int make_room(Segment *self, Py_ssize_t tensors) {
  if (2 * tensors > self->view_room) {
    Py_buffer *views = PyMem_Realloc(self->views, (size_t)tensors * 2 * sizeof *views);
    if (!views) return PyErr_NoMemory(), -1;
    self->views = views;
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

static Py_buffer *hold(Segment *self, PyObject *object, int flags) {
  Py_buffer *view = &self->views[self->view_count];
  if (PyObject_GetBuffer(object, view, flags) < 0) return NULL;
  self->view_count++;
  return view;
}

static int pending(const Segment *self) { return self->operation.segment && self->operation.status == ALLRED_PENDING; }

static int ready(Segment *self) {
  if (!self->open)
    PyErr_SetString(PyExc_ValueError, "the segment is closed");
  else if (pending(self))
    PyErr_SetString(PyExc_ValueError, "an operation is under way");
  else
    return 1;
  return 0;
}

static int read_header(PyObject *record, allred_header *header) {
  char *bytes;
  Py_ssize_t length;
  if (PyBytes_AsStringAndSize(record, &bytes, &length) < 0) return -1;
  if (length != sizeof *header) {
    PyErr_Format(PyExc_ValueError, "a header has %zu bytes, not %zd", sizeof *header, length);
    return -1;
  }
  memcpy(header, bytes, sizeof *header);
  return 0;
}

static void start_allreduce(Segment *self, const allred_header *header, Py_ssize_t count, int op) {
  allred_begin_allreduce(&self->operation, &self->segment, header, self->tensors, (size_t)count, self->variant, op,
                         self->segment.ranks);
}

/* ---- the short way */

static int position(PyObject *tuple, PyObject *item) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  for (Py_ssize_t i = 0; i < count; i++)
    if (PyTuple_GetItem(tuple, i) == item) return (int)i;
  return -1;
}

/* How a tensor of this dtype travels in an operation with this wire type. */
static int wire_of(int dtype, int wire) { return allred_narrows(dtype, wire) ? wire : 0; }

/* An exact numpy array of a plain dtype as the next entry of the table; 0 if it has to go the long way. */
static int take(Segment *self, PyObject *source, PyObject *target, const allred_header *header, uint64_t *words,
                allred_tensor *tensor) {
  if ((PyObject *)Py_TYPE(source) != self->array_type || (PyObject *)Py_TYPE(target) != self->array_type) return 0;
  PyObject *dtype = PyObject_GetAttr(source, self->dtype_name);
  if (!dtype) return 0;
  if (dtype != self->last_dtype) {
    self->last_code = position(self->dtypes, dtype);
    self->last_dtype = self->last_code < 0 ? NULL : dtype; /* the tuple keeps it */
  }
  const int code = self->last_code;
  Py_DECREF(dtype);
  if (code < 0 || !allred_reduce_kernel(self->variant, code, header->op & ALLRED_OP_BITS)) return 0;
  const Py_buffer *in = hold(self, source, source == target ? PyBUF_CONTIG : PyBUF_CONTIG_RO), *out = in;
  if (!in || (source != target && !(out = hold(self, target, PyBUF_CONTIG))) || in->len != out->len) return 0;
  *words = allred_mix(*words, (uint64_t)code << 8 | (uint64_t)in->ndim);
  for (int i = 0; i < in->ndim; i++) *words = allred_mix(*words, (uint64_t)in->shape[i]);
  *tensor = (allred_tensor){in->buf, out->buf, (size_t)in->len, code, wire_of(code, header->op >> ALLRED_WIRE_SHIFT)};
  return 1;
}

/* op, name, and the wire type if there is one, into the header; 0 if they have to go the long way. */
static int read_how(Segment *self, PyObject *const *args, Py_ssize_t count, allred_header *header) {
  Py_ssize_t length;
  const char *text = PyUnicode_Check(args[1]) ? PyUnicode_AsUTF8AndSize(args[1], &length) : NULL;
  const int code = position(self->ops, args[0]);
  const long wire = count > 2 ? PyLong_AsLong(args[2]) : 0;
  if (!text || code <= 0 || (wire && !allred_narrows(ALLRED_FLOAT32, (int)wire))) return 0; /* op 0 is none */
  header->op = (uint8_t)(code | (int)wire << ALLRED_WIRE_SHIFT);
  header->name = allred_hash_text(text, (size_t)length);
  return 1;
}

/* The operation runs if it can be taken at all; then nobody else may use the segment meanwhile. */
static int short_way(Segment *self, const allred_header *header, Py_ssize_t count, size_t bytes) {
  start_allreduce(self, header, count, header->op & ALLRED_OP_BITS);
  int status = bytes <= BRIEF_BYTES ? allred_run(&self->operation, 0) : ALLRED_PENDING;
  if (status == ALLRED_PENDING) {
    self->taken = 1;
    Py_BEGIN_ALLOW_THREADS;
    status = allred_run(&self->operation, PATIENCE_NS);
    Py_END_ALLOW_THREADS;
    self->taken = 0;
  }
  if (status != ALLRED_PENDING) release_views(self);
  self->finisher = status == ALLRED_DONE ? 0 : PyThread_get_thread_ident();
  return status == ALLRED_DONE ? ALREADY_DONE : STARTED;
}

static int not_taken(Segment *self) {
  release_views(self);
  PyErr_Clear();
  return NOT_TAKEN;
}

static int can_take(const Segment *self) {
  return self->open && !self->taken && !self->finisher && self->own_process && *self->own_process && !pending(self);
}

static PyObject *allreduce(Segment *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 4 && count != 5) return PyErr_Format(PyExc_TypeError, "allreduce(source, target, op, name, wire=0)");
  if (!can_take(self)) return PyLong_FromLong(NOT_TAKEN);
  allred_header header = {.kind = ALLRED_KIND_ALLREDUCE, .root = -1, .words = allred_mix(0, 1)};
  if (!read_how(self, args + 2, count - 2, &header) ||
      !take(self, args[0], args[1], &header, &header.words, self->tensors))
    return PyLong_FromLong(not_taken(self));
  const size_t bytes = self->tensors->bytes;
  header.dtype = (uint8_t)self->tensors->dtype;
  header.count = bytes / allred_dtype_bytes(self->tensors->dtype);
  return PyLong_FromLong(short_way(self, &header, bytes > 0, bytes));
}

static int by_address(const void *a, const void *b) {
  const uintptr_t first = (uintptr_t)((const allred_tensor *)a)->out,
                  second = (uintptr_t)((const allred_tensor *)b)->out;
  return first < second ? -1 : first > second;
}

/* Whether two tensors of the table write to the same memory; -1 without memory to find out. */
static int overlap(const allred_tensor *tensors, Py_ssize_t count) {
  Py_ssize_t ascending = 1;
  while (ascending < count && tensors[ascending].out >= tensors[ascending - 1].out + tensors[ascending - 1].bytes)
    ascending++;
  if (ascending >= count) return 0;
  allred_tensor *sorted = PyMem_Malloc((size_t)count * sizeof *sorted);
  if (!sorted) return -1;
  memcpy(sorted, tensors, (size_t)count * sizeof *sorted);
  qsort(sorted, (size_t)count, sizeof *sorted, by_address);
  int found = 0;
  for (Py_ssize_t i = 1; i < count && !found; i++) found = sorted[i].out < sorted[i - 1].out + sorted[i - 1].bytes;
  PyMem_Free(sorted);
  return found;
}

/* The non-empty tensors, those of one dtype together, each in their order: chunks are of one dtype. */
static Py_ssize_t by_dtype(allred_tensor *tensors, Py_ssize_t count) {
  Py_ssize_t alike = 0;
  while (alike < count && tensors[alike].bytes && tensors[alike].dtype == tensors->dtype) alike++;
  if (alike == count) return count;
  allred_tensor *sorted = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *sorted);
  Py_ssize_t kept = 0;
  if (!sorted) return PyErr_NoMemory(), -1;
  for (int dtype = 0; dtype < ALLRED_DTYPES; dtype++)
    for (Py_ssize_t i = 0; i < count; i++)
      if (tensors[i].dtype == dtype && tensors[i].bytes) sorted[kept++] = tensors[i];
  memcpy(tensors, sorted, (size_t)kept * sizeof *sorted);
  PyMem_Free(sorted);
  return kept;
}

static PyObject *grouped_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count) {
  if ((count != 4 && count != 5) || !PyList_Check(args[0]) || !PyList_Check(args[1]))
    return PyErr_Format(PyExc_TypeError, "grouped_allreduce(sources: list, targets: list, op, name, wire=0)");
  if (!can_take(self)) return PyLong_FromLong(NOT_TAKEN);
  const Py_ssize_t tensors = PyList_Size(args[0]);
  if (PyList_Size(args[1]) != tensors) return PyErr_Format(PyExc_ValueError, "as many targets as sources");
  if (make_room(self, tensors ? tensors : 1) < 0) return PyLong_FromLong(not_taken(self));
  allred_header header = {
      .kind = ALLRED_KIND_GROUPED_ALLREDUCE, .dtype = 255, .root = -1, .words = allred_mix(0, (uint64_t)tensors)};
  if (!read_how(self, args + 2, count - 2, &header)) return PyLong_FromLong(not_taken(self));
  size_t bytes = 0;
  for (Py_ssize_t i = 0; i < tensors; i++) {
    PyObject *source = PyList_GetItem(args[0], i), *target = PyList_GetItem(args[1], i);
    if (!take(self, source, target, &header, &header.words, &self->tensors[i])) return PyLong_FromLong(not_taken(self));
    header.count += self->tensors[i].bytes / allred_dtype_bytes(self->tensors[i].dtype);
    bytes += self->tensors[i].bytes;
  }
  const Py_ssize_t kept = by_dtype(self->tensors, tensors);
  if (kept < 0 || overlap(self->tensors, kept)) return PyLong_FromLong(not_taken(self));
  return PyLong_FromLong(short_way(self, &header, kept, bytes));
}

/* ---- the long way */

static PyObject *begin_exchange(Segment *self, PyObject *record) {
  allred_header header;
  if (!ready(self) || read_header(record, &header) < 0) return NULL;
  allred_begin_exchange(&self->operation, &self->segment, &header);
  Py_RETURN_NONE;
}

static int kernel_exists(const Segment *self, int dtype, int op) {
  if (dtype >= 0 && dtype < ALLRED_DTYPES && op >= 0 && op < ALLRED_OPS &&
      allred_reduce_kernel(self->variant, dtype, op))
    return 1;
  PyErr_Format(PyExc_ValueError, "operator %d is not defined for dtype %d", op, dtype);
  return 0;
}

/* One tensor as an entry of the table, its dtype given by number. */
static int enter(Segment *self, PyObject *source, PyObject *target, long dtype, int op, int wire,
                 allred_tensor *tensor) {
  if (!kernel_exists(self, (int)dtype, op)) return -1;
  const Py_buffer *in = hold(self, source, PyBUF_CONTIG_RO), *out;
  if (!in || !(out = hold(self, target, PyBUF_CONTIG))) return -1;
  if (in->len != out->len || (size_t)in->len % allred_dtype_bytes((int)dtype)) {
    PyErr_Format(PyExc_ValueError, "%zd bytes cannot be reduced into %zd", in->len, out->len);
    return -1;
  }
  *tensor = (allred_tensor){in->buf, out->buf, (size_t)in->len, (int)dtype, wire_of((int)dtype, wire)};
  return 0;
}

static PyObject *begin_allreduce(Segment *self, PyObject *args) {
  PyObject *record, *sources, *targets, *dtypes;
  allred_header header;
  int op, wire = 0;
  if (!PyArg_ParseTuple(args, "OOOOi|i:begin_allreduce", &record, &sources, &targets, &dtypes, &op, &wire)) return NULL;
  if (!ready(self) || read_header(record, &header) < 0) return NULL;
  const Py_ssize_t count = PyList_Check(sources) ? PyList_Size(sources) : -1;
  if (count < 0 || !PyList_Check(targets) || !PyList_Check(dtypes) || PyList_Size(targets) != count ||
      PyList_Size(dtypes) != count)
    return PyErr_Format(PyExc_TypeError, "sources, targets and dtypes must be lists of one length");
  if (op <= 0 || op >= ALLRED_OPS) return PyErr_Format(PyExc_ValueError, "operator %d does not exist", op);
  if (wire && !allred_narrows(ALLRED_FLOAT32, wire))
    return PyErr_Format(PyExc_ValueError, "dtype %d is no wire type; float16 and bfloat16 are", wire);
  if (make_room(self, count ? count : 1) < 0) return NULL;
  Py_ssize_t kept = 0;
  for (Py_ssize_t i = 0; i < count && kept == 0; i++) {
    const long dtype = PyLong_AsLong(PyList_GetItem(dtypes, i));
    kept = enter(self, PyList_GetItem(sources, i), PyList_GetItem(targets, i), dtype, op, wire, &self->tensors[i]);
  }
  if (kept == 0) kept = by_dtype(self->tensors, count);
  if (kept < 0) return release_views(self), NULL;
  start_allreduce(self, &header, kept, op);
  Py_RETURN_NONE;
}

/* Offsets in bytes from a list of byte counts, one a rank: their sum, or -1. */
static Py_ssize_t read_counts(const Segment *self, PyObject *counts, uint64_t *starts) {
  if (!PyList_Check(counts) || PyList_Size(counts) != self->segment.ranks) {
    PyErr_Format(PyExc_ValueError, "counts must be a list of %d numbers of bytes", self->segment.ranks);
    return -1;
  }
  starts[0] = 0;
  for (int rank = 0; rank < self->segment.ranks; rank++) {
    const Py_ssize_t bytes = PyLong_AsSsize_t(PyList_GetItem(counts, rank));
    if (PyErr_Occurred()) return -1;
    if (bytes < 0 || starts[rank] + (uint64_t)bytes > PY_SSIZE_T_MAX) {
      PyErr_Format(PyExc_ValueError, "%zd is not a count", bytes);
      return -1;
    }
    starts[rank + 1] = starts[rank] + (uint64_t)bytes;
  }
  return (Py_ssize_t)starts[self->segment.ranks];
}

static int check_length(const char *what, const Py_buffer *view, uint64_t needed) {
  if ((uint64_t)view->len == needed) return 0;
  PyErr_Format(PyExc_ValueError, "%s has %zd bytes, and the counts say %llu", what, view->len,
               (unsigned long long)needed);
  return -1;
}

static uint64_t share(const Segment *self, const uint64_t *starts) {
  return starts[self->segment.rank + 1] - starts[self->segment.rank];
}

static PyObject *begun(Segment *self, int status) {
  if (status < 0) return release_views(self), NULL;
  Py_RETURN_NONE;
}

static PyObject *begin_allgather(Segment *self, PyObject *args) {
  PyObject *record, *send, *receive, *counts;
  allred_header header;
  const Py_buffer *from, *to;
  if (!PyArg_ParseTuple(args, "OOOO:begin_allgather", &record, &send, &receive, &counts)) return NULL;
  if (!ready(self) || read_header(record, &header) < 0) return NULL;
  const Py_ssize_t total = read_counts(self, counts, self->receive_starts);
  if (total < 0 || !(from = hold(self, send, PyBUF_CONTIG_RO)) || !(to = hold(self, receive, PyBUF_CONTIG)) ||
      check_length("send", from, share(self, self->receive_starts)) < 0 ||
      check_length("receive", to, (uint64_t)total) < 0)
    return begun(self, -1);
  allred_begin_allgather(&self->operation, &self->segment, &header, from->buf, to->buf, self->receive_starts);
  return begun(self, 0);
}

/* To which the root alone gives something: nothing is written to its memory, which may be read-only. */
static PyObject *begin_broadcast(Segment *self, PyObject *args) {
  PyObject *record, *data;
  int root;
  allred_header header;
  if (!PyArg_ParseTuple(args, "OOi:begin_broadcast", &record, &data, &root)) return NULL;
  if (!ready(self) || read_header(record, &header) < 0) return NULL;
  if (root < 0 || root >= self->segment.ranks) return PyErr_Format(PyExc_ValueError, "root %d is not a rank", root);
  const Py_buffer *view = hold(self, data, root == self->segment.rank ? PyBUF_CONTIG_RO : PyBUF_CONTIG);
  if (!view) return NULL;
  for (int rank = 0; rank <= self->segment.ranks; rank++)
    self->receive_starts[rank] = rank > root ? (uint64_t)view->len : 0;
  allred_begin_allgather(&self->operation, &self->segment, &header, view->buf, view->buf, self->receive_starts);
  Py_RETURN_NONE;
}

static PyObject *begin_alltoall(Segment *self, PyObject *args) {
  PyObject *record, *send, *receive, *send_counts, *receive_counts;
  Py_ssize_t largest;
  allred_header header;
  const Py_buffer *from, *to;
  if (!PyArg_ParseTuple(args, "OOOOOn:begin_alltoall", &record, &send, &receive, &send_counts, &receive_counts,
                        &largest))
    return NULL;
  if (!ready(self) || read_header(record, &header) < 0) return NULL;
  const Py_ssize_t sent = read_counts(self, send_counts, self->send_starts);
  const Py_ssize_t received = sent < 0 ? -1 : read_counts(self, receive_counts, self->receive_starts);
  if (received < 0 || !(from = hold(self, send, PyBUF_CONTIG_RO)) || !(to = hold(self, receive, PyBUF_CONTIG)) ||
      check_length("send", from, (uint64_t)sent) < 0 || check_length("receive", to, (uint64_t)received) < 0)
    return begun(self, -1);
  for (int rank = 0; rank < self->segment.ranks; rank++)
    if (largest < 0 || self->send_starts[rank + 1] - self->send_starts[rank] > (uint64_t)largest ||
        self->receive_starts[rank + 1] - self->receive_starts[rank] > (uint64_t)largest)
      return PyErr_Format(PyExc_ValueError, "a count is larger than largest=%zd", largest), begun(self, -1);
  allred_begin_alltoall(&self->operation, &self->segment, &header, from->buf, to->buf, self->send_starts,
                        self->receive_starts, (size_t)largest);
  return begun(self, 0);
}

static PyObject *begin_reducescatter(Segment *self, PyObject *args) {
  PyObject *record, *send, *receive, *counts;
  int dtype, op;
  allred_header header;
  const Py_buffer *from, *to;
  if (!PyArg_ParseTuple(args, "OOOOii:begin_reducescatter", &record, &send, &receive, &counts, &dtype, &op))
    return NULL;
  if (!ready(self) || read_header(record, &header) < 0 || !kernel_exists(self, dtype, op)) return NULL;
  const Py_ssize_t total = read_counts(self, counts, self->send_starts);
  if (total < 0 || !(from = hold(self, send, PyBUF_CONTIG_RO)) || !(to = hold(self, receive, PyBUF_CONTIG)) ||
      check_length("send", from, (uint64_t)total) < 0 ||
      check_length("receive", to, share(self, self->send_starts)) < 0)
    return begun(self, -1);
  for (int rank = 1; rank <= self->segment.ranks; rank++)
    if (self->send_starts[rank] % allred_dtype_bytes(dtype))
      return PyErr_Format(PyExc_ValueError, "counts must be whole elements"), begun(self, -1);
  allred_begin_reducescatter(&self->operation, &self->segment, &header, from->buf, to->buf, self->send_starts, dtype,
                             self->variant, op, self->segment.ranks);
  return begun(self, 0);
}

/* ---- making progress */

static PyObject *run_for(Segment *self, int64_t patience_ns) {
  if (!self->operation.segment) return PyErr_Format(PyExc_ValueError, "no operation was begun");
  if (pending(self)) {
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = allred_run(&self->operation, patience_ns);
    Py_END_ALLOW_THREADS;
    if (status != ALLRED_PENDING) release_views(self);
  }
  return PyBool_FromLong(!pending(self));
}

static PyObject *done(Segment *self, PyObject *unused) {
  (void)unused;
  return run_for(self, 0);
}

static PyObject *linger(Segment *self, PyObject *unused) {
  (void)unused;
  return run_for(self, PATIENCE_NS);
}

/* The headers of the operation that was last begun. They stay until this rank begins another. */
static PyObject *headers(Segment *self, PyObject *unused) {
  (void)unused;
  if (!self->operation.segment || pending(self)) return PyErr_Format(PyExc_ValueError, "no operation is complete");
  PyObject *list = PyList_New(self->segment.ranks);
  for (int rank = 0; list && rank < self->segment.ranks; rank++) {
    const void *shown = allred_segment_header(&self->segment, rank, self->operation.number);
    PyObject *bytes = PyBytes_FromStringAndSize(shown, sizeof(allred_header));
    if (!bytes || PyList_SetItem(list, rank, bytes) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject *get_agreed(Segment *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(self->operation.status != ALLRED_DIFFER);
}

/* Whether what it waits for is that the others begin the operation at all. */
static PyObject *get_peers(Segment *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(pending(self) && self->operation.round == 0);
}

static PyObject *get_number(Segment *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(self->segment.operation);
}

static PyObject *get_pending(Segment *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(pending(self));
}

static PyObject *get_sent(Segment *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(self->segment.sent);
}

static PyObject *get_moves(Segment *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(self->operation.moves);
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
  PyObject *memory;
  int rank, ranks;
  Py_ssize_t chunk_bytes;
  if (self->open) return PyErr_SetString(PyExc_TypeError, "it is constructed already"), -1;
  if (!PyArg_ParseTuple(args, "OiinOOO:Segment", &memory, &rank, &ranks, &chunk_bytes, &self->array_type, &self->dtypes,
                        &self->ops))
    return -1;
  Py_INCREF(self->array_type), Py_INCREF(self->dtypes), Py_INCREF(self->ops);
  if (ranks < 1 || ranks > ALLRED_MAX_RANKS || rank < 0 || rank >= ranks || chunk_bytes < ranks * ALLRED_LINE ||
      chunk_bytes > MOST_CHUNK_BYTES || chunk_bytes % ALLRED_LINE || !PyTuple_Check(self->dtypes) ||
      PyTuple_Size(self->dtypes) > ALLRED_DTYPES || !PyTuple_Check(self->ops) || PyTuple_Size(self->ops) > ALLRED_OPS)
    return PyErr_SetString(PyExc_ValueError, "no such rank, ranks or chunk_bytes"), -1;
  const size_t needed = allred_segment_bytes(ranks, (size_t)chunk_bytes);
  self->send_starts = PyMem_Calloc((size_t)ranks + 1, sizeof *self->send_starts);
  self->receive_starts = PyMem_Calloc((size_t)ranks + 1, sizeof *self->receive_starts);
  self->dtype_name = PyUnicode_InternFromString("dtype");
  if (!self->send_starts || !self->receive_starts || !self->dtype_name) return PyErr_NoMemory(), -1;
  if (make_room(self, 1) < 0 || PyObject_GetBuffer(memory, &self->memory, PyBUF_CONTIG) < 0) return -1;
  self->open = 1;
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
  (void)unused;
  if (!self->open) Py_RETURN_NONE;
  if (self->taken) return PyErr_Format(PyExc_ValueError, "another thread is in an operation on this segment");
  self->open = 0;
  self->operation = (allred_operation){0};
  release_views(self);
  PyBuffer_Release(&self->memory);
  if (self->own_process) munmap((void *)self->own_process, 1);
  self->own_process = NULL;
  Py_RETURN_NONE;
}

static void destruct(Segment *self) {
  PyTypeObject *type = Py_TYPE((PyObject *)self);
  self->taken = 0; /* who is inside holds a reference */
  Py_XDECREF(close_segment(self, NULL));
  PyMem_Free(self->views);
  PyMem_Free(self->tensors);
  PyMem_Free(self->send_starts);
  PyMem_Free(self->receive_starts);
  Py_XDECREF(self->array_type), Py_XDECREF(self->dtypes), Py_XDECREF(self->ops), Py_XDECREF(self->dtype_name);
  freefunc release_type = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release_type(self);
  Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"allreduce", (PyCFunction)(void (*)(void))allreduce, METH_FASTCALL,
     "allreduce(source, target, op, name, wire=0): 0 when it is done, 1 when it was begun, 2 when it must go the long "
     "way."},
    {"grouped_allreduce", (PyCFunction)(void (*)(void))grouped_allreduce, METH_FASTCALL,
     "grouped_allreduce(sources, targets, op, name, wire=0): the same for lists."},
    {"begin_exchange", (PyCFunction)(void (*)(void))begin_exchange, METH_O, "begin_exchange(record)"},
    {"begin_allreduce", (PyCFunction)(void (*)(void))begin_allreduce, METH_VARARGS,
     "begin_allreduce(record, sources, targets, dtypes, op, wire=0)"},
    {"begin_allgather", (PyCFunction)(void (*)(void))begin_allgather, METH_VARARGS,
     "begin_allgather(record, send, receive, counts)"},
    {"begin_broadcast", (PyCFunction)(void (*)(void))begin_broadcast, METH_VARARGS,
     "begin_broadcast(record, data, root)"},
    {"begin_alltoall", (PyCFunction)(void (*)(void))begin_alltoall, METH_VARARGS,
     "begin_alltoall(record, send, receive, send_counts, receive_counts, largest)"},
    {"begin_reducescatter", (PyCFunction)(void (*)(void))begin_reducescatter, METH_VARARGS,
     "begin_reducescatter(record, send, receive, counts, dtype, op)"},
    {"done", (PyCFunction)(void (*)(void))done, METH_NOARGS, "done(): what can be done without waiting; if complete."},
    {"linger", (PyCFunction)(void (*)(void))linger, METH_NOARGS, "linger(): the same, waiting for a millisecond."},
    {"headers", (PyCFunction)(void (*)(void))headers, METH_NOARGS, "headers(): those of all ranks, when complete."},
    {"acquire", (PyCFunction)(void (*)(void))acquire, METH_O,
     "acquire(blocking): take the lock; False if it is taken."},
    {"release", (PyCFunction)(void (*)(void))release, METH_NOARGS, "release(): give the lock back."},
    {"close", (PyCFunction)(void (*)(void))close_segment, METH_NOARGS, "close(): let go of the memory."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {
    {"agreed", (getter)get_agreed, NULL, "whether the headers of the last operation agreed", NULL},
    {"number", (getter)get_number, NULL, "of the last operation that was begun, counted from 1", NULL},
    {"pending", (getter)get_pending, NULL, "whether an operation is under way", NULL},
    {"sent", (getter)get_sent, NULL, "bytes that this rank has written for allreduces", NULL},
    {"moves", (getter)get_moves, NULL, "steps taken in this operation", NULL},
    {"peers", (getter)get_peers, NULL, "whether it waits for ranks that have not begun the operation", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Segment(memory, rank, ranks, chunk_bytes, array_type, dtypes, ops): a rank's view of shared memory."},
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
  return status;
}
