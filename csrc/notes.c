#include "notes.h"

#include <string.h>

#define FIRST_ROOM 1024

void allred_notes_add(allred_notes *notes, const allred_note *note) {
  if (notes->count == notes->room) {
    const size_t room = notes->room ? 2 * notes->room : FIRST_ROOM;
    allred_note *table = PyMem_Realloc(notes->table, room * sizeof *table);
    if (!table) return;
    notes->table = table;
    notes->room = room;
  }
  PyObject *name = PyUnicode_FromObject(note->name); /* itself, but for what is derived from str */
  if (!name) return PyErr_Clear();
  notes->table[notes->count] = *note;
  notes->table[notes->count++].name = name;
}

/* Where a name is in the list; it is appended if it is not there. -1 with an exception set. */
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

static void clear(allred_notes *notes) {
  while (notes->count) Py_DECREF(notes->table[--notes->count].name);
}

PyObject *allred_notes_take(allred_notes *notes) {
  typedef struct {
    int64_t start, end, bytes;
    uint32_t name, grouped;
  } row;
  PyObject *indices = PyDict_New(), *names = PyList_New(0), *result = NULL;
  PyObject *data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(notes->count * sizeof(row)));
  if (!indices || !names || !data) goto end;
  char *to = PyBytes_AsString(data);
  for (size_t i = 0; i < notes->count; i++) {
    const allred_note *note = &notes->table[i];
    const Py_ssize_t index = index_of(note->name, indices, names);
    if (index < 0) goto end;
    const row one = {note->start, note->end, (int64_t)note->bytes, (uint32_t)index, note->grouped};
    memcpy(to + i * sizeof one, &one, sizeof one);
  }
  clear(notes); /* before the tuple is made: that may run other code, which notes more */
  result = PyTuple_Pack(2, names, data);
end:
  Py_XDECREF(indices), Py_XDECREF(names), Py_XDECREF(data);
  return result;
}

void allred_notes_free(allred_notes *notes) {
  clear(notes);
  PyMem_Free(notes->table);
  *notes = (allred_notes){0};
}
