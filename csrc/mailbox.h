/*
 * The link between one worker and one parameter server of a node: a box of shared memory, and the server's shard.
 *
 * A worker makes one request at a time. Its gradients go up through a ring of slots, one cell per slot: the worker
 * gathers many small tensors into a slot, and the server applies the slot directly to its shard. Parameters come down
 * without a ring: the server publishes how far its shard may be read, and the worker copies that into its own tensors.
 * While the worker gathers cell k + 1, the server applies cell k, and cell k - 1 comes down. Request number o:
 *
 *   1  worker   write the record; then `requested` = o
 *   2  server   see `requested`; read the record
 *   3  worker   up cell k: wait until fewer than `slots` cells are not taken; fill slot k % slots; `sent` = (o, k + 1)
 *   4  server   wait until `sent` is past k; read the slot; `taken` = (o, k + 1)
 *   5  server   down cell k of the shard is ready for the worker; `given` = (o, k + 1)
 *   6  worker   wait until `given` is past k; copy the cell; `read` = (o, k + 1)
 *   7  server   write the reply; then `replied` = o. It reads no slot after this, taken or not, and gives no cell
 *   8  worker   see `replied`; send no more; copy the given cells; the request is complete
 *
 * Why counters need no reset: each holds the number of its request too; the count of another request reads as 0.
 *
 * Why no side writes memory that the other reads:
 *
 *   1  A slot is filled again after the cell before in it was taken. The first time in a request this is after step 8
 *      of the request before, and so after step 7, since when the server reads no slot.
 *   2  The record of a request is written after step 8 of the request before. The server read that record before 7.
 *   3  A reply is written after the server saw the next `requested` (2), set after the worker read the last reply (8).
 *   4  The server may keep a given cell of the shard unchanged until `read` is past it. This is its own choice.
 *
 *   5  The worker's program does not change its gradients before step 8, and the server reads none after step 7.
 *
 * Gradients in the worker's arena (arena.h), which the server maps, are not copied: the slot of such a cell has a table
 * of the places of its data. If a worker gives a request up, it freezes the arena.
 *
 * tests/csrc/mailbox_model.c explores all orders of steps.
 *
 * Each side writes to cache lines of its own. Flags are stored with release after the data that they stand for, and
 * loaded with acquire before it is read; they are also sequentially consistent, because of the doorbells (doorbell.h).
 * The other process may have died or write nonsense: its values are checked before memory is accessed.
 *
 * No Python, no globals, no allocation.
 */
#ifndef ALLRED_MAILBOX_H
#define ALLRED_MAILBOX_H

#include <stddef.h>

#include "copy.h"
#include "doorbell.h"

#define ALLRED_RECORD_BYTES 192 /* at most */
#define ALLRED_MAX_SLOTS 62
#define ALLRED_MAX_CELLS ((1 << 24) - 1) /* of one request, each way */

typedef struct {
  char *memory; /* initially zeros */
  size_t slots, slot_bytes;
  allred_doorbell *server_doorbell; /* the same for all boxes of a server, so that it can sleep on one word */
  char *arena; /* of the worker, as this process maps it; NULL: all data passes through the slots */
  size_t arena_bytes;
  size_t min_fragment_bytes; /* smaller parts of a gradient are copied */
} allred_mailbox;

typedef struct {
  size_t bytes;
  char record[ALLRED_RECORD_BYTES];
} allred_record;

/* Return the bytes of a box. slot_bytes: a multiple of 64. */
size_t allred_mailbox_bytes(size_t slots, size_t slot_bytes);

/* The doorbell of the worker; of a server that has only this box. */
allred_doorbell *allred_mailbox_worker_doorbell(const allred_mailbox *);
allred_doorbell *allred_mailbox_server_doorbell(const allred_mailbox *);

/* Close the box for good, and wake the other side; whether either side has closed it. */
void allred_mailbox_close(const allred_mailbox *);
int allred_mailbox_closed(const allred_mailbox *);

/* Return the memory of a slot. Set and return the bytes of its cell, not checked: may exceed slot_bytes. If
 * ALLRED_REFERENCED is added to them, the slot has the places of the data: a count, as many fragments, and the bytes of
 * those fragments that do not lie in the arena. */
#define ALLRED_REFERENCED ((size_t)1 << 31)
typedef struct {
  uint64_t place, bytes; /* place: offset in the arena, plus 1; 0: not there */
} allred_fragment;
char *allred_mailbox_slot(const allred_mailbox *, size_t slot);
void allred_mailbox_set_size(const allred_mailbox *, size_t slot, size_t bytes);
size_t allred_mailbox_size(const allred_mailbox *, size_t slot);

/* Publish the number of cells of a request, with all data written before; return it, at most `most`. */
typedef enum { ALLRED_SENT, ALLRED_TAKEN, ALLRED_GIVEN, ALLRED_READ } allred_counter;
void allred_mailbox_publish(const allred_mailbox *, allred_counter, uint64_t number, uint64_t count);
uint64_t allred_mailbox_count(const allred_mailbox *, allred_counter, uint64_t number, uint64_t most);

/* Write a record, and publish its number (`requested` or `replied`); return this number; read the record. */
typedef enum { ALLRED_REQUESTED, ALLRED_REPLIED } allred_message;
void allred_mailbox_post(const allred_mailbox *, allred_message, uint64_t number, const char *record, size_t bytes);
uint64_t allred_mailbox_posted(const allred_mailbox *, allred_message);
void allred_mailbox_open(const allred_mailbox *, allred_message, allred_record *);

/* ---- mailbox_steps.c: the worker's request, as steps that never wait: 1, 3, 6 and 8 */

typedef struct {
  uint64_t offset, bytes; /* in the shard */
} allred_cell;

/* Pieces of memory as one stream. */
typedef struct {
  char *data;
  size_t bytes;
} allred_piece;

typedef struct {
  const allred_piece *pieces;
  size_t piece, offset; /* the position in the stream */
} allred_stream;

enum {
  ALLRED_REQUEST_NONE,
  ALLRED_REQUEST_PENDING,
  ALLRED_REQUEST_PROGRESSED,
  ALLRED_REQUEST_DONE,
  ALLRED_REQUEST_BROKEN
};

/* A request; initially zeros. The caller sets `up` to `down_count`, which must stay valid until the request is
 * complete. */
typedef struct {
  allred_stream up, down;
  const uint64_t *up_cells; /* bytes of each cell, at most slot_bytes; together those of `up` */
  size_t up_count;
  const char *shard;
  const allred_cell *down_cells; /* together the bytes of `down` */
  size_t down_count;
  int streaming; /* `down` is too large for the caches: it is written by streaming stores */
  uint64_t number, sent, read;
  uint64_t progress_count; /* steps taken */
  uint64_t referenced;     /* bytes of all requests that the server reads from the arena */
  int64_t idle_from;       /* time of the last progress; 0 while there is progress */
  int status;
  allred_copy_policy copy_policy;
  allred_record reply;
} allred_request;

void allred_request_begin(allred_request *, const allred_mailbox *, const char *record, size_t bytes);

/* Take one step. PROGRESSED; PENDING if it must wait; DONE; or BROKEN: the server closed the box before it answered. */
int allred_request_step(allred_request *, const allred_mailbox *);

/* Take steps for 20 ms at most, until `idle_limit_ns` pass without progress; meanwhile spin, then yield the core, then
 * (after some milliseconds without progress) sleep. */
int allred_request_run(allred_request *, const allred_mailbox *, int64_t idle_limit_ns);

/* ---- mailbox_steps.c: the server's end of mailboxes: 2, 4, 5 and 7 */

/* The state of a server's current request; initially zeros. */
typedef struct {
  uint64_t number, taken, given;
  uint64_t gathered; /* 1 + the number of the cell whose data was gathered last */
  int open;          /* not answered yet */
  int gives_vectors; /* the cells that were given are not of the shard */
  int64_t idle_from; /* of the first box: since when wait_any finds no request; 0 if it found one */
} allred_service;

/* Whether there is a new request. If so, poll begins to serve it, and copies its record. */
int allred_service_has_request(const allred_service *, const allred_mailbox *);
int allred_service_poll(allred_service *, const allred_mailbox *, allred_record *);

/* Return how many cells are in the ring and not taken; the slot of the first of them. `bytes` is its size as the worker
 * states it, which is not checked: it may be more than slot_bytes. */
size_t allred_service_cells(const allred_service *, const allred_mailbox *);
size_t allred_service_slot(const allred_service *, const allred_mailbox *, size_t *bytes);

/* Return the data of this cell: in its slot, in the arena, or gathered in `buffer`, which has slot_bytes bytes. NULL if
 * the worker states a wrong size or place. */
const char *allred_service_data(allred_service *, const allred_mailbox *, char *buffer, size_t *bytes);

/* Publish that this many more cells are taken; may be read. */
void allred_service_take(allred_service *, const allred_mailbox *, size_t cells);
void allred_service_give(allred_service *, const allred_mailbox *, size_t cells);

/* Return how many cells of this request the worker has copied, also after the answer. */
size_t allred_service_read(const allred_service *, const allred_mailbox *);

void allred_service_answer(allred_service *, const allred_mailbox *, const char *record, size_t bytes);

/* Wait for a cell, for at most `idle_limit_ns`; whether there is one. */
int allred_service_wait(const allred_service *, const allred_mailbox *, int64_t idle_limit_ns);

/* Return the index of a box with a new request, searched from `first` on; -1 after the limit. Spins, yields, and sleeps
 * if this call and those before have found no request for 1 ms: on the doorbell that the boxes have in common, if any.
 */
int allred_mailbox_wait_any(allred_service *const *, const allred_mailbox *const *, int count, int first,
                            int64_t limit_ns);

#endif
