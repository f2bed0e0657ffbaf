#include "encode.h"

#include <stdint.h>
#include <string.h>

#ifdef __clang__
#define EACH(count) _Pragma("clang loop vectorize(assume_safety)") for (size_t i = 0; i < (count); i++)
#else
#define EACH(count) _Pragma("GCC ivdep") for (size_t i = 0; i < (count); i++)
#endif

#define TOO_LARGE ((127 + 127) << 23)  /* bits of float32: 2**127: scale * 127 could be infinite; and */
#define NEGLIGIBLE ((127 - 120) << 23) /* 2**-120 */
#define ROUNDS 12582912.0f             /* 1.5 * 2**23: a small number that is added to it is rounded to an integer */

typedef int32_t int32_bits __attribute__((may_alias));

static float not_a_number(void) {
  const int32_t bits = 0x7fc00000;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static size_t block_bytes(size_t count, int bits) { return sizeof(float) + (bits == 8 ? count : (count + 1) / 2); }

#define VARIANT(name) name##_baseline
#include "encode_body.h"

#if defined __x86_64__ && defined __GNUC__
#define MULTIVERSION
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define VARIANT(name) name##_avx2
#include "encode_body.h"
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define VARIANT(name) name##_avx512
#include "encode_body.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

/* By variant, then 8 and 4 bits. */
static const struct {
  void (*encode)(char *to, const float *from, float *residual, size_t count);
  void (*decode)(float *to, const char *from, size_t count);
} codecs[][2] = {
    {{encode_int8_baseline, decode_int8_baseline}, {encode_int4_baseline, decode_int4_baseline}},
#ifdef MULTIVERSION
    {{encode_int8_avx2, decode_int8_avx2}, {encode_int4_avx2, decode_int4_avx2}},
    {{encode_int8_avx512, decode_int8_avx512}, {encode_int4_avx512, decode_int4_avx512}},
#endif
};

int allred_encodes(int dtype, int wire) {
  if (!allred_is_quantized(wire)) return allred_narrows(dtype, wire);
  return dtype == ALLRED_FLOAT32 || dtype == ALLRED_FLOAT64 || allred_sum_dtype(dtype) == ALLRED_FLOAT32;
}

size_t allred_encoded_bytes(int wire, size_t count) {
  if (!allred_is_quantized(wire)) return count * sizeof(uint16_t);
  const int bits = wire == ALLRED_WIRE_INT8 ? 8 : 4;
  const size_t whole = count / ALLRED_ENCODED_BLOCK, rest = count % ALLRED_ENCODED_BLOCK;
  return whole * block_bytes(ALLRED_ENCODED_BLOCK, bits) + (rest ? block_bytes(rest, bits) : 0);
}

static void decode_halves(int variant, int wire, float *to, const void *from, size_t count) {
  allred_wide_kernel(variant, wire, ALLRED_FLOAT32, ALLRED_SUM)(to, &from, 1, count, 1);
}

static void encode_halves(int variant, int wire, char *to, const float *from, float *residual, size_t count) {
  const allred_narrow narrow = allred_narrow_kernel(variant, ALLRED_FLOAT32, wire);
  float sum[ALLRED_ENCODED_BLOCK], decoded[ALLRED_ENCODED_BLOCK];
  if (!residual) {
    narrow(to, from, count);
    return;
  }
  for (size_t start = 0, length; start < count; start += length, to += length * sizeof(uint16_t)) {
    length = count - start < ALLRED_ENCODED_BLOCK ? count - start : ALLRED_ENCODED_BLOCK;
    EACH(length) sum[i] = from[start + i] + residual[start + i];
    narrow(to, sum, length);
    decode_halves(variant, wire, decoded, to, length);
    for (size_t i = 0; i < length; i++) {
      const float error = sum[i] - decoded[i];
      residual[start + i] = error - error == 0 ? error : residual[start + i];
    }
  }
}

void allred_encode(int variant, int wire, char *to, const float *from, float *residual, size_t count) {
  if (allred_is_quantized(wire))
    codecs[variant][wire == ALLRED_WIRE_INT4].encode(to, from, residual, count);
  else
    encode_halves(variant, wire, to, from, residual, count);
}

void allred_decode(int variant, int wire, float *to, const char *from, size_t count) {
  if (allred_is_quantized(wire))
    codecs[variant][wire == ALLRED_WIRE_INT4].decode(to, from, count);
  else
    decode_halves(variant, wire, to, from, count);
}
