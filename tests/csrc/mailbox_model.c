/*
 * Explores all orders in which a worker and a server can take the steps of mailbox.h, on the real code.
 *
 * One thread plays both, as in model.c, where it says why whole steps are enough: no two cells hold the same number, so
 * whoever reads what is written meanwhile has a wrong one in some order. That argument needs that nobody who writes can
 * stop the reader by a flag. A worker's next request does so, since its counts are new ones: therefore to see a cell
 * and to read it are two steps of the server here. (All other counts change for a reader only by what it does itself.)
 *
 * The server chooses freely at each step: to take the next cell, to give one, or to answer, whatever is left. Checked:
 * every gradient that it takes, every parameter that the worker has when the request ends, and that in every state
 * somebody can move until all have ended.
 *
 * In the end one rule of the protocol is broken at a time, and the checks must notice: the functions of mailbox.h are
 * wrapped by those named __wrap_... here (linked with --wrap), or the server does what it may not.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "header.h" /* allred_mix */
#include "mailbox.h"

#define REQUESTS 3
#define CELLS 3
#define MAX_SLOTS 3
#define SLOT_BYTES 64
#define BOX_BYTES 4096
#define MAX_MOVES (REQUESTS * (5 * CELLS + 4))
#define TABLE (1 << 20)

enum {
  SOUND,
  COUNTS_WITHOUT_NUMBER,
  TAKEN_NOT_WAITED_FOR,
  GIVEN_NOT_WAITED_FOR,
  ANY_ANSWER,
  SHARED_SLOT,
  TAKES_LATE,
  GIVES_LATE,
  MUTATIONS
};
static const char *const mutation_names[] = {"sound",
                                             "counts without the request's number",
                                             "the worker does not wait until a cell is taken",
                                             "the worker does not wait until a cell is given",
                                             "any answer ends the request",
                                             "two cells share a slot",
                                             "the server takes a cell after its answer",
                                             "the server gives a cell after its answer"};

typedef struct {
  _Alignas(32) allred_request request; /* a multiple of what hash() takes at once */
  int ended;                           /* requests */
  uint64_t gradients[CELLS], parameters[CELLS];
  allred_piece up, down;
} worker;

typedef struct {
  _Alignas(32) allred_service service;
  uint64_t shard[CELLS], holds; /* whether it is at a cell */
} server;

typedef struct {
  worker worker;
  server server;
  _Alignas(64) char box[BOX_BYTES];
} state;

static state now, saved[MAX_MOVES + 1];
static allred_doorbell doorbell;
static allred_mailbox box = {.memory = now.box, .slot_bytes = SLOT_BYTES, .server_doorbell = &doorbell};
static size_t cells_of[REQUESTS];
static const uint64_t sizes[CELLS] = {8, 8, 8};
static const allred_cell rows[CELLS] = {{0, 8}, {8, 8}, {16, 8}};
static int mutation;
static const char *failure;

/* ---- what is broken */

void __real_allred_mailbox_publish(const allred_mailbox *, allred_counter, uint64_t, uint64_t);
void __wrap_allred_mailbox_publish(const allred_mailbox *at, allred_counter counter, uint64_t number, uint64_t count) {
  __real_allred_mailbox_publish(at, counter, mutation == COUNTS_WITHOUT_NUMBER ? 0 : number, count);
}

uint64_t __real_allred_mailbox_count(const allred_mailbox *, allred_counter, uint64_t, uint64_t);
uint64_t __wrap_allred_mailbox_count(const allred_mailbox *at, allred_counter counter, uint64_t number, uint64_t most) {
  if (mutation == TAKEN_NOT_WAITED_FOR && counter == ALLRED_TAKEN) return most;
  if (mutation == GIVEN_NOT_WAITED_FOR && counter == ALLRED_GIVEN) return most;
  return __real_allred_mailbox_count(at, counter, mutation == COUNTS_WITHOUT_NUMBER ? 0 : number, most);
}

uint64_t __real_allred_mailbox_posted(const allred_mailbox *, allred_message);
uint64_t __wrap_allred_mailbox_posted(const allred_mailbox *at, allred_message letter) {
  const uint64_t number = __real_allred_mailbox_posted(at, letter);
  return mutation == ANY_ANSWER && number ? __real_allred_mailbox_posted(at, ALLRED_REQUESTED) : number;
}

char *__real_allred_mailbox_slot(const allred_mailbox *, size_t);
char *__wrap_allred_mailbox_slot(const allred_mailbox *at, size_t slot) {
  return __real_allred_mailbox_slot(at, mutation == SHARED_SLOT ? slot / 2 : slot);
}

/* ---- the worker */

static uint64_t gradient(uint64_t number, size_t cell) { return allred_mix(allred_mix(0, number), cell); }

static void begin(worker *me) {
  if (me->ended == REQUESTS) return;
  const size_t cells = cells_of[me->ended];
  allred_request *request = &me->request;
  for (size_t i = 0; i < CELLS; i++) me->gradients[i] = gradient((uint64_t)me->ended + 1, i);
  memset(me->parameters, 0, sizeof me->parameters);
  me->up = (allred_piece){(char *)me->gradients, cells * 8};
  me->down = (allred_piece){(char *)me->parameters, cells * 8};
  request->up = (allred_stream){&me->up, 0, 0};
  request->down = (allred_stream){&me->down, 0, 0};
  request->up_cells = sizes;
  request->down_cells = rows;
  request->up_count = request->down_count = cells;
  request->shard = (const char *)now.server.shard;
  allred_request_begin(request, &box, (const char *)&cells, sizeof cells);
}

/* The reply says how many cells were given: those are there, and no others. */
static int right(const worker *me) {
  const uint64_t number = me->request.number;
  uint64_t reply[2];
  memcpy(reply, me->request.reply.record, sizeof reply);
  if (reply[0] != number) return 0;
  for (size_t i = 0; i < CELLS; i++)
    if (me->parameters[i] != (i < reply[1] ? gradient(number, i) : 0)) return 0;
  return 1;
}

static int move_worker(void) {
  worker *me = &now.worker;
  if (me->ended == REQUESTS) return 0;
  const int status = allred_request_step(&me->request, &box);
  if (status == ALLRED_REQUEST_PENDING) return 0;
  if (status == ALLRED_REQUEST_PROGRESSED) return 1;
  if (!right(me)) failure = "wrong parameter or reply";
  me->ended++;
  begin(me);
  return 1;
}

/* ---- the server */

enum { POLL, SEE, TAKE, GIVE, ANSWER, CHOICES };

static void take(server *me) {
  uint64_t number;
  size_t bytes;
  const size_t slot = allred_service_slot(&me->service, &box, &bytes);
  memcpy(&number, allred_mailbox_slot(&box, slot), sizeof number);
  if (bytes != sizeof number || number != gradient(me->service.number, me->service.taken)) failure = "wrong gradient";
  me->shard[me->service.taken] = number;
  me->holds = 0;
  allred_service_take(&me->service, &box, 1);
}

/* Whether the server could make this choice; then it has. */
static int move_server(int choice) {
  server *me = &now.server;
  allred_service *service = &me->service;
  allred_record record;
  if (choice == POLL) return !service->open && allred_service_poll(service, &box, &record);
  if (choice == SEE) {
    if (!service->open || me->holds || !allred_service_cells(service, &box)) return 0;
    return me->holds = 1;
  }
  if (choice == TAKE) {
    if (!me->holds) return 0;
    return take(me), 1;
  }
  if (choice == GIVE) {
    if (!(service->open || mutation == GIVES_LATE) || service->given == service->taken) return 0;
    return allred_service_give(service, &box, 1), 1;
  }
  if (!service->open) return 0;
  if (mutation != TAKES_LATE) me->holds = 0;
  const uint64_t reply[] = {service->number, service->given};
  return allred_service_answer(service, &box, (const char *)reply, sizeof reply), 1;
}

/* ---- the search */

static struct {
  uint64_t key;
  double orders;
} table[TABLE];
static size_t used[TABLE], known;
static uint64_t states, edges;

static uint64_t hash(void) {
  uint64_t lanes[4] = {0, 1, 2, 3}, words[4];
  for (size_t at = 0; at + sizeof words <= sizeof now; at += sizeof words) {
    memcpy(words, (const char *)&now + at, sizeof words);
    for (int lane = 0; lane < 4; lane++) lanes[lane] = allred_mix(lanes[lane], words[lane]);
  }
  return allred_mix(allred_mix(allred_mix(lanes[0], lanes[1]), lanes[2]), lanes[3]);
}

static double explore(int depth) {
  const uint64_t key = hash();
  size_t at = key % TABLE;
  while (table[at].key && table[at].key != key) at = (at + 1) % TABLE;
  if (table[at].key) return table[at].orders;
  if (known == TABLE / 2 || depth == MAX_MOVES)
    exit((fprintf(stderr, "mailbox_model: TABLE or MAX_MOVES is too small\n"), 2));
  table[at].key = key;
  used[known++] = at;
  double orders = 0;
  saved[depth] = now;
  for (int choice = -1; choice < CHOICES && !failure; choice++) {
    if (!(choice < 0 ? move_worker() : move_server(choice))) continue;
    edges++;
    if (!failure) orders += explore(depth + 1);
    now = saved[depth];
  }
  if (now.worker.ended == REQUESTS && orders == 0) orders = 1;
  if (orders == 0 && !failure) failure = "nobody can move";
  return table[at].orders = orders;
}

/* Go through all orders for every number of cells in each of the requests; the most orders of one of these. */
static double search(size_t slots) {
  double most = 0;
  box.slots = slots;
  for (int i = 0; i < (CELLS + 1) * (CELLS + 1) * (CELLS + 1) && !failure; i++) {
    for (int k = 0, rest = i; k < REQUESTS; k++, rest /= CELLS + 1) cells_of[k] = (size_t)(rest % (CELLS + 1));
    memset(&now, 0, sizeof now);
    begin(&now.worker);
    const double orders = explore(0);
    if (orders > most) most = orders;
    states += known;
    while (known) table[used[--known]].key = 0;
  }
  return most;
}

static void show_failure(void) {
  printf("%s; slots %zu, requests of", failure, box.slots);
  for (int i = 0; i < REQUESTS; i++) printf(" %zu", cells_of[i]);
  puts(" cells");
}

int main(void) {
  for (size_t slots = 1; slots <= MAX_SLOTS; slots++) {
    states = edges = 0;
    const double most = search(slots);
    if (failure) return show_failure(), 1;
    printf("mailbox model, slots %zu: %llu states, %llu steps, up to %.0e orders of them: all right\n", slots,
           (unsigned long long)states, (unsigned long long)edges, most);
  }
  for (mutation = 1; mutation < MUTATIONS; mutation++) {
    for (size_t slots = 2; slots <= MAX_SLOTS && !failure; slots++) search(slots);
    printf("  mutation, %s: ", mutation_names[mutation]);
    if (!failure) return puts("NOT NOTICED"), 1;
    show_failure();
    failure = NULL;
  }
}
