/*
 * How a process waits for another: it spins, yields its core, then sleeps on a doorbell, a shared futex word; 0 means
 * that nobody sleeps.
 *
 *   sleeper  1  set the word
 *            2  check again for the event that it waits for
 *            3  sleep while the word is set
 *            4  clear the word
 *   waker    1  publish the event
 *            2  read the word; if it is set, clear it and wake the sleeper
 *
 * At least one of them sees the other, because all four accesses are sequentially consistent; release and acquire would
 * not be enough. So a waker pays for a system call (7 us) only if a process sleeps. A doorbell has one sleeper.
 */
#ifndef ALLRED_DOORBELL_H
#define ALLRED_DOORBELL_H

#include <stdatomic.h>
#include <stdint.h>

typedef _Atomic uint32_t allred_doorbell;

/* Steps 1, 3 (for at most `limit_ns`) and 4 of the sleeper. The sleep can also end early, by a signal. value: not 0. */
void allred_doorbell_set(allred_doorbell *doorbell, uint32_t value);
void allred_doorbell_sleep(allred_doorbell *doorbell, uint32_t value, int64_t limit_ns);
void allred_doorbell_clear(allred_doorbell *doorbell);

/* Step 2 of the waker. ring: whatever value the sleeper has set. ring_if: only if it has set this one. */
void allred_doorbell_ring(allred_doorbell *doorbell);
void allred_doorbell_ring_if(allred_doorbell *doorbell, uint32_t value);

/* The clock CLOCK_MONOTONIC. */
int64_t allred_now_ns(void);

/* The pause instruction of a spin loop: 30 to 70 ns. */
static inline void allred_pause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

#endif
