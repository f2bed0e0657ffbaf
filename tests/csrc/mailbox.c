/*
 * Threads play a server and its workers, and every byte that passes between them is checked.
 * Run by `make sanitize` under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.
 *
 *   mailbox [REQUESTS [SEED]]   so many requests of each worker in each case
 *   mailbox overrun             the workers' arrays are a byte too short: only AddressSanitizer can tell, and must
 *
 * What a request moves follows from its seed, which is its record (`make_plan`); both sides compute it. The server adds
 * what comes up, from an arena or not, to the worker's part of its shard; the worker knows what that must be. Either
 * side rests now and then, some times for so long that the other one goes to sleep. The last request of each worker is
 * not answered: the server closes the box.
 */
#define _GNU_SOURCE /* usleep, sched_yield */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "header.h" /* allred_mix */
#include "mailbox.h"

#ifndef SANITIZER
#define SANITIZER "no"
#endif

#define MAX_WORKERS 4
#define MAX_CELLS 24
#define MAX_SLOT_BYTES 320
#define SPIN_WAIT_NS 1000000
#define LIMIT_S 60 /* without progress: far more than a sanitizer or a busy machine takes */
#define UNWRITTEN 0xA5

typedef struct {
  uint64_t seed;
  size_t cells, bytes, sizes[MAX_CELLS]; /* both ways */
  size_t applied, given;                 /* before the server answers */
} plan;

typedef struct {
  allred_mailbox box;
  int index, requests;
  unsigned char *shard, *known; /* the server's, and what it must be */
  size_t shard_bytes;
  uint64_t dice, referenced;
  int dropped;
} worker;

static worker workers[MAX_WORKERS];
static size_t missing;

static uint64_t draw(uint64_t seed, uint64_t a, uint64_t b) {
  return allred_mix(allred_mix(allred_mix(0, seed), a), b);
}

static unsigned char byte_of(uint64_t seed, size_t i) { return (unsigned char)(draw(seed, 1, i) >> 13); }

static void wrong(const char *what, int index, uint64_t number, size_t where) {
  fprintf(stderr, "mailbox, worker %d, request %llu, at %zu: %s\n", index, (unsigned long long)number, where, what);
  _exit(1);
}

static plan make_plan(uint64_t seed, size_t slot_bytes) {
  plan p = {.seed = seed, .cells = draw(seed, 2, 0) % (MAX_CELLS + 1)};
  for (size_t i = 0; i < p.cells; i++) {
    p.sizes[i] = draw(seed, 3, i) % 3 ? slot_bytes : draw(seed, 4, i) % (slot_bytes + 1);
    p.bytes += p.sizes[i];
  }
  p.applied = p.given = p.cells;
  if (draw(seed, 5, 0) % 4 == 0) { /* dropped on the way */
    p.applied = draw(seed, 6, 0) % (p.cells + 1);
    p.given = draw(seed, 7, 0) % (p.applied + 1);
  }
  return p;
}

static void rest(uint64_t *dice) {
  const uint64_t now = (*dice = allred_mix(*dice, 1)) % 512;
  if (now == 0)
    usleep(5000); /* the other side goes to sleep */
  else if (now < 8)
    usleep(20);
  else if (now < 128)
    sched_yield();
}

/* ---- a worker */

/* The stream in some pieces, empty ones among them. */
static size_t cut(const plan *p, char *memory, allred_piece *pieces) {
  size_t count = 0, at = 0;
  while (at < p->bytes) {
    size_t bytes = draw(p->seed, 8, count) % (p->bytes / 4 + 2);
    if (bytes > p->bytes - at) bytes = p->bytes - at;
    pieces[count++] = (allred_piece){memory + at, bytes};
    at += bytes;
  }
  return count;
}

/* Let some pieces of the stream lie in another copy of it. */
static void scatter(const plan *p, const char *memory, const char *copy, allred_piece *pieces, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (draw(p->seed, 11, i) % 3 == 0) pieces[i].data = (char *)copy + (pieces[i].data - memory);
}

static int finish(worker *me, allred_request *request) {
  int status;
  for (long idle = 0; (status = allred_request_run(request, &me->box, SPIN_WAIT_NS)) == ALLRED_REQUEST_PENDING;
       idle++) {
    if (idle > LIMIT_S * 1000) wrong("no progress", me->index, request->number, request->read);
    rest(&me->dice);
  }
  return status;
}

static void check(worker *me, const plan *p, const unsigned char *got, uint64_t number) {
  size_t at = 0;
  for (size_t cell = 0; cell < p->cells; cell++)
    for (size_t i = 0; i < p->sizes[cell]; i++, at++) {
      if (cell < p->applied) me->known[at] += byte_of(p->seed, at);
      if (got[at] != (cell < p->given ? me->known[at] : UNWRITTEN)) wrong("wrong parameter", me->index, number, at);
    }
}

static void *work(void *argument) {
  worker *me = argument;
  allred_request request = {.status = ALLRED_REQUEST_NONE};
  allred_piece *up = malloc((me->shard_bytes + 1) * sizeof *up), *down = malloc((me->shard_bytes + 1) * sizeof *down);
  for (int number = 1; number <= me->requests; number++) {
    const uint64_t seed = draw(me->dice, 9, (uint64_t)number);
    const plan p = make_plan(seed, me->box.slot_bytes);
    uint64_t sizes[MAX_CELLS];
    allred_cell cells[MAX_CELLS];
    for (size_t i = 0, at = 0; i < p.cells; at += p.sizes[i++]) {
      sizes[i] = p.sizes[i];
      cells[i] = (allred_cell){at, p.sizes[i]};
    }
    char *private = malloc(p.bytes + 1), *given = number % 4 ? me->box.arena : private,
         *got = malloc(p.bytes > missing ? p.bytes - missing : 1);
    for (size_t i = 0; i < p.bytes; i++) given[i] = (char)byte_of(seed, i);
    memset(got, UNWRITTEN, p.bytes);
    memcpy(private, given, p.bytes);
    scatter(&p, given, private, up, cut(&p, given, up));
    cut(&p, got, down);
    request.up = (allred_stream){up, 0, 0};
    request.down = (allred_stream){down, 0, 0};
    request.up_cells = sizes;
    request.down_cells = cells;
    request.up_count = request.down_count = p.cells;
    request.shard = (const char *)me->shard;
    request.copy_policy.streaming = number % 3 ? 0 : 4; /* both ways to copy */
    allred_request_begin(&request, &me->box, (const char *)&seed, sizeof seed);
    const int status = finish(me, &request), last = number == me->requests;
    if (status != (last ? ALLRED_REQUEST_BROKEN : ALLRED_REQUEST_DONE))
      wrong("wrong status", me->index, request.number, (size_t)status);
    if (!last) {
      uint64_t reply = 0;
      memcpy(&reply, request.reply.record, sizeof reply);
      if (request.reply.bytes != sizeof reply || reply != ~seed) wrong("wrong reply", me->index, request.number, 0);
      check(me, &p, (unsigned char *)got, request.number);
      me->dropped += p.applied < p.cells;
    }
    free(private);
    free(got);
    me->referenced = request.referenced;
    rest(&me->dice);
  }
  free(up);
  free(down);
  return NULL;
}

/* ---- the server */

static void apply(worker *of, allred_service *service, const plan *p, size_t cell, size_t at) {
  for (long idle = 0; !allred_service_wait(service, &of->box, SPIN_WAIT_NS); idle++)
    if (idle > LIMIT_S * 1000) wrong("no cell", of->index, service->number, cell);
  char buffer[MAX_SLOT_BYTES];
  size_t bytes;
  const char *slot = allred_service_data(service, &of->box, buffer, &bytes);
  if (!slot || bytes != p->sizes[cell]) wrong("wrong size of a cell", of->index, service->number, cell);
  for (size_t i = 0; i < bytes; i++) {
    if ((unsigned char)slot[i] != byte_of(p->seed, at + i)) wrong("wrong gradient", of->index, service->number, at + i);
    of->shard[at + i] += (unsigned char)slot[i];
  }
  allred_service_take(service, &of->box, 1);
}

static void serve_one(worker *of, allred_service *service, uint64_t *dice) {
  allred_record record;
  uint64_t seed;
  if (!allred_service_poll(service, &of->box, &record)) wrong("no request", of->index, service->number, 0);
  memcpy(&seed, record.record, sizeof seed);
  const plan p = make_plan(seed, of->box.slot_bytes);
  if (service->number == (uint64_t)of->requests) {
    allred_mailbox_close(&of->box);
    return;
  }
  for (size_t cell = 0, at = 0; cell < p.applied; at += p.sizes[cell++]) {
    rest(dice);
    apply(of, service, &p, cell, at);
    if (cell < p.given) allred_service_give(service, &of->box, 1);
  }
  rest(dice);
  seed = ~seed;
  allred_service_answer(service, &of->box, (const char *)&seed, sizeof seed);
}

static void serve(int count, uint64_t dice) {
  allred_service services[MAX_WORKERS] = {0};
  allred_service *asked[MAX_WORKERS];
  const allred_mailbox *boxes[MAX_WORKERS];
  for (int i = 0; i < count; i++) asked[i] = &services[i], boxes[i] = &workers[i].box;
  long left = (long)count * workers[0].requests;
  for (int last = 0, idle = 0; left; idle++) {
    const int found = allred_mailbox_wait_any(asked, boxes, count, last, 20 * SPIN_WAIT_NS);
    if (idle > LIMIT_S * 50) wrong("no request comes", -1, 0, (size_t)left);
    if (found < 0) continue;
    serve_one(&workers[found], &services[found], &dice);
    last = (found + 1) % count, idle = 0, left--;
  }
}

static void run_case(int count, size_t slots, size_t slot_bytes, int requests, uint64_t seed, int one_doorbell) {
  pthread_t threads[MAX_WORKERS];
  allred_doorbell doorbell = 0;
  for (int i = 0; i < count; i++) {
    const size_t bytes = allred_mailbox_bytes(slots, slot_bytes), shard = MAX_CELLS * slot_bytes;
    char *memory = aligned_alloc(4096, bytes);
    memset(memory, 0, bytes);
    workers[i] = (worker){.box = {memory, slots, slot_bytes, &doorbell, malloc(shard), shard, 8},
                          .index = i,
                          .requests = requests,
                          .shard = calloc(shard, 1),
                          .known = calloc(shard, 1),
                          .shard_bytes = shard,
                          .dice = draw(seed, 10, (uint64_t)i)};
    if (!one_doorbell) workers[i].box.server_doorbell = allred_mailbox_server_doorbell(&workers[i].box);
    if (pthread_create(&threads[i], NULL, work, &workers[i])) exit(2);
  }
  serve(count, seed);
  for (int i = 0; i < count; i++) {
    pthread_join(threads[i], NULL);
    free(workers[i].box.memory);
    free(workers[i].box.arena);
    free(workers[i].shard);
    free(workers[i].known);
  }
}

int main(int count, char **arguments) {
  static const int many[] = {1, 2, 4};
  static const size_t slots[] = {1, 2, 3, 8}, slot_bytes[] = {64, MAX_SLOT_BYTES};
  missing = count > 1 && strcmp(arguments[1], "overrun") == 0;
  const int requests = count > 1 && !missing ? atoi(arguments[1]) : 100;
  const uint64_t seed = count > 2 ? strtoull(arguments[2], NULL, 0) : 1;
  long checked = 0;
  int dropped = 0;
  for (size_t i = 0; i < 3; i++)
    for (size_t j = 0; j < 4; j++) {
      run_case(many[i], slots[j], slot_bytes[j % 2], requests, draw(seed, i, j), j != 3);
      checked += many[i] * requests;
      for (int w = 0; w < many[i]; w++) dropped += workers[w].dropped;
      if (!workers[0].referenced && requests > 20) return fprintf(stderr, "mailbox: nothing lay in an arena\n"), 1;
    }
  if (!dropped && requests > 20) return fprintf(stderr, "mailbox: no request was dropped\n"), 1;
  printf("mailbox, %s sanitizer: %ld requests of 1, 2 and 4 workers checked, %d answered early; seed %llu\n", SANITIZER,
         checked, dropped, (unsigned long long)seed);
}
