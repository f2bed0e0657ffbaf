/*
 * A CRC is the remainder of the bytes, as a polynomial over GF(2), divided by P of degree 32. 64 bytes at a time are
 * reduced to a multiple with the same remainder: a * x^n has the remainder of a * (x^n mod P). One carry-less product
 * multiplies 64 bits. "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.
 */
#include "crc.h"

#if defined __x86_64__ && defined __GNUC__
#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("pclmul,sse4.1")))

/* x^n mod P, with the bits in reverse order, times x. */
#define X_544 0x154442bd4 /* 4 * 128 + 32 */
#define X_480 0x1c6e41596 /* 4 * 128 - 32 */
#define X_160 0x1751997d0 /* 128 + 32 */
#define X_96 0x0ccaa009e  /* 128 - 32 */
#define X_64 0x163cd6124
#define POLYNOMIAL 0x1db710641 /* P */
#define QUOTIENT 0x1f7011641   /* x^64 / P */

int allred_crc32_is_fast(void) { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

/* Multiply both halves of `value` by `factors`, and add the next 128 bits. */
TARGET static inline __m128i fold(__m128i value, __m128i factors, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00), high = _mm_clmulepi64_si128(value, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

TARGET static inline __m128i load(const unsigned char *at) {
  return _mm_loadu_si128((const __m128i *)(const void *)at);
}

/* Return the CRC, not inverted, of at least 64 bytes, a multiple of 16. */
TARGET static uint32_t of_blocks(const unsigned char *at, size_t bytes, uint32_t crc) {
  const __m128i by_512 = _mm_set_epi64x(X_480, X_544), by_128 = _mm_set_epi64x(X_96, X_160);
  const __m128i low_words = _mm_set_epi32(0, -1, 0, -1);
  __m128i sums[4];
  for (int i = 0; i < 4; i++) sums[i] = load(at + 16 * i);
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128((int)crc));
  for (at += 64, bytes -= 64; bytes >= 64; at += 64, bytes -= 64)
    for (int i = 0; i < 4; i++) sums[i] = fold(sums[i], by_512, load(at + 16 * i));
  __m128i sum = sums[0];
  for (int i = 1; i < 4; i++) sum = fold(sum, by_128, sums[i]);
  for (; bytes; at += 16, bytes -= 16) sum = fold(sum, by_128, load(at));
  /* 128 bits to 64, then to the remainder of 32 (Barrett). */
  sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_128, 0x10));
  const __m128i by_64 = _mm_set_epi64x(0, X_64), divisor = _mm_set_epi64x(QUOTIENT, POLYNOMIAL);
  const __m128i rest = _mm_and_si128(sum, low_words);
  sum = _mm_xor_si128(_mm_srli_si128(sum, 4), _mm_clmulepi64_si128(rest, by_64, 0x00));
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(sum, low_words), divisor, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), divisor, 0x00);
  return (uint32_t)_mm_extract_epi32(_mm_xor_si128(sum, quotient), 1);
}
#else
int allred_crc32_is_fast(void) { return 0; }
static uint32_t of_blocks(const unsigned char *at, size_t bytes, uint32_t crc) { return crc; }
#endif

uint32_t allred_crc32(const void *data, size_t bytes, uint32_t value) {
  const unsigned char *at = data;
  const size_t blocks = bytes < 64 ? 0 : bytes & ~(size_t)15;
  uint32_t crc = ~value;
  if (blocks) crc = of_blocks(at, blocks, crc);
  for (size_t i = blocks; i < bytes; i++) {
    crc ^= at[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0xedb88320) : 0);
  }
  return ~crc;
}
