/*
 * The encodings in which float32 numbers travel between hosts (network_compressed.c).
 *
 *   16-bit floats  ALLRED_FLOAT16, ALLRED_BFLOAT16: each number rounded to nearest even
 *   8 bits         ALLRED_WIRE_INT8: blocks of 256 numbers: a float32 `scale`, which is the largest magnitude of the
 *                  block divided by 127; then the numbers divided by it, rounded to nearest even, as int8
 *   4 bits         ALLRED_WIRE_INT4: the same with 7 for 127. A byte holds two numbers: number i of the block in its
 *                  lower half, and number i + (count + 1) / 2 in its upper half
 *
 * The numbers of a call are those of one tensor, so a block never has numbers of two. A block whose largest magnitude
 * is below 2**-120 has scale 0. A block with a NaN, or a number of 2**127 or more, has scale NaN, and decodes to NaN.
 *
 * residual, or NULL: for each number the error of the last encoding. It is added before the number is encoded, and
 * becomes the new error: number + residual - decoded. Where a result is not finite it stays as it is.
 *
 * Every variant (reduce.h) gives the same bits.
 */
#ifndef ALLRED_ENCODE_H
#define ALLRED_ENCODE_H

#include <stddef.h>

#include "reduce.h"

/* Codes of wire types beside float16 and bfloat16: an int8 is one number, a uint8 two numbers of 4 bits. */
enum { ALLRED_WIRE_INT4 = ALLRED_UINT8, ALLRED_WIRE_INT8 = ALLRED_INT8 };

#define ALLRED_ENCODED_BLOCK 256 /* numbers */

/* Whether the wire type has blocks with a scale. */
static inline int allred_is_quantized(int wire) { return wire == ALLRED_WIRE_INT8 || wire == ALLRED_WIRE_INT4; }

/* Whether tensors of these dtypes travel in this wire type between hosts. */
int allred_encodes(int dtype, int wire);

/* Tensors with fewer than two dimensions and at most this many elements are not quantized: biases, scales of layers. */
#define ALLRED_EXEMPT_ELEMENTS 65536

/* Return the bytes of `count` encoded numbers, at most 5 * count. */
size_t allred_encoded_bytes(int wire, size_t count);

void allred_encode(int variant, int wire, char *to, const float *from, float *residual, size_t count);
void allred_decode(int variant, int wire, float *to, const char *from, size_t count);

#endif
