/*
 * How one process sleeps until another one wakes it: a futex word in memory that both have, 0 or 1.
 *
 *   the sleeper   1 sets the word   2 looks once more for what it waits for   3 sleeps while the word is set   4 clears
 * it the waker     1 publishes something   2 looks at the word; if it is set, clears it and wakes the sleeper
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

#endif
