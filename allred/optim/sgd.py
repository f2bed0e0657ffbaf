"""Stochastic gradient descent, optionally with momentum or Nesterov momentum."""

import numpy as np

from allred.arrays import Array
from allred.errors import InputError
from allred.optim.base import Optimizer, Slots
from allred.optim.schedules import Schedule
from allred.optim.tensors import compute_dtype, decayed_gradient, fused
from allred.validators import fraction, non_negative


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

    Raises:
        InputError: a hyper-parameter is out of range, or nesterov without momentum.

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

    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        buffer = slots["momentum_buffer"] if self.momentum else None
        numbers = (lr, self.momentum, float(self.nesterov), self.weight_decay)
        if fused("sgd", (param, grad, buffer), numbers):
            return
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
