/*
 * Tensor fusion on a GPU: one launch packs all tensors of a bucket into its buffer, one unpacks. allred/gpu/kernels.py
 * and `make cuda` compile this with NVRTC; the unit tests as plain C, where a launch is a loop (EMULATED).
 *
 *   piece   a tensor: its address, its start in the buffer, its number of elements (of bytes, for copies)
 *   tile    TILE elements of a piece: the work of one block. A large tensor has many tiles, a small one wastes little
 *
 * Copies move bytes, 16 at a time if the tensor is aligned (buffers and starts always are). The other kernels scale: pack
 * multiplies by a number, unpack divides; 16-bit floats are float32 in the buffer then, and are rounded once.
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
#define BOUNDS                                  \
  const tile here = tiles[BLOCK];               \
  const piece whole = pieces[here.piece];       \
  const int64_t from = here.number * TILE;      \
  int64_t to = from + TILE;                     \
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

/* HELD: the type of a tensor's elements; MOVED: the type of the buffer's elements, and of the arithmetic. */
#define SCALED(NAME, HELD, MOVED)                                                                                 \
  KERNEL pack_##NAME(const piece *pieces, const tile *tiles, MOVED *buffer, double factor) {                      \
    BOUNDS;                                                                                                       \
    const HELD *source = (const HELD *)whole.address;                                                             \
    MOVED *target = buffer + whole.start;                                                                         \
    for (int64_t i = from + THREAD; i < to; i += THREADS)                                                         \
      target[i] = factor == 0 ? 0 : from_##NAME(source[i]) * (MOVED)factor;                                       \
  }                                                                                                               \
  KERNEL unpack_##NAME(const piece *pieces, const tile *tiles, const MOVED *buffer, double divisor) {             \
    BOUNDS;                                                                                                       \
    HELD *target = (HELD *)whole.address;                                                                         \
    const MOVED *source = buffer + whole.start;                                                                   \
    for (int64_t i = from + THREAD; i < to; i += THREADS) target[i] = to_##NAME(source[i] / (MOVED)divisor);      \
  }

SCALED(float16, uint16_t, float)
SCALED(bfloat16, uint16_t, float)

/* float32 four and float64 two at a time, 16 bytes, if the tensor is aligned. */
#define SCALED_WIDE(NAME, TYPE, EACH)                                                                             \
  typedef struct ALIGNED {                                                                                        \
    TYPE v[EACH];                                                                                                 \
  } NAME##s;                                                                                                      \
  KERNEL pack_##NAME(const piece *pieces, const tile *tiles, TYPE *buffer, double factor) {                       \
    BOUNDS;                                                                                                       \
    const TYPE *source = (const TYPE *)whole.address;                                                             \
    TYPE *target = buffer + whole.start;                                                                          \
    int64_t done = from;                                                                                          \
    if (whole.address % 16 == 0) {                                                                                \
      done = from + (to - from) / EACH * EACH;                                                                    \
      for (int64_t i = from / EACH + THREAD; i < done / EACH; i += THREADS) {                                     \
        NAME##s four = ((const NAME##s *)source)[i];                                                     \
        for (int k = 0; k < EACH; k++) four.v[k] = factor == 0 ? 0 : four.v[k] * (TYPE)factor;                    \
        ((NAME##s *)target)[i] = four;                                                                   \
      }                                                                                                           \
    }                                                                                                             \
    for (int64_t i = done + THREAD; i < to; i += THREADS) target[i] = factor == 0 ? 0 : source[i] * (TYPE)factor; \
  }                                                                                                               \
  KERNEL unpack_##NAME(const piece *pieces, const tile *tiles, const TYPE *buffer, double divisor) {              \
    BOUNDS;                                                                                                       \
    TYPE *target = (TYPE *)whole.address;                                                                         \
    const TYPE *source = buffer + whole.start;                                                                    \
    int64_t done = from;                                                                                          \
    if (whole.address % 16 == 0) {                                                                                \
      done = from + (to - from) / EACH * EACH;                                                                    \
      for (int64_t i = from / EACH + THREAD; i < done / EACH; i += THREADS) {                                     \
        NAME##s four = ((const NAME##s *)source)[i];                                                     \
        for (int k = 0; k < EACH; k++) four.v[k] /= (TYPE)divisor;                                                \
        ((NAME##s *)target)[i] = four;                                                                   \
      }                                                                                                           \
    }                                                                                                             \
    for (int64_t i = done + THREAD; i < to; i += THREADS) target[i] = source[i] / (TYPE)divisor;                  \
  }

SCALED_WIDE(float32, float, 4)
SCALED_WIDE(float64, double, 2)

/*
 * Whether a magnitude exceeds a limit, compared as bits (of float64 the upper half): finds NaN and infinity. The start of
 * a piece is not used. Several threads may set the flag, all to the same value.
 */
#define EXCEEDS(NAME, TYPE, UPPER)                                                                    \
  KERNEL exceeds_##NAME(const piece *pieces, const tile *tiles, uint32_t limit, uint32_t *flag) {     \
    BOUNDS;                                                                                           \
    const TYPE *source = (const TYPE *)whole.address;                                                 \
    uint32_t found = 0;                                                                               \
    for (int64_t i = from + THREAD; i < to; i += THREADS)                                             \
      found |= ((uint32_t)(source[i] >> UPPER) & (sizeof(TYPE) == 2 ? 0x7fffu : 0x7fffffffu)) > limit; \
    if (found) *flag = 1;                                                                             \
  }

EXCEEDS(2, uint16_t, 0)
EXCEEDS(4, uint32_t, 0)
EXCEEDS(8, uint64_t, 32)

#define from_float32(x) x
#define from_float64(x) x

/* The sum of the squares of each thread's elements; each has its own place, so that the total has a fixed order. */
#define SQUARES(NAME, TYPE)                                                           \
  KERNEL squares_##NAME(const piece *pieces, const tile *tiles, double *sums) {       \
    BOUNDS;                                                                           \
    const TYPE *source = (const TYPE *)whole.address;                                 \
    double sum = 0;                                                                   \
    for (int64_t i = from + THREAD; i < to; i += THREADS) {                           \
      const double x = from_##NAME(source[i]);                                        \
      sum += x * x;                                                                   \
    }                                                                                 \
    sums[(int64_t)BLOCK * THREADS + THREAD] = sum;                                    \
  }

SQUARES(float16, uint16_t)
SQUARES(bfloat16, uint16_t)
SQUARES(float32, float)
SQUARES(float64, double)
