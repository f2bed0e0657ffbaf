/* An optimizer's update of one tensor in one pass over memory. No Python, no globals, no allocation. */
#ifndef ALLRED_UPDATE_H
#define ALLRED_UPDATE_H

#include <stddef.h>

/*
 * What a rule takes: the parameter, the gradient, then these arrays; and these numbers. The formulas stand in
 * update_body.h and, with their words, in the classes of allred/optim. A slot in brackets may be NULL: the optimizer
 * does without.
 *
 *   sgd       [momentum_buffer]
 *             lr, momentum, nesterov (0 or 1), weight_decay
 *   adagrad   sum
 *             lr, eps, weight_decay
 *   rmsprop   square_avg, [grad_avg], [momentum_buffer]
 *             lr, decay, eps, momentum, weight_decay
 *   adam      exp_avg, exp_avg_sq
 *             lr / (1 - beta1^t), beta1, beta2, sqrt(1 - beta2^t), eps, weight_decay
 *   adamw     exp_avg, exp_avg_sq
 *             lr / (1 - beta1^t), beta1, beta2, sqrt(1 - beta2^t), eps, lr * weight_decay
 */
enum { ALLRED_RULE_ARRAYS = 5, ALLRED_RULE_NUMBERS = 6 }; /* the most that any takes */

typedef struct {
  const char *name;
  int arrays, needed; /* of the arrays, so many of the first must be there */
  int numbers;
} allred_rule;

/* The rule of this name, or NULL. */
const allred_rule *allred_find_rule(const char *name);

/*
 * Change the parameter and the slots, of `count` elements each; the gradient is only read. No two may overlap; nothing
 * needs to be aligned. The bits are those that numpy gives where it takes the same steps one by one: each is rounded to
 * the elements' type, as the numbers are before; except which of several NaNs it is.
 */
typedef void (*allred_update)(void *const *arrays, const double *numbers, size_t count);

/* The kernel for elements of 4 (float) or 8 bytes (double). `variant` is one of reduce.h's; from the second on, AVX2's,
 * they share a kernel. */
allred_update allred_update_kernel(const allred_rule *rule, int element_bytes, int variant);

#endif
