/*
 * numpy's allocator of array memory (NEP 49), on the arena.
 *
 * numpy's C API is a table of pointers in a capsule. The entries used here have the same places and meanings in numpy
 * 1.22 to 2.x; without numpy's headers, one build runs on all of them. The handler is static and used by arrays as long
 * as they live: after shutdown(), and while the interpreter ends. Memory is freed by its address.
 *
 * There are two handlers. That of a context (contextvars: threads have their own) serves the sizes in a table. The
 * other one serves everything, and is set only during allred.empty().
 */
#include <stdatomic.h>
#include <string.h>

#include "arena.h"
#include "binding.h"
#include "segment.h"

/* As PyDataMem_Handler in numpy's ndarraytypes.h. */
typedef struct {
  char name[127];
  uint8_t version;
  struct {
    void *ctx;
    void *(*malloc)(void *ctx, size_t size);
    void *(*calloc)(void *ctx, size_t count, size_t size);
    void *(*realloc)(void *ctx, void *pointer, size_t size);
    void (*free)(void *ctx, void *pointer, size_t size);
  } allocator;
} data_handler;

enum { ABI_VERSION = 0, FEATURE_VERSION = 211, SET_HANDLER = 304, GET_HANDLER = 305, DEFAULT_HANDLER = 306 };

#define NUMPY_1_22 0x0f
#define CAPSULE_NAME "mem_handler"
#define SIZES 4096 /* slots of the table */

static void **numpy; /* its table; NULL until the arena is open */
static PyObject *default_handler, *by_size, *explicit;
static const data_handler *fallback;

static _Atomic size_t smallest = SIZE_MAX;
static _Atomic size_t table[SIZES];

/* ---- The table of sizes: readers take no lock; one that sees a table half replaced serves a block more or less. */

static size_t slot_of(size_t size) { return (size * 0x9e3779b97f4a7c15u >> 40) % SIZES; }

static int is_in_table(size_t size) {
  for (size_t slot = slot_of(size), found;; slot = (slot + 1) % SIZES) {
    found = atomic_load_explicit(&table[slot], memory_order_relaxed);
    if (found == size || !found) return found != 0;
  }
}

static _Thread_local int paused, serves_torch;

static int is_learned(size_t size) {
  return size >= atomic_load_explicit(&smallest, memory_order_relaxed) && is_in_table(size);
}

static void *serve(const void *ctx, size_t size, int zeroed) {
  return ctx || (!paused && is_learned(size)) ? allred_arena_allocate(size, zeroed) : NULL;
}

/* Return a block for torch's allocator (allred/torch/arena_allocator.cpp); NULL if the arena does not serve it. */
static void *serve_torch(size_t size) {
  const int serves = serves_torch ? size >= ALLRED_IN_PLACE_BYTES : is_learned(size);
  return serves && !paused ? allred_arena_allocate(size, 0) : NULL;
}

/* ---- The handlers; ctx is NULL for that of a context */

static void *handler_malloc(void *ctx, size_t size) {
  void *block = serve(ctx, size, 0);
  return block ? block : fallback->allocator.malloc(fallback->allocator.ctx, size);
}

static void *handler_calloc(void *ctx, size_t count, size_t size) {
  void *block = size && count > SIZE_MAX / size ? NULL : serve(ctx, count * size, 1);
  return block ? block : fallback->allocator.calloc(fallback->allocator.ctx, count, size);
}

static void handler_free(void *ctx, void *pointer, size_t size) {
  if (allred_arena_contains(pointer))
    allred_arena_free(pointer);
  else
    fallback->allocator.free(fallback->allocator.ctx, pointer, size);
}

static void *handler_realloc(void *ctx, void *pointer, size_t size) {
  if (!allred_arena_contains(pointer)) return fallback->allocator.realloc(fallback->allocator.ctx, pointer, size);
  const size_t had = allred_arena_block_bytes(pointer);
  if (size <= had && size > had / 2) return pointer;
  void *block = handler_malloc(ctx, size);
  if (!block) return NULL;
  memcpy(block, pointer, size < had ? size : had);
  allred_arena_free(pointer);
  return block;
}

#define HANDLER(name, ctx)                                                                                             \
  {                                                                                                                    \
    name, 1, { ctx, handler_malloc, handler_calloc, handler_realloc, handler_free }                                    \
  }

static data_handler handlers[] = {HANDLER("allred_arena", NULL), HANDLER("allred_empty", handlers)};

/* ---- numpy's functions */

static unsigned int version(int index) { return ((unsigned int (*)(void))numpy[index])(); }

static PyObject *get_handler(void) { return ((PyObject * (*)(void)) numpy[GET_HANDLER])(); }

/* Set the handler of this context. Returns the handler before it, or NULL with an exception. */
static PyObject *set_handler(PyObject *capsule) { return ((PyObject * (*)(PyObject *)) numpy[SET_HANDLER])(capsule); }

/* Whether the table is that of a numpy with the handlers above; it raises no exception. */
static int knows_numpy(void) {
  const unsigned int abi = version(ABI_VERSION);
  if ((abi != 0x1000009 && abi != 0x2000000) || version(FEATURE_VERSION) < NUMPY_1_22) return 0;
  default_handler = *(PyObject **)numpy[DEFAULT_HANDLER];
  if (!PyCapsule_IsValid(default_handler, CAPSULE_NAME)) return 0;
  fallback = PyCapsule_GetPointer(default_handler, CAPSULE_NAME);
  return fallback->version == 1 && strcmp(fallback->name, "default_allocator") == 0;
}

/* ---- Functions of the module; native/_kernels.pyi has the signatures */

PyObject *allred_python_arena_open(PyObject *module, PyObject *args) {
  PyObject *capsule;
  int fd;
  Py_ssize_t offset;
  static Py_buffer memory; /* never released: the mapping has to outlive every array */
  if (numpy) return PyErr_Format(PyExc_RuntimeError, "the arena is open already");
  if (!PyArg_ParseTuple(args, "Oinw*:arena_open", &capsule, &fd, &offset, &memory)) return NULL;
  if (PyCapsule_IsValid(capsule, NULL)) numpy = PyCapsule_GetPointer(capsule, NULL);
  if (numpy && knows_numpy()) {
    by_size = PyCapsule_New(&handlers[0], CAPSULE_NAME, NULL);
    explicit = PyCapsule_New(&handlers[1], CAPSULE_NAME, NULL);
    if (by_size && explicit && allred_arena_open(fd, (size_t)offset, memory.buf, (size_t)memory.len) == 0)
      Py_RETURN_TRUE;
  }
  numpy = NULL;
  PyBuffer_Release(&memory);
  return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
}

PyObject *allred_python_arena_serve_sizes(PyObject *module, PyObject *sizes) {
  if (!PyList_Check(sizes) || PyList_Size(sizes) > SIZES / 2)
    return PyErr_Format(PyExc_ValueError, "sizes must be a list of at most %d sizes in bytes", SIZES / 2);
  const Py_ssize_t count = PyList_Size(sizes);
  size_t least = SIZE_MAX, values[SIZES / 2];
  for (Py_ssize_t i = 0; i < count; i++) {
    values[i] = PyLong_AsSize_t(PyList_GetItem(sizes, i));
    if (PyErr_Occurred()) return NULL;
    if (!values[i]) return PyErr_Format(PyExc_ValueError, "a size must be positive");
    if (values[i] < least) least = values[i];
  }
  for (size_t slot = 0; slot < SIZES; slot++) atomic_store_explicit(&table[slot], 0, memory_order_relaxed);
  for (Py_ssize_t i = 0; i < count; i++) {
    size_t slot = slot_of(values[i]);
    while (table[slot] && table[slot] != values[i]) slot = (slot + 1) % SIZES;
    atomic_store_explicit(&table[slot], values[i], memory_order_relaxed);
  }
  atomic_store_explicit(&smallest, least, memory_order_relaxed);
  Py_RETURN_NONE;
}

PyObject *allred_python_arena_pause(PyObject *module, PyObject *on) {
  paused += on == Py_True ? 1 : -1;
  Py_RETURN_NONE;
}

PyObject *allred_python_arena_serve_torch(PyObject *module, PyObject *on) {
  serves_torch += on == Py_True ? 1 : -1;
  Py_RETURN_NONE;
}

PyObject *allred_python_arena_functions(PyObject *module, PyObject *unused) {
  return Py_BuildValue("nnn", (Py_ssize_t)serve_torch, (Py_ssize_t)allred_arena_contains,
                       (Py_ssize_t)allred_arena_free);
}

PyObject *allred_python_arena_attach(PyObject *module, PyObject *unused) {
  if (!numpy || atomic_load_explicit(&smallest, memory_order_relaxed) == SIZE_MAX) Py_RETURN_FALSE; /* serves nothing */
  PyObject *current = get_handler(), *before;
  if (!current) return NULL;
  const int attached = current == by_size, is_default = current == default_handler;
  Py_DECREF(current);
  if (!is_default) return PyBool_FromLong(attached); /* the program may have a handler of its own */
  if (!(before = set_handler(by_size))) return NULL;
  Py_DECREF(before);
  Py_RETURN_TRUE;
}

PyObject *allred_python_arena_call(PyObject *module, PyObject *args) {
  if (PyTuple_Size(args) < 1 || !numpy) return PyErr_Format(PyExc_RuntimeError, "arena_call(function, *arguments)");
  PyObject *rest = PyTuple_GetSlice(args, 1, PyTuple_Size(args));
  PyObject *before = rest ? set_handler(explicit) : NULL, *result = NULL;
  if (before) {
    PyObject *type, *value, *traceback;
    result = PyObject_CallObject(PyTuple_GetItem(args, 0), rest);
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *mine = set_handler(before);
    if (mine)
      PyErr_Restore(type, value, traceback);
    else
      Py_CLEAR(result);
    Py_XDECREF(mine);
    Py_DECREF(before);
  }
  Py_XDECREF(rest);
  return result;
}

PyObject *allred_python_arena_freeze(PyObject *module, PyObject *unused) {
  allred_arena_freeze();
  Py_RETURN_NONE;
}

PyObject *allred_python_arena_thaw(PyObject *module, PyObject *unused) {
  allred_arena_thaw();
  Py_RETURN_NONE;
}

PyObject *allred_python_arena_usage(PyObject *module, PyObject *unused) {
  const allred_arena_usage usage = allred_arena_get_usage();
  return Py_BuildValue("nnnOnn", (Py_ssize_t)usage.bytes, (Py_ssize_t)usage.live, (Py_ssize_t)usage.committed,
                       usage.frozen ? Py_True : Py_False, (Py_ssize_t)usage.full, (Py_ssize_t)usage.no_pages);
}
