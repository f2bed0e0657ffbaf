/*
 * The exchange of windows in a compressed allreduce (network.h, encode.h).
 *
 * A rank passes its slice of window w to the ranks of the same number on the other hosts in four steps:
 *
 *   1  encode   the blocks of the others: its contributions C(w)
 *   2  combine  when all contributions to its own block have arrived: sum them with its own numbers, which are not
 *               rounded, in the order of the hosts; encode the sum, its result R(w); decode it, as all ranks do
 *   3  receive  the results of the others, and decode them
 *   4  end      when all results are sent and received, the window has crossed
 *
 * Each connection carries, in each direction, C(0), C(1), C(2), R(0), C(3), R(1), ..., and the last results. So while a
 * host waits for the contributions to a window, the contributions to the next two windows are under way.
 *
 * Windows without a wire type, of tensors that are not encoded, pass in the same way as they are.
 *
 * residual: where a rank encodes, the error is added to the next numbers in this place: the numbers of the host in the
 * blocks of others, and the sum of all hosts in its own block. Both are parts of the result: an average is divided
 * before.
 *
 * A buffer of window w is used again for w + WINDOWS, which is filled after w was drained on all ranks of the host: by
 * then its results, which the other hosts send after they have received the contributions, have arrived, and its own
 * results are sent.
 */
#include <string.h>

#include "encode.h"
#include "network_windows.h"

#define LAG 2 /* R(w) follows C(w + LAG) */

/* A place in the stream of a connection: C(step), or R(step - LAG). */
typedef struct {
  uint64_t step;
  int is_result;
  size_t offset;
  uint64_t results; /* that are complete */
} place;

/* Arrays by host; by window and host; buffers by window, or by host. */
typedef struct {
  uint64_t first, measured, encoded, combined; /* windows */
  place *out, *in;
  size_t *bytes, *starts; /* of the encoded block of a host; where it begins in the contributions */
  float *numbers;         /* ALLRED_ENCODED_BLOCK of each host */
  char *contributions, *received, *results, *incoming;
  size_t block_room;
} state;

static allred_network *network_of(const allred_operation *op) { return op->segment->network; }

static state *state_of(const allred_operation *op) { return (state *)(void *)network_of(op)->compressed; }

/* Set the addresses in the memory, unless it is NULL; return the bytes. */
static size_t lay_out(const allred_network *network, char *memory) {
  const size_t hosts = (size_t)network->hosts;
  const size_t block = allred_round_up((network->window_bytes + hosts - 1) / hosts, ALLRED_LINE);
  const size_t room = allred_round_up(block / sizeof(float) * 5, ALLRED_LINE);
  state at = {.block_room = room};
  size_t used = allred_round_up(sizeof at, ALLRED_LINE);
#define PLACE(field, size)                                                                                             \
  (at.field = memory ? (void *)(memory + used) : NULL, used += allred_round_up((size), ALLRED_LINE))
  PLACE(out, hosts * sizeof *at.out);
  PLACE(in, hosts * sizeof *at.in);
  PLACE(bytes, ALLRED_WINDOWS * hosts * sizeof *at.bytes);
  PLACE(starts, ALLRED_WINDOWS * hosts * sizeof *at.starts);
  PLACE(numbers, hosts * ALLRED_ENCODED_BLOCK * sizeof *at.numbers);
  PLACE(contributions, ALLRED_WINDOWS * hosts * room);
  PLACE(received, ALLRED_WINDOWS * hosts * room);
  PLACE(results, ALLRED_WINDOWS * room);
  PLACE(incoming, hosts * room);
#undef PLACE
  if (memory) *(state *)(void *)memory = at;
  return used;
}

size_t allred_compressed_bytes(const allred_network *network) { return lay_out(network, NULL); }

static size_t slot(const allred_operation *op, uint64_t window) {
  return window % ALLRED_WINDOWS * (size_t)network_of(op)->hosts;
}

static const allred_window *window_of(const allred_operation *op, uint64_t number) {
  return &network_of(op)->table[number % ALLRED_WINDOWS];
}

/* ---- runs: the numbers of one tensor in a part of a window */

typedef struct {
  size_t tensor, tensor_end; /* the end of its numbers in the window */
  size_t start, bytes;       /* of the run */
  size_t end;                /* of the part */
} run;

static size_t window_bytes_of(const allred_operation *op, const allred_window *window, size_t tensor, size_t offset) {
  const allred_tensor *of = &op->tensors[tensor];
  return (of->bytes - offset) / allred_dtype_bytes(of->dtype) * allred_dtype_bytes(window->dtype);
}

static run before_first_run(const allred_operation *op, const allred_window *window, allred_part part) {
  const size_t tensor = window->first.tensor;
  return (run){tensor, window_bytes_of(op, window, tensor, window->first.offset), part.start, 0,
               part.start + part.bytes};
}

/* Find the next run; 0 if there are no more. */
static int next_run(const allred_operation *op, const allred_window *window, run *at) {
  at->start += at->bytes;
  if (at->start == at->end) return 0;
  while (at->tensor_end <= at->start) at->tensor_end += window_bytes_of(op, window, ++at->tensor, 0);
  at->bytes = allred_smaller(at->tensor_end, at->end) - at->start;
  return 1;
}

static size_t encoded_bytes(const allred_operation *op, const allred_window *window, allred_part part) {
  size_t bytes = 0;
  if (!window->wire) return part.bytes;
  for (run at = before_first_run(op, window, part); next_run(op, window, &at);)
    bytes += allred_encoded_bytes(window->wire, at.bytes / sizeof(float));
  return bytes;
}

size_t allred_wire_bytes(const allred_operation *op, const allred_window *window) {
  return encoded_bytes(op, window, (allred_part){0, window->bytes});
}

/* Encode a part of this rank's window. */
static void encode(const allred_operation *op, uint64_t number, allred_part part, char *to) {
  const allred_window *window = window_of(op, number);
  const char *numbers = allred_own_window(op, number);
  if (!window->wire) memcpy(to, numbers + part.start, part.bytes);
  for (run at = before_first_run(op, window, part); window->wire && next_run(op, window, &at);) {
    const size_t count = at.bytes / sizeof(float), first = window->passed + at.start / sizeof(float);
    allred_encode(op->variant, window->wire, to, (const float *)(const void *)(numbers + at.start),
                  op->residual ? op->residual + first : NULL, count);
    to += allred_encoded_bytes(window->wire, count);
  }
}

/* Decode a part of this rank's window. */
static void decode(const allred_operation *op, uint64_t number, allred_part part, const char *from) {
  const allred_window *window = window_of(op, number);
  char *numbers = allred_own_window(op, number);
  if (!window->wire) memcpy(numbers + part.start, from, part.bytes);
  for (run at = before_first_run(op, window, part); window->wire && next_run(op, window, &at);) {
    const size_t count = at.bytes / sizeof(float);
    allred_decode(op->variant, window->wire, (float *)(void *)(numbers + at.start), from, count);
    from += allred_encoded_bytes(window->wire, count);
  }
}

/* ---- the steps of a window */

static void measure(allred_operation *op) {
  state *state = state_of(op);
  const uint64_t number = state->measured++;
  size_t *bytes = state->bytes + slot(op, number), *starts = state->starts + slot(op, number), start = 0;
  for (int host = 0; host < network_of(op)->hosts; host++) {
    bytes[host] = encoded_bytes(op, window_of(op, number), allred_own_block(op, number, host));
    starts[host] = start;
    if (host != network_of(op)->host) start += bytes[host];
  }
}

static char *contribution(const allred_operation *op, uint64_t number, int host) {
  const state *state = state_of(op);
  return state->contributions + slot(op, number) * state->block_room + state->starts[slot(op, number) + (size_t)host];
}

static void encode_contributions(allred_operation *op) {
  const uint64_t number = state_of(op)->encoded++;
  for (int host = 0; host < network_of(op)->hosts; host++)
    if (host != network_of(op)->host)
      encode(op, number, allred_own_block(op, number, host), contribution(op, number, host));
}

/* Where the contribution of a host to this host's block is received; where this host's result is. */
static char *received(const allred_operation *op, uint64_t number, int host) {
  return state_of(op)->received + (slot(op, number) + (size_t)host) * state_of(op)->block_room;
}

static char *result(const allred_operation *op, uint64_t number) {
  return state_of(op)->results + number % ALLRED_WINDOWS * state_of(op)->block_room;
}

/* Reduce `count` numbers of the block, at `to` in the window; `encoded` is where they begin in the received blocks. */
static void reduce(allred_operation *op, uint64_t number, char *to, size_t encoded, size_t count) {
  const allred_network *network = network_of(op);
  const allred_window *window = window_of(op, number);
  const void *sources[ALLRED_MAX_HOSTS];
  for (int host = 0; host < network->hosts; host++) {
    float *numbers = state_of(op)->numbers + (size_t)host * ALLRED_ENCODED_BLOCK;
    const char *from = received(op, number, host) + encoded;
    sources[host] = host == network->host ? to : window->wire ? (const void *)numbers : from;
    if (host != network->host && window->wire) allred_decode(op->variant, window->wire, numbers, from, count);
  }
  const int operator = window->wire && op->op == ALLRED_AVERAGE ? ALLRED_SUM : op->op; /* it is divided already */
  allred_reduce_kernel(op->variant, window->dtype, operator)(to, sources, network->hosts, count, op->divisor);
}

static void combine(allred_operation *op) {
  const uint64_t number = state_of(op)->combined++;
  const allred_window *window = window_of(op, number);
  const allred_part part = allred_own_block(op, number, network_of(op)->host);
  char *numbers = allred_own_window(op, number);
  size_t encoded = 0;
  if (!window->wire) reduce(op, number, numbers + part.start, 0, part.bytes / allred_dtype_bytes(window->dtype));
  for (run at = before_first_run(op, window, part); window->wire && next_run(op, window, &at);)
    for (size_t done = 0, bytes; done < at.bytes; done += bytes) {
      bytes = allred_smaller(at.bytes - done, ALLRED_ENCODED_BLOCK * sizeof(float));
      reduce(op, number, numbers + at.start + done, encoded, bytes / sizeof(float));
      encoded += allred_encoded_bytes(window->wire, bytes / sizeof(float));
    }
  encode(op, number, part, result(op, number));
  decode(op, number, part, result(op, number));
}

/* ---- the streams of the connections */

enum { ABSENT, PRESENT, UNKNOWN };

/* Whether C(step) or R(step - LAG) exists; unknown as long as this rank has not filled the window. */
static int existence(const allred_operation *op, const place *at) {
  const allred_network *network = network_of(op);
  if (at->is_result && at->step < LAG) return ABSENT;
  if (state_of(op)->first + at->step - (at->is_result ? LAG : 0) < network->filled) return PRESENT;
  return allred_all_filled(op) ? ABSENT : UNKNOWN;
}

static uint64_t number_of(const allred_operation *op, const place *at) {
  return state_of(op)->first + at->step - (at->is_result ? LAG : 0);
}

static void advance(place *at) {
  if (at->is_result) at->step++;
  at->is_result = !at->is_result;
  at->offset = 0;
}

/* Move to a message that exists. Return whether there is one now. */
static int find_message(const allred_operation *op, place *at) {
  const uint64_t end = state_of(op)->first + at->results;
  int found;
  while ((found = existence(op, at)) == ABSENT) {
    if (allred_all_filled(op) && end == network_of(op)->filled) return 0; /* all results have passed */
    advance(at);
  }
  return found == PRESENT;
}

static void complete(place *at) {
  at->results += (uint64_t)at->is_result;
  advance(at);
}

static int send_messages(allred_operation *op, int host) {
  allred_network *network = network_of(op);
  state *state = state_of(op);
  place *at = &state->out[host];
  int any = 0;
  while (find_message(op, at)) {
    const uint64_t number = number_of(op, at);
    if (number >= (at->is_result ? state->combined : state->encoded)) break;
    const size_t bytes = state->bytes[slot(op, number) + (size_t)(at->is_result ? network->host : host)];
    const char *from = at->is_result ? result(op, number) : contribution(op, number, host);
    const size_t sent = at->offset < bytes ? allred_send_some(network, host, from + at->offset, bytes - at->offset) : 0;
    at->offset += sent;
    any |= sent > 0;
    if (at->offset < bytes) break;
    complete(at);
    any = 1;
  }
  return any;
}

static int receive_messages(allred_operation *op, int host) {
  allred_network *network = network_of(op);
  state *state = state_of(op);
  place *at = &state->in[host];
  int any = 0;
  while (find_message(op, at)) {
    const uint64_t number = number_of(op, at);
    /* Not before this host has summed the window: else the rank would wait for the network in place of its peers. */
    if (number >= (at->is_result ? state->encoded : network->summed)) break;
    const size_t bytes = state->bytes[slot(op, number) + (size_t)(at->is_result ? host : network->host)];
    char *to = at->is_result ? state->incoming + (size_t)host * state->block_room : received(op, number, host);
    const size_t got = at->offset < bytes ? allred_receive_some(network, host, to + at->offset, bytes - at->offset) : 0;
    at->offset += got;
    any |= got > 0;
    if (at->offset < bytes) break;
    if (at->is_result) decode(op, number, allred_own_block(op, number, host), to);
    complete(at);
    any = 1;
  }
  return any;
}

/* Whether the contributions of all other hosts to a window have arrived. */
static int all_arrived(const allred_operation *op, uint64_t number) {
  const state *state = state_of(op);
  for (int host = 0; host < network_of(op)->hosts; host++) {
    const place *at = &state->in[host];
    if (host != network_of(op)->host && state->first + at->step + (uint64_t)at->is_result <= number) return 0;
  }
  return 1;
}

void allred_begin_compressed(allred_operation *op) {
  const allred_network *network = network_of(op);
  if (!network->sockets) return;
  lay_out(network, network->compressed);
  state *state = state_of(op);
  state->first = state->measured = state->encoded = state->combined = network->filled;
  memset(state->out, 0, (size_t)network->hosts * sizeof *state->out);
  memset(state->in, 0, (size_t)network->hosts * sizeof *state->in);
}

int allred_cross_compressed(allred_operation *op) {
  allred_network *network = network_of(op);
  state *state = state_of(op);
  int any = 0;
  while (state->measured < network->filled) measure(op);
  if (state->encoded < network->summed) encode_contributions(op), any = 1;
  for (int host = 0; host < network->hosts; host++)
    if (host != network->host) any |= receive_messages(op, host);
  if (state->combined < state->encoded && all_arrived(op, state->combined)) combine(op), any = 1;
  uint64_t crossed = state->combined;
  for (int host = 0; host < network->hosts; host++) {
    if (host == network->host) continue;
    any |= send_messages(op, host);
    crossed = allred_smaller(crossed, state->first + allred_smaller(state->in[host].results, state->out[host].results));
  }
  network->crossed = crossed;
  return any;
}
