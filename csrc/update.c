#include "update.h"

#include <math.h>
#include <string.h>

/* The compiler may vectorize: no two arrays overlap. */
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif
#define STORAGE __attribute__((aligned(1), may_alias))
#define EACH(count) INDEPENDENT for (size_t i = 0; i < (count); i++)

/* Correctly rounded, as in numpy. Needs -fno-math-errno; otherwise it is a function call for each element. */
#define ROOT(x) _Generic((x), float: sqrtf, double: sqrt)(x)
/* max(x, 0); NaN if x is NaN, for which every comparison is false. */
#define POSITIVE(x) ((((x) > 0) | ((x) != (x))) ? (x) : 0)
/* Compile the statement twice, with `flag` as a constant 1 and 0. */
#define FIX(flag, condition, statement)                                                                                \
  if (condition) {                                                                                                     \
    enum { flag = 1 };                                                                                                 \
    statement;                                                                                                         \
  } else {                                                                                                             \
    enum { flag = 0 };                                                                                                 \
    statement;                                                                                                         \
  }

#define REAL float
#define NAME(name) name##_float_baseline
#define TARGET
#include "update_body.h"
#define REAL double
#define NAME(name) name##_double_baseline
#define TARGET
#include "update_body.h"

/* AVX2 is twice as fast if roots and divisions dominate. AVX-512 is not faster: neither memory nor these are. */
#if defined __x86_64__ && defined __GNUC__
#define MULTIVERSION
#define REAL float
#define NAME(name) name##_float_avx2
#define TARGET __attribute__((target("avx2")))
#include "update_body.h"
#define REAL double
#define NAME(name) name##_double_avx2
#define TARGET __attribute__((target("avx2")))
#include "update_body.h"
#endif

static const allred_rule rules[] = {
    {"sgd", 3, 2, 4, 0},  {"adagrad", 3, 3, 3, 0}, {"rmsprop", 5, 3, 5, 0},
    {"adam", 4, 4, 6, 0}, {"adamw", 4, 4, 6, 0},   {"row_wise_adagrad", 3, 3, 3, 1},
};

const allred_rule *allred_find_rule(const char *name) {
  for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
    if (strcmp(name, rules[i].name) == 0) return &rules[i];
  return NULL;
}

allred_update allred_update_kernel(const allred_rule *rule, int element_bytes, int variant) {
  const size_t index = (size_t)(rule - rules);
#ifdef MULTIVERSION
  if (variant > 0) return (element_bytes == 4 ? kernels_float_avx2 : kernels_double_avx2)[index];
#endif
  return (element_bytes == 4 ? kernels_float_baseline : kernels_double_baseline)[index];
}
