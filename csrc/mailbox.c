#define _GNU_SOURCE /* clock_gettime, sched_yield */
#include "mailbox.h"

#include <sched.h>
#include <string.h>
#include <time.h>

/* Where things are in a box. Processors fetch lines in aligned pairs; each of these is one side's. */
#define PAIR 128
enum {
  REQUEST = 0,
  REPLY = 2 * PAIR,
  SENT = 4 * PAIR, /* and behind it what the slots hold, so that a cell's flag and size are one line */
  TAKEN = 7 * PAIR,
  GIVEN = 8 * PAIR,
  READ = 9 * PAIR,
  CLOSED = 10 * PAIR,
  WORKER_BELL = 11 * PAIR,
  SERVER_BELL = 12 * PAIR,
  SLOTS = 16 * PAIR
};
#define PAGE 4096
#define COUNT_BITS 24 /* ALLRED_MOST_CELLS */

/* A spin takes 30 to 70 ns; a yield 500; to wake from sleep, 30 us. */
#define SPINS 40
#define LONGEST_NS 20000000
#define AWAKE_NS 3000000        /* a worker that waits */
#define SERVER_AWAKE_NS 1000000 /* a server with nothing to do */
#define NAP_NS 200000           /* of a server that no bell wakes */
#define MOVES_A_LOOK 16

typedef _Atomic uint64_t flag;

/* The record of a request or reply, as it lies in the box. */
typedef struct {
  flag number;
  uint64_t bytes;
  char record[ALLRED_RECORD_BYTES];
} letter;

static flag *flag_at(const allred_mailbox *box, size_t place) { return (flag *)(void *)(box->memory + place); }

static letter *letter_at(const allred_mailbox *box, size_t place) { return (letter *)(void *)(box->memory + place); }

static uint32_t *sizes(const allred_mailbox *box) { return (uint32_t *)(void *)(box->memory + SENT + sizeof(flag)); }

static void publish(flag *at, uint64_t value) { atomic_store_explicit(at, value, memory_order_seq_cst); }

static uint64_t look(const flag *at) { return atomic_load_explicit(at, memory_order_seq_cst); }

static void publish_count(const allred_mailbox *box, size_t place, uint64_t number, uint64_t count) {
  publish(flag_at(box, place), number << COUNT_BITS | count);
}

/* The count of this request. A mad process's may be anything, so it is cut to what it can be. */
static uint64_t count_at(const allred_mailbox *box, size_t place, uint64_t number, uint64_t most) {
  const uint64_t value = look(flag_at(box, place)), count = value & ALLRED_MOST_CELLS;
  if (value >> COUNT_BITS != number) return 0;
  return count < most ? count : most;
}

static void write_letter(letter *to, uint64_t number, const char *record, size_t bytes) {
  memcpy(to->record, record, bytes);
  to->bytes = bytes;
  publish(&to->number, number);
}

static void read_letter(const letter *from, allred_record *record) {
  const uint64_t bytes = from->bytes;
  record->bytes = bytes < ALLRED_RECORD_BYTES ? bytes : ALLRED_RECORD_BYTES;
  memcpy(record->record, from->record, record->bytes);
}

size_t allred_mailbox_bytes(size_t slots, size_t slot_bytes) {
  return (SLOTS + slots * slot_bytes + PAGE - 1) / PAGE * PAGE;
}

allred_bell *allred_mailbox_bell(const allred_mailbox *box) {
  return (allred_bell *)(void *)(box->memory + SERVER_BELL);
}

static allred_bell *worker_bell(const allred_mailbox *box) {
  return (allred_bell *)(void *)(box->memory + WORKER_BELL);
}

char *allred_mailbox_slot(const allred_mailbox *box, size_t slot) {
  return box->memory + SLOTS + slot * box->slot_bytes;
}

void allred_mailbox_close(const allred_mailbox *box) {
  publish(flag_at(box, CLOSED), 1);
  allred_bell_ring(worker_bell(box));
  allred_bell_ring(box->server_bell);
}

int allred_mailbox_closed(const allred_mailbox *box) { return look(flag_at(box, CLOSED)) != 0; }

/* ---- waiting */

static void pause_core(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- the worker */

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

static void scatter(allred_request *request, const char *cell, size_t cell_bytes) {
  for (size_t at = 0, bytes; at < cell_bytes; at += bytes) {
    char *to = stretch(&request->down, cell_bytes - at, &bytes);
    memcpy(to, cell + at, bytes);
  }
}

void allred_request_begin(allred_request *request, const allred_mailbox *box, const char *record, size_t bytes) {
  request->number++;
  request->sent = request->read = request->moves = 0;
  request->idle_from = 0;
  request->status = ALLRED_REQUEST_PENDING;
  write_letter(letter_at(box, REQUEST), request->number, record, bytes);
  allred_bell_ring(box->server_bell);
}

static int send_cell(allred_request *request, const allred_mailbox *box) {
  if (request->sent == request->up_count) return 0;
  if (request->sent >= box->slots && count_at(box, TAKEN, request->number, request->sent) + box->slots <= request->sent)
    return 0;
  const size_t slot = request->sent % box->slots, bytes = request->up_cells[request->sent];
  gather(request, allred_mailbox_slot(box, slot), bytes);
  sizes(box)[slot] = (uint32_t)bytes;
  publish_count(box, SENT, request->number, ++request->sent);
  return 1;
}

static int read_cell(allred_request *request, const allred_mailbox *box) {
  if (request->read == request->down_count ||
      count_at(box, GIVEN, request->number, request->down_count) <= request->read)
    return 0;
  const allred_cell *cell = &request->down_cells[request->read];
  scatter(request, request->shard + cell->offset, cell->bytes);
  publish_count(box, READ, request->number, ++request->read);
  return 1;
}

int allred_request_step(allred_request *request, const allred_mailbox *box) {
  if (request->status != ALLRED_REQUEST_PENDING) return request->status;
  const letter *reply = letter_at(box, REPLY);
  const int closed = allred_mailbox_closed(box), answered = look(&reply->number) == request->number; /* in this order */
  if ((!answered && send_cell(request, box)) || read_cell(request, box)) {
    request->moves++;
    return ALLRED_REQUEST_MOVED;
  }
  if (!answered) return closed ? request->status = ALLRED_REQUEST_BROKEN : ALLRED_REQUEST_PENDING;
  read_letter(reply, &request->reply);
  return request->status = ALLRED_REQUEST_DONE;
}

/* Whether a step could be taken after the bell was set; if not, sleep. */
static int step_or_sleep(allred_request *request, const allred_mailbox *box, int64_t limit_ns) {
  allred_bell_set(worker_bell(box));
  const int status = allred_request_step(request, box);
  if (status == ALLRED_REQUEST_PENDING) allred_bell_sleep(worker_bell(box), limit_ns);
  allred_bell_clear(worker_bell(box));
  return status != ALLRED_REQUEST_PENDING;
}

int allred_request_run(allred_request *request, const allred_mailbox *box, int64_t patience_ns) {
  int64_t begun = 0, since = 0;
  for (int spins = 0;; spins++) {
    int status, moved = 0;
    while ((status = allred_request_step(request, box)) == ALLRED_REQUEST_MOVED) {
      moved = 1;
      if (request->moves % MOVES_A_LOOK) continue;
      if (!begun) begun = now_ns();
      if (now_ns() - begun > LONGEST_NS) return ALLRED_REQUEST_PENDING;
    }
    if (status != ALLRED_REQUEST_PENDING) return status;
    if (moved) spins = 0, since = request->idle_from = 0;
    if (spins < SPINS && patience_ns) {
      pause_core();
      continue;
    }
    const int64_t now = now_ns();
    if (!since) since = now;
    if (!request->idle_from) request->idle_from = now;
    if (now - since >= patience_ns) return ALLRED_REQUEST_PENDING;
    if (now - request->idle_from < AWAKE_NS)
      sched_yield();
    else if (step_or_sleep(request, box, patience_ns - (now - since)))
      spins = 0, since = request->idle_from = 0;
  }
}

/* ---- the server */

int allred_service_asked(const allred_service *service, const allred_mailbox *box) {
  return (look(&letter_at(box, REQUEST)->number) & UINT64_MAX >> COUNT_BITS) != service->number;
}

int allred_service_poll(allred_service *service, const allred_mailbox *box, allred_record *record) {
  if (!allred_service_asked(service, box)) return 0;
  const letter *request = letter_at(box, REQUEST);
  *service = (allred_service){.number = look(&request->number) & UINT64_MAX >> COUNT_BITS, .open = 1};
  read_letter(request, record);
  return 1;
}

size_t allred_service_cells(const allred_service *service, const allred_mailbox *box) {
  const uint64_t sent = count_at(box, SENT, service->number, service->taken + box->slots);
  return sent > service->taken ? sent - service->taken : 0;
}

size_t allred_service_slot(const allred_service *service, const allred_mailbox *box, size_t *bytes) {
  const size_t slot = service->taken % box->slots;
  *bytes = sizes(box)[slot];
  return slot;
}

void allred_service_take(allred_service *service, const allred_mailbox *box, size_t cells) {
  service->taken += cells;
  publish_count(box, TAKEN, service->number, service->taken);
  allred_bell_ring(worker_bell(box));
}

void allred_service_give(allred_service *service, const allred_mailbox *box, size_t cells) {
  service->given += cells;
  publish_count(box, GIVEN, service->number, service->given);
  allred_bell_ring(worker_bell(box));
}

size_t allred_service_read(const allred_service *service, const allred_mailbox *box) {
  return count_at(box, READ, service->number, service->given);
}

void allred_service_answer(allred_service *service, const allred_mailbox *box, const char *record, size_t bytes) {
  service->open = 0;
  write_letter(letter_at(box, REPLY), service->number, record, bytes);
  allred_bell_ring(worker_bell(box));
}

int allred_service_wait(const allred_service *service, const allred_mailbox *box, int64_t patience_ns) {
  int64_t since = 0;
  for (int spins = 0;; spins++) {
    if (allred_service_cells(service, box)) return 1;
    if (spins < SPINS) {
      pause_core();
      continue;
    }
    const int64_t now = now_ns();
    if (!since) since = now;
    if (now - since >= patience_ns || allred_mailbox_closed(box)) return 0;
    sched_yield();
  }
}

static int find_asked(const allred_service *const *services, const allred_mailbox *const *boxes, int count, int first) {
  for (int i = 0; i < count; i++) {
    const int at = (first + i) % count;
    if (allred_service_asked(services[at], boxes[at])) return at;
  }
  return -1;
}

/* The bell that all boxes have; NULL if there is none. */
static allred_bell *common_bell(const allred_mailbox *const *boxes, int count) {
  for (int i = 1; i < count; i++)
    if (boxes[i]->server_bell != boxes[0]->server_bell) return NULL;
  return boxes[0]->server_bell;
}

int allred_mailbox_wait_any(const allred_service *const *services, const allred_mailbox *const *boxes, int count,
                            int first, int64_t limit_ns) {
  int64_t since = 0;
  for (int spins = 0;; spins++) {
    int found = find_asked(services, boxes, count, first);
    if (found >= 0) return found;
    if (spins < SPINS) {
      pause_core();
      continue;
    }
    const int64_t now = now_ns();
    if (!since) since = now;
    const int64_t left = limit_ns - (now - since);
    if (left <= 0) return -1;
    if (now - since < SERVER_AWAKE_NS) {
      sched_yield();
      continue;
    }
    allred_bell *bell = common_bell(boxes, count), *sleep_on = bell ? bell : boxes[0]->server_bell;
    allred_bell_set(sleep_on);
    found = find_asked(services, boxes, count, first);
    if (found < 0) allred_bell_sleep(sleep_on, bell || left < NAP_NS ? left : NAP_NS);
    allred_bell_clear(sleep_on);
    if (found >= 0) return found;
  }
}
