/* The fast path of Segment: plain arrays are checked and hashed here, into the header that Python would make. */
#include <stdlib.h>
#include <string.h>

#include "doorbell.h"
#include "numpy_array.h"
#include "segment_object.h"

/* Up to this size the first steps are taken with the GIL: to release and take it costs 50 ns. */
#define KEEP_GIL_BYTES 32768

static int position(PyObject *tuple, PyObject *item) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  for (Py_ssize_t i = 0; i < count; i++)
    if (PyTuple_GetItem(tuple, i) == item) return (int)i;
  return -1;
}

/* Make a table entry of memory of a plain dtype; 0 if the fast path does not support it. */
static int enter_memory(Segment *self, const allred_memory *memory, allred_header *header, allred_tensor *tensor) {
  const int code = memory->dtype;
  size_t count = 1;
  if (code < 0 || !allred_reduce_kernel(self->variant, code, header->op & ALLRED_OP_BITS)) return 0;
  if (header->op & ALLRED_WEIGHTED && !allred_can_weigh(code, allred_header_weight(header))) return 0;
  header->words = allred_mix(header->words, (uint64_t)code << 8 | (uint64_t)memory->nd);
  for (int i = 0; i < memory->nd; i++) {
    count *= (size_t)memory->dimensions[i];
    header->words = allred_mix(header->words, (uint64_t)memory->dimensions[i]);
  }
  const int wire = allred_wire_of(self, code, allred_header_wire(header), memory->nd, count);
  *tensor = (allred_tensor){memory->in, memory->out, count * allred_dtype_bytes(code), code, wire, 0, 0};
  return 1;
}

static size_t count_elements(const allred_array *array) {
  size_t count = 1;
  for (int i = 0; i < array->nd; i++) count *= (size_t)array->dimensions[i];
  return count;
}

/* Make a table entry of two numpy arrays of a plain dtype, and hold them; 0 if the fast path does not support them. */
static int enter(Segment *self, Operation *operation, PyObject *source, PyObject *target, allred_header *header,
                 allred_tensor *tensor) {
  if ((PyObject *)Py_TYPE(source) != self->array_type || (PyObject *)Py_TYPE(target) != self->array_type) return 0;
  const allred_array *in = allred_as_array(source), *out = allred_as_array(target);
  if (in->descr != self->last_dtype) {
    self->last_code = position(self->dtypes, in->descr);
    self->last_dtype = self->last_code < 0 ? NULL : in->descr; /* the tuple keeps it alive */
  }
  if (!(in->flags & out->flags & ALLRED_ARRAY_C_CONTIGUOUS) || !(out->flags & ALLRED_ARRAY_WRITEABLE)) return 0;
  const allred_memory memory = {in->data, out->data, self->last_code, in->nd, in->dimensions};
  if (!enter_memory(self, &memory, header, tensor)) return 0;
  if (source != target) {
    if (out->descr != in->descr || count_elements(out) != count_elements(in)) return 0;
    allred_hold_array(operation, target);
  }
  allred_hold_array(operation, source);
  return 1;
}

/* Read op, name and (if given) the wire type into the header; 0 if the fast path does not support them. */
static int read_options(Segment *self, PyObject *const *args, Py_ssize_t count, allred_header *header) {
  Py_ssize_t length;
  const char *text = PyUnicode_Check(args[1]) ? PyUnicode_AsUTF8AndSize(args[1], &length) : NULL;
  const int code = position(self->ops, args[0]);
  const long wire = count > 2 ? PyLong_AsLong(args[2]) : 0;
  PyErr_Clear(); /* the error of a text that is not UTF-8, or of a wire type that is not a number: then it is -1 */
  if (!text || code <= 0 || (wire && !allred_encodes(ALLRED_FLOAT32, (int)wire))) return 0; /* op 0 does not exist */
  if (allred_is_quantized((int)wire) && code != ALLRED_SUM && code != ALLRED_AVERAGE) return 0;
  header->op = (uint8_t)(code | (int)wire << ALLRED_WIRE_SHIFT);
  header->name = allred_hash_text(text, (size_t)length);
  header->generation = self->generation;
  return 1;
}

/* Read the weight of this rank into the header, or None; 0 if the fast path does not support it. */
static int read_weight(PyObject *weight, allred_header *header) {
  if (weight == Py_None) return 1;
  const double value = PyFloat_AsDouble(weight);
  const int op = header->op & ALLRED_OP_BITS;
  if (PyErr_Occurred()) return PyErr_Clear(), 0;
  if (op != ALLRED_SUM && op != ALLRED_AVERAGE) return 0;
  header->op |= ALLRED_WEIGHTED;
  memcpy(&header->note, &value, sizeof value);
  return 1;
}

/* Return an operation if the fast path is possible: no other thread uses the segment, and the queue is empty. */
static Operation *take_spare(Segment *self) {
  if (!self->open || !self->array_type || self->locked || self->finishing_thread || !self->own_process ||
      !*self->own_process || !allred_queue_idle(&self->queue))
    return NULL;
  Operation *operation = self->spare;
  self->spare = NULL;
  if (!operation && !(operation = allred_new_operation(1))) PyErr_Clear();
  return operation;
}

/* To release arrays can run any code, and other threads: these find no spare operation, and make another. */
static void give_back(Segment *self, Operation *operation) {
  allred_release(operation);
  if (self->spare)
    Py_DECREF((PyObject *)operation);
  else
    self->spare = operation;
}

static PyObject *not_supported(Segment *self, Operation *operation) {
  give_back(self, operation);
  PyErr_Clear();
  Py_RETURN_NONE;
}

static PyObject *run(Segment *self, Operation *operation, const allred_header *header, Py_ssize_t count,
                     int checks_finite, PyObject *residual, allred_trace_event event) {
  if (self->trace.enabled) event.start = allred_now_ns();
  allred_prepare_allreduce(self, operation, header, count, header->op & ALLRED_OP_BITS);
  if (allred_keep_errors(operation, residual) < 0) return give_back(self, operation), NULL;
  operation->operation.checks_finite = checks_finite;
  int status = event.bytes <= KEEP_GIL_BYTES ? allred_run(&operation->operation, 0) : ALLRED_PENDING;
  if (status == ALLRED_PENDING) {
    self->locked = 1;
    Py_BEGIN_ALLOW_THREADS;
    status = allred_run(&operation->operation, ALLRED_SPIN_WAIT_NS);
    Py_END_ALLOW_THREADS;
    self->locked = 0;
  }
  if (self->trace.enabled) {
    event.end = status == ALLRED_DONE ? allred_now_ns() : 0;
    allred_trace_add(&self->trace, &event);
  }
  if (status == ALLRED_DONE) {
    self->nonfinite = operation->operation.nonfinite;
    self->samples = operation->operation.samples;
    self->waited_ns = operation->operation.waited_ns;
    give_back(self, operation);
    Py_RETURN_TRUE;
  }
  self->finishing_thread = PyThread_get_thread_ident();
  allred_attach(operation, self);
  if (status == ALLRED_DIFFER)
    allred_queue_hold(&self->queue, &operation->operation, status);
  else
    allred_queue_put(&self->queue, &operation->operation);
  return (PyObject *)operation;
}

/* The caller holds the lock of the segment: operations may be pending. */
PyObject *allred_segment_start_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 5) return PyErr_Format(PyExc_TypeError, "start_allreduce(source, target, op, name, wire)");
  allred_header header = {.kind = ALLRED_KIND_ALLREDUCE, .root = -1, .words = allred_mix(0, 1)};
  if (!self->array_type || !allred_is_own(self) || !read_options(self, args + 2, 3, &header)) Py_RETURN_NONE;
  Operation *operation = allred_new_operation(1);
  if (!operation) return NULL;
  if (!enter(self, operation, args[0], args[1], &header, operation->tensors)) {
    Py_DECREF((PyObject *)operation);
    Py_RETURN_NONE;
  }
  const allred_tensor *tensor = operation->tensors;
  header.dtype = (uint8_t)tensor->dtype;
  header.count = tensor->bytes / allred_dtype_bytes(tensor->dtype);
  allred_prepare_allreduce(self, operation, &header, tensor->bytes > 0, header.op & ALLRED_OP_BITS);
  allred_attach(operation, self);
  allred_queue_put(&self->queue, &operation->operation);
  return (PyObject *)operation;
}

PyObject *allred_segment_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 4 && count != 5) return PyErr_Format(PyExc_TypeError, "allreduce(source, target, op, name, wire=0)");
  allred_header header = {.kind = ALLRED_KIND_ALLREDUCE, .root = -1, .words = allred_mix(0, 1)};
  if (!read_options(self, args + 2, count - 2, &header)) Py_RETURN_NONE;
  Operation *operation = take_spare(self);
  if (!operation) Py_RETURN_NONE;
  const allred_tensor *tensor = operation->tensors;
  if (!enter(self, operation, args[0], args[1], &header, operation->tensors)) return not_supported(self, operation);
  header.dtype = (uint8_t)tensor->dtype;
  header.count = tensor->bytes / allred_dtype_bytes(tensor->dtype);
  return run(self, operation, &header, tensor->bytes > 0, 0, Py_None,
             (allred_trace_event){.bytes = tensor->bytes, .name = args[3]});
}

static int by_address(const void *a, const void *b) {
  const uintptr_t first = (uintptr_t)((const allred_tensor *)a)->out,
                  second = (uintptr_t)((const allred_tensor *)b)->out;
  return first < second ? -1 : first > second;
}

/* Whether two tensors of the table are written to the same memory; -1 if there is no memory to sort them. */
static int overlap(Segment *self, const allred_tensor *tensors, Py_ssize_t count) {
  Py_ssize_t ascending = 1;
  while (ascending < count && tensors[ascending].out >= tensors[ascending - 1].out + tensors[ascending - 1].bytes)
    ascending++;
  if (ascending >= count) return 0;
  const size_t bytes = (size_t)count * sizeof *tensors;
  if (count == self->disjoint_count && !memcmp(self->disjoint, tensors, bytes)) return 0;
  allred_tensor *sorted = PyMem_Malloc(bytes);
  if (!sorted) return -1;
  memcpy(sorted, tensors, bytes);
  qsort(sorted, (size_t)count, sizeof *sorted, by_address);
  for (Py_ssize_t i = 1; i < count; i++)
    if (sorted[i].out < sorted[i - 1].out + sorted[i - 1].bytes) return PyMem_Free(sorted), 1;
  PyMem_Free(self->disjoint);
  self->disjoint = memcpy(sorted, tensors, bytes);
  self->disjoint_count = count;
  return 0;
}

/* Reduce the first `count` tensors of the table as one operation. */
static PyObject *run_group(Segment *self, Operation *operation, allred_header *header, Py_ssize_t count,
                           int checks_finite, PyObject *residual, PyObject *name) {
  size_t bytes = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    allred_tensor *tensor = &operation->tensors[i];
    tensor->index = (uint32_t)i;
    header->count += tensor->bytes / allred_dtype_bytes(tensor->dtype);
    bytes += tensor->bytes;
  }
  const Py_ssize_t kept = allred_group_by_dtype(operation->tensors, count);
  if (kept < 0 || overlap(self, operation->tensors, kept)) return not_supported(self, operation);
  return run(self, operation, header, kept, checks_finite, residual,
             (allred_trace_event){.bytes = bytes, .grouped = 1, .name = name});
}

/* Reduce lists of arrays as one operation; the header has its kind, op and name, and maybe a weight. */
static PyObject *reduce_group(Segment *self, PyObject *sources, PyObject *targets, allred_header *header, uint64_t word,
                              int checks_finite, PyObject *residual, PyObject *name) {
  const Py_ssize_t count = PyList_Size(sources); /* no code that could change the lists runs from here on */
  if (PyList_Size(targets) != count) return PyErr_Format(PyExc_ValueError, "as many targets as sources");
  Operation *operation = take_spare(self);
  if (!operation) Py_RETURN_NONE;
  if (allred_make_room(operation, count ? count : 1) < 0) return not_supported(self, operation);
  header->words = allred_mix(word, (uint64_t)count);
  for (Py_ssize_t i = 0; i < count; i++)
    if (!enter(self, operation, PyList_GetItem(sources, i), PyList_GetItem(targets, i), header, &operation->tensors[i]))
      return not_supported(self, operation);
  return run_group(self, operation, header, count, checks_finite, residual, name);
}

PyObject *allred_segment_reduce_memory(Segment *self, const allred_memory *memory, Py_ssize_t count, PyObject *op,
                                       PyObject *name) {
  PyObject *const options[] = {op, name};
  allred_header header = {.kind = ALLRED_KIND_GROUPED_ALLREDUCE, .dtype = 255, .root = -1};
  if (!read_options(self, options, 2, &header)) Py_RETURN_NONE;
  Operation *operation = take_spare(self);
  if (!operation) Py_RETURN_NONE;
  if (allred_make_room(operation, count) < 0) return not_supported(self, operation);
  header.words = allred_mix(0, (uint64_t)count);
  for (Py_ssize_t i = 0; i < count; i++)
    if (!enter_memory(self, &memory[i], &header, &operation->tensors[i])) return not_supported(self, operation);
  return run_group(self, operation, &header, count, 0, Py_None, name);
}

PyObject *allred_segment_grouped_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count) {
  if (count < 4 || count > 8 || !PyList_Check(args[0]) || !PyList_Check(args[1]))
    return PyErr_Format(PyExc_TypeError,
                        "grouped_allreduce(sources: list, targets: list, op, name, wire=0, checks_finite=False, "
                        "weight=None, residual=None)");
  allred_header header = {.kind = ALLRED_KIND_GROUPED_ALLREDUCE, .dtype = 255, .root = -1};
  if (!read_options(self, args + 2, count - 2, &header)) Py_RETURN_NONE;
  PyObject *residual = count > 7 ? args[7] : Py_None;
  if (count > 6 && !read_weight(args[6], &header)) Py_RETURN_NONE;
  return reduce_group(self, args[0], args[1], &header, 0, count > 5 && args[5] == Py_True, residual, args[3]);
}

PyObject *allred_segment_step_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 9 || !PyList_Check(args[0]))
    return PyErr_Format(
        PyExc_TypeError,
        "step_allreduce(arrays: list, op, name, wire, checks_finite, agreed, window, samples, residual)");
  allred_header header = {.kind = ALLRED_KIND_STEP_ALLREDUCE, .dtype = 255, .root = -1};
  const uint64_t agreed = PyLong_AsUnsignedLongLong(args[5]), window = PyLong_AsUnsignedLongLong(args[6]);
  header.note = PyLong_AsUnsignedLongLong(args[7]);
  if (PyErr_Occurred()) return NULL;
  if (!read_options(self, args + 1, 3, &header)) Py_RETURN_NONE;
  return reduce_group(self, args[0], args[0], &header, allred_mix(agreed, window), args[4] == Py_True, args[8],
                      args[2]);
}
