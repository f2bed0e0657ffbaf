"""RMSProp: gradients divided by their moving root mean square; optionally centered and with momentum."""

import numpy as np

from allred.arrays import Array
from allred.optim.base import Optimizer, Slots
from allred.optim.schedules import Schedule
from allred.optim.tensors import compute_dtype, decayed_gradient, fold_in, fused
from allred.validators import fraction, non_negative


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

    Raises:
        InputError: a hyper-parameter is out of range.

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

    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        square_avg = slots["square_avg"]
        grad_avg = slots["grad_avg"] if self.centered else None
        buffer = slots["momentum_buffer"] if self.momentum else None
        numbers = (lr, self.decay, self.eps, self.momentum, self.weight_decay)
        if fused("rmsprop", (param, grad, square_avg, grad_avg, buffer), numbers):
            return
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
