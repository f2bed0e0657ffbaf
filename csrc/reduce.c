#include "reduce.h"

#include <stdint.h>
#include <string.h>

#if defined __x86_64__ && defined __GNUC__
#define MULTIVERSION
#include <immintrin.h>
#endif

#define BLOCK_BYTES 2048

/* The compiler may vectorize though `out` may be a source: each element is read before the same element is written. */
#ifdef __clang__
#pragma clang diagnostic ignored "-Wpass-failed" /* some loops are over vectors already */
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif
#define EACH(count) INDEPENDENT for (size_t i = 0; i < (count); i++)

#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define MULTIPLY_UNSIGNED(a, b) (1u * (a) * (b)) /* uint16_t would become int, whose overflow is undefined */
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
/* A NaN if either is: no comparison holds for it. */
#define FLOAT_MIN(a, b) ((((a) < (b)) | ((a) != (a))) ? (a) : (b))
#define FLOAT_MAX(a, b) ((((a) > (b)) | ((a) != (a))) ? (a) : (b))

#define KEEP(x) (x)
#define SCALE(x) ((x) * part)
#define DIVIDE(x) ((x) / whole)
#define UNSIGN_ZERO(x) ((x) + 0)

/* The same for vectors, which have no conditional operator: a comparison gives all bits of an element or none. */
#define SELECT(mask, a, b) (((a) & (mask)) | ((b) & ~(mask)))
#define WIDE_MIN(a, b) ((WIDE)SELECT((BITS)(((a) < (b)) | ((a) != (a))), (BITS)(a), (BITS)(b)))
#define WIDE_MAX(a, b) ((WIDE)SELECT((BITS)(((a) > (b)) | ((a) != (a))), (BITS)(a), (BITS)(b)))

/* float32 has 8 bits of exponent, biased by 127, and 23 of mantissa; bfloat16 8 and 7; float16 5, biased by 15, and 10.
 * What follows are float32's bits. */
#define REBIAS ((127 - 15) << 23)
#define LEAST ((127 - 14) << 23)  /* 2**-14, float16's smallest normal */
#define BEYOND ((127 + 16) << 23) /* 2**16, float16's infinity */
#define HALF ((127 - 1) << 23)    /* 0.5, whose last bit is 2**-24, float16's smallest denormal */

#define VARIANT(name) name##_baseline
#define WIDE_BYTES 16
#include "reduce_body.h"

#ifdef MULTIVERSION

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define VARIANT(name) name##_avx2
#define WIDE_BYTES 32
#define EXTEND(halves) ((BITS)_mm256_cvtepu16_epi32((__m128i)(halves)))
#define TO_WIDE(halves) ((WIDE)_mm256_cvtph_ps((__m128i)(halves)))
#define TO_FLOAT16(value) ((HALVES)_mm256_cvtps_ph((__m256)(value), _MM_FROUND_TO_NEAREST_INT))
#include "reduce_body.h"
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define VARIANT(name) name##_avx512
#define WIDE_BYTES 64
#define EXTEND(halves) ((BITS)_mm512_cvtepu16_epi32((__m256i)(halves)))
#define TO_WIDE(halves) ((WIDE)_mm512_cvtph_ps((__m256i)(halves)))
#define TO_FLOAT16(value) ((HALVES)_mm512_cvtps_ph((__m512)(value), _MM_FROUND_TO_NEAREST_INT))
#include "reduce_body.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

static const struct {
  const char *name;
  const allred_reduce (*kernels)[ALLRED_OPS], (*wide)[2][ALLRED_OPS];
  const allred_narrow (*narrow)[2];
} variants[] = {
    {"baseline", kernels_baseline, wide_kernels_baseline, narrow_kernels_baseline},
#ifdef MULTIVERSION
    {"avx2", kernels_avx2, wide_kernels_avx2, narrow_kernels_avx2},
    {"avx512", kernels_avx512, wide_kernels_avx512, narrow_kernels_avx512},
#endif
};

int allred_variants(void) {
#ifdef MULTIVERSION
#define CPU_HAS __builtin_cpu_supports
  if (CPU_HAS("avx2") && CPU_HAS("f16c"))
    return CPU_HAS("avx512f") && CPU_HAS("avx512bw") && CPU_HAS("avx512dq") && CPU_HAS("avx512vl") ? 3 : 2;
#endif
  return 1;
}

const char *allred_variant_name(int variant) { return variants[variant].name; }

allred_reduce allred_reduce_kernel(int variant, int dtype, int op) { return variants[variant].kernels[dtype][op]; }

allred_reduce allred_wide_kernel(int variant, int wire, int dtype, int op) {
  return variants[variant].wide[wire - ALLRED_FLOAT16][dtype - ALLRED_FLOAT32][op];
}

allred_narrow allred_narrow_kernel(int variant, int dtype, int wire) {
  return variants[variant].narrow[wire - ALLRED_FLOAT16][dtype - ALLRED_FLOAT32];
}

int allred_narrows(int dtype, int wire) {
  return (dtype == ALLRED_FLOAT32 || dtype == ALLRED_FLOAT64) && (wire == ALLRED_FLOAT16 || wire == ALLRED_BFLOAT16);
}

size_t allred_dtype_bytes(int dtype) {
  static const size_t bytes[ALLRED_DTYPES] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8};
  return bytes[dtype];
}
