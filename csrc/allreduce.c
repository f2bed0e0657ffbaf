/* FILL, REDUCE and DRAIN (operation.h) of an allreduce. */
#include <string.h>

#include "allreduce_in_place.h"
#include "encode.h"
#include "scan.h"

/*
 * allreduce. A chunk holds consecutive tensors, or parts of them, of one dtype: it is the fusion buffer. If this dtype
 * travels as a narrower one, numbers are rounded while they are copied into the chunk, and every rank reduces the
 * rounded numbers, its own too; otherwise ranks would sum different numbers. The results are not rounded again.
 *
 *   one phase   few bytes, or two ranks: every rank reads all chunks, and reduces them for itself
 *   two phases  each rank reduces one part of the chunk for all ranks, in its own chunk; then all copy the parts. This
 *               needs one more wait, and reads fewer bytes
 *
 * Both add in the order of the ranks, so both give the same bits. The results of narrow numbers are wide, and have no
 * room in place: they are written behind the data of the chunk.
 */

/* One phase up to this many bytes of a chunk times ranks. */
#define ONE_PHASE_BYTES 32768
/* The smallest chunk with room for a line of narrow numbers of each rank, and for wide results behind them. */
#define MIN_TWO_PHASE_BYTES (8 * ALLRED_LINE)

/* Return the next piece of memory of a cursor, at most `room` bytes, and advance the cursor. */
static size_t next_piece(const allred_operation *op, allred_cursor *cursor, size_t room, const allred_tensor **tensor,
                         size_t *offset) {
  *tensor = &op->tensors[cursor->tensor];
  *offset = cursor->offset;
  const size_t bytes = allred_smaller(room, (*tensor)->bytes - cursor->offset);
  cursor->offset += bytes;
  if (cursor->offset == (*tensor)->bytes) *cursor = (allred_cursor){cursor->tensor + 1, 0};
  return bytes;
}

/* log2 of the bytes of a tensor per byte that travels. */
static int narrowing(const allred_tensor *tensor) {
  if (!tensor->wire) return 0;
  return tensor->dtype == ALLRED_FLOAT64 ? 2 : 1;
}

static int chunk_narrowing(const allred_operation *op) {
  return narrowing(&(allred_tensor){.dtype = op->chunk_dtype, .wire = op->chunk_wire});
}

/* Return how many data bytes a chunk takes, if wide results may have to fit behind them. */
static size_t room_in(size_t chunk, int ranks, int narrowing, int two_phase) {
  if (!narrowing || !two_phase) return chunk;
  const size_t wide = (size_t)1 << narrowing, whole = chunk - wide * ALLRED_LINE; /* parts are rounded up to lines */
  return whole * (size_t)ranks / ((size_t)ranks + wide) / ALLRED_LINE * ALLRED_LINE;
}

/* Whether the next tensor goes into this chunk. An empty one always does: it does not count in the rounds. */
static int takes_more(const allred_operation *op, size_t room) {
  if (op->filled.tensor == op->tensor_count) return 0;
  const allred_tensor *next = &op->tensors[op->filled.tensor];
  return next->dtype == op->chunk_dtype && next->wire == op->chunk_wire && (room || !next->bytes);
}

/* Copy numbers into the chunk, rounded. With streaming stores, by way of a block in the L1 cache. */
static void narrow(const allred_operation *op, char *chunk, const char *from, size_t count) {
  const allred_narrow kernel = allred_narrow_kernel(op->variant, op->chunk_dtype, op->chunk_wire);
  const size_t item = allred_dtype_bytes(op->chunk_dtype), wire = allred_dtype_bytes(op->chunk_wire);
  char block[4096];
  if (!op->segment->copy_policy.streaming) {
    kernel(chunk, from, count);
    return;
  }
  for (size_t done = 0, part; done < count; done += part) {
    part = allred_smaller(count - done, sizeof block / wire);
    kernel(block, from + done * item, part);
    allred_copy(&op->segment->copy_policy, chunk + done * wire, block, part * wire);
  }
}

/* Copy numbers into the chunk: multiplied by this rank's weight, and rounded to the type that travels. */
static void fill_weighted(const allred_operation *op, char *chunk, const char *from, size_t bytes, int by) {
  const size_t item = allred_dtype_bytes(op->chunk_dtype);
  _Alignas(ALLRED_LINE) char block[ALLRED_BLOCK_BYTES];
  for (size_t at = 0, length; at < bytes; at += length) {
    length = allred_smaller(bytes - at, sizeof block);
    allred_weigh(block, from + at, length, op->chunk_dtype, allred_weight(op, &op->header));
    if (by)
      narrow(op, chunk + (at >> by), block, length / item);
    else
      allred_copy(&op->segment->copy_policy, chunk + at, block, length);
  }
}

static size_t part_of(const allred_operation *op) {
  return allred_round_up((op->data_bytes + (size_t)op->segment->ranks - 1) / (size_t)op->segment->ranks, ALLRED_LINE);
}

void allred_fill_tensors(allred_operation *op, char *chunk) {
  static const allred_tensor none = {.dtype = 0};
  const allred_tensor *tensor = op->filled.tensor < op->tensor_count ? &op->tensors[op->filled.tensor] : &none;
  const int by = narrowing(tensor), two_phase = op->transfer->reduce != NULL;
  const size_t all = room_in(op->segment->chunk_bytes, op->segment->ranks, by, two_phase);
  const uint64_t begun = allred_copy_begin();
  size_t offset, room = all;
  op->chunk_dtype = tensor->dtype;
  op->chunk_wire = tensor->wire;
  while (takes_more(op, room)) {
    const size_t bytes = next_piece(op, &op->filled, room << by, &tensor, &offset);
    if (op->weighted)
      fill_weighted(op, chunk, tensor->in + offset, bytes, by);
    else if (by)
      narrow(op, chunk, tensor->in + offset, bytes / allred_dtype_bytes(op->chunk_dtype));
    else
      allred_copy(&op->segment->copy_policy, chunk, tensor->in + offset, bytes);
    chunk += bytes >> by;
    room -= bytes >> by;
  }
  op->data_bytes = op->chunk_bytes = all - room;
  if (by && two_phase) op->chunk_bytes = allred_round_up(op->data_bytes, ALLRED_LINE) + (part_of(op) << by);
  op->segment->sent += op->data_bytes;
  allred_copy_end(&op->segment->copy_policy, begun, op->data_bytes << by);
}

static allred_reduce kernel_of(const allred_operation *op) {
  if (op->chunk_wire) return allred_wide_kernel(op->variant, op->chunk_wire, op->chunk_dtype, op->op);
  return allred_reduce_kernel(op->variant, op->chunk_dtype, op->op);
}

void allred_write_block(allred_operation *op, const allred_tensor *tensor, char *const *targets, int count,
                        size_t offset, const char *block, size_t bytes) {
  if (op->checks_finite && !allred_all_finite(block, bytes, tensor->dtype, op->variant)) {
    if (!op->nonfinite || tensor->index < op->nonfinite - 1) op->nonfinite = tensor->index + 1;
    return;
  }
  for (int i = 0; i < count; i++)
    if (targets[i] + offset != block) memcpy(targets[i] + offset, block, bytes);
}

/* Write a part of the result to the tensor. */
static void write_checked(allred_operation *op, const allred_tensor *tensor, size_t offset, const char *from,
                          size_t bytes) {
  for (size_t at = 0, length; at < bytes; at += length) {
    length = allred_smaller(bytes - at, ALLRED_BLOCK_BYTES);
    allred_write_block(op, tensor, &tensor->out, 1, offset + at, from + at, length);
  }
}

/* Reduce a part of the tensor, a block at a time. by: as narrowing(). */
static void reduce_checked(allred_operation *op, const allred_tensor *tensor, size_t offset, const void **sources,
                           size_t bytes, int by) {
  const allred_reduce reduce = kernel_of(op);
  _Alignas(ALLRED_LINE) char block[ALLRED_BLOCK_BYTES];
  for (size_t at = 0, length; at < bytes; at += length) {
    length = allred_smaller(bytes - at, ALLRED_BLOCK_BYTES);
    reduce(block, sources, op->segment->ranks, length / allred_dtype_bytes(tensor->dtype), op->divisor);
    allred_write_block(op, tensor, &tensor->out, 1, offset + at, block, length);
    for (int rank = 0; rank < op->segment->ranks; rank++) sources[rank] = (const char *)sources[rank] + (length >> by);
  }
}

/* This rank's own numbers, unless they were changed, are read from its arrays: the same bits, in a nearer cache. */
static void reduce_all(allred_operation *op) {
  const allred_reduce reduce = kernel_of(op);
  const size_t item = allred_dtype_bytes(op->chunk_dtype);
  const int by = chunk_narrowing(op);
  const char *chunks[ALLRED_MAX_RANKS];
  const void *sources[ALLRED_MAX_RANKS];
  const allred_tensor *tensor;
  size_t offset;
  for (int rank = 0; rank < op->segment->ranks; rank++) chunks[rank] = allred_operation_chunk(op, rank);
  for (size_t at = 0, bytes; at < op->data_bytes; at += bytes >> by) {
    bytes = next_piece(op, &op->drained, (op->data_bytes - at) << by, &tensor, &offset);
    for (int rank = 0; rank < op->segment->ranks; rank++) sources[rank] = chunks[rank] + at;
    if (!by && !op->weighted) sources[op->segment->rank] = tensor->in + offset;
    if (op->checks_finite)
      reduce_checked(op, tensor, offset, sources, bytes, by);
    else
      reduce(tensor->out + offset, sources, op->segment->ranks, bytes / item, op->divisor);
  }
}

static int reduce_part(allred_operation *op, char *chunk) {
  const size_t part = part_of(op), start = allred_smaller(part * (size_t)op->segment->rank, op->data_bytes);
  const size_t bytes = allred_smaller(part, op->data_bytes - start);
  const int by = chunk_narrowing(op);
  const void *sources[ALLRED_MAX_RANKS];
  for (int rank = 0; rank < op->segment->ranks; rank++) sources[rank] = allred_operation_chunk(op, rank) + start;
  kernel_of(op)(chunk + (by ? allred_round_up(op->data_bytes, ALLRED_LINE) : start), sources, op->segment->ranks,
                (bytes << by) / allred_dtype_bytes(op->chunk_dtype), op->divisor);
  return ALLRED_DONE;
}

static void copy_parts(allred_operation *op) {
  const size_t part = part_of(op), behind = allred_round_up(op->data_bytes, ALLRED_LINE);
  const int by = chunk_narrowing(op);
  const allred_tensor *tensor;
  size_t offset;
  for (size_t at = 0, bytes; at < op->data_bytes; at += bytes >> by) {
    bytes = next_piece(op, &op->drained, allred_smaller(op->data_bytes - at, part - at % part) << by, &tensor, &offset);
    const char *from = allred_operation_chunk(op, (int)(at / part)) + (by ? behind + (at % part << by) : at);
    if (op->checks_finite)
      write_checked(op, tensor, offset, from, bytes);
    else
      memcpy(tensor->out + offset, from, bytes);
  }
}

/*
 * Across hosts (network.h).
 */

/* The dtype of a tensor's numbers in windows. */
static int window_dtype(const allred_tensor *tensor) {
  return tensor->wire ? ALLRED_FLOAT32 : allred_sum_dtype(tensor->dtype);
}

static void round_doubles(float *to, const double *from, size_t count) {
  for (size_t i = 0; i < count; i++) to[i] = (float)from[i];
}

static void widen_floats(double *to, const float *from, size_t count) {
  for (size_t i = 0; i < count; i++) to[i] = from[i];
}

/* Copy numbers of the chunk's dtype to a window of float32: multiplied by this rank's weight, and converted. */
static void fill_converted(const allred_operation *op, char *to, const char *from, size_t count) {
  const size_t item = allred_dtype_bytes(op->chunk_dtype);
  _Alignas(ALLRED_LINE) char block[ALLRED_BLOCK_BYTES];
  for (size_t at = 0, length; at < count; at += length, to += length * sizeof(float)) {
    length = allred_smaller(count - at, sizeof block / item);
    if (op->weighted)
      allred_weigh(block, from + at * item, length * item, op->chunk_dtype, allred_weight(op, &op->header));
    else
      memcpy(block, from + at * item, length * item);
    const void *numbers = block;
    if (op->chunk_dtype == ALLRED_FLOAT64)
      round_doubles((float *)(void *)to, numbers, length);
    else
      allred_wide_kernel(op->variant, op->chunk_dtype, ALLRED_FLOAT32, ALLRED_SUM)(to, &numbers, 1, length, 1);
  }
}

allred_window allred_fill_window(allred_operation *op, char *to, size_t room) {
  const allred_tensor *tensor = &op->tensors[op->filled.tensor];
  const allred_window window = {.dtype = window_dtype(tensor), .wire = tensor->wire, .first = op->filled};
  const size_t all = room, item = allred_dtype_bytes(tensor->dtype), out_item = allred_dtype_bytes(window.dtype);
  size_t offset;
  op->chunk_dtype = tensor->dtype;
  op->chunk_wire = tensor->wire;
  while (takes_more(op, room)) {
    const size_t count = next_piece(op, &op->filled, room / out_item * item, &tensor, &offset) / item;
    const char *from = tensor->in + offset;
    if (window.dtype != tensor->dtype)
      fill_converted(op, to, from, count);
    else if (op->weighted)
      allred_weigh(to, from, count * item, tensor->dtype, allred_weight(op, &op->header));
    else
      memcpy(to, from, count * item);
    to += count * out_item;
    room -= count * out_item;
  }
  return (allred_window){all - room, window.dtype, window.wire, window.first, 0};
}

/* Convert sums in a window of float32 to the dtype of the tensor. */
static void write_converted(allred_operation *op, const allred_tensor *tensor, size_t offset, const char *from,
                            size_t count) {
  const size_t item = allred_dtype_bytes(tensor->dtype);
  _Alignas(ALLRED_LINE) char block[ALLRED_BLOCK_BYTES];
  for (size_t at = 0, length; at < count; at += length, from += length * sizeof(float)) {
    length = allred_smaller(count - at, sizeof block / item);
    if (tensor->dtype == ALLRED_FLOAT64)
      widen_floats((double *)(void *)block, (const float *)(const void *)from, length);
    else
      allred_narrow_kernel(op->variant, ALLRED_FLOAT32, tensor->dtype)(block, from, length);
    allred_write_block(op, tensor, &tensor->out, 1, offset + at * item, block, length * item);
  }
}

void allred_drain_window(allred_operation *op, const char *const *slices, size_t part, allred_window window) {
  const size_t from_item = allred_dtype_bytes(window.dtype);
  const allred_tensor *tensor;
  size_t offset;
  for (size_t at = 0, bytes; at < window.bytes; at += bytes) {
    const size_t item = allred_dtype_bytes(op->tensors[op->drained.tensor].dtype);
    const size_t room = allred_smaller(window.bytes - at, part - at % part) / from_item * item;
    const char *from = slices[at / part] + at;
    bytes = next_piece(op, &op->drained, room, &tensor, &offset);
    if (tensor->dtype == window.dtype)
      write_checked(op, tensor, offset, from, bytes);
    else
      write_converted(op, tensor, offset, from, bytes / item);
    bytes = bytes / item * from_item;
  }
}

static const allred_transfer one_phase = {.fill = allred_fill_tensors, .drain = reduce_all};
static const allred_transfer two_phases = {.fill = allred_fill_tensors, .reduce = reduce_part, .drain = copy_parts};

void allred_begin_ring(allred_operation *op) {
  const allred_segment *segment = op->segment;
  const allred_tensor *tensors = op->tensors;
  const size_t count = op->tensor_count;
  size_t bytes = 0; /* on the wire */
  int narrows = 0;
  for (size_t i = 0; i < count; i++) {
    bytes += tensors[i].bytes >> narrowing(&tensors[i]);
    narrows |= tensors[i].wire;
  }
  const int small = segment->ranks == 2 || bytes * (size_t)segment->ranks <= ONE_PHASE_BYTES;
  op->transfer = small || (narrows && segment->chunk_bytes < MIN_TWO_PHASE_BYTES) ? &one_phase : &two_phases;
  const int two_phase = op->transfer->reduce != NULL;
  op->rounds = 0;
  for (size_t i = 0, run = 0; i < count; i++) {
    const int by = narrowing(&tensors[i]);
    run += tensors[i].bytes >> by;
    if (i + 1 < count && tensors[i + 1].dtype == tensors[i].dtype && tensors[i + 1].wire == tensors[i].wire) continue;
    op->rounds += allred_rounds(run, room_in(segment->chunk_bytes, segment->ranks, by, two_phase));
    run = 0;
  }
  if (op->rounds == 0) op->rounds = 1;
  op->is_inline = op->rounds == 1 && bytes <= ALLRED_INLINE_BYTES && !(narrows && two_phase);
}

/* Round 0 has passed unweighted data, which no rank reads: begin again with the first tensor, weighted. */
static void repeat_weighted(allred_operation *op) {
  op->transfer = op->ring;
  op->filled = (allred_cursor){0, 0};
  op->segment->sent -= op->data_bytes;
  op->is_inline = 0;
  op->rounds++;
}

void allred_count_samples(allred_operation *op) {
  static const allred_transfer discarded_round = {.next = repeat_weighted};
  int differ = 0;
  const allred_header *header;
  uint64_t ranks;
  for (int run = 0; (header = allred_header_run(op->segment, op->number, run, &ranks)); run++) {
    op->samples += ranks * header->note;
    differ |= header->note != op->header.note;
  }
  if (!differ || op->op != ALLRED_AVERAGE) return;
  op->weighted = 1;
  if (op->transfer->fill != allred_fill_tensors) return; /* round 0 has only headers, or locations */
  op->ring = op->transfer;
  op->transfer = &discarded_round;
}

void allred_begin_allreduce(allred_operation *op, allred_segment *segment, const allred_header *header,
                            allred_tensor *tensors, size_t count, int variant, int reduction, int divisor) {
  allred_begin_exchange(op, segment, header);
  op->tensors = tensors;
  op->tensor_count = count;
  op->variant = variant;
  op->op = reduction;
  op->divisor = divisor;
  op->weighted = header->op & ALLRED_WEIGHTED;
  if (segment->across)
    segment->across->begin(op);
  else if (!allred_begin_in_place(op))
    allred_begin_ring(op);
}
