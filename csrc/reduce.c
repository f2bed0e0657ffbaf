#include "reduce.h"

#include <stdint.h>
#include <string.h>

#if defined __x86_64__ && defined __GNUC__
#define MULTIVERSION
#include <immintrin.h>
#endif

#define BLOCK_BYTES 2048

/* The compiler may vectorize although `out` may be a source: an element is read before it is written. */
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
/* NaN if either is NaN, for which every comparison is false. */
#define FLOAT_MIN(a, b) ((((a) < (b)) | ((a) != (a))) ? (a) : (b))
#define FLOAT_MAX(a, b) ((((a) > (b)) | ((a) != (a))) ? (a) : (b))

#define KEEP(x) (x)
#define SCALE(x) ((x) * part)
#define DIVIDE(x) ((x) / whole)
#define UNSIGN_ZERO(x) ((x) + 0)

/* The same for vectors, which have no conditional operator; a comparison sets all bits of an element or none. */
#define SELECT(mask, a, b) (((a) & (mask)) | ((b) & ~(mask)))
#define WIDE_MIN(a, b) ((WIDE)SELECT((BITS)(((a) < (b)) | ((a) != (a))), (BITS)(a), (BITS)(b)))
#define WIDE_MAX(a, b) ((WIDE)SELECT((BITS)(((a) > (b)) | ((a) != (a))), (BITS)(a), (BITS)(b)))

/* float32 has 8 bits of exponent, biased by 127, and 23 of mantissa; bfloat16 8 and 7; float16 5, biased by 15, and 10.
 * These constants are bits of float32. */
#define REBIAS ((127 - 15) << 23)
#define LEAST ((127 - 14) << 23)  /* 2**-14, float16's smallest normal */
#define BEYOND ((127 + 16) << 23) /* 2**16, float16's infinity */
#define HALF ((127 - 1) << 23)    /* 0.5, whose last bit is 2**-24, float16's smallest denormal */

/* ---- macros of reduce_body.h, which expand with the VARIANT and WIDE_BYTES of each of its inclusions */

#define WIDE VARIANT(wide)
#define BITS VARIANT(bits)
#define HALVES VARIANT(halves)
#define DOUBLES VARIANT(doubles)
#define LANES VARIANT(lanes)

/*
 * A kernel has the type T of the sources, the type A of the computation, the type U of `out`, LOAD and STORE to convert
 * between them, the operator and the finish. More than two sources are reduced in a block that stays in the L1 cache. A
 * block of `out` is written after all sources of it were read, because `out` may be one of them.
 */
#define KERNEL(name, T, A, LOAD, STORE, OP, FINISH) KERNEL_INTO(name, T, A, T, LOAD, STORE, OP, FINISH)
#define KERNEL_INTO(name, T, A, U, LOAD, STORE, OP, FINISH)                                                            \
  static void VARIANT(name)(void *out, const void *const *sources, int sources_count, size_t count, int divisor) {     \
    typedef T stored __attribute__((aligned(1), may_alias));                                                           \
    typedef U written __attribute__((aligned(1), may_alias));                                                          \
    typedef A computed;                                                                                                \
    enum { BLOCK = BLOCK_BYTES / sizeof(computed) };                                                                   \
    const float whole = (float)divisor, part = 1 / whole;                                                              \
    (void)whole, (void)part;                                                                                           \
    if (sources_count <= 2) {                                                                                          \
      written *to = out;                                                                                               \
      const stored *first = sources[0], *second = sources[sources_count - 1];                                          \
      if (sources_count == 1)                                                                                          \
        EACH(count) to[i] = STORE(FINISH(LOAD(first[i])));                                                             \
      else                                                                                                             \
        EACH(count) {                                                                                                  \
          const computed a = LOAD(first[i]), b = LOAD(second[i]);                                                      \
          to[i] = STORE(FINISH(OP(a, b)));                                                                             \
        }                                                                                                              \
      return;                                                                                                          \
    }                                                                                                                  \
    for (size_t start = 0; start < count; start += BLOCK) {                                                            \
      const size_t length = count - start < BLOCK ? count - start : BLOCK;                                             \
      written *to = (written *)out + start;                                                                            \
      const stored *first = (const stored *)sources[0] + start, *second = (const stored *)sources[1] + start;          \
      const stored *last = (const stored *)sources[sources_count - 1] + start;                                         \
      computed block[BLOCK];                                                                                           \
      EACH(length) {                                                                                                   \
        const computed a = LOAD(first[i]), b = LOAD(second[i]);                                                        \
        block[i] = OP(a, b);                                                                                           \
      }                                                                                                                \
      for (int source = 2; source < sources_count - 1; source++) {                                                     \
        const stored *next = (const stored *)sources[source] + start;                                                  \
        EACH(length) {                                                                                                 \
          const computed a = block[i], b = LOAD(next[i]);                                                              \
          block[i] = OP(a, b);                                                                                         \
        }                                                                                                              \
      }                                                                                                                \
      EACH(length) {                                                                                                   \
        const computed a = block[i], b = LOAD(last[i]);                                                                \
        to[i] = STORE(FINISH(OP(a, b)));                                                                               \
      }                                                                                                                \
    }                                                                                                                  \
  }

/* A kernel whose elements are vectors; and the last elements, which fill no vector. */
#define VECTOR_KERNEL(name, T, A, LOAD, STORE, OP, FINISH) VECTOR_KERNEL_INTO(name, T, A, T, LOAD, STORE, OP, FINISH)
#define VECTOR_KERNEL_INTO(name, T, A, U, LOAD, STORE, OP, FINISH)                                                     \
  KERNEL_INTO(name##_vectors, T, A, U, LOAD, STORE, OP, FINISH)                                                        \
  static void VARIANT(name)(void *out, const void *const *sources, int sources_count, size_t count, int divisor) {     \
    const float whole = (float)divisor, part = 1 / whole;                                                              \
    const size_t rest = count % LANES, done = count - rest, item = sizeof(T) / LANES, out_item = sizeof(U) / LANES;    \
    T tail = {0};                                                                                                      \
    (void)whole, (void)part;                                                                                           \
    VARIANT(name##_vectors)(out, sources, sources_count, count / LANES, divisor);                                      \
    if (!rest) return;                                                                                                 \
    memcpy(&tail, (const char *)sources[0] + done * item, rest * item);                                                \
    A a = LOAD(tail);                                                                                                  \
    for (int source = 1; source < sources_count; source++) {                                                           \
      memcpy(&tail, (const char *)sources[source] + done * item, rest * item);                                         \
      const A b = LOAD(tail);                                                                                          \
      a = OP(a, b);                                                                                                    \
    }                                                                                                                  \
    const U last = STORE(FINISH(a));                                                                                   \
    memcpy((char *)out + done * out_item, &last, rest * out_item);                                                     \
  }

/* A kernel that rounds wide numbers to narrow ones. */
#define NARROW(name, T, LOAD, STORE)                                                                                   \
  static void VARIANT(name)(void *out, const void *in, size_t count) {                                                 \
    typedef T stored __attribute__((aligned(1), may_alias));                                                           \
    typedef HALVES written __attribute__((aligned(1), may_alias));                                                     \
    const size_t rest = count % LANES, done = count - rest, item = sizeof(T) / LANES;                                  \
    const stored *from = in;                                                                                           \
    written *to = out;                                                                                                 \
    for (size_t i = 0; i < count / LANES; i++) to[i] = STORE(LOAD(from[i]));                                           \
    if (!rest) return;                                                                                                 \
    T tail = {0};                                                                                                      \
    memcpy(&tail, (const char *)in + done * item, rest * item);                                                        \
    const HALVES last = STORE(LOAD(tail));                                                                             \
    memcpy((char *)out + done * sizeof(uint16_t), &last, rest * sizeof(uint16_t));                                     \
  }
#define DOUBLES_TO_WIDE(value) __builtin_convertvector(value, WIDE)
#define WIDE_TO_DOUBLES(value) __builtin_convertvector(value, DOUBLES)

/* x / 2**k and x * 2**-k are the same bits; the second is faster. */
#define ARITHMETIC(MAKE, name, T, A, LOAD, STORE)                                                                      \
  MAKE(name##_sum, T, A, LOAD, STORE, ADD, KEEP)                                                                       \
  MAKE(name##_scaled, T, A, LOAD, STORE, ADD, SCALE)                                                                   \
  MAKE(name##_divided, T, A, LOAD, STORE, ADD, DIVIDE)                                                                 \
  MAKE(name##_product, T, A, LOAD, STORE, MULTIPLY, KEEP)                                                              \
  static void VARIANT(name##_average)(void *out, const void *const *sources, int sources_count, size_t count,          \
                                      int divisor) {                                                                   \
    const allred_reduce kernel = divisor & (divisor - 1) ? VARIANT(name##_divided) : VARIANT(name##_scaled);           \
    kernel(out, sources, sources_count, count, divisor);                                                               \
  }

#define FLOATING(name, T)                                                                                              \
  ARITHMETIC(KERNEL, name, T, T, KEEP, KEEP)                                                                           \
  KERNEL(name##_min, T, T, KEEP, KEEP, FLOAT_MIN, UNSIGN_ZERO)                                                         \
  KERNEL(name##_max, T, T, KEEP, KEEP, FLOAT_MAX, UNSIGN_ZERO)

/* Kernels from narrow sources to wide results. */
#define INTO_WIDE(name, T, A, LOAD, STORE, OP, FINISH) VECTOR_KERNEL_INTO(name, T, A, WIDE, LOAD, STORE, OP, FINISH)
#define INTO_DOUBLES(name, T, A, LOAD, STORE, OP, FINISH)                                                              \
  VECTOR_KERNEL_INTO(name, T, A, DOUBLES, LOAD, STORE, OP, FINISH)
#define HALF_FLOATING(MAKE, name, LOAD, STORE)                                                                         \
  ARITHMETIC(MAKE, name, HALVES, WIDE, LOAD, STORE)                                                                    \
  MAKE(name##_min, HALVES, WIDE, LOAD, STORE, WIDE_MIN, UNSIGN_ZERO)                                                   \
  MAKE(name##_max, HALVES, WIDE, LOAD, STORE, WIDE_MAX, UNSIGN_ZERO)

/* The other kernels of unsigned integers are those of signed ones. */
#define UNSIGNED_INTEGER(name, T)                                                                                      \
  KERNEL(name##_min, T, T, KEEP, KEEP, MIN, KEEP)                                                                      \
  KERNEL(name##_max, T, T, KEEP, KEEP, MAX, KEEP)

/* Complex numbers: sums are those of their parts. */
#define OF_PARTS(name, part_kernel)                                                                                    \
  static void VARIANT(name)(void *out, const void *const *sources, int sources_count, size_t count, int divisor) {     \
    VARIANT(part_kernel)(out, sources, sources_count, 2 * count, divisor);                                             \
  }
#define COMPLEX(name, part, T)                                                                                         \
  OF_PARTS(name##_sum, part##_sum)                                                                                     \
  OF_PARTS(name##_average, part##_average)                                                                             \
  static void VARIANT(name##_product)(void *out, const void *const *sources, int sources_count, size_t count,          \
                                      int divisor) {                                                                   \
    typedef T stored __attribute__((aligned(1), may_alias));                                                           \
    stored *to = out;                                                                                                  \
    (void)divisor;                                                                                                     \
    for (size_t i = 0; i < 2 * count; i += 2) {                                                                        \
      T real = ((const stored *)sources[0])[i], imaginary = ((const stored *)sources[0])[i + 1];                       \
      for (int source = 1; source < sources_count; source++) {                                                         \
        const stored *next = (const stored *)sources[source] + i;                                                      \
        const T product = real * next[0] - imaginary * next[1];                                                        \
        imaginary = real * next[1] + imaginary * next[0], real = product;                                              \
      }                                                                                                                \
      to[i] = real, to[i + 1] = imaginary;                                                                             \
    }                                                                                                                  \
  }

#define INTEGER(name, T, UNSIGNED)                                                                                     \
  KERNEL(name##_sum, UNSIGNED, UNSIGNED, KEEP, KEEP, ADD, KEEP)                                                        \
  KERNEL(name##_product, UNSIGNED, UNSIGNED, KEEP, KEEP, MULTIPLY_UNSIGNED, KEEP)                                      \
  KERNEL(name##_min, T, T, KEEP, KEEP, MIN, KEEP)                                                                      \
  KERNEL(name##_max, T, T, KEEP, KEEP, MAX, KEEP)

/* The kernels of a dtype by operator code; code 0 does not exist. */
#define ROW(name) VARIANT(name##_sum), VARIANT(name##_min), VARIANT(name##_max), VARIANT(name##_product)
#define INTEGER_ROW(name) {NULL, NULL, ROW(name)}
#define UNSIGNED_ROW(name, signed_name)                                                                                \
  {NULL, NULL, VARIANT(signed_name##_sum), VARIANT(name##_min), VARIANT(name##_max), VARIANT(signed_name##_product)}
#define COMPLEX_ROW(name) {NULL, VARIANT(name##_average), VARIANT(name##_sum), NULL, NULL, VARIANT(name##_product)}
#define FLOAT_ROW(name) {NULL, VARIANT(name##_average), ROW(name)}

/* ---- the variants */

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

int allred_sum_dtype(int dtype) { return dtype == ALLRED_FLOAT16 || dtype == ALLRED_BFLOAT16 ? ALLRED_FLOAT32 : dtype; }

size_t allred_dtype_bytes(int dtype) {
  static const size_t bytes[ALLRED_DTYPES] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 2, 4, 8, 8, 16};
  return bytes[dtype];
}

int allred_part_dtype(int dtype) {
  return dtype == ALLRED_COMPLEX64 ? ALLRED_FLOAT32 : dtype == ALLRED_COMPLEX128 ? ALLRED_FLOAT64 : dtype;
}

int allred_can_weigh(int dtype, double weight) {
  if (dtype == ALLRED_FLOAT16 || dtype == ALLRED_BFLOAT16) return 0;
  const int part = allred_part_dtype(dtype);
  return part == ALLRED_FLOAT32 || part == ALLRED_FLOAT64 || weight == 0 || weight == 1;
}

#define WEIGH(name, T)                                                                                                 \
  static void name(void *out, const void *in, size_t count, T weight) {                                                \
    typedef T element __attribute__((aligned(1), may_alias));                                                          \
    element *to = out;                                                                                                 \
    const element *from = in;                                                                                          \
    EACH(count) to[i] = from[i] * weight;                                                                              \
  }
WEIGH(weigh_float, float)
WEIGH(weigh_double, double)

void allred_weigh(void *out, const void *in, size_t bytes, int dtype, double weight) {
  if (weight == 0)
    memset(out, 0, bytes);
  else if (weight == 1)
    memcpy(out, in, bytes);
  else if (allred_part_dtype(dtype) == ALLRED_FLOAT64)
    weigh_double(out, in, bytes / sizeof(double), weight);
  else
    weigh_float(out, in, bytes / sizeof(float), (float)weight);
}
