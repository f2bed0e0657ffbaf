#include "segment.h"

#include <stdatomic.h>
#include <string.h>

#define TICK_BITS 24
#define PAGE 4096
/* The header and the first bytes of its chunk lie in one aligned pair of lines, which processors fetch together. */
#define PAIR ((size_t)2 * ALLRED_LINE)

static size_t headed_bytes(size_t slot_bytes) { return slot_bytes + PAIR; }

static size_t area_bytes(size_t slot_bytes) {
  const size_t bytes = PAIR + 2 * headed_bytes(slot_bytes) + 2 * slot_bytes;
  return (bytes + PAGE - 1) / PAGE * PAGE;
}

size_t allred_segment_bytes(int ranks, size_t slot_bytes) { return (size_t)ranks * area_bytes(slot_bytes); }

static char *area(const allred_segment *segment, int rank) {
  return segment->memory + (size_t)rank * area_bytes(segment->slot_bytes);
}

static _Atomic uint64_t *stage(const allred_segment *segment, int rank) {
  return (_Atomic uint64_t *)(void *)area(segment, rank);
}

static char *headed(const allred_segment *segment, int rank, uint64_t operation) {
  return area(segment, rank) + PAIR + (operation & 1) * headed_bytes(segment->slot_bytes);
}

allred_header *allred_segment_header(const allred_segment *segment, int rank, uint64_t operation) {
  return (allred_header *)(void *)headed(segment, rank, operation);
}

char *allred_segment_slot(const allred_segment *segment, int rank, uint64_t operation, uint64_t round) {
  if (round == 0) return headed(segment, rank, operation) + sizeof(allred_header);
  return area(segment, rank) + PAIR + 2 * headed_bytes(segment->slot_bytes) + (round & 1) * segment->slot_bytes;
}

static _Atomic uint64_t *sequence(const allred_segment *segment, int rank, uint64_t operation) {
  return (_Atomic uint64_t *)(void *)headed(segment, rank, operation);
}

void allred_segment_publish_header(const allred_segment *segment, const allred_header *header, uint64_t operation) {
  const size_t flag = sizeof header->sequence;
  char *shown = headed(segment, segment->rank, operation);
  memcpy(shown + flag, (const char *)header + flag, sizeof *header - flag);
  atomic_store_explicit(sequence(segment, segment->rank, operation), operation, memory_order_release);
}

int allred_segment_has_header(const allred_segment *segment, int rank, uint64_t operation) {
  return atomic_load_explicit(sequence(segment, rank, operation), memory_order_acquire) == operation;
}

void allred_segment_publish(const allred_segment *segment, uint64_t operation, uint64_t tick) {
  const uint64_t value = (operation << TICK_BITS) + tick;
  atomic_store_explicit(stage(segment, segment->rank), value, memory_order_release);
}

int allred_segment_has(const allred_segment *segment, int rank, uint64_t operation, uint64_t tick) {
  const uint64_t value = (operation << TICK_BITS) + tick;
  return atomic_load_explicit(stage(segment, rank), memory_order_acquire) >= value;
}
