/*
 * Operations across hosts: the ranks of a host exchange data through their segment (segment.h), hosts through TCP.
 *
 * The first `slices` ranks of each host have a TCP connection to the rank of the same number on every other host. The
 * first rank of a host also sends the headers. `slices` is the smallest number of ranks of any host.
 *
 * Round 0 of every operation exchanges headers; the data of a small allreduce, which fits into one message, goes with
 * them:
 *
 *   1  FILL          write this rank's data, if the operation is small, to its chunk
 *   2                publish it with the header
 *   3  WAIT_FILLED   wait until every rank of the host has published
 *   4  REDUCE        the first rank sums the data of the host on the board of the host, and exchanges messages with
 *                    the first ranks of other hosts (network.c), until the board has the headers of all ranks and
 *                    the sum of all hosts; then it publishes the board as tick 1
 *   5  WAIT_REDUCED  wait for the first rank; compare the headers of all ranks, and end here if they differ
 *   6  DRAIN         read the sum from the board
 *
 * A large allreduce, a reducescatter and an allgather have one more round. Their data passes as a stream of windows.
 * Each rank has WINDOWS of them in shared memory, used in turn, so several windows are under way, and their phases
 * overlap:
 *
 *   1  fill          copy tensors into this rank's window; count it as filled
 *   2  sum           when all ranks of the host have filled a window, rank i < slices sums slice i of it, in its own
 *                    window
 *   3  cross         rank i sums slice i over the hosts. In a ring: in hosts - 1 steps each host sends one block of the
 *                    slice to the next host, which adds its own numbers; in hosts - 1 further steps complete blocks
 *                    pass round. A byte is sent as soon as it is received and added. An allreduce of few bytes takes
 *                    the steps of network_schedule.h, whose number grows with the logarithm of the hosts. Count the
 *                    window as crossed
 *   4  drain         when ranks 0 to slices - 1 have counted a window as crossed, copy its slices into the tensors;
 *                    count it as drained
 *
 * A reducescatter takes only the first half of the ring's steps, and an allgather only the second half. Their windows
 * have a block for each host: the next part of what the ranks of the host receive, or give. A host has the same share
 * of each window, so all hosts send until the last one. In an allgather nothing is summed: in phase 1 a rank copies
 * each part of its data to the window of the rank that sends it. A broadcast is an allgather to which one rank gives.
 *
 * In an allreduce with a wire type, phase 3 is another (network_compressed.c): each host encodes the blocks of the
 * others and sends them, sums its own block in float32 in the order of the hosts, encodes the sum and sends it to all.
 * So a number is rounded twice for any number of hosts. Small operations, which go with the headers, are not encoded.
 *
 * Why no rank writes memory that another reads:
 *
 *   1  A rank fills window w only if all ranks of the host have drained window w - WINDOWS.
 *   2  Between `filled` of all ranks and its own `crossed`, rank i alone reads and writes slice i of its own window,
 *      and reads slice i of the others' windows, which do not change: each of them writes only its own slice. In an
 *      allgather the ranks write to different places of it, before they count it as filled.
 *   3  The board has two places, used in turn by operations, as inline slots (operation.h).
 *
 * Sums within a host have the order of its ranks. A block is summed over the hosts in the order of the ring, from the
 * host that sends it first, or in the order of the schedule; a small sum in an order that depends on the number of
 * hosts only. These orders are fixed, and one host sums each block for all, so results are the same on all ranks, and
 * from run to run. 16-bit floats are summed in float32, and rounded once.
 *
 * Messages carry their length; windows do not, because all ranks know it from the agreed headers.
 */
#ifndef ALLRED_NETWORK_H
#define ALLRED_NETWORK_H

#include "network_schedule.h"
#include "operation.h"

#define ALLRED_WINDOWS 4
#define ALLRED_SMALL_BYTES ((size_t)16384) /* data of a message */

typedef struct {
  uint64_t window;
  int step;
  size_t offset;
} allred_step_position;

typedef struct allred_network {
  int hosts, host; /* number of hosts; this one */
  allred_schedule schedule;
  size_t recursive_bytes; /* up to this many bytes of its slice of a window, an allreduce takes the recursive steps */
  int slices;             /* ranks of each host that have connections: 0 to slices - 1 */
  const int *first_rank;  /* hosts + 1 prefix sums of the hosts' numbers of ranks */
  const int *order;       /* the ranks in the order of the hosts, as callers count them */
  const int *sockets;     /* by host, nonblocking; -1 for this host; NULL on ranks without connections */
  short *events;          /* by host: the poll events that this rank waits for */
  int lost;               /* 1 + the first host whose connection was lost; 0: none */
  char *memory;           /* shared by the ranks of the host, zeros, aligned to a page: allred_network_bytes */
  size_t window_bytes;    /* a multiple of ALLRED_LINE: at least allred_least_window_bytes */
  uint64_t windows;       /* of all operations so far; the same on all ranks */
  /* the operation under way */
  int stage, round;     /* of the exchange of messages */
  char *message;        /* of this host: allred_message_bytes() */
  char *received;       /* of each host of a round: ALLRED_MAX_RADIX times as many bytes */
  size_t *moved;        /* by host: bytes sent, then bytes received: 2 * hosts */
  char *scratch;        /* ALLRED_SCRATCH_BYTES: bytes received that are not added yet */
  size_t scratch_bytes; /* that it holds */
  char *compressed;     /* of compressed allreduces: allred_compressed_bytes() */
  const struct allred_window_kind *kind;
  int is_recursive; /* whether windows pass in the steps of the schedule, not of the ring */
  uint64_t filled, summed, crossed, drained;
  size_t passed;         /* of an allreduce: numbers in the windows that are filled */
  uint64_t last;         /* of a reducescatter or allgather: the window behind its last one */
  uint64_t *host_starts; /* likewise: hosts + 1 prefix sums of the bytes of the hosts in windows */
  allred_window table[ALLRED_WINDOWS];
  allred_step_position out, in;
} allred_network;

#define ALLRED_SCRATCH_BYTES ((size_t)1 << 18)

/* Return the bytes of shared memory of a host with this many ranks; of the smallest window; of a message; of the memory
 * for compressed allreduces, which the first of them begins to use. */
size_t allred_network_bytes(int local_ranks, int all_ranks, size_t window_bytes);
static inline size_t allred_least_window_bytes(int hosts) { return (2 * (size_t)hosts + 2) * ALLRED_LINE; }
size_t allred_message_bytes(const allred_network *network);
size_t allred_compressed_bytes(const allred_network *network);

/* For allred_segment.across. */
extern const allred_across allred_across_hosts;

/* Prepare an exchange of bytes between the hosts, without headers; only ranks with connections move any. send and
 * receive: where the data for and from each host lies in `from` and `to`, as pairs of offset and bytes. */
void allred_begin_host_exchange(allred_operation *op, allred_segment *segment, const char *from, char *to,
                                const uint64_t *send, const uint64_t *receive);

/* network_links.c: move bytes without waiting. Return the bytes moved: 0 if none can be moved now, and
 * always 0 after the connection was lost. */
size_t allred_send_some(allred_network *network, int host, const char *data, size_t bytes);
size_t allred_receive_some(allred_network *network, int host, char *data, size_t bytes);

/* Wait until a connection is ready for what this rank wants to move; see allred_across. */
int allred_network_wait(const allred_segment *segment, int64_t limit_ns);

/* network_windows.c, network_compressed.c: the round in which windows pass. */
void allred_begin_windows(allred_operation *op);

#endif
