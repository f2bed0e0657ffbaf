/*
 * Failure points: places in the C core where a build for tests delays a rank between two stores of a protocol, ends a
 * wait early, or lets a system call move fewer bytes or be interrupted. A machine may do all of this at any time.
 *
 * `make chaos` builds allred/native/_kernels_chaos with ALLRED_CHAOS; the normal build contains none of this. The
 * variable CHAOS_SEED is the seed. It switches each point on with a probability of 1/2. A point that is on fires with a
 * probability of 1/4. Each point has its own sequence of random numbers on each rank.
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
