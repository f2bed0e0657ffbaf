#include "segment_object.h"

#include <string.h>

#define FIRST_CAPACITY 1024

void allred_trace_add(allred_trace *trace, const allred_trace_event *event) {
  if (trace->count == trace->capacity) {
    const size_t capacity = trace->capacity ? 2 * trace->capacity : FIRST_CAPACITY;
    allred_trace_event *table = PyMem_Realloc(trace->table, capacity * sizeof *table);
    if (!table) return;
    trace->table = table;
    trace->capacity = capacity;
  }
  PyObject *name = PyUnicode_FromObject(event->name); /* a copy only of instances of subclasses of str */
  if (!name) return PyErr_Clear();
  trace->table[trace->count] = *event;
  trace->table[trace->count++].name = name;
}

/* Return the index of a name in `names`, appended if it is new; -1 with an exception set. */
static Py_ssize_t index_of(PyObject *name, PyObject *indices, PyObject *names) {
  PyObject *found = PyDict_GetItemWithError(indices, name);
  if (found) return PyLong_AsSsize_t(found);
  if (PyErr_Occurred()) return -1;
  const Py_ssize_t index = PyList_Size(names);
  PyObject *number = PyLong_FromSsize_t(index);
  const int failed = !number || PyDict_SetItem(indices, name, number) < 0 || PyList_Append(names, name) < 0;
  Py_XDECREF(number);
  return failed ? -1 : index;
}

static void clear(allred_trace *trace) {
  while (trace->count) Py_DECREF(trace->table[--trace->count].name);
}

PyObject *allred_trace_take(allred_trace *trace) {
  typedef struct {
    int64_t start, end, bytes;
    uint32_t name, grouped;
  } row;
  PyObject *indices = PyDict_New(), *names = PyList_New(0), *result = NULL;
  PyObject *data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(trace->count * sizeof(row)));
  if (!indices || !names || !data) goto end;
  char *to = PyBytes_AsString(data);
  for (size_t i = 0; i < trace->count; i++) {
    const allred_trace_event *event = &trace->table[i];
    const Py_ssize_t index = index_of(event->name, indices, names);
    if (index < 0) goto end;
    const row one = {event->start, event->end, (int64_t)event->bytes, (uint32_t)index, event->grouped};
    memcpy(to + i * sizeof one, &one, sizeof one);
  }
  clear(trace); /* before PyTuple_Pack, which may run other code, which may add events */
  result = PyTuple_Pack(2, names, data);
end:
  Py_XDECREF(indices), Py_XDECREF(names), Py_XDECREF(data);
  return result;
}

void allred_trace_free(allred_trace *trace) {
  clear(trace);
  PyMem_Free(trace->table);
  *trace = (allred_trace){0};
}
