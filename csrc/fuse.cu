/*
 * Tensor fusion on a GPU: one launch packs all tensors of a bucket into its buffer, one unpacks. allred/gpu/kernels.py
 * and `make cuda` compile this with NVRTC; the unit tests as plain C, where a launch is a loop (EMULATED).
 *
 *   piece   a tensor: its address, its start in the buffer, its number of elements (of bytes, for copies)
 *   tile    TILE elements of a piece: the work of one block. A large tensor has many tiles, a small one wastes little
 *
 * Copies move bytes, 16 at a time if the tensor is aligned (buffers and starts always are). The other pack and
 * unpack kernels scale: pack multiplies by a number, unpack divides and can check its results. The buffer may have
 * another dtype: float32 for 16-bit floats with weights, which are rounded once; a 16-bit float for compressed float32
 * and float64.
 */
#ifdef EMULATED
#include <stdint.h>
#define KERNEL void
#define INLINE static inline
#define ALIGNED __attribute__((aligned(16)))
#define BLOCK block
#define THREAD thread
#define THREADS threads
static unsigned block, thread, threads;
void allred_emulate(unsigned b, unsigned t, unsigned n) {
  block = b;
  thread = t;
  threads = n;
}
#else
#ifdef __CUDACC_RTC__ /* has no headers */
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#else
#include <stdint.h>
#endif
#define KERNEL extern "C" __global__ void
#define INLINE static __device__ __forceinline__
#define ALIGNED __align__(16)
#define BLOCK blockIdx.x
#define THREAD threadIdx.x
#define THREADS blockDim.x
#endif

#define TILE 8192

typedef struct {
  uint64_t address;
  int64_t start, count;
} piece;

typedef struct {
  int64_t piece, number;
} tile;

typedef struct ALIGNED {
  uint32_t word[4];
} sixteen;

/* Elements of the tile, as `from` and `to` within the piece. */
#define BOUNDS                                                                                                         \
  const tile here = tiles[BLOCK];                                                                                      \
  const piece whole = pieces[here.piece];                                                                              \
  const int64_t from = here.number * TILE;                                                                             \
  int64_t to = from + TILE;                                                                                            \
  if (to > whole.count) to = whole.count

INLINE void copy(uint8_t *target, const uint8_t *source, int64_t count) {
  const uint64_t both = (uint64_t)target | (uint64_t)source;
  int64_t done = 0;
  if (both % 16 == 0) {
    done = count / 16 * 16;
    for (int64_t i = THREAD; i < count / 16; i += THREADS) ((sixteen *)target)[i] = ((const sixteen *)source)[i];
  } else if (both % 4 == 0) {
    done = count / 4 * 4;
    for (int64_t i = THREAD; i < count / 4; i += THREADS) ((uint32_t *)target)[i] = ((const uint32_t *)source)[i];
  }
  for (int64_t i = done + THREAD; i < count; i += THREADS) target[i] = source[i];
}

KERNEL pack_bytes(const piece *pieces, const tile *tiles, uint8_t *buffer) {
  BOUNDS;
  copy(buffer + whole.start + from, (const uint8_t *)whole.address + from, to - from);
}

KERNEL unpack_bytes(const piece *pieces, const tile *tiles, const uint8_t *buffer) {
  BOUNDS;
  copy((uint8_t *)whole.address + from, buffer + whole.start + from, to - from);
}

typedef union {
  uint32_t bits;
  float value;
} word;

INLINE float from_bfloat16(uint16_t half) {
  word w;
  w.bits = (uint32_t)half << 16;
  return w.value;
}

/* Round to nearest even; a NaN stays a NaN. */
INLINE uint16_t to_bfloat16(float x) {
  word w;
  w.value = x;
  if ((w.bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(w.bits >> 16 | 0x40u);
  return (uint16_t)((w.bits + 0x7fffu + (w.bits >> 16 & 1u)) >> 16);
}

INLINE float from_float16(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  word w;
  if (magnitude >= 0x7c00u) {
    w.bits = 0x7f800000u | (magnitude & 0x3ffu) << 13; /* infinity and NaN */
  } else if (magnitude >= 0x400u) {
    w.bits = (magnitude << 13) + 0x38000000u; /* another bias of the exponent: 127 - 15 */
  } else {
    w.value = (float)magnitude * 5.9604644775390625e-8f; /* subnormal: multiples of 2^-24 */
  }
  w.bits |= sign;
  return w.value;
}

INLINE uint16_t to_float16(float x) {
  word w;
  w.value = x;
  const uint32_t sign = w.bits >> 16 & 0x8000u, magnitude = w.bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and more round to infinity */
  if (magnitude >= 0x38800000u) {                                  /* 2^-14: float16's smallest normal number */
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
  }
  w.bits = magnitude;
  w.value += 0.5f; /* whose last digit is 2^-24: the sum is rounded as a subnormal is */
  return (uint16_t)(sign | (w.bits - 0x3f000000u));
}

#define from_float32(x) (x)
#define from_float64(x) (x)
#define to_float32(x) ((float)(x))
#define to_float64(x) (x)

INLINE int is_finite_float16(uint16_t x) { return (x & 0x7fffu) < 0x7c00u; }

INLINE int is_finite_bfloat16(uint16_t x) { return (x & 0x7fffu) < 0x7f80u; }

INLINE int is_finite_float32(float x) {
  word w;
  w.value = x;
  return (w.bits & 0x7fffffffu) < 0x7f800000u;
}

INLINE int is_finite_float64(double x) {
  union {
    uint64_t bits;
    double value;
  } w;
  w.value = x;
  return (w.bits & 0x7fffffffffffffffull) < 0x7ff0000000000000ull;
}

/*
 * TENSOR, WIRE: the names of the dtypes of tensors and buffer; their C types; WIDE: the type of the arithmetic. unpack
 * does not write a result that is not finite if `flags` is given; then it sets the flag of the tensor.
 */
#define PACK_AND_UNPACK(TENSOR, TENSOR_TYPE, WIRE, WIRE_TYPE, WIDE)                                                    \
  KERNEL pack_##TENSOR##_##WIRE(const piece *pieces, const tile *tiles, WIRE_TYPE *buffer, double factor) {            \
    BOUNDS;                                                                                                            \
    const TENSOR_TYPE *source = (const TENSOR_TYPE *)whole.address;                                                    \
    WIRE_TYPE *target = buffer + whole.start;                                                                          \
    for (int64_t i = from + THREAD; i < to; i += THREADS)                                                              \
      target[i] = to_##WIRE(factor == 0 ? (WIDE)0 : from_##TENSOR(source[i]) * (WIDE)factor);                          \
  }                                                                                                                    \
  UNPACK(TENSOR, TENSOR_TYPE, WIRE, WIRE_TYPE, WIDE)

#define UNPACK(TENSOR, TENSOR_TYPE, WIRE, WIRE_TYPE, WIDE)                                                             \
  KERNEL unpack_##TENSOR##_##WIRE(const piece *pieces, const tile *tiles, const WIRE_TYPE *buffer, double divisor,     \
                                  uint32_t *flags) {                                                                   \
    BOUNDS;                                                                                                            \
    TENSOR_TYPE *target = (TENSOR_TYPE *)whole.address;                                                                \
    const WIRE_TYPE *source = buffer + whole.start;                                                                    \
    for (int64_t i = from + THREAD; i < to; i += THREADS) {                                                            \
      const TENSOR_TYPE x =                                                                                            \
          to_##TENSOR(divisor == 1 ? from_##WIRE(source[i]) : from_##WIRE(source[i]) / (WIDE)divisor);                 \
      if (!flags || is_finite_##TENSOR(x))                                                                             \
        target[i] = x;                                                                                                 \
      else                                                                                                             \
        flags[here.piece] = 1;                                                                                         \
    }                                                                                                                  \
  }

PACK_AND_UNPACK(float16, uint16_t, float32, float, float)
PACK_AND_UNPACK(bfloat16, uint16_t, float32, float, float)
PACK_AND_UNPACK(float32, float, float16, uint16_t, float)
PACK_AND_UNPACK(float32, float, bfloat16, uint16_t, float)
PACK_AND_UNPACK(float64, double, float16, uint16_t, double)
PACK_AND_UNPACK(float64, double, bfloat16, uint16_t, double)
UNPACK(float16, uint16_t, float16, uint16_t, float)
UNPACK(bfloat16, uint16_t, bfloat16, uint16_t, float)

/* float32 four and float64 two at a time, 16 bytes, if the tensor is aligned. */
#define PACK_AND_UNPACK_VECTORS(NAME, TYPE, EACH)                                                                      \
  typedef struct ALIGNED {                                                                                             \
    TYPE v[EACH];                                                                                                      \
  } NAME##s;                                                                                                           \
  KERNEL pack_##NAME##_##NAME(const piece *pieces, const tile *tiles, TYPE *buffer, double factor) {                   \
    BOUNDS;                                                                                                            \
    const TYPE *source = (const TYPE *)whole.address;                                                                  \
    TYPE *target = buffer + whole.start;                                                                               \
    int64_t done = from;                                                                                               \
    if (whole.address % 16 == 0) {                                                                                     \
      done = from + (to - from) / EACH * EACH;                                                                         \
      for (int64_t i = from / EACH + THREAD; i < done / EACH; i += THREADS) {                                          \
        NAME##s vector = ((const NAME##s *)source)[i];                                                                 \
        for (int k = 0; k < EACH; k++) vector.v[k] = factor == 0 ? 0 : vector.v[k] * (TYPE)factor;                     \
        ((NAME##s *)target)[i] = vector;                                                                               \
      }                                                                                                                \
    }                                                                                                                  \
    for (int64_t i = done + THREAD; i < to; i += THREADS) target[i] = factor == 0 ? 0 : source[i] * (TYPE)factor;      \
  }                                                                                                                    \
  KERNEL unpack_##NAME##_##NAME(const piece *pieces, const tile *tiles, const TYPE *buffer, double divisor,            \
                                uint32_t *flags) {                                                                     \
    BOUNDS;                                                                                                            \
    TYPE *target = (TYPE *)whole.address;                                                                              \
    const TYPE *source = buffer + whole.start;                                                                         \
    int64_t done = from;                                                                                               \
    int found = 0;                                                                                                     \
    if (whole.address % 16 == 0) {                                                                                     \
      done = from + (to - from) / EACH * EACH;                                                                         \
      for (int64_t i = from / EACH + THREAD; i < done / EACH; i += THREADS) {                                          \
        NAME##s vector = ((const NAME##s *)source)[i];                                                                 \
        int finite = 1;                                                                                                \
        for (int k = 0; k < EACH; k++) {                                                                               \
          if (divisor != 1) vector.v[k] /= (TYPE)divisor; /* a division makes subnormal numbers 0 */                   \
          finite &= is_finite_##NAME(vector.v[k]);                                                                     \
        }                                                                                                              \
        if (!flags || finite) {                                                                                        \
          ((NAME##s *)target)[i] = vector;                                                                             \
          continue;                                                                                                    \
        }                                                                                                              \
        found = 1;                                                                                                     \
        for (int k = 0; k < EACH; k++)                                                                                 \
          if (is_finite_##NAME(vector.v[k])) target[i * EACH + k] = vector.v[k];                                       \
      }                                                                                                                \
    }                                                                                                                  \
    for (int64_t i = done + THREAD; i < to; i += THREADS) {                                                            \
      const TYPE x = divisor == 1 ? source[i] : source[i] / (TYPE)divisor;                                             \
      if (!flags || is_finite_##NAME(x))                                                                               \
        target[i] = x;                                                                                                 \
      else                                                                                                             \
        found = 1;                                                                                                     \
    }                                                                                                                  \
    if (found) flags[here.piece] = 1;                                                                                  \
  }

PACK_AND_UNPACK_VECTORS(float32, float, 4)
PACK_AND_UNPACK_VECTORS(float64, double, 2)

typedef struct ALIGNED {
  uint16_t v[8];
} eight;

/*
 * Reduces 16-bit floats of all ranks in float32, in the order of the ranks, and rounds once. `rows` has a row of `stride`
 * elements for each rank; the first `count` elements of a row are used. `own` replaces the row of `rank`. Each thread
 * reduces eight elements.
 */
#define COMBINE(NAME)                                                                                                  \
  KERNEL combine_##NAME(const uint16_t *rows, int64_t stride, uint32_t ranks, uint32_t rank, const uint16_t *own,      \
                        uint16_t *out, int64_t count, uint32_t multiplies, double divisor) {                           \
    const int64_t first = ((int64_t)BLOCK * THREADS + THREAD) * 8;                                                     \
    const int64_t left = count - first < 8 ? count - first : 8;                                                        \
    const int aligned = left == 8 && (((uint64_t)rows | (uint64_t)own | (uint64_t)out) % 16 | stride % 8) == 0;        \
    float total[8];                                                                                                    \
    for (uint32_t r = 0; r < ranks && left > 0; r++) {                                                                 \
      const uint16_t *row = (r == rank ? own : rows + r * stride) + first;                                             \
      eight x;                                                                                                         \
      if (aligned) x = *(const eight *)row;                                                                            \
      for (int k = 0; k < 8; k++) {                                                                                    \
        if (!aligned) x.v[k] = k < left ? row[k] : 0;                                                                  \
        const float value = from_##NAME(x.v[k]);                                                                       \
        total[k] = r == 0 ? value : multiplies ? total[k] * value : total[k] + value;                                  \
      }                                                                                                                \
    }                                                                                                                  \
    eight result;                                                                                                      \
    for (int k = 0; k < 8 && left > 0; k++) {                                                                          \
      result.v[k] = to_##NAME(total[k] / (float)divisor);                                                              \
      if (!aligned && k < left) out[first + k] = result.v[k];                                                          \
    }                                                                                                                  \
    if (aligned) *(eight *)(out + first) = result;                                                                     \
  }

COMBINE(float16)
COMBINE(bfloat16)

/*
 * Whether a magnitude exceeds a limit, compared as bits (of float64 the upper half): finds NaN and infinity. The start
 * of a piece is not used. Several threads may set a flag, all to the same value.
 */
#define EXCEEDS(NAME, TYPE, UPPER)                                                                                     \
  KERNEL exceeds_##NAME(const piece *pieces, const tile *tiles, uint32_t limit, uint32_t *flag) {                      \
    BOUNDS;                                                                                                            \
    const TYPE *source = (const TYPE *)whole.address;                                                                  \
    uint32_t found = 0;                                                                                                \
    for (int64_t i = from + THREAD; i < to; i += THREADS)                                                              \
      found |= ((uint32_t)(source[i] >> UPPER) & (sizeof(TYPE) == 2 ? 0x7fffu : 0x7fffffffu)) > limit;                 \
    if (found) *flag = 1;                                                                                              \
  }

EXCEEDS(2, uint16_t, 0)
EXCEEDS(4, uint32_t, 0)
EXCEEDS(8, uint64_t, 32)

/* The sum of the squares of each thread's elements; each has its own place, so that the total has a fixed order. */
#define SQUARES(NAME, TYPE)                                                                                            \
  KERNEL squares_##NAME(const piece *pieces, const tile *tiles, double *sums) {                                        \
    BOUNDS;                                                                                                            \
    const TYPE *source = (const TYPE *)whole.address;                                                                  \
    double sum = 0;                                                                                                    \
    for (int64_t i = from + THREAD; i < to; i += THREADS) {                                                            \
      const double x = from_##NAME(source[i]);                                                                         \
      sum += x * x;                                                                                                    \
    }                                                                                                                  \
    sums[(int64_t)BLOCK * THREADS + THREAD] = sum;                                                                     \
  }

SQUARES(float16, uint16_t)
SQUARES(bfloat16, uint16_t)
SQUARES(float32, float)
SQUARES(float64, double)
