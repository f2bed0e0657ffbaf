/*
 * The reduction kernels for one instruction set. reduce.c includes this file once for each, with these macros, which
 * are undefined at the end.
 *   VARIANT(name)          the name of a type, function or table in this variant
 *   WIDE_BYTES             the bytes of its vectors
 *   EXTEND                 uint16_t to uint32_t in vectors, and
 *   TO_WIDE, TO_FLOAT16    float16 to float32 and back, if there are instructions for it
 */

typedef float WIDE __attribute__((vector_size(WIDE_BYTES)));
typedef uint32_t BITS __attribute__((vector_size(WIDE_BYTES)));
typedef uint16_t HALVES __attribute__((vector_size(WIDE_BYTES / 2)));
typedef double DOUBLES __attribute__((vector_size(WIDE_BYTES * 2)));
enum { VARIANT(lanes) = WIDE_BYTES / sizeof(float) }; /* elements of each of these */

#ifndef EXTEND
#define EXTEND(halves) __builtin_convertvector(halves, BITS)
#endif

static inline WIDE VARIANT(bfloat16_to_wide)(HALVES halves) { return (WIDE)(EXTEND(halves) << 16); }

/* A NaN here was made by the CPU or widened from a bfloat16: its lower half is 0, so rounding does not change it. */
static inline HALVES VARIANT(wide_to_bfloat16)(WIDE value) {
  const BITS bits = (BITS)value;
  return __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, HALVES);
}

/* For any float32: a NaN keeps its upper bits, and stays a NaN. */
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
  const BITS denormal =
      (BITS)((WIDE)magnitude + 0.5f) - HALF; /* the last bit of 0.5 is the last of a denormal float16 */
  const BITS finite = SELECT((BITS)(magnitude < LEAST), denormal, normal);
  const BITS special = 0x7c00 | ((BITS)(value != value) & 0x200);
  const BITS all = SELECT((BITS)(magnitude >= BEYOND), special, finite);
  return __builtin_convertvector(all | (bits >> 16 & 0x8000), HALVES);
#endif
}

KERNEL(bool_all, uint8_t, uint8_t, KEEP, KEEP, AND, KEEP)
KERNEL(bool_any, uint8_t, uint8_t, KEEP, KEEP, OR, KEEP)
INTEGER(uint8, uint8_t, uint8_t)
INTEGER(int8, int8_t, uint8_t)
INTEGER(int16, int16_t, uint16_t)
INTEGER(int32, int32_t, uint32_t)
INTEGER(int64, int64_t, uint64_t)
UNSIGNED_INTEGER(uint16, uint16_t)
UNSIGNED_INTEGER(uint32, uint32_t)
UNSIGNED_INTEGER(uint64, uint64_t)
HALF_FLOATING(VECTOR_KERNEL, float16, VARIANT(float16_to_wide), VARIANT(wide_to_float16))
HALF_FLOATING(VECTOR_KERNEL, bfloat16, VARIANT(bfloat16_to_wide), VARIANT(wide_to_bfloat16))
FLOATING(float32, float)
FLOATING(float64, double)
COMPLEX(complex64, float32, float)
COMPLEX(complex128, float64, double)
HALF_FLOATING(INTO_WIDE, float16_into_float32, VARIANT(float16_to_wide), KEEP)
HALF_FLOATING(INTO_WIDE, bfloat16_into_float32, VARIANT(bfloat16_to_wide), KEEP)
HALF_FLOATING(INTO_DOUBLES, float16_into_float64, VARIANT(float16_to_wide), WIDE_TO_DOUBLES)
HALF_FLOATING(INTO_DOUBLES, bfloat16_into_float64, VARIANT(bfloat16_to_wide), WIDE_TO_DOUBLES)
NARROW(float32_as_float16, WIDE, KEEP, VARIANT(wide_to_float16))
NARROW(float32_as_bfloat16, WIDE, KEEP, VARIANT(any_to_bfloat16))
NARROW(float64_as_float16, DOUBLES, DOUBLES_TO_WIDE, VARIANT(wide_to_float16))
NARROW(float64_as_bfloat16, DOUBLES, DOUBLES_TO_WIDE, VARIANT(any_to_bfloat16))

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
    UNSIGNED_ROW(uint16, int16),
    UNSIGNED_ROW(uint32, int32),
    UNSIGNED_ROW(uint64, int64),
    COMPLEX_ROW(complex64),
    COMPLEX_ROW(complex128),
};

/* Indexed by the narrow type, then by the wide type. */
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
