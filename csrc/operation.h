/*
 * An operation of the ranks of one node, as steps that never wait.
 *
 * Data passes in rounds of one chunk. All ranks take the same rounds, in lockstep; a round of operation `o`:
 *
 *   1  fill    write what this round brings to this rank's ring, or to its card if that is all there is and small
 *   2          publish it: in round 0 with the header of operation o, later as tick 2*round of `stage`
 *   3  meet    wait until every rank has come to 2; in round 0 compare the headers, and end here if they differ
 *   4  meld    only where ranks reduce for each other: reduce this rank's part of all chunks into its own chunk,
 *              publish it as tick 2*round + 1, and wait until every rank has
 *   5  drain   read the chunks of all ranks into this rank's memory
 *
 * Why nothing is written where somebody reads. A rank that fills a round has met all ranks in the round before, and
 * these had drained the one before that before they came there: so only the last chunk may still be read. The next one
 * does not touch it: it lies behind it, or at the start of a ring that has room for three. (With room for two, a short
 * chunk and a long one behind it would reach back to the start.) Cards likewise, from operation to operation: a rank
 * that begins one has met all ranks in the last one, and these were done with the one before that, which had the same
 * card. All ranks agree on places, since these depend only on operations that all have found to agree; where headers
 * differ nobody reads on, and no place is used up. tests/csrc/model.c goes through all orders of steps.
 */
#ifndef ALLRED_OPERATION_H
#define ALLRED_OPERATION_H

#include <stdatomic.h>

#include "reduce.h"
#include "segment.h"

/* A tensor to reduce: `bytes` bytes of one of reduce.h's dtypes. `out` may be `in`. wire: the dtype to travel in where
 * that is a narrower one (allred_narrows), else 0. */
typedef struct {
  const char *in;
  char *out;
  size_t bytes;
  int dtype, wire;
} allred_tensor;

typedef struct {
  size_t tensor, offset;
} allred_cursor;

enum { ALLRED_DONE, ALLRED_PENDING, ALLRED_MOVED, ALLRED_DIFFER };

typedef struct allred_operation allred_operation;

/* What one kind of operation does in the steps of a round. `meld` may be NULL. */
typedef struct {
  void (*fill)(allred_operation *, char *chunk);
  void (*meld)(allred_operation *, char *chunk);
  void (*drain)(allred_operation *);
} allred_transfer;

struct allred_operation {
  allred_segment *segment;
  const allred_transfer *transfer;
  allred_header header;
  uint64_t number, round, rounds;
  uint64_t first_tick;
  int on_card;
  _Atomic uint64_t moves; /* steps taken: whoever waits, in whichever thread, sees by it that there was progress */
  int phase, met, status;
  /* of a reduction */
  int variant, op, divisor;
  size_t tensor_count;
  const allred_tensor *tensors;
  allred_cursor filled, drained;
  size_t chunk_bytes; /* of the round: what is brought, and with room for results where these lie behind it */
  size_t data_bytes;  /* what is brought */
  int chunk_dtype, chunk_wire;
  /* of an exchange: what goes to and comes from each rank, from these offsets on */
  const char *send;
  char *receive;
  const uint64_t *send_starts, *receive_starts;
  size_t part_bytes;
  /* in a queue, see queue.h */
  allred_operation *next;
  int holds, continues;
  _Atomic int settled;
};

/*
 * Prepare an operation. It gets its number with its first step: one at a time on a segment, in the order of these. The
 * header is copied, everything else must stay until the end.
 *
 * exchange       nothing but the headers: a barrier
 * allreduce      tensors reduced over all ranks; one table of tensors is the fusion: they pass as one stream
 * allgather      starts[r] to starts[r + 1] of everyone's `receive` from rank r's `send`, which may be that stretch of
 *                its own `receive`. A broadcast is an allgather to which the root alone gives something
 * alltoall       send_starts[r] to send_starts[r + 1] of `send` go to rank r; receive_starts likewise;
 *                largest: most bytes that any rank sends to any
 * reducescatter  starts[r] to starts[r + 1] of `send`, reduced over all ranks, into rank r's `receive`
 *
 * Offsets are in bytes, ranks + 1 of them. divisor: what an average divides by.
 */
void allred_begin_exchange(allred_operation *, allred_segment *, const allred_header *);
void allred_begin_allreduce(allred_operation *, allred_segment *, const allred_header *, const allred_tensor *, size_t,
                            int variant, int op, int divisor);
void allred_begin_allgather(allred_operation *, allred_segment *, const allred_header *, const char *send,
                            char *receive, const uint64_t *starts);
void allred_begin_alltoall(allred_operation *, allred_segment *, const allred_header *, const char *send, char *receive,
                           const uint64_t *send_starts, const uint64_t *receive_starts, size_t largest);
void allred_begin_reducescatter(allred_operation *, allred_segment *, const allred_header *, const char *send,
                                char *receive, const uint64_t *starts, int dtype, int variant, int op, int divisor);

/* A rank's chunk of the present round. */
char *allred_operation_chunk(const allred_operation *, int rank);

/* Take one step. MOVED; PENDING if it must wait for a rank; DONE; or DIFFER: the headers do not agree. */
int allred_step(allred_operation *);

/* Take steps for as long as there is progress, but 20 ms at most, and for up to `patience_ns` without any: spin, then
 * yield the core. */
int allred_run(allred_operation *, int64_t patience_ns);

/* The same, but PENDING as soon as `leave` is not 0. */
int allred_run_unless(allred_operation *, int64_t patience_ns, const _Atomic int *leave);

#endif
