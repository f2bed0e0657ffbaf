/*
 * What the short way notes for a timeline (allred/timeline): when a call began and ended. Between two allreduces of a
 * MiB all that is touched comes from memory, so to note one is to read the clock and write half a line.
 * Called with the GIL. Limited API.
 */
#ifndef ALLRED_NOTES_H
#define ALLRED_NOTES_H

#include <Python.h>

#include <stdint.h>

typedef struct {
  int64_t start, end; /* ns of CLOCK_MONOTONIC, as time.perf_counter_ns(); end 0: it went on elsewhere */
  uint64_t bytes;
  uint32_t grouped;
  PyObject *name;
} allred_note;

typedef struct {
  int wanted;
  allred_note *table;
  size_t count, room;
} allred_notes;

/* Note one. Without memory for it, it is lost. */
void allred_notes_add(allred_notes *notes, const allred_note *note);

/* What has come since the last time: (names, bytes), of each note 32 bytes: start, end, bytes: int64; the index of its
 * name, grouped: uint32. NULL with an exception set, for want of memory. */
PyObject *allred_notes_take(allred_notes *notes);

void allred_notes_free(allred_notes *notes);

#endif
