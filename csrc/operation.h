/*
 * A collective operation of the ranks of one node, as steps that never wait.
 *
 * Data passes in rounds of one chunk per rank. All ranks take the same rounds. A round of operation number o:
 *
 *   1  FILL          write this rank's data of the round to its ring, or to its inline slot if this is all and small
 *   2                publish it: in round 0 with the header of operation o, in later rounds as tick 2*round of `stage`
 *   3  WAIT_FILLED   wait until every rank has published; in round 0 compare the headers, and end here if they differ
 *   4  REDUCE        only in a two-phase allreduce: reduce this rank's part of all chunks into its own chunk, and
 *                    publish it as tick 2*round + 1
 *   5  WAIT_REDUCED  wait until every rank has published its reduced part
 *   6  DRAIN         read the chunks of all ranks into this rank's arrays
 *
 * Operations across hosts have one or two rounds of another kind (network.h).
 *
 * Operations on large tensors have a first round of another kind if all ranks map the memory of each (arenas):
 * allreduce_in_place.h for an allreduce, collectives.c for the others.
 *
 * Why no rank writes memory that another reads:
 *
 *   1  A rank that fills round r has seen all ranks publish round r - 1. They drained round r - 2 before that. So only
 *      the chunk of round r - 1 may still be read.
 *   2  The next chunk does not touch it: it lies behind it, or at the start of a ring that has room for three chunks.
 *      (With room for two, a short chunk and a long one behind it would reach back to the start.)
 *   3  The same holds for inline slots between operations: a rank that begins operation o has seen all ranks publish
 *      o - 1. They had completed o - 2, which used the same slot.
 *   4  All ranks agree on places, because these depend only on operations whose headers agree. If headers differ, no
 *      rank reads data, and no place is used.
 *
 * tests/csrc/model.c explores all orders of steps.
 */
#ifndef ALLRED_OPERATION_H
#define ALLRED_OPERATION_H

#include <stdatomic.h>

#include "reduce.h"
#include "segment.h"

/* A tensor to reduce: `bytes` bytes of a dtype of reduce.h. `out` may be `in`. wire: the type in which its numbers
 * travel, or 0 if this is their dtype: within a host a narrower dtype (allred_narrows), between hosts an encoding
 * (encode.h). index: its position in the caller's list. location: the position of its location in
 * the table of locations, set by the operation (allreduce_in_place.h). */
typedef struct {
  const char *in;
  char *out;
  size_t bytes;
  int dtype, wire;
  uint32_t index, location;
} allred_tensor;

typedef struct {
  size_t tensor, offset;
} allred_cursor;

/* Numbers that are summed together: their bytes, and the dtype of the sum. Between hosts also the type in which they
 * travel, the first tensor and its numbers before the window, and the numbers of the operation before the window. */
typedef struct {
  size_t bytes;
  int dtype, wire;
  allred_cursor first;
  size_t passed;
} allred_window;

enum { ALLRED_DONE, ALLRED_PENDING, ALLRED_PROGRESSED, ALLRED_DIFFER };

typedef struct allred_operation allred_operation;

/* What one kind of operation does in FILL, REDUCE and DRAIN; each function may be NULL.
 *
 * agreed  called after step 3; it may change the transfer
 * reduce  NULL: there is no step 4 and 5. Returns DONE; or PROGRESSED or PENDING, as allred_step, and is called again
 * next    called at the end of the round; it may change the transfer and the rounds
 */
typedef struct {
  void (*fill)(allred_operation *, char *chunk);
  void (*agreed)(allred_operation *);
  int (*reduce)(allred_operation *, char *chunk);
  void (*drain)(allred_operation *);
  void (*next)(allred_operation *);
} allred_transfer;

/* What operations across hosts do in other ways (network.h).
 *
 * begin       called when an operation is prepared for one host; it changes the transfer and the rounds
 * header_run  see allred_header_run
 * wait        wait for the network, at most limit_ns; return 0 at once if this rank waits for no connection
 */
typedef struct allred_across {
  void (*begin)(allred_operation *);
  const allred_header *(*header_run)(const allred_segment *, uint64_t operation, int index, uint64_t *ranks);
  int (*wait)(const allred_segment *, int64_t limit_ns);
} allred_across;

struct allred_operation {
  allred_segment *segment;
  const allred_transfer *transfer;
  allred_header header;
  uint64_t number, round, rounds;
  uint64_t first_tick;
  int is_inline;                   /* whether all data fits into the inline slot */
  _Atomic uint64_t progress_count; /* steps taken; any thread may read it to detect progress */
  int compares_board;              /* whether the headers of all hosts are compared (network.h) */
  int phase, ready_ranks, status;  /* ready_ranks: the ranks below have reached the phase */
  /* a reduction */
  int variant, op, divisor;
  int weighted;       /* numbers of each rank are multiplied by its weight (allred_weight) */
  uint64_t samples;   /* of all ranks, in the headers of a step; 0 if they are not counted, and in other operations */
  int64_t waited_ns;  /* in a step: from the publication of its header until the headers of all ranks agreed */
  int checks_finite;  /* the same on all ranks */
  float *residual;    /* between hosts, of each number of the table that is encoded (encode.h); NULL: errors are lost */
  uint32_t nonfinite; /* 1 + the smallest index of a tensor whose result was found not to be finite; 0: none */
  size_t tensor_count; /* tensors that pass through the ring; those that are reduced in place lie behind them */
  allred_tensor *tensors;
  allred_cursor filled, drained;
  allred_cursor slice; /* the next part that this rank reduces or reads in place, */
  size_t slice_lines;  /* and the lines that are left of it */
  size_t chunk_bytes;  /* of the round: its data, and the room for wide results behind it */
  size_t data_bytes;
  int chunk_dtype, chunk_wire;
  /* an exchange: the offsets of the data for each rank in `send`, and of the data from each rank in `receive` */
  const char *send;
  char *receive;
  const uint64_t *send_starts, *receive_starts;
  size_t part_bytes;
  const allred_transfer *ring; /* of the later rounds of an exchange that begins with locations (collectives.c), or of a
                                * step whose first round was unweighted (allreduce.c) */
  uint64_t ring_rounds, first_round; /* the number of these, and of the first one that passes data through the ring */
  /* in a queue, see queue.h */
  allred_operation *next;
  int holds, continues;
  _Atomic int settled;
};

/*
 * Prepare an operation. It gets its number with its first step; the operations of a segment run one at a time, in the
 * order of these steps. The header is copied; everything else must stay valid until the operation is complete.
 *
 * exchange       only the headers: a barrier
 * allreduce      tensors reduced over all ranks; the table of tensors is the fusion: they pass as one stream. The
 *                operation may change the order of the table
 * allgather      bytes starts[r] to starts[r + 1] of `receive` come from `send` of rank r, which may be this part of
 *                its own `receive`. A broadcast is an allgather to which only the root contributes
 * alltoall       send_starts[r] to send_starts[r + 1] of `send` go to rank r; receive_starts likewise;
 *                largest: the most bytes that any rank sends to any other
 * reducescatter  starts[r] to starts[r + 1] of `send`, reduced over all ranks, go to `receive` of rank r
 *
 * Between hosts an allreduce encodes tensors with a wire type; `residual`, set after this call, has room for a number
 * of each element of the table. A rank uses its own part of it, the same one in each operation with an equal table.
 *
 * An allreduce with `checks_finite`, set after this call, checks each block of a result of floats before it writes it.
 * A block that is not finite is written on no rank: with `out` = `in`, the numbers that caused it are still there.
 * Which finite numbers share a block with them depends on the path: ring, or in place.
 *
 * If its header says so (ALLRED_WEIGHTED), an allreduce multiplies the numbers of each rank by the weight of this rank,
 * rounds the products, and then reduces them. Only Sum and Average, and dtypes that allred_can_weigh. The average of a
 * step (ALLRED_KIND_STEP_ALLREDUCE) does so if the ranks have different numbers of samples; the caller makes sure that
 * samples * ranks < 2**53, and that the dtypes can be weighed.
 *
 * Offsets are in bytes, ranks + 1 of them. divisor: the divisor of an average.
 */
void allred_begin_exchange(allred_operation *, allred_segment *, const allred_header *);
void allred_begin_allreduce(allred_operation *, allred_segment *, const allred_header *, allred_tensor *, size_t,
                            int variant, int op, int divisor);
void allred_begin_allgather(allred_operation *, allred_segment *, const allred_header *, const char *send,
                            char *receive, const uint64_t *starts);
void allred_begin_alltoall(allred_operation *, allred_segment *, const allred_header *, const char *send, char *receive,
                           const uint64_t *send_starts, const uint64_t *receive_starts, size_t largest);
void allred_begin_reducescatter(allred_operation *, allred_segment *, const allred_header *, const char *send,
                                char *receive, const uint64_t *starts, int dtype, int variant, int op, int divisor);

/* Write a block of the result of an allreduce, at most ALLRED_BLOCK_BYTES, to `count` targets, at this offset. */
#define ALLRED_BLOCK_BYTES ((size_t)8192) /* stays in the L1 cache; 2048, 4096 and 16384 were slower */
void allred_write_block(allred_operation *, const allred_tensor *, char *const *targets, int count, size_t offset,
                        const char *block, size_t bytes);

/* What one step reads or reduces in arenas, at most; between steps the caller checks signals and time limits. */
#define ALLRED_PIECE_BYTES ((size_t)1 << 18)

static inline size_t allred_smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Return the rounds that so many bytes need; an empty operation has one. */
static inline uint64_t allred_rounds(size_t bytes, size_t chunk) { return bytes ? (bytes + chunk - 1) / chunk : 1; }

/* Return the header of a run of an operation: `ranks` consecutive ranks, in the order of the hosts, have it. NULL:
 * there are no more runs. */
const allred_header *allred_header_run(const allred_segment *, uint64_t operation, int index, uint64_t *ranks);

/* Return the weight of the rank with this header, in an operation that is weighted. In a step it is the rank's number
 * of samples, divided by the mean of all ranks. */
static inline double allred_weight(const allred_operation *op, const allred_header *header) {
  if (!op->samples) return allred_header_weight(header);
  return (double)(header->note * (uint64_t)op->divisor) / (double)op->samples;
}

/* After the headers of a step agree: add up the samples of all ranks, and weight the average if they differ. Then data
 * that was published with the headers is not used, and the next rounds pass it again, weighted. */
void allred_count_samples(allred_operation *op);

/* Pack tensors into the chunk: the FILL of an allreduce. */
void allred_fill_tensors(allred_operation *op, char *chunk);

/* For operations across hosts: pack tensors of one dtype into a window of this many bytes, and return what it holds;
 * write the sums in a window to the tensors. slices: where the parts of the window are, of `part` bytes each. */
allred_window allred_fill_window(allred_operation *op, char *to, size_t room);
void allred_drain_window(allred_operation *op, const char *const *slices, size_t part, allred_window window);

/* Return a rank's chunk of the current round. */
char *allred_operation_chunk(const allred_operation *, int rank);

/* Take one step. PROGRESSED; PENDING if it must wait for a rank; DONE; or DIFFER: the headers do not agree. */
int allred_step(allred_operation *);

/*
 * How a thread waits. It spins, then yields its core. After a yield of more than 50 us the core counts as contended for
 * 10 ms: another thread used it. A wait on a contended core sleeps until the awaited rank publishes something.
 *
 * idle_limit_ns    it ends after so long without progress
 * stop             it ends as soon as this is not 0
 * contended_until  until this time the core counts as contended; NULL: the wait never sleeps
 */
typedef struct {
  int64_t idle_limit_ns;
  const _Atomic int *stop;
  int64_t *contended_until;
} allred_wait_policy;

/* Take steps for 20 ms at most, or until the wait ends. */
int allred_run_with(allred_operation *, const allred_wait_policy *);

/* The same for a caller, which waits for the operation. It may sleep only if the ranks of the node have at least as
 * many cores (segment->may_sleep). With fewer cores a long yield means that a peer works; there, sleeping took two to
 * six times as long as yielding (4 and 8 ranks on 2 cores, 4 B to 4 MiB). */
allred_wait_policy allred_caller_policy(allred_segment *, int64_t idle_limit_ns);
int allred_run(allred_operation *, int64_t idle_limit_ns);

#endif
