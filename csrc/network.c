/* Round 0 of operations across hosts: headers, and the data of small allreduces (network.h). */
#include "network.h"

#include <string.h>

typedef struct {
  uint64_t headers, data; /* bytes of both, which follow */
} message_head;

enum { BEGIN, EXCHANGE };

static allred_network *network_of(const allred_operation *op) { return op->segment->network; }

static int all_ranks(const allred_network *network) { return network->first_rank[network->hosts]; }

/*
 * ---- the board: for each of two operations, headers, then the sum. Consecutive ranks, in the order of the hosts,
 * whose headers are equal have one of them together, a run. So the bytes do not grow with the ranks if headers agree.
 */

typedef struct {
  uint64_t ranks;
  allred_header header;
} header_run;

typedef struct {
  uint64_t count; /* of runs, which follow: at most one for each rank */
  char unused[ALLRED_LINE - sizeof(uint64_t)];
} board_head;

static size_t board_bytes(int ranks) {
  return sizeof(board_head) + allred_round_up((size_t)ranks * sizeof(header_run), ALLRED_LINE) + ALLRED_SMALL_BYTES;
}

static board_head *board(const allred_network *network, uint64_t operation) {
  return (board_head *)(void *)(network->memory + (operation & 1) * board_bytes(all_ranks(network)));
}

static header_run *board_runs(const allred_network *network, uint64_t operation) {
  return (header_run *)(void *)(board(network, operation) + 1);
}

static char *board_sum(const allred_network *network, uint64_t operation) {
  return (char *)board(network, operation) + board_bytes(all_ranks(network)) - ALLRED_SMALL_BYTES;
}

static void append_run(const allred_network *network, uint64_t operation, const header_run *next) {
  board_head *head = board(network, operation);
  header_run *runs = board_runs(network, operation);
  if (head->count && memcmp(&runs[head->count - 1].header, &next->header, sizeof next->header) == 0)
    runs[head->count - 1].ranks += next->ranks;
  else
    runs[head->count++] = *next;
}

static const allred_header *get_header_run(const allred_segment *segment, uint64_t operation, int index,
                                           uint64_t *ranks) {
  const allred_network *network = segment->network;
  if ((uint64_t)index == board(network, operation)->count) return NULL;
  const header_run *found = board_runs(network, operation) + index;
  *ranks = found->ranks;
  return &found->header;
}

size_t allred_network_bytes(int local_ranks, int ranks, size_t window_bytes) {
  return allred_round_up(2 * board_bytes(ranks), 4096) +
         (size_t)local_ranks * (ALLRED_WINDOWS * window_bytes + 4096); /* a page of counters */
}

/* ---- messages, in rounds (network_schedule.h) */

/* Return the ranks whose headers are in the message of a host in this round. */
static uint64_t ranks_in_message(const allred_network *network, int host) {
  const allred_host_range hosts = allred_hosts_in_message(&network->schedule, host, network->round);
  return (uint64_t)(network->first_rank[hosts.end] - network->first_rank[hosts.first]);
}

size_t allred_message_bytes(const allred_network *network) {
  return allred_round_up(sizeof(message_head) + (size_t)all_ranks(network) * sizeof(header_run) + ALLRED_SMALL_BYTES,
                         ALLRED_LINE);
}

static char *received(const allred_network *network, int place) {
  return network->received + (size_t)place * allred_message_bytes(network);
}

static message_head head_of(const char *message) {
  message_head head;
  memcpy(&head, message, sizeof head);
  return head;
}

static size_t length_of(const char *message) {
  return sizeof(message_head) + head_of(message).headers + head_of(message).data;
}

static const char *data_of(const char *message) { return message + sizeof(message_head) + head_of(message).headers; }

/* Whether a peer's message fits. */
static int fits(const allred_network *network, int host, const char *message) {
  const message_head head = head_of(message);
  return head.headers % sizeof(header_run) == 0 &&
         head.headers / sizeof(header_run) <= ranks_in_message(network, host) && head.data <= ALLRED_SMALL_BYTES;
}

/* Whether a message has the headers of all its ranks. */
static int is_valid(const allred_network *network, int host, const char *message) {
  const uint64_t expected = ranks_in_message(network, host);
  uint64_t ranks = 0;
  header_run next;
  for (size_t at = sizeof(message_head); at < sizeof(message_head) + head_of(message).headers; at += sizeof next) {
    memcpy(&next, message + at, sizeof next);
    if (!next.ranks || next.ranks > expected - ranks) return 0;
    ranks += next.ranks;
  }
  return ranks == expected;
}

static size_t sum_bytes(const allred_operation *op) {
  if (!op->data_bytes) return 0;
  return op->data_bytes / allred_dtype_bytes(op->chunk_dtype) * allred_dtype_bytes(allred_sum_dtype(op->chunk_dtype));
}

/* Write the headers and the sum of this host to the board. */
static void write_own(allred_operation *op) {
  const allred_network *network = network_of(op);
  const void *sources[ALLRED_MAX_RANKS];
  board(network, op->number)->count = 0;
  for (int rank = 0; rank < op->segment->ranks; rank++) {
    const header_run one = {1, *allred_segment_header(op->segment, rank, op->number)};
    append_run(network, op->number, &one);
    sources[rank] = allred_operation_chunk(op, rank);
  }
  if (!op->data_bytes) return;
  const int dtype = op->chunk_dtype, sum_dtype = allred_sum_dtype(dtype);
  const int operator = op->op == ALLRED_AVERAGE ? ALLRED_SUM : op->op;
  const allred_reduce kernel = dtype == sum_dtype ? allred_reduce_kernel(op->variant, dtype, operator)
                                                  : allred_wide_kernel(op->variant, dtype, sum_dtype, operator);
  kernel(board_sum(network, op->number), sources, op->segment->ranks, op->data_bytes / allred_dtype_bytes(dtype), 1);
}

/* Write the message of a round: what the board has. */
static void write_message(allred_operation *op) {
  allred_network *network = network_of(op);
  const message_head head = {board(network, op->number)->count * sizeof(header_run), sum_bytes(op)};
  char *at = network->message;
  memcpy(at, &head, sizeof head), at += sizeof head;
  memcpy(at, board_runs(network, op->number), head.headers);
  memcpy(at + head.headers, board_sum(network, op->number), head.data);
  memset(network->moved, 0, 2 * (size_t)network->hosts * sizeof *network->moved);
}

/* Send to a host, and receive from it, what can be moved now. Return whether anything was. */
static int move_message(allred_network *network, allred_message_round peers, int place, int *complete) {
  const int host = peers.hosts[place];
  const size_t all = peers.sends ? length_of(network->message) : 0;
  size_t *sent = &network->moved[host], *got = &network->moved[network->hosts + host], bytes;
  char *message = received(network, place);
  int any = 0, has_all = !peers.receives;
  while (*sent < all && (bytes = allred_send_some(network, host, network->message + *sent, all - *sent)) > 0)
    *sent += bytes, any = 1;
  while (!has_all) {
    const int has_head = *got >= sizeof(message_head);
    const size_t wanted = has_head ? length_of(message) : sizeof(message_head);
    if (has_head && (!fits(network, host, message) || (*got == wanted && !is_valid(network, host, message)))) {
      network->lost = 1 + host;
      break;
    }
    has_all = has_head && *got == wanted;
    if (has_all || !(bytes = allred_receive_some(network, host, message + *got, wanted - *got))) break;
    *got += bytes, any = 1;
  }
  *complete &= *sent == all && has_all;
  return any;
}

static int move_messages(allred_network *network, allred_message_round peers, int *complete) {
  int any = 0;
  *complete = 1;
  for (int place = 0; place < peers.count; place++)
    if (peers.hosts[place] != network->host) any |= move_message(network, peers, place, complete);
  return any;
}

/* Write to the board what the messages of a round have. If sizes differ, headers do too, and no sum is used. */
static void read_messages(allred_operation *op, allred_message_round peers) {
  allred_network *network = network_of(op);
  const void *sums[ALLRED_MAX_RADIX];
  int agree = 1;
  if (!peers.receives) return;
  board(network, op->number)->count = 0;
  for (int place = 0; place < peers.count; place++) {
    const char *message = peers.hosts[place] == network->host ? network->message : received(network, place);
    header_run next;
    for (const char *at = message + sizeof(message_head); at < data_of(message); at += sizeof next) {
      memcpy(&next, at, sizeof next);
      append_run(network, op->number, &next);
    }
    sums[place] = data_of(message);
    agree &= head_of(message).data == sum_bytes(op);
  }
  if (!op->data_bytes || !agree) return;
  const int dtype = allred_sum_dtype(op->chunk_dtype),
            completes = allred_completes_sum(&network->schedule, network->round);
  const int operator = op->op == ALLRED_AVERAGE && !completes ? ALLRED_SUM : op->op;
  if (peers.count == 1)
    memcpy(board_sum(network, op->number), sums[0], sum_bytes(op));
  else
    allred_reduce_kernel(op->variant, dtype, operator)(board_sum(network, op->number), sums, peers.count,
                                                       sum_bytes(op) / allred_dtype_bytes(dtype), op->divisor);
}

static int exchange_messages(allred_operation *op, char *chunk) {
  allred_network *network = network_of(op);
  int complete = 0;
  if (op->segment->rank > 0) return ALLRED_DONE;
  const allred_message_round peers = allred_make_message_round(&network->schedule, network->round);
  if (network->stage == BEGIN) {
    if (network->round == 0) write_own(op);
    write_message(op);
    network->stage = EXCHANGE;
  }
  const int any = move_messages(network, peers, &complete);
  if (!complete) return any ? ALLRED_PROGRESSED : ALLRED_PENDING;
  read_messages(op, peers);
  network->stage = BEGIN;
  const int is_last = network->round + 1 == allred_message_round_count(&network->schedule);
  network->round = is_last ? 0 : network->round + 1;
  return is_last ? ALLRED_DONE : ALLRED_PROGRESSED;
}

/* ---- an exchange without headers */

static int exchange_parts(allred_operation *op, char *chunk) {
  allred_network *network = network_of(op);
  int any = 0, complete = 1;
  if (!network->sockets) return ALLRED_DONE;
  if (network->stage == BEGIN) memset(network->moved, 0, 2 * (size_t)network->hosts * sizeof *network->moved);
  network->stage = EXCHANGE;
  for (int host = 0; host < network->hosts; host++) {
    size_t *sent = &network->moved[host], *got = &network->moved[network->hosts + host], bytes;
    const uint64_t *out = op->send_starts + 2 * host, *in = op->receive_starts + 2 * host;
    if (host == network->host) {
      if (!*sent && out[1]) memcpy(op->receive + in[0], op->send + out[0], out[1]), *sent = 1;
      continue;
    }
    if (*sent < out[1] && (bytes = allred_send_some(network, host, op->send + out[0] + *sent, out[1] - *sent)) > 0)
      *sent += bytes, any = 1;
    if (*got < in[1] && (bytes = allred_receive_some(network, host, op->receive + in[0] + *got, in[1] - *got)) > 0)
      *got += bytes, any = 1;
    complete &= *sent == out[1] && *got == in[1];
  }
  if (!complete) return any ? ALLRED_PROGRESSED : ALLRED_PENDING;
  network->stage = BEGIN;
  return ALLRED_DONE;
}

void allred_begin_host_exchange(allred_operation *op, allred_segment *segment, const char *from, char *to,
                                const uint64_t *send, const uint64_t *receive) {
  static const allred_transfer exchange = {.reduce = exchange_parts};
  static const allred_header none = {.kind = 0};
  allred_begin_exchange(op, segment, &none);
  op->transfer = &exchange;
  op->compares_board = 0;
  op->send = from, op->receive = to;
  op->send_starts = send, op->receive_starts = receive;
}

/* ---- how operations begin */

static void read_sum(allred_operation *op) {
  const char *sum = board_sum(network_of(op), op->number);
  const allred_window window = {.bytes = sum_bytes(op), .dtype = allred_sum_dtype(op->chunk_dtype)};
  allred_drain_window(op, &sum, window.bytes, window);
}

static const allred_transfer headers = {.reduce = exchange_messages},
                             headers_then_windows = {.reduce = exchange_messages, .next = allred_begin_windows},
                             small = {.fill = allred_fill_tensors, .reduce = exchange_messages, .drain = read_sum};

/* Whether all tensors have one dtype, and a host sends at most ALLRED_SMALL_BYTES of sums in a round. */
static int is_small(const allred_operation *op) {
  const int dtype = op->tensors[0].dtype;
  size_t bytes = 0;
  for (size_t i = 0; i < op->tensor_count; i++) {
    if (op->tensors[i].dtype != dtype) return 0;
    bytes += op->tensors[i].bytes;
  }
  const size_t sum = bytes / allred_dtype_bytes(dtype) * allred_dtype_bytes(allred_sum_dtype(dtype));
  const int radix = allred_largest_radix(&network_of(op)->schedule);
  return bytes && bytes <= op->segment->chunk_bytes && sum <= ALLRED_SMALL_BYTES / (size_t)(radix - 1);
}

static void begin(allred_operation *op) {
  const int is_stream = op->send_starts || op->receive_starts;
  op->compares_board = 1;
  op->data_bytes = 0;
  op->rounds = 1;
  op->is_inline = 1;
  op->transfer = is_stream ? &headers_then_windows : &headers;
  if (!op->tensor_count) return;
  op->is_inline = !is_small(op);
  for (size_t i = 0; i < op->tensor_count && !op->is_inline; i++) op->tensors[i].wire = 0;
  op->transfer = op->is_inline ? &headers_then_windows : &small;
}

const allred_across allred_across_hosts = {begin, get_header_run, allred_network_wait};
