/*
 * The two Python types of the shared-memory backend, as their four files see them.
 *
 *   segment_type.c     Segment: one rank's view of a node's shared memory, and the queue of its operations
 *   segment_short.c    its short way for plain arrays: they are checked and hashed in C, and usually reduced at once
 *   segment_begin.c    its begin_...(): flat contiguous buffers, and a header made in Python
 *   operation_type.c   Operation: one that is under way, with the buffers that it holds until it is complete
 *
 * Ranks of one operation may take different ways. Limited API.
 */
#ifndef ALLRED_SEGMENT_OBJECT_H
#define ALLRED_SEGMENT_OBJECT_H

#include <Python.h>

#include <unistd.h>

#include "notes.h"
#include "queue.h"

#define ALLRED_PATIENCE_NS 1000000

typedef struct allred_segment_object Segment;

typedef struct {
  PyObject_HEAD Segment *segment; /* once it is under way; it then keeps the segment alive */
  allred_operation operation;
  Py_buffer *views;
  Py_ssize_t view_count, view_room;
  PyObject **arrays; /* held without a view */
  Py_ssize_t array_count;
  allred_tensor *tensors;
  Py_ssize_t tensor_room;
  uint64_t *send_starts, *receive_starts;
} Operation;

struct allred_segment_object {
  PyObject_HEAD Py_buffer memory;
  allred_segment segment;
  allred_queue queue;
  int open, taken, variant, pid;
  unsigned long finisher;           /* the thread that has to finish what its short way began; 0 if there is none */
  const volatile char *own_process; /* a page that reads 0 in a forked child */
  Operation *spare; /* for the short way, which needs a new one only where it does not come to the end */
  PyObject *array_type, *dtypes, *ops; /* array_type NULL: arrays cannot be read here, so none goes the short way */
  PyObject *last_dtype;                /* most arrays are of the dtype of the one before */
  int last_code;
  allred_tensor *apart; /* the last table that was found to have no memory twice: most groups come again */
  Py_ssize_t apart_count;
  allred_notes notes;
};

/* Whether this is the process that made it, not a forked one: that has the queue's lock as it was, and no thread. */
static inline int allred_is_own(const Segment *self) { return self->open && self->pid == getpid(); }

/* A new operation with room for the buffers of so many tensors; NULL with an exception set. */
Operation *allred_new_operation(Py_ssize_t tensors);

/* Room for the views and the table of so many tensors, and for offsets, one a rank and one more. 0, or -1 with an
 * exception set. */
int allred_make_room(Operation *self, Py_ssize_t tensors);
int allred_make_starts(Operation *self, int ranks);

/* Hold a buffer until the operation is complete; NULL with an exception set. The same for an array whose memory is
 * known without a view. Give all back. */
Py_buffer *allred_hold(Operation *self, PyObject *object, int flags);
void allred_hold_array(Operation *self, PyObject *array);
void allred_release(Operation *self);

/* It is under way from now on. */
void allred_under_way(Operation *self, Segment *segment);

/* How a tensor of this dtype travels in an operation with this wire type. */
static inline int allred_wire_of(int dtype, int wire) { return allred_narrows(dtype, wire) ? wire : 0; }

PyObject *allred_headers(const Segment *segment, uint64_t number);
void allred_start_allreduce(Segment *self, Operation *operation, const allred_header *header, Py_ssize_t count, int op);

/* The non-empty tensors, those of one dtype together, each in their order: chunks are of one dtype. -1: no memory. */
Py_ssize_t allred_by_dtype(allred_tensor *tensors, Py_ssize_t count);

/* Methods of Segment. */
PyObject *allred_segment_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count);
PyObject *allred_segment_grouped_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count);
PyObject *allred_segment_begin_exchange(Segment *self, PyObject *args);
PyObject *allred_segment_begin_allreduce(Segment *self, PyObject *args);
PyObject *allred_segment_begin_allgather(Segment *self, PyObject *args);
PyObject *allred_segment_begin_broadcast(Segment *self, PyObject *args);
PyObject *allred_segment_begin_alltoall(Segment *self, PyObject *args);
PyObject *allred_segment_begin_reducescatter(Segment *self, PyObject *args);

/* 0, or -1 with an exception set. */
int allred_add_operation_type(PyObject *module);
int allred_is_operation(PyObject *object);

#endif
