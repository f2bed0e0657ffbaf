/* What each kind of operation does in the rounds of operation.h. */
#include <string.h>

#include "operation.h"

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static size_t round_up(size_t bytes) { return (bytes + ALLRED_LINE - 1) / ALLRED_LINE * ALLRED_LINE; }

static uint64_t rounds_for(size_t bytes, size_t chunk) { return bytes ? (bytes + chunk - 1) / chunk : 1; }

static const char *slot_of(const allred_operation *op, int rank) {
  return allred_segment_slot(op->segment, rank, op->number, op->round);
}

/*
 * allreduce. A chunk holds consecutive tensors, or parts of them, of one dtype: the fusion buffer is one slot long.
 *
 * Few bytes, or two ranks: every rank reads all slots and reduces for itself. More: each reduces one part of the chunk
 * for all, in place in its slot, and everyone copies the parts; that is one meeting more, and less to read.
 * The order of the sum is that of the ranks either way, so both give the same bits.
 */

/* Up to which all read all, in bytes of the chunk times ranks. */
#define DIRECT_BYTES 32768

/* The next stretch of memory of a cursor, at most `room` bytes; the cursor goes behind it. */
static size_t stretch(const allred_operation *op, allred_cursor *cursor, size_t room, const allred_tensor **tensor,
                      size_t *offset) {
  *tensor = &op->tensors[cursor->tensor];
  *offset = cursor->offset;
  const size_t bytes = smaller(room, (*tensor)->bytes - cursor->offset);
  cursor->offset += bytes;
  if (cursor->offset == (*tensor)->bytes) *cursor = (allred_cursor){cursor->tensor + 1, 0};
  return bytes;
}

static void gather(allred_operation *op, char *slot) {
  const allred_tensor *tensor;
  size_t offset, room = op->segment->slot_bytes;
  op->chunk_dtype = op->filled.tensor < op->tensor_count ? op->tensors[op->filled.tensor].dtype : 0;
  while (room && op->filled.tensor < op->tensor_count && op->tensors[op->filled.tensor].dtype == op->chunk_dtype) {
    const size_t bytes = stretch(op, &op->filled, room, &tensor, &offset);
    memcpy(slot, tensor->in + offset, bytes);
    slot += bytes;
    room -= bytes;
  }
  op->chunk_bytes = op->segment->slot_bytes - room;
}

/* This rank's own numbers are read where they come from: the same bits as in its slot, and in a nearer cache. */
static void reduce_all(allred_operation *op) {
  const allred_reduce reduce = allred_reduce_kernel(op->variant, op->chunk_dtype, op->op);
  const size_t item = allred_dtype_bytes(op->chunk_dtype);
  const void *sources[ALLRED_MAX_RANKS];
  const allred_tensor *tensor;
  size_t offset;
  for (size_t at = 0, bytes; at < op->chunk_bytes; at += bytes) {
    bytes = stretch(op, &op->drained, op->chunk_bytes - at, &tensor, &offset);
    for (int rank = 0; rank < op->segment->ranks; rank++) sources[rank] = slot_of(op, rank) + at;
    sources[op->segment->rank] = tensor->in + offset;
    reduce(tensor->out + offset, sources, op->segment->ranks, bytes / item, op->divisor);
  }
}

static size_t part_of(const allred_operation *op) {
  return round_up((op->chunk_bytes + (size_t)op->segment->ranks - 1) / (size_t)op->segment->ranks);
}

static void reduce_part(allred_operation *op, char *slot) {
  const size_t part = part_of(op), start = smaller(part * (size_t)op->segment->rank, op->chunk_bytes);
  const size_t bytes = smaller(part, op->chunk_bytes - start);
  const void *sources[ALLRED_MAX_RANKS];
  for (int rank = 0; rank < op->segment->ranks; rank++) sources[rank] = slot_of(op, rank) + start;
  allred_reduce_kernel(op->variant, op->chunk_dtype, op->op)(slot + start, sources, op->segment->ranks,
                                                             bytes / allred_dtype_bytes(op->chunk_dtype), op->divisor);
}

static void scatter_parts(allred_operation *op) {
  const size_t part = part_of(op);
  const allred_tensor *tensor;
  size_t offset;
  for (size_t at = 0, bytes; at < op->chunk_bytes; at += bytes) {
    bytes = stretch(op, &op->drained, smaller(op->chunk_bytes - at, part - at % part), &tensor, &offset);
    memcpy(tensor->out + offset, slot_of(op, (int)(at / part)) + at, bytes);
  }
}

static const allred_transfer direct = {gather, NULL, reduce_all};
static const allred_transfer shared_out = {gather, reduce_part, scatter_parts};

void allred_begin_allreduce(allred_operation *op, allred_segment *segment, const allred_header *header,
                            const allred_tensor *tensors, size_t count, int variant, int reduction, int divisor) {
  allred_begin_exchange(op, segment, header);
  op->tensors = tensors;
  op->tensor_count = count;
  op->variant = variant;
  op->op = reduction;
  op->divisor = divisor;
  size_t bytes = 0;
  op->rounds = 0;
  for (size_t i = 0, run = 0; i < count; i++) {
    bytes += tensors[i].bytes;
    run += tensors[i].bytes;
    if (i + 1 < count && tensors[i + 1].dtype == tensors[i].dtype) continue;
    op->rounds += rounds_for(run, segment->slot_bytes);
    run = 0;
  }
  if (op->rounds == 0) op->rounds = 1;
  op->transfer = segment->ranks == 2 || bytes * (size_t)segment->ranks <= DIRECT_BYTES ? &direct : &shared_out;
}

/*
 * allgather: each rank's slot holds the next chunk of what it gives, and all read it. A broadcast is an allgather to
 * which one rank alone gives something.
 */

/* What is left of a stretch of memory in this round, if it passes `chunk` bytes a round. */
static size_t left(const allred_operation *op, const uint64_t *starts, int rank, size_t chunk) {
  const size_t bytes = starts[rank + 1] - starts[rank], passed = op->round * chunk;
  return passed < bytes ? smaller(bytes - passed, chunk) : 0;
}

static size_t largest_stretch(const uint64_t *starts, int ranks) {
  size_t largest = 0;
  for (int rank = 0; rank < ranks; rank++)
    if (starts[rank + 1] - starts[rank] > largest) largest = starts[rank + 1] - starts[rank];
  return largest;
}

static void give(allred_operation *op, char *slot) {
  const size_t chunk = op->part_bytes;
  memcpy(slot, op->send + op->round * chunk, left(op, op->receive_starts, op->segment->rank, chunk));
}

static void take_all(allred_operation *op) {
  const size_t chunk = op->part_bytes, passed = op->round * chunk;
  for (int rank = 0; rank < op->segment->ranks; rank++) {
    char *to = op->receive + op->receive_starts[rank] + passed;
    if (rank == op->segment->rank && to == op->send + passed) continue; /* in place */
    memcpy(to, slot_of(op, rank), left(op, op->receive_starts, rank, chunk));
  }
}

static const allred_transfer allgather = {give, NULL, take_all};

void allred_begin_allgather(allred_operation *op, allred_segment *segment, const allred_header *header,
                            const char *send, char *receive, const uint64_t *starts) {
  allred_begin_exchange(op, segment, header);
  op->transfer = &allgather;
  op->send = send;
  op->receive = receive;
  op->receive_starts = starts;
  op->part_bytes = segment->slot_bytes;
  op->rounds = rounds_for(largest_stretch(starts, segment->ranks), op->part_bytes);
}

/*
 * alltoall and reducescatter: a slot has a part for each rank. It reads its part of all slots, and puts them one
 * behind the other, or reduces them.
 */

static size_t part_for_each(const allred_segment *segment) {
  return segment->slot_bytes / (size_t)segment->ranks / ALLRED_LINE * ALLRED_LINE;
}

static void deal(allred_operation *op, char *slot) {
  const size_t part = op->part_bytes;
  for (int rank = 0; rank < op->segment->ranks; rank++)
    memcpy(slot + (size_t)rank * part, op->send + op->send_starts[rank] + op->round * part,
           left(op, op->send_starts, rank, part));
}

static void collect(allred_operation *op) {
  const size_t part = op->part_bytes, mine = part * (size_t)op->segment->rank;
  for (int rank = 0; rank < op->segment->ranks; rank++)
    memcpy(op->receive + op->receive_starts[rank] + op->round * part, slot_of(op, rank) + mine,
           left(op, op->receive_starts, rank, part));
}

static const allred_transfer alltoall = {deal, NULL, collect};

void allred_begin_alltoall(allred_operation *op, allred_segment *segment, const allred_header *header, const char *send,
                           char *receive, const uint64_t *send_starts, const uint64_t *receive_starts, size_t largest) {
  allred_begin_exchange(op, segment, header);
  op->transfer = &alltoall;
  op->send = send;
  op->receive = receive;
  op->send_starts = send_starts;
  op->receive_starts = receive_starts;
  op->part_bytes = part_for_each(segment);
  op->rounds = rounds_for(largest, op->part_bytes);
}

static void reduce_collected(allred_operation *op) {
  const size_t part = op->part_bytes, mine = part * (size_t)op->segment->rank;
  const void *sources[ALLRED_MAX_RANKS];
  for (int rank = 0; rank < op->segment->ranks; rank++) sources[rank] = slot_of(op, rank) + mine;
  allred_reduce_kernel(op->variant, op->chunk_dtype, op->op)(
      op->receive + op->round * part, sources, op->segment->ranks,
      left(op, op->send_starts, op->segment->rank, part) / allred_dtype_bytes(op->chunk_dtype), op->divisor);
}

static const allred_transfer reducescatter = {deal, NULL, reduce_collected};

void allred_begin_reducescatter(allred_operation *op, allred_segment *segment, const allred_header *header,
                                const char *send, char *receive, const uint64_t *starts, int dtype, int variant,
                                int reduction, int divisor) {
  allred_begin_exchange(op, segment, header);
  op->transfer = &reducescatter;
  op->send = send;
  op->receive = receive;
  op->send_starts = starts;
  op->chunk_dtype = dtype;
  op->variant = variant;
  op->op = reduction;
  op->divisor = divisor;
  op->part_bytes = part_for_each(segment);
  op->rounds = rounds_for(largest_stretch(starts, segment->ranks), op->part_bytes);
}
