/*
 * What the files that include Python.h share: entries of method tables; what module.c registers.
 *
 * Limited API of Python 3.11: one build runs on every later version. Arguments are checked completely in these files,
 * before the GIL is released; the C code below them trusts its arguments.
 */
#ifndef ALLRED_BINDING_H
#define ALLRED_BINDING_H

#include <Python.h>

#include <structmember.h>

#define ALLRED_SPIN_WAIT_NS 1000000 /* how long spin_wait() waits without progress */

/* An entry of a method table for any calling convention; a read-only attribute. */
#define METHOD(name, function, flags, doc) {name, (PyCFunction)(void (*)(void))(function), flags, doc}
#define ATTRIBUTE(name, get, doc) {name, (getter)(get), NULL, doc, NULL}

/* The end of a destructor: free the memory of an object of a heap type. */
static inline void allred_free_object(void *self) {
  PyTypeObject *type = Py_TYPE((PyObject *)self);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

extern PyTypeObject *allred_operation_type; /* set by module.c */
extern PyType_Spec allred_operation_spec, allred_segment_spec, allred_mailbox_spec, allred_row_table_spec,
    allred_step_server_spec;

/* module.c: set a kernel variant by its name; "" leaves the fastest. A converter for "O&" of PyArg_ParseTuple. */
int allred_named_variant(PyObject *object, void *variant);

/* python/update.c */
PyObject *allred_python_update(PyObject *module, PyObject *args);
PyObject *allred_python_update_group(PyObject *module, PyObject *args);

/* nest.c */
PyObject *allred_python_leaves_of(PyObject *module, PyObject *const *args, Py_ssize_t count);

/* match.c */
PyObject *allred_python_reads_arrays(PyObject *module, PyObject *array);
PyObject *allred_python_match(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *allred_python_disjoint(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *allred_python_hash_window(PyObject *module, PyObject *const *args, Py_ssize_t count);

/* interrupt.c */
PyObject *allred_python_call_interruptibly(PyObject *module, PyObject *arguments);
PyObject *allred_python_interrupted(PyObject *module, PyObject *unused);

/* xla_call.c */
PyObject *allred_python_xla_last_error(PyObject *module, PyObject *unused);
PyObject *allred_python_xla_handlers(PyObject *module, PyObject *callable);

/* segment_network.c */
PyObject *allred_python_network_bytes(PyObject *module, PyObject *args);

/* row_table_type.c */
PyObject *allred_python_distinct_ids(PyObject *module, PyObject *args);
PyObject *allred_python_spread_rows(PyObject *module, PyObject *args);
PyObject *allred_python_sum_gradients(PyObject *module, PyObject *args);

/* mailbox_type.c */
PyObject *allred_python_mailbox_bytes(PyObject *module, PyObject *args);

/* arena_handler.c */
PyObject *allred_python_arena_open(PyObject *module, PyObject *args);
PyObject *allred_python_arena_serve_sizes(PyObject *module, PyObject *sizes);
PyObject *allred_python_arena_pause(PyObject *module, PyObject *on);
PyObject *allred_python_arena_serve_torch(PyObject *module, PyObject *on);
PyObject *allred_python_arena_functions(PyObject *module, PyObject *unused);
PyObject *allred_python_arena_attach(PyObject *module, PyObject *unused);
PyObject *allred_python_arena_call(PyObject *module, PyObject *args);
PyObject *allred_python_arena_freeze(PyObject *module, PyObject *unused);
PyObject *allred_python_arena_thaw(PyObject *module, PyObject *unused);
PyObject *allred_python_arena_usage(PyObject *module, PyObject *unused);

#endif
