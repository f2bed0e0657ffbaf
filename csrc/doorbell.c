#define _GNU_SOURCE /* syscall, clock_gettime */
#include "doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "chaos.h"

#define SECOND_NS 1000000000

void allred_doorbell_set(allred_doorbell *doorbell, uint32_t value) {
  CHAOS_PAUSE();
  atomic_store_explicit(doorbell, value, memory_order_seq_cst);
  CHAOS_PAUSE();
}

void allred_doorbell_clear(allred_doorbell *doorbell) {
  CHAOS_PAUSE();
  atomic_store_explicit(doorbell, 0, memory_order_seq_cst);
}

void allred_doorbell_sleep(allred_doorbell *doorbell, uint32_t value, int64_t limit_ns) {
  if (CHAOS_FIRES()) return; /* a spurious wake-up */
  if (CHAOS_FIRES()) limit_ns /= 16;
  const struct timespec limit = {limit_ns / SECOND_NS, limit_ns % SECOND_NS};
  if (limit_ns > 0) syscall(SYS_futex, doorbell, FUTEX_WAIT, value, &limit, NULL, 0);
}

void allred_doorbell_ring_if(allred_doorbell *doorbell, uint32_t value) {
  CHAOS_PAUSE();
  if (!value || atomic_load_explicit(doorbell, memory_order_seq_cst) != value) return;
  CHAOS_PAUSE();
  if (atomic_compare_exchange_strong_explicit(doorbell, &value, 0, memory_order_seq_cst, memory_order_seq_cst))
    syscall(SYS_futex, doorbell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

void allred_doorbell_ring(allred_doorbell *doorbell) {
  allred_doorbell_ring_if(doorbell, atomic_load_explicit(doorbell, memory_order_seq_cst));
}

int64_t allred_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * SECOND_NS + now.tv_nsec;
}
