#define _GNU_SOURCE /* sched_yield */
#include "step_server.h"

#include <sched.h>

#include "reduce.h"

#define SPINS 40 /* then yield */

/* Whether all workers but `at` have read this cell of their last request. */
static int is_read(const allred_server_boxes *all, int at, size_t cell) {
  for (int i = 0; i < all->count; i++) {
    if (i == at || all->services[i]->given <= cell) continue;
    if (allred_service_read(all->services[i], all->boxes[i]) <= cell) return 0;
  }
  return 1;
}

/* Wait until a condition holds, or the box is closed. */
#define AWAIT(condition, box, idle_limit_ns)                                                                           \
  do {                                                                                                                 \
    int64_t since = 0;                                                                                                 \
    for (int spins = 0; !(condition); spins++) {                                                                       \
      if (spins < SPINS) {                                                                                             \
        allred_pause();                                                                                                \
        continue;                                                                                                      \
      }                                                                                                                \
      const int64_t now = allred_now_ns();                                                                             \
      if (!since) since = now;                                                                                         \
      if (now - since >= (idle_limit_ns) || allred_mailbox_closed(box)) break;                                         \
      sched_yield();                                                                                                   \
    }                                                                                                                  \
  } while (0)

size_t allred_apply_cells(const allred_served_shard *shard, const allred_server_boxes *all, int at, size_t first,
                          int gives, int64_t idle_limit_ns) {
  allred_service *service = all->services[at];
  const allred_mailbox *box = all->boxes[at];
  for (size_t number = first; number < shard->count; number++) {
    const allred_shard_cell *cell = &shard->cells[number];
    AWAIT(allred_service_cells(service, box) && is_read(all, at, number), box, idle_limit_ns);
    if (!allred_service_cells(service, box) || !is_read(all, at, number)) return number;
    size_t bytes;
    const char *data = allred_service_data(service, box, all->buffers[at], &bytes);
    if (!data || bytes != cell->elements * (size_t)cell->element_bytes) return SIZE_MAX;
    void *arrays[ALLRED_RULE_ARRAYS];
    for (int i = 0; i < ALLRED_RULE_ARRAYS; i++) arrays[i] = cell->arrays[i];
    arrays[1] = (void *)(uintptr_t)data;
    allred_update_kernel(shard->rule, cell->element_bytes, allred_variants() - 1)(arrays, shard->numbers,
                                                                                  cell->elements);
    allred_service_take(service, box, 1);
    if (gives) allred_service_give(service, box, 1);
  }
  return shard->count;
}

static int all_are_read(const allred_server_boxes *all, int at) {
  for (int i = 0; i < all->count; i++)
    if (i != at && allred_service_read(all->services[i], all->boxes[i]) < all->services[i]->given) return 0;
  return 1;
}

int allred_request_is_there(const allred_served_shard *shard, const allred_server_boxes *all, int at,
                            int64_t idle_limit_ns) {
  if (shard->count > all->boxes[at]->slots) return 0;
  AWAIT(allred_service_cells(all->services[at], all->boxes[at]) == shard->count && all_are_read(all, at),
        all->boxes[at], idle_limit_ns);
  return allred_service_cells(all->services[at], all->boxes[at]) == shard->count && all_are_read(all, at);
}
