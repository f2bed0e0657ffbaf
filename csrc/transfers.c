/* What each kind of operation does in the rounds of operation.h. */
#include <string.h>

#include "operation.h"

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static size_t round_up(size_t bytes) { return (bytes + ALLRED_LINE - 1) / ALLRED_LINE * ALLRED_LINE; }

static uint64_t rounds_for(size_t bytes, size_t chunk) { return bytes ? (bytes + chunk - 1) / chunk : 1; }

/*
 * allreduce. A chunk holds consecutive tensors, or parts of them, of one dtype: the fusion buffer is one chunk long.
 *
 * Few bytes, or two ranks: every rank reads all chunks and reduces for itself. More: each reduces one part of the chunk
 * for all, in place in its chunk, and everyone copies the parts; that is one meeting more, and less to read.
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

/* Whether more of the tensors goes into this chunk. An empty one always does: it is not counted in the rounds. */
static int takes_more(const allred_operation *op, size_t room) {
  if (op->filled.tensor == op->tensor_count) return 0;
  const allred_tensor *next = &op->tensors[op->filled.tensor];
  return next->dtype == op->chunk_dtype && (room || !next->bytes);
}

static void gather(allred_operation *op, char *chunk) {
  const allred_tensor *tensor;
  size_t offset, room = op->segment->chunk_bytes;
  const uint64_t begun = allred_copy_begin();
  op->chunk_dtype = op->filled.tensor < op->tensor_count ? op->tensors[op->filled.tensor].dtype : 0;
  while (takes_more(op, room)) {
    const size_t bytes = stretch(op, &op->filled, room, &tensor, &offset);
    allred_copy(&op->segment->pace, chunk, tensor->in + offset, bytes);
    chunk += bytes;
    room -= bytes;
  }
  op->chunk_bytes = op->segment->chunk_bytes - room;
  allred_copy_end(&op->segment->pace, begun, op->chunk_bytes);
}

/* This rank's own numbers are read where they come from: the same bits as in its chunk, and in a nearer cache. */
static void reduce_all(allred_operation *op) {
  const allred_reduce reduce = allred_reduce_kernel(op->variant, op->chunk_dtype, op->op);
  const size_t item = allred_dtype_bytes(op->chunk_dtype);
  const char *chunks[ALLRED_MAX_RANKS];
  const void *sources[ALLRED_MAX_RANKS];
  const allred_tensor *tensor;
  size_t offset;
  for (int rank = 0; rank < op->segment->ranks; rank++) chunks[rank] = allred_operation_chunk(op, rank);
  for (size_t at = 0, bytes; at < op->chunk_bytes; at += bytes) {
    bytes = stretch(op, &op->drained, op->chunk_bytes - at, &tensor, &offset);
    for (int rank = 0; rank < op->segment->ranks; rank++) sources[rank] = chunks[rank] + at;
    sources[op->segment->rank] = tensor->in + offset;
    reduce(tensor->out + offset, sources, op->segment->ranks, bytes / item, op->divisor);
  }
}

static size_t part_of(const allred_operation *op) {
  return round_up((op->chunk_bytes + (size_t)op->segment->ranks - 1) / (size_t)op->segment->ranks);
}

static void reduce_part(allred_operation *op, char *chunk) {
  const size_t part = part_of(op), start = smaller(part * (size_t)op->segment->rank, op->chunk_bytes);
  const size_t bytes = smaller(part, op->chunk_bytes - start);
  const void *sources[ALLRED_MAX_RANKS];
  for (int rank = 0; rank < op->segment->ranks; rank++) sources[rank] = allred_operation_chunk(op, rank) + start;
  allred_reduce_kernel(op->variant, op->chunk_dtype, op->op)(chunk + start, sources, op->segment->ranks,
                                                             bytes / allred_dtype_bytes(op->chunk_dtype), op->divisor);
}

static void scatter_parts(allred_operation *op) {
  const size_t part = part_of(op);
  const allred_tensor *tensor;
  size_t offset;
  for (size_t at = 0, bytes; at < op->chunk_bytes; at += bytes) {
    bytes = stretch(op, &op->drained, smaller(op->chunk_bytes - at, part - at % part), &tensor, &offset);
    memcpy(tensor->out + offset, allred_operation_chunk(op, (int)(at / part)) + at, bytes);
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
    op->rounds += rounds_for(run, segment->chunk_bytes);
    run = 0;
  }
  if (op->rounds == 0) op->rounds = 1;
  op->on_card = op->rounds == 1 && bytes <= ALLRED_CARD_BYTES;
  op->transfer = segment->ranks == 2 || bytes * (size_t)segment->ranks <= DIRECT_BYTES ? &direct : &shared_out;
}

/*
 * allgather: each rank's chunk is the next one of what it gives, and all read it. A broadcast is an allgather to
 * which one rank alone gives something.
 */

/* What this round moves of a rank's stretch of memory, if `part` bytes of it pass in a round. */
static size_t left(const allred_operation *op, const uint64_t *starts, int rank, size_t part) {
  const size_t bytes = starts[rank + 1] - starts[rank], passed = op->round * part;
  return passed < bytes ? smaller(bytes - passed, part) : 0;
}

static size_t largest_stretch(const uint64_t *starts, int ranks) {
  size_t largest = 0;
  for (int rank = 0; rank < ranks; rank++)
    if (starts[rank + 1] - starts[rank] > largest) largest = starts[rank + 1] - starts[rank];
  return largest;
}

static void give(allred_operation *op, char *chunk) {
  const size_t part = op->part_bytes, bytes = left(op, op->receive_starts, op->segment->rank, part);
  const uint64_t begun = allred_copy_begin();
  allred_copy(&op->segment->pace, chunk, op->send + op->round * part, bytes);
  allred_copy_end(&op->segment->pace, begun, bytes);
}

static void take_all(allred_operation *op) {
  const size_t part = op->part_bytes, passed = op->round * part;
  for (int rank = 0; rank < op->segment->ranks; rank++) {
    char *to = op->receive + op->receive_starts[rank] + passed;
    if (rank == op->segment->rank && to == op->send + passed) continue; /* in place */
    memcpy(to, allred_operation_chunk(op, rank), left(op, op->receive_starts, rank, part));
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
  const size_t largest = largest_stretch(starts, segment->ranks);
  op->part_bytes = op->chunk_bytes = smaller(largest, segment->chunk_bytes);
  op->rounds = rounds_for(largest, segment->chunk_bytes);
  op->on_card = op->rounds == 1 && largest <= ALLRED_CARD_BYTES;
}

/*
 * alltoall and reducescatter: a chunk has a part for each rank. It reads its part of all chunks, and puts them one
 * behind the other, or reduces them.
 */

static void deal(allred_operation *op, char *chunk) {
  const size_t part = op->part_bytes;
  const uint64_t begun = allred_copy_begin();
  size_t all = 0;
  for (int rank = 0; rank < op->segment->ranks; rank++) {
    const size_t bytes = left(op, op->send_starts, rank, part);
    const char *from = op->send + op->send_starts[rank] + op->round * part;
    allred_copy(&op->segment->pace, chunk + (size_t)rank * part, from, bytes);
    all += bytes;
  }
  allred_copy_end(&op->segment->pace, begun, all);
}

static void collect(allred_operation *op) {
  const size_t part = op->part_bytes, mine = part * (size_t)op->segment->rank;
  for (int rank = 0; rank < op->segment->ranks; rank++)
    memcpy(op->receive + op->receive_starts[rank] + op->round * part, allred_operation_chunk(op, rank) + mine,
           left(op, op->receive_starts, rank, part));
}

static void begin_dealt(allred_operation *op, allred_segment *segment, const allred_header *header,
                        const allred_transfer *transfer, const char *send, char *receive, const uint64_t *send_starts,
                        size_t largest) {
  allred_begin_exchange(op, segment, header);
  op->transfer = transfer;
  op->send = send;
  op->receive = receive;
  op->send_starts = send_starts;
  op->chunk_bytes = segment->chunk_bytes;
  op->part_bytes = segment->chunk_bytes / (size_t)segment->ranks / ALLRED_LINE * ALLRED_LINE;
  op->on_card = 0;
  op->rounds = rounds_for(largest, op->part_bytes);
}

static const allred_transfer alltoall = {deal, NULL, collect};

void allred_begin_alltoall(allred_operation *op, allred_segment *segment, const allred_header *header, const char *send,
                           char *receive, const uint64_t *send_starts, const uint64_t *receive_starts, size_t largest) {
  begin_dealt(op, segment, header, &alltoall, send, receive, send_starts, largest);
  op->receive_starts = receive_starts;
}

static void reduce_collected(allred_operation *op) {
  const size_t part = op->part_bytes, mine = part * (size_t)op->segment->rank;
  const void *sources[ALLRED_MAX_RANKS];
  for (int rank = 0; rank < op->segment->ranks; rank++) sources[rank] = allred_operation_chunk(op, rank) + mine;
  allred_reduce_kernel(op->variant, op->chunk_dtype, op->op)(
      op->receive + op->round * part, sources, op->segment->ranks,
      left(op, op->send_starts, op->segment->rank, part) / allred_dtype_bytes(op->chunk_dtype), op->divisor);
}

static const allred_transfer reducescatter = {deal, NULL, reduce_collected};

void allred_begin_reducescatter(allred_operation *op, allred_segment *segment, const allred_header *header,
                                const char *send, char *receive, const uint64_t *starts, int dtype, int variant,
                                int reduction, int divisor) {
  begin_dealt(op, segment, header, &reducescatter, send, receive, starts, largest_stretch(starts, segment->ranks));
  op->chunk_dtype = dtype;
  op->variant = variant;
  op->op = reduction;
  op->divisor = divisor;
}
