"""Adagrad: the learning rate of each element decreases with the sum of its squared gradients."""

import numpy as np

from allred.arrays import Array
from allred.optim.base import Optimizer, Slots
from allred.optim.schedules import Schedule
from allred.optim.tensors import compute_dtype, decayed_gradient, fused
from allred.validators import non_negative


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

    Slots: "sum" (s), with the shape of the parameter.

    Raises:
        InputError: a hyper-parameter is out of range.

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
    ) -> None:
        super().__init__(lr)
        self.eps = non_negative("Adagrad", "eps", eps)
        self.initial_accumulator = non_negative("Adagrad", "initial_accumulator", initial_accumulator)
        self.weight_decay = non_negative("Adagrad", "weight_decay", weight_decay)

    def slots(self, param: Array) -> Slots:
        return {"sum": np.full_like(param, self.initial_accumulator, dtype=compute_dtype(param))}

    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        total = slots["sum"]
        if fused("adagrad", (param, grad, total), (lr, self.eps, self.weight_decay)):
            return
        grad = decayed_gradient(param, grad, self.weight_decay)
        change = np.multiply(grad, grad, out=np.empty_like(grad))
        np.add(total, change, out=total)
        np.sqrt(total, out=change)
        np.add(change, self.eps, out=change)
        np.divide(grad, change, out=change)
        np.multiply(change, lr, out=change)
        np.subtract(param, change, out=param)
