/* The steps of both ends of a mailbox (mailbox.h). */
#define _GNU_SOURCE /* sched_yield */
#include <sched.h>
#include <string.h>

#include "mailbox.h"

#define SPINS 40                /* then yield */
#define WORKER_AWAKE_NS 3000000 /* then sleep */
#define SERVER_AWAKE_NS 1000000
#define POLL_NS 200000      /* a server's sleep if its boxes have no doorbell in common */
#define MAX_RUN_NS 20000000 /* after that the caller checks signals and time limits */
#define STEPS_PER_CHECK 16
#define CACHED_BYTES (16 << 20) /* up to this size parameters may still be in the caches when they are used */

/* ---- the worker */

/* Return the next memory of a stream, at most `room` bytes, and advance the stream. */
static char *next_piece(allred_stream *stream, size_t room, size_t *bytes) {
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
    const char *from = next_piece(&request->up, cell_bytes - at, &bytes);
    allred_copy(&request->copy_policy, slot + at, from, bytes);
  }
  allred_copy_end(&request->copy_policy, begun, cell_bytes);
}

/* Return the place of a fragment; 0 if it is copied. */
static uint64_t place_of(const allred_mailbox *box, const char *data, size_t bytes) {
  const uintptr_t base = (uintptr_t)box->arena, at = (uintptr_t)data;
  const int inside = at >= base && at - base < box->arena_bytes && bytes <= box->arena_bytes - (at - base);
  return inside && bytes >= box->min_fragment_bytes ? at - base + 1 : 0;
}

/* Fill a slot with the places of the data of a cell. Return 0 if all of it must be copied. */
static int refer(allred_request *request, const allred_mailbox *box, char *slot, size_t cell_bytes) {
  allred_stream stream = request->up;
  size_t copied = 0, bytes;
  uint64_t count = 0;
  if (!box->arena) return 0;
  for (size_t at = 0; at < cell_bytes; at += bytes, count++) {
    const char *data = next_piece(&stream, cell_bytes - at, &bytes);
    if (!place_of(box, data, bytes)) copied += bytes;
  }
  char *entry = slot + sizeof count, *behind = entry + count * sizeof(allred_fragment);
  if (copied == cell_bytes || (size_t)(behind - slot) + copied > box->slot_bytes) return 0;
  memcpy(slot, &count, sizeof count);
  for (size_t at = 0; at < cell_bytes; at += bytes, entry += sizeof(allred_fragment)) {
    const char *data = next_piece(&request->up, cell_bytes - at, &bytes);
    const allred_fragment fragment = {place_of(box, data, bytes), bytes};
    memcpy(entry, &fragment, sizeof fragment);
    if (fragment.place) continue;
    memcpy(behind, data, bytes);
    behind += bytes;
  }
  request->referenced += cell_bytes - copied;
  return 1;
}

/* With streaming stores, lines are not read into the caches first: for 100 MB this saves a quarter of the time. */
static void scatter(allred_request *request, const char *cell, size_t cell_bytes) {
  allred_copy_policy copy_policy = {.streaming = request->streaming};
  for (size_t at = 0, bytes; at < cell_bytes; at += bytes) {
    char *to = next_piece(&request->down, cell_bytes - at, &bytes);
    allred_copy(&copy_policy, to, cell + at, bytes);
  }
  if (copy_policy.streaming) allred_copy_end(&copy_policy, 0, cell_bytes);
}

void allred_request_begin(allred_request *request, const allred_mailbox *box, const char *record, size_t bytes) {
  request->number++;
  request->sent = request->read = request->progress_count = 0;
  request->idle_from = 0;
  uint64_t down_bytes = 0;
  for (size_t i = 0; i < request->down_count; i++) down_bytes += request->down_cells[i].bytes;
  request->streaming = down_bytes > CACHED_BYTES;
  request->status = ALLRED_REQUEST_PENDING;
  allred_mailbox_post(box, ALLRED_REQUESTED, request->number, record, bytes);
  allred_doorbell_ring(box->server_doorbell);
}

static int send_cell(allred_request *request, const allred_mailbox *box) {
  if (request->sent == request->up_count) return 0;
  if (request->sent >= box->slots &&
      allred_mailbox_count(box, ALLRED_TAKEN, request->number, request->sent) + box->slots <= request->sent)
    return 0;
  const size_t slot = request->sent % box->slots, bytes = request->up_cells[request->sent];
  const int referenced = refer(request, box, allred_mailbox_slot(box, slot), bytes);
  if (!referenced) gather(request, allred_mailbox_slot(box, slot), bytes);
  allred_mailbox_set_size(box, slot, referenced ? bytes | ALLRED_REFERENCED : bytes);
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
  const int closed = allred_mailbox_closed(box); /* read first: the server may answer and then close */
  const int answered = allred_mailbox_posted(box, ALLRED_REPLIED) == request->number;
  /* Read before sending, while the updated cell is in a cache: steps of 25.6 M floats took 11.8 ms instead of 13.3. */
  if (read_cell(request, box) || (!answered && send_cell(request, box))) {
    request->progress_count++;
    return ALLRED_REQUEST_PROGRESSED;
  }
  if (!answered) return closed ? request->status = ALLRED_REQUEST_BROKEN : ALLRED_REQUEST_PENDING;
  allred_mailbox_open(box, ALLRED_REPLIED, &request->reply);
  return request->status = ALLRED_REQUEST_DONE;
}

/* Set the doorbell, and sleep if no step is possible. Return whether one was. */
static int step_or_sleep(allred_request *request, const allred_mailbox *box, int64_t limit_ns) {
  allred_doorbell_set(allred_mailbox_worker_doorbell(box), 1);
  const int status = allred_request_step(request, box);
  if (status == ALLRED_REQUEST_PENDING) allred_doorbell_sleep(allred_mailbox_worker_doorbell(box), 1, limit_ns);
  allred_doorbell_clear(allred_mailbox_worker_doorbell(box));
  return status != ALLRED_REQUEST_PENDING;
}

int allred_request_run(allred_request *request, const allred_mailbox *box, int64_t idle_limit_ns) {
  int64_t begun = 0, since = 0;
  for (int spins = 0;; spins++) {
    int status, moved = 0;
    while ((status = allred_request_step(request, box)) == ALLRED_REQUEST_PROGRESSED) {
      moved = 1;
      if (request->progress_count % STEPS_PER_CHECK) continue;
      if (!begun) begun = allred_now_ns();
      if (allred_now_ns() - begun > MAX_RUN_NS) return ALLRED_REQUEST_PENDING;
    }
    if (status != ALLRED_REQUEST_PENDING) return status;
    if (moved) spins = 0, since = request->idle_from = 0;
    if (spins < SPINS && idle_limit_ns) {
      allred_pause();
      continue;
    }
    const int64_t now = allred_now_ns();
    if (!since) since = now;
    if (!request->idle_from) request->idle_from = now;
    if (now - since >= idle_limit_ns) return ALLRED_REQUEST_PENDING;
    if (now - request->idle_from < WORKER_AWAKE_NS)
      sched_yield();
    else if (step_or_sleep(request, box, idle_limit_ns - (now - since)))
      spins = 0, since = request->idle_from = 0;
  }
}

/* ---- the server */

int allred_service_has_request(const allred_service *service, const allred_mailbox *box) {
  return allred_mailbox_posted(box, ALLRED_REQUESTED) != service->number;
}

int allred_service_poll(allred_service *service, const allred_mailbox *box, allred_record *record) {
  const uint64_t number = allred_mailbox_posted(box, ALLRED_REQUESTED);
  if (number == service->number) return 0;
  *service = (allred_service){.number = number, .open = 1};
  allred_mailbox_open(box, ALLRED_REQUESTED, record);
  return 1;
}

size_t allred_service_cells(const allred_service *service, const allred_mailbox *box) {
  const uint64_t sent = allred_mailbox_count(box, ALLRED_SENT, service->number, service->taken + box->slots);
  return sent > service->taken ? sent - service->taken : 0;
}

size_t allred_service_slot(const allred_service *service, const allred_mailbox *box, size_t *bytes) {
  const size_t slot = service->taken % box->slots;
  *bytes = allred_mailbox_size(box, slot);
  return slot;
}

/* Return the data of a cell of one fragment; gather the others in the buffer. `left`: bytes of the slot. */
static const char *read_fragments(const allred_mailbox *box, const char *slot, size_t left, char *buffer,
                                  size_t bytes) {
  uint64_t count;
  memcpy(&count, slot, sizeof count);
  left -= sizeof count;
  if (count > left / sizeof(allred_fragment)) return NULL;
  const char *entry = slot + sizeof count, *behind = entry + count * sizeof(allred_fragment);
  left -= count * sizeof(allred_fragment);
  size_t at = 0;
  for (uint64_t i = 0; i < count; i++, entry += sizeof(allred_fragment)) {
    allred_fragment fragment;
    memcpy(&fragment, entry, sizeof fragment);
    if (fragment.bytes > bytes - at) return NULL;
    if (fragment.place) {
      if (fragment.place > box->arena_bytes || fragment.bytes > box->arena_bytes - (fragment.place - 1)) return NULL;
      if (fragment.bytes == bytes) return box->arena + fragment.place - 1;
      memcpy(buffer + at, box->arena + fragment.place - 1, fragment.bytes);
    } else {
      if (fragment.bytes > left) return NULL;
      memcpy(buffer + at, behind, fragment.bytes);
      behind += fragment.bytes, left -= fragment.bytes;
    }
    at += fragment.bytes;
  }
  return at == bytes ? buffer : NULL;
}

const char *allred_service_data(allred_service *service, const allred_mailbox *box, char *buffer, size_t *bytes) {
  const size_t slot = allred_service_slot(service, box, bytes);
  const int referenced = (*bytes & ALLRED_REFERENCED) != 0;
  *bytes &= ~ALLRED_REFERENCED;
  if (*bytes > box->slot_bytes || (referenced && !box->arena)) return NULL;
  if (!referenced) return allred_mailbox_slot(box, slot);
  if (service->gathered == service->taken + 1) return buffer;
  const char *data = read_fragments(box, allred_mailbox_slot(box, slot), box->slot_bytes, buffer, *bytes);
  if (data == buffer) service->gathered = service->taken + 1;
  return data;
}

void allred_service_take(allred_service *service, const allred_mailbox *box, size_t cells) {
  service->taken += cells;
  allred_mailbox_publish(box, ALLRED_TAKEN, service->number, service->taken);
  allred_doorbell_ring(allred_mailbox_worker_doorbell(box));
}

void allred_service_give(allred_service *service, const allred_mailbox *box, size_t cells) {
  service->given += cells;
  allred_mailbox_publish(box, ALLRED_GIVEN, service->number, service->given);
  allred_doorbell_ring(allred_mailbox_worker_doorbell(box));
}

size_t allred_service_read(const allred_service *service, const allred_mailbox *box) {
  return allred_mailbox_count(box, ALLRED_READ, service->number, service->given);
}

void allred_service_answer(allred_service *service, const allred_mailbox *box, const char *record, size_t bytes) {
  service->open = 0;
  allred_mailbox_post(box, ALLRED_REPLIED, service->number, record, bytes);
  allred_doorbell_ring(allred_mailbox_worker_doorbell(box));
}

int allred_service_wait(const allred_service *service, const allred_mailbox *box, int64_t idle_limit_ns) {
  int64_t since = 0;
  for (int spins = 0;; spins++) {
    if (allred_service_cells(service, box)) return 1;
    if (spins < SPINS) {
      allred_pause();
      continue;
    }
    const int64_t now = allred_now_ns();
    if (!since) since = now;
    if (now - since >= idle_limit_ns || allred_mailbox_closed(box)) return 0;
    sched_yield();
  }
}

static int find_request(allred_service *const *services, const allred_mailbox *const *boxes, int count, int first) {
  for (int i = 0; i < count; i++) {
    const int at = (first + i) % count;
    if (allred_service_has_request(services[at], boxes[at])) return at;
  }
  return -1;
}

/* Return the doorbell of all boxes; NULL if they have different ones. */
static allred_doorbell *common_doorbell(const allred_mailbox *const *boxes, int count) {
  for (int i = 1; i < count; i++)
    if (boxes[i]->server_doorbell != boxes[0]->server_doorbell) return NULL;
  return boxes[0]->server_doorbell;
}

int allred_mailbox_wait_any(allred_service *const *services, const allred_mailbox *const *boxes, int count, int first,
                            int64_t limit_ns) {
  int64_t since = 0, *idle_from = &services[0]->idle_from;
  for (int spins = 0;; spins++) {
    int found = find_request(services, boxes, count, first);
    if (found >= 0) return *idle_from = 0, found;
    if (spins < SPINS) {
      allred_pause();
      continue;
    }
    const int64_t now = allred_now_ns();
    if (!since) since = now;
    if (!*idle_from) *idle_from = now;
    const int64_t left = limit_ns - (now - since);
    if (left <= 0) return -1;
    if (now - *idle_from < SERVER_AWAKE_NS) {
      sched_yield();
      continue;
    }
    allred_doorbell *doorbell = common_doorbell(boxes, count),
                    *sleep_on = doorbell ? doorbell : boxes[0]->server_doorbell;
    allred_doorbell_set(sleep_on, 1);
    found = find_request(services, boxes, count, first);
    if (found < 0) allred_doorbell_sleep(sleep_on, 1, doorbell || left < POLL_NS ? left : POLL_NS);
    allred_doorbell_clear(sleep_on);
  }
}
