#define _GNU_SOURCE /* sched_yield */
#include "service.h"

#include <sched.h>

#define SPINS 40         /* then it yields */
#define AWAKE_NS 1000000 /* then it sleeps */
#define NAP_NS 200000    /* where no bell wakes it */

int allred_service_asked(const allred_service *service, const allred_mailbox *box) {
  return allred_mailbox_posted(box, ALLRED_ASKED) != service->number;
}

int allred_service_poll(allred_service *service, const allred_mailbox *box, allred_record *record) {
  const uint64_t number = allred_mailbox_posted(box, ALLRED_ASKED);
  if (number == service->number) return 0;
  *service = (allred_service){.number = number, .open = 1};
  allred_mailbox_open(box, ALLRED_ASKED, record);
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

void allred_service_take(allred_service *service, const allred_mailbox *box, size_t cells) {
  service->taken += cells;
  allred_mailbox_publish(box, ALLRED_TAKEN, service->number, service->taken);
  allred_bell_ring(allred_mailbox_worker_bell(box));
}

void allred_service_give(allred_service *service, const allred_mailbox *box, size_t cells) {
  service->given += cells;
  allred_mailbox_publish(box, ALLRED_GIVEN, service->number, service->given);
  allred_bell_ring(allred_mailbox_worker_bell(box));
}

size_t allred_service_read(const allred_service *service, const allred_mailbox *box) {
  return allred_mailbox_count(box, ALLRED_READ, service->number, service->given);
}

void allred_service_answer(allred_service *service, const allred_mailbox *box, const char *record, size_t bytes) {
  service->open = 0;
  allred_mailbox_post(box, ALLRED_ANSWERED, service->number, record, bytes);
  allred_bell_ring(allred_mailbox_worker_bell(box));
}

int allred_service_wait(const allred_service *service, const allred_mailbox *box, int64_t patience_ns) {
  int64_t since = 0;
  for (int spins = 0;; spins++) {
    if (allred_service_cells(service, box)) return 1;
    if (spins < SPINS) {
      allred_pause();
      continue;
    }
    const int64_t now = allred_now_ns();
    if (!since) since = now;
    if (now - since >= patience_ns || allred_mailbox_closed(box)) return 0;
    sched_yield();
  }
}

static int find_asked(allred_service *const *services, const allred_mailbox *const *boxes, int count, int first) {
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

int allred_mailbox_wait_any(allred_service *const *services, const allred_mailbox *const *boxes, int count, int first,
                            int64_t limit_ns) {
  int64_t since = 0, *idle_from = &services[0]->idle_from;
  for (int spins = 0;; spins++) {
    int found = find_asked(services, boxes, count, first);
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
    if (now - *idle_from < AWAKE_NS) {
      sched_yield();
      continue;
    }
    allred_bell *bell = common_bell(boxes, count), *sleep_on = bell ? bell : boxes[0]->server_bell;
    allred_bell_set(sleep_on);
    found = find_asked(services, boxes, count, first);
    if (found < 0) allred_bell_sleep(sleep_on, bell || left < NAP_NS ? left : NAP_NS);
    allred_bell_clear(sleep_on);
  }
}
