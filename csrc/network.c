/* Round 0 of operations across hosts: headers, and the data of small allreduces (network.h). */
#include "network.h"

#include <string.h>

typedef struct {
  uint64_t headers, data; /* bytes of both, which follow */
} message_head;

enum { BEGIN, EXCHANGE };

static allred_network *network_of(const allred_operation *op) { return op->segment->network; }

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

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
  return round_up(2 * board_bytes(ranks), 4096) +
         (size_t)local_ranks * (ALLRED_WINDOWS * window_bytes + 4096); /* a page of counters */
}

/* ---- messages */

static int ranks_of(const allred_network *network, int host) {
  return network->first_rank[host + 1] - network->first_rank[host];
}

static int most_ranks(const allred_network *network) {
  int most = 0;
  for (int host = 0; host < network->hosts; host++)
    if (ranks_of(network, host) > most) most = ranks_of(network, host);
  return most;
}

size_t allred_message_bytes(const allred_network *network) {
  return sizeof(message_head) + (size_t)most_ranks(network) * sizeof(allred_header) + ALLRED_SMALL_BYTES;
}

static char *received(const allred_network *network, int host) {
  return network->received + (size_t)host * allred_message_bytes(network);
}

static size_t length_of(const char *message) {
  message_head head;
  memcpy(&head, message, sizeof head);
  return sizeof head + head.headers + head.data;
}

/* Whether a peer's message fits, and has one header of each of its ranks. */
static int is_valid(const allred_network *network, int host, const char *message) {
  message_head head;
  memcpy(&head, message, sizeof head);
  return head.headers == (size_t)ranks_of(network, host) * sizeof(allred_header) && head.data <= ALLRED_SMALL_BYTES;
}

static size_t data_bytes(const char *message) {
  message_head head;
  memcpy(&head, message, sizeof head);
  return head.data;
}

static const char *data_of(const char *message) {
  message_head head;
  memcpy(&head, message, sizeof head);
  return message + sizeof head + head.headers;
}

/* Sum the data of the ranks of this host into the message. */
static void sum_host(allred_operation *op, char *to) {
  const void *sources[ALLRED_MAX_RANKS];
  for (int rank = 0; rank < op->segment->ranks; rank++) sources[rank] = allred_operation_chunk(op, rank);
  const int dtype = op->chunk_dtype, sum_dtype = allred_sum_dtype(dtype);
  const int operator = op->op == ALLRED_AVERAGE ? ALLRED_SUM : op->op;
  const allred_reduce kernel = dtype == sum_dtype ? allred_reduce_kernel(op->variant, dtype, operator)
                                                  : allred_wide_kernel(op->variant, dtype, sum_dtype, operator);
  kernel(to, sources, op->segment->ranks, op->data_bytes / allred_dtype_bytes(dtype), 1);
}

static size_t sum_bytes(const allred_operation *op) {
  return op->data_bytes / allred_dtype_bytes(op->chunk_dtype) * allred_dtype_bytes(allred_sum_dtype(op->chunk_dtype));
}

static void write_message(allred_operation *op) {
  allred_network *network = network_of(op);
  const message_head head = {(size_t)op->segment->ranks * sizeof(allred_header), op->data_bytes ? sum_bytes(op) : 0};
  char *at = network->message;
  memcpy(at, &head, sizeof head), at += sizeof head;
  for (int rank = 0; rank < op->segment->ranks; rank++, at += sizeof(allred_header))
    memcpy(at, allred_segment_header(op->segment, rank, op->number), sizeof(allred_header));
  if (op->data_bytes) sum_host(op, at);
  memset(network->moved, 0, 2 * (size_t)network->hosts * sizeof *network->moved);
}

/* Return whether anything was moved. complete: whether this was the last of it. */
static int move_messages(allred_network *network, int *complete) {
  int any = 0;
  *complete = 1;
  for (int host = 0; host < network->hosts; host++) {
    size_t *sent = &network->moved[host], *got = &network->moved[network->hosts + host], bytes;
    if (host == network->host) continue;
    const size_t all = length_of(network->message);
    while (*sent < all && (bytes = allred_send_some(network, host, network->message + *sent, all - *sent)) > 0)
      *sent += bytes, any = 1;
    char *message = received(network, host);
    for (;;) {
      const int has_head = *got >= sizeof(message_head);
      if (has_head && !is_valid(network, host, message)) network->lost = 1 + host;
      const size_t wanted = has_head ? length_of(message) : sizeof(message_head);
      if (*got == wanted && has_head) break;
      if (!(bytes = allred_receive_some(network, host, message + *got, wanted - *got))) break;
      *got += bytes, any = 1;
    }
    *complete &= *sent == all && *got >= sizeof(message_head) && *got == length_of(message);
  }
  return any;
}

static void write_board(allred_operation *op) {
  const allred_network *network = network_of(op);
  const void *sums[ALLRED_MAX_HOSTS];
  int agree = 1;
  for (int host = 0; host < network->hosts; host++) {
    const char *message = host == network->host ? network->message : received(network, host);
    memcpy(allred_board_header(op->segment, network->first_rank[host], op->number), message + sizeof(message_head),
           (size_t)ranks_of(network, host) * sizeof(allred_header));
    sums[host] = data_of(message);
    agree &= data_bytes(message) == data_bytes(network->message);
  }
  if (!op->data_bytes || !agree) return;
  const int dtype = allred_sum_dtype(op->chunk_dtype);
  allred_reduce_kernel(op->variant, dtype, op->op)(board_sum(network, op->number), sums, network->hosts,
                                                   sum_bytes(op) / allred_dtype_bytes(dtype), op->divisor);
}

static int exchange_messages(allred_operation *op, char *chunk) {
  allred_network *network = network_of(op);
  int complete = 0;
  if (op->segment->rank > 0) return ALLRED_DONE;
  if (network->stage == BEGIN) {
    write_message(op);
    network->stage = EXCHANGE;
  }
  const int any = move_messages(network, &complete);
  if (!complete) return any ? ALLRED_PROGRESSED : ALLRED_PENDING;
  write_board(op);
  network->stage = BEGIN;
  return ALLRED_DONE;
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
  const allred_window window = {sum_bytes(op), allred_sum_dtype(op->chunk_dtype)};
  allred_drain_window(op, &sum, window.bytes, window);
}

static const allred_transfer headers = {.reduce = exchange_messages},
                             headers_then_windows = {.reduce = exchange_messages, .next = allred_begin_windows},
                             small = {.fill = allred_fill_tensors, .reduce = exchange_messages, .drain = read_sum};

/* Whether all tensors have one dtype and their sum is small enough to send it to each host. */
static int is_small(const allred_operation *op) {
  const int dtype = op->tensors[0].dtype;
  size_t bytes = 0;
  for (size_t i = 0; i < op->tensor_count; i++) {
    if (op->tensors[i].dtype != dtype) return 0;
    bytes += op->tensors[i].bytes;
  }
  const size_t sum = bytes / allred_dtype_bytes(dtype) * allred_dtype_bytes(allred_sum_dtype(dtype));
  const size_t others = (size_t)network_of(op)->hosts - 1;
  return bytes && bytes <= op->segment->chunk_bytes && sum <= ALLRED_SMALL_BYTES / others;
}

static void begin(allred_operation *op) {
  const int has_data = op->tensor_count > 0;
  op->compares_board = 1;
  op->data_bytes = 0;
  op->rounds = 1;
  op->is_inline = 1;
  op->transfer = !has_data ? &headers : is_small(op) ? &small : &headers_then_windows;
  if (op->transfer == &small) op->is_inline = 0;
}

static int headers_agree(const allred_operation *op) {
  for (int rank = 0; rank < all_ranks(network_of(op)); rank++)
    if (!allred_headers_agree(&op->header, allred_board_header(op->segment, rank, op->number))) return 0;
  return 1;
}

const allred_across allred_across_hosts = {begin, headers_agree, allred_network_wait};
