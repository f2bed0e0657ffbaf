/*
 * FILL, REDUCE and DRAIN (operation.h) of allgather, broadcast, alltoall and reducescatter.
 *
 * Large data of an allgather, broadcast or reducescatter may lie in arenas, which all ranks map (segment.h). Then it
 * does not pass through the ring. Round 0 of such an operation:
 *
 *   1  FILL          write the location of this rank's data in its arena, or that it does not lie there
 *   2                publish it with the header
 *   3  WAIT_FILLED   wait until every rank has published; compare the headers. If they differ, nothing was written
 *   4                if the data of any rank does not lie in its arena, go to 7
 *   5  REDUCE        read the data of all ranks from their arenas into the array of this rank; publish this as tick 1
 *   6  WAIT_REDUCED  wait until every rank has published: no rank reads the data of this rank any more
 *   7  DRAIN         if 4 said so, plan the following rounds, in which the data passes through the ring
 *
 * Why no rank writes memory that another reads: data is read between 3 and 6, and in these steps a rank writes only to
 * its own result. A result that overlaps the data of its rank, except for the part that it copies from there, has no
 * location. If an operation is given up, another rank may still read the data; so the caller freezes the arena
 * (arena.h).
 */
#include <string.h>

#include "operation.h"

#define CACHED_BYTES ((size_t)1 << 24) /* larger results are copied past the caches */

/* The bytes before this round of each part that passes through the ring. */
static size_t passed(const allred_operation *op) { return (op->round - op->first_round) * op->part_bytes; }

/*
 * Data in arenas.
 */

static int is_reduction(const allred_operation *op) { return op->send_starts != NULL; }

/* Return the bytes of the data of a rank. */
static size_t data_bytes(const allred_operation *op, int rank) {
  if (is_reduction(op)) return op->send_starts[op->segment->ranks];
  return op->receive_starts[rank + 1] - op->receive_starts[rank];
}

static size_t result_bytes(const allred_operation *op) {
  const int rank = op->segment->rank;
  if (is_reduction(op)) return op->send_starts[rank + 1] - op->send_starts[rank];
  return op->receive_starts[op->segment->ranks];
}

/* Whether this rank writes to its data while other ranks read it. */
static int overwrites_data(const allred_operation *op) {
  const int rank = op->segment->rank;
  const uintptr_t data = (uintptr_t)op->send, result = (uintptr_t)op->receive;
  if (!is_reduction(op) && op->send == op->receive + op->receive_starts[rank]) return 0;
  return data < result + result_bytes(op) && result < data + data_bytes(op, rank);
}

/* A location is an offset in the arena of its rank, plus 1; 0: the data does not lie in it. */
static uint64_t *location_of(const allred_operation *op, int rank) {
  return (uint64_t *)(void *)allred_operation_chunk(op, rank);
}

static void fill_location(allred_operation *op, char *chunk) {
  const size_t bytes = data_bytes(op, op->segment->rank);
  *(uint64_t *)(void *)chunk = overwrites_data(op) ? 0 : allred_arena_offset(op->segment, op->send, bytes);
}

/* Return the data of a rank in its arena. */
static const char *data_of(const allred_operation *op, int rank) {
  return op->segment->arenas.base[rank] + *location_of(op, rank) - 1;
}

/* Copy the next piece of the data of all ranks. The cursor counts ranks. */
static int copy_piece(allred_operation *op, char *chunk) {
  const int rank = (int)op->slice.tensor;
  const size_t rest = data_bytes(op, rank) - op->slice.offset, bytes = allred_smaller(rest, ALLRED_PIECE_BYTES);
  char *to = op->receive + op->receive_starts[rank];
  if (bytes && (rank != op->segment->rank || to != op->send)) {
    const char *from = data_of(op, rank);
    if (result_bytes(op) > CACHED_BYTES)
      allred_copy_streaming(to + op->slice.offset, from + op->slice.offset, bytes);
    else
      memcpy(to + op->slice.offset, from + op->slice.offset, bytes);
    op->segment->read_in_place += bytes;
  }
  op->slice.offset += bytes;
  if (bytes == rest) op->slice = (allred_cursor){op->slice.tensor + 1, 0};
  return op->slice.tensor == (size_t)op->segment->ranks ? ALLRED_DONE : ALLRED_PROGRESSED;
}

/* Reduce the next piece of the part of this rank. */
static int reduce_piece(allred_operation *op, char *chunk) {
  const size_t all = result_bytes(op), at = op->slice.offset, bytes = allred_smaller(all - at, ALLRED_PIECE_BYTES);
  const void *sources[ALLRED_MAX_RANKS];
  for (int rank = 0; rank < op->segment->ranks; rank++)
    sources[rank] = data_of(op, rank) + op->send_starts[op->segment->rank] + at;
  allred_reduce_kernel(op->variant, op->chunk_dtype, op->op)(op->receive + at, sources, op->segment->ranks,
                                                             bytes / allred_dtype_bytes(op->chunk_dtype), op->divisor);
  op->segment->read_in_place += bytes * (size_t)op->segment->ranks;
  op->slice.offset += bytes;
  return op->slice.offset == all ? ALLRED_DONE : ALLRED_PROGRESSED;
}

static void begin_rounds(allred_operation *op) {
  op->transfer = op->ring;
  op->rounds = 1 + op->ring_rounds;
  op->first_round = 1;
  op->is_inline = 0;
}

/* Unless the data of all ranks lies in their arenas, it passes through the ring in the rounds after this one. */
static void read_locations(allred_operation *op) {
  static const allred_transfer only_location = {.next = begin_rounds};
  for (int rank = 0; rank < op->segment->ranks; rank++)
    if (data_bytes(op, rank) && !*location_of(op, rank)) op->transfer = &only_location;
}

/* If there are arenas, let an operation that is prepared for the ring begin with locations. bytes: of one rank. */
static void begin_with_locations(allred_operation *op, size_t bytes) {
  static const allred_transfer copying = {.fill = fill_location, .agreed = read_locations, .reduce = copy_piece},
                               reducing = {.fill = fill_location, .agreed = read_locations, .reduce = reduce_piece};
  if (!op->segment->arenas.base || bytes < op->segment->arenas.min_tensor_bytes) return;
  op->ring = op->transfer, op->ring_rounds = op->rounds;
  op->transfer = is_reduction(op) ? &reducing : &copying;
  op->rounds = op->is_inline = 1;
}

/*
 * allgather: a rank's chunk is the next part of its data; all ranks read it. In a broadcast only one rank has data.
 */

/* Return the bytes of this round between starts[rank] and starts[rank + 1]. */
static size_t round_bytes(const allred_operation *op, const uint64_t *starts, int rank) {
  const size_t bytes = starts[rank + 1] - starts[rank];
  return passed(op) < bytes ? allred_smaller(bytes - passed(op), op->part_bytes) : 0;
}

static size_t largest_part(const uint64_t *starts, int ranks) {
  size_t largest = 0;
  for (int rank = 0; rank < ranks; rank++)
    if (starts[rank + 1] - starts[rank] > largest) largest = starts[rank + 1] - starts[rank];
  return largest;
}

static void fill_own(allred_operation *op, char *chunk) {
  const size_t bytes = round_bytes(op, op->receive_starts, op->segment->rank);
  const uint64_t begun = allred_copy_begin();
  allred_copy(&op->segment->copy_policy, chunk, op->send + passed(op), bytes);
  allred_copy_end(&op->segment->copy_policy, begun, bytes);
}

static void read_all(allred_operation *op) {
  for (int rank = 0; rank < op->segment->ranks; rank++) {
    char *to = op->receive + op->receive_starts[rank] + passed(op);
    if (rank == op->segment->rank && to == op->send + passed(op)) continue; /* in place */
    memcpy(to, allred_operation_chunk(op, rank), round_bytes(op, op->receive_starts, rank));
  }
}

static const allred_transfer allgather = {.fill = fill_own, .drain = read_all};

void allred_begin_allgather(allred_operation *op, allred_segment *segment, const allred_header *header,
                            const char *send, char *receive, const uint64_t *starts) {
  allred_begin_exchange(op, segment, header);
  op->transfer = &allgather;
  op->send = send;
  op->receive = receive;
  op->receive_starts = starts;
  if (segment->across) {
    segment->across->begin(op);
    return;
  }
  const size_t largest = largest_part(starts, segment->ranks);
  op->part_bytes = op->chunk_bytes = allred_smaller(largest, segment->chunk_bytes);
  op->rounds = allred_rounds(largest, segment->chunk_bytes);
  op->is_inline = op->rounds == 1 && largest <= ALLRED_INLINE_BYTES;
  begin_with_locations(op, largest);
}

/*
 * alltoall and reducescatter: a chunk has a part for each rank. A rank concatenates or reduces its part of all chunks.
 */

static void fill_parts(allred_operation *op, char *chunk) {
  const size_t part = op->part_bytes;
  const uint64_t begun = allred_copy_begin();
  size_t all = 0;
  for (int rank = 0; rank < op->segment->ranks; rank++) {
    const size_t bytes = round_bytes(op, op->send_starts, rank);
    const char *from = op->send + op->send_starts[rank] + passed(op);
    allred_copy(&op->segment->copy_policy, chunk + (size_t)rank * part, from, bytes);
    all += bytes;
  }
  allred_copy_end(&op->segment->copy_policy, begun, all);
}

static void read_parts(allred_operation *op) {
  const size_t part = op->part_bytes, mine = part * (size_t)op->segment->rank;
  for (int rank = 0; rank < op->segment->ranks; rank++)
    memcpy(op->receive + op->receive_starts[rank] + passed(op), allred_operation_chunk(op, rank) + mine,
           round_bytes(op, op->receive_starts, rank));
}

static void begin_parts(allred_operation *op, allred_segment *segment, const allred_header *header,
                        const allred_transfer *transfer, const char *send, char *receive, const uint64_t *send_starts,
                        size_t largest) {
  allred_begin_exchange(op, segment, header);
  op->transfer = transfer;
  op->send = send;
  op->receive = receive;
  op->send_starts = send_starts;
  op->chunk_bytes = segment->chunk_bytes;
  op->part_bytes = segment->chunk_bytes / (size_t)segment->ranks / ALLRED_LINE * ALLRED_LINE;
  op->is_inline = 0;
  op->rounds = allred_rounds(largest, op->part_bytes);
}

static const allred_transfer alltoall = {.fill = fill_parts, .drain = read_parts};

void allred_begin_alltoall(allred_operation *op, allred_segment *segment, const allred_header *header, const char *send,
                           char *receive, const uint64_t *send_starts, const uint64_t *receive_starts, size_t largest) {
  begin_parts(op, segment, header, &alltoall, send, receive, send_starts, largest);
  op->receive_starts = receive_starts;
}

static void reduce_parts(allred_operation *op) {
  const size_t part = op->part_bytes, mine = part * (size_t)op->segment->rank;
  const void *sources[ALLRED_MAX_RANKS];
  for (int rank = 0; rank < op->segment->ranks; rank++) sources[rank] = allred_operation_chunk(op, rank) + mine;
  allred_reduce_kernel(op->variant, op->chunk_dtype, op->op)(
      op->receive + passed(op), sources, op->segment->ranks,
      round_bytes(op, op->send_starts, op->segment->rank) / allred_dtype_bytes(op->chunk_dtype), op->divisor);
}

static const allred_transfer reducescatter = {.fill = fill_parts, .drain = reduce_parts};

void allred_begin_reducescatter(allred_operation *op, allred_segment *segment, const allred_header *header,
                                const char *send, char *receive, const uint64_t *starts, int dtype, int variant,
                                int reduction, int divisor) {
  begin_parts(op, segment, header, &reducescatter, send, receive, starts, largest_part(starts, segment->ranks));
  op->chunk_dtype = dtype;
  op->variant = variant;
  op->op = reduction;
  op->divisor = divisor;
  if (segment->across)
    segment->across->begin(op);
  else
    begin_with_locations(op, starts[segment->ranks]);
}
