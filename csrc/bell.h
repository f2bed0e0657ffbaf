/*
 * How one process waits for another. It spins, then yields its core, and in the end sleeps on a futex word in memory
 * that both have: a bell, 0 or 1.
 *
 *   sleeper  1  set the word
 *            2  look once more for what it waits for
 *            3  sleep while the word is set
 *            4  clear the word
 *   waker    1  publish something
 *            2  look at the word; if it is set, clear it and wake the sleeper
 *
 * One of them sees the other: all four accesses are sequentially consistent, which release and acquire would not give.
 * So a waker pays for a system call (7 us) only where somebody sleeps. One sleeper for each bell, any number of wakers.
 */
#ifndef ALLRED_BELL_H
#define ALLRED_BELL_H

#include <stdatomic.h>
#include <stdint.h>

typedef _Atomic uint32_t allred_bell;

/* A sleeper's steps 1, 3 (for so long at most) and 4. */
void allred_bell_set(allred_bell *bell);
void allred_bell_sleep(allred_bell *bell, int64_t limit_ns);
void allred_bell_clear(allred_bell *bell);

/* A waker's step 2. */
void allred_bell_ring(allred_bell *bell);

/* A moment in which the core does nothing: 30 to 70 ns. */
void allred_pause(void);

int64_t allred_now_ns(void);

#endif
