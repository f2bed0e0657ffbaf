/*
 * The link between one worker and one parameter server of a node: a box of shared memory, and the server's shard.
 *
 * A worker makes one request at a time. Its gradients go up through a ring of slots in cells: the worker gathers many
 * small tensors into one slot, and the server applies the slot straight to its shard. Parameters come down without a
 * ring: the server says how far its shard may be read, and the worker scatters that into its own tensors. While the
 * worker gathers cell k + 1 the server applies cell k, and cell k - 1 is on its way down. Request number o:
 *
 *   1  worker   write the record; then `asked` = o
 *   2  server   see `asked`, read the record
 *   3  worker   up cell k: wait until fewer than `slots` cells are not taken, fill slot k % slots; `sent` = (o, k + 1)
 *   4  server   wait until `sent` is past k; read the slot; `taken` = (o, k + 1)
 *   5  server   down cell k of the shard is as the worker may have it; `given` = (o, k + 1)
 *   6  worker   wait until `given` is past k; copy the cell; `read` = (o, k + 1)
 *   7  server   write the reply; then `answered` = o. It is done with the slots, taken or not, and gives no more
 *   8  worker   see `answered`; send no more, copy what is given: the operation is over
 *
 * Why counters start anew without anybody setting them to 0: they hold the number of the request and the count in one
 * word, and the count of another request reads as 0.
 *
 * Why nothing is written where somebody reads. A slot is filled again when the cell before in it was taken; and the
 * first time in a request after the worker has seen the reply to the one before (8), with which the server let go of
 * all slots (7). A request's record is written after 8 of the one before; the server has read that one before 7. A
 * reply is written after the server saw the next `asked` (2), which the worker raised after it had read the last reply
 * (8). What is given of the shard is for the server to keep as it is until `read` is past it, if it wants to.
 * tests/csrc/mailbox_model.c goes through all orders of steps.
 *
 * Each side writes to lines of its own. Flags are stored with release after what they stand for and loaded with acquire
 * before that is read; they are sequentially consistent as well, because of the bells (bell.h). The other side may be
 * dead or mad: what it says is held against the sizes known here before anything is read or written by it.
 *
 * No Python, no globals, no allocation.
 */
#ifndef ALLRED_MAILBOX_H
#define ALLRED_MAILBOX_H

#include <stddef.h>

#include "bell.h"
#include "copy.h"
#include "fuse.h"

#define ALLRED_RECORD_BYTES 192 /* at most */
#define ALLRED_MOST_SLOTS 62
#define ALLRED_MOST_CELLS ((1 << 24) - 1) /* of one request, each way */

typedef struct {
  char *memory; /* zeros at first */
  size_t slots, slot_bytes;
  allred_bell *server_bell; /* of all boxes of a server: it sleeps on one word */
} allred_mailbox;

/* Bytes that a box takes. slot_bytes: a multiple of 64. */
size_t allred_mailbox_bytes(size_t slots, size_t slot_bytes);

/* The bell that is in the box itself: for a server with this box alone. */
allred_bell *allred_mailbox_bell(const allred_mailbox *);

/* Either side leaves, for good, and wakes the other; whether one has. */
void allred_mailbox_close(const allred_mailbox *);
int allred_mailbox_closed(const allred_mailbox *);

/* ---- the worker */

typedef struct {
  uint64_t offset, bytes; /* in the shard */
} allred_cell;

/* Memory in pieces, as one stream. */
typedef struct {
  const allred_piece *pieces;
  size_t piece, offset; /* how far it has gone */
} allred_stream;

typedef struct {
  size_t bytes;
  char record[ALLRED_RECORD_BYTES];
} allred_record;

enum { ALLRED_REQUEST_NONE, ALLRED_REQUEST_PENDING, ALLRED_REQUEST_MOVED, ALLRED_REQUEST_DONE, ALLRED_REQUEST_BROKEN };

/* A request; set to zeros before the first one. The caller sets `up` to `down_count`, which stay until the end. */
typedef struct {
  allred_stream up, down;
  const uint64_t *up_cells; /* bytes of each, at most slot_bytes; together those of `up` */
  size_t up_count;
  const char *shard;
  const allred_cell *down_cells; /* together the bytes of `down` */
  size_t down_count;
  uint64_t number, sent, read;
  uint64_t moves;    /* steps taken */
  int64_t idle_from; /* since when nothing moves; 0 as long as something does */
  int status;
  allred_pace pace;
  allred_record reply;
} allred_request;

void allred_request_begin(allred_request *, const allred_mailbox *, const char *record, size_t bytes);

/* Take one step. MOVED; PENDING if it must wait; DONE; BROKEN: the server closed the box before it answered. */
int allred_request_step(allred_request *, const allred_mailbox *);

/* Take steps for as long as there is progress, but 20 ms at most, and for up to `patience_ns` without any: spin, then
 * yield the core; and sleep, where nothing has moved for some milliseconds. */
int allred_request_run(allred_request *, const allred_mailbox *, int64_t patience_ns);

/* ---- the server */

/* What a server knows of its present request; zeros at first. */
typedef struct {
  uint64_t number, taken, given;
  int open; /* not answered */
} allred_service;

/* Whether there is a request that it has not polled. If so: begin with it, and copy its record. */
int allred_service_asked(const allred_service *, const allred_mailbox *);
int allred_service_poll(allred_service *, const allred_mailbox *, allred_record *);

/* How many cells are in the ring and not taken. The slot of the first of them, and what the worker says it holds, which
 * may be nonsense: more than slot_bytes. */
size_t allred_service_cells(const allred_service *, const allred_mailbox *);
size_t allred_service_slot(const allred_service *, const allred_mailbox *, size_t *bytes);
char *allred_mailbox_slot(const allred_mailbox *, size_t slot);

/* So many cells more are done with; may be read. */
void allred_service_take(allred_service *, const allred_mailbox *, size_t cells);
void allred_service_give(allred_service *, const allred_mailbox *, size_t cells);

/* How many cells of this request the worker has copied, also after the answer. */
size_t allred_service_read(const allred_service *, const allred_mailbox *);

void allred_service_answer(allred_service *, const allred_mailbox *, const char *record, size_t bytes);

/* Wait for a cell, at most so long; whether there is one. */
int allred_service_wait(const allred_service *, const allred_mailbox *, int64_t patience_ns);

/* A box with a new request, looked for from `first` on; -1 if none has one within the limit. Spins, yields, and sleeps
 * in the end: on the bell of the boxes, if they have one in common. */
int allred_mailbox_wait_any(const allred_service *const *, const allred_mailbox *const *, int count, int first,
                            int64_t limit_ns);

#endif
