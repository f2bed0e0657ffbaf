"""The optimizers: SGD, Adagrad, RMSProp, Adam and AdamW.

Where no kernel applies, numpy computes in place, with one temporary array: the page faults of each further one
cost more than the arithmetic.
"""

import math

import numpy as np

from allred.arrays import Array
from allred.errors import InputError
from allred.native.row_twins import sum_of_squares
from allred.optim.base import Optimizer, compute_dtype, decayed_gradient, fold_in, fused_by
from allred.optim.schedules import Schedule
from allred.optim.step_input import Kernel, Slots
from allred.validators import boolean, fraction, non_negative


class SGD(Optimizer):
    """Stochastic gradient descent, as torch.optim.SGD (with dampening 0; the default lr is 0.01, not 0.001).

        g = grad + weight_decay * param
        b = momentum * b + g                    (b starts at 0; without momentum b = g)
        d = g + momentum * b if nesterov else b
        param = param - lr * d

    Arguments:
        lr: learning rate, a number >= 0 or a schedule.
        momentum: in [0, 1).
        nesterov: use Nesterov momentum; requires momentum > 0.
        weight_decay: >= 0, factor of the L2 penalty.

    Slots: with momentum "momentum_buffer" (b), with the shape of the parameter.

    Raises InputError: a hyper-parameter is out of range, or nesterov without momentum.

    >>> params = [np.array([1.0, 2.0])]
    >>> optimizer = SGD(lr=0.1, momentum=0.9)
    >>> for _ in range(2):
    ...     optimizer.step(params, [np.array([1.0, -1.0])])
    >>> print(params)
    [array([0.71, 2.29])]

    I. Sutskever, J. Martens, G. Dahl, G. Hinton: On the importance of initialization and momentum in deep learning.
    ICML 2013. As in torch, the buffer holds gradients, not steps, so a changed learning rate takes effect at once.
    """

    elementwise = True

    def __init__(
        self, lr: float | Schedule = 0.01, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
    ) -> None:
        super().__init__(lr)
        self.momentum = fraction("SGD", "momentum", momentum)
        self.nesterov = bool(nesterov)
        self.weight_decay = non_negative("SGD", "weight_decay", weight_decay)
        if self.nesterov and self.momentum == 0.0:
            raise InputError("SGD: nesterov needs momentum > 0, but momentum is 0; pass momentum=0.9 or nesterov=False")

    def slots(self, param: Array) -> Slots:
        return {"momentum_buffer": np.zeros_like(param, dtype=compute_dtype(param))} if self.momentum else {}

    def kernel(self, lr: float, step: int) -> Kernel:
        numbers = (lr, self.momentum, float(self.nesterov), self.weight_decay)
        return Kernel("sgd", ("momentum_buffer" if self.momentum else None,), numbers)

    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        if fused_by(SGD.kernel(self, lr, step), param, grad, slots):
            return
        buffer = slots["momentum_buffer"] if self.momentum else None
        grad = decayed_gradient(param, grad, self.weight_decay)
        change = np.empty_like(grad)
        if buffer is not None:
            np.multiply(buffer, self.momentum, out=buffer)
            np.add(buffer, grad, out=buffer)
            if self.nesterov:
                np.multiply(buffer, self.momentum, out=change)
                grad = np.add(grad, change, out=change)
            else:
                grad = buffer
        np.multiply(grad, lr, out=change)
        np.subtract(param, change, out=param)


class Adagrad(Optimizer):
    """Adagrad, as torch.optim.Adagrad (with lr_decay 0; a schedule does that here).

        g = grad + weight_decay * param
        s = s + g^2                             (s starts at initial_accumulator)
        param = param - lr * g / (sqrt(s) + eps)

    Arguments:
        lr: learning rate, a number >= 0 or a schedule.
        eps: >= 0, added to the denominator.
        initial_accumulator: >= 0, the initial s; TensorFlow's default is 0.1.
        weight_decay: >= 0, factor of the L2 penalty.
        row_wise: keep one s for each row (the last axis), which grows by the mean of g^2 over the row. An embedding
            table then has one number of state for each vector.

    Slots: "sum" (s), with the shape of the parameter; with row_wise the last axis has length 1.

    Raises InputError: a hyper-parameter is out of range.

    >>> params = [np.array([1.0, 2.0])]
    >>> optimizer = Adagrad(lr=0.1)
    >>> optimizer.step(params, [np.array([3.0, -0.5])])
    >>> print(params)
    [array([0.9, 2.1])]

    J. Duchi, E. Hazan, Y. Singer: Adaptive subgradient methods for online learning and stochastic optimization.
    JMLR 12, 2011.
    """

    elementwise = True

    def __init__(
        self,
        lr: float | Schedule = 0.01,
        eps: float = 1e-10,
        initial_accumulator: float = 0.0,
        weight_decay: float = 0.0,
        row_wise: bool = False,
    ) -> None:
        super().__init__(lr)
        self.eps = non_negative("Adagrad", "eps", eps)
        self.initial_accumulator = non_negative("Adagrad", "initial_accumulator", initial_accumulator)
        self.weight_decay = non_negative("Adagrad", "weight_decay", weight_decay)
        self.row_wise = boolean("Adagrad: row_wise", row_wise)

    def slots(self, param: Array) -> Slots:
        if self.row_wise and param.ndim:
            param = param[..., :1]
        return {"sum": np.full_like(param, self.initial_accumulator, dtype=compute_dtype(param))}

    def kernel(self, lr: float, step: int) -> Kernel:
        rule = "row_wise_adagrad" if self.row_wise else "adagrad"
        return Kernel(rule, ("sum",), (lr, self.eps, self.weight_decay))

    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        if not self.row_wise and fused_by(Adagrad.kernel(self, lr, step), param, grad, slots):
            return
        total = slots["sum"]
        grad = decayed_gradient(param, grad, self.weight_decay)
        change = root = np.empty_like(grad)
        if self.row_wise and param.ndim:
            root = np.empty_like(total)
            np.divide(sum_of_squares(grad), max(param.shape[-1], 1), out=root)
            np.add(total, root, out=total)
        else:
            np.multiply(grad, grad, out=change)
            np.add(total, change, out=total)
        np.sqrt(total, out=root)
        np.add(root, self.eps, out=root)
        np.divide(grad, root, out=change)
        np.multiply(change, lr, out=change)
        np.subtract(param, change, out=param)


class RMSProp(Optimizer):
    """RMSProp, as torch.optim.RMSprop (`alpha` there is `decay` here, as in TensorFlow and optax).

        g = grad + weight_decay * param
        s = decay * s + (1 - decay) * g^2       (s, a and b start at 0)
        a = decay * a + (1 - decay) * g         (only centered; else a = 0)
        d = g / (sqrt(s - a^2) + eps)
        b = momentum * b + d                    (without momentum b = d)
        param = param - lr * b

    A variance s - a^2 that is negative by rounding counts as 0; torch returns NaN.

    Arguments:
        lr: learning rate, a number >= 0 or a schedule.
        decay: in [0, 1), decay rate of the averages.
        eps: >= 0, added to the denominator, outside the square root.
        momentum: in [0, 1).
        centered: divide by the standard deviation instead of the root mean square.
        weight_decay: >= 0, factor of the L2 penalty.

    Slots: "square_avg" (s), if centered "grad_avg" (a), with momentum "momentum_buffer" (b), all with the shape of the
    parameter.

    Raises InputError: a hyper-parameter is out of range.

    >>> params = [np.array([1.0, 2.0])]
    >>> optimizer = RMSProp(lr=0.1, decay=0.75)
    >>> optimizer.step(params, [np.array([3.0, -0.5])])
    >>> print(np.round(params[0], 6))
    [0.8 2.2]

    T. Tieleman, G. Hinton: Lecture 6.5, RMSProp. COURSERA: Neural networks for machine learning, 2012.
    Centered: A. Graves: Generating sequences with recurrent neural networks. arXiv:1308.0850, 2013.
    """

    elementwise = True

    def __init__(
        self,
        lr: float | Schedule = 0.01,
        decay: float = 0.99,
        eps: float = 1e-8,
        momentum: float = 0.0,
        centered: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(lr)
        self.decay = fraction("RMSProp", "decay", decay)
        self.eps = non_negative("RMSProp", "eps", eps)
        self.momentum = fraction("RMSProp", "momentum", momentum)
        self.centered = bool(centered)
        self.weight_decay = non_negative("RMSProp", "weight_decay", weight_decay)

    def slots(self, param: Array) -> Slots:
        names = ["square_avg"] + ["grad_avg"] * self.centered + ["momentum_buffer"] * (self.momentum > 0.0)
        return {name: np.zeros_like(param, dtype=compute_dtype(param)) for name in names}

    def kernel(self, lr: float, step: int) -> Kernel:
        names = "square_avg", "grad_avg" if self.centered else None, "momentum_buffer" if self.momentum else None
        return Kernel("rmsprop", names, (lr, self.decay, self.eps, self.momentum, self.weight_decay))

    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        if fused_by(RMSProp.kernel(self, lr, step), param, grad, slots):
            return
        square_avg = slots["square_avg"]
        grad_avg = slots["grad_avg"] if self.centered else None
        buffer = slots["momentum_buffer"] if self.momentum else None
        grad = decayed_gradient(param, grad, self.weight_decay)
        change = np.multiply(grad, grad, out=np.empty_like(grad))
        fold_in(square_avg, change, self.decay, scratch=change)
        if grad_avg is not None:
            fold_in(grad_avg, grad, self.decay, scratch=change)
            np.multiply(grad_avg, grad_avg, out=change)
            np.subtract(square_avg, change, out=change)
            np.maximum(change, 0.0, out=change)
            np.sqrt(change, out=change)
        else:
            np.sqrt(square_avg, out=change)
        np.add(change, self.eps, out=change)
        np.divide(grad, change, out=change)
        if buffer is not None:
            np.multiply(buffer, self.momentum, out=buffer)
            np.add(buffer, change, out=buffer)
            np.multiply(buffer, lr, out=change)
        else:
            np.multiply(change, lr, out=change)
        np.subtract(param, change, out=param)


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

    Raises InputError: a hyper-parameter is out of range.

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

    def kernel(self, lr: float, step: int) -> Kernel:
        return Kernel("adam", ("exp_avg", "exp_avg_sq"), (*_corrected(self, lr, step), self.weight_decay))

    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        kernel = Adam.kernel(self, lr, step)
        if fused_by(kernel, param, grad, slots):
            return
        grad = decayed_gradient(param, grad, self.weight_decay)
        np.subtract(param, _change(grad, slots, *kernel.numbers[:5]), out=param)


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

    def kernel(self, lr: float, step: int) -> Kernel:
        return Kernel("adamw", ("exp_avg", "exp_avg_sq"), (*_corrected(self, lr, step), lr * self.weight_decay))

    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        kernel = AdamW.kernel(self, lr, step)
        if fused_by(kernel, param, grad, slots):
            return
        *numbers, shrinkage = kernel.numbers
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
