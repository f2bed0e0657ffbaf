"""Adam, and AdamW with decoupled weight decay."""

import math

import numpy as np

from allred.arrays import Array
from allred.errors import InputError
from allred.optim.base import Optimizer, Slots
from allred.optim.schedules import Schedule
from allred.optim.tensors import compute_dtype, decayed_gradient, fold_in, fused
from allred.validators import fraction, non_negative


class Adam(Optimizer):
    """Adam, as torch.optim.Adam.

        g = grad + weight_decay * param
        m = beta1 * m + (1 - beta1) * g         (m and v start at 0)
        v = beta2 * v + (1 - beta2) * g^2
        param = param - lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    t is the step of the optimizer, 1 at the first update, for all tensors, as in TensorFlow and optax. torch counts for
    each tensor the steps in which it had a gradient; results differ only if gradients are None in some steps.

    Arguments:
        lr: learning rate, a number >= 0 or a schedule.
        betas: (beta1, beta2), each in [0, 1).
        eps: >= 0, added to the denominator, outside the square root and after the bias correction.
        weight_decay: >= 0, factor of the L2 penalty.

    Slots: "exp_avg" (m) and "exp_avg_sq" (v), with the shape of the parameter.

    Raises:
        InputError: a hyper-parameter is out of range.

    >>> params = [np.array([1.0, 2.0])]
    >>> optimizer = Adam(lr=0.1)
    >>> optimizer.step(params, [np.array([3.0, -0.5])])
    >>> print(np.round(params[0], 6))
    [0.9 2.1]

    D. P. Kingma, J. Ba: Adam: a method for stochastic optimization. ICLR 2015.
    """

    elementwise = True

    def __init__(
        self,
        lr: float | Schedule = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(lr)
        who = type(self).__name__
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise InputError(f"{who}: betas must be two numbers, but is {betas!r}; pass for example (0.9, 0.999)")
        self.betas = fraction(who, "betas[0]", betas[0]), fraction(who, "betas[1]", betas[1])
        self.eps = non_negative(who, "eps", eps)
        self.weight_decay = non_negative(who, "weight_decay", weight_decay)

    def slots(self, param: Array) -> Slots:
        return {name: np.zeros_like(param, dtype=compute_dtype(param)) for name in ("exp_avg", "exp_avg_sq")}

    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        numbers = _corrected(self, lr, step)
        if fused("adam", (param, grad, slots["exp_avg"], slots["exp_avg_sq"]), (*numbers, self.weight_decay)):
            return
        grad = decayed_gradient(param, grad, self.weight_decay)
        np.subtract(param, _change(grad, slots, *numbers), out=param)


class AdamW(Adam):
    """AdamW, as torch.optim.AdamW: Adam with a weight decay that does not enter the averages.

        param = param - lr * weight_decay * param - (change of Adam without weight decay)

    Arguments, slots and errors are those of Adam; the default of `weight_decay` is 0.01.

    >>> params = [np.array([1.0, 2.0])]
    >>> optimizer = AdamW(lr=0.1, weight_decay=0.5)
    >>> optimizer.step(params, [np.array([3.0, -0.5])])
    >>> print(np.round(params[0], 6))
    [0.85 2.  ]

    I. Loshchilov, F. Hutter: Decoupled weight decay regularization. ICLR 2019.
    """

    def __init__(
        self,
        lr: float | Schedule = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay)

    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        numbers, shrinkage = _corrected(self, lr, step), lr * self.weight_decay
        if fused("adamw", (param, grad, slots["exp_avg"], slots["exp_avg_sq"]), (*numbers, shrinkage)):
            return
        change = _change(grad, slots, *numbers)
        shrink = np.empty_like(change)
        np.multiply(param, shrinkage, out=shrink, dtype=shrink.dtype)
        np.add(change, shrink, out=change)  # one subtraction, so that a 16-bit parameter is rounded once
        np.subtract(param, change, out=param)


def _corrected(optimizer: Adam, lr: float, step: int) -> tuple[float, float, float, float, float]:
    """Numbers of one update: lr / (1 - beta1^t), beta1, beta2, sqrt(1 - beta2^t), eps."""
    beta1, beta2 = optimizer.betas
    return lr / (1.0 - beta1**step), beta1, beta2, math.sqrt(1.0 - beta2**step), optimizer.eps


def _change(grad: Array, slots: Slots, rate: float, beta1: float, beta2: float, root: float, eps: float) -> Array:
    """Update both averages with `grad` and return the change to subtract from the parameter."""
    mean, square = slots["exp_avg"], slots["exp_avg_sq"]
    change = np.empty_like(grad)
    fold_in(mean, grad, beta1, scratch=change)
    np.multiply(grad, grad, out=change)
    fold_in(square, change, beta2, scratch=change)
    np.sqrt(square, out=change)
    np.divide(change, root, out=change)
    np.add(change, eps, out=change)
    np.divide(mean, change, out=change)
    np.multiply(change, rate, out=change)
    return change
