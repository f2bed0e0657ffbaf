/* The windows of large operations across hosts (network.h). */
#include <stdatomic.h>
#include <string.h>

#include "chaos.h"
#include "network_windows.h"

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

char *allred_own_window(const allred_operation *op, uint64_t window) {
  return window_of(op, op->segment->rank, window);
}

/* ---- windows, and their parts */

static allred_window *window(const allred_operation *op, uint64_t number) {
  return &network_of(op)->table[number % ALLRED_WINDOWS];
}

typedef allred_part part;

static part part_of(size_t bytes, int parts, int index) {
  const size_t each = allred_round_up((bytes + (size_t)parts - 1) / (size_t)parts, ALLRED_LINE);
  const size_t start = allred_smaller(each * (size_t)index, bytes);
  return (part){start, allred_smaller(each, bytes - start)};
}

static const struct allred_window_kind *kind_of(const allred_operation *op) { return network_of(op)->kind; }

static int cross_in_steps(allred_operation *op);

static allred_reduce kernel_of(const allred_operation *op, int dtype, int is_last) {
  const int operator = op->op == ALLRED_AVERAGE && !is_last ? ALLRED_SUM : op->op;
  return allred_reduce_kernel(op->variant, dtype, operator);
}

/* Sum a part of the window over the ranks of this host, in the window of this rank. Numbers that will be encoded are
 * divided here if the operation is an average, so that a sum of many ranks does not exceed the range of float16. */
static void sum_part(allred_operation *op, uint64_t number, part at) {
  const int dtype = window(op, number)->dtype, divides = window(op, number)->wire && op->op == ALLRED_AVERAGE;
  const void *sources[ALLRED_MAX_RANKS];
  if (op->segment->ranks == 1 && !divides) return;
  for (int rank = 0; rank < op->segment->ranks; rank++) sources[rank] = window_of(op, rank, number) + at.start;
  kernel_of(op, dtype, divides)(allred_own_window(op, number) + at.start, sources, op->segment->ranks,
                                at.bytes / allred_dtype_bytes(dtype), op->divisor);
}

/* ---- allreduce: a window has one slice of each of the first ranks, and a slice one block of each host */

static part slice_of(const allred_operation *op, uint64_t number, int slice) {
  return part_of(window(op, number)->bytes, network_of(op)->slices, slice);
}

static part allreduce_blocks(const allred_operation *op, uint64_t number, int slice, int block, int end) {
  const part whole = slice_of(op, number, slice), first = part_of(whole.bytes, network_of(op)->hosts, block);
  const part last = part_of(whole.bytes, network_of(op)->hosts, end - 1);
  return (part){whole.start + first.start, last.start + last.bytes - first.start};
}

static void allreduce_fill(allred_operation *op, uint64_t number) {
  allred_network *network = network_of(op);
  allred_window *filled = window(op, number);
  *filled = allred_fill_window(op, allred_own_window(op, number), network->window_bytes);
  filled->passed = network->passed;
  network->passed += filled->bytes / allred_dtype_bytes(filled->dtype);
  op->segment->sent += allred_wire_bytes(op, filled);
}

static void allreduce_sum(allred_operation *op, uint64_t number) {
  sum_part(op, number, slice_of(op, number, op->segment->rank));
}

static void allreduce_drain(allred_operation *op, uint64_t number) {
  const allred_network *network = network_of(op);
  const char *slices[ALLRED_MAX_RANKS];
  for (int rank = 0; rank < network->slices; rank++) slices[rank] = window_of(op, rank, number);
  allred_drain_window(op, slices, part_of(window(op, number)->bytes, network->slices, 0).bytes, *window(op, number));
}

/*
 * ---- reducescatter and allgather: a window has one block of each host, and a block one slice of each of the first
 * ranks. Blocks are consecutive parts of the stream of a host: the parts of its ranks, in the order of its ranks.
 */

/* 1 if numbers are wider in the windows than in arrays; then everything in a window has twice the bytes. */
static int widening(const allred_operation *op) {
  return op->send_starts && allred_sum_dtype(op->chunk_dtype) != op->chunk_dtype;
}

/* Return where each rank's part of the array begins. */
static const uint64_t *starts_of(const allred_operation *op) {
  return op->send_starts ? op->send_starts : op->receive_starts;
}

/* Return the part of the stream of a host that passes in a window: each host has the same share in each. */
static part stream_part(const allred_operation *op, uint64_t number, int host) {
  const allred_network *network = network_of(op);
  const uint64_t count = network->last - network->windows, index = number - network->windows;
  const uint64_t bytes = network->host_starts[host + 1] - network->host_starts[host];
  size_t ends[2];
  for (uint64_t i = 0; i < 2; i++) {
    const uint64_t end = bytes / count * (index + i) + bytes % count * (index + i) / count;
    ends[i] = allred_smaller(allred_round_up(end, ALLRED_LINE), bytes);
  }
  return (part){ends[0], ends[1] - ends[0]};
}

/* Return how many windows the streams need. `room` leaves out the alignment: at most two lines for each host, and one
 * for the end of the last block. */
static uint64_t window_count(const allred_network *network) {
  const uint64_t all = network->host_starts[network->hosts];
  const size_t room = network->window_bytes - (2 * (size_t)network->hosts + 1) * ALLRED_LINE;
  return (all + room - 1) / room;
}

static size_t block_start(const allred_operation *op, int host) {
  const allred_network *network = network_of(op);
  const uint64_t count = network->last - network->windows;
  return allred_round_up(network->host_starts[host] / count, ALLRED_LINE) + 2 * (size_t)host * ALLRED_LINE;
}

static part stream_block(const allred_operation *op, uint64_t number, int slice, int host, int end) {
  const part within = part_of(stream_part(op, number, host).bytes, network_of(op)->slices, slice);
  return (part){block_start(op, host) + within.start, within.bytes};
}

/* A part of a block that has one place in the array, and one in the window of one rank. */
typedef struct {
  int position, slice;  /* of the rank whose part of the array it is; of the block */
  size_t array, window; /* where it begins in the part of the rank, and in the window */
  size_t bytes;         /* in the window */
  uint64_t passed;      /* bytes of the stream before the part of this rank */
  size_t done;          /* bytes of the block before the piece */
} piece;

static size_t rank_bytes(const allred_operation *op, int position) {
  const uint64_t *starts = starts_of(op);
  const int rank = network_of(op)->order[position];
  return (starts[rank + 1] - starts[rank]) << widening(op);
}

static piece first_piece(const allred_operation *op, int host) {
  return (piece){.position = network_of(op)->first_rank[host]};
}

/* Find the next piece of the block of a host; 0 if there are no more. */
static int next_piece(const allred_operation *op, uint64_t number, int host, piece *at) {
  const part stream = stream_part(op, number, host);
  const size_t slice = part_of(stream.bytes, network_of(op)->slices, 0).bytes;
  at->done += at->bytes;
  if (at->done == stream.bytes) return 0;
  const uint64_t begin = stream.start + at->done;
  while (begin - at->passed >= rank_bytes(op, at->position)) at->passed += rank_bytes(op, at->position++);
  at->slice = (int)(at->done / slice);
  at->array = begin - at->passed;
  at->window = block_start(op, host) + at->done;
  at->bytes = allred_smaller(stream.bytes - at->done, slice - at->done % slice);
  at->bytes = allred_smaller(at->bytes, rank_bytes(op, at->position) - at->array);
  return 1;
}

static int own_position(const allred_operation *op) {
  const allred_network *network = network_of(op);
  return network->first_rank[network->host] + op->segment->rank;
}

static void reducescatter_fill(allred_operation *op, uint64_t number) {
  const allred_network *network = network_of(op);
  const int dtype = op->chunk_dtype, sum_dtype = allred_sum_dtype(dtype), widens = widening(op);
  const allred_reduce widen = widens ? allred_wide_kernel(op->variant, dtype, sum_dtype, ALLRED_SUM) : NULL;
  *window(op, number) = (allred_window){.dtype = sum_dtype};
  for (int host = 0; host < network->hosts; host++)
    for (piece at = first_piece(op, host); next_piece(op, number, host, &at);) {
      char *to = allred_own_window(op, number) + at.window;
      const void *from = op->send + op->send_starts[network->order[at.position]] + (at.array >> widens);
      if (widens)
        widen(to, &from, 1, at.bytes / allred_dtype_bytes(sum_dtype), 1);
      else
        memcpy(to, from, at.bytes);
    }
}

static void reducescatter_sum(allred_operation *op, uint64_t number) {
  for (int host = 0; host < network_of(op)->hosts; host++)
    sum_part(op, number, stream_block(op, number, op->segment->rank, host, host + 1));
}

static void reducescatter_drain(allred_operation *op, uint64_t number) {
  const int host = network_of(op)->host, dtype = window(op, number)->dtype, widens = widening(op);
  for (piece at = first_piece(op, host); next_piece(op, number, host, &at);) {
    if (at.position != own_position(op)) continue;
    const char *from = window_of(op, at.slice, number) + at.window;
    char *to = op->receive + (at.array >> widens);
    if (widens)
      allred_narrow_kernel(op->variant, dtype, op->chunk_dtype)(to, from, at.bytes / allred_dtype_bytes(dtype));
    else
      memcpy(to, from, at.bytes);
  }
}

/* A rank writes each piece to the window of the rank that sends it. */
static void allgather_fill(allred_operation *op, uint64_t number) {
  const int host = network_of(op)->host;
  for (piece at = first_piece(op, host); next_piece(op, number, host, &at);)
    if (at.position == own_position(op))
      memcpy(window_of(op, at.slice, number) + at.window, op->send + at.array, at.bytes);
}

static void allgather_sum(allred_operation *op, uint64_t number) {}

static void allgather_drain(allred_operation *op, uint64_t number) {
  const allred_network *network = network_of(op);
  for (int host = 0; host < network->hosts; host++)
    for (piece at = first_piece(op, host); next_piece(op, number, host, &at);) {
      const char *own = at.position == own_position(op) ? op->send + at.array : NULL;
      char *to = op->receive + op->receive_starts[network->order[at.position]] + at.array;
      if (to != own) memcpy(to, own ? own : window_of(op, at.slice, number) + at.window, at.bytes);
    }
}

static const struct allred_window_kind
    allreduce = {1, 1, allreduce_blocks, allreduce_fill, allreduce_sum, cross_in_steps, allreduce_drain},
    compressed = {1, 1, allreduce_blocks, allreduce_fill, allreduce_sum, allred_cross_compressed, allreduce_drain},
    reducescatter = {1, 0, stream_block, reducescatter_fill, reducescatter_sum, cross_in_steps, reducescatter_drain},
    allgather = {0, 1, stream_block, allgather_fill, allgather_sum, cross_in_steps, allgather_drain};

/* ---- fill, sum and drain */

static int all_drained(const allred_operation *op, uint64_t count) {
  for (int rank = 0; rank < op->segment->ranks; rank++)
    if (atomic_load_explicit(&counters_of(op, rank)->drained, memory_order_acquire) < count) return 0;
  return 1;
}

int allred_all_filled(const allred_operation *op) {
  const allred_network *network = network_of(op);
  return op->tensor_count ? op->filled.tensor == op->tensor_count : network->filled == network->last;
}

static int fill(allred_operation *op) {
  allred_network *network = network_of(op);
  const uint64_t number = network->filled;
  if (allred_all_filled(op)) return 0;
  if (number >= ALLRED_WINDOWS && !all_drained(op, number - ALLRED_WINDOWS + 1)) return 0;
  kind_of(op)->fill(op, number);
  network->filled++;
  CHAOS_PAUSE();
  atomic_store_explicit(&own_counters(op)->filled, network->filled, memory_order_release);
  return 1;
}

static int has_slice(const allred_operation *op) { return op->segment->rank < network_of(op)->slices; }

static int sum(allred_operation *op) {
  allred_network *network = network_of(op);
  const uint64_t number = network->summed;
  if (!has_slice(op) || number == network->filled) return 0;
  for (int rank = 0; rank < op->segment->ranks; rank++)
    if (atomic_load_explicit(&counters_of(op, rank)->filled, memory_order_acquire) <= number) return 0;
  kind_of(op)->sum(op, number);
  network->summed++;
  return 1;
}

static int drain(allred_operation *op) {
  allred_network *network = network_of(op);
  const uint64_t number = network->drained;
  if (number == network->filled) return 0;
  for (int rank = 0; rank < network->slices; rank++)
    if (atomic_load_explicit(&counters_of(op, rank)->crossed, memory_order_acquire) <= number) return 0;
  kind_of(op)->drain(op, number);
  network->drained++;
  CHAOS_PAUSE();
  atomic_store_explicit(&own_counters(op)->drained, network->drained, memory_order_release);
  return 1;
}

/* ---- cross */

static int step_count(const allred_network *network) {
  return network->is_recursive ? network->schedule.step_count : 2 * (network->hosts - 1);
}

/* The first step of this operation, and the one behind its last. In the first half of the ring's steps, hosts - 1,
 * blocks are summed; in the second half complete blocks pass round. */
static int first_step(const allred_network *network) { return network->kind->reduces ? 0 : network->hosts - 1; }

static int end_step(const allred_network *network) {
  return network->kind->gathers ? step_count(network) : network->hosts - 1;
}

static allred_exchange_step step_at(const allred_network *network, const allred_step_position *at) {
  return network->is_recursive ? network->schedule.steps[at->step] : allred_ring_step(&network->schedule, at->step);
}

static part own_blocks(const allred_operation *op, uint64_t number, int block, int end) {
  if (block == end) return (part){0, 0};
  return kind_of(op)->blocks(op, number, op->segment->rank, block, end);
}

part allred_own_block(const allred_operation *op, uint64_t number, int block) {
  return own_blocks(op, number, block, block + 1);
}

static void advance(const allred_operation *op, allred_step_position *at, size_t bytes, size_t all) {
  at->offset += bytes;
  if (at->offset < all) return;
  at->offset = 0;
  if (++at->step < end_step(network_of(op))) return;
  at->step = first_step(network_of(op));
  at->window++;
}

/* Return how many bytes of what a step sends are ready. */
static size_t ready(const allred_network *network, allred_exchange_step step, size_t bytes) {
  const allred_step_position *out = &network->out, *in = &network->in;
  if (out->step == first_step(network) || in->window > out->window) return bytes;
  if (in->window < out->window || in->step < step.needs) return 0;
  return in->step == step.needs && step.forwards ? in->offset : bytes;
}

static int send_window(allred_operation *op) {
  allred_network *network = network_of(op);
  allred_step_position *out = &network->out;
  if (out->window == network->summed) return 0;
  const allred_exchange_step step = step_at(network, out);
  const part blocks = own_blocks(op, out->window, step.sent, step.sent_end);
  const size_t bytes = allred_smaller(ready(network, step, blocks.bytes) - out->offset, SENT_AT_ONCE);
  size_t sent = 0;
  if (bytes) {
    sent = allred_send_some(network, step.to, allred_own_window(op, out->window) + blocks.start + out->offset, bytes);
    if (!sent) return 0;
  } else if (blocks.bytes) {
    return 0;
  }
  advance(op, out, sent, blocks.bytes);
  return 1;
}

/* Add what was received to the blocks: whole numbers; the rest stays in the scratch memory. */
static size_t add(allred_operation *op, const part blocks, int is_last) {
  allred_network *network = network_of(op);
  const int dtype = window(op, network->in.window)->dtype;
  const size_t item = allred_dtype_bytes(dtype), bytes = network->scratch_bytes / item * item;
  char *to = allred_own_window(op, network->in.window) + blocks.start + network->in.offset;
  const void *const sources[] = {network->scratch, to};
  kernel_of(op, dtype, is_last)(to, sources, 2, bytes / item, op->divisor);
  network->scratch_bytes -= bytes;
  memmove(network->scratch, network->scratch + bytes, network->scratch_bytes);
  return bytes;
}

static int receive_window(allred_operation *op) {
  allred_network *network = network_of(op);
  allred_step_position *in = &network->in;
  if (in->window == network->summed) return 0;
  const allred_exchange_step step = step_at(network, in);
  const part blocks = own_blocks(op, in->window, step.received, step.received_end);
  size_t got = 0, rest = blocks.bytes - in->offset;
  if (rest && step.action != ALLRED_COPY) {
    const size_t room = allred_smaller(ALLRED_SCRATCH_BYTES, rest) - network->scratch_bytes;
    got = allred_receive_some(network, step.from, network->scratch + network->scratch_bytes, room);
    if (!got) return 0;
    network->scratch_bytes += got;
    got = add(op, blocks, step.action == ALLRED_ADD_LAST);
    if (!got) return 1;
  } else if (rest) {
    got = allred_receive_some(network, step.from, allred_own_window(op, in->window) + blocks.start + in->offset, rest);
    if (!got) return 0;
  }
  advance(op, in, got, blocks.bytes);
  return 1;
}

static int cross_in_steps(allred_operation *op) {
  allred_network *network = network_of(op);
  const int received = receive_window(op), sent = send_window(op);
  network->crossed = network->in.window < network->out.window ? network->in.window : network->out.window;
  return received || sent;
}

static int cross(allred_operation *op) {
  if (!has_slice(op) || !kind_of(op)->cross(op)) return 0;
  CHAOS_PAUSE();
  atomic_store_explicit(&own_counters(op)->crossed, network_of(op)->crossed, memory_order_release);
  return 1;
}

/* ---- the round */

static void begin(allred_operation *op, const struct allred_window_kind *kind, int is_recursive) {
  allred_network *network = network_of(op);
  const uint64_t first = network->windows;
  network->kind = kind;
  network->is_recursive = is_recursive;
  network->filled = network->summed = network->drained = network->crossed = first;
  network->passed = 0;
  network->in = network->out = (allred_step_position){first, first_step(network), 0};
  network->scratch_bytes = 0;
}

static void begin_allreduce(allred_operation *op, char *chunk) {
  const allred_network *network = network_of(op);
  size_t bytes = 0;
  int wire = 0;
  for (size_t i = 0; i < op->tensor_count; i++) {
    wire |= op->tensors[i].wire;
    bytes += op->tensors[i].bytes / allred_dtype_bytes(op->tensors[i].dtype) *
             allred_dtype_bytes(allred_sum_dtype(op->tensors[i].dtype));
  }
  const size_t slice = allred_smaller(bytes, network->window_bytes) / (size_t)network->slices;
  begin(op, wire ? &compressed : &allreduce, !wire && slice <= network->recursive_bytes);
  if (wire) allred_begin_compressed(op);
}

static void begin_streams(allred_operation *op, char *chunk) {
  allred_network *network = network_of(op);
  network->host_starts[0] = 0;
  for (int host = 0; host < network->hosts; host++) {
    network->host_starts[host + 1] = network->host_starts[host];
    for (int position = network->first_rank[host]; position < network->first_rank[host + 1]; position++)
      network->host_starts[host + 1] += rank_bytes(op, position);
  }
  network->last = network->windows + window_count(network);
  begin(op, op->send_starts ? &reducescatter : &allgather, 0);
}

static int pass_windows(allred_operation *op, char *chunk) {
  allred_network *network = network_of(op);
  const int crossed = cross(op), moved = drain(op) || sum(op) || fill(op) || crossed;
  if (!allred_all_filled(op) || network->drained != network->filled) return moved ? ALLRED_PROGRESSED : ALLRED_PENDING;
  network->windows = network->filled;
  return ALLRED_DONE;
}

void allred_begin_windows(allred_operation *op) {
  static const allred_transfer tensors = {.fill = begin_allreduce, .reduce = pass_windows},
                               streams = {.fill = begin_streams, .reduce = pass_windows};
  op->transfer = op->tensor_count ? &tensors : &streams;
  op->rounds = 2;
}
