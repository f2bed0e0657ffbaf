/* The short way of Segment: plain arrays are checked and hashed here, with the header that Python would make. */
#include <stdlib.h>
#include <string.h>

#include "bell.h"
#include "numpy_array.h"
#include "segment_object.h"

/* Up to so many bytes the first look is taken without giving the GIL away: that alone takes 50 ns. */
#define BRIEF_BYTES 32768

static int position(PyObject *tuple, PyObject *item) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  for (Py_ssize_t i = 0; i < count; i++)
    if (PyTuple_GetItem(tuple, i) == item) return (int)i;
  return -1;
}

/* How many elements, and the sizes of all dimensions mixed into the words, unless NULL. */
static size_t sizes(const allred_array *array, uint64_t *words) {
  size_t count = 1;
  for (int i = 0; i < array->nd; i++) {
    count *= (size_t)array->dimensions[i];
    if (words) *words = allred_mix(*words, (uint64_t)array->dimensions[i]);
  }
  return count;
}

/* An exact numpy array of a plain dtype as the next entry of the table; 0 if it has to go the long way. */
static int take(Segment *self, Operation *operation, PyObject *source, PyObject *target, allred_header *header,
                allred_tensor *tensor) {
  if ((PyObject *)Py_TYPE(source) != self->array_type || (PyObject *)Py_TYPE(target) != self->array_type) return 0;
  const allred_array *in = allred_as_array(source), *out = allred_as_array(target);
  if (in->descr != self->last_dtype) {
    self->last_code = position(self->dtypes, in->descr);
    self->last_dtype = self->last_code < 0 ? NULL : in->descr; /* the tuple keeps it */
  }
  const int code = self->last_code;
  if (code < 0 || !allred_reduce_kernel(self->variant, code, header->op & ALLRED_OP_BITS)) return 0;
  if (!(in->flags & out->flags & ALLRED_ARRAY_C_CONTIGUOUS) || !(out->flags & ALLRED_ARRAY_WRITEABLE)) return 0;
  header->words = allred_mix(header->words, (uint64_t)code << 8 | (uint64_t)in->nd);
  const size_t bytes = sizes(in, &header->words) * allred_dtype_bytes(code);
  if (source != target) {
    if (out->descr != in->descr || sizes(out, NULL) * allred_dtype_bytes(code) != bytes) return 0;
    allred_hold_array(operation, target);
  }
  allred_hold_array(operation, source);
  const int wire = allred_wire_of(code, header->op >> ALLRED_WIRE_SHIFT);
  *tensor = (allred_tensor){in->data, out->data, bytes, code, wire};
  return 1;
}

/* op, name, and the wire type if there is one, into the header; 0 if they have to go the long way. */
static int read_how(Segment *self, PyObject *const *args, Py_ssize_t count, allred_header *header) {
  Py_ssize_t length;
  const char *text = PyUnicode_Check(args[1]) ? PyUnicode_AsUTF8AndSize(args[1], &length) : NULL;
  const int code = position(self->ops, args[0]);
  const long wire = count > 2 ? PyLong_AsLong(args[2]) : 0;
  PyErr_Clear(); /* of a text that is no UTF-8, or what is no number: -1 */
  if (!text || code <= 0 || (wire && !allred_narrows(ALLRED_FLOAT32, (int)wire))) return 0; /* op 0 is none */
  header->op = (uint8_t)(code | (int)wire << ALLRED_WIRE_SHIFT);
  header->name = allred_hash_text(text, (size_t)length);
  return 1;
}

/* An operation for the short way, if it is open: then nobody else uses the segment, and the queue is empty. */
static Operation *take_spare(Segment *self) {
  if (!self->open || !self->array_type || self->taken || self->finisher || !self->own_process || !*self->own_process)
    return NULL;
  if (!allred_queue_idle(&self->queue)) return NULL;
  Operation *operation = self->spare;
  self->spare = NULL;
  if (!operation && !(operation = allred_new_operation(1))) PyErr_Clear();
  return operation;
}

/* To give arrays back may run any code, and let other threads go on: they find no spare one, and make another. */
static void give_back(Segment *self, Operation *operation) {
  allred_release(operation);
  if (self->spare)
    Py_DECREF((PyObject *)operation);
  else
    self->spare = operation;
}

static PyObject *not_taken(Segment *self, Operation *operation) {
  give_back(self, operation);
  PyErr_Clear();
  Py_RETURN_NONE;
}

static PyObject *short_way(Segment *self, Operation *operation, const allred_header *header, Py_ssize_t count,
                           allred_note note) {
  if (self->notes.wanted) note.start = allred_now_ns();
  allred_start_allreduce(self, operation, header, count, header->op & ALLRED_OP_BITS);
  int status = note.bytes <= BRIEF_BYTES ? allred_run(&operation->operation, 0) : ALLRED_PENDING;
  if (status == ALLRED_PENDING) {
    self->taken = 1;
    Py_BEGIN_ALLOW_THREADS;
    status = allred_run(&operation->operation, ALLRED_PATIENCE_NS);
    Py_END_ALLOW_THREADS;
    self->taken = 0;
  }
  if (self->notes.wanted) {
    note.end = status == ALLRED_DONE ? allred_now_ns() : 0;
    allred_notes_add(&self->notes, &note);
  }
  if (status == ALLRED_DONE) {
    give_back(self, operation);
    Py_RETURN_TRUE;
  }
  self->finisher = PyThread_get_thread_ident();
  allred_under_way(operation, self);
  if (status == ALLRED_DIFFER)
    allred_queue_hold(&self->queue, &operation->operation, status);
  else
    allred_queue_put(&self->queue, &operation->operation);
  return (PyObject *)operation;
}

PyObject *allred_segment_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 4 && count != 5) return PyErr_Format(PyExc_TypeError, "allreduce(source, target, op, name, wire=0)");
  allred_header header = {.kind = ALLRED_KIND_ALLREDUCE, .root = -1, .words = allred_mix(0, 1)};
  if (!read_how(self, args + 2, count - 2, &header)) Py_RETURN_NONE;
  Operation *operation = take_spare(self);
  if (!operation) Py_RETURN_NONE;
  const allred_tensor *tensor = operation->tensors;
  if (!take(self, operation, args[0], args[1], &header, operation->tensors)) return not_taken(self, operation);
  header.dtype = (uint8_t)tensor->dtype;
  header.count = tensor->bytes / allred_dtype_bytes(tensor->dtype);
  return short_way(self, operation, &header, tensor->bytes > 0, (allred_note){.bytes = tensor->bytes, .name = args[3]});
}

static int by_address(const void *a, const void *b) {
  const uintptr_t first = (uintptr_t)((const allred_tensor *)a)->out,
                  second = (uintptr_t)((const allred_tensor *)b)->out;
  return first < second ? -1 : first > second;
}

/* Whether two tensors of the table write to the same memory; -1 without memory to find out. */
static int overlap(Segment *self, const allred_tensor *tensors, Py_ssize_t count) {
  Py_ssize_t ascending = 1;
  while (ascending < count && tensors[ascending].out >= tensors[ascending - 1].out + tensors[ascending - 1].bytes)
    ascending++;
  if (ascending >= count) return 0;
  const size_t bytes = (size_t)count * sizeof *tensors;
  if (count == self->apart_count && !memcmp(self->apart, tensors, bytes)) return 0;
  allred_tensor *sorted = PyMem_Malloc(bytes);
  if (!sorted) return -1;
  memcpy(sorted, tensors, bytes);
  qsort(sorted, (size_t)count, sizeof *sorted, by_address);
  for (Py_ssize_t i = 1; i < count; i++)
    if (sorted[i].out < sorted[i - 1].out + sorted[i - 1].bytes) return PyMem_Free(sorted), 1;
  PyMem_Free(self->apart);
  self->apart = memcpy(sorted, tensors, bytes);
  self->apart_count = count;
  return 0;
}

PyObject *allred_segment_grouped_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count) {
  if ((count != 4 && count != 5) || !PyList_Check(args[0]) || !PyList_Check(args[1]))
    return PyErr_Format(PyExc_TypeError, "grouped_allreduce(sources: list, targets: list, op, name, wire=0)");
  allred_header header = {.kind = ALLRED_KIND_GROUPED_ALLREDUCE, .dtype = 255, .root = -1};
  if (!read_how(self, args + 2, count - 2, &header)) Py_RETURN_NONE;
  const Py_ssize_t tensors = PyList_Size(args[0]); /* from here on no other code runs that could change the lists */
  if (PyList_Size(args[1]) != tensors) return PyErr_Format(PyExc_ValueError, "as many targets as sources");
  Operation *operation = take_spare(self);
  if (!operation) Py_RETURN_NONE;
  if (allred_make_room(operation, tensors ? tensors : 1) < 0) return not_taken(self, operation);
  header.words = allred_mix(0, (uint64_t)tensors);
  size_t bytes = 0;
  for (Py_ssize_t i = 0; i < tensors; i++) {
    allred_tensor *tensor = &operation->tensors[i];
    if (!take(self, operation, PyList_GetItem(args[0], i), PyList_GetItem(args[1], i), &header, tensor))
      return not_taken(self, operation);
    header.count += tensor->bytes / allred_dtype_bytes(tensor->dtype);
    bytes += tensor->bytes;
  }
  const Py_ssize_t kept = allred_by_dtype(operation->tensors, tensors);
  if (kept < 0 || overlap(self, operation->tensors, kept)) return not_taken(self, operation);
  return short_way(self, operation, &header, kept, (allred_note){.bytes = bytes, .grouped = 1, .name = args[3]});
}
