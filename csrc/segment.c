#include "segment.h"

#include <stdatomic.h>
#include <string.h>

#include "chaos.h"
#include "doorbell.h"

#define PAGE 4096
/* Processors fetch cache lines in aligned pairs; a header and the first data bytes are one pair. */
#define PAIR ((size_t)2 * ALLRED_LINE)

static size_t inline_slot_bytes(void) { return allred_round_up(sizeof(allred_header) + ALLRED_INLINE_BYTES, PAIR); }

static size_t ring_bytes(size_t chunk_bytes) { return ALLRED_RING_CHUNKS * chunk_bytes; }

static size_t area_bytes(size_t chunk_bytes) {
  return allred_round_up(2 * PAIR + 2 * inline_slot_bytes() + ring_bytes(chunk_bytes), PAGE);
}

size_t allred_segment_bytes(int ranks, size_t chunk_bytes) { return (size_t)ranks * area_bytes(chunk_bytes); }

static char *area(const allred_segment *segment, int rank) {
  return segment->memory + (size_t)rank * area_bytes(segment->chunk_bytes);
}

static _Atomic uint64_t *stage(const allred_segment *segment, int rank) {
  return (_Atomic uint64_t *)(void *)area(segment, rank);
}

uint64_t *allred_segment_result(const allred_segment *segment, int rank, uint64_t operation) {
  return (uint64_t *)(void *)(area(segment, rank) + ALLRED_LINE) + (operation & 1);
}

/* Other ranks read it only if there are sleepers. */
static allred_doorbell *doorbell(const allred_segment *segment, int rank) {
  return (allred_doorbell *)(void *)(area(segment, rank) + PAIR);
}

/* A rank that publishes reads this one word, in a line that rarely changes, and not the doorbells of all ranks. */
static _Atomic uint32_t *sleepers(const allred_segment *segment) {
  return (_Atomic uint32_t *)(void *)(area(segment, 0) + PAIR + ALLRED_LINE);
}

static char *inline_slot(const allred_segment *segment, int rank, uint64_t operation) {
  return area(segment, rank) + 2 * PAIR + (operation & 1) * inline_slot_bytes();
}

allred_header *allred_segment_header(const allred_segment *segment, int rank, uint64_t operation) {
  return (allred_header *)(void *)inline_slot(segment, rank, operation);
}

char *allred_segment_inline_slot(const allred_segment *segment, int rank, uint64_t operation) {
  return inline_slot(segment, rank, operation) + sizeof(allred_header);
}

char *allred_segment_chunk(const allred_segment *segment, int rank, size_t place) {
  return area(segment, rank) + 2 * PAIR + 2 * inline_slot_bytes() + place;
}

size_t allred_segment_place(const allred_segment *segment) {
  return segment->place + segment->chunk_bytes <= ring_bytes(segment->chunk_bytes) ? segment->place : 0;
}

void allred_segment_advance(allred_segment *segment, size_t bytes) {
  segment->place = allred_segment_place(segment) + allred_round_up(bytes, PAIR);
}

static _Atomic uint64_t *sequence(const allred_segment *segment, int rank, uint64_t operation) {
  return (_Atomic uint64_t *)(void *)inline_slot(segment, rank, operation);
}

/* Wake the ranks that wait for this one. */
static void wake(const allred_segment *segment) {
  if (!atomic_load_explicit(sleepers(segment), memory_order_seq_cst)) return;
  for (int rank = 0; rank < segment->ranks; rank++)
    if (rank != segment->rank) allred_doorbell_ring_if(doorbell(segment, rank), 1 + (uint32_t)segment->rank);
}

void allred_segment_sleep(const allred_segment *segment, int rank, int64_t limit_ns, int (*is_ready)(const void *),
                          const void *argument) {
  const uint32_t value = 1 + (uint32_t)rank;
  atomic_fetch_add_explicit(sleepers(segment), 1, memory_order_seq_cst);
  allred_doorbell_set(doorbell(segment, segment->rank), value);
  if (!is_ready(argument)) allred_doorbell_sleep(doorbell(segment, segment->rank), value, limit_ns);
  allred_doorbell_clear(doorbell(segment, segment->rank));
  CHAOS_PAUSE();
  atomic_fetch_sub_explicit(sleepers(segment), 1, memory_order_seq_cst);
}

void allred_segment_publish_header(const allred_segment *segment, const allred_header *header) {
  const size_t flag = sizeof header->sequence;
  const uint64_t operation = header->sequence;
  char *slot = inline_slot(segment, segment->rank, operation);
  memcpy(slot + flag, (const char *)header + flag, sizeof *header - flag);
  CHAOS_PAUSE();
  atomic_store_explicit(sequence(segment, segment->rank, operation), operation, memory_order_seq_cst);
  CHAOS_PAUSE();
  wake(segment);
}

int allred_segment_has_header(const allred_segment *segment, int rank, uint64_t operation) {
  return atomic_load_explicit(sequence(segment, rank, operation), memory_order_seq_cst) == operation;
}

void allred_segment_publish(const allred_segment *segment, uint64_t first, uint64_t tick) {
  CHAOS_PAUSE();
  atomic_store_explicit(stage(segment, segment->rank), first + tick, memory_order_seq_cst);
  CHAOS_PAUSE();
  wake(segment);
}

int allred_segment_has(const allred_segment *segment, int rank, uint64_t first, uint64_t tick) {
  return atomic_load_explicit(stage(segment, rank), memory_order_seq_cst) >= first + tick;
}

uint64_t allred_arena_offset(const allred_segment *segment, const char *data, size_t bytes) {
  const uintptr_t base = (uintptr_t)segment->arenas.base[segment->rank], at = (uintptr_t)data;
  const size_t all = segment->arenas.bytes;
  return at >= base && at - base < all && all - (at - base) >= bytes ? at - base + 1 : 0;
}
