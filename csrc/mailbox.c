#include "mailbox.h"

#include <string.h>

/* Where things are in a box. Processors fetch lines in aligned pairs; what one side writes is in pairs of its own. */
#define PAIR 128
enum {
  ASKED = 0,
  ANSWERED = 2 * PAIR,
  SENT = 4 * PAIR, /* and behind it the sizes of the slots' cells: one line, where there are few slots */
  TAKEN = 7 * PAIR,
  GIVEN = 8 * PAIR,
  READ = 9 * PAIR,
  CLOSED = 10 * PAIR,
  WORKER_BELL = 11 * PAIR,
  SERVER_BELL = 12 * PAIR,
  SLOTS = 16 * PAIR
};
static const size_t counter_places[] = {SENT, TAKEN, GIVEN, READ}, letter_places[] = {ASKED, ANSWERED};

#define PAGE 4096
#define COUNT_BITS 24 /* ALLRED_MOST_CELLS */

typedef _Atomic uint64_t flag;

/* What is checked before it is used is read once: an atomic. */
typedef struct {
  flag number, bytes;
  char record[ALLRED_RECORD_BYTES];
} letter;

static flag *flag_at(const allred_mailbox *box, size_t place) { return (flag *)(void *)(box->memory + place); }

static letter *letter_at(const allred_mailbox *box, allred_letter which) {
  return (letter *)(void *)(box->memory + letter_places[which]);
}

static _Atomic uint32_t *size_at(const allred_mailbox *box, size_t slot) {
  return (_Atomic uint32_t *)(void *)(box->memory + SENT + sizeof(flag)) + slot;
}

static void publish(flag *at, uint64_t value) { atomic_store_explicit(at, value, memory_order_seq_cst); }

static uint64_t look(const flag *at) { return atomic_load_explicit(at, memory_order_seq_cst); }

size_t allred_mailbox_bytes(size_t slots, size_t slot_bytes) {
  return (SLOTS + slots * slot_bytes + PAGE - 1) / PAGE * PAGE;
}

allred_bell *allred_mailbox_worker_bell(const allred_mailbox *box) {
  return (allred_bell *)(void *)(box->memory + WORKER_BELL);
}

allred_bell *allred_mailbox_server_bell(const allred_mailbox *box) {
  return (allred_bell *)(void *)(box->memory + SERVER_BELL);
}

void allred_mailbox_close(const allred_mailbox *box) {
  publish(flag_at(box, CLOSED), 1);
  allred_bell_ring(allred_mailbox_worker_bell(box));
  allred_bell_ring(box->server_bell);
}

int allred_mailbox_closed(const allred_mailbox *box) { return look(flag_at(box, CLOSED)) != 0; }

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
  const uint64_t value = look(flag_at(box, counter_places[counter])), count = value & ALLRED_MOST_CELLS;
  if (value >> COUNT_BITS != number) return 0;
  return count < most ? count : most;
}

void allred_mailbox_post(const allred_mailbox *box, allred_letter which, uint64_t number, const char *record,
                         size_t bytes) {
  letter *to = letter_at(box, which);
  memcpy(to->record, record, bytes);
  atomic_store_explicit(&to->bytes, bytes, memory_order_relaxed);
  publish(&to->number, number);
}

uint64_t allred_mailbox_posted(const allred_mailbox *box, allred_letter which) {
  return look(&letter_at(box, which)->number) & UINT64_MAX >> COUNT_BITS;
}

void allred_mailbox_open(const allred_mailbox *box, allred_letter which, allred_record *record) {
  const letter *from = letter_at(box, which);
  const uint64_t bytes = atomic_load_explicit(&from->bytes, memory_order_relaxed);
  record->bytes = bytes < ALLRED_RECORD_BYTES ? bytes : ALLRED_RECORD_BYTES;
  memcpy(record->record, from->record, record->bytes);
}
