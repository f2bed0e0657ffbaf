#define _GNU_SOURCE /* sched_yield */
#include "step_server.h"

#include <sched.h>

#include "reduce.h"

#define SPINS 40 /* then yield */

/* Whether all workers but `at` have copied the first `cells` cells of the shard that their last requests give. */
static int have_copied(const allred_server_boxes *all, int at, size_t cells) {
  for (int i = 0; i < all->count; i++) {
    const allred_service *service = all->services[i];
    if (i == at || service->gives_vectors) continue;
    const size_t needed = service->given < cells ? service->given : cells;
    if (allred_service_read(service, all->boxes[i]) < needed) return 0;
  }
  return 1;
}

/* Wait until both hold: `cells` cells of the request of box `at` have arrived; the other workers have copied the first
 * `reads` cells of the shard. Return 0 after the limit, or if the box is closed. */
static int await_cells(const allred_server_boxes *all, int at, size_t cells, size_t reads, int64_t idle_limit_ns) {
  const allred_service *service = all->services[at];
  const allred_mailbox *box = all->boxes[at];
  int64_t since = 0;
  for (int spins = 0;; spins++) {
    if (allred_service_cells(service, box) >= cells && have_copied(all, at, reads)) return 1;
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

size_t allred_apply_cells(const allred_served_shard *shard, const allred_server_boxes *all, int at, size_t first,
                          int gives, int64_t idle_limit_ns) {
  allred_service *service = all->services[at];
  const allred_mailbox *box = all->boxes[at];
  for (size_t number = first; number < shard->count; number++) {
    const allred_shard_cell *cell = &shard->cells[number];
    if (!await_cells(all, at, 1, number + 1, idle_limit_ns)) return number;
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

int allred_request_is_there(const allred_served_shard *shard, const allred_server_boxes *all, int at,
                            int64_t idle_limit_ns) {
  return shard->count <= all->boxes[at]->slots && await_cells(all, at, shard->count, SIZE_MAX, idle_limit_ns);
}
