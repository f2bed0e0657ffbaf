/* The arenas of a Segment: the memory of each rank in which arrays are reduced in place (allreduce_in_place.h). */
#include "segment_object.h"

void allred_segment_release_arenas(Segment *self) {
  self->segment.arenas.base = NULL;
  for (int rank = 0; self->arenas && rank < self->segment.ranks; rank++) PyBuffer_Release(&self->arenas[rank]);
  PyMem_Free(self->arenas), PyMem_Free(self->arena_base), PyMem_Free(self->segment.outside);
  self->arenas = NULL, self->arena_base = NULL, self->segment.outside = NULL;
}

PyObject *allred_segment_get_outside(Segment *self, void *unused) {
  PyObject *found = PyList_New(0);
  for (int rank = 0; found && self->segment.outside && rank < self->segment.ranks; rank++) {
    const uint64_t *counts = self->segment.outside[rank];
    PyObject *pair = Py_BuildValue("KK", (unsigned long long)counts[0], (unsigned long long)counts[1]);
    if (!pair || PyList_Append(found, pair) < 0) Py_CLEAR(found);
    Py_XDECREF(pair);
  }
  return found;
}

PyObject *allred_segment_set_arenas(Segment *self, PyObject *buffers) {
  const Py_ssize_t ranks = self->segment.ranks;
  if (!self->open || self->arenas || !allred_queue_idle(&self->queue))
    return PyErr_Format(PyExc_ValueError, "the segment is closed, in use, or has arenas");
  if (!PyList_Check(buffers) || PyList_Size(buffers) != ranks)
    return PyErr_Format(PyExc_ValueError, "arenas must be a list of %zd buffers", ranks);
  self->arenas = PyMem_Calloc((size_t)ranks, sizeof *self->arenas);
  self->arena_base = PyMem_Calloc((size_t)ranks, sizeof *self->arena_base);
  self->segment.outside = PyMem_Calloc((size_t)ranks, sizeof *self->segment.outside);
  if (!self->arenas || !self->arena_base || !self->segment.outside)
    return allred_segment_release_arenas(self), PyErr_NoMemory();
  for (Py_ssize_t rank = 0; rank < ranks; rank++) {
    if (PyObject_GetBuffer(PyList_GetItem(buffers, rank), &self->arenas[rank], PyBUF_CONTIG) < 0)
      return allred_segment_release_arenas(self), NULL;
    self->arena_base[rank] = self->arenas[rank].buf;
  }
  self->segment.arenas =
      (allred_arenas){self->arena_base, (size_t)self->arenas[self->segment.rank].len, ALLRED_IN_PLACE_BYTES};
  Py_RETURN_NONE;
}
