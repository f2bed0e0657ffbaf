/*
 * The encodings of numbers between hosts (encode.h): all variants of the kernels give the same bits, a decoded number
 * is near, an error that is kept is exact, and nothing is written behind the end.
 *
 *   encode [ROUNDS [SEED]]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "encode.h"
#include "header.h"

#define MOST 1500
#define GUARD 64

static const int wires[] = {ALLRED_WIRE_INT8, ALLRED_WIRE_INT4, ALLRED_FLOAT16, ALLRED_BFLOAT16};

static uint64_t state;

static uint64_t draw(void) { return state = allred_mix(state, 1); }

static void fail(const char *what, int wire, int variant, size_t at) {
  fprintf(stderr, "wire type %d, %s: %s (%zu)\n", wire, allred_variant_name(variant), what, at);
  exit(1);
}

/* A number of any size; sometimes special. */
static float number(int special) {
  const float plain = ldexpf((float)(int32_t)draw(), (int)(draw() % 20) - 40);
  if (!special) return plain;
  const float odd[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-40f, 3.4e38f, 1e-37f, 7.5e-37f, 7.6e-37f};
  return draw() % 64 ? plain : odd[draw() % 10];
}

/* The largest error of a number, given the largest magnitude of its block. */
static double limit(int wire, double largest) {
  return wire == ALLRED_WIRE_INT8   ? largest / 127 * 0.501
         : wire == ALLRED_WIRE_INT4 ? largest / 7 * 0.501
         : wire == ALLRED_FLOAT16   ? largest / 2048 + 6e-8
                                    : largest / 256 + 1e-40;
}

static void check_values(int wire, const float *in, const float *kept, const float *decoded, const float *residual,
                         size_t count) {
  for (size_t start = 0; start < count; start += ALLRED_ENCODED_BLOCK) {
    const size_t end = count - start < ALLRED_ENCODED_BLOCK ? count : start + ALLRED_ENCODED_BLOCK;
    double largest = 0;
    int finite = 1;
    for (size_t i = start; i < end; i++) {
      finite &= fabsf(in[i] + kept[i]) < 0x1p127f;
      if (fabs((double)(in[i] + kept[i])) > largest) largest = fabs((double)(in[i] + kept[i]));
    }
    for (size_t i = start; i < end; i++) {
      const float sum = in[i] + kept[i];
      if (!finite && allred_is_quantized(wire)) {
        if (!isnan(decoded[i]) || residual[i] != kept[i]) fail("a block that is not finite", wire, 0, i);
        continue;
      }
      if (!isfinite(sum) || !isfinite(decoded[i])) continue; /* also a float16 that overflows */
      if (fabs((double)sum - decoded[i]) > limit(wire, allred_is_quantized(wire) ? largest : fabs((double)sum)))
        fail("an error is too large", wire, 0, i);
      if (residual[i] != sum - decoded[i]) fail("the error that is kept is wrong", wire, 0, i);
      if (allred_is_quantized(wire) && (double)residual[i] + decoded[i] != sum) fail("it is not exact", wire, 0, i);
    }
  }
}

static void check_round(void) {
  static float in[MOST], kept[MOST], residual[MOST], first_residual[MOST], decoded[MOST], first_decoded[MOST];
  static char encoded[5 * MOST + GUARD], first[5 * MOST];
  const size_t count = draw() % 3 ? draw() % MOST : draw() % 600;
  const int special = draw() % 3 == 0, keeps = draw() % 4 > 0;
  for (size_t i = 0; i < count; i++) in[i] = number(special), kept[i] = keeps ? number(0) / 128 : 0;
  if (draw() % 8 == 0)
    for (size_t i = 0; i < count; i++) in[i] = ldexpf(in[i], -110), kept[i] = 0;
  for (size_t w = 0; w < sizeof wires / sizeof *wires; w++) {
    const size_t bytes = allred_encoded_bytes(wires[w], count);
    if (bytes > 5 * count) fail("more bytes than promised", wires[w], 0, bytes);
    for (int variant = 0; variant < allred_variants(); variant++) {
      memset(encoded, 'x', sizeof encoded);
      memcpy(residual, kept, sizeof kept);
      allred_encode(variant, wires[w], encoded, in, keeps ? residual : NULL, count);
      allred_decode(variant, wires[w], decoded, encoded, count);
      for (size_t i = 0; i < GUARD; i++)
        if (encoded[bytes + i] != 'x') fail("a byte behind the end is written", wires[w], variant, i);
      if (!variant) {
        memcpy(first, encoded, bytes), memcpy(first_residual, residual, sizeof residual);
        memcpy(first_decoded, decoded, count * sizeof *decoded);
        if (keeps) check_values(wires[w], in, kept, decoded, residual, count);
        continue;
      }
      for (size_t i = 0; i < count; i++) {
        if (isnan(decoded[i]) && isnan(first_decoded[i])) continue;
        if (memcmp(&decoded[i], &first_decoded[i], sizeof *decoded)) fail("another number", wires[w], variant, i);
        if (keeps && memcmp(&residual[i], &first_residual[i], sizeof *residual))
          fail("another error that is kept", wires[w], variant, i);
      }
      if (!special && memcmp(encoded, first, bytes)) fail("other bytes", wires[w], variant, 0);
    }
  }
}

int main(int count, char **words) {
  const int rounds = count > 1 ? atoi(words[1]) : 1000;
  state = count > 2 ? (uint64_t)atoll(words[2]) : 1;
  for (int i = 0; i < rounds; i++) check_round();
  printf("encodings: %d rounds are right, %d variants\n", rounds, allred_variants());
  return 0;
}
