/*
 * The shared memory of the ranks of one node: who writes where, and the flags that say what may be read.
 *
 *   card    a header, and behind it what a small operation brings; two, in turn by operation
 *   ring    room for chunks, one behind the other; back at the start where the largest would not fit any more
 *   stage   how far this rank has come within its present operation
 *
 * Each rank has an area of its own, and writes nowhere else. A flag is stored with release after what it stands for,
 * and loaded with acquire before that is read. Flags only grow, so none is ever reset:
 *
 *   a header's `sequence` is the number of the operation, from 1 on: "my header and first chunk are there";
 *   `stage` counts ticks, two for every round there was: "I have come to this one".
 *
 * Why the ring is so long, when room for three chunks would do (operation.h): a line that another core has read is slow
 * to write as long as it is in that core's caches. With 2 MiB instead of 256 KiB to go through, 16 KiB to 4 MiB passed
 * two to three times as fast between cores that seemed to share no L3; between cores that did, it cost up to a sixth.
 * What is small stays in two places: there it is the fewer lines that count.
 *
 * No Python, no globals, no allocation: every function works on what it is given, so threads can play the ranks.
 */
#ifndef ALLRED_SEGMENT_H
#define ALLRED_SEGMENT_H

#include <stddef.h>
#include <stdint.h>

#include "copy.h"
#include "header.h"

#define ALLRED_MAX_RANKS 1024  /* of one node */
#define ALLRED_LINE 64         /* bytes of a cache line; chunks are a multiple of it */
#define ALLRED_CARD_BYTES 2048 /* what a card takes */
#define ALLRED_RING_CHUNKS 16  /* at least 3 */

typedef struct {
  char *memory; /* of all ranks, zeros at first, aligned to a page */
  int rank, ranks;
  size_t chunk_bytes; /* at most; a multiple of ALLRED_LINE */
  uint64_t operation; /* the number of the last one that this rank began */
  uint64_t ticks;     /* of all operations before that: the same on all ranks */
  allred_pace pace;
  size_t place;  /* in the ring, where the next chunk goes: the same on all ranks */
  uint64_t sent; /* bytes that this rank has written for allreduces */
} allred_segment;

/* Bytes that a segment takes for so many ranks. */
size_t allred_segment_bytes(int ranks, size_t chunk_bytes);

/* A rank's header of an operation; what is behind it; the chunk at a place of a rank's ring. */
allred_header *allred_segment_header(const allred_segment *segment, int rank, uint64_t operation);
char *allred_segment_card(const allred_segment *segment, int rank, uint64_t operation);
char *allred_segment_chunk(const allred_segment *segment, int rank, size_t place);

/* The place of the next chunk, and behind a chunk of so many bytes. */
size_t allred_segment_place(const allred_segment *segment);
void allred_segment_advance(allred_segment *segment, size_t bytes);

/* Write this rank's header, and publish it with what it has written before; whether a rank has. */
void allred_segment_publish_header(const allred_segment *segment, const allred_header *header);
int allred_segment_has_header(const allred_segment *segment, int rank, uint64_t operation);

/* Publish what this rank has written as of a tick, counted from the first of the operation; whether a
 * rank has come to it. */
void allred_segment_publish(const allred_segment *segment, uint64_t first, uint64_t tick);
int allred_segment_has(const allred_segment *segment, int rank, uint64_t first, uint64_t tick);

#endif
