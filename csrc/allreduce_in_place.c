#include "allreduce_in_place.h"

#include <string.h>

/* Offsets in the arena of a rank, plus 1; 0: the array does not lie in it. */
typedef struct {
  uint64_t in, out;
} location;

#define NO_LOCATION UINT32_MAX

static uint64_t lines_of(size_t bytes) { return (bytes + ALLRED_LINE - 1) / ALLRED_LINE; }

static const location *location_of(const allred_operation *op, int rank, const allred_tensor *tensor) {
  return (const location *)(const void *)allred_operation_chunk(op, rank) + tensor->location;
}

static void fill_locations(allred_operation *op, char *chunk) {
  location *locations = (location *)(void *)chunk;
  for (size_t i = 0; i < op->tensor_count; i++) {
    const allred_tensor *tensor = &op->tensors[i];
    if (tensor->location != NO_LOCATION)
      locations[tensor->location] = (location){allred_arena_offset(op->segment, tensor->in, tensor->bytes),
                                               allred_arena_offset(op->segment, tensor->out, tensor->bytes)};
  }
}

/* Whether the tensor lies in the arena of every rank. */
static int is_shared(const allred_operation *op, const allred_tensor *tensor) {
  int shared = tensor->location != NO_LOCATION;
  for (int rank = 0; rank < op->segment->ranks && shared; rank++) {
    const location *location = location_of(op, rank, tensor);
    shared = location->in && location->out;
  }
  return shared;
}

/* Count a tensor that lies in the arena of this rank, but not in that of another. */
static void count_outside(const allred_operation *op, const allred_tensor *tensor) {
  const allred_segment *segment = op->segment;
  if (!segment->outside || tensor->location == NO_LOCATION) return;
  const location *mine = location_of(op, segment->rank, tensor);
  for (int rank = 0; rank < segment->ranks && mine->in && mine->out; rank++) {
    const location *location = location_of(op, rank, tensor);
    if (location->in && location->out) continue;
    segment->outside[rank][0]++;
    segment->outside[rank][1] += tensor->bytes;
    return;
  }
}

/* Set the cursor to a line of the tensors that are reduced in place. */
static void seek(allred_operation *op, uint64_t line) {
  op->slice = (allred_cursor){op->tensor_count, 0};
  while (line >= lines_of(op->tensors[op->slice.tensor].bytes)) line -= lines_of(op->tensors[op->slice.tensor++].bytes);
  op->slice.offset = line * ALLRED_LINE;
}

static double weight_of(const allred_operation *op, int rank) {
  return allred_weight(op, allred_segment_header(op->segment, rank, op->number));
}

/* Multiply the numbers of each rank by its weight, and reduce them: as the kernel does, in the order of the ranks. */
static void reduce_weighted(const allred_operation *op, int dtype, char *block, const void *const *sources,
                            size_t bytes) {
  const int ranks = op->segment->ranks;
  const size_t count = bytes / allred_dtype_bytes(dtype);
  const allred_reduce add = allred_reduce_kernel(op->variant, dtype, ALLRED_SUM),
                      last = allred_reduce_kernel(op->variant, dtype, op->op);
  _Alignas(ALLRED_LINE) char product[ALLRED_BLOCK_BYTES];
  const void *const pair[] = {block, product};
  allred_weigh(block, sources[0], bytes, dtype, weight_of(op, 0));
  if (ranks == 1) last(block, pair, 1, count, op->divisor);
  for (int rank = 1; rank < ranks; rank++) {
    allred_weigh(product, sources[rank], bytes, dtype, weight_of(op, rank));
    (rank < ranks - 1 ? add : last)(block, pair, 2, count, op->divisor);
  }
}

/* Reduce the next piece of this rank's slice from the memory of all ranks into the memory of all ranks. */
static void reduce_piece(allred_operation *op) {
  const allred_tensor *tensor = &op->tensors[op->slice.tensor];
  const allred_reduce reduce = allred_reduce_kernel(op->variant, tensor->dtype, op->op);
  const int ranks = op->segment->ranks;
  const size_t item = allred_dtype_bytes(tensor->dtype), rest = tensor->bytes - op->slice.offset;
  const size_t bytes = allred_smaller(allred_smaller(rest, ALLRED_PIECE_BYTES), op->slice_lines * ALLRED_LINE);
  _Alignas(ALLRED_LINE) char block[ALLRED_BLOCK_BYTES];
  const void *sources[ALLRED_MAX_RANKS];
  char *targets[ALLRED_MAX_RANKS];
  for (int rank = 0; rank < ranks; rank++) {
    char *start = op->segment->arenas.base[rank] + op->slice.offset;
    const location *location = location_of(op, rank, tensor);
    sources[rank] = start + location->in - 1;
    targets[rank] = start + location->out - 1;
  }
  for (size_t at = 0, length; at < bytes; at += length) {
    length = allred_smaller(bytes - at, ALLRED_BLOCK_BYTES);
    char *result = op->weighted || op->checks_finite ? block : targets[op->segment->rank] + at;
    if (op->weighted)
      reduce_weighted(op, tensor->dtype, result, sources, length);
    else
      reduce(result, sources, ranks, length / item, op->divisor);
    allred_write_block(op, tensor, targets, ranks, at, result, length);
    for (int rank = 0; rank < ranks; rank++) sources[rank] = (const char *)sources[rank] + length;
  }
  op->slice_lines -= lines_of(bytes);
  op->slice = bytes == rest ? (allred_cursor){op->slice.tensor + 1, 0}
                            : (allred_cursor){op->slice.tensor, op->slice.offset + bytes};
}

static int reduce_slice(allred_operation *op, char *chunk) {
  if (op->slice_lines) reduce_piece(op);
  *allred_segment_result(op->segment, op->segment->rank, op->number) = op->nonfinite;
  return op->slice_lines ? ALLRED_PROGRESSED : ALLRED_DONE;
}

/* Every rank has found what is not finite in its slice. */
static void combine_results(allred_operation *op) {
  for (int rank = 0; rank < op->segment->ranks; rank++) {
    const uint32_t found = (uint32_t)*allred_segment_result(op->segment, rank, op->number);
    if (found && (!op->nonfinite || found < op->nonfinite)) op->nonfinite = found;
  }
}

/* The locations were read. The other tensors pass through the ring in the rounds after this one. */
static void end_locations(allred_operation *op) {
  op->rounds = 0;
  if (op->tensor_count) allred_begin_ring(op);
  op->rounds++;
  op->is_inline = 0;
}

static const allred_transfer only_locations = {.next = end_locations};

/* Move the tensors that lie in the arenas of all ranks behind the others, and find this rank's slice of them. */
static void split(allred_operation *op) {
  const uint64_t rank = (uint64_t)op->segment->rank, ranks = (uint64_t)op->segment->ranks;
  const size_t all = op->tensor_count;
  uint64_t lines = 0;
  op->tensor_count = 0;
  for (size_t i = 0; i < all; i++) {
    const allred_tensor tensor = op->tensors[i];
    if (is_shared(op, &tensor)) {
      lines += lines_of(tensor.bytes);
      op->segment->in_place += tensor.bytes;
    } else {
      count_outside(op, &tensor);
      op->tensors[i] = op->tensors[op->tensor_count];
      op->tensors[op->tensor_count++] = tensor;
    }
  }
  if (op->tensor_count == all) {
    op->transfer = &only_locations;
    return;
  }
  const uint64_t start = lines * rank / ranks;
  op->slice_lines = lines * (rank + 1) / ranks - start;
  if (op->slice_lines) seek(op, start);
}

static const allred_transfer locations_and_slices = {
    .fill = fill_locations, .agreed = split, .reduce = reduce_slice, .drain = combine_results, .next = end_locations};

int allred_begin_in_place(allred_operation *op) {
  uint32_t locations = 0;
  if (!op->segment->arenas.base) return 0;
  for (size_t i = 0; i < op->tensor_count; i++) {
    allred_tensor *tensor = &op->tensors[i];
    const int has_location = !tensor->wire && tensor->bytes >= op->segment->arenas.min_tensor_bytes &&
                             (locations + 1) * sizeof(location) <= op->segment->chunk_bytes;
    tensor->location = has_location ? locations++ : NO_LOCATION;
  }
  op->transfer = &locations_and_slices;
  op->rounds = 1;
  op->chunk_bytes = locations * sizeof(location);
  op->is_inline = op->chunk_bytes <= ALLRED_INLINE_BYTES;
  return locations > 0;
}
