/* An optimizer's update of one tensor in one pass over memory. */
#ifndef ALLRED_UPDATE_H
#define ALLRED_UPDATE_H

#include <stddef.h>

/*
 * The arguments of a rule: the parameter, the gradient, then these arrays; and these numbers. update_body.h has the
 * formulas, the classes of allred/optim explain them. A slot in brackets may be NULL, if the optimizer does not use it.
 *
 *   sgd       [momentum_buffer]
 *             lr, momentum, nesterov (0 or 1), weight_decay
 *   adagrad   sum
 *             lr, eps, weight_decay
 *   row_wise_adagrad
 *             sum, one element for all
 *             lr, eps, weight_decay
 *   rmsprop   square_avg, [grad_avg], [momentum_buffer]
 *             lr, decay, eps, momentum, weight_decay
 *   adam      exp_avg, exp_avg_sq
 *             lr / (1 - beta1^t), beta1, beta2, sqrt(1 - beta2^t), eps, weight_decay
 *   adamw     exp_avg, exp_avg_sq
 *             lr / (1 - beta1^t), beta1, beta2, sqrt(1 - beta2^t), eps, lr * weight_decay
 */
enum { ALLRED_RULE_ARRAYS = 5, ALLRED_RULE_NUMBERS = 6 }; /* the maximum of all rules */

typedef struct {
  const char *name;
  int arrays, needed; /* the first `needed` arrays must not be NULL */
  int numbers;
  int slot_per_row; /* whether a slot has one element for all elements of the arrays, which are a row */
} allred_rule;

/* Return the rule of this name, or NULL. */
const allred_rule *allred_find_rule(const char *name);

/*
 * Update the parameter and the slots, of `count` elements each (but see slot_per_row); the gradient is only read. No
 * two arrays may overlap; none needs to be aligned. The results have the bits that numpy gives for the same steps:
 * every result, and every number, is rounded to the type of the elements. Only which of several NaNs results may
 * differ.
 */
typedef void (*allred_update)(void *const *arrays, const double *numbers, size_t count);

/* Return the kernel for elements of 4 (float) or 8 bytes (double). `variant` is one of reduce.h; from AVX2 on they
 * share a kernel. */
allred_update allred_update_kernel(const allred_rule *rule, int element_bytes, int variant);

#endif
