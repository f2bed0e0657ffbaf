/* The windows of a large allreduce across hosts (network.h). */
#include <stdatomic.h>
#include <string.h>

#include "network.h"

#define SENT_AT_ONCE ((size_t)1 << 18)

typedef struct {
  _Alignas(ALLRED_LINE) _Atomic uint64_t filled;
  _Alignas(ALLRED_LINE) _Atomic uint64_t crossed;
  _Alignas(ALLRED_LINE) _Atomic uint64_t drained;
} counters;

static allred_network *network_of(const allred_operation *op) { return op->segment->network; }

/* ---- shared memory */

static char *area(const allred_operation *op, int rank) {
  const allred_network *network = network_of(op);
  const size_t all =
      allred_network_bytes(op->segment->ranks, network->first_rank[network->hosts], network->window_bytes);
  const size_t each = ALLRED_WINDOWS * network->window_bytes + 4096;
  return network->memory + all - (size_t)(op->segment->ranks - rank) * each;
}

static counters *counters_of(const allred_operation *op, int rank) { return (counters *)(void *)area(op, rank); }

static counters *own_counters(const allred_operation *op) { return counters_of(op, op->segment->rank); }

static char *window_of(const allred_operation *op, int rank, uint64_t window) {
  return area(op, rank) + 4096 + window % ALLRED_WINDOWS * network_of(op)->window_bytes;
}

static char *own_window(const allred_operation *op, uint64_t window) {
  return window_of(op, op->segment->rank, window);
}

/* ---- slices of a window, and blocks of a slice */

static allred_window *window(const allred_operation *op, uint64_t number) {
  return &network_of(op)->table[number % ALLRED_WINDOWS];
}

typedef struct {
  size_t start, bytes;
} part;

static part part_of(size_t bytes, int parts, int index) {
  const size_t each = allred_round_up((bytes + (size_t)parts - 1) / (size_t)parts, ALLRED_LINE);
  const size_t start = allred_smaller(each * (size_t)index, bytes);
  return (part){start, allred_smaller(each, bytes - start)};
}

static part slice_of(const allred_operation *op, uint64_t number, int slice) {
  return part_of(window(op, number)->bytes, network_of(op)->slices, slice);
}

/* Return a block of this rank's slice, as a part of the window. */
static part block_of(const allred_operation *op, uint64_t number, int block) {
  const part slice = slice_of(op, number, op->segment->rank);
  const part within = part_of(slice.bytes, network_of(op)->hosts, block);
  return (part){slice.start + within.start, within.bytes};
}

/* ---- fill, sum and drain */

static int all_drained(const allred_operation *op, uint64_t count) {
  for (int rank = 0; rank < op->segment->ranks; rank++)
    if (atomic_load_explicit(&counters_of(op, rank)->drained, memory_order_acquire) < count) return 0;
  return 1;
}

static int fill(allred_operation *op) {
  allred_network *network = network_of(op);
  const uint64_t number = network->filled;
  if (op->filled.tensor == op->tensor_count) return 0;
  if (number >= ALLRED_WINDOWS && !all_drained(op, number - ALLRED_WINDOWS + 1)) return 0;
  *window(op, number) = allred_fill_window(op, own_window(op, number), network->window_bytes);
  op->segment->sent += window(op, number)->bytes;
  network->filled++;
  atomic_store_explicit(&own_counters(op)->filled, network->filled, memory_order_release);
  return 1;
}

static allred_reduce kernel_of(const allred_operation *op, int dtype, int is_last) {
  const int operator = op->op == ALLRED_AVERAGE && !is_last ? ALLRED_SUM : op->op;
  return allred_reduce_kernel(op->variant, dtype, operator);
}

static int has_slice(const allred_operation *op) { return op->segment->rank < network_of(op)->slices; }

static int sum(allred_operation *op) {
  allred_network *network = network_of(op);
  const uint64_t number = network->summed;
  const void *sources[ALLRED_MAX_RANKS];
  if (!has_slice(op) || number == network->filled) return 0;
  const part slice = slice_of(op, number, op->segment->rank);
  for (int rank = 0; rank < op->segment->ranks; rank++) {
    if (atomic_load_explicit(&counters_of(op, rank)->filled, memory_order_acquire) <= number) return 0;
    sources[rank] = window_of(op, rank, number) + slice.start;
  }
  const int dtype = window(op, number)->dtype;
  if (op->segment->ranks > 1)
    kernel_of(op, dtype, 0)(own_window(op, number) + slice.start, sources, op->segment->ranks,
                            slice.bytes / allred_dtype_bytes(dtype), 1);
  network->summed++;
  return 1;
}

static int drain(allred_operation *op) {
  allred_network *network = network_of(op);
  const uint64_t number = network->drained;
  const char *slices[ALLRED_MAX_RANKS];
  if (number == network->filled) return 0;
  for (int rank = 0; rank < network->slices; rank++) {
    if (atomic_load_explicit(&counters_of(op, rank)->crossed, memory_order_acquire) <= number) return 0;
    slices[rank] = window_of(op, rank, number);
  }
  allred_drain_window(op, slices, part_of(window(op, number)->bytes, network->slices, 0).bytes, *window(op, number));
  network->drained++;
  atomic_store_explicit(&own_counters(op)->drained, network->drained, memory_order_release);
  return 1;
}

/* ---- cross: the ring */

static int steps(const allred_network *network) { return 2 * (network->hosts - 1); }

static int next_host(const allred_network *network) { return (network->host + 1) % network->hosts; }

static int previous_host(const allred_network *network) {
  return (network->host + network->hosts - 1) % network->hosts;
}

/* The block that this host sends in a step; it receives the one before. */
static int sent_block(const allred_network *network, int step) {
  return (network->host + 2 * network->hosts - step) % network->hosts;
}

static int received_block(const allred_network *network, int step) {
  return (network->host + 2 * network->hosts - step - 1) % network->hosts;
}

static void advance(const allred_operation *op, allred_ring_position *at, int block, size_t bytes) {
  at->offset += bytes;
  if (at->offset < block_of(op, at->window, block).bytes) return;
  at->offset = 0;
  if (++at->step < steps(network_of(op))) return;
  at->step = 0;
  at->window++;
}

/* Return how many bytes of the block that is being sent are received and added. */
static size_t ready(const allred_operation *op, const part block) {
  const allred_network *network = network_of(op);
  const allred_ring_position *out = &network->out, *in = &network->in;
  if (out->step == 0 || in->window > out->window) return block.bytes;
  if (in->window < out->window || in->step < out->step - 1) return 0;
  return in->step == out->step - 1 ? in->offset : block.bytes;
}

static int send_ring(allred_operation *op) {
  allred_network *network = network_of(op);
  allred_ring_position *out = &network->out;
  if (out->window == network->summed) return 0;
  const int index = sent_block(network, out->step);
  const part block = block_of(op, out->window, index);
  const size_t bytes = allred_smaller(ready(op, block) - out->offset, SENT_AT_ONCE);
  size_t sent = 0;
  if (bytes) {
    sent =
        allred_send_some(network, next_host(network), own_window(op, out->window) + block.start + out->offset, bytes);
    if (!sent) return 0;
  } else if (block.bytes) {
    return 0;
  }
  advance(op, out, index, sent);
  return 1;
}

/* Add what was received to the block: whole numbers; the rest stays in the scratch memory. */
static size_t add(allred_operation *op, const part block) {
  allred_network *network = network_of(op);
  const int dtype = window(op, network->in.window)->dtype;
  const size_t item = allred_dtype_bytes(dtype), bytes = network->scratch_bytes / item * item;
  char *to = own_window(op, network->in.window) + block.start + network->in.offset;
  const void *const sources[] = {network->scratch, to};
  const int is_last = network->in.step == network->hosts - 2;
  kernel_of(op, dtype, is_last)(to, sources, 2, bytes / item, op->divisor);
  network->scratch_bytes -= bytes;
  memmove(network->scratch, network->scratch + bytes, network->scratch_bytes);
  return bytes;
}

static int receive_ring(allred_operation *op) {
  allred_network *network = network_of(op);
  allred_ring_position *in = &network->in;
  if (in->window == network->summed) return 0;
  const int index = received_block(network, in->step), host = previous_host(network);
  const part block = block_of(op, in->window, index);
  size_t got = 0, rest = block.bytes - in->offset;
  if (rest && in->step < network->hosts - 1) {
    const size_t room = allred_smaller(ALLRED_SCRATCH_BYTES, rest) - network->scratch_bytes;
    got = allred_receive_some(network, host, network->scratch + network->scratch_bytes, room);
    if (!got) return 0;
    network->scratch_bytes += got;
    got = add(op, block);
    if (!got) return 1;
  } else if (rest) {
    got = allred_receive_some(network, host, own_window(op, in->window) + block.start + in->offset, rest);
    if (!got) return 0;
  }
  advance(op, in, index, got);
  return 1;
}

static int cross(allred_operation *op) {
  allred_network *network = network_of(op);
  if (!has_slice(op)) return 0;
  const int received = receive_ring(op), sent = send_ring(op);
  const uint64_t crossed = network->in.window < network->out.window ? network->in.window : network->out.window;
  if (received || sent) atomic_store_explicit(&own_counters(op)->crossed, crossed, memory_order_release);
  return received || sent;
}

/* ---- the round */

static void begin(allred_operation *op, char *chunk) {
  allred_network *network = network_of(op);
  const uint64_t first = network->windows;
  network->filled = network->summed = network->drained = first;
  network->in = network->out = (allred_ring_position){first, 0, 0};
  network->scratch_bytes = 0;
}

static int pass_windows(allred_operation *op, char *chunk) {
  allred_network *network = network_of(op);
  const int crossed = cross(op), moved = drain(op) || sum(op) || fill(op) || crossed;
  const int is_complete = op->filled.tensor == op->tensor_count && network->drained == network->filled;
  if (!is_complete) return moved ? ALLRED_PROGRESSED : ALLRED_PENDING;
  network->windows = network->filled;
  return ALLRED_DONE;
}

void allred_begin_windows(allred_operation *op) {
  static const allred_transfer windows = {.fill = begin, .reduce = pass_windows};
  op->transfer = &windows;
  op->rounds = 2;
}
