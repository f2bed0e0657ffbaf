#define _GNU_SOURCE /* sched_yield */
#include "request.h"

#include <sched.h>
#include <string.h>

#define SPINS 40            /* then it yields */
#define AWAKE_NS 3000000    /* then it sleeps */
#define LONGEST_NS 20000000 /* the caller wants to look at signals and time limits in between */
#define MOVES_A_LOOK 16
#define CACHED_BYTES (16 << 20) /* up to which parameters may still be in the caches when they are used */

/* The next stretch of a stream that is one piece of memory, at most `room` bytes; the stream goes behind it. */
static char *stretch(allred_stream *stream, size_t room, size_t *bytes) {
  while (stream->offset == stream->pieces[stream->piece].bytes) stream->piece++, stream->offset = 0;
  const allred_piece *piece = &stream->pieces[stream->piece];
  const size_t left = piece->bytes - stream->offset;
  char *data = piece->data + stream->offset;
  *bytes = left < room ? left : room;
  stream->offset += *bytes;
  return data;
}

static void gather(allred_request *request, char *slot, size_t cell_bytes) {
  const uint64_t begun = allred_copy_begin();
  for (size_t at = 0, bytes; at < cell_bytes; at += bytes) {
    const char *from = stretch(&request->up, cell_bytes - at, &bytes);
    allred_copy(&request->pace, slot + at, from, bytes);
  }
  allred_copy_end(&request->pace, begun, cell_bytes);
}

/* Lines that will not stay in the caches are not read into them first: that was a quarter of the time of 100 MB. */
static void scatter(allred_request *request, const char *cell, size_t cell_bytes) {
  allred_pace pace = {.around = request->around};
  for (size_t at = 0, bytes; at < cell_bytes; at += bytes) {
    char *to = stretch(&request->down, cell_bytes - at, &bytes);
    allred_copy(&pace, to, cell + at, bytes);
  }
  if (pace.around) allred_copy_end(&pace, 0, cell_bytes);
}

void allred_request_begin(allred_request *request, const allred_mailbox *box, const char *record, size_t bytes) {
  request->number++;
  request->sent = request->read = request->moves = 0;
  request->idle_from = 0;
  uint64_t down_bytes = 0;
  for (size_t i = 0; i < request->down_count; i++) down_bytes += request->down_cells[i].bytes;
  request->around = down_bytes > CACHED_BYTES;
  request->status = ALLRED_REQUEST_PENDING;
  allred_mailbox_post(box, ALLRED_ASKED, request->number, record, bytes);
  allred_bell_ring(box->server_bell);
}

static int send_cell(allred_request *request, const allred_mailbox *box) {
  if (request->sent == request->up_count) return 0;
  if (request->sent >= box->slots &&
      allred_mailbox_count(box, ALLRED_TAKEN, request->number, request->sent) + box->slots <= request->sent)
    return 0;
  const size_t slot = request->sent % box->slots, bytes = request->up_cells[request->sent];
  gather(request, allred_mailbox_slot(box, slot), bytes);
  allred_mailbox_set_size(box, slot, bytes);
  allred_mailbox_publish(box, ALLRED_SENT, request->number, ++request->sent);
  return 1;
}

static int read_cell(allred_request *request, const allred_mailbox *box) {
  if (request->read == request->down_count ||
      allred_mailbox_count(box, ALLRED_GIVEN, request->number, request->down_count) <= request->read)
    return 0;
  const allred_cell *cell = &request->down_cells[request->read];
  scatter(request, request->shard + cell->offset, cell->bytes);
  allred_mailbox_publish(box, ALLRED_READ, request->number, ++request->read);
  return 1;
}

int allred_request_step(allred_request *request, const allred_mailbox *box) {
  if (request->status != ALLRED_REQUEST_PENDING) return request->status;
  const int closed = allred_mailbox_closed(box); /* first: it may be answered and then closed */
  const int answered = allred_mailbox_posted(box, ALLRED_ANSWERED) == request->number;
  /* Reading first: what the server has just updated is still in a cache. Steps of 25.6 M floats took 11.8 ms instead of
   * 13.3. */
  if (read_cell(request, box) || (!answered && send_cell(request, box))) {
    request->moves++;
    return ALLRED_REQUEST_MOVED;
  }
  if (!answered) return closed ? request->status = ALLRED_REQUEST_BROKEN : ALLRED_REQUEST_PENDING;
  allred_mailbox_open(box, ALLRED_ANSWERED, &request->reply);
  return request->status = ALLRED_REQUEST_DONE;
}

/* Whether a step could be taken after the bell was set; if not, sleep. */
static int step_or_sleep(allred_request *request, const allred_mailbox *box, int64_t limit_ns) {
  allred_bell_set(allred_mailbox_worker_bell(box));
  const int status = allred_request_step(request, box);
  if (status == ALLRED_REQUEST_PENDING) allred_bell_sleep(allred_mailbox_worker_bell(box), limit_ns);
  allred_bell_clear(allred_mailbox_worker_bell(box));
  return status != ALLRED_REQUEST_PENDING;
}

int allred_request_run(allred_request *request, const allred_mailbox *box, int64_t patience_ns) {
  int64_t begun = 0, since = 0;
  for (int spins = 0;; spins++) {
    int status, moved = 0;
    while ((status = allred_request_step(request, box)) == ALLRED_REQUEST_MOVED) {
      moved = 1;
      if (request->moves % MOVES_A_LOOK) continue;
      if (!begun) begun = allred_now_ns();
      if (allred_now_ns() - begun > LONGEST_NS) return ALLRED_REQUEST_PENDING;
    }
    if (status != ALLRED_REQUEST_PENDING) return status;
    if (moved) spins = 0, since = request->idle_from = 0;
    if (spins < SPINS && patience_ns) {
      allred_pause();
      continue;
    }
    const int64_t now = allred_now_ns();
    if (!since) since = now;
    if (!request->idle_from) request->idle_from = now;
    if (now - since >= patience_ns) return ALLRED_REQUEST_PENDING;
    if (now - request->idle_from < AWAKE_NS)
      sched_yield();
    else if (step_or_sleep(request, box, patience_ns - (now - since)))
      spins = 0, since = request->idle_from = 0;
  }
}
