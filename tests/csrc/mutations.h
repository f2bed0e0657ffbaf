/*
 * The flags and places of segment.h, with the smallest ring and with one rule of the protocol broken, which model.c
 * must notice. Included once; linked with --wrap for each of the functions named __wrap_..., so that csrc/ calls these
 * instead.
 */
#ifndef MUTATIONS_H
#define MUTATIONS_H

#include "segment.h"

enum {
  SOUND,
  ONE_PLACE,
  ONE_INLINE_SLOT,
  NO_FIRST_WAIT,
  NO_LATER_WAIT,
  NO_REDUCE_WAIT,
  ONLY_NEIGHBOURS_WAIT,
  STAGE_WITHOUT_OPERATION,
  STAGE_MUST_BE_EQUAL,
  MUTATIONS
};
static const char *const mutation_names[] = {"sound",
                                             "one place instead of two",
                                             "one inline slot instead of two",
                                             "no wait in the first round",
                                             "no wait in later rounds",
                                             "no wait after the reduce phase",
                                             "each rank waits only for the next",
                                             "stage without the operation's number",
                                             "stage must be equal to the tick"};

static int mutation, places;

/* The ring with so many places for a chunk, in turn: `place` counts the chunks. */
size_t __wrap_allred_segment_place(const allred_segment *segment) {
  return segment->place % (size_t)(mutation == ONE_PLACE ? 1 : places) * segment->chunk_bytes;
}

void __wrap_allred_segment_advance(allred_segment *segment, size_t bytes) {
  (void)bytes;
  segment->place++;
}

static uint64_t inline_slot_of(uint64_t operation) { return mutation == ONE_INLINE_SLOT ? 0 : operation; }

char *__real_allred_segment_inline_slot(const allred_segment *, int, uint64_t);
char *__wrap_allred_segment_inline_slot(const allred_segment *segment, int rank, uint64_t operation) {
  return __real_allred_segment_inline_slot(segment, rank, inline_slot_of(operation));
}

allred_header *__real_allred_segment_header(const allred_segment *, int, uint64_t);
allred_header *__wrap_allred_segment_header(const allred_segment *segment, int rank, uint64_t operation) {
  return __real_allred_segment_header(segment, rank, inline_slot_of(operation));
}

void __real_allred_segment_publish_header(const allred_segment *, const allred_header *);
void __wrap_allred_segment_publish_header(const allred_segment *segment, const allred_header *header) {
  if (mutation == ONE_INLINE_SLOT)
    *__real_allred_segment_header(segment, segment->rank, 0) = *header;
  else
    __real_allred_segment_publish_header(segment, header);
}

static int skipped(const allred_segment *segment, int rank) {
  return mutation == ONLY_NEIGHBOURS_WAIT && rank != (segment->rank + 1) % segment->ranks;
}

int __real_allred_segment_has_header(const allred_segment *, int, uint64_t);
int __wrap_allred_segment_has_header(const allred_segment *segment, int rank, uint64_t operation) {
  if (mutation == NO_FIRST_WAIT || skipped(segment, rank)) return 1;
  if (mutation == ONE_INLINE_SLOT) return __real_allred_segment_header(segment, rank, 0)->sequence == operation;
  return __real_allred_segment_has_header(segment, rank, operation);
}

void __real_allred_segment_publish(const allred_segment *, uint64_t, uint64_t);
void __wrap_allred_segment_publish(const allred_segment *segment, uint64_t operation, uint64_t tick) {
  __real_allred_segment_publish(segment, mutation == STAGE_WITHOUT_OPERATION ? 0 : operation, tick);
}

int __real_allred_segment_has(const allred_segment *, int, uint64_t, uint64_t);
int __wrap_allred_segment_has(const allred_segment *segment, int rank, uint64_t operation, uint64_t tick) {
  if (skipped(segment, rank)) return 1;
  if (mutation == NO_REDUCE_WAIT && tick % 2 == 1) return 1;
  if (mutation == NO_LATER_WAIT && tick % 2 == 0) return 1;
  if (mutation == STAGE_MUST_BE_EQUAL && __real_allred_segment_has(segment, rank, operation, tick + 1)) return 0;
  return __real_allred_segment_has(segment, rank, mutation == STAGE_WITHOUT_OPERATION ? 0 : operation, tick);
}

#endif
