/* The Python type of segment_type.c, for module.c. */
#ifndef ALLRED_SEGMENT_TYPE_H
#define ALLRED_SEGMENT_TYPE_H

#include <Python.h>

/* Add `Segment` to the module. 0, or -1 with an exception set. */
int allred_add_segment_type(PyObject *module);

#endif
