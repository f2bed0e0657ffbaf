/*
 * The trace of the fast path, for the timeline (allred/timeline): start and end of each call. Between two allreduces of
 * 1 MiB the caches are replaced, so to record a call only reads the clock and writes one row. Called with the GIL.
 */
#ifndef ALLRED_TRACE_H
#define ALLRED_TRACE_H

#include <Python.h>

#include <stdint.h>

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

/* Record an event. If there is no memory, the event is lost. */
void allred_trace_add(allred_trace *trace, const allred_trace_event *event);

/* Return and remove all events: (names, bytes). Each event has 32 bytes: start, end, bytes (int64), the index of its
 * name, grouped (uint32). NULL with an exception set if there is no memory. */
PyObject *allred_trace_take(allred_trace *trace);

void allred_trace_free(allred_trace *trace);

#endif
