#define _GNU_SOURCE /* syscall, clock_gettime */
#include "bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000

void allred_bell_set(allred_bell *bell) { atomic_store_explicit(bell, 1, memory_order_seq_cst); }

void allred_bell_clear(allred_bell *bell) { atomic_store_explicit(bell, 0, memory_order_seq_cst); }

/* It may also end early: by a signal, or because the word was cleared before. */
void allred_bell_sleep(allred_bell *bell, int64_t limit_ns) {
  const struct timespec limit = {limit_ns / SECOND_NS, limit_ns % SECOND_NS};
  if (limit_ns > 0) syscall(SYS_futex, bell, FUTEX_WAIT, 1, &limit, NULL, 0);
}

void allred_bell_ring(allred_bell *bell) {
  if (!atomic_load_explicit(bell, memory_order_seq_cst)) return;
  if (atomic_exchange_explicit(bell, 0, memory_order_seq_cst)) syscall(SYS_futex, bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

void allred_pause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

int64_t allred_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * SECOND_NS + now.tv_nsec;
}
