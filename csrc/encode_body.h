/* The quantizing kernels for one instruction set; encode.c includes this file once for each VARIANT. */

/* Return the largest magnitude, as bits of float32. NaN and infinity have larger bits than all other numbers. */
static inline int32_t VARIANT(largest)(const float *from, size_t count) {
  const int32_bits *bits = (const int32_bits *)from;
  int32_t most = 0;
  for (size_t i = 0; i < count; i++) most = (bits[i] & 0x7fffffff) > most ? (bits[i] & 0x7fffffff) : most;
  return most;
}

/* Quantize a block, whose scale is not 0 and not NaN. */
static inline void VARIANT(quantize)(int8_t *to, const float *from, float *residual, size_t count, float scale,
                                     float inverse) {
  if (residual) {
    EACH(count) {
      const float rounded = from[i] * inverse + ROUNDS - ROUNDS;
      residual[i] = from[i] - rounded * scale;
      to[i] = (int8_t)(int32_t)rounded;
    }
  } else {
    EACH(count) to[i] = (int8_t)(int32_t)(from[i] * inverse + ROUNDS - ROUNDS);
  }
}

static inline void VARIANT(encode_block)(char *to, const float *from, float *residual, size_t count, int bits) {
  const float most_steps = bits == 8 ? 127 : 7;
  const size_t half = (count + 1) / 2;
  float sum[ALLRED_ENCODED_BLOCK];
  int8_t steps[ALLRED_ENCODED_BLOCK + 1];
  if (residual) {
    EACH(count) sum[i] = from[i] + residual[i];
    from = sum;
  }
  const int32_t most = VARIANT(largest)(from, count);
  float largest, scale;
  memcpy(&largest, &most, sizeof largest);
  scale = most >= TOO_LARGE ? not_a_number() : most < NEGLIGIBLE ? 0 : largest / most_steps;
  memcpy(to, &scale, sizeof scale);
  to += sizeof scale;
  if (most >= TOO_LARGE || most < NEGLIGIBLE) {
    memset(to, 0, bits == 8 ? count : half);
    if (residual && most < NEGLIGIBLE) memcpy(residual, from, count * sizeof *from);
    return;
  }
  int8_t *const eight = bits == 8 ? (int8_t *)to : steps;
  if (count == ALLRED_ENCODED_BLOCK) /* the usual case: the compiler knows the count */
    VARIANT(quantize)(eight, from, residual, ALLRED_ENCODED_BLOCK, scale, most_steps / largest);
  else
    VARIANT(quantize)(eight, from, residual, count, scale, most_steps / largest);
  if (bits == 8) return;
  steps[count] = 0;
  EACH(half) to[i] = (char)((steps[i] & 15) | (uint8_t)steps[i + half] << 4);
}

static inline void VARIANT(decode_block)(float *to, const char *from, size_t count, int bits) {
  const size_t half = (count + 1) / 2;
  const int8_t *steps = (const int8_t *)from + sizeof(float);
  float scale;
  memcpy(&scale, from, sizeof scale);
  if (bits == 8) {
    EACH(count) to[i] = (float)steps[i] * scale;
    return;
  }
  EACH(half) to[i] = (float)((int8_t)((uint8_t)steps[i] << 4) >> 4) * scale;
  EACH(count - half) to[half + i] = (float)(steps[i] >> 4) * scale;
}

/* A loop over blocks in which the compiler knows the number of bits, and the size of whole blocks. */
#define CODEC(name, bits)                                                                                              \
  static void VARIANT(encode_##name)(char *to, const float *from, float *residual, size_t count) {                     \
    for (size_t length; count; count -= length, from += length, residual += residual ? length : 0) {                   \
      length = count < ALLRED_ENCODED_BLOCK ? count : ALLRED_ENCODED_BLOCK;                                            \
      if (length == ALLRED_ENCODED_BLOCK)                                                                              \
        VARIANT(encode_block)(to, from, residual, ALLRED_ENCODED_BLOCK, bits);                                         \
      else                                                                                                             \
        VARIANT(encode_block)(to, from, residual, length, bits);                                                       \
      to += block_bytes(length, bits);                                                                                 \
    }                                                                                                                  \
  }                                                                                                                    \
  static void VARIANT(decode_##name)(float *to, const char *from, size_t count) {                                      \
    for (size_t length; count; count -= length, to += length) {                                                        \
      length = count < ALLRED_ENCODED_BLOCK ? count : ALLRED_ENCODED_BLOCK;                                            \
      if (length == ALLRED_ENCODED_BLOCK)                                                                              \
        VARIANT(decode_block)(to, from, ALLRED_ENCODED_BLOCK, bits);                                                   \
      else                                                                                                             \
        VARIANT(decode_block)(to, from, length, bits);                                                                 \
      from += block_bytes(length, bits);                                                                               \
    }                                                                                                                  \
  }
CODEC(int8, 8)
CODEC(int4, 4)
#undef CODEC
#undef VARIANT
