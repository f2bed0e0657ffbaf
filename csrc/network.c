/* Round 0 of operations across hosts: headers, and the data of small allreduces (network.h). */
#include "network.h"

#include <string.h>

typedef struct {
  uint64_t headers, data; /* bytes of both, which follow */
} message_head;

enum { BEGIN, EXCHANGE };

static allred_network *network_of(const allred_operation *op) { return op->segment->network; }

static int all_ranks(const allred_network *network) { return network->first_rank[network->hosts]; }

/* ---- the board: for each of two operations, the headers of all ranks, then the sum */

static size_t board_bytes(int ranks) { return (size_t)ranks * sizeof(allred_header) + ALLRED_SMALL_BYTES; }

static char *board(const allred_network *network, uint64_t operation) {
  return network->memory + (operation & 1) * board_bytes(all_ranks(network));
}

allred_header *allred_board_header(const allred_segment *segment, int rank, uint64_t operation) {
  return (allred_header *)(void *)board(segment->network, operation) + rank;
}

static char *board_sum(const allred_network *network, uint64_t operation) {
  return board(network, operation) + (size_t)all_ranks(network) * sizeof(allred_header);
}

size_t allred_network_bytes(int local_ranks, int ranks, size_t window_bytes) {
  return allred_round_up(2 * board_bytes(ranks), 4096) +
         (size_t)local_ranks * (ALLRED_WINDOWS * window_bytes + 4096); /* a page of counters */
}

/*
 * ---- messages
 *
 * If the number of hosts is a power of two, messages are exchanged by recursive doubling: in round r with the host
 * whose number differs in bit r. After it, 2**(r + 1) hosts have the headers and the sum of all of them. Otherwise
 * there is one round, in which each host sends its message to all others.
 */

static int doubles(const allred_network *network) { return (network->hosts & (network->hosts - 1)) == 0; }

typedef struct {
  int first, end; /* hosts */
} group;

/* The hosts whose headers and sum a host has before a round. */
static group group_of(const allred_network *network, int host, int round) {
  if (!doubles(network)) return (group){host, host + 1};
  const int first = host >> round << round;
  return (group){first, first + (1 << round)};
}

static size_t header_bytes(const allred_network *network, group hosts) {
  return (size_t)(network->first_rank[hosts.end] - network->first_rank[hosts.first]) * sizeof(allred_header);
}

static int is_peer(const allred_network *network, int host) {
  return host != network->host && (!doubles(network) || host == (network->host ^ 1 << network->round));
}

static int is_last_round(const allred_network *network) {
  return !doubles(network) || 2 << network->round == network->hosts;
}

static size_t largest_message(const allred_network *network) {
  size_t most = 0;
  for (int host = 0; host < network->hosts; host++) {
    const size_t headers = header_bytes(network, group_of(network, host, 0));
    if (headers > most) most = headers;
  }
  if (doubles(network)) most = header_bytes(network, (group){0, network->hosts});
  return sizeof(message_head) + most + ALLRED_SMALL_BYTES;
}

size_t allred_message_bytes(const allred_network *network) {
  return allred_round_up(largest_message(network), ALLRED_LINE);
}

static char *received(const allred_network *network, int host) {
  return network->received + (doubles(network) ? 0 : (size_t)host * allred_message_bytes(network));
}

static message_head head_of(const char *message) {
  message_head head;
  memcpy(&head, message, sizeof head);
  return head;
}

static size_t length_of(const char *message) {
  return sizeof(message_head) + head_of(message).headers + head_of(message).data;
}

/* Whether a peer's message fits, and has one header of each rank of its group. */
static int is_valid(const allred_network *network, int host, const char *message) {
  return head_of(message).headers == header_bytes(network, group_of(network, host, network->round)) &&
         head_of(message).data <= ALLRED_SMALL_BYTES;
}

static const char *data_of(const char *message) { return message + sizeof(message_head) + head_of(message).headers; }

static size_t sum_bytes(const allred_operation *op) {
  if (!op->data_bytes) return 0;
  return op->data_bytes / allred_dtype_bytes(op->chunk_dtype) * allred_dtype_bytes(allred_sum_dtype(op->chunk_dtype));
}

/* Write the headers and the sum of this host to the board. */
static void write_own(allred_operation *op) {
  const allred_network *network = network_of(op);
  const void *sources[ALLRED_MAX_RANKS];
  for (int rank = 0; rank < op->segment->ranks; rank++) {
    *allred_board_header(op->segment, network->first_rank[network->host] + rank, op->number) =
        *allred_segment_header(op->segment, rank, op->number);
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
  const group hosts = group_of(network, network->host, network->round);
  const message_head head = {header_bytes(network, hosts), sum_bytes(op)};
  char *at = network->message;
  memcpy(at, &head, sizeof head), at += sizeof head;
  memcpy(at, allred_board_header(op->segment, network->first_rank[hosts.first], op->number), head.headers);
  memcpy(at + head.headers, board_sum(network, op->number), head.data);
  memset(network->moved, 0, 2 * (size_t)network->hosts * sizeof *network->moved);
}

/* Return whether anything was moved. complete: whether this was the last of it. */
static int move_messages(allred_network *network, int *complete) {
  const size_t all = length_of(network->message);
  int any = 0;
  *complete = 1;
  for (int host = 0; host < network->hosts; host++) {
    size_t *sent = &network->moved[host], *got = &network->moved[network->hosts + host], bytes;
    if (!is_peer(network, host)) continue;
    while (*sent < all && (bytes = allred_send_some(network, host, network->message + *sent, all - *sent)) > 0)
      *sent += bytes, any = 1;
    char *message = received(network, host);
    for (;;) {
      const int has_head = *got >= sizeof(message_head);
      if (has_head && !is_valid(network, host, message)) {
        network->lost = 1 + host;
        break;
      }
      const size_t wanted = has_head ? length_of(message) : sizeof(message_head);
      if (has_head && *got == wanted) break;
      if (!(bytes = allred_receive_some(network, host, message + *got, wanted - *got))) break;
      *got += bytes, any = 1;
    }
    *complete &=
        network->lost != 1 + host && *sent == all && *got >= sizeof(message_head) && *got == length_of(message);
  }
  return any;
}

/* Add the messages of a round to the board. If sizes differ, headers do too, and no sum is used. */
static void read_messages(allred_operation *op) {
  allred_network *network = network_of(op);
  const void *sums[ALLRED_MAX_HOSTS];
  int count = 0, agree = 1;
  for (int host = 0; host < network->hosts; host++) {
    const char *message = host == network->host ? network->message : received(network, host);
    if (host != network->host && !is_peer(network, host)) continue;
    const group hosts = group_of(network, host, network->round);
    memcpy(allred_board_header(op->segment, network->first_rank[hosts.first], op->number),
           message + sizeof(message_head), head_of(message).headers);
    sums[count++] = data_of(message);
    agree &= head_of(message).data == sum_bytes(op);
  }
  if (!op->data_bytes || !agree) return;
  const int dtype = allred_sum_dtype(op->chunk_dtype);
  const int operator = op->op == ALLRED_AVERAGE && !is_last_round(network) ? ALLRED_SUM : op->op;
  allred_reduce_kernel(op->variant, dtype, operator)(board_sum(network, op->number), sums, count,
                                                     sum_bytes(op) / allred_dtype_bytes(dtype), op->divisor);
}

static int exchange_messages(allred_operation *op, char *chunk) {
  allred_network *network = network_of(op);
  int complete = 0;
  if (op->segment->rank > 0) return ALLRED_DONE;
  if (network->stage == BEGIN) {
    if (network->round == 0) write_own(op);
    write_message(op);
    network->stage = EXCHANGE;
  }
  const int any = move_messages(network, &complete);
  if (!complete) return any ? ALLRED_PROGRESSED : ALLRED_PENDING;
  read_messages(op);
  network->stage = BEGIN;
  const int is_last = is_last_round(network);
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

/* Whether all tensors have one dtype and their sum is small enough for messages. */
static int is_small(const allred_operation *op) {
  const int dtype = op->tensors[0].dtype;
  size_t bytes = 0;
  for (size_t i = 0; i < op->tensor_count; i++) {
    if (op->tensors[i].dtype != dtype) return 0;
    bytes += op->tensors[i].bytes;
  }
  const size_t sum = bytes / allred_dtype_bytes(dtype) * allred_dtype_bytes(allred_sum_dtype(dtype));
  const size_t times = doubles(network_of(op)) ? 1 : (size_t)network_of(op)->hosts - 1;
  return bytes && bytes <= op->segment->chunk_bytes && sum <= ALLRED_SMALL_BYTES / times;
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

static int ranks(const allred_operation *op) { return all_ranks(network_of(op)); }

static const allred_header *header(const allred_operation *op, int rank) {
  return allred_board_header(op->segment, rank, op->number);
}

const allred_across allred_across_hosts = {begin, ranks, header, allred_network_wait};
