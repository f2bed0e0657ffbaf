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
#define DOUBLES VARIANT(doubles)
#define LANES VARIANT(lanes)
typedef float WIDE __attribute__((vector_size(WIDE_BYTES)));
typedef uint32_t BITS __attribute__((vector_size(WIDE_BYTES)));
typedef uint16_t HALVES __attribute__((vector_size(WIDE_BYTES / 2)));
typedef double DOUBLES __attribute__((vector_size(WIDE_BYTES * 2)));
enum { VARIANT(lanes) = WIDE_BYTES / sizeof(float) }; /* elements of each of these */

#ifndef EXTEND
#define EXTEND(halves) __builtin_convertvector(halves, BITS)
#endif

static inline WIDE VARIANT(bfloat16_to_wide)(HALVES halves) { return (WIDE)(EXTEND(halves) << 16); }

/* A NaN here is the CPU's own or was widened from a bfloat16: the lower half of it is 0, so that it is not rounded. */
static inline HALVES VARIANT(wide_to_bfloat16)(WIDE value) {
  const BITS bits = (BITS)value;
  return __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, HALVES);
}

/* Of any float32: a NaN keeps the bits that there is room for, and stays one. */
static inline HALVES VARIANT(any_to_bfloat16)(WIDE value) {
  const BITS bits = (BITS)value, nan = (BITS)(value != value);
  const BITS rounded = bits + 0x7fff + (bits >> 16 & 1);
  return __builtin_convertvector(SELECT(nan, bits | 0x400000, rounded) >> 16, HALVES);
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
 * A kernel is the type T of the sources, the type A to compute in, the type U of `out`, LOAD and STORE between them,
 * the operator and the finish. More than two sources meet in a block that stays in the L1 cache. A block of `out` is
 * written when all sources of it have been read, since `out` may be one of them.
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

/* A kernel whose elements are vectors, and the elements that fill none. */
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

/* Wide numbers as narrow ones, each rounded. */
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

#define HALF_FLOATING(name, LOAD, STORE)                                                                               \
  ARITHMETIC(VECTOR_KERNEL, name, HALVES, WIDE, LOAD, STORE)                                                           \
  VECTOR_KERNEL(name##_min, HALVES, WIDE, LOAD, STORE, WIDE_MIN, UNSIGN_ZERO)                                          \
  VECTOR_KERNEL(name##_max, HALVES, WIDE, LOAD, STORE, WIDE_MAX, UNSIGN_ZERO)

/* The same from narrow numbers to wide ones. */
#define INTO_WIDE(name, T, A, LOAD, STORE, OP, FINISH) VECTOR_KERNEL_INTO(name, T, A, WIDE, LOAD, STORE, OP, FINISH)
#define INTO_DOUBLES(name, T, A, LOAD, STORE, OP, FINISH)                                                              \
  VECTOR_KERNEL_INTO(name, T, A, DOUBLES, LOAD, STORE, OP, FINISH)
#define WIDENING(MAKE, name, LOAD, STORE)                                                                              \
  ARITHMETIC(MAKE, name, HALVES, WIDE, LOAD, STORE)                                                                    \
  MAKE(name##_min, HALVES, WIDE, LOAD, STORE, WIDE_MIN, UNSIGN_ZERO)                                                   \
  MAKE(name##_max, HALVES, WIDE, LOAD, STORE, WIDE_MAX, UNSIGN_ZERO)

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
WIDENING(INTO_WIDE, float16_into_float32, VARIANT(float16_to_wide), KEEP)
WIDENING(INTO_WIDE, bfloat16_into_float32, VARIANT(bfloat16_to_wide), KEEP)
WIDENING(INTO_DOUBLES, float16_into_float64, VARIANT(float16_to_wide), WIDE_TO_DOUBLES)
WIDENING(INTO_DOUBLES, bfloat16_into_float64, VARIANT(bfloat16_to_wide), WIDE_TO_DOUBLES)
NARROW(float32_as_float16, WIDE, KEEP, VARIANT(wide_to_float16))
NARROW(float32_as_bfloat16, WIDE, KEEP, VARIANT(any_to_bfloat16))
NARROW(float64_as_float16, DOUBLES, DOUBLES_TO_WIDE, VARIANT(wide_to_float16))
NARROW(float64_as_bfloat16, DOUBLES, DOUBLES_TO_WIDE, VARIANT(any_to_bfloat16))

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

/* By the narrow type, then by the wide one. */
static const allred_reduce VARIANT(wide_kernels)[2][2][ALLRED_OPS] = {
    {FLOAT_ROW(float16_into_float32), FLOAT_ROW(float16_into_float64)},
    {FLOAT_ROW(bfloat16_into_float32), FLOAT_ROW(bfloat16_into_float64)},
};
static const allred_narrow VARIANT(narrow_kernels)[2][2] = {
    {VARIANT(float32_as_float16), VARIANT(float64_as_float16)},
    {VARIANT(float32_as_bfloat16), VARIANT(float64_as_bfloat16)},
};

#undef VARIANT
#undef WIDE_BYTES
#undef EXTEND
#undef TO_WIDE
#undef TO_FLOAT16
#undef WIDE
#undef BITS
#undef HALVES
#undef DOUBLES
#undef LANES
#undef KERNEL
#undef KERNEL_INTO
#undef VECTOR_KERNEL
#undef VECTOR_KERNEL_INTO
#undef NARROW
#undef DOUBLES_TO_WIDE
#undef WIDE_TO_DOUBLES
#undef INTO_WIDE
#undef INTO_DOUBLES
#undef WIDENING
#undef ARITHMETIC
#undef FLOATING
#undef HALF_FLOATING
#undef INTEGER
#undef INTEGER_ROW
#undef FLOAT_ROW
