/*
 * The shared memory of the ranks of one node: who writes where, and the flags that say what may be read.
 *
 *   headed slot   a header, and behind it the first chunk of an operation; two of them, in turn by operation
 *   slot          a chunk; two of them, in turn by round
 *   stage         how far this rank has come within its present operation
 *
 * Each rank has one of each kind, in an area of its own, and writes nowhere else. A flag is stored with release after
 * what it stands for, and loaded with acquire before that is read. Flags only grow, so none is ever reset:
 *
 *   a header's `sequence` is the number of the operation, from 1 on: "my header and first chunk are there";
 *   `stage` is operation * 2^24 + tick: "I have come to this tick of this operation".
 *
 * No Python, no globals, no allocation: every function works on what it is given, so threads can play the ranks.
 */
#ifndef ALLRED_SEGMENT_H
#define ALLRED_SEGMENT_H

#include <stddef.h>
#include <stdint.h>

#include "header.h"

#define ALLRED_MAX_RANKS 1024 /* of one node */
#define ALLRED_LINE 64        /* bytes of a cache line; slots are a multiple of it */

typedef struct {
  char *memory; /* of all ranks, zeros at first, aligned to a page */
  int rank, ranks;
  size_t slot_bytes;
  uint64_t operation; /* the number of the last one that this rank began */
} allred_segment;

/* Bytes that a segment takes for so many ranks. */
size_t allred_segment_bytes(int ranks, size_t slot_bytes);

/* A rank's header of an operation, and the chunk of a round of it. */
allred_header *allred_segment_header(const allred_segment *segment, int rank, uint64_t operation);
char *allred_segment_slot(const allred_segment *segment, int rank, uint64_t operation, uint64_t round);

/* Write this rank's header of an operation, and publish it with what stands in the first chunk. */
void allred_segment_publish_header(const allred_segment *segment, const allred_header *header, uint64_t operation);
int allred_segment_has_header(const allred_segment *segment, int rank, uint64_t operation);

/* Publish what stands in this rank's slots as of `tick`; whether a rank has come to it. */
void allred_segment_publish(const allred_segment *segment, uint64_t operation, uint64_t tick);
int allred_segment_has(const allred_segment *segment, int rank, uint64_t operation, uint64_t tick);

#endif
