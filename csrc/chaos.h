/*
 * Failure points: places in the C core where a build for tests does what a machine may do at any time. A rank is
 * delayed between two stores of a protocol, a wait ends early, or a system call moves fewer bytes or is interrupted.
 *
 * `make chaos` builds allred/native/_kernels_chaos with ALLRED_CHAOS; the normal build contains none of this. A run
 * follows from a seed, the variable CHAOS_SEED. The seed selects half of the points for a run. These fire with a
 * probability of 1/4, by a sequence of random numbers of each point and rank.
 */
#ifndef ALLRED_CHAOS_H
#define ALLRED_CHAOS_H

#include <stddef.h>
#include <stdint.h>

#ifdef ALLRED_CHAOS
typedef struct {
  const char *file;
  int line;
  _Atomic uint64_t hits;
} allred_chaos_point;

/* Return a random number that is not 0 if the point fires, else 0. */
uint64_t allred_chaos_fires(allred_chaos_point *);

/* If the point fires: yield the core, or wait for up to 100 us, or rarely for up to 10 ms. */
void allred_chaos_pause(allred_chaos_point *);

/* Return `bytes`, or a smaller number above 0 if the point fires. */
size_t allred_chaos_fewer(allred_chaos_point *, size_t bytes);

#define CHAOS_POINT                                                                                                    \
  ({                                                                                                                   \
    static allred_chaos_point point_here = {__FILE__, __LINE__, 0};                                                    \
    &point_here;                                                                                                       \
  })
#define CHAOS_PAUSE() allred_chaos_pause(CHAOS_POINT)
#define CHAOS_FIRES() (allred_chaos_fires(CHAOS_POINT) != 0)
#define CHAOS_FEWER(bytes) allred_chaos_fewer(CHAOS_POINT, bytes)
#else
#define CHAOS_PAUSE() ((void)0)
#define CHAOS_FIRES() 0
#define CHAOS_FEWER(bytes) (bytes)
#endif

#endif
