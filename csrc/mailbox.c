#include "mailbox.h"

#include <string.h>

#include "chaos.h"

/* The offsets in a box. Processors fetch cache lines in aligned pairs; each side writes to pairs of its own. */
#define PAIR 128
enum {
  REQUESTED = 0,
  REPLIED = 2 * PAIR,
  SENT = 4 * PAIR, /* behind it the bytes of each slot's cell: in the same line if there are few slots */
  TAKEN = 7 * PAIR,
  GIVEN = 8 * PAIR,
  READ = 9 * PAIR,
  CLOSED = 10 * PAIR,
  WORKER_DOORBELL = 11 * PAIR,
  SERVER_DOORBELL = 12 * PAIR,
  SLOTS = 16 * PAIR
};
static const size_t counter_places[] = {SENT, TAKEN, GIVEN, READ}, message_places[] = {REQUESTED, REPLIED};

#define PAGE 4096
#define COUNT_BITS 24 /* ALLRED_MAX_CELLS */

typedef _Atomic uint64_t flag;

/* `bytes` is atomic so that the value that is checked is the value that is used. */
typedef struct {
  flag number, bytes;
  char record[ALLRED_RECORD_BYTES];
} message;

static flag *flag_at(const allred_mailbox *box, size_t place) { return (flag *)(void *)(box->memory + place); }

static message *message_at(const allred_mailbox *box, allred_message which) {
  return (message *)(void *)(box->memory + message_places[which]);
}

static _Atomic uint32_t *size_at(const allred_mailbox *box, size_t slot) {
  return (_Atomic uint32_t *)(void *)(box->memory + SENT + sizeof(flag)) + slot;
}

static void publish(flag *at, uint64_t value) {
  CHAOS_PAUSE();
  atomic_store_explicit(at, value, memory_order_seq_cst);
  CHAOS_PAUSE();
}

static uint64_t load(const flag *at) { return atomic_load_explicit(at, memory_order_seq_cst); }

size_t allred_mailbox_bytes(size_t slots, size_t slot_bytes) {
  return (SLOTS + slots * slot_bytes + PAGE - 1) / PAGE * PAGE;
}

allred_doorbell *allred_mailbox_worker_doorbell(const allred_mailbox *box) {
  return (allred_doorbell *)(void *)(box->memory + WORKER_DOORBELL);
}

allred_doorbell *allred_mailbox_server_doorbell(const allred_mailbox *box) {
  return (allred_doorbell *)(void *)(box->memory + SERVER_DOORBELL);
}

void allred_mailbox_close(const allred_mailbox *box) {
  publish(flag_at(box, CLOSED), 1);
  allred_doorbell_ring(allred_mailbox_worker_doorbell(box));
  allred_doorbell_ring(box->server_doorbell);
}

int allred_mailbox_closed(const allred_mailbox *box) { return load(flag_at(box, CLOSED)) != 0; }

char *allred_mailbox_slot(const allred_mailbox *box, size_t slot) {
  return box->memory + SLOTS + slot * box->slot_bytes;
}

void allred_mailbox_set_size(const allred_mailbox *box, size_t slot, size_t bytes) {
  atomic_store_explicit(size_at(box, slot), (uint32_t)bytes, memory_order_relaxed);
}

size_t allred_mailbox_size(const allred_mailbox *box, size_t slot) {
  return atomic_load_explicit(size_at(box, slot), memory_order_relaxed);
}

void allred_mailbox_publish(const allred_mailbox *box, allred_counter counter, uint64_t number, uint64_t count) {
  publish(flag_at(box, counter_places[counter]), number << COUNT_BITS | count);
}

uint64_t allred_mailbox_count(const allred_mailbox *box, allred_counter counter, uint64_t number, uint64_t most) {
  const uint64_t value = load(flag_at(box, counter_places[counter])), count = value & ALLRED_MAX_CELLS;
  if (value >> COUNT_BITS != number) return 0;
  return count < most ? count : most;
}

void allred_mailbox_post(const allred_mailbox *box, allred_message which, uint64_t number, const char *record,
                         size_t bytes) {
  message *to = message_at(box, which);
  memcpy(to->record, record, bytes);
  CHAOS_PAUSE();
  atomic_store_explicit(&to->bytes, bytes, memory_order_relaxed);
  publish(&to->number, number);
}

uint64_t allred_mailbox_posted(const allred_mailbox *box, allred_message which) {
  return load(&message_at(box, which)->number) & UINT64_MAX >> COUNT_BITS;
}

void allred_mailbox_open(const allred_mailbox *box, allred_message which, allred_record *record) {
  const message *from = message_at(box, which);
  const uint64_t bytes = atomic_load_explicit(&from->bytes, memory_order_relaxed);
  record->bytes = bytes < ALLRED_RECORD_BYTES ? bytes : ALLRED_RECORD_BYTES;
  memcpy(record->record, from->record, record->bytes);
}
