/*
 * The reduction kernels for one instruction set. reduce.c includes this once for each, after defining
 *   VARIANT(name)          the name of a type, function or table in this variant;
 *   WIDE_BYTES             the bytes of its vectors;
 *   EXTEND                 uint16_t to uint32_t in vectors, and
 *   TO_WIDE, TO_FLOAT16    float16 to float32 and back, where there are instructions for it.
 * All are undefined at the end.
 */

#define WIDE VARIANT(wide)
#define BITS VARIANT(bits)
#define HALVES VARIANT(halves)
typedef float WIDE __attribute__((vector_size(WIDE_BYTES)));
typedef uint32_t BITS __attribute__((vector_size(WIDE_BYTES)));
typedef uint16_t HALVES __attribute__((vector_size(WIDE_BYTES / 2)));

#ifndef EXTEND
#define EXTEND(halves) __builtin_convertvector(halves, BITS)
#endif

static inline WIDE VARIANT(bfloat16_to_wide)(HALVES halves) { return (WIDE)(EXTEND(halves) << 16); }

/* A NaN here is the CPU's own or was widened from a bfloat16: the lower half of it is 0, so that it is not rounded. */
static inline HALVES VARIANT(wide_to_bfloat16)(WIDE value) {
  const BITS bits = (BITS)value;
  return __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, HALVES);
}

static inline WIDE VARIANT(float16_to_wide)(HALVES halves) {
#ifdef TO_WIDE
  return TO_WIDE(halves);
#else
  const BITS bits = EXTEND(halves), magnitude = (bits & 0x7fff) << 13;
  const BITS denormal = (BITS)(magnitude < 1 << 23), special = (BITS)(magnitude >= 31 << 23);
  const BITS rebias = REBIAS + (special & REBIAS) + (denormal & 1 << 23);
  const WIDE value = (WIDE)(magnitude + rebias) - (WIDE)(denormal & LEAST);
  return (WIDE)((BITS)value | (bits & 0x8000) << 16);
#endif
}

static inline HALVES VARIANT(wide_to_float16)(WIDE value) {
#ifdef TO_FLOAT16
  return TO_FLOAT16(value);
#else
  const BITS bits = (BITS)value, magnitude = bits & 0x7fffffff;
  const BITS normal = (magnitude - REBIAS + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const BITS denormal = (BITS)((WIDE)magnitude + 0.5f) - HALF; /* the last bit of 0.5 is float16's of a denormal */
  const BITS finite = SELECT((BITS)(magnitude < LEAST), denormal, normal);
  const BITS special = 0x7c00 | ((BITS)(value != value) & 0x200);
  const BITS all = SELECT((BITS)(magnitude >= BEYOND), special, finite);
  return __builtin_convertvector(all | (bits >> 16 & 0x8000), HALVES);
#endif
}

/*
 * A kernel is the type T in memory, the type A to compute in, LOAD and STORE between them, the operator and the finish.
 * More than two sources meet in a block that stays in the L1 cache. A block of `out` is written when all sources of it
 * have been read, since `out` may be one of them.
 */
#define KERNEL(name, T, A, LOAD, STORE, OP, FINISH)                                                                    \
  static void VARIANT(name)(void *out, const void *const *sources, int sources_count, size_t count, int divisor) {     \
    typedef T stored __attribute__((aligned(1), may_alias));                                                           \
    typedef A computed;                                                                                                \
    enum { BLOCK = BLOCK_BYTES / sizeof(computed) };                                                                   \
    const float whole = (float)divisor, part = 1 / whole;                                                              \
    (void)whole, (void)part;                                                                                           \
    if (sources_count <= 2) {                                                                                          \
      stored *to = out;                                                                                                \
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
      stored *to = (stored *)out + start;                                                                              \
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

/* A kernel whose elements are vectors, and the elements that fill none. */
#define VECTOR_KERNEL(name, T, A, LOAD, STORE, OP, FINISH)                                                             \
  KERNEL(name##_vectors, T, A, LOAD, STORE, OP, FINISH)                                                                \
  static void VARIANT(name)(void *out, const void *const *sources, int sources_count, size_t count, int divisor) {     \
    const float whole = (float)divisor, part = 1 / whole;                                                              \
    const size_t bytes = count * sizeof(uint16_t), rest = bytes % sizeof(T);                                           \
    T tail = {0};                                                                                                      \
    (void)whole, (void)part;                                                                                           \
    VARIANT(name##_vectors)(out, sources, sources_count, bytes / sizeof(T), divisor);                                  \
    if (!rest) return;                                                                                                 \
    memcpy(&tail, (const char *)sources[0] + bytes - rest, rest);                                                      \
    A a = LOAD(tail);                                                                                                  \
    for (int source = 1; source < sources_count; source++) {                                                           \
      memcpy(&tail, (const char *)sources[source] + bytes - rest, rest);                                               \
      const A b = LOAD(tail);                                                                                          \
      a = OP(a, b);                                                                                                    \
    }                                                                                                                  \
    tail = STORE(FINISH(a));                                                                                           \
    memcpy((char *)out + bytes - rest, &tail, rest);                                                                   \
  }

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

#define HALF_FLOATING(name, LOAD, STORE)                                                                               \
  ARITHMETIC(VECTOR_KERNEL, name, HALVES, WIDE, LOAD, STORE)                                                           \
  VECTOR_KERNEL(name##_min, HALVES, WIDE, LOAD, STORE, WIDE_MIN, UNSIGN_ZERO)                                          \
  VECTOR_KERNEL(name##_max, HALVES, WIDE, LOAD, STORE, WIDE_MAX, UNSIGN_ZERO)

#define INTEGER(name, T, UNSIGNED)                                                                                     \
  KERNEL(name##_sum, UNSIGNED, UNSIGNED, KEEP, KEEP, ADD, KEEP)                                                        \
  KERNEL(name##_product, UNSIGNED, UNSIGNED, KEEP, KEEP, MULTIPLY_UNSIGNED, KEEP)                                      \
  KERNEL(name##_min, T, T, KEEP, KEEP, MIN, KEEP)                                                                      \
  KERNEL(name##_max, T, T, KEEP, KEEP, MAX, KEEP)

KERNEL(bool_all, uint8_t, uint8_t, KEEP, KEEP, AND, KEEP)
KERNEL(bool_any, uint8_t, uint8_t, KEEP, KEEP, OR, KEEP)
INTEGER(uint8, uint8_t, uint8_t)
INTEGER(int8, int8_t, uint8_t)
INTEGER(int16, int16_t, uint16_t)
INTEGER(int32, int32_t, uint32_t)
INTEGER(int64, int64_t, uint64_t)
HALF_FLOATING(float16, VARIANT(float16_to_wide), VARIANT(wide_to_float16))
HALF_FLOATING(bfloat16, VARIANT(bfloat16_to_wide), VARIANT(wide_to_bfloat16))
FLOATING(float32, float)
FLOATING(float64, double)

/* In the order of the operators' codes; 0 is none. */
#define INTEGER_ROW(name)                                                                                              \
  {NULL, NULL, VARIANT(name##_sum), VARIANT(name##_min), VARIANT(name##_max), VARIANT(name##_product)}
#define FLOAT_ROW(name)                                                                                                \
  {NULL,                                                                                                               \
   VARIANT(name##_average),                                                                                            \
   VARIANT(name##_sum),                                                                                                \
   VARIANT(name##_min),                                                                                                \
   VARIANT(name##_max),                                                                                                \
   VARIANT(name##_product)}

static const allred_reduce VARIANT(kernels)[ALLRED_DTYPES][ALLRED_OPS] = {
    {NULL, NULL, NULL, VARIANT(bool_all), VARIANT(bool_any), VARIANT(bool_all)},
    INTEGER_ROW(uint8),
    INTEGER_ROW(int8),
    INTEGER_ROW(int16),
    INTEGER_ROW(int32),
    INTEGER_ROW(int64),
    FLOAT_ROW(float16),
    FLOAT_ROW(bfloat16),
    FLOAT_ROW(float32),
    FLOAT_ROW(float64),
};

#undef VARIANT
#undef WIDE_BYTES
#undef EXTEND
#undef TO_WIDE
#undef TO_FLOAT16
#undef WIDE
#undef BITS
#undef HALVES
#undef KERNEL
#undef VECTOR_KERNEL
#undef ARITHMETIC
#undef FLOATING
#undef HALF_FLOATING
#undef INTEGER
#undef INTEGER_ROW
#undef FLOAT_ROW
