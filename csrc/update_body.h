/*
 * The update kernels for one element type and one instruction set. update.c includes this file once for each, and
 * update.cu for a GPU. They define before
 *   REAL          float or double;
 *   NAME(name)    the name of a type, function or table;
 *   TARGET        the attribute that selects the instructions;
 * and, once for all,
 *   EACH, ROOT, POSITIVE, FIX as in update.c, and STORAGE, the attributes of elements in memory.
 * The first three are undefined at the end.
 *
 * A loop takes the options of an optimizer as constants, and is compiled for each combination: it has no branch.
 */

#define LOOP static inline __attribute__((always_inline)) TARGET void
#define KERNEL TARGET static void
#define STORED NAME(stored)
typedef REAL STORED STORAGE;

/* grad + weight_decay * param; only the gradient if the decay is 0, because param may be infinite. */
#define DECAYED_GRADIENT (decays ? param[i] * weight_decay + grad[i] : grad[i])

LOOP NAME(sgd_loop)(void *const *arrays, const double *numbers, size_t count, int decays, int has_momentum,
                    int nesterov) {
  STORED *param = (STORED *)arrays[0], *buffer = (STORED *)arrays[2];
  const STORED *grad = (const STORED *)arrays[1];
  const REAL lr = (REAL)numbers[0], momentum = (REAL)numbers[1], weight_decay = (REAL)numbers[3];
  EACH(count) {
    REAL g = DECAYED_GRADIENT;
    if (has_momentum) {
      const REAL b = buffer[i] * momentum + g;
      buffer[i] = b;
      g = nesterov ? g + b * momentum : b;
    }
    param[i] -= g * lr;
  }
}

LOOP NAME(adagrad_loop)(void *const *arrays, const double *numbers, size_t count, int decays) {
  STORED *param = (STORED *)arrays[0], *sum = (STORED *)arrays[2];
  const STORED *grad = (const STORED *)arrays[1];
  const REAL lr = (REAL)numbers[0], eps = (REAL)numbers[1], weight_decay = (REAL)numbers[2];
  EACH(count) {
    const REAL g = DECAYED_GRADIENT, s = sum[i] + g * g;
    sum[i] = s;
    param[i] -= g / (ROOT(s) + eps) * lr;
  }
}

LOOP NAME(rmsprop_loop)(void *const *arrays, const double *numbers, size_t count, int decays, int centered,
                        int has_momentum) {
  STORED *param = (STORED *)arrays[0], *square_avg = (STORED *)arrays[2];
  STORED *grad_avg = (STORED *)arrays[3], *buffer = (STORED *)arrays[4];
  const STORED *grad = (const STORED *)arrays[1];
  const REAL lr = (REAL)numbers[0], keep = (REAL)numbers[1], take = (REAL)(1.0 - numbers[1]);
  const REAL eps = (REAL)numbers[2], momentum = (REAL)numbers[3], weight_decay = (REAL)numbers[4];
  EACH(count) {
    const REAL g = DECAYED_GRADIENT, s = square_avg[i] * keep + g * g * take;
    REAL variance = s;
    square_avg[i] = s;
    if (centered) {
      const REAL a = grad_avg[i] * keep + g * take;
      grad_avg[i] = a;
      variance = s - a * a;
      variance = POSITIVE(variance);
    }
    REAL d = g / (ROOT(variance) + eps);
    if (has_momentum) buffer[i] = d = buffer[i] * momentum + d;
    param[i] -= d * lr;
  }
}

LOOP NAME(adam_loop)(void *const *arrays, const double *numbers, size_t count, int decays, int apart) {
  STORED *param = (STORED *)arrays[0], *mean = (STORED *)arrays[2], *square = (STORED *)arrays[3];
  const STORED *grad = (const STORED *)arrays[1];
  const REAL rate = (REAL)numbers[0], root = (REAL)numbers[3], eps = (REAL)numbers[4], weight_decay = (REAL)numbers[5];
  const REAL keep_mean = (REAL)numbers[1], take_mean = (REAL)(1.0 - numbers[1]);
  const REAL keep_square = (REAL)numbers[2], take_square = (REAL)(1.0 - numbers[2]);
  EACH(count) {
    const REAL g = DECAYED_GRADIENT;
    const REAL m = mean[i] * keep_mean + g * take_mean, v = square[i] * keep_square + g * g * take_square;
    REAL change = m / (ROOT(v) / root + eps) * rate;
    mean[i] = m;
    square[i] = v;
    if (apart) change += param[i] * weight_decay;
    param[i] -= change;
  }
}

#ifndef __CUDACC__
/* The squares are added in 8 sums, element i to sum i % 8; then the upper half of the sums to the lower half, three
 * times. So vectors are used, and numpy can compute the same bits. */
LOOP NAME(row_wise_adagrad_loop)(void *const *arrays, const double *numbers, size_t count, int decays) {
  STORED *param = (STORED *)arrays[0], *sum = (STORED *)arrays[2];
  const STORED *grad = (const STORED *)arrays[1];
  const REAL lr = (REAL)numbers[0], eps = (REAL)numbers[1], weight_decay = (REAL)numbers[2];
  REAL sums[8] = {0};
  size_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (size_t lane = 0; lane < 8; lane++) {
      const REAL g = decays ? param[i + lane] * weight_decay + grad[i + lane] : grad[i + lane];
      sums[lane] += g * g;
    }
  for (size_t lane = 0; i < count; lane++, i++) {
    const REAL g = DECAYED_GRADIENT;
    sums[lane] += g * g;
  }
  for (size_t width = 4; width; width /= 2)
    for (size_t lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
  const REAL s = *sum + sums[0] / (REAL)count, root = ROOT(s) + eps;
  *sum = s;
  EACH(count) {
    const REAL g = DECAYED_GRADIENT;
    param[i] -= g / root * lr;
  }
}
#endif

KERNEL NAME(sgd)(void *const *arrays, const double *numbers, size_t count){
    FIX(decays, numbers[3] != 0,
        FIX(has_momentum, arrays[2] != NULL,
            FIX(nesterov, numbers[2] != 0, NAME(sgd_loop)(arrays, numbers, count, decays, has_momentum, nesterov))))}

KERNEL NAME(adagrad)(void *const *arrays, const double *numbers,
                     size_t count){FIX(decays, numbers[2] != 0, NAME(adagrad_loop)(arrays, numbers, count, decays))}

#ifndef __CUDACC__
KERNEL NAME(row_wise_adagrad)(void *const *arrays, const double *numbers, size_t count){
    FIX(decays, numbers[2] != 0, NAME(row_wise_adagrad_loop)(arrays, numbers, count, decays))}
#endif

KERNEL NAME(rmsprop)(void *const *arrays, const double *numbers, size_t count){
    FIX(decays, numbers[4] != 0,
        FIX(centered, arrays[3] != NULL,
            FIX(has_momentum, arrays[4] != NULL,
                NAME(rmsprop_loop)(arrays, numbers, count, decays, centered, has_momentum))))}

KERNEL NAME(adam)(void *const *arrays, const double *numbers,
                  size_t count){FIX(decays, numbers[5] != 0, NAME(adam_loop)(arrays, numbers, count, decays, 0))}

KERNEL NAME(adamw)(void *const *arrays, const double *numbers, size_t count) {
  NAME(adam_loop)(arrays, numbers, count, 0, 1);
}

/* In the order of `rules` in update.c. */
#ifndef __CUDACC__
static const allred_update NAME(kernels)[] = {NAME(sgd),  NAME(adagrad), NAME(rmsprop),
                                              NAME(adam), NAME(adamw),   NAME(row_wise_adagrad)};
#endif

#undef LOOP
#undef KERNEL
#undef STORED
#undef DECAYED_GRADIENT
#undef REAL
#undef NAME
#undef TARGET
