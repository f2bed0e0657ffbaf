/* Reduce several arrays into one, element by element: the arithmetic of allreduce. */
#ifndef ALLRED_REDUCE_H
#define ALLRED_REDUCE_H

#include <stddef.h>

/* The codes in headers and in Python: positions in DTYPES of allred/arrays.py, and CODES of allred/comm/ops.py. */
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
  ALLRED_UINT16,
  ALLRED_UINT32,
  ALLRED_UINT64,
  ALLRED_COMPLEX64,
  ALLRED_COMPLEX128,
  ALLRED_DTYPES
};
enum { ALLRED_AVERAGE = 1, ALLRED_SUM, ALLRED_MIN, ALLRED_MAX, ALLRED_PRODUCT, ALLRED_OPS };

/*
 * out[i] = finish(sources[0][i] op sources[1][i] op ...), strictly in the order of the sources; there is at least one.
 * finish() divides an Average by `divisor` (1 to 2**24, exact as a float), turns -0.0 into 0.0 after Min and Max of
 * floats, and rounds float16 and bfloat16, which are computed in float32, once, to nearest even. Integers wrap around;
 * bools are bytes 0 and 1; a NaN in any source gives NaN. Complex numbers have no Min and Max; a product is
 * (ac - bd) + (ad + bc)i, each part rounded after each operation.
 *
 * `out` is exactly one of the sources, or overlaps none. No array needs to be aligned. Every variant gives the same
 * bits as numpy; only which of several NaNs results may differ.
 */
typedef void (*allred_reduce)(void *out, const void *const *sources, int sources_count, size_t count, int divisor);

/* out[i] = in[i], rounded to nearest even; too large values become infinity; float64 is first rounded to float32. */
typedef void (*allred_narrow)(void *out, const void *in, size_t count);

/*
 * out[i] = in[i] * weight. float32, float64 and complex only: the weight is rounded to the dtype, and so is each
 * product. With the weights 0 and 1 integers too: 1 copies, and 0 gives zeros, also of NaN. The arrays do not overlap.
 */
void allred_weigh(void *out, const void *in, size_t bytes, int dtype, double weight);

/* Whether numbers of this dtype can be multiplied by this weight: never float16 and bfloat16. */
int allred_can_weigh(int dtype, double weight);

/* The dtype in which numbers are summed between hosts: float32 for float16 and bfloat16, else their own. */
int allred_sum_dtype(int dtype);

/* The dtype of the two parts of a complex number; any other dtype itself. */
int allred_part_dtype(int dtype);

/* Bytes of an element. */
size_t allred_dtype_bytes(int dtype);

/* Variants are the same kernels for larger instruction sets; 0 runs on every CPU, the last of this CPU is fastest. */
int allred_variants(void);
const char *allred_variant_name(int variant);

/* Return the kernel of a variant below allred_variants(); NULL if it is undefined: Average of integers, Sum of bool. */
allred_reduce allred_reduce_kernel(int variant, int dtype, int op);

/*
 * Numbers that travel in a narrower type: `dtype` is float32 or float64, `wire` is float16 or bfloat16.
 *
 * The wide kernel is an allred_reduce with sources of the wire type and `out` of the dtype: it computes in float32, and
 * does not round the result again. `out` overlaps no source.
 */
int allred_narrows(int dtype, int wire); /* whether there are kernels for these types */
allred_reduce allred_wide_kernel(int variant, int wire, int dtype, int op);
allred_narrow allred_narrow_kernel(int variant, int dtype, int wire);

#endif
