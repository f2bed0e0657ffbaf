/* Several arrays into one, element by element: the arithmetic of allreduce. No Python, no globals, no allocation. */
#ifndef ALLRED_REDUCE_H
#define ALLRED_REDUCE_H

#include <stddef.h>

/* The codes of headers and of Python: positions in allred/arrays.py DTYPES, and CODES of allred/comm/ops.py. */
enum {
  ALLRED_BOOL,
  ALLRED_UINT8,
  ALLRED_INT8,
  ALLRED_INT16,
  ALLRED_INT32,
  ALLRED_INT64,
  ALLRED_FLOAT16,
  ALLRED_BFLOAT16,
  ALLRED_FLOAT32,
  ALLRED_FLOAT64,
  ALLRED_DTYPES
};
enum { ALLRED_AVERAGE = 1, ALLRED_SUM, ALLRED_MIN, ALLRED_MAX, ALLRED_PRODUCT, ALLRED_OPS };

/*
 * out[i] = finish(sources[0][i] op sources[1][i] op ...), strictly in the order of the sources, of which there is at
 * least one. finish() divides an Average by `divisor` (1 to 2**24, exact as a float), makes -0.0 a 0.0 after a
 * floating Min or Max, and rounds float16 and bfloat16, which are computed in float32, once, to nearest even.
 * Integers wrap around; bools are bytes 0 and 1; a NaN in any source gives NaN.
 *
 * `out` is exactly one of the sources or overlaps none. Nothing needs to be aligned. Every variant gives the same bits,
 * those of numpy, except which of several NaNs it is.
 */
typedef void (*allred_reduce)(void *out, const void *const *sources, int sources_count, size_t count, int divisor);

/* out[i] = in[i], rounded to nearest even: what is too large becomes infinity, a float64 is made a float32 first. */
typedef void (*allred_narrow)(void *out, const void *in, size_t count);

/* Bytes of an element. */
size_t allred_dtype_bytes(int dtype);

/* Variants are the same kernels compiled for growing instruction sets: 0, the "baseline", runs anywhere. */
int allred_variants(void); /* how many of them this CPU runs; the last is the fastest */
const char *allred_variant_name(int variant);

/* The kernel of a variant below allred_variants(); NULL where the operator is not defined for the dtype: Average of
 * what is not floating, Sum of bool. */
allred_reduce allred_reduce_kernel(int variant, int dtype, int op);

/*
 * Numbers that travel narrower than they are in memory: `dtype` is float32 or float64, `wire` float16 or bfloat16.
 *
 * The kernel of the first is an allred_reduce whose sources are of the wire type and `out` of the dtype: the arithmetic
 * is in float32, and its result is not rounded again. `out` overlaps no source.
 */
int allred_narrows(int dtype, int wire); /* whether there are kernels for it */
allred_reduce allred_wide_kernel(int variant, int wire, int dtype, int op);
allred_narrow allred_narrow_kernel(int variant, int dtype, int wire);

#endif
