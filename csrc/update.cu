/*
 * The optimizers' updates on a GPU: the loops of update_body.h, one launch per tensor. The results have the same bits as
 * those of the C kernels and of numpy (no fused multiply-adds: -fmad=false), except that float32 numbers below 1.2e-38
 * count as 0 (cupy adds -ftz=true). allred/gpu/kernels.py compiles this.
 */
#ifndef NULL
#define NULL 0
#endif
#define STORAGE
#define EACH(count)                                                               \
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < (count); i += (size_t)gridDim.x * blockDim.x)
#define ROOT(x) sqrt(x)
#define POSITIVE(x) ((((x) > 0) | ((x) != (x))) ? (x) : 0)
#define FIX(flag, condition, statement) \
  if (condition) {                      \
    enum { flag = 1 };                  \
    statement;                          \
  } else {                              \
    enum { flag = 0 };                  \
    statement;                          \
  }

#define REAL float
#define NAME(name) name##_float32
#define TARGET __device__
#include "update_body.h"
#define REAL double
#define NAME(name) name##_float64
#define TARGET __device__
#include "update_body.h"

/* Arrays and numbers as listed in update.h; NULL and 0 for those that a rule does not use. */
#define UPDATE(RULE)                                                                                                  \
  extern "C" __global__ void update_##RULE(void *a, void *b, void *c, void *d, void *e, double p, double q, double r, \
                                           double s, double t, double u, size_t count) {                              \
    void *const arrays[] = {a, b, c, d, e};                                                                           \
    const double numbers[] = {p, q, r, s, t, u};                                                                      \
    RULE(arrays, numbers, count);                                                                                     \
  }

UPDATE(sgd_float32)
UPDATE(sgd_float64)
UPDATE(adagrad_float32)
UPDATE(adagrad_float64)
UPDATE(rmsprop_float32)
UPDATE(rmsprop_float64)
UPDATE(adam_float32)
UPDATE(adam_float64)
UPDATE(adamw_float32)
UPDATE(adamw_float64)
