/*
 * A worker's request, as steps that never wait: steps 1, 3, 6 and 8 of mailbox.h.
 *
 * Cells up go before cells down, as long as there is room in the ring: so the server is never without work.
 */
#ifndef ALLRED_REQUEST_H
#define ALLRED_REQUEST_H

#include "copy.h"
#include "fuse.h"
#include "mailbox.h"

typedef struct {
  uint64_t offset, bytes; /* in the shard */
} allred_cell;

/* Memory in pieces, as one stream. */
typedef struct {
  const allred_piece *pieces;
  size_t piece, offset; /* how far it has gone */
} allred_stream;

enum { ALLRED_REQUEST_NONE, ALLRED_REQUEST_PENDING, ALLRED_REQUEST_MOVED, ALLRED_REQUEST_DONE, ALLRED_REQUEST_BROKEN };

/* A request; set to zeros before the first one. The caller sets `up` to `down_count`, which stay until the end. */
typedef struct {
  allred_stream up, down;
  const uint64_t *up_cells; /* bytes of each, at most slot_bytes; together those of `up` */
  size_t up_count;
  const char *shard;
  const allred_cell *down_cells; /* together the bytes of `down` */
  size_t down_count;
  int around; /* the caches: there is too much to come down for them */
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

#endif
