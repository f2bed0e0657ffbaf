/* The Python type of mailbox_type.c, for module.c. */
#ifndef ALLRED_MAILBOX_TYPE_H
#define ALLRED_MAILBOX_TYPE_H

#include <Python.h>

/* Add `Mailbox` to the module. 0, or -1 with an exception set. */
int allred_add_mailbox_type(PyObject *module);

/* mailbox_bytes(slots, slot_bytes) */
PyObject *allred_python_mailbox_bytes(PyObject *module, PyObject *args);

#endif
