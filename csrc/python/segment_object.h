/*
 * The Python types of the shared-memory backend.
 *
 *   segment_type.c         Segment: one rank's view of the shared memory of its node, and the queue of its operations
 *   xla_call.c             reductions of JAX: the fast path of Segment for the memory of a program of XLA
 *   segment_allreduce.c    the fast path of Segment: plain arrays are checked and hashed in C, and usually reduced
 *   segment_collectives.c  allgather, broadcast, alltoall and reducescatter of Segment
 *   segment_arenas.c       the arenas of Segment
 *   segment_network.c      the connections of Segment to other hosts
 *   operation_type.c       Operation: a pending operation, and the buffers that it holds until it is complete
 *   trace.c                the trace of the fast path, for the timeline
 *
 * Each file uses only files below it. The ranks of one operation may use the fast path or not, independently.
 */
#ifndef ALLRED_SEGMENT_OBJECT_H
#define ALLRED_SEGMENT_OBJECT_H

#include "binding.h"

#include <unistd.h>

#include "encode.h"
#include "queue.h"

/* The trace of the fast path: start and end of each call. Between two allreduces of 1 MiB the caches are replaced, so
 * to record a call only reads the clock and writes one row. */
typedef struct {
  int64_t start, end; /* ns of CLOCK_MONOTONIC, as time.perf_counter_ns(); end 0: Python completes the operation */
  uint64_t bytes;
  uint32_t grouped;
  PyObject *name;
} allred_trace_event;

typedef struct {
  int enabled;
  allred_trace_event *table;
  size_t count, capacity;
} allred_trace;

typedef struct allred_segment_object Segment;

typedef struct {
  PyObject_HEAD Segment *segment; /* NULL before the operation is queued; then a reference */
  allred_operation operation;
  Py_buffer *views;
  Py_ssize_t view_count;
  PyObject **arrays; /* held without a view */
  Py_ssize_t array_count;
  allred_tensor *tensors;
  Py_ssize_t capacity; /* tensors for which there is room */
  uint64_t *send_starts, *receive_starts;
} Operation;

struct allred_segment_object {
  PyObject_HEAD Py_buffer memory;
  allred_segment segment;
  allred_queue queue;
  Py_buffer *arenas; /* of all ranks, or NULL */
  char **arena_base; /* their addresses */
  int open, locked, variant, pid;
  uint32_t nonfinite;               /* as in allred_operation, of the last operation of the fast path */
  uint64_t samples;                 /* likewise */
  int64_t waited_ns;                /* likewise */
  uint64_t generation;              /* of the world */
  unsigned long finishing_thread;   /* the thread that must complete what its fast path began, or 0 */
  const volatile char *own_process; /* a page that reads 0 in a forked child */
  Operation *spare;                 /* reused by the fast path; NULL if an unfinished call has taken it */
  PyObject *array_type;             /* NULL: C cannot read the arrays of this numpy, so there is no fast path */
  PyObject *dtypes, *ops;
  PyObject *last_dtype; /* of the last array, and its code: most arrays have the dtype of the one before */
  int last_code;
  allred_tensor *disjoint; /* the last table of tensors without overlap: most groups are reduced again and again */
  Py_ssize_t disjoint_count;
  allred_trace trace;
};

/* Whether this is the process that made the segment. A forked child has a copy of the queue's mutex, and no thread. */
static inline int allred_is_own(const Segment *self) { return self->open && self->pid == getpid(); }

/* Return a new operation with room for this many tensors; NULL with an exception set. */
Operation *allred_new_operation(Py_ssize_t tensors);

/* Make room for the views and the table of this many tensors: 0, or -1 with an exception set. */
int allred_make_room(Operation *self, Py_ssize_t tensors);

/* Hold a buffer until the operation is complete; NULL with an exception set. Hold an array whose memory is known
 * without a view. Release all of them. */
Py_buffer *allred_hold(Operation *self, PyObject *object, int flags);
void allred_hold_array(Operation *self, PyObject *array);
void allred_release(Operation *self);

/* Attach the operation to its segment, before it is queued. */
void allred_attach(Operation *self, Segment *segment);

/* The type in which a tensor travels, in an operation with this wire type; 0: its own dtype. ops.py `wire_of` is the
 * same in Python. */
static inline int allred_wire_of(const Segment *self, int dtype, int wire, int dimensions, size_t elements) {
  if (!self->segment.network) return allred_narrows(dtype, wire) ? wire : 0;
  if (allred_is_quantized(wire) && dimensions < 2 && elements <= ALLRED_EXEMPT_ELEMENTS) return 0;
  return allred_encodes(dtype, wire) ? wire : 0;
}

/* An array of an operation: `out` is `in`, or overlaps no array of the operation. dtype: its code, or less than 0. */
typedef struct {
  char *in, *out;
  int dtype, nd;
  const Py_ssize_t *dimensions;
} allred_memory;

/* As the method grouped_allreduce, of memory that does not overlap. The caller keeps it until the operation that this
 * may return is complete. */
PyObject *allred_segment_reduce_memory(Segment *self, const allred_memory *memory, Py_ssize_t count, PyObject *op,
                                       PyObject *name);

/* Return the headers of all ranks in an operation. */
PyObject *allred_headers(const Segment *segment, uint64_t number);

/* Let the operation, which is prepared, add the errors of encodings to a buffer of float32 with a number for each
 * element of its tensors; None: errors are lost. Return 0, or -1 with an exception set. */
int allred_keep_errors(Operation *operation, PyObject *residual);

/* Prepare an allreduce of the first `count` tensors of the table. */
void allred_prepare_allreduce(Segment *self, Operation *operation, const allred_header *header, Py_ssize_t count,
                              int op);

/* Remove empty tensors, and put those of one dtype and wire type together in their order, because a chunk has one.
 * Return the new count, or -1 with an exception set. */
Py_ssize_t allred_group_by_dtype(allred_tensor *tensors, Py_ssize_t count);

/* Record an event. If there is no memory, the event is lost. */
void allred_trace_add(allred_trace *trace, const allred_trace_event *event);

/* Return and remove all events: (names, bytes). Each event has 32 bytes: start, end, bytes (int64), the index of its
 * name, grouped (uint32). NULL with an exception set if there is no memory. */
PyObject *allred_trace_take(allred_trace *trace);

void allred_trace_free(allred_trace *trace);

/* Return the number of ranks of all hosts, and the number of this rank among them. */
int allred_all_ranks(const Segment *self);
int allred_own_rank(const Segment *self);

/* Release the connections to other hosts, if there are any. */
void allred_segment_release_network(Segment *self);

/* Release the buffers of the arenas, if there are any. */
void allred_segment_release_arenas(Segment *self);

/* For the methods begin_...: return a new operation with room for this many tensors and the header of a record; queue
 * an operation, unless it could not be prepared. NULL with an exception set. */
Operation *allred_segment_prepare(Segment *self, PyObject *record, Py_ssize_t tensors);
PyObject *allred_segment_begin(Segment *self, Operation *operation, PyObject *record, int prepared);

/* Whether there is a kernel; else an exception is set. */
int allred_segment_kernel_exists(const Segment *self, int dtype, int op);

/* Methods of Segment. */
PyObject *allred_segment_begin_allgather(Segment *self, PyObject *args);
PyObject *allred_segment_begin_broadcast(Segment *self, PyObject *args);
PyObject *allred_segment_begin_alltoall(Segment *self, PyObject *args);
PyObject *allred_segment_begin_reducescatter(Segment *self, PyObject *args);
PyObject *allred_segment_set_network(Segment *self, PyObject *args);
PyObject *allred_segment_begin_host_exchange(Segment *self, PyObject *args);
PyObject *allred_segment_set_arenas(Segment *self, PyObject *buffers);
PyObject *allred_segment_get_outside(Segment *self, void *unused);
PyObject *allred_segment_get_lost_host(Segment *self, void *unused);
PyObject *allred_segment_start_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count);
PyObject *allred_segment_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count);
PyObject *allred_segment_grouped_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count);
PyObject *allred_segment_step_allreduce(Segment *self, PyObject *const *args, Py_ssize_t count);

#endif
