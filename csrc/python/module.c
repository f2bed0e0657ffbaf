/* The extension module allred.native._kernels: functions on tensors; registration of the types. See binding.h. */
#include <string.h>

#include "alarm.h"
#include "binding.h"
#include "crc.h"
#include "exit.h"
#include "interrupt.h"
#include "mpi_call.h"
#include "reduce.h"
#include "scan.h"
#include "segment.h"

/* ---- arguments: converters for "O&" of PyArg_ParseTuple, which calls them with NULL to release what they acquired */

static int acquire(PyObject *object, Py_buffer *view, int flags) {
  if (!object) return PyBuffer_Release(view), 1;
  return PyObject_GetBuffer(object, view, flags) < 0 ? 0 : Py_CLEANUP_SUPPORTED;
}

static int readable(PyObject *object, void *view) { return acquire(object, view, PyBUF_CONTIG_RO); }

static int writable(PyObject *object, void *view) { return acquire(object, view, PyBUF_CONTIG); }

/* The buffers of a list of tensors. */
typedef struct {
  Py_buffer *views;
  Py_ssize_t count;
} tensor_list;

static void release_list(tensor_list *list) {
  for (Py_ssize_t i = 0; i < list->count; i++) PyBuffer_Release(&list->views[i]);
  PyMem_Free(list->views);
}

static int acquire_list(PyObject *tensors, tensor_list *list, int flags) {
  if (!tensors) return release_list(list), 1;
  *list = (tensor_list){NULL, 0};
  if (!PyList_Check(tensors)) {
    PyErr_SetString(PyExc_TypeError, "tensors must be a list of contiguous buffers");
    return 0;
  }
  const Py_ssize_t count = PyList_Size(tensors);
  list->views = PyMem_Calloc(count ? count : 1, sizeof *list->views);
  if (!list->views) return PyErr_NoMemory(), 0;
  for (; list->count < count; list->count++)
    if (PyObject_GetBuffer(PyList_GetItem(tensors, list->count), &list->views[list->count], flags) < 0)
      return release_list(list), 0;
  return Py_CLEANUP_SUPPORTED;
}

static int readable_list(PyObject *object, void *list) { return acquire_list(object, list, PyBUF_CONTIG_RO); }

static int writable_list(PyObject *object, void *list) { return acquire_list(object, list, PyBUF_CONTIG); }

static int any_order_list(PyObject *object, void *list) { return acquire_list(object, list, PyBUF_ANY_CONTIGUOUS); }

/* Set a kernel variant by its name; "" leaves the fastest. */
int allred_named_variant(PyObject *object, void *variant) {
  const char *name = PyUnicode_AsUTF8AndSize(object, NULL);
  int found = allred_variants() - 1;
  if (!name) return 0;
  if (*name)
    while (found >= 0 && strcmp(name, allred_variant_name(found)) != 0) found--;
  if (found < 0) PyErr_Format(PyExc_ValueError, "this CPU has no kernels named '%s'; see native.variants", name);
  *(int *)variant = found;
  return found >= 0;
}

/* The result of a function that returns None if `done`, and else has set an exception. */
static PyObject *none_if(int done) { return done ? Py_NewRef(Py_None) : NULL; }

/* ---- pack and unpack */

static PyObject *copy(PyObject *args, int packing) {
  tensor_list list;
  Py_buffer buffer;
  if (!PyArg_ParseTuple(args, packing ? "O&O&:pack" : "O&O&:unpack", packing ? readable_list : writable_list, &list,
                        packing ? writable : readable, &buffer))
    return NULL;
  Py_ssize_t needed = 0;
  for (Py_ssize_t i = 0; i < list.count; i++) needed += list.views[i].len;
  const int fits = needed <= buffer.len;
  if (!fits)
    PyErr_Format(PyExc_ValueError, "the tensors take %zd bytes but the fusion buffer has %zd", needed, buffer.len);
  Py_BEGIN_ALLOW_THREADS;
  char *at = buffer.buf;
  for (Py_ssize_t i = 0; i < list.count && fits; at += list.views[i++].len)
    memcpy(packing ? at : list.views[i].buf, packing ? list.views[i].buf : at, (size_t)list.views[i].len);
  Py_END_ALLOW_THREADS;
  release_list(&list);
  PyBuffer_Release(&buffer);
  return none_if(fits);
}

static PyObject *pack(PyObject *self, PyObject *args) { return copy(args, 1); }

static PyObject *unpack(PyObject *self, PyObject *args) { return copy(args, 0); }

/* ---- reduce and narrow */

/* Return the kernel that reduces arrays of `dtype` into one of dtype `into`, or NULL with an exception set. */
static allred_reduce find_kernel(int dtype, int op, int variant, int into) {
  allred_reduce kernel = NULL;
  if (dtype >= 0 && dtype < ALLRED_DTYPES && op > 0 && op < ALLRED_OPS) {
    if (into == dtype) kernel = allred_reduce_kernel(variant, dtype, op);
    if (allred_narrows(into, dtype)) kernel = allred_wide_kernel(variant, dtype, into, op);
  }
  if (!kernel && into == dtype) PyErr_Format(PyExc_ValueError, "operator %d is not defined for dtype %d", op, dtype);
  if (!kernel && into != dtype)
    PyErr_Format(PyExc_ValueError, "operator %d is not defined from dtype %d into dtype %d", op, dtype, into);
  return kernel;
}

static int check_sources(const tensor_list *sources, const Py_buffer *out, int dtype, int into) {
  const size_t element = allred_dtype_bytes(dtype), out_element = allred_dtype_bytes(into);
  const size_t needed = (size_t)out->len / out_element * element;
  if (sources->count == 0) return PyErr_SetString(PyExc_ValueError, "there is no source to reduce"), 0;
  if ((size_t)out->len % out_element) {
    PyErr_Format(PyExc_ValueError, "out has %zd bytes, not a multiple of its elements' %zu", out->len, out_element);
    return 0;
  }
  for (Py_ssize_t i = 0; i < sources->count; i++) {
    const Py_buffer *source = &sources->views[i];
    const uintptr_t a = (uintptr_t)source->buf, b = (uintptr_t)out->buf;
    if ((size_t)source->len != needed) {
      PyErr_Format(PyExc_ValueError, "source %zd has %zd bytes but out has %zd", i, source->len, out->len);
      return 0;
    }
    if ((a != b || into != dtype) && a < b + (size_t)out->len && b < a + (size_t)source->len) {
      PyErr_Format(PyExc_ValueError, "out overlaps source %zd; it must be that source's memory or none of it", i);
      return 0;
    }
  }
  return 1;
}

static int run_reduction(allred_reduce kernel, const tensor_list *sources, const Py_buffer *out, int divisor,
                         size_t element) {
  const void **addresses = PyMem_Calloc((size_t)sources->count, sizeof *addresses);
  if (!addresses) return PyErr_NoMemory(), 0;
  for (Py_ssize_t i = 0; i < sources->count; i++) addresses[i] = sources->views[i].buf;
  Py_BEGIN_ALLOW_THREADS;
  kernel(out->buf, addresses, (int)sources->count, (size_t)out->len / element, divisor);
  Py_END_ALLOW_THREADS;
  PyMem_Free(addresses);
  return 1;
}

static PyObject *reduce(PyObject *self, PyObject *args) {
  int dtype, op, divisor, variant = allred_variants() - 1, into = -1;
  Py_buffer out;
  tensor_list sources;
  if (!PyArg_ParseTuple(args, "O&O&iii|O&i:reduce", readable_list, &sources, writable, &out, &dtype, &op, &divisor,
                        allred_named_variant, &variant, &into))
    return NULL;
  if (into < 0) into = dtype;
  const allred_reduce kernel = find_kernel(dtype, op, variant, into);
  int done = kernel && divisor >= 1 && divisor <= 1 << 24;
  if (kernel && !done) PyErr_Format(PyExc_ValueError, "the divisor must be from 1 to 2**24, got %d", divisor);
  done = done && check_sources(&sources, &out, dtype, into) &&
         run_reduction(kernel, &sources, &out, divisor, allred_dtype_bytes(into));
  release_list(&sources);
  PyBuffer_Release(&out);
  return none_if(done);
}

static PyObject *narrow(PyObject *self, PyObject *args) {
  int dtype, wire, variant = allred_variants() - 1, done = 0;
  Py_buffer in, out;
  if (!PyArg_ParseTuple(args, "O&O&ii|O&:narrow", readable, &in, writable, &out, &dtype, &wire, allred_named_variant,
                        &variant))
    return NULL;
  const size_t element = allred_narrows(dtype, wire) ? allred_dtype_bytes(dtype) : 0;
  const size_t count = element ? (size_t)in.len / element : 0;
  if (!element) {
    PyErr_Format(PyExc_ValueError, "dtype %d does not travel as dtype %d", dtype, wire);
  } else if ((size_t)in.len % element || (size_t)out.len != count * sizeof(uint16_t)) {
    PyErr_Format(PyExc_ValueError, "%zd bytes cannot be rounded into %zd", in.len, out.len);
  } else {
    Py_BEGIN_ALLOW_THREADS;
    allred_narrow_kernel(variant, dtype, wire)(out.buf, in.buf, count);
    Py_END_ALLOW_THREADS;
    done = 1;
  }
  PyBuffer_Release(&in);
  PyBuffer_Release(&out);
  return none_if(done);
}

/* ---- hashes and exceeds */

static PyObject *hashes(PyObject *self, PyObject *tensors) {
  tensor_list list;
  if (!readable_list(tensors, &list)) return NULL;
  uint64_t *found = PyMem_Calloc((size_t)list.count + 1, sizeof *found);
  PyObject *result = found ? PyList_New(list.count) : PyErr_NoMemory();
  if (result) {
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < list.count; i++) found[i] = allred_hash(list.views[i].buf, (size_t)list.views[i].len);
    Py_END_ALLOW_THREADS;
  }
  for (Py_ssize_t i = 0; result && i < list.count; i++) {
    PyObject *hash = PyLong_FromUnsignedLongLong(found[i]);
    if (!hash || PyList_SetItem(result, i, hash) < 0) Py_CLEAR(result);
  }
  PyMem_Free(found);
  release_list(&list);
  return result;
}

static PyObject *crc32(PyObject *self, PyObject *args) {
  Py_buffer view;
  unsigned int value = 0;
  if (!PyArg_ParseTuple(args, "y*|I:crc32", &view, &value)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  value = allred_crc32(view.buf, (size_t)view.len, value);
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&view);
  return PyLong_FromUnsignedLong(value);
}

static PyObject *crc32_is_fast(PyObject *self, PyObject *unused) { return PyBool_FromLong(allred_crc32_is_fast()); }

static PyObject *exceeds(PyObject *self, PyObject *args) {
  tensor_list list;
  int element_bytes, found = 0, variant = allred_variants() - 1;
  unsigned int limit;
  if (!PyArg_ParseTuple(args, "O&iI|O&:exceeds", any_order_list, &list, &element_bytes, &limit, allred_named_variant,
                        &variant))
    return NULL;
  if (element_bytes != 2 && element_bytes != 4 && element_bytes != 8)
    PyErr_Format(PyExc_ValueError, "elements must have 2, 4 or 8 bytes, got %d", element_bytes);
  else if (limit > (element_bytes == 2 ? INT16_MAX : INT32_MAX))
    PyErr_Format(PyExc_ValueError, "the limit %u has the sign's bit or more", limit);
  const int valid = !PyErr_Occurred();
  Py_BEGIN_ALLOW_THREADS;
  for (Py_ssize_t i = 0; i < list.count && valid && !found; i++)
    found = allred_exceeds(list.views[i].buf, (size_t)list.views[i].len, element_bytes, limit, variant);
  Py_END_ALLOW_THREADS;
  release_list(&list);
  return valid ? PyBool_FromLong(found) : NULL;
}

/* Each sum is stored by itself, and not as a part of a vector: another process may read it at any time. */
static PyObject *add_numbers(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Py_buffer view;
  if (count < 2) return PyErr_Format(PyExc_TypeError, "add_numbers(values, first, *numbers)");
  const Py_ssize_t first = PyNumber_AsSsize_t(args[1], PyExc_ValueError);
  if ((first == -1 && PyErr_Occurred()) || PyObject_GetBuffer(args[0], &view, PyBUF_CONTIG) < 0) return NULL;
  const Py_ssize_t room = view.len / (Py_ssize_t)sizeof(double);
  if (first < 0 || first > room || count - 2 > room - first)
    PyErr_Format(PyExc_ValueError, "%zd numbers from %zd on do not fit into %zd", count - 2, first, room);
  volatile double *into = (double *)view.buf + first;
  for (Py_ssize_t i = 2; i < count && !PyErr_Occurred(); i++) {
    const double number = PyFloat_AsDouble(args[i]);
    if (!PyErr_Occurred()) into[i - 2] += number;
  }
  PyBuffer_Release(&view);
  return none_if(!PyErr_Occurred());
}

static PyObject *variants(PyObject *self, PyObject *unused) {
  const int count = allred_variants();
  PyObject *names = PyTuple_New(count);
  for (int i = 0; names && i < count; i++) {
    PyObject *name = PyUnicode_FromString(allred_variant_name(i));
    if (!name || PyTuple_SetItem(names, i, name) < 0) Py_CLEAR(names);
  }
  return names;
}

/* ---- the rest */

static PyObject *segment_bytes(PyObject *self, PyObject *args) {
  int ranks;
  Py_ssize_t chunk_bytes;
  if (!PyArg_ParseTuple(args, "in:segment_bytes", &ranks, &chunk_bytes)) return NULL;
  if (ranks < 1 || chunk_bytes < 1) return PyErr_Format(PyExc_ValueError, "ranks and chunk_bytes must be positive");
  return PyLong_FromSize_t(allred_segment_bytes(ranks, (size_t)chunk_bytes));
}

static PyObject *arm_exit(PyObject *self, PyObject *args) {
  Py_ssize_t finalized, finalize, abort, comm;
  allred_exit_plan plan;
  if (!PyArg_ParseTuple(args, "(nnnn)ssipiiidi:arm_exit", &finalized, &finalize, &abort, &comm, &plan.who, &plan.reason,
                        &plan.code, &plan.stuck, &plan.watcher_fd, &plan.duty, &plan.rendezvous_fd, &plan.grace_s,
                        &plan.status))
    return NULL;
  plan.mpi = (allred_exit_mpi){(int (*)(int *))finalized, (int (*)(void))finalize, (int (*)(intptr_t, int))abort,
                               (intptr_t)comm};
  return PyBool_FromLong(allred_exit_arm(&plan) == 0);
}

static PyObject *run_exit_handler(PyObject *self, PyObject *args) {
  int status;
  if (!PyArg_ParseTuple(args, "i:run_exit_handler", &status)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  allred_exit_run(status);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

static PyObject *set_alarm(PyObject *self, PyObject *args) {
  double warn_s, limit_s;
  const char *who, *what;
  int rendezvous_fd;
  if (!PyArg_ParseTuple(args, "ddssi:alarm", &warn_s, &limit_s, &who, &what, &rendezvous_fd)) return NULL;
  return PyBool_FromLong(allred_alarm_set(warn_s, limit_s, who, what, rendezvous_fd, 1) == 0);
}

static PyObject *cancel_alarm(PyObject *self, PyObject *unused) {
  allred_alarm_cancel();
  Py_RETURN_NONE;
}

static PyObject *report_mpi_call(PyObject *self, PyObject *args) {
  int number, fd;
  if (!PyArg_ParseTuple(args, "ii:report_mpi_call", &number, &fd)) return NULL;
  return PyBool_FromLong(allred_report_mpi_call(number, fd) == 0);
}

static PyMethodDef methods[] = {
    /* native/_kernels.pyi has the signatures */
    METHOD("pack", pack, METH_VARARGS, "Copy the tensors' bytes, in order and without gaps, to the buffer."),
    METHOD("unpack", unpack, METH_VARARGS, "Fill the tensors, in order, from the buffer."),
    METHOD("reduce", reduce, METH_VARARGS, "Reduce arrays element by element into `out`; see reduce.h."),
    METHOD("narrow", narrow, METH_VARARGS, "Round floats to a 16-bit wire type; see reduce.h."),
    METHOD("update", allred_python_update, METH_VARARGS,
           "Update a parameter in place; False, and no change, if C cannot."),
    METHOD("update_group", allred_python_update_group, METH_VARARGS, "Update parameters in place, as update() does."),
    METHOD("reads_arrays", allred_python_reads_arrays, METH_O, "Whether the functions of match.c support them."),
    METHOD("match", allred_python_match, METH_FASTCALL, "Whether arrays have the shapes and dtypes of the tensors."),
    METHOD("disjoint", allred_python_disjoint, METH_FASTCALL, "Whether writable, contiguous arrays share no memory."),
    METHOD("hash_window", allred_python_hash_window, METH_FASTCALL, "Return a hash of some consecutive elements."),
    METHOD("leaves_of", allred_python_leaves_of, METH_FASTCALL, "Return the leaves of a nest of this structure."),
    METHOD("hashes", hashes, METH_O, "Return a 64-bit hash of each tensor's bytes; see scan.h."),
    METHOD("crc32", crc32, METH_VARARGS, "As zlib.crc32; only if crc32_is_fast()."),
    METHOD("crc32_is_fast", crc32_is_fast, METH_NOARGS, "Whether this CPU multiplies without carry."),
    METHOD("exceeds", exceeds, METH_VARARGS, "Whether the magnitude of a float is above the limit; see scan.h."),
    METHOD("add_numbers", add_numbers, METH_FASTCALL, "Add numbers to the doubles of a buffer from a position on."),
    METHOD("variants", variants, METH_NOARGS, "Return the names of the kernel variants of this CPU, fastest last."),
    METHOD("segment_bytes", segment_bytes, METH_VARARGS, "Return the bytes of memory that a Segment needs."),
    METHOD("network_bytes", allred_python_network_bytes, METH_VARARGS,
           "Return the bytes of memory that operations across hosts need."),
    METHOD("mailbox_bytes", allred_python_mailbox_bytes, METH_VARARGS, "Return the bytes that a Mailbox needs."),
    METHOD("distinct_ids", allred_python_distinct_ids, METH_VARARGS,
           "Write the distinct ids by owner, and the position of each id; see distinct_ids.h."),
    METHOD("spread_rows", allred_python_spread_rows, METH_VARARGS,
           "Copy the rows at these positions, or the sum or mean of each bag of them."),
    METHOD("sum_gradients", allred_python_sum_gradients, METH_VARARGS, "Add up the gradients of each distinct id."),
    METHOD("arena_open", allred_python_arena_open, METH_VARARGS, "Open the arena of this process; see arena.h."),
    METHOD("arena_serve_sizes", allred_python_arena_serve_sizes, METH_O, "Set the sizes that the arena serves."),
    METHOD("arena_attach", allred_python_arena_attach, METH_NOARGS, "Set the handler of this context."),
    METHOD("arena_pause", allred_python_arena_pause, METH_O, "Serve no sizes in this thread, or serve them again."),
    METHOD("arena_serve_torch", allred_python_arena_serve_torch, METH_O,
           "Serve torch also sizes that are not learned, in this thread."),
    METHOD("arena_functions", allred_python_arena_functions, METH_NOARGS, "Return addresses for torch's allocator."),
    METHOD("arena_call", allred_python_arena_call, METH_VARARGS, "Call a function whose arrays the arena serves."),
    METHOD("arena_freeze", allred_python_arena_freeze, METH_NOARGS, "Serve or reuse no block until the thaw."),
    METHOD("arena_thaw", allred_python_arena_thaw, METH_NOARGS, "End the freeze: no other process writes any more."),
    METHOD("arena_usage", allred_python_arena_usage, METH_NOARGS, "Return the numbers of allred_arena_usage."),
    METHOD("alarm", set_alarm, METH_VARARGS, "Start a thread that warns about a long wait; see alarm.h."),
    METHOD("cancel_alarm", cancel_alarm, METH_NOARGS, "End the thread of alarm()."),
    METHOD("run_exit_handler", run_exit_handler, METH_VARARGS, "Do now what arm_exit does at exit. See exit.h."),
    METHOD("arm_exit", arm_exit, METH_VARARGS, "Set what this process does at exit; False if libc cannot. See exit.h."),
    METHOD("report_mpi_call", report_mpi_call, METH_VARARGS,
           "Write the MPI function of a thread on a signal; see mpi_call.h."),
    METHOD("call_interruptibly", allred_python_call_interruptibly, METH_VARARGS,
           "Call a function with arguments so that waits in it end on Ctrl-C; see interrupt.c."),
    METHOD("interrupted", allred_python_interrupted, METH_NOARGS, "Whether Ctrl-C shall end a wait here."),
    METHOD("xla_last_error", allred_python_xla_last_error, METH_NOARGS, "The exception that a call has raised last."),
    METHOD("xla_handlers", allred_python_xla_handlers, METH_O, "Return the handlers of custom calls; see xla_call.c."),
    {NULL, NULL, 0, NULL}};

static int add_types(PyObject *module) {
  allred_note_main_thread();
  PyType_Spec *specs[] = {&allred_operation_spec, &allred_segment_spec, &allred_mailbox_spec, &allred_row_table_spec,
                          &allred_step_server_spec};
  for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(specs[i]);
    if (!type || PyModule_AddType(module, type) < 0) return -1;
    if (i == 0)
      allred_operation_type = type; /* keeps the reference */
    else
      Py_DECREF(type);
  }
  return PyModule_AddIntConstant(module, "IN_PLACE_BYTES", (long)ALLRED_IN_PLACE_BYTES);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_types}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                        "allred.native._kernels",
                                        "The compiled kernels of allred (csrc/).",
                                        0,
                                        methods,
                                        slots,
                                        NULL,
                                        NULL,
                                        NULL};

#ifdef ALLRED_CHAOS
PyMODINIT_FUNC PyInit__kernels_chaos(void) { return PyModuleDef_Init(&definition); }
#else
PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
#endif
