/*
 * The handler of allred's custom calls in programs of XLA (allred/jax/custom_call.py).
 *
 * XLA calls it without the GIL, on a thread that executes the program, and it returns when the operation is complete.
 * Each call has a number, and the function `run` in Python knows what the call does. For a reduction it returns
 * (segment, queue, op, name), with which the next runs reduce here, without the GIL while bytes move. `run` is called
 * again if C cannot do it, or to complete what takes longer.
 *
 * The structs are the part of XLA's C interface (version 0 of "XLA FFI") that is used here. Each begins with its size,
 * because a later version may have more fields.
 */
#include <string.h>

#include "interrupt.h"
#include "reduce.h"
#include "segment_object.h"

typedef struct xla_extension {
  size_t size;
  int type;
  struct xla_extension *next;
} xla_extension;

typedef struct {
  size_t size;
  xla_extension *extension;
  int major, minor;
} xla_version;

typedef struct {
  size_t size;
  xla_extension *extension;
  const char *message;
  int code;
} xla_error_arguments;

typedef struct {
  size_t size;
  xla_extension *extension;
  void *context;
  int32_t ordinal;
} xla_device_arguments;

typedef struct {
  size_t size;
  xla_extension *extension;
  xla_version version;
  const void *internal;
  void *(*create_error)(xla_error_arguments *);
  void *others[16]; /* functions that are not used */
  void *(*device_ordinal)(xla_device_arguments *);
} xla_api;

typedef struct {
  size_t size;
  xla_extension *extension;
  int dtype;
  void *data;
  int64_t rank;
  int64_t *dimensions;
} xla_buffer;

typedef struct {
  size_t size;
  xla_extension *extension;
  int64_t count;
  int *types;
  xla_buffer **buffers;
} xla_buffers;

typedef struct {
  const char *text;
  size_t length;
} xla_text;

typedef struct {
  int dtype;
  void *value;
} xla_scalar;

typedef struct {
  size_t size;
  xla_extension *extension;
  int64_t count;
  int *types;
  xla_text **names;
  void **values;
} xla_attributes;

typedef struct {
  size_t size;
  xla_extension *extension;
  const xla_api *api;
  void *context;
  int stage;
  xla_buffers arguments, results;
  xla_attributes attributes;
} xla_call;

typedef struct {
  size_t size;
  xla_version version;
  uint32_t traits;
} xla_metadata;

typedef struct {
  xla_extension base;
  xla_metadata *metadata;
} xla_metadata_extension;

enum { METADATA = 1, EXECUTE = 3, SCALAR = 3, INT64 = 5, TOKEN = 17, ABORTED = 10 };

/* By XLA's number of a dtype: its code here, and its size in bytes; 0 bytes: not supported. */
static const struct {
  int code;
  size_t bytes;
} dtypes[] = {[1] = {ALLRED_BOOL, 1},     [2] = {ALLRED_INT8, 1},     [3] = {ALLRED_INT16, 2},
              [4] = {ALLRED_INT32, 4},    [5] = {ALLRED_INT64, 8},    [6] = {ALLRED_UINT8, 1},
              [7] = {ALLRED_UINT16, 2},   [8] = {ALLRED_UINT32, 4},   [9] = {ALLRED_UINT64, 8},
              [10] = {ALLRED_FLOAT16, 2}, [11] = {ALLRED_FLOAT32, 4}, [12] = {ALLRED_FLOAT64, 8},
              [16] = {ALLRED_BFLOAT16, 2}};

enum { KNOWN_DTYPES = sizeof dtypes / sizeof *dtypes, ON_STACK = 256 };

static PyObject *last_error;    /* that a call has raised, or NULL */
static PyObject *python_run;    /* run(number, arguments, results, operation or None) */
static PyObject **repeats;      /* by number: (segment, queue, op, name) of a reduction, or NULL */
static Py_ssize_t repeat_count; /* all are used with the GIL held */

static void *error(const xla_call *call, const char *message) {
  xla_error_arguments arguments = {sizeof arguments, NULL, message, ABORTED};
  return call->api->create_error(&arguments);
}

/* Return the value of the attribute `call`; -1 if there is none. */
static int64_t number_of(const xla_attributes *attributes) {
  for (int64_t i = 0; i < attributes->count; i++) {
    const xla_scalar *scalar = attributes->values[i];
    if (attributes->types[i] == SCALAR && scalar->dtype == INT64 && attributes->names[i]->length == 4 &&
        !memcmp(attributes->names[i]->text, "call", 4))
      return *(const int64_t *)scalar->value;
  }
  return -1;
}

/* Return the size of an item in bytes; 0 if the dtype is not supported. */
static size_t item_bytes(const xla_buffer *buffer) {
  return buffer->dtype > 0 && buffer->dtype < KNOWN_DTYPES ? dtypes[buffer->dtype].bytes : 0;
}

static size_t bytes_of(const xla_buffer *buffer) {
  size_t bytes = item_bytes(buffer);
  for (int64_t i = 0; i < buffer->rank; i++) bytes *= (size_t)buffer->dimensions[i];
  return bytes;
}

/* Return a list of (memory, dtype of XLA, shape), without the tokens; NULL with an exception. */
static PyObject *describe(const xla_buffers *buffers) {
  static char nothing;
  PyObject *list = PyList_New(0);
  for (int64_t i = 0; list && i < buffers->count; i++) {
    const xla_buffer *buffer = buffers->buffers[i];
    if (buffer->dtype == TOKEN) continue;
    const size_t bytes = bytes_of(buffer);
    PyObject *shape = PyTuple_New((Py_ssize_t)buffer->rank), *item = NULL;
    for (int64_t d = 0; shape && d < buffer->rank; d++)
      PyTuple_SetItem(shape, (Py_ssize_t)d, PyLong_FromLongLong(buffer->dimensions[d]));
    PyObject *memory = PyMemoryView_FromMemory(bytes ? buffer->data : &nothing, (Py_ssize_t)bytes, PyBUF_WRITE);
    if (shape && memory) item = Py_BuildValue("OiO", memory, buffer->dtype, shape);
    Py_XDECREF(shape);
    Py_XDECREF(memory);
    if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
    Py_XDECREF(item);
  }
  return list;
}

/* Keep what `run` has returned to repeat a reduction. Takes the reference. */
static void keep_repeat(int64_t number, PyObject *repeat) {
  if (number >= repeat_count) {
    const Py_ssize_t room = (Py_ssize_t)number + 64;
    PyObject **table = PyMem_Realloc(repeats, (size_t)room * sizeof *table);
    if (!table) {
      Py_DECREF(repeat);
      return;
    }
    memset(table + repeat_count, 0, (size_t)(room - repeat_count) * sizeof *table);
    repeats = table;
    repeat_count = room;
  }
  PyObject *before = repeats[number];
  repeats[number] = repeat;
  Py_XDECREF(before);
}

/* Reduce the arguments to the results by the fast path: True if done; an operation that takes longer; None if the fast
 * path is not possible. */
static PyObject *reduce(const xla_call *call, PyObject *repeat) {
  static PyObject *idle;
  allred_memory on_stack[ON_STACK], *memory = on_stack;
  const xla_buffers *from = &call->arguments, *to = &call->results;
  Py_ssize_t count = 0;
  if (!idle && !(idle = PyUnicode_InternFromString("idle"))) return NULL;
  PyObject *is_idle = PyObject_GetAttr(PyTuple_GetItem(repeat, 1), idle);
  if (!is_idle) return NULL;
  Py_DECREF(is_idle);
  if (is_idle != Py_True) Py_RETURN_NONE;
  if (from->count > ON_STACK && !(memory = PyMem_Malloc((size_t)from->count * sizeof *memory))) return PyErr_NoMemory();
  for (int64_t i = 0; i < from->count; i++) {
    const xla_buffer *in = from->buffers[i], *out = to->buffers[i];
    if (in->dtype == TOKEN) continue;
    const int code = item_bytes(in) ? dtypes[in->dtype].code : -1;
    memory[count++] = (allred_memory){in->data, out->data, code, (int)in->rank, (const Py_ssize_t *)in->dimensions};
  }
  PyObject *done = allred_segment_reduce_memory((Segment *)(void *)PyTuple_GetItem(repeat, 0), memory, count,
                                                PyTuple_GetItem(repeat, 2), PyTuple_GetItem(repeat, 3));
  if (memory != on_stack) PyMem_Free(memory);
  return done;
}

PyObject *allred_python_xla_last_error(PyObject *module, PyObject *unused) {
  return Py_NewRef(last_error ? last_error : Py_None);
}

static PyObject *call_python(int64_t number, PyObject *arguments, PyObject *results, PyObject *begun) {
  PyObject *given = Py_BuildValue("LOOO", (long long)number, arguments, results, begun);
  PyObject *done = given ? allred_call_interruptibly(python_run, given) : NULL;
  Py_XDECREF(given);
  return done;
}

/* Return the current exception, and clear it. */
static PyObject *take_exception(void) {
  PyObject *kind, *value, *trace;
  PyErr_Fetch(&kind, &value, &trace);
  PyErr_NormalizeException(&kind, &value, &trace);
  Py_XDECREF(kind);
  Py_XDECREF(trace);
  return value;
}

/* Run a call with the GIL; 0 if an exception is set. number: -1 refuses it. */
static int run(const xla_call *call, int64_t number) {
  PyObject *repeat = number >= 0 && number < repeat_count ? Py_XNewRef(repeats[number]) : NULL;
  PyObject *begun = repeat ? reduce(call, repeat) : Py_NewRef(Py_None);
  Py_XDECREF(repeat);
  if (!begun || begun == Py_True) {
    Py_XDECREF(begun);
    return begun != NULL;
  }
  PyObject *arguments = describe(&call->arguments), *results = arguments ? describe(&call->results) : NULL;
  PyObject *done = results ? call_python(number, arguments, results, begun) : NULL;
  Py_XDECREF(results);
  Py_XDECREF(arguments);
  Py_DECREF(begun);
  if (done && done != Py_None)
    keep_repeat(number, done);
  else
    Py_XDECREF(done);
  return done != NULL;
}

/* Return the current exception as an error of XLA. */
static void *failure_of(const xla_call *call) {
  PyObject *value = take_exception(), *before = last_error;
  if (value) PyException_SetTraceback(value, Py_None); /* its frames have the memory of this call */
  last_error = Py_XNewRef(value);
  Py_XDECREF(before);
  PyObject *text = value ? PyObject_Str(value) : NULL;
  const char *message = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
  void *failure = error(call, message ? message : "an error without a message");
  PyErr_Clear();
  /* Let the main thread raise KeyboardInterrupt, too: XLA reports this one as an error of its own. */
  if (value && PyErr_GivenExceptionMatches(value, PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
  Py_XDECREF(text);
  Py_XDECREF(value);
  return failure;
}

/* Whether XLA calls a handler to run it. Otherwise it asks for the version, or prepares. */
static int is_run(const xla_call *call) {
  if (call->extension && call->extension->type == METADATA) {
    xla_metadata *metadata = ((xla_metadata_extension *)call->extension)->metadata;
    metadata->version.major = call->api ? call->api->version.major : 0;
    metadata->version.minor = call->api ? call->api->version.minor : 1; /* of JAX 0.5 to 0.7 */
    metadata->traits = 0;
    return 0;
  }
  return call->stage == EXECUTE;
}

/* The handler of calls that return their arguments. */
static void *handle_identity(xla_call *call) {
  for (int64_t i = 0; is_run(call) && i < call->results.count; i++) {
    const xla_buffer *in = call->arguments.buffers[i], *out = call->results.buffers[i];
    if (in->data != out->data) memcpy(out->data, in->data, bytes_of(in));
  }
  return NULL;
}

static void *handle(xla_call *call) {
  if (!is_run(call)) return NULL;
  xla_device_arguments device = {sizeof device, NULL, call->context, 0};
  const int is_first = call->api->device_ordinal(&device) || !device.ordinal;
  PyGILState_STATE state = PyGILState_Ensure();
  void *failure = run(call, is_first ? number_of(&call->attributes) : -1) ? NULL : failure_of(call);
  PyGILState_Release(state);
  return failure;
}

PyObject *allred_python_xla_handlers(PyObject *module, PyObject *callable) {
  static const char name[] = "xla._CUSTOM_CALL_TARGET";
  PyObject *before = python_run;
  python_run = Py_NewRef(callable);
  Py_XDECREF(before);
  return Py_BuildValue("NN", PyCapsule_New((void *)handle, name, NULL),
                       PyCapsule_New((void *)handle_identity, name, NULL));
}
