/*
 * The shared memory of the ranks of one node, and the flags that say what may be read.
 *
 * Each rank has an area. Other ranks write there only `doorbell` and `sleepers`. An area has
 *
 *   stage          how far the rank is within its current operation
 *   results        2, used in turn by operations: what the rank has found in its part (allreduce_in_place.h)
 *   doorbell       0; or the rank sleeps: 1 + the rank that it waits for (doorbell.h)
 *   sleepers       in the area of rank 0: the number of ranks that sleep
 *   inline slots   2, used in turn by operations: a header, and the data of an operation that is small
 *   ring           room for consecutive chunks; the next chunk goes to the start if the largest would not fit behind
 *
 * A flag is stored with release after the data that it stands for, and loaded with acquire before this data is read.
 * Both are also sequentially consistent, because a sleeper must see the flag or be seen by its waker (doorbell.h).
 * These flags only grow, so none is ever reset:
 *
 *   1  `sequence` of a header is the number of the operation, from 1: "my header and my first chunk are written"
 *   2  `stage` is a tick count, with two ticks per round: "I have reached this tick"
 *
 * Three chunks would be enough (operation.h). The ring is longer because a line that another core has read is slow to
 * write as long as it is in the caches of that core. With 2 MiB instead of 256 KiB, arrays of 16 KiB to 4 MiB passed
 * two to three times as fast between cores that seemed to share no L3; between cores that did, it cost up to a sixth.
 * Small operations use only two slots: for them fewer lines are faster.
 *
 * No Python, no globals, no allocation: in tests, threads act as ranks.
 */
#ifndef ALLRED_SEGMENT_H
#define ALLRED_SEGMENT_H

#include <stddef.h>
#include <stdint.h>

#include "copy.h"
#include "header.h"

#define ALLRED_MAX_RANKS 1024                    /* of one node */
#define ALLRED_LINE 64                           /* bytes of a cache line; chunks are a multiple of it */
#define ALLRED_INLINE_BYTES 2048                 /* data bytes of an inline slot */
#define ALLRED_RING_CHUNKS 16                    /* at least 3 */
#define ALLRED_IN_PLACE_BYTES ((size_t)16 << 10) /* smallest tensor that is reduced in place */

static inline size_t allred_round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/* Memory that all ranks map, each at an address of its own: `base[r]` is the arena of rank r in this process. */
typedef struct {
  char *const *base;       /* of each rank; NULL: there are no arenas */
  size_t bytes;            /* of the arena of this rank */
  size_t min_tensor_bytes; /* smallest tensor that is reduced in place; the same on all ranks */
} allred_arenas;

typedef struct {
  char *memory; /* of all ranks, initially zeros, aligned to a page */
  int rank, ranks;
  size_t chunk_bytes;  /* largest chunk; a multiple of ALLRED_LINE */
  uint64_t operation;  /* the number of the last operation that this rank has begun */
  uint64_t tick_count; /* of all operations before that one; the same on all ranks */
  allred_copy_policy copy_policy;
  size_t place;            /* offset of the next chunk in the ring; the same on all ranks */
  uint64_t sent;           /* bytes that this rank has written for allreduces */
  uint64_t in_place;       /* bytes of tensors of this rank that were reduced in place by allreduces */
  int may_sleep;           /* whether callers may sleep (operation.h) */
  int64_t contended_until; /* of the callers' threads (operation.h) */
  uint64_t read_in_place;  /* bytes that this rank has read from arenas in other operations */
  allred_arenas arenas;
  const struct allred_across *across; /* of operations across hosts (operation.h), or NULL */
  struct allred_network *network;     /* their state (network.h) */
  uint64_t (*outside)[2]; /* by rank: tensors, and their bytes, that lay in this rank's arena, but not in that one; of
                           * several such ranks the first is counted. NULL: nothing is counted */
} allred_segment;

/* Return the bytes of memory for this many ranks. */
size_t allred_segment_bytes(int ranks, size_t chunk_bytes);

/* Return a rank's header of an operation; the data of its inline slot; the chunk at this place of its ring. */
allred_header *allred_segment_header(const allred_segment *segment, int rank, uint64_t operation);
char *allred_segment_inline_slot(const allred_segment *segment, int rank, uint64_t operation);
char *allred_segment_chunk(const allred_segment *segment, int rank, size_t place);

/* Return the place of the next chunk; advance it by a chunk of this many bytes. */
size_t allred_segment_place(const allred_segment *segment);
void allred_segment_advance(allred_segment *segment, size_t bytes);

/* Return the offset of data in the arena of this rank, plus 1; 0: it does not lie in it. */
uint64_t allred_arena_offset(const allred_segment *segment, const char *data, size_t bytes);

/* Write this rank's header, and publish it with all data written before; whether a rank has published its header. */
void allred_segment_publish_header(const allred_segment *segment, const allred_header *header);
int allred_segment_has_header(const allred_segment *segment, int rank, uint64_t operation);

/* The result of an operation on this rank: a number, published with the next tick. */
uint64_t *allred_segment_result(const allred_segment *segment, int rank, uint64_t operation);

/* Sleep until `rank` publishes something, for at most `limit_ns`. Return at once if is_ready(argument) is true after
 * the doorbell is set. One thread of a rank at a time. */
void allred_segment_sleep(const allred_segment *segment, int rank, int64_t limit_ns, int (*is_ready)(const void *),
                          const void *argument);

/* Publish all data written before this tick, which counts from the operation's first; whether a rank has reached it. */
void allred_segment_publish(const allred_segment *segment, uint64_t first, uint64_t tick);
int allred_segment_has(const allred_segment *segment, int rank, uint64_t first, uint64_t tick);

#endif
