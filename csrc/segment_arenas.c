/* The arenas of a Segment: the memory of each rank in which arrays are reduced in place (in_place.h). */
#include "segment_object.h"

void allred_segment_release_arenas(Segment *self) {
  self->segment.arenas.base = NULL;
  for (int rank = 0; self->arenas && rank < self->segment.ranks; rank++) PyBuffer_Release(&self->arenas[rank]);
  PyMem_Free(self->arenas), PyMem_Free(self->arena_base);
  self->arenas = NULL, self->arena_base = NULL;
}

PyObject *allred_segment_set_arenas(Segment *self, PyObject *buffers) {
  const Py_ssize_t ranks = self->segment.ranks;
  if (!self->open || self->arenas || !allred_queue_idle(&self->queue))
    return PyErr_Format(PyExc_ValueError, "the segment is closed, in use, or has arenas");
  if (!PyList_Check(buffers) || PyList_Size(buffers) != ranks)
    return PyErr_Format(PyExc_ValueError, "arenas must be a list of %zd buffers", ranks);
  self->arenas = PyMem_Calloc((size_t)ranks, sizeof *self->arenas);
  self->arena_base = PyMem_Calloc((size_t)ranks, sizeof *self->arena_base);
  if (!self->arenas || !self->arena_base) return allred_segment_release_arenas(self), PyErr_NoMemory();
  for (Py_ssize_t rank = 0; rank < ranks; rank++) {
    if (PyObject_GetBuffer(PyList_GetItem(buffers, rank), &self->arenas[rank], PyBUF_CONTIG) < 0)
      return allred_segment_release_arenas(self), NULL;
    self->arena_base[rank] = self->arenas[rank].buf;
  }
  self->segment.arenas =
      (allred_arenas){self->arena_base, (size_t)self->arenas[self->segment.rank].len, ALLRED_IN_PLACE_BYTES};
  Py_RETURN_NONE;
}
